"""Memory of the C library's that is free again and that it keeps for itself."""

from __future__ import annotations

import ctypes

_LIBC = ctypes.CDLL(None) if hasattr(ctypes.CDLL(None), "malloc_trim") else None


def trim_heap() -> None:
    """Gives it back to the system, with glibc. Takes tens of milliseconds where there is much."""
    if _LIBC is not None:
        _LIBC.malloc_trim(0)
