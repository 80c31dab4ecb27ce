"""Human-readable system numbers: sizes in bytes, exits of processes."""

from __future__ import annotations

import signal

GIB = 1 << 30
_UNITS = (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10))


def size(num_bytes: int) -> str:
    """The size in the largest fitting unit up to GiB, with at most one decimal: `20 MiB`, `1.5 GiB`, `100 B`."""
    for unit, one in _UNITS:
        if num_bytes >= one:
            return f"{num_bytes / one:.1f}".removesuffix(".0") + f" {unit}"
    return f"{num_bytes} B"


def describe_exit(code: int) -> str:
    """A phrase for a return code of subprocess, to follow the name of the process: `ended with exit code 1`, `was
    killed by SIGKILL`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"
