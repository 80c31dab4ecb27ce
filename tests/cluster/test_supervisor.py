"""The supervisor over real processes, which compute nothing: start, death, silence, restart, end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hydra_engine.cluster import member
from hydra_engine.cluster.children import ProcessChild, is_late
from hydra_engine.cluster.member import PACE, Pace, StartProgress
from hydra_engine.cluster.spawn import spawn
from hydra_engine.cluster.supervisor import Supervisor
from hydra_engine.config import ClusterConfig, EngineConfig
from hydra_engine.core.instances import Condition, InstanceState, Role
from hydra_engine.core.messages import NeedImages
from hydra_engine.core.reports import LedgerReport
from hydra_engine.errors import ConfigError, EngineClosed
from tests.cluster import stand_in
from tests.cluster.conftest import alive, open_descriptors, wait_until
from tests.cluster.recorder import Recorder
from tests.cluster.stand_in import COMMAND
from tests.faults import SetFault

pytestmark = pytest.mark.usefixtures("no_leak")

QUICK = replace(PACE, backoff_s=(0.0, 0.05), reconnect_s=0.1, exit_grace_s=5.0)
Make = Callable[..., Supervisor]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Supervisors of stand-ins; when they are stopped no process of theirs is left."""
    made: list[Supervisor] = []

    def supervisor(topology: str, pace: Pace = QUICK, **cluster: Any) -> Supervisor:
        config = EngineConfig(topology=topology, device="cpu", cluster=ClusterConfig(**cluster))
        made.append(Supervisor(config, processes=True, pace=pace, command=COMMAND))
        return made[-1]

    yield supervisor
    for one in made:
        pids = [state.pid for state in one.states()]
        await one.stop()
        assert not [pid for pid in pids if pid is not None and alive(pid)]
    await asyncio.sleep(0)  # transports close


def state_of(supervisor: Supervisor, name: str) -> InstanceState:
    return next(state for state in supervisor.states() if state.name == name)


def pid_of(supervisor: Supervisor, name: str) -> int:
    pid = state_of(supervisor, name).pid
    assert pid is not None
    return pid


async def test_all_come_up_and_can_talk_to_each_other(make: Make) -> None:
    supervisor, recorder = make("E@cpu+P+D@cuda:3"), Recorder()
    links = await recorder.start(supervisor)
    assert [(link.name, link.role, link.device) for link in links] == [
        ("e0", Role.E, "cpu"),
        ("p0", Role.P, "cpu"),
        ("d0", Role.D, "cuda:3"),
    ]
    assert len({link.incarnation for link in links}) == 3
    assert recorder.pairs == {("e0", "p0"), ("e0", "d0"), ("p0", "d0")}
    assert recorder.loaded == {"e0": 1, "p0": 1, "d0": 1}
    links[0].end.send([SetFault("", "offer", "d0")])
    await recorder.until(lambda: recorder.messages.get("d0"))
    assert {name: said for name, said in recorder.messages.items() if said} == {"d0": [NeedImages(77, ())]}
    for link, state in zip(links, supervisor.states(), strict=True):
        assert (state.condition, state.pid, state.incarnation) == (Condition.READY, link.pid, link.incarnation)
        assert state.role == state.loaded == link.role.letters == link.summary.role and state.restarts == 0
    await recorder.until(lambda: all(state.status is not None for state in supervisor.states()))
    await supervisor.stop()
    assert [state.condition for state in supervisor.states()] == [Condition.STOPPED] * 3
    assert not [link for link in links if link.pid is not None and alive(link.pid)]


async def test_who_is_killed_is_reported_started_again_and_connected_again(make: Make) -> None:
    supervisor, recorder = make("2E+PD"), Recorder()
    links = await recorder.start(supervisor)
    before = open_descriptors()
    for name in ("e0", "pd0", "e0"):
        old = recorder.links[name]
        told = len(recorder.events)
        killed_s = time.monotonic()
        os.kill(pid_of(supervisor, name), signal.SIGKILL)
        await recorder.until(lambda n=name, t=told: ("up", n) in recorder.events[t:] and len(recorder.pairs) == 3)
        new = recorder.events[told:]
        down = new.index(("down", name, "was killed by SIGKILL", "restarts"))
        assert recorder.times[told + down] - killed_s < 2.0
        assert [event[0] for event in new[:down]] == ["unpair", "unpair"]
        assert [event[0] for event in new[down + 1 :]] == ["up", "pair", "pair"]
        assert recorder.links[name].incarnation > old.incarnation and recorder.links[name].pid != old.pid
        assert state_of(supervisor, name).incarnation == recorder.links[name].incarnation
        old.end.send([SetFault("", "exit")])  # harmless: that life is over
    assert [state.restarts for state in supervisor.states()] == [2, 0, 1]
    assert open_descriptors() == before
    assert {link.name for link in links} == set(recorder.links)


