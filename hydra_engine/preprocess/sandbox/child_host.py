"""The parent's side of the sandboxed children: starts them when needed, gives them jobs, watches them, ends those that
do not answer.

Every wait has an end, and its cause is reported: a limit, a crash or an invalid answer is the fault of the child, and
so of its job, which is not tried again; a signal from outside, a stop, or lack of processor time says nothing about the
job, which is tried once more in a new child. Does not trust a child's answers: they have a bounded size and a type, and
pixels are as many bytes of shared memory as the parent expects, copied before they are used. Does not know what the
jobs are.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Generic, TypeVar

import msgspec

from hydra_engine.core.processes.launch import parent_variable
from hydra_engine.core.processes.preloaded import Preloaded, Process
from hydra_engine.core.processes.status import is_stopped, longest_wait_s, waited_s
from hydra_engine.core.units import describe_exit
from hydra_engine.errors import EngineClosed, Unavailable, from_info
from hydra_engine.preprocess.sandbox.child_loop import Started, receive, send

logger = logging.getLogger(__name__)

A = TypeVar("A")

START_SECONDS = 180.0  # torch and transformers on a busy machine
MAX_ANSWER_BYTES = 1 << 16

_INHERITED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "PYTHONHOME", "PYTHONPATH")  # what an interpreter needs
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
        preloaded: Preloaded | None = None,
    ) -> None:
        """Starts the process, as a fork of `preloaded` if that is there; `on_end` is called on its thread when it has
        ended. Raises OSError or RuntimeError."""
        self._memory: _SharedMemory | None = None
        self._has_started = False
        self._ended = threading.Event()
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_LOOK_SECONDS)
        try:
            with theirs:
                process: Future[Process] = Future()
                whole = [*command, str(theirs.fileno()), *setup]
                arguments = (process, whole, theirs.fileno(), environment, on_end, preloaded)
                threading.Thread(target=self._live, args=arguments, name="sandbox", daemon=True).start()
                self._process = process.result()
        except (OSError, RuntimeError):
            self._socket.close()
            raise

    def _live(
        self,
        process: Future[Process],
        command: Sequence[str],
        descriptor: int,
        environment: Mapping[str, str],
        on_end: Callable[[Child], None],
        preloaded: Preloaded | None,
    ) -> None:
        """Starts the process, and reaps it when it ends. Needs its own thread, because for the kernel the end of the
        thread that starts a process is the end of the parent."""
        try:
            process.set_result(_start(command, descriptor, environment, preloaded))
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


def _start(
    command: Sequence[str], descriptor: int, environment: Mapping[str, str], preloaded: Preloaded | None
) -> Process:
    """Starts a process with one descriptor, in a session of its own: a terminal's Ctrl-C is the parent's business."""
    if preloaded is not None and preloaded.is_alive:
        with open(os.devnull, "r+b") as nothing:
            descriptors = {**dict.fromkeys(range(3), nothing.fileno()), descriptor: descriptor}
            return preloaded.fork(command, descriptors, environment, new_session=True)
    return subprocess.Popen(
        command,
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**environment, **parent_variable()},
        start_new_session=True,
    )


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


class ChildHost(Generic[A]):
    """The children that run one command, one per concurrent caller. Thread-safe."""

    def __init__(
        self,
        purpose: str,
        command: Sequence[str],
        answer_type: type[A],
        *,
        setup: object = None,
        variables: Mapping[str, str] = MappingProxyType({}),
        inherited: Iterable[str] = (),
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        preloaded: Preloaded | None = None,
    ) -> None:
        """`command FD SETUP` is started with the environment that an interpreter needs, the variables `inherited` from
        this process, and `variables`. `purpose` is a verb and an object: "decode images"."""
        self._purpose = purpose
        self._command = tuple(command)
        self._setup = () if setup is None else (msgspec.json.encode(setup).decode(),)
        self._environment = {**environment(inherited), **variables}
        self._answer_type = answer_type
        self._max_answer_bytes = max_answer_bytes
        self._preloaded = preloaded
        self._lock = threading.Lock()
        self._closed = False
        self._children: set[Child] = set()
        self._idle: list[Child] = []

    def run(self, job: object, seconds: float, num_pixel_bytes: int = 0) -> tuple[A, bytes]:
        """Returns a child's answer and the `num_pixel_bytes` pixels that it has written. Blocking. Raises ChildDied if
        the job has ended its child, Unavailable if no child can be started or two were stopped or killed, a child's
        error about its setup, EngineClosed."""
        try:
            return self._run_once(self._started_child(), job, seconds, num_pixel_bytes)
        except ChildDied as death:
            if death.by_itself:
                raise
        try:
            return self._run_once(self._started_child(fresh=True), job, seconds, num_pixel_bytes)
        except ChildDied as death:
            if death.by_itself:
                raise
            reason = f"processes to {self._purpose} were stopped, killed or given no time; try again later"
            raise Unavailable(reason) from death

    def _run_once(
        self, started: AbstractContextManager[Child], job: object, seconds: float, num_pixel_bytes: int
    ) -> tuple[A, bytes]:
        with started as child:
            return child.run(job, seconds, num_pixel_bytes, self._max_answer_bytes, self._answer_type)

    def warm_up(self, num_children: int) -> None:
        """Starts children without waiting for them."""
        for _ in range(num_children):
            self._give_back(self._new_child())

    def start(self, *, fresh: bool = False) -> None:
        """Starts one child, one more if `fresh`, and blocks until it is ready. Raises as `run` does."""
        try:
            with self._started_child(fresh=fresh):
                pass
        except ChildDied as death:
            raise self._unavailable() from death

    def pids(self) -> list[int]:
        with self._lock:
            return [child.pid for child in self._children]

    def close(self) -> None:
        """Ends all children now, whatever they do; callers that wait for one get EngineClosed."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = self._children.difference(idle)
        for child in busy:
            child.kill()  # its descriptors are closed by the thread that waits for it
        for child in idle:
            self._end(child)

    @contextmanager
    def _started_child(self, *, fresh: bool = False) -> Iterator[Child]:
        """Yields a child that is ready; it is kept afterwards, or ended on an exception. A failed start does not count
        against the job."""
        child = (None if fresh else self._idle_child()) or self._new_child()
        try:
            try:
                child.wait_until_started()
            except ChildDied as death:
                if not death.by_itself:
                    raise
                raise self._unavailable() from death
            yield child
        except BaseException as error:
            self._end(child)
            if self._closed:
                raise _engine_closed() from error
            if isinstance(error, ChildDied):
                logger.warning("a process to %s %s", self._purpose, error)
            raise
        self._give_back(child)

    def _idle_child(self) -> Child | None:
        """An idle child that is still alive, None if there is none."""
        while True:
            with self._lock:
                if self._closed:
                    raise _engine_closed()
                if not self._idle:
                    return None
                child = self._idle.pop()
            if child.is_alive:
                return child
            self._end(child)

    def _new_child(self) -> Child:
        """A new child, which may still be starting."""
        try:
            child = Child(self._command, self._setup, self._environment, self._on_end, self._preloaded)
        except (OSError, RuntimeError) as error:  # no process, or no thread to wait for it
            raise self._unavailable() from error
        with self._lock:
            if not self._closed:
                self._children.add(child)
                return child
        child.end()
        raise _engine_closed()

    def _give_back(self, child: Child) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(child)
                return
        self._end(child)

    def _end(self, child: Child) -> None:
        child.end()
        with self._lock:
            self._children.discard(child)

    def _on_end(self, child: Child) -> None:
        """Drops an idle child that has ended; a busy one is noticed by its user. Runs on the child's thread."""
        with self._lock:
            if child not in self._idle:
                return
            self._idle.remove(child)
        logger.warning("a process to %s %s while it had nothing to do", self._purpose, child.exit_description)
        self._end(child)

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"no process to {self._purpose} could be started; try again later")


def environment(inherited: Iterable[str]) -> dict[str, str]:
    variables = {name: os.environ[name] for name in (*_INHERITED, *inherited) if name in os.environ}
    package_parent = str(Path(__file__).parents[3])
    return variables | {"PYTHONPATH": os.pathsep.join(filter(None, [package_parent, variables.get("PYTHONPATH")]))}


def _engine_closed() -> EngineClosed:
    return EngineClosed("the engine was closed before the request was read")
