"""Helpers of cluster tests: open descriptors of this process and other live processes, from the kernel."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import forkserver


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def wait_until(condition: Callable[[], bool], what: str, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not in {within_s} s: {what}"
        time.sleep(0.005)


@pytest.fixture
def no_leak() -> Iterator[None]:
    """Checks that as many descriptors are open after the test as before it."""
    gc.collect()
    gc.freeze()  # the next full collection has only what is new
    for start in (forkserver.running, forkserver.running_small):
        start()  # its socket stays
    before = open_descriptors()
    yield
    wait_until(lambda: open_descriptors() <= before, f"{open_descriptors()} descriptors are open, not {before}", 30.0)