async def test_an_instance_that_ends_by_itself_is_a_death_with_its_exit_code(make: Make) -> None:
    supervisor, recorder = make("EP+D"), Recorder()
    links = await recorder.start(supervisor)
    links[1].end.send([SetFault("", "exit")])
    await recorder.until(lambda: len(recorder.of("up")) == 3)
    assert recorder.of("down") == [("down", "d0", "ended with exit code 7", "restarts")]


async def test_a_stopped_instance_is_silent_until_it_is_heard_again(make: Make) -> None:
    supervisor, recorder = make("E+PD", suspect_s=0.4, fence_s=60.0), Recorder()
    await supervisor.start(recorder)
    pid = pid_of(supervisor, "e0")
    os.kill(pid, signal.SIGSTOP)
    await recorder.until(lambda: recorder.of("silent"))
    assert state_of(supervisor, "e0").condition is Condition.SILENT and state_of(supervisor, "e0").reason
    os.kill(pid, signal.SIGCONT)
    await recorder.until(lambda: recorder.of("heard"))
    assert recorder.events[-2:] == [("silent", "e0"), ("heard", "e0")]
    assert state_of(supervisor, "e0").condition is Condition.READY and state_of(supervisor, "e0").reason == ""
    assert recorder.pairs == {("e0", "pd0")} and not recorder.of("down")


async def test_an_instance_that_stays_silent_is_killed_and_started_again(make: Make) -> None:
    supervisor, recorder = make("E+PD", suspect_s=0.4, fence_s=0.8), Recorder()
    await supervisor.start(recorder)
    pid = pid_of(supervisor, "e0")
    os.kill(pid, signal.SIGSTOP)
    await recorder.until(lambda: len(recorder.of("pair")) == 2)
    assert [event for event in recorder.events if event[0] in ("silent", "unpair", "down")] == [
        ("silent", "e0"),
        ("unpair", "e0", "pd0"),
        ("down", "e0", "was silent for 0.8 s and was killed", "restarts"),
    ]
    assert not alive(pid)


@pytest.mark.slow
async def test_a_pause_of_the_frontend_is_nobodys_silence(make: Make) -> None:
    """The frontend's loop hangs for longer than anyone may be silent, while an instance is stopped: nothing of that
    time counts, and what follows it does."""
    supervisor, recorder = make("E+PD", suspect_s=0.6, fence_s=1.2), Recorder()
    await supervisor.start(recorder)
    told = len(recorder.events)
    os.kill(pid_of(supervisor, "e0"), signal.SIGSTOP)
    time.sleep(1.5)  # noqa: ASYNC251
    woke_s = time.monotonic()
    await recorder.until(lambda: len(recorder.events) > told)
    assert recorder.events[told] == ("silent", "e0")
    assert recorder.times[told] - woke_s > 0.5
    os.kill(pid_of(supervisor, "e0"), signal.SIGCONT)
    await recorder.until(lambda: recorder.of("heard"))


