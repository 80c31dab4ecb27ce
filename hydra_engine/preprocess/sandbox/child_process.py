"""One sandboxed child process as its parent sees it: started, given one job after another, watched, ended.

Every wait has an end, and who is to blame for it is told: a limit, a crash or a strange answer is the child's, and so
its job's; a signal that somebody sent, a stop, or a machine without time for it is not. Does not trust what a child
says: an answer has a bounded size and a type, and pixels are as many bytes of shared memory as the parent expects,
copied out before anybody looks at them. Does not know what the jobs are.
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

_DEATH_SECONDS = 1.0  # from a socket that closes to a status
_LOOK_SECONDS = 0.25  # between two looks at a child that does not answer
_MAX_STOPPED_LOOKS = 4  # that find a child stopped, one behind the other; then it is ended
# How a process ends that crashes or exceeds its limits. Others send the rest, SIGKILL above all: the kernel when memory
# is short, or a person.
_OWN_SIGNALS = frozenset(
    (
        *(signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP),
        *(signal.SIGPROF, signal.SIGXCPU, signal.SIGXFSZ),
    )
)
_MIN_BYTES = 4 << 20  # of shared memory
_KEPT_BYTES = 64 << 20  # more is given back when the next answer needs less than half of it


class ChildDied(Exception):
    """A child did not answer its job, and has ended. The text is what follows a name in a sentence. `by_itself`: by a
    limit or a crash or by what it answered, and not because it was stopped, starved or killed."""

    def __init__(self, reason: str, by_itself: bool = False) -> None:
        super().__init__(reason)
        self.by_itself = by_itself


class Child:
    """One process, for one thread at a time. Still starting when it is made."""

    def __init__(
        self,
        command: Sequence[str],
        setup: Sequence[str],
        environment: Mapping[str, str],
        on_end: Callable[[Child], None],
    ) -> None:
        """Raises OSError, RuntimeError."""
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
        """Starts the process, and reaps it when it ends. A thread of its own, because the kernel takes the end of the
        one that starts a process for the end of the parent."""
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
    def how_it_ended(self) -> str:
        return describe_exit(self._process.wait())

    def wait_until_started(self) -> None:
        """Raises ChildDied, or what the child says about its setup."""
        if not self._has_started:
            with self._watched():
                data = receive(self._socket, MAX_ANSWER_BYTES, _Patience(self.pid, START_SECONDS).look)
                started = msgspec.msgpack.decode(data, type=Started)
            if started.error is not None:
                raise from_info(started.error)
            if started.uncontained is not None:
                tell_uncontained(started.uncontained)
            self._has_started = True

    def run(
        self, job: object, seconds: float, num_pixel_bytes: int, max_answer_bytes: int, answer_type: type[A]
    ) -> tuple[A, bytes]:
        """Raises ChildDied."""
        with self._watched():
            look = _Patience(self.pid, seconds).look
            send(self._socket, job, self._new_memory(num_pixel_bytes), look)
            answer = msgspec.msgpack.decode(receive(self._socket, max_answer_bytes, look), type=answer_type)
            return answer, b"" if self._memory is None else self._memory.read(num_pixel_bytes)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Tells how the child failed, and waits a moment for one that is dying."""
        try:
            yield
        except msgspec.MsgspecError as error:
            raise ChildDied("gave an answer that cannot be read", by_itself=True) from error
        except (OSError, EOFError) as error:
            if not self._ended.wait(_DEATH_SECONDS):
                raise ChildDied("closed its socket", by_itself=True) from error
            status = self._process.wait()
            raise ChildDied(self.how_it_ended, by_itself=status >= 0 or -status in _OWN_SIGNALS) from error

    def kill(self) -> None:
        """Kills it, from any thread; whoever waits for an answer gets an error."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        self.kill()
        self._socket.close()
        self._forget_memory()

    def _new_memory(self, size: int) -> list[int]:
        """The descriptor of memory for `size` bytes of pixels, if the child does not have that."""
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
    """Bounds the wait for a child that has something to do: by a deadline, and sooner where somebody has stopped it."""

    def __init__(self, pid: int, seconds: float) -> None:
        self._pid = pid
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._next_look = 0.0
        self._stopped_looks = 0
        self._waited_before = waited_s(pid)

    def look(self) -> None:
        """Raises ChildDied. Looks are counted, not seconds: this process may have been stopped itself."""
        now = time.monotonic()
        if now >= self._deadline:
            raise ChildDied("did not answer in time", by_itself=not self._was_starved())
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS / 2
        self._stopped_looks = self._stopped_looks + 1 if is_stopped(self._pid) else 0
        if self._stopped_looks >= _MAX_STOPPED_LOOKS:
            raise ChildDied("was stopped")

    def _was_starved(self) -> bool:
        """It had no processor for half of the time. One that sleeps does so because of its job, as does one that has
        worked all the time."""
        return longest_wait_s(self._pid, self._waited_before) >= self._seconds / 2


class _SharedMemory:
    """Shared with one child, whose pixels go there. Sealed, so its size is what it was made with."""

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
        """The first `size` bytes as they are now."""
        data = os.pread(self.descriptor, size, 0)
        if len(data) < size:
            raise EOFError
        return data

    def close(self) -> None:
        os.close(self.descriptor)


@cache
def tell_uncontained(reason: str) -> None:
    """Once."""
    logger.warning("calls of the system cannot be forbidden to the processes that read what clients send: %s", reason)
