"""Protects this process from other processes of the same user."""

from __future__ import annotations

import ctypes
import sys

_PR_SET_DUMPABLE = 4  # <linux/prctl.h>


def forbid_access_by_others() -> None:
    """Forbids every process but root's to read this process's memory, environment and descriptors or to trace it; the
    kernel writes no core dumps of it either. Programs that it starts are not protected. Does nothing on systems other
    than Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
