"""What Linux tells of another process: whether it is stopped, and how much it has worked and waited."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessStatus(NamedTuple):
    is_stopped: bool  # by SIGSTOP or the like, so it does nothing until somebody continues it
    is_ready: bool  # a thread of it, or of what it has started, works or would if it had a processor or its disk
    cpu_s: float  # that all of these have used


def is_stopped(pid: int) -> bool:
    fields = _fields(Path(f"/proc/{pid}/stat"))
    return fields is not None and fields[0] == "T"


def process_status(pid: int) -> ProcessStatus | None:
    """None: it has gone, or this system does not tell."""
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
    """The fields from the state on; the name before it may be anything."""
    try:
        return stat.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def waited_s(pid: int) -> dict[str, float]:
    """Seconds that each thread was ready and had no processor, by thread id, as far as the system counts them."""
    waited = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                text = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text(encoding="ascii")
                waited[thread] = int(text.split()[1]) / 1e9
    return waited


def longest_wait_s(pid: int, before: Mapping[str, float]) -> float:
    """Seconds that its most starved thread has waited for a processor since `before`."""
    waits = (waited - before.get(thread, 0.0) for thread, waited in waited_s(pid).items())
    return max(waits, default=0.0)
