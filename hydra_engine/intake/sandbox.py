"""The parent's side of the decode children: starts them when needed, gives them jobs, ends those that do not answer.

One picture costs at most one child. Does not trust what a child says: an answer is one byte and as many pixels as the
parent expects, or the child is ended. Does not know formats or models.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from hydra_engine.errors import Unavailable
from hydra_engine.intake.child import BROKEN, DONE, Job
from hydra_engine.intake.containers import broken

logger = logging.getLogger(__name__)

START_SECONDS = 30.0
ANSWER_SECONDS = 30.0  # the child's own limit is CPU time; this one is for a child that sleeps

_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "PYTHONHOME", "PYTHONPATH")
_COMMAND = (sys.executable, "-m", "hydra_engine.intake.child")


class Sandbox:
    """Safe from any thread; as many children as threads that call at the same time."""

    def __init__(self, command: Sequence[str] = _COMMAND, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._command = command
        self._answer_seconds = answer_seconds
        self._idle: list[_Child] = []
        self._lock = threading.Lock()
        self._closed = False

    def render(self, job: Job) -> bytes:
        """Blocking. RGB pixels of the target's size. Raises InvalidImage, Unavailable when no child can be started."""
        child = self._take()
        try:
            pixels = child.render(job, self._answer_seconds)
        except (OSError, EOFError) as error:  # timeouts are OSErrors too
            logger.warning("a decode process ended with status %s", child.end())
            raise broken("its decoder failed") from error
        self._give_back(child)
        if pixels is None:
            raise broken("its data is damaged or incomplete")
        return pixels

    def warm_up(self) -> None:
        """Blocking. Starts the first child, so that the first picture does not wait for it."""
        self._give_back(self._take())

    def close(self) -> None:
        """Ends the idle children now and the busy ones after their job."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for child in idle:
            child.end()

    def _take(self) -> _Child:
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.is_alive:
                    return child
                child.end()
        try:
            return _Child(self._command)
        except (OSError, EOFError) as error:
            raise Unavailable("no process to decode images could be started; try again later") from error

    def _give_back(self, child: _Child) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(child)
                return
        child.end()


def _environment() -> dict[str, str]:
    """What an interpreter needs and no secrets."""
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    package_parent = str(Path(__file__).parents[2])
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, [package_parent, kept.get("PYTHONPATH")]))}


class _Child:
    def __init__(self, command: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_environment(),
                    start_new_session=True,  # a terminal's Ctrl-C is the parent's business
                )
        except OSError:
            self._socket.close()
            raise
        try:
            self._socket.settimeout(START_SECONDS)
            if self._read(1) != DONE:
                raise EOFError
        except (OSError, EOFError):
            self.end()
            raise

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def render(self, job: Job, seconds: float) -> bytes | None:
        """None when the picture is broken. Raises OSError or EOFError when the child is."""
        self._socket.settimeout(seconds)
        self._socket.sendall(job.pack())
        self._socket.sendall(job.container.data)
        verdict = self._read(1)
        if verdict == BROKEN:
            return None
        if verdict != DONE:
            raise EOFError
        return self._read(job.target.width * job.target.height * 3)

    def end(self) -> int:
        """Its exit status."""
        self._socket.close()
        self._process.kill()
        return self._process.wait()

    def _read(self, num_bytes: int) -> bytes:
        answer = bytearray(num_bytes)
        view = memoryview(answer)
        while view:
            num_read = self._socket.recv_into(view)
            if num_read == 0:
                raise EOFError
            view = view[num_read:]
        return bytes(answer)
