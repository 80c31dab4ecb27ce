"""Cancelling at every stage frees everything and disturbs nobody."""

from __future__ import annotations

import random
import time

import pytest

from hydra_engine.errors import RequestAborted
from tests import faults
from tests.engine.conftest import EngineFactory, assert_at_rest, picture
from tests.engine.test_reuse import images_encoded
from tests.faults import set_fault

LONG = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(autouse=True)
def fault_points(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.enable(monkeypatch)


@pytest.mark.quick("while decoding")
@pytest.mark.parametrize(
    ("point", "wait_s"),
    [
        pytest.param(None, 0.0, id="at once"),
        pytest.param("vis.before_step", 0.15, id="while encoding"),
        pytest.param("eng.before_step", 0.15, id="before a language step", marks=pytest.mark.slow),
        pytest.param("eng.mid_step", 0.15, id="inside a language step", marks=pytest.mark.slow),
        pytest.param(None, None, id="while decoding"),
    ],
)
def test_cancel_frees_everything(make_engine: EngineFactory, point: str | None, wait_s: float | None) -> None:
    engine = make_engine()
    expected = engine.generate("neighbour", **LONG).token_ids
    if point is not None:
        set_fault(engine.frontend, point, "delay", "seconds=0.3 times=3")
    neighbour = engine.submit("neighbour", **LONG)
    doomed = engine.submit("doomed", [picture(1), picture(2)], **LONG)
    if wait_s is None:
        next(iter(doomed))
    else:
        time.sleep(wait_s)
    doomed.cancel()
    doomed.cancel()
    after = engine.submit("neighbour", **LONG)
    with pytest.raises(RequestAborted):
        doomed.result(30)
    assert neighbour.result(60).token_ids == after.result(60).token_ids == expected
    assert_at_rest(engine)
    if point == "vis.before_step":
        assert images_encoded(engine) == 0, "what nobody needs is not computed"


def test_a_cancel_that_overtakes_its_request_is_not_lost(make_engine: EngineFactory) -> None:
    """Request and cancel reach the engine's loop while it is busy with something else."""
    engine = make_engine()
    assert engine._loop is not None
    engine._loop.call_soon_threadsafe(time.sleep, 0.2)
    doomed = engine.submit("doomed", **LONG)
    doomed.cancel()
    with pytest.raises(RequestAborted):
        doomed.result(30)
    assert_at_rest(engine)


@pytest.mark.slow
def test_a_storm_of_cancels_leaves_nothing_behind(make_engine: EngineFactory) -> None:
    engine = make_engine(num_kv_blocks=96, max_model_len=300)
    rng = random.Random(5)
    handles = []
    for i in range(60):
        handles.append(engine.submit(f"request {i}", picture(i) if i % 2 else None, **(LONG | {"max_tokens": 60})))
        if rng.random() < 0.7:
            handles[rng.randrange(len(handles))].cancel()
        time.sleep(rng.random() * 0.01)
    ended = {"done": 0, "cancelled": 0}
    for handle in handles:
        try:
            assert len(handle.result(120).token_ids) == 60
            ended["done"] += 1
        except RequestAborted:
            ended["cancelled"] += 1
    assert ended["done"] and ended["cancelled"]
    assert_at_rest(engine)


def test_leaving_a_stream_early_cancels_it(make_engine: EngineFactory) -> None:
    engine = make_engine()
    for index, _ in enumerate(engine.stream("Hello", **LONG)):
        if index == 2:
            break
    assert_at_rest(engine)
