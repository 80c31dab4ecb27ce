"""Containment of a child before it takes untrusted jobs: privileges, access by other processes, and system calls.

Does not know what the children do.
"""

from __future__ import annotations

import ctypes
import struct
import sys

from hydra_engine.core.processes.privacy import forbid_access_by_others
from hydra_engine.preprocess.sandbox import seccomp

_CAPABILITY_VERSION = 0x20080522  # <linux/capability.h>
_CAP_DAC_READ_SEARCH = 1 << 2  # kept, since modules imported later may be unreadable without it


def give_up_privileges() -> None:
    """Drops root's privileges, and keeps other processes of the same user from reading this one's memory, environment
    or descriptors, so that a compromised child cannot reach another."""
    if sys.platform != "linux":
        return
    forbid_access_by_others()
    libc = ctypes.CDLL(None)
    kept = _effective_capabilities(libc) & _CAP_DAC_READ_SEARCH
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    libc.capset(header, struct.pack("=6I", kept, kept, 0, 0, 0, 0))


def forbid_calls(*, network: bool) -> str | None:
    """Forbids system calls that jobs do not need. Returns None, or the reason why that is not possible here."""
    if sys.platform != "linux":
        return f"there is no filter for {sys.platform}"
    return seccomp.install_filter(network=network)


def _effective_capabilities(libc: ctypes.CDLL) -> int:
    """The first 32 effective capabilities, as bits."""
    sets = ctypes.create_string_buffer(24)
    libc.capget(struct.pack("=Ii", _CAPABILITY_VERSION, 0), sets)
    return int(struct.unpack("=6I", sets.raw)[0])
