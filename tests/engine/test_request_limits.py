"""The embedded engine's ways to give limits and priority: as options of the engine and of one request."""

from __future__ import annotations

import pytest

from hydra_engine import Engine
from hydra_engine.core.request import Slo
from hydra_engine.errors import ConfigError, InvalidRequest
from tests.engine.conftest import EngineFactory
from tests.engine.faulty import until


@pytest.mark.quick("40ms")
@pytest.mark.parametrize("limit", ["40ms", 0.04])
def test_limits_of_the_engine_are_numbers_or_text(make_engine: EngineFactory, limit: str | float) -> None:
    engine = make_engine(tpot_slo=limit, ttft_slo="1s")
    assert (engine.config.scheduler.tpot_slo, engine.config.scheduler.ttft_slo) == (0.04, 1.0)
    (instance,) = engine.frontend._dispatcher.instances.values()
    until(lambda: instance.pace.is_measured, "it has measured step times for its limits")
    assert instance.status is not None and instance.status.speeds.decode and not instance.status.language_steps


def test_a_wrong_limit_is_found_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="tpot_slo"):
        Engine("no-such-folder", tpot_slo="soon")


def test_a_request_carries_its_limits_else_the_engines_and_its_priority(make_engine: EngineFactory) -> None:
    engine = make_engine(tpot_slo=0.04)
    for own, slo in ((Slo(2.0, 0.5), Slo(2.0, 0.5)), (Slo(ttft_s=2.0), Slo(2.0, 0.04))):
        handle = engine.submit("Go on", temperature=0, max_tokens=300, ignore_eos=True, slo=own, priority=-7)
        next(iter(handle))  # it runs
        (active,) = (in_flight.active for in_flight in engine.frontend._dispatcher.requests.values())
        assert (active.request.slo, active.request.priority) == (slo, -7)
        handle.cancel()
        until(lambda: not engine.frontend._dispatcher.requests, "the request has ended")


def test_wrong_ones_are_refused_wherever_they_are_given(engine: Engine) -> None:
    for call in (
        lambda: engine.generate("Hello", priority=1 << 31),
        lambda: engine.chat([{"role": "user", "content": "Hello"}], slo=Slo(tpot_s=0)),
        lambda: engine.submit("Hello", priority="first").result(),
    ):
        with pytest.raises(InvalidRequest, match=r"priority|slo\.tpot_s"):
            call()
