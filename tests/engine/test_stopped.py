"""Instances that stand still for a while: nobody gets a wrong or a doubled token, then or when they wake."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.mixed import Outcome
from hydra_engine.core.instances import Condition
from tests import faults
from tests.campaigns.restless import RestlessEngine
from tests.engine.faulty import OPTIONS, Rig, few_requests, right_answers, until

REQUESTS = few_requests()
SUSPECT_S, FENCE_S = 1.0, 3.0


@pytest.fixture(scope="module")
def golden(tiny_model: Path) -> list[Outcome]:
    return right_answers(tiny_model, REQUESTS)


@pytest.fixture(scope="module")
def whole_rig(tiny_model: Path, golden: list[Outcome]) -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as patch:
        faults.enable(patch)
        options = OPTIONS | {"suspect_s": SUSPECT_S, "fence_s": FENCE_S}
        with RestlessEngine(tiny_model, topology="E+P+D", **options) as engine:
            yield Rig(engine, REQUESTS, golden)


@pytest.fixture
def rig(whole_rig: Rig) -> Iterator[Rig]:
    slow_down(whole_rig)
    yield whole_rig
    whole_rig.settle()


def slow_down(rig: Rig) -> None:
    """Delays steps, so that the load is in the middle of everything when an instance is stopped."""
    for state in rig.engine.instances():
        rig.arm(state.name, "eng.before_step", "delay", "seconds=0.02")


def stop_amid_load(rig: Rig, name: str, seconds: float = math.inf) -> list[str]:
    """Stops the instance while requests are everywhere, and wakes it after that time. What went wrong with them."""
    pid = rig.pid(name)
    handles = rig.submit()
    until(lambda: rig.running(handles), "the middle of the load")
    rig.signal(name, signal.SIGSTOP)
    if math.isinf(seconds):
        return rig.differences(handles)
    waker = threading.Timer(seconds, rig.wake, [name, pid])
    waker.start()
    try:
        return rig.differences(handles)
    finally:
        waker.join()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["e0", "p0", "d0"])
def test_a_short_stop_is_a_delay(rig: Rig, name: str) -> None:
    before = rig.state(name)
    assert stop_amid_load(rig, name, 0.6) == []
    rig.settle()
    assert not rig.died(name, before)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["e0", *(pytest.param(name, marks=pytest.mark.slow) for name in ("p0", "d0"))])
def test_an_instance_that_wakes_before_it_is_killed_does_no_harm(rig: Rig, name: str) -> None:
    before = rig.state(name)
    assert stop_amid_load(rig, name, 2.0) == []
    rig.settle()
    assert not rig.died(name, before)
    assert rig.serve() == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["e0", "p0", "d0"])
def test_an_instance_that_does_not_wake_is_killed_and_begins_anew(rig: Rig, name: str) -> None:
    before, began = rig.state(name), time.monotonic()
    conditions: set[Condition] = set()
    watcher = threading.Thread(target=lambda: until(lambda: seen(rig, name, conditions), "its death"))
    watcher.start()
    assert stop_amid_load(rig, name) == []
    watcher.join()
    assert rig.died(name, before) and time.monotonic() - began >= FENCE_S
    assert Condition.SILENT in conditions


def seen(rig: Rig, name: str, conditions: set[Condition]) -> bool:
    """Keeps in what condition it was; True once it begins anew."""
    conditions.add(rig.state(name).condition)
    return Condition.STARTING in conditions


@pytest.mark.slow
def test_what_a_stopped_target_does_not_fetch_is_taken_back(
    tiny_model: Path, golden: list[Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the lease ends the waiting here: nobody suspects anybody. The target finds out when it wakes."""
    faults.enable(monkeypatch)
    patient = {"suspect_s": 60.0, "fence_s": 120.0, "lease_s": 1.0}
    with RestlessEngine(tiny_model, topology="EP+D", **(OPTIONS | patient)) as engine:
        rig = Rig(engine, REQUESTS, golden)
        rig.signal("d0", signal.SIGSTOP)
        handles = rig.submit()
        until(lambda: engine.statuses()["ep0"].transfer.expired > 0, "an offer that is taken back")
        rig.signal("d0", signal.SIGCONT)
        assert rig.differences(handles) == []
        rig.settle()
        assert all(state.restarts == 0 for state in engine.instances())
