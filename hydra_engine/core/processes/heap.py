"""Returns free memory of the C library to the system."""

from __future__ import annotations

import ctypes

_LIBC = ctypes.CDLL(None) if hasattr(ctypes.CDLL(None), "malloc_trim") else None


def trim_heap() -> None:
    """Returns free heap pages to the system, which may take tens of milliseconds; does nothing without glibc."""
    if _LIBC is not None:
        _LIBC.malloc_trim(0)
