"""Keeps other processes of the same user out of this one."""

from __future__ import annotations

import ctypes
import sys

_PR_SET_DUMPABLE = 4  # <linux/prctl.h>


def keep_others_out() -> None:
    """None but root's may read this process's memory, environment and descriptors from now on, or trace it; the kernel
    writes no core files of it either. Programs that it starts are not concerned."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
