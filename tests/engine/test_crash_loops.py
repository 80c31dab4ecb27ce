"""Instances that die again and again, and requests that kill whatever works on them: how far that reaches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.mixed import Outcome
from hydra_engine import Engine
from hydra_engine.cluster.member import InstanceLink, Pace
from hydra_engine.core.instances import Condition
from hydra_engine.errors import HydraError
from tests import faults
from tests.campaigns.restless import RestlessEngine
from tests.engine.faulty import OPTIONS, Rig, ended, few_requests, outcome_of, right_answers, until
from tests.faults import SetFault, set_fault

REQUESTS = few_requests()
TEXT = [index for index, request in enumerate(REQUESTS) if not request.pictures]
PICTURES = [index for index, request in enumerate(REQUESTS) if request.pictures]
POISON = 200  # a token that no text has


class Impatient(RestlessEngine):
    """Starts again without waiting, and gives up as early as a real one."""

    pace = Pace(backoff_s=(0.0,))


@pytest.fixture(scope="module")
def golden(tiny_model: Path) -> list[Outcome]:
    return right_answers(tiny_model, REQUESTS)


@contextmanager
def killer(rig: Rig, name: str) -> Iterator[None]:
    """Kills it whenever it runs."""
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.005):
            state = rig.state(name)
            if state.pid is not None:
                rig.kill(state.pid)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def drive_to_failure(rig: Rig, name: str) -> None:
    with killer(rig, name):
        until(lambda: rig.state(name).condition is Condition.FAILED, f"{name} is given up")
    state = rig.state(name)
    assert state.restarts == 1 + Pace().max_failed_starts and state.pid is None
    assert "5 starts in a row have failed" in state.reason


@pytest.mark.slow
def test_the_other_one_serves_on(tiny_model: Path, golden: list[Outcome]) -> None:
    with Impatient(tiny_model, topology="2EPD", **OPTIONS) as engine:
        rig = Rig(engine, REQUESTS, golden)
        handles = rig.submit()
        drive_to_failure(rig, "epd1")
        assert rig.differences(handles) == []
        assert rig.serve() == []
        assert engine.health() == (True, "ok") and not engine.lost
        rig.assert_at_rest()


@pytest.mark.slow
def test_without_an_encoder_text_is_served_and_pictures_fail_at_once(tiny_model: Path, golden: list[Outcome]) -> None:
    with Impatient(tiny_model, topology="E+P+D", **OPTIONS) as engine:
        rig = Rig(engine, REQUESTS, golden)
        handles = rig.submit()
        drive_to_failure(rig, "e0")
        for index, handle in handles:  # those that waited for it get an error, the others have ended
            answer = ended(handle)
            right = not isinstance(answer, HydraError) and outcome_of(answer) == golden[index]
            assert right or (answer.code == "instance_lost" and index in PICTURES), answer
        assert rig.differences(rig.submit(TEXT)) == []
        for answer in rig.answers(rig.submit(PICTURES)):
            assert isinstance(answer, HydraError) and answer.code == "instance_lost"
            assert "every instance that could serve this request has failed" in answer.message
        assert engine.health() == (False, "instance_lost") and not engine.lost
        rig.assert_at_rest()


# ---- poison


def poison(engine: Engine, point: str) -> None:
    """Makes every instance die of the token, also those that are started later."""
    frontend = engine.frontend
    on_up = frontend.on_up

    def armed(link: InstanceLink) -> None:
        link.end.send([SetFault(point, "kill", f"token={POISON}")])
        on_up(link)

    frontend.on_up = armed  # type: ignore[method-assign]
    set_fault(frontend, point, "kill", f"token={POISON}")


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "point"), [("2EPD", "eng.mid_step"), ("EP+D", "dst.before_ack")])
def test_a_request_that_kills_takes_nobody_with_it(
    tiny_model: Path, golden: list[Outcome], monkeypatch: pytest.MonkeyPatch, topology: str, point: str
) -> None:
    faults.enable(monkeypatch)
    with RestlessEngine(tiny_model, topology=topology, **OPTIONS) as engine:
        rig = Rig(engine, REQUESTS, golden)
        poison(engine, point)
        bystanders = rig.submit()
        killer = engine.submit([40, 41, POISON, 42], max_tokens=4, ignore_eos=True)
        answer = ended(killer)
        assert isinstance(answer, HydraError) and answer.code == "request_poisoned", answer
        assert "3 instances ended while they worked on this request" in answer.message
        assert rig.differences(bystanders) == []
        assert sum(state.restarts for state in engine.instances()) == engine.config.cluster.max_attempts
        rig.settle()
