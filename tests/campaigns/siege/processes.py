"""Processes as /proc shows them: who descends from whom, what they hold, what processor time they have used."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>


def adopt_orphans() -> None:
    """Adopts processes whose parent has died from now on, so that none is lost sight of."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    state: str  # Z: a zombie


def processes() -> list[Process]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                found.append(Process(int(name), int(fields[1]), fields[0]))
    return found


def descendants(pid: int) -> list[Process]:
    children: dict[int, list[Process]] = {}
    for process in processes():
        children.setdefault(process.parent, []).append(process)
    found, ahead = [], [pid]
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += [process.pid for process in below]
    return found


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def status(pid: int) -> dict[str, str]:
    """Fields of /proc/PID/status by name."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {}


def has_seccomp() -> bool:
    return Path("/proc/sys/kernel/seccomp/actions_avail").exists()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def cpu_s(pid: int) -> float:
    """Seconds of all its threads, ended ones included; 0 where it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def resident_mib(pid: int) -> float:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
    return 0.0


def num_memfds(pid: int) -> int:
    """0 where its descriptors cannot be read."""
    count = 0
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                count += os.readlink(f"/proc/{pid}/fd/{name}").startswith("/memfd:")
    return count


def num_entries(pid: int, folder: str) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/{folder}"))
    return 0


def send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def reap(pids: Iterable[int]) -> None:
    """Reaps adopted processes that have ended."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
