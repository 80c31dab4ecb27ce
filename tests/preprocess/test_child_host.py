"""Children that fail in every way: each costs one job, within its time, and leaves no process and no descriptor."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from hydra_engine.errors import CheckpointError, EngineClosed, HydraError, Unavailable
from hydra_engine.preprocess.sandbox import child_host
from hydra_engine.preprocess.sandbox.child_host import ChildDied, ChildHost

CHILD = """
import os, signal, socket, sys, time
import msgspec
from hydra_engine.errors import CheckpointError
from hydra_engine.preprocess.sandbox.child_loop import serve

class Answer(msgspec.Struct):
    text: str

def slowly(data):
    connection = socket.socket(fileno=int(sys.argv[1]))
    for byte in data:
        connection.sendall(bytes([byte]))
        time.sleep(0.1)

def answer(job, memory):
    if job["text"] == "bad":
        {doing}
    return Answer(job["text"] + sys.argv[2])

def start():
    {starting}
    return answer

serve(msgspec.msgpack.Decoder(), start, lambda job: {cpu_seconds})
"""


class Answer(msgspec.Struct):
    text: str


Make = Callable[..., ChildHost[Answer]]


@pytest.fixture
def make() -> Iterator[Make]:
    hosts = []

    def made(
        doing: str = "pass", starting: str = "pass", cpu_seconds: float = 5.0, **options: float
    ) -> ChildHost[Answer]:
        code = CHILD.format(doing=doing, starting=starting, cpu_seconds=cpu_seconds)
        host = ChildHost("answer", [sys.executable, "-c", code], Answer, setup=["!"], **options)  # type: ignore[arg-type]
        hosts.append(host)
        return host

    yield made
    for host in hosts:
        host.close()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def test_one_child_answers_job_after_job(make: Make) -> None:
    host = make()
    for text in ("a", "b" * 70_000):  # in two parts at least
        host._max_answer_bytes = 100_000
        assert host.run({"text": text}, 10) == (Answer(text + '["!"]'), b"")
    assert len(host.pids()) == 1


@pytest.mark.quick("os.abort")
@pytest.mark.parametrize(
    ("doing", "reason", "by_itself"),
    [
        ("os._exit(3)", "ended with exit code 3", True),
        ("os.abort()", "was killed by SIGABRT", True),
        ("while True: pass", "was killed by SIGPROF", True),
        ("time.sleep(60)", "did not answer in time", True),
        ("slowly(b'\\x40' + bytes(7) + b'x' * 60)", "did not answer in time", True),
        ("slowly(b'\\xff' * 8)", "gave an answer that cannot be read", True),
        ("return Answer('x' * 1000)", "gave an answer that cannot be read", True),
        ("return Answer(5)", "gave an answer that cannot be read", True),
        ("os.close(int(sys.argv[1])); time.sleep(60)", "closed its socket", True),
    ],
)
def test_a_child_that_fails_is_replaced(
    make: Make, caplog: pytest.LogCaptureFixture, doing: str, reason: str, by_itself: bool
) -> None:
    before = open_descriptors()
    cpu_seconds = 0.1 if "while" in doing else 5.0
    host = make(doing, cpu_seconds=cpu_seconds, max_answer_bytes=500)
    assert host.run({"text": "good"}, 10)[0].text.startswith("good")
    (first,) = host.pids()
    began = time.monotonic()
    with pytest.raises(ChildDied, match=f"^{reason}$") as caught:
        host.run({"text": "bad"}, 2)
    assert caught.value.by_itself == by_itself and time.monotonic() - began < 8
    assert f"a process to answer {reason}" in caplog.text
    assert host.pids() == [] and not is_running(first) and open_descriptors() == before
    assert host.run({"text": "good"}, 10)[0].text.startswith("good")
    assert len(host.pids()) == 1


@pytest.mark.quick("[9]")
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_a_child_ended_from_outside_is_no_fault_of_its_job(
    make: Make, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals
) -> None:
    """The job is done by the next one, if nobody ends that as well."""
    monkeypatch.setattr(child_host, "_LOOK_SECONDS", 0.01)
    before = open_descriptors()
    host = make(f"os.kill(os.getpid(), {int(sent)})")
    with pytest.raises(Unavailable, match="were stopped, killed"):
        host.run({"text": "bad"}, 60)
    assert host.pids() == [] and open_descriptors() == before
    once = make(f"os.kill(os.getpid(), {int(sent)}) if os.getpid() == min(job['pids']) else None")
    assert once.run({"text": "good"}, 60)[0].text.startswith("good")
    assert once.run({"text": "bad", "pids": once.pids()}, 60)[0].text.startswith("bad")
    assert len(once.pids()) == 1


@pytest.mark.slow
def test_a_child_without_a_processor_is_no_fault_of_its_job(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_host, "longest_wait_s", lambda pid, before: 0.2)
    with pytest.raises(Unavailable, match="given no time"):
        make("time.sleep(60)").run({"text": "bad"}, 0.3)


def test_children_that_are_killed_while_idle_are_reaped_at_once(make: Make) -> None:
    before, host = open_descriptors(), make()
    host.run({"text": "good"}, 10)
    (pid,) = host.pids()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid) and host.pids() == [])
    wait_until(lambda: open_descriptors() == before)
    assert host.run({"text": "good"}, 10)[0].text.startswith("good")


@pytest.mark.quick("it is broken")
@pytest.mark.parametrize(
    ("starting", "error"),
    [
        ("raise CheckpointError('it is broken')", CheckpointError),
        ("raise RuntimeError", Unavailable),
        ("time.sleep(60)", Unavailable),
    ],
)
def test_a_child_that_does_not_start(
    make: Make, monkeypatch: pytest.MonkeyPatch, starting: str, error: type[HydraError]
) -> None:
    before = open_descriptors()
    monkeypatch.setattr(child_host, "START_SECONDS", 0.5 if "sleep" in starting else 30)
    host = make(starting=starting)
    for work in (host.start, lambda: host.run({"text": ""}, 10)):
        with pytest.raises(
            error, match="it is broken" if error is CheckpointError else "process(es)? to answer (could|were)"
        ):
            work()
        assert host.pids() == [] and open_descriptors() == before


def test_closing_ends_a_busy_child_and_a_starting_one(make: Make) -> None:
    before = open_descriptors()
    for host in (make("time.sleep(60)"), make(starting="time.sleep(60)")):
        with ThreadPoolExecutor(1) as threads:
            job = threads.submit(host.run, {"text": "bad"}, 60)
            while not host.pids():
                time.sleep(0.01)
            time.sleep(0.3)
            (pid,) = host.pids()
            host.close()
            assert not is_running(pid)
            with pytest.raises(EngineClosed):
                job.result(30)
        assert host.pids() == []
        for again in (host.start, lambda host=host: host.warm_up(1)):
            with pytest.raises(EngineClosed):
                again()
    assert open_descriptors() == before