@pytest.mark.slow
async def test_a_crash_loop_ends_and_the_others_serve(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor, recorder = make("E+PD"), Recorder()
    await supervisor.start(recorder)
    monkeypatch.setenv("STAND_IN_E0", "exit")
    supervisor.kill("e0")
    await recorder.until(lambda: len(recorder.of("down", "e0")) == 6)
    downs = recorder.of("down", "e0")
    assert [down[3] for down in downs] == ["restarts"] * 5 + ["stays down"]
    assert downs[0][2] == "was killed by SIGKILL" and downs[1][2] == "ended with exit code 3"
    assert downs[-1][2] == "ended with exit code 3; 5 starts in a row have failed"
    state = state_of(supervisor, "e0")
    assert (state.condition, state.restarts, state.pid) == (Condition.FAILED, 6, None) and "exit code 3" in state.reason
    await asyncio.sleep(0.3)
    assert len(recorder.of("down")) == 6 and state_of(supervisor, "pd0").condition is Condition.READY
    with pytest.raises(KeyError):
        recorder.links["e0"]


async def test_what_an_instance_says_before_it_dies_is_the_reason(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor, recorder = make("E+PD", replace(QUICK, max_failed_starts=1)), Recorder()
    await supervisor.start(recorder)
    monkeypatch.setenv("STAND_IN_E0", "fail")
    supervisor.kill("e0")
    await recorder.until(lambda: len(recorder.of("down", "e0")) == 2)
    assert recorder.of("down", "e0")[1][2].startswith("the model is made of paper")


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [True, False])
async def test_an_instance_that_hangs_while_it_starts_is_killed_and_started_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    monkeypatch.setattr(StartProgress, "QUIET", 1e9 if stopped else 1)
    supervisor, recorder = make("E+PD"), Recorder()
    await supervisor.start(recorder)
    monkeypatch.setattr(member, "StartProgress", lambda fence_s, now: StartProgress(0.4, now))
    monkeypatch.setenv("STAND_IN_E0", "hang")
    supervisor.kill("e0")
    first = pid_of(supervisor, "e0")
    await recorder.until(lambda: (pid := state_of(supervisor, "e0").pid) is not None and pid != first)
    monkeypatch.delenv("STAND_IN_E0")
    if stopped:
        os.kill(pid_of(supervisor, "e0"), signal.SIGSTOP)
    await recorder.until(lambda: len(recorder.of("down", "e0")) == 2 and len(recorder.of("up")) == 3)
    said = "was stopped for 0.4 s" if stopped else "did nothing for 0.4 s"
    assert recorder.of("down", "e0")[1][2] == f"{said} while it started and was killed"


@pytest.mark.slow
async def test_an_instance_that_nobody_replaces_starts_at_once(make: Make) -> None:
    """The instance has died any number of times after it had served; or it waits when the last other one dies."""
    never = replace(QUICK, backoff_s=(0.0, 1e6))
    supervisor, recorder = make("2E+PD", never), Recorder()
    await supervisor.start(recorder)
    for number in range(3):
        supervisor.kill("pd0")
        await recorder.until(lambda n=number: len(recorder.of("up", "pd0")) == n + 2)
    for number in range(2):
        supervisor.kill("e0")
        await recorder.until(lambda n=number: len(recorder.of("down", "e0")) == n + 1)
        await recorder.until(lambda n=number: n == 1 or len(recorder.of("up", "e0")) == 2)
    assert state_of(supervisor, "e0").pid is None, "e1 does its work"
    supervisor.kill("e1")
    await recorder.until(lambda: len(recorder.of("up", "e0")) == 3 and len(recorder.of("up", "e1")) == 2)


@pytest.mark.slow
async def test_starts_wait_longer_after_each_death(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor, recorder = make("E+PD", replace(QUICK, backoff_s=(0.0, 0.2, 0.6), max_failed_starts=3)), Recorder()
    await supervisor.start(recorder)
    monkeypatch.setenv("STAND_IN_E0", "exit")
    supervisor.kill("e0")
    await recorder.until(lambda: len(recorder.of("down", "e0")) == 4)
    at = [t for t, event in zip(recorder.times, recorder.events, strict=True) if event[0] == "down"]
    assert at[2] - at[1] > 0.2 and at[3] - at[2] > 0.6


async def test_an_error_at_the_start_of_one_stops_all_and_names_it(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_P0", "fail")
    supervisor, recorder = make("E+P+D"), Recorder()
    with pytest.raises(ConfigError, match=r"^instance p0: the model is made of paper$") as caught:
        await supervisor.start(recorder)
    assert caught.value.param == "model"
    assert [state.condition for state in supervisor.states()] == [Condition.STOPPED] * 3
    assert not recorder.of("down")


async def test_an_instance_that_ends_at_the_start_without_a_word(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_D0", "exit")
    with pytest.raises(EngineClosed, match="instance d0 ended with exit code 3 while it started"):
        await make("E+P+D").start(Recorder())


async def test_the_error_of_a_single_instance_is_not_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_EPD0", "fail")
    with pytest.raises(ConfigError, match=r"^the model is made of paper$"):
        await make("EPD").start(Recorder())


async def test_a_single_instance_has_no_peers_and_starts_again(make: Make) -> None:
    supervisor, recorder = make("EPD"), Recorder()
    (link,) = await recorder.start(supervisor)
    assert link.name == "epd0" and not recorder.pairs
    supervisor.kill("epd0")
    await recorder.until(lambda: len(recorder.of("up")) == 2)


@pytest.mark.parametrize("dies", [True, False])
async def test_an_instance_on_a_thread_ends_for_good(monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    monkeypatch.setitem(sys.modules, "hydra_engine.instance.build", SimpleNamespace(run_instance=stand_in.run_instance))
    supervisor, recorder = Supervisor(EngineConfig(), processes=False, strict_channel=True), Recorder()
    (link,) = await recorder.start(supervisor)
    assert (link.name, link.pid, link.role.letters) == ("epd0", None, "EPD")
    supervisor.kill("epd0")  # nothing can kill it but itself
    await recorder.until(lambda: state_of(supervisor, "epd0").status is not None)
    if dies:
        link.end.send([SetFault("", "leave")])
        await recorder.until(lambda: recorder.of("down"))
        assert state_of(supervisor, "epd0").condition is Condition.FAILED
    await supervisor.stop()
    assert recorder.of("down") == ([("down", "epd0", "ended", "stays down")] if dies else [])
    assert not [thread for thread in threading.enumerate() if thread.name == "instance-epd0"]


async def test_a_connection_with_nonsense_on_it_is_made_again(make: Make) -> None:
    supervisor, recorder = make("E+P+D"), Recorder()
    links = await recorder.start(supervisor)
    told = len(recorder.events)
    links[0].end.send([SetFault("", "garble", "p0")])
    await recorder.until(lambda: len(recorder.events) == told + 2)
    assert recorder.events[told:] == [("unpair", "e0", "p0"), ("pair", "e0", "p0")]
    links[0].end.send([SetFault("", "offer", "p0")])
    await recorder.until(lambda: recorder.messages.get("p0"))
    assert not recorder.of("down")


async def test_a_changed_role_is_remembered_over_a_restart(make: Make) -> None:
    supervisor, recorder = make("EP+PD"), Recorder()
    await supervisor.start(recorder)

    def roles() -> list[str]:
        return [m.holders[0] for m in recorder.messages.get("ep0", []) if isinstance(m, LedgerReport)]

    supervisor.set_role("ep0", Role.E)
    await recorder.until(lambda: roles() == ["E"])
    state = state_of(supervisor, "ep0")
    assert (state.role, state.loaded) == ("E", "EP")
    supervisor.kill("ep0")
    await recorder.until(lambda: roles() == ["E", "E"])
    assert recorder.links["ep0"].role == Role.E | Role.P
    with pytest.raises(ConfigError, match="loaded for EP and cannot serve D"):
        supervisor.set_role("ep0", Role.D)


async def test_who_does_not_follow_a_shutdown_is_killed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_E0", "deaf")
    supervisor = make("E+PD", replace(QUICK, exit_grace_s=0.5))
    links = await Recorder().start(supervisor)
    await supervisor.stop()
    assert not [link for link in links if link.pid is not None and alive(link.pid)]


def test_the_time_for_an_end_is_spent_by_computing_and_by_waiting_for_others() -> None:
    """Three threads, of which one has begun since, and a fourth that is gone."""
    before = {"1": 5.0, "2": 0.5, "4": 9.0}
    child: Any = SimpleNamespace(killable=True, waited_s=lambda: {"1": 5.1, "2": 2.5, "3": 1.0})
    assert not is_late(child, before, late_s=1.9) and is_late(child, before, late_s=2.1)
    child.waited_s = dict
    assert is_late(child, before, late_s=0.0)
    child.killable = False
    assert not is_late(child, before, late_s=9.0)


@pytest.mark.slow
def test_a_process_that_has_no_processor_says_how_long() -> None:
    """Two that never rest share one; a third is stopped."""
    one = min(os.sched_getaffinity(0))
    busy = f"import os; os.sched_setaffinity(0, [{one}])\nwhile True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range(3)]
    nothing: Any = None
    children = [ProcessChild("e0", 0, nothing, nothing, process) for process in processes]
    try:
        wait_until(lambda: all(sum(child.waited_s().values()) > 0.2 for child in children[:2]), "both wait")
        os.kill(processes[2].pid, signal.SIGSTOP)
        os.waitid(os.P_PID, processes[2].pid, os.WSTOPPED | os.WNOWAIT)
        stopped = children[2].waited_s()
        wait_until(lambda: all(sum(child.waited_s().values()) > 0.4 for child in children[:2]), "both wait on")
        assert children[2].waited_s() == stopped
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert children[0].waited_s() == {}


@pytest.mark.slow
async def test_who_waits_for_a_processor_has_the_time_for_its_end(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The instance shares a processor with three others, so its end takes four times its computation."""
    monkeypatch.setenv("STAND_IN_EPD0", "slow")
    supervisor = make("EPD", replace(QUICK, exit_grace_s=2.0))
    (link,) = await Recorder().start(supervisor)
    assert link.pid is not None
    one = {min(os.sched_getaffinity(0))}
    busy = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(busy) for _ in range(3)]  # noqa: ASYNC220
    try:
        for thread in os.listdir(f"/proc/{link.pid}/task"):
            os.sched_setaffinity(int(thread), one)
        for other in others:
            os.sched_setaffinity(other.pid, one)
        await supervisor.stop()
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert "did not end" not in caplog.text


async def test_stopping_while_one_is_stopped_and_one_waits_for_its_next_life(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pace = replace(QUICK, backoff_s=(60.0,), exit_grace_s=60.0)
    supervisor, recorder = make("2E+PD", pace, suspect_s=0.4, fence_s=60.0), Recorder()
    await supervisor.start(recorder)
    os.kill(pid_of(supervisor, "e0"), signal.SIGSTOP)
    supervisor.kill("e1")
    await recorder.until(lambda: recorder.of("silent") and recorder.of("down"))
    began_s = time.monotonic()
    await supervisor.stop()
    assert time.monotonic() - began_s < 30.0, "nobody waits for an instance that is stopped"


async def test_a_process_that_was_started_before_is_its_instance(make: Make) -> None:
    ahead = {name: spawn(COMMAND, name) for name in ("epd0", "other")}
    pid = ahead["epd0"].process.pid
    supervisor = Supervisor(EngineConfig(), processes=True, command=["/no/such/program"], ahead=ahead)
    try:
        (link,) = await Recorder().start(supervisor)
        assert link.pid == pid and list(ahead) == ["other"]
    finally:
        await supervisor.stop()
        ahead["other"].discard()
    assert not alive(pid) and not alive(ahead["other"].process.pid)


async def test_a_command_that_does_not_exist(make: Make) -> None:
    config = EngineConfig(topology="E+PD")
    supervisor = Supervisor(config, processes=True, command=["/no/such/program"])
    with pytest.raises(Exception, match="instance e0 cannot be started: No such file") as caught:
        await supervisor.start(Recorder())
    assert type(caught.value).__name__ == "ResourceError"
    await asyncio.sleep(0.05)


def frontend(*arguments: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.cluster.frontend", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, start_new_session=True)


def test_no_instance_outlives_a_killed_frontend() -> None:
    """A stopped instance cannot notice the end of its channel, and ends too."""
    with frontend("E+P+D", "60", "600") as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 3 and all(map(alive, pids))
        os.kill(pids[1], signal.SIGSTOP)
        process.kill()
        try:
            wait_until(lambda: not any(map(alive, pids)), "no orphans", within_s=30.0)
        finally:
            for pid in filter(alive, pids):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_stopping_the_whole_tree_harms_nobody() -> None:
    with frontend("E+PD", "0.6", "1.2") as process:
        assert process.stdout is not None
        try:
            pids = [int(word) for word in process.stdout.readline().split()]
            os.killpg(process.pid, signal.SIGSTOP)
            time.sleep(1.8)
            os.killpg(process.pid, signal.SIGCONT)
            time.sleep(1.0)
            assert all(map(alive, pids))
        finally:
            process.kill()
        assert process.stdout.read() == "", "something was said to have happened"
