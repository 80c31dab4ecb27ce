"""`python -m hydra_engine.core.processes.launch MODULE ARGUMENTS...` runs a module in a process that ends with its
parent.

Imports nothing of ours, so that the kernel knows of the bond before anything heavy is read: a parent that is killed in
the first moments leaves nothing behind. Does not know what the modules do.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PARENT = "_HYDRA_PARENT_PID"  # the variable that says whose child a process is

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PR_SET_NO_NEW_PRIVS = 38


def command(module: str) -> tuple[str, ...]:
    """Starts that module; `parent_variable` goes into its environment."""
    return (sys.executable, "-m", "hydra_engine.core.processes.launch", module)


def parent_variable() -> dict[str, str]:
    """The variable that a child of this process has in its environment."""
    return {PARENT: str(os.getpid())}


def bind_to_parent() -> None:
    """Linux kills this process when the thread that started it ends, even while it is stopped or in a long call, and it
    gains no privileges by starting programs. A parent that died before this call is missed, so its pid is compared.
    Elsewhere the end of a channel has to do."""
    if sys.platform != "linux":
        return
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    parent = os.environ.get(PARENT)
    if parent is not None and os.getppid() != int(parent):
        os._exit(1)


def main() -> None:
    bind_to_parent()
    _, module, *arguments = sys.argv
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
