"""The two lanes step independently: text goes on while pictures are encoded, and pictures are encoded beside text."""

from __future__ import annotations

import time

import pytest

from tests import faults
from tests.engine.conftest import EngineFactory, picture
from tests.faults import set_fault

TEXT = {"temperature": 0, "max_tokens": 100, "ignore_eos": True}


@pytest.fixture(autouse=True)
def fault_points(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.enable(monkeypatch)


@pytest.mark.slow
def test_text_streams_go_on_while_a_long_encode_runs(make_engine: EngineFactory) -> None:
    engine = make_engine()
    set_fault(engine.frontend, "vis.before_step", "delay", "seconds=1.5 times=1")
    pictured = engine.submit("What?", picture(1), temperature=0, max_tokens=2, ignore_eos=True)
    while (status := engine.stats()) is None or not status.image_blocks_used:
        time.sleep(0.01)
    texts = [engine.submit(f"story {i}", **TEXT) for i in range(3)]
    results = [handle.result(60) for handle in texts]
    assert not pictured.done, "the encode ended before three whole text requests did"
    encode = next(s for s in pictured.result(60).timeline if s.stage == "encode")
    assert encode.end_s - encode.start_s >= 1.5
    assert all(len(r.token_ids) == 100 for r in results)


@pytest.mark.slow
def test_text_in_the_queue_overtakes_a_picture_that_is_being_encoded(make_engine: EngineFactory) -> None:
    engine = make_engine()
    set_fault(engine.frontend, "vis.before_step", "delay", "seconds=1 times=1")
    pictured = engine.submit("What?", picture(1), temperature=0, max_tokens=2, ignore_eos=True)
    text = engine.submit("Hi", temperature=0, max_tokens=2, ignore_eos=True)
    text.result(60)
    assert not pictured.done
    pictured.result(60)


@pytest.mark.slow
def test_steady_prefills_do_not_postpone_an_encode(make_engine: EngineFactory) -> None:
    """The bound: an image waits for the images before it and for the vision step that runs, never for prefills."""
    engine = make_engine(token_budget=16, max_num_seqs=8)
    set_fault(engine.frontend, "eng.before_step", "delay", "seconds=0.05")
    prefills = [engine.submit("a long prompt " * 20, temperature=0, max_tokens=1) for _ in range(12)]
    pictured = engine.submit("What?", picture(1), temperature=0, max_tokens=1, ignore_eos=True)
    last_prefill = max(handle.result(120).metrics.e2e_s for handle in prefills)
    result = pictured.result(120)
    encode_end = max(s.end_s for s in result.timeline if s.stage == "encode")
    assert encode_end < last_prefill / 4, "the encode waited for prefills that took many steps"


def test_pictures_of_several_requests_share_a_vision_step(make_engine: EngineFactory) -> None:
    engine = make_engine(image_budget=10_000)
    set_fault(engine.frontend, "vis.before_step", "delay", "seconds=0.3 times=1")
    handles = [engine.submit("What?", picture(i), temperature=0, max_tokens=1) for i in range(5)]
    batches = [max(s.batch for s in h.result(60).timeline if s.stage == "encode") for h in handles]
    assert max(batches) >= 3  # five pictures in two steps
