"""The state of another process on Linux: whether it is stopped, and how long it has worked and waited."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessStatus(NamedTuple):
    is_stopped: bool  # stopped by a signal such as SIGSTOP, until it is continued
    is_ready: bool  # a thread of it or of its descendants runs, or waits for a processor or a disk
    cpu_s: float  # CPU seconds of all these threads


def is_stopped(pid: int) -> bool:
    fields = _fields(Path(f"/proc/{pid}/stat"))
    return fields is not None and fields[0] == "T"


def process_status(pid: int) -> ProcessStatus | None:
    """The status of a process and its descendants; None if it is gone or the system has no /proc."""
    if (fields := _fields(Path(f"/proc/{pid}/stat"))) is None:
        return None
    is_ready, cpu_s, todo = False, 0.0, [pid]
    while todo:
        for task in Path(f"/proc/{todo.pop()}/task").glob("*"):
            if (thread := _fields(task / "stat")) is not None:
                is_ready = is_ready or thread[0] in "RD"
                cpu_s += (int(thread[11]) + int(thread[12])) / _TICKS_PER_S
                with contextlib.suppress(OSError):  # it has ended
                    todo += map(int, (task / "children").read_text(encoding="ascii").split())
    return ProcessStatus(fields[0] == "T", is_ready, cpu_s)


def _fields(stat: Path) -> list[str] | None:
    """The fields of a stat file from the state on, since the name before may contain anything; None if it cannot be
    read."""
    try:
        return stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def waited_s(pid: int) -> dict[str, float]:
    """Seconds that each thread was runnable without a processor, by thread id; empty if Linux does not count them."""
    waited = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                text = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text(encoding="ascii")
                waited[thread] = int(text.split()[1]) / 1e9
    return waited


def longest_wait_s(pid: int, before: Mapping[str, float]) -> float:
    """Largest time in seconds that one of its threads has waited for a processor since `before`, an answer of
    `waited_s`."""
    waits = (waited - before.get(thread, 0.0) for thread, waited in waited_s(pid).items())
    return max(waits, default=0.0)
