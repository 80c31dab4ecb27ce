"""Forks of a process that has imported: programs like others, with nothing of its own, which end with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hydra_engine.core.processes import launch
from hydra_engine.core.processes.preloaded import Preloaded, Process

pytestmark = pytest.mark.slow  # processes
ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, os, signal, sys, time
from hydra_engine.core.processes.preloaded import INHERITED
if "wait" in sys.argv: time.sleep(100)
if "kill" in sys.argv: os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGABRT)
found = {
    "argv": sys.argv[1:], "name": __name__, "environment": dict(os.environ), "imported": "colorsys" in sys.modules,
    "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")),
    "inherited": INHERITED.get("answer", b"").decode(),
    "leads": os.getsid(0) == os.getpid(), "handler": str(signal.getsignal(signal.SIGCHLD)),
}
os.write(7, json.dumps(found).encode())
sys.exit(5)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "a_program.py").write_text(textwrap.dedent(PROGRAM))
    return {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), "ONLY_HERE": "1"}


@pytest.fixture
def preloaded(environment: dict[str, str]) -> Iterator[Preloaded]:
    made = Preloaded(["colorsys"], environment)
    yield made
    made.close()


Start = Callable[..., Process]


@pytest.fixture
def start(preloaded: Preloaded) -> Start:
    def forked(*arguments: str, descriptors: dict[int, int] | None = None, new_session: bool = True) -> Process:
        command = [*launch.command("a_program"), *arguments]
        return preloaded.fork(command, descriptors or {}, {"TOLD": "yes"}, new_session=new_session)

    return forked


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def report(start: Start) -> dict[str, Any]:
    """Runs a fork to its end; returns what it says of itself."""
    reading, writing = os.pipe()
    process = start("a", "b", descriptors={7: writing})
    os.close(writing)
    with open(reading, "rb") as told:
        found: dict[str, Any] = json.loads(told.read())
    assert process.wait() == process.returncode == process.poll() == 5
    return found


def test_a_fork_has_its_arguments_environment_and_descriptors_only(start: Start) -> None:
    first = start("wait")  # of which the second has no descriptor
    found = report(start)
    assert found["argv"] == ["a", "b"] and found["name"] == "__main__" and found["imported"]
    assert found["environment"] == {"TOLD": "yes", launch.PARENT: found["environment"][launch.PARENT]}
    assert found["descriptors"] == [0, 1, 2, 7]
    assert found["leads"] and found["handler"] == "0"
    first.kill()
    first.wait()


def test_forks_inherit_what_is_left_to_them_and_earlier_ones_do_not(preloaded: Preloaded, start: Start) -> None:
    assert report(start)["inherited"] == ""
    preloaded.bequeath("answer", b"42")
    assert [report(start)["inherited"] for _ in range(2)] == ["42", "42"]


def test_exit_codes_are_those_of_popen_and_a_killed_one_is_gone(start: Start) -> None:
    assert start("kill", new_session=False).wait() == -signal.SIGABRT, "SIGTERM is ignored"
    waiting = start("wait")
    assert waiting.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.01)
    waiting.kill()
    assert waiting.wait(30) == -signal.SIGKILL and not Path(f"/proc/{waiting.pid}").exists()
    waiting.kill()  # nobody


def test_the_end_ends_all_forks_and_a_second_is_none(preloaded: Preloaded, start: Start) -> None:
    forks = [start("wait") for _ in range(2)]
    assert preloaded.is_alive
    preloaded.close()
    preloaded.close()
    assert not preloaded.is_alive and not any(is_running(fork.pid) for fork in forks)
    assert [fork.wait(30) for fork in forks] == [-signal.SIGKILL] * 2
    with pytest.raises(OSError):
        start("wait")


def test_one_that_is_killed_takes_its_forks_along(preloaded: Preloaded, start: Start) -> None:
    fork = start("wait")
    preloaded._process.kill()
    assert fork.wait(30) == -signal.SIGKILL
    until(lambda: not is_running(fork.pid))
    with pytest.raises(OSError):
        start("wait")


def test_a_parent_that_dies_takes_both_along(environment: dict[str, str]) -> None:
    code = """
        import os, signal
        from hydra_engine.core.processes import launch
        from hydra_engine.core.processes.preloaded import Preloaded
        preloaded = Preloaded([], dict(os.environ))
        fork = preloaded.fork([*launch.command("a_program"), "wait"], {}, dict(os.environ), new_session=True)
        print(preloaded._process.pid, fork.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    until(lambda: not any(map(is_running, pids)))
