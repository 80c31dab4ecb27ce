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
    cpu_s: float  # that all its threads have used


def process_status(pid: int) -> ProcessStatus | None:
    """None: it has gone, or this system does not tell."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # behind the name, which may be anything
    return ProcessStatus(fields[0] == "T", (int(fields[11]) + int(fields[12])) / _TICKS_PER_S)


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
