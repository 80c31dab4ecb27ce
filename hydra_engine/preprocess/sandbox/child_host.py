"""The parent's side of the sandboxed children: starts them when needed, gives them jobs, ends those that do not answer.

One job costs at most one child, and every wait has an end. Does not trust what a child says: an answer has a bounded
size and a type, and pixels are as many bytes of shared memory as the parent expects, copied out before anybody looks at
them. Does not know what the jobs are.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Generic, TypeVar

import msgspec

from hydra_engine.core.units import describe_exit
from hydra_engine.errors import EngineClosed, Unavailable, from_info
from hydra_engine.preprocess.sandbox.child_loop import Started, receive, send

logger = logging.getLogger(__name__)

A = TypeVar("A")

START_SECONDS = 180.0  # torch and transformers on a busy machine
MAX_ANSWER_BYTES = 1 << 16

_DEATH_SECONDS = 1.0  # from a socket that closes to a status
_MIN_BYTES = 4 << 20  # of shared memory
_KEPT_BYTES = 64 << 20  # more is given back when the next answer needs less than half of it
_INHERITED = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "PYTHONHOME", "PYTHONPATH")  # what an interpreter needs


class ChildDied(Exception):
    """A child did not answer its job, and has ended. The text is what follows a name in a sentence. `by_itself`: by a
    limit or a crash, and not because the parent or somebody else killed it."""

    def __init__(self, reason: str, by_itself: bool = False) -> None:
        super().__init__(reason)
        self.by_itself = by_itself


class ChildHost(Generic[A]):
    """The children that run one command, as many as threads that call at the same time. Safe from any thread."""

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
    ) -> None:
        """`command FD SETUP` is started with the environment that an interpreter needs, the variables `inherited` from
        this process, and `variables`. `purpose` is a verb and an object: "decode images"."""
        self._purpose = purpose
        self._command = tuple(command)
        self._setup = () if setup is None else (msgspec.json.encode(setup).decode(),)
        self._environment = {**_environment(inherited), **variables}
        self._answer_type = answer_type
        self._max_answer_bytes = max_answer_bytes
        self._lock = threading.Lock()
        self._closed = False
        self._children: set[_Child] = set()
        self._idle: list[_Child] = []

    def run(self, job: object, seconds: float, num_pixel_bytes: int = 0) -> tuple[A, bytes]:
        """Blocking. A child's answer and the pixels that it left. Raises ChildDied, Unavailable where no child can be
        started, what a child says about its setup, EngineClosed."""
        with self._started_child() as child:
            return child.run(job, seconds, num_pixel_bytes, self._max_answer_bytes, self._answer_type)

    def warm_up(self, num_children: int) -> None:
        """Starts them and does not wait: the first jobs wait for what is left of that."""
        for _ in range(num_children):
            self._give_back(self._new_child())

    def start(self) -> None:
        """Blocking. One child, ready. Raises as `run` does."""
        with self._started_child():
            pass

    def pids(self) -> list[int]:
        with self._lock:
            return [child.pid for child in self._children]

    def close(self) -> None:
        """Ends all children now, whatever they do; whoever waits for one gets EngineClosed."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = self._children.difference(idle)
        for child in busy:
            child.kill()  # its descriptors are closed where it is waited for
        for child in idle:
            self._end(child)

    @contextmanager
    def _started_child(self) -> Iterator[_Child]:
        """Given back afterwards, or ended where something is raised."""
        child = self._idle_child() or self._new_child()
        try:
            try:
                child.wait_until_started()
            except ChildDied as death:
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

    def _idle_child(self) -> _Child | None:
        """One that did not die since its last job."""
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

    def _new_child(self) -> _Child:
        """One that may still be starting."""
        try:
            child = _Child(self._command, self._setup, self._environment)
        except OSError as error:
            raise self._unavailable() from error
        with self._lock:
            if not self._closed:
                self._children.add(child)
                return child
        child.end()
        raise _engine_closed()

    def _give_back(self, child: _Child) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(child)
                return
        self._end(child)

    def _end(self, child: _Child) -> None:
        child.end()
        with self._lock:
            self._children.discard(child)

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"no process to {self._purpose} could be started; try again later")


class _Child:
    """One process, for one thread at a time. Still starting when it is made."""

    def __init__(self, command: Sequence[str], setup: Sequence[str], environment: Mapping[str, str]) -> None:
        self._memory: _SharedMemory | None = None
        self._has_started = False
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno()), *setup],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,  # a terminal's Ctrl-C is the parent's business
                )
        except OSError:
            self._socket.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_started(self) -> None:
        """Raises ChildDied, or what the child says about its setup."""
        if not self._has_started:
            with self._watched():
                data = receive(self._socket, MAX_ANSWER_BYTES, time.monotonic() + START_SECONDS)
                error = msgspec.msgpack.decode(data, type=Started).error
            if error is not None:
                raise from_info(error)
            self._has_started = True

    def run(
        self, job: object, seconds: float, num_pixel_bytes: int, max_answer_bytes: int, answer_type: type[A]
    ) -> tuple[A, bytes]:
        """Raises ChildDied."""
        deadline = time.monotonic() + seconds
        with self._watched():
            self._socket.settimeout(seconds)
            send(self._socket, job, self._new_memory(num_pixel_bytes))
            answer = msgspec.msgpack.decode(receive(self._socket, max_answer_bytes, deadline), type=answer_type)
            return answer, b"" if self._memory is None else self._memory.read(num_pixel_bytes)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Tells how the child failed, and waits a moment for one that is dying."""
        try:
            yield
        except TimeoutError as error:
            raise ChildDied("did not answer in time") from error
        except msgspec.MsgspecError as error:
            raise ChildDied("gave an answer that cannot be read") from error
        except (OSError, EOFError) as error:
            try:
                status = self._process.wait(_DEATH_SECONDS)
            except subprocess.TimeoutExpired:
                raise ChildDied("closed its socket") from error
            raise ChildDied(describe_exit(status), by_itself=status != -signal.SIGKILL) from error

    def kill(self) -> None:
        """From any thread; whoever waits for an answer gets an error."""
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


def _environment(inherited: Iterable[str]) -> dict[str, str]:
    variables = {name: os.environ[name] for name in (*_INHERITED, *inherited) if name in os.environ}
    package_parent = str(Path(__file__).parents[3])
    return variables | {"PYTHONPATH": os.pathsep.join(filter(None, [package_parent, variables.get("PYTHONPATH")]))}


def _engine_closed() -> EngineClosed:
    return EngineClosed("the engine was closed before the request was read")
