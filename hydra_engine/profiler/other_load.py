"""The load of other processes on the machine during a measurement.

Compares the busy time of the usable cores, as the kernel counts it, with the CPU time of this process. Time that a
hypervisor gave to other machines counts as other work. Does not know what is measured.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

BUSY = 0.15  # share of the usable cores from which on measured times are not reliable
_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # idle, iowait
_COUNTED = 8  # user to steal; guests are part of user


class OtherLoad:
    """A counter of other processes' CPU time since its construction."""

    def __init__(self, stat: Path = _STAT) -> None:
        self._stat = stat
        self._begin = self._read()

    def share(self) -> float:
        """The share of the usable cores that other work used, 0 to 1; 0 if the kernel does not report it."""
        busy_s, own_s, wall_s = (end - begin for end, begin in zip(self._read(), self._begin, strict=True))
        cores = len(os.sched_getaffinity(0))
        return min(max((busy_s - own_s) / (wall_s * cores), 0.0), 1.0) if wall_s > 0 else 0.0

    def _read(self) -> tuple[float, float, float]:
        """Returns (busy seconds of all usable cores, CPU seconds of this process, clock seconds)."""
        usable = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        own = os.times()
        own_s = own.user + own.system + own.children_user + own.children_system
        try:
            lines = [line.split() for line in self._stat.read_text(encoding="ascii").splitlines()]
        except OSError:
            return 0.0, own_s, time.monotonic()
        ticks = sum(
            int(value)
            for name, *values in filter(None, lines)
            if name in usable
            for index, value in enumerate(values[:_COUNTED])
            if index not in _IDLE
        )
        return ticks / os.sysconf("SC_CLK_TCK"), own_s, time.monotonic()


def busy_note(share: float) -> str | None:
    """A note for the user that the measurement should be repeated; None if other work had less than `BUSY`."""
    if share < BUSY:
        return None
    return f"busy, measure again: other programs took {share:.0%} of the cores meanwhile"
