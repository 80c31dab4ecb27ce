"""A server that is ended while it starts: its exit code, and that none of its processes outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.usefixtures("started_in_full"),
]

Front = subprocess.Popen[str]


@pytest.fixture
def front() -> Iterator[Front]:
    command = [sys.executable, "-m", "hydra_engine", "serve", "demo", "--port", "0", "--topology", "EP+D"]
    environment = {**os.environ, "HYDRA_API_KEY": "a-secret-of-the-front"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        yield process
        process.kill()


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(pid) for pid in text.split()]


def fields_of(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {"State": "X"}
    return {name: value.strip() for name, value in (line.split(":", 1) for line in lines)}


def has_ended(pid: int) -> bool:
    return fields_of(pid)["State"][0] in "ZX"


@pytest.mark.parametrize(
    ("sent", "code"),
    [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)],
    ids=["15", "2", "9"],
)
def test_a_server_that_is_ended_while_it_starts_leaves_nothing_behind(
    front: Front, sent: signal.Signals, code: int
) -> None:
    """Instances are bound to the server before they read anything large, so even stopped ones end with it."""
    wait_until(lambda: len(children_of(front.pid)) == 2)
    instances = children_of(front.pid)
    wait_until(lambda: all(fields_of(pid).get("NoNewPrivs") == "1" for pid in instances))
    for pid in instances:
        os.kill(pid, signal.SIGSTOP)
        assert b"a-secret-of-the-front" not in Path(f"/proc/{pid}/environ").read_bytes()
    front.send_signal(sent)
    _, errors = front.communicate(timeout=60)
    assert (front.returncode, "Traceback" in errors) == (code, False)
    wait_until(lambda: all(map(has_ended, instances)))


@pytest.mark.parametrize("keys", [{"HYDRA_API_KEY": "a-secret-of-the-front"}, {}], ids=["keys", "none"])
def test_a_front_with_keys_lets_nobody_look_into_it(keys: dict[str, str]) -> None:
    """A process of the same user, without root's powers, cannot read a frontend's environment if that has keys."""
    command = [sys.executable, "-c", f"{POWERLESS}\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])"]
    arguments = ["-m", "hydra_engine", "serve", "demo", "--port", "0", "--topology", "EP+D"]
    with subprocess.Popen([*command, *arguments], stderr=subprocess.DEVNULL, env=os.environ | keys) as front:
        try:
            wait_until(lambda: len(children_of(front.pid)) == 2)
            assert ("PATH" in environment_of(front.pid)) == (not keys)
        finally:
            front.kill()


POWERLESS = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None)
libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
libc.capset(struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", 0, 0, 0, 0, 0, 0))
""".strip()


def environment_of(pid: int) -> str:
    """Reads it as another process of the same user does."""
    code = f"{POWERLESS}\nprint(open('/proc/{pid}/environ').read())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout
