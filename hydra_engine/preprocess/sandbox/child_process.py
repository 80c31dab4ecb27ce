"""A sandboxed child process as its parent sees it: started, given one job after another, watched, ended.

Every wait has an end, and its cause is reported: a limit, a crash or an invalid answer is the fault of the child, and
so of its job; a signal from outside, a stop, or lack of processor time is not. Does not trust a child's answers: they
have a bounded size and a type, and pixels are as many bytes of shared memory as the parent expects, copied before they
are used. Does not know what the jobs are.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import msgspec

from hydra_engine.core.processes.launch import parent_variable
from hydra_engine.core.processes.status import is_stopped, longest_wait_s, waited_s
from hydra_engine.core.units import describe_exit
from hydra_engine.errors import from_info
from hydra_engine.preprocess.sandbox.child_loop import Started, receive, send

logger = logging.getLogger(__name__)

A = TypeVar("A")

START_SECONDS = 180.0  # torch and transformers on a busy machine
MAX_ANSWER_BYTES = 1 << 16

_DEATH_SECONDS = 1.0  # from the closed socket to the exit status
_LOOK_SECONDS = 0.25  # between two looks at a child that does not answer
_MAX_STOPPED_LOOKS = 4  # consecutive looks at a stopped child before it is ended
# Signals of a process that crashes or exceeds its limits. Other signals come from outside, SIGKILL above all: from the
# kernel if memory runs out, or from a person.
_OWN_SIGNALS = frozenset(
    (
        *(signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP),
        *(signal.SIGPROF, signal.SIGXCPU, signal.SIGXFSZ),
    )
)
_MIN_BYTES = 4 << 20  # of shared memory
_KEPT_BYTES = 64 << 20  # larger memory is freed if the next answer needs less than half of it


class ChildDied(Exception):
    """Raised if a child has ended without an answer. The text completes a sentence about the child. `by_itself`: by a
    limit, a crash or an invalid answer, rather than stopped, starved or killed from outside."""

    def __init__(self, reason: str, by_itself: bool = False) -> None:
        super().__init__(reason)
        self.by_itself = by_itself


class Child:
    """A child process, which is still starting after creation. Not thread-safe, except for `kill`."""

    def __init__(
        self,
        command: Sequence[str],
        setup: Sequence[str],
        environment: Mapping[str, str],
        on_end: Callable[[Child], None],
    ) -> None:
        """Starts the process; `on_end` is called on its thread when it has ended. Raises OSError or RuntimeError."""
        self._memory: _SharedMemory | None = None
        self._has_started = False
        self._ended = threading.Event()
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_LOOK_SECONDS)
        try:
            with theirs:
                process: Future[subprocess.Popen[bytes]] = Future()
                whole = [*command, str(theirs.fileno()), *setup]
                arguments = (process, whole, theirs.fileno(), environment, on_end)
                threading.Thread(target=self._live, args=arguments, name="sandbox", daemon=True).start()
                self._process = process.result()
        except (OSError, RuntimeError):
            self._socket.close()
            raise

    def _live(
        self,
        process: Future[subprocess.Popen[bytes]],
        command: Sequence[str],
        descriptor: int,
        environment: Mapping[str, str],
        on_end: Callable[[Child], None],
    ) -> None:
        """Starts the process, and reaps it when it ends. Needs its own thread, because for the kernel the end of the
        thread that starts a process is the end of the parent."""
        try:
            process.set_result(
                subprocess.Popen(
                    command,
                    pass_fds=[descriptor],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**environment, **parent_variable()},
                    start_new_session=True,  # a terminal's Ctrl-C is the parent's business
                )
            )
        except OSError as error:
            process.set_exception(error)
            return
        process.result().wait()
        self._ended.set()
        on_end(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self._ended.is_set()

    @property
    def exit_description(self) -> str:
        return describe_exit(self._process.wait())

    def wait_until_started(self) -> None:
        """Blocks until the child is ready. Raises ChildDied, or the child's error about its setup."""
        if not self._has_started:
            with self._watched():
                data = receive(self._socket, MAX_ANSWER_BYTES, _Patience(self.pid, START_SECONDS).look)
                started = msgspec.msgpack.decode(data, type=Started)
            if started.error is not None:
                raise from_info(started.error)
            if started.uncontained is not None:
                warn_uncontained(started.uncontained)
            self._has_started = True

    def run(
        self, job: object, seconds: float, num_pixel_bytes: int, max_answer_bytes: int, answer_type: type[A]
    ) -> tuple[A, bytes]:
        """Returns the child's answer and `num_pixel_bytes` of pixels. Raises ChildDied."""
        with self._watched():
            look = _Patience(self.pid, seconds).look
            send(self._socket, job, self._new_memory(num_pixel_bytes), look)
            answer = msgspec.msgpack.decode(receive(self._socket, max_answer_bytes, look), type=answer_type)
            return answer, b"" if self._memory is None else self._memory.read(num_pixel_bytes)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Turns errors of the socket into ChildDied, after waiting a moment for the child's exit status."""
        try:
            yield
        except msgspec.MsgspecError as error:
            raise ChildDied("gave an answer that cannot be read", by_itself=True) from error
        except (OSError, EOFError) as error:
            if not self._ended.wait(_DEATH_SECONDS):
                raise ChildDied("closed its socket", by_itself=True) from error
            status = self._process.wait()
            raise ChildDied(self.exit_description, by_itself=status >= 0 or -status in _OWN_SIGNALS) from error

    def kill(self) -> None:
        """Kills the child; a caller that waits for an answer gets an error. Thread-safe."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        self.kill()
        self._socket.close()
        self._forget_memory()

    def _new_memory(self, size: int) -> list[int]:
        """Returns the descriptor of new shared memory for `size` bytes of pixels, [] if the child's present memory
        fits."""
        memory = self._memory
        if size == 0 or (memory is not None and size <= memory.size <= max(_KEPT_BYTES, 2 * size)):
            return []
        self._forget_memory()
        self._memory = _SharedMemory(max(_MIN_BYTES, size))
        return [self._memory.descriptor]

    def _forget_memory(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()


class _Patience:
    """The limits of the wait for a busy child: a deadline, and less if the child was stopped."""

    def __init__(self, pid: int, seconds: float) -> None:
        self._pid = pid
        self._seconds = seconds
        now = time.monotonic()
        self._deadline = now + seconds
        self._next_look = now + _LOOK_SECONDS / 2  # most jobs are done by then
        self._stopped_looks = 0
        self._waited_before: dict[str, float] | None = None  # since the first look

    def look(self) -> None:
        """Raises ChildDied. Counts looks, not seconds, since this process may have been stopped itself."""
        now = time.monotonic()
        if now >= self._deadline:
            raise ChildDied("did not answer in time", by_itself=not self._was_starved())
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS / 2
        if self._waited_before is None:
            self._waited_before = waited_s(self._pid)
        self._stopped_looks = self._stopped_looks + 1 if is_stopped(self._pid) else 0
        if self._stopped_looks >= _MAX_STOPPED_LOOKS:
            raise ChildDied("was stopped")

    def _was_starved(self) -> bool:
        """True if the child waited for a processor for at least half of the time, or this process had none to look.
        Sleeping, like working all the time, is due to the job."""
        before = self._waited_before
        return before is None or longest_wait_s(self._pid, before) >= self._seconds / 2


class _SharedMemory:
    """Memory shared with one child, for its pixels. Sealed: its size is fixed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptor = os.memfd_create("pixels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        except OSError:
            self.close()
            raise

    def read(self, size: int) -> bytes:
        """Copies the first `size` bytes. Raises EOFError if there are fewer."""
        data = os.pread(self.descriptor, size, 0)
        if len(data) < size:
            raise EOFError
        return data

    def close(self) -> None:
        os.close(self.descriptor)


@cache
def warn_uncontained(reason: str) -> None:
    """Logs a warning, once per reason."""
    logger.warning("calls of the system cannot be forbidden to the processes that read what clients send: %s", reason)
