"""Roles that change while requests run, and an engine that is closed while they do."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from bench.mixed import Outcome
from hydra_engine import Engine
from hydra_engine.errors import ConfigError, EngineClosed
from tests.campaigns.restless import RestlessEngine
from tests.engine.faulty import OPTIONS, Rig, alive, ended, few_requests, right_answers, until

REQUESTS = few_requests()


@pytest.fixture(scope="module")
def golden(tiny_model: Path) -> list[Outcome]:
    return right_answers(tiny_model, REQUESTS)


def roles(engine: Engine) -> list[str]:
    return [state.role for state in engine.instances()]


@pytest.mark.slow
def test_roles_change_under_load_and_back(tiny_model: Path, golden: list[Outcome]) -> None:
    with RestlessEngine(tiny_model, topology="2EPD", **OPTIONS) as engine:
        rig = Rig(engine, REQUESTS, golden)
        over, wrong = threading.Event(), list[str]()

        def load() -> None:
            while not over.is_set():
                wrong.extend(rig.serve())

        clients = [threading.Thread(target=load) for _ in range(2)]
        for client in clients:
            client.start()
        try:
            for topology, expected in (
                ("E+PD", ["E", "PD"]),
                ("P+ED", ["P", "ED"]),
                ("EP+D", ["EP", "D"]),
                ("2EPD", ["EPD", "EPD"]),
            ):
                engine.set_topology(topology)
                assert roles(engine) == expected
                pulled = total_pulled(engine)
                if topology != "2EPD":
                    until(lambda before=pulled: total_pulled(engine) > before, f"blocks that move in {topology}")
        finally:
            over.set()
            for client in clients:
                client.join()
        assert wrong == []
        rig.settle()
        rig.kill(rig.pid("epd0"))
        rig.settle()
        assert roles(engine) == ["EPD", "EPD"]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 0])
def test_a_survivor_with_the_weights_stands_in(tiny_model: Path, golden: list[Outcome], lost: int) -> None:
    """Clients do not see that the instance is lost, and the roles are the old ones afterwards."""
    with RestlessEngine(tiny_model, topology="2EPD", **{**OPTIONS, "recovery_s": 0.2}) as engine:
        engine.set_topology("EP+D")
        rig = Rig(engine, REQUESTS, golden)
        for _ in range(2):
            handles = rig.submit()
            until(lambda started=handles: rig.running(started), "tokens")
            rig.kill(rig.pid(f"epd{lost}"))
            assert rig.differences(handles) == [] and rig.serve() == []
            until(lambda: rig.whole() and roles(engine) == ["EP", "D"], "the stage is given back")
        assert rig.serve() == []
        rig.settle()


def total_pulled(engine: Engine) -> int:
    return sum(status.transfer.pulled for status in engine.statuses().values())


@pytest.mark.slow
def test_a_switch_outlives_a_death_and_what_cannot_be_is_refused(tiny_model: Path, golden: list[Outcome]) -> None:
    with RestlessEngine(tiny_model, topology="EP+PD", **OPTIONS) as engine:
        rig = Rig(engine, REQUESTS, golden)
        for topology, words in (
            ("P+ED", "cannot serve ED"),
            ("EPD", "2 are running"),
            ("E+P", "no instance for stage D"),
        ):
            with pytest.raises(ConfigError, match=words):
                engine.set_topology(topology)
        assert roles(engine) == ["EP", "PD"]
        engine.set_topology("E+PD")
        assert rig.serve() == []
        rig.kill(rig.pid("ep0"))
        assert rig.serve() == []
        rig.settle()
        assert roles(engine) == ["E", "PD"]


@pytest.mark.slow
def test_closing_while_requests_run_tells_everybody_and_leaves_nothing(tiny_model: Path, golden: list[Outcome]) -> None:
    threads = set(threading.enumerate())
    engine = RestlessEngine(tiny_model, topology="E+P+D", **OPTIONS)
    rig = Rig(engine, REQUESTS, golden)
    pids = [rig.pid(state.name) for state in engine.instances()]
    handles = [handle for _ in range(8) for handle in rig.submit()]
    until(lambda: rig.running(handles), "the middle of the load")
    engine.close()
    answers = [ended(handle) for _, handle in handles]
    assert any(isinstance(answer, EngineClosed) for answer in answers)
    failed = [answer for answer in answers if isinstance(answer, Exception)]
    assert all(isinstance(answer, EngineClosed) for answer in failed), failed
    assert not any(map(alive, pids))
    deadline = time.monotonic() + 5.0
    while left := set(threading.enumerate()) - threads:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
    with pytest.raises(EngineClosed):
        engine.submit("Hello")
