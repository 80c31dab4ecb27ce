"""Starts an instance process: a command with two sockets that only it inherits.

Imports little, so that a command can start an instance before its own imports: most of an instance's start time is the
import of torch. Does not know the messages on the sockets.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from hydra_engine.config import SECRET_VARIABLES
from hydra_engine.core.processes import launch
from hydra_engine.core.processes.preloaded import Preloaded, Process

logger = logging.getLogger(__name__)

INSTANCE = "hydra_engine.instance.build"  # what an instance process imports
COMMAND = launch.command("hydra_engine.cluster.process")
# An idle OpenMP team that spins would steal the cores from the other lane and from the extension's threads.
OPENMP_IDLE = ("OMP_WAIT_POLICY", "PASSIVE")


class Spawned(NamedTuple):
    """A process that waits for its first message, and the parent's ends of its sockets."""

    process: Process
    channel: socket.socket
    control: socket.socket

    def discard(self) -> None:
        self.process.kill()
        self.process.wait()
        self.channel.close()
        self.control.close()


def spawn(command: Sequence[str], name: str, preloaded: Preloaded | None = None) -> Spawned:
    """Starts an instance process, as a fork of `preloaded` if that is there. The kernel kills it when the calling
    thread ends (`launch.bind_to_parent`), so only the loop's thread, which lives as long as the frontend, may call
    this. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    control, control_theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.setblocking(False)
    with theirs, control_theirs:
        try:
            process = start_python([*command, "--name", name], theirs, control_theirs, preloaded)
            return Spawned(process, ours, control)
        except OSError:
            ours.close()
            control.close()
            raise


def start_python(
    command: Sequence[str],
    channel: socket.socket,
    control: socket.socket,
    preloaded: Preloaded | None = None,
    *,
    hidden: Collection[str] = SECRET_VARIABLES,
) -> Process:
    """Starts a Python process that inherits these sockets and no environment variables that are `hidden`. Raises
    OSError."""
    descriptors = [channel.fileno(), control.fileno()]
    command = [*command, "--fd", str(descriptors[0]), "--control", str(descriptors[1])]
    package_parent = str(Path(__file__).resolve().parents[2])
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_parent, environment.get("PYTHONPATH")]))
    environment.setdefault(*OPENMP_IDLE)
    if preloaded is not None and preloaded.is_alive:
        numbers = {number: number for number in descriptors}
        return preloaded.fork(command, numbers, environment, new_session=False)
    environment |= launch.parent_variable()
    # Ctrl-C goes to the whole group, and to this process before it has come to ignore it (`process.main`).
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(command, pass_fds=descriptors, env=environment, stdin=subprocess.DEVNULL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


_SHARED = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "PYTHONHOME", "PYTHONPATH", "HF_HOME", "HF_MODULES_CACHE")
# Of variables that libraries read when they are imported.
_EARLY = (
    "ATEN_",
    "CUDA_",
    "GOMP_",
    "KMP_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "NVIDIA_",
    "OMP_",
    "OPENBLAS_",
    "TORCH",
    "TRITON_",
)


def preload(modules: Sequence[str]) -> Preloaded | None:
    """Starts a process that imports these modules and what instances import, to be forked for instances and sandboxed
    processes. Returns None where there are no modules, or it cannot start, which is logged."""
    if not modules:
        return None
    try:
        return Preloaded([INSTANCE, *modules], _shared_environment())
    except OSError as error:
        logger.warning("no process to fork others from could start (%s): each imports %s itself", error, modules)
        return None


def _shared_environment() -> dict[str, str]:
    """Returns the environment of a process that instances and sandboxed processes are forked from: nothing secret."""
    environment = {name: value for name, value in os.environ.items() if name in _SHARED or name.startswith(_EARLY)}
    package_parent = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_parent, environment.get("PYTHONPATH")]))
    environment.setdefault(*OPENMP_IDLE)
    return environment | {"HF_HUB_OFFLINE": "1"}
