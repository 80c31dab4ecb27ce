"""`python -m hydra_engine.core.processes.launch MODULE ARGUMENTS...` runs a module in a process that ends with its
parent.

Imports nothing of the package, so that the kernel binds the process to its parent before slow imports: a parent that is
killed in the first moments leaves no child behind. Does not know what the modules do.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

PARENT = "_HYDRA_PARENT_PID"  # environment variable with the pid of the parent

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PR_SET_NO_NEW_PRIVS = 38


def command(module: str) -> tuple[str, ...]:
    """The command line, to be followed by arguments, that runs a module in a child that Linux kills with its parent.
    `parent_variable()` in the child's environment makes it also notice a parent that died before it began."""
    return (sys.executable, "-m", "hydra_engine.core.processes.launch", module)


def parent_variable() -> dict[str, str]:
    """The environment variable, as {name: value}, by which a child knows that this process is its parent."""
    return {PARENT: str(os.getpid())}


def bind_to_parent() -> None:
    """Makes Linux kill this process when the thread that started it ends, also while it is stopped or in a long call,
    and forbids new privileges by execve. Exits with code 1 if the parent has died already, which only
    `parent_variable` in the environment shows. Does nothing on other systems, where the child ends with its channel."""
    if sys.platform != "linux":
        return
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    parent = os.environ.get(PARENT)
    if parent is not None and os.getppid() != int(parent):
        os._exit(1)


def main() -> None:
    """Calls `bind_to_parent`, then runs the module named by the first argument with the arguments after it."""
    bind_to_parent()
    _, module, *arguments = sys.argv
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
