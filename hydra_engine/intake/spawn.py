"""Child processes of the intake: started with a socket and without secrets, and reading from that socket in full.

Used on both sides, so it imports nothing heavy. Does not know what is said over the socket.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "PYTHONHOME", "PYTHONPATH")


class Spawned(NamedTuple):
    process: subprocess.Popen[bytes]
    socket: socket.socket  # the parent's end


def spawn(command: Sequence[str], *arguments: str, settings: Mapping[str, str], kept: Iterable[str] = ()) -> Spawned:
    """`command FD ARGUMENTS...` with the environment that an interpreter needs, the variables `kept` and `settings`.
    Raises OSError."""
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = subprocess.Popen(
                [*command, str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**_environment(kept), **settings},
                start_new_session=True,  # a terminal's Ctrl-C is the parent's business
            )
    except OSError:
        ours.close()
        raise
    return Spawned(process, ours)


class SpawnedChild:
    """A child while it answers. Who cannot get an answer ends it."""

    def __init__(self, spawned: Spawned) -> None:
        self._process, self._socket = spawned

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> int:
        """Its exit status. From any thread; who waits for an answer gets an error."""
        self._process.kill()
        status = self._process.wait()
        self._socket.close()
        return status


def fill(connection: socket.socket, rest: memoryview) -> bool:
    """Reads until `rest` is full; False when the other side has gone before."""
    while rest:
        num_read = connection.recv_into(rest)
        if num_read == 0:
            return False
        rest = rest[num_read:]
    return True


def _environment(kept: Iterable[str]) -> dict[str, str]:
    found = {name: os.environ[name] for name in (*_KEPT_VARIABLES, *kept) if name in os.environ}
    package_parent = str(Path(__file__).parents[2])
    return found | {"PYTHONPATH": os.pathsep.join(filter(None, [package_parent, found.get("PYTHONPATH")]))}
