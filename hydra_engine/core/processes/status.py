"""The state of another process on Linux: whether it is stopped, and how long it has worked and waited."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessStatus(NamedTuple):
    """The status of a process: `is_stopped` of itself, the others of itself and its descendants."""

    is_stopped: bool  # stopped by a signal such as SIGSTOP, until it is continued
    is_ready: bool  # a thread runs, or waits for a processor or a disk
    cpu_s: float  # CPU seconds of all threads that are alive


def is_stopped(pid: int) -> bool:
    """True if a signal such as SIGSTOP has stopped the process; False also if it is gone or the system has no /proc."""
    fields = _fields(Path(f"/proc/{pid}/stat"))
    return fields is not None and fields[0] == "T"


def process_status(pid: int) -> ProcessStatus | None:
    """The status of a process and its descendants; None if it is gone or the system has no /proc. Descendants are
    counted only if Linux lists the children of threads."""
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
    """The fields of a stat file in /proc from the state on, since the program's name before it may contain blanks; None
    if the file cannot be read."""
    try:
        return stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def waited_s(pid: int) -> dict[str, float]:
    """Seconds since its start that each thread of the process was runnable without a processor, by thread id. Empty if
    the process is gone or the system does not count them."""
    waited = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                text = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text(encoding="ascii")
                waited[thread] = int(text.split()[1]) / 1e9
    return waited


def longest_wait_s(pid: int, before: Mapping[str, float]) -> float:
    """The longest that a thread of the process has waited for a processor since `before` (an earlier result of
    `waited_s`), in seconds; 0.0 if the threads are not counted."""
    waits = (waited - before.get(thread, 0.0) for thread, waited in waited_s(pid).items())
    return max(waits, default=0.0)
