"""A process that imports modules once, and is forked for every process that needs them.

`Preloaded` starts `launch MODULE` commands as forks of it: importing torch and transformers takes seconds and hundreds
of megabytes, which three processes of one engine would pay each. A fork runs its module from the beginning, with its
own arguments, environment and descriptors; it dies with the process that it was forked from, and that with its parent.
The process that is forked computes nothing and has one thread.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from importlib import import_module
from typing import NoReturn, Protocol

import msgspec

from hydra_engine.core.processes.launch import PARENT, bind_to_parent, command, parent_variable

logger = logging.getLogger(__name__)

_MAX_REQUEST = 1 << 17  # bytes
_MAX_DESCRIPTORS = 32
_FIRST_DESCRIPTOR = 512  # of a fork's, before they get the numbers that it expects
_INTEGER = 8  # bytes
_END_SECONDS = 1.0


class Process(Protocol):
    """The part of a Popen that is used of a child process."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class _Job(msgspec.Struct):
    module: str
    arguments: list[str]
    environment: dict[str, str]
    descriptors: list[int]  # the numbers that the sent ones become
    new_session: bool
    inherited: dict[str, bytes]


class _Forked:
    """A fork. Its state comes over `status`: its pid, later its exit code. Thread-safe."""

    def __init__(self, status: socket.socket) -> None:
        self._status = status
        self._lock = threading.Lock()
        self.returncode: int | None = None
        data = status.recv(_INTEGER)
        if not data:
            raise OSError("the process to be forked has ended")
        self.pid = int.from_bytes(data, "little")
        # Not another process that gets the number.
        self._handle = open(os.pidfd_open(self.pid), "rb", buffering=0)  # noqa: SIM115

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                try:
                    data = self._status.recv(_INTEGER, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return None
                # Without a message the process that it was forked from has ended, and it with that.
                self.returncode = int.from_bytes(data, "little", signed=True) if data else -signal.SIGKILL
                self._status.close()
                self._handle.close()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code, as `Popen` has it. Raises TimeoutExpired."""
        if (code := self.poll()) is None:
            waiting = select.poll()
            with self._lock:
                if self.returncode is not None:
                    return self.returncode
                waiting.register(self._status, select.POLLIN)
            waiting.poll(None if timeout is None else 1000 * timeout)
            code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
        return code

    def kill(self) -> None:
        with self._lock:
            if self.returncode is None:
                with suppress(ProcessLookupError):  # it has ended
                    signal.pidfd_send_signal(self._handle.fileno(), signal.SIGKILL)


class Preloaded:
    """The process that is forked. Linux kills it, and its forks, when the thread that creates this object ends. Close
    it. Thread-safe."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts it with `environment`, without waiting for its imports. Raises OSError."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._inherited: dict[str, bytes] = {}
        self._has_forked = False
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*command(__name__), str(theirs.fileno()), *modules],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**environment, **parent_variable()},
                    start_new_session=True,
                )
            except OSError:
                self._socket.close()
                raise

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def bequeath(self, name: str, value: bytes) -> None:
        """Gives forks from now on `value` as `INHERITED[name]`; a few kilobytes."""
        with self._lock:
            self._inherited = self._inherited | {name: value}

    def fork(
        self,
        command: Sequence[str],
        descriptors: Mapping[int, int],
        environment: Mapping[str, str],
        *,
        new_session: bool,
    ) -> Process:
        """Runs a command of `launch.command`. `descriptors`: ours, by the numbers that they get in the fork, which has
        no others. Blocks until the imports are done. Raises OSError if it has ended, or for too large a command."""
        *_, launcher, module = command[:4]
        assert launcher == "hydra_engine.core.processes.launch", "a command of launch.command"
        numbers = list(descriptors)
        job = _Job(module, list(command[4:]), dict(environment), numbers, new_session, self._inherited)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs, self._lock:
                self._has_forked = True
                sent = [theirs.fileno(), *(descriptors[number] for number in numbers)]
                socket.send_fds(self._socket, [msgspec.msgpack.encode(job)], sent)
            return _Forked(ours)
        except OSError:
            ours.close()
            raise

    def close(self) -> None:
        """Ends the process, and forks that are left. Idempotent."""
        with self._lock:
            self._socket.close()
        try:
            self._process.wait(_END_SECONDS if self._has_forked else 0.0)
        except subprocess.TimeoutExpired:  # it still imports
            self._process.kill()
            self._process.wait()


# What `ModelImplementation.build_spec` may fork.
CURRENT: ContextVar[Preloaded | None] = ContextVar("preloaded", default=None)
INHERITED: dict[str, bytes] = {}  # in a fork, by `Preloaded.bequeath`


# ---- the process that is forked


class _Server:
    """The loop of the process that is forked."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._statuses: dict[int, socket.socket] = {}  # by pid
        self._awake, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake)

    def serve(self) -> _Job:
        """Returns in a fork, with its job. Exits when the parent has gone."""
        waiting = select.poll()
        waiting.register(self._awake, select.POLLIN)
        waiting.register(self._connection, select.POLLIN)
        while True:
            for ready, _ in waiting.poll():
                if ready == self._awake:
                    os.read(self._awake, 1 << 12)
                    self._reap()
                elif (job := self._fork()) is not None:
                    return job

    def _reap(self) -> None:
        while self._statuses:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with self._statuses.pop(pid) as end:
                _tell(end, os.waitstatus_to_exitcode(status))

    def _fork(self) -> _Job | None:
        """Takes a request. Returns its job in the fork."""
        data, descriptors, _, _ = socket.recv_fds(self._connection, _MAX_REQUEST, _MAX_DESCRIPTORS)
        if not data:
            self._end()
        job = msgspec.msgpack.decode(data, type=_Job)
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            self._become(job, descriptors[1:], parent)
            os.close(descriptors[0])
            return job
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        self._statuses[pid] = socket.socket(fileno=descriptors[0])
        _tell(self._statuses[pid], pid)
        return None

    def _end(self) -> NoReturn:
        """Exits, after all forks that are left."""
        for pid in self._statuses:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        sys.exit(0)

    def _become(self, job: _Job, descriptors: Sequence[int], parent: int) -> None:
        """Makes a fork of this process what the job says, with nothing of its own."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(job.environment | {PARENT: str(parent)})
        bind_to_parent()
        if job.new_session:
            os.setsid()
        self._connection.close()
        for end in self._statuses.values():
            end.close()
        for descriptor in (self._awake, self._wake):
            os.close(descriptor)
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR) for descriptor in descriptors]
        for number, descriptor in zip(job.descriptors, high, strict=True):
            os.dup2(descriptor, number, inheritable=False)
        for descriptor in (*high, *(one for one in descriptors if one not in job.descriptors)):
            os.close(descriptor)


def _tell(end: socket.socket, number: int) -> None:
    try:
        end.send(number.to_bytes(_INTEGER, "little", signed=True))
    except BrokenPipeError:  # nobody asks any more
        return


def main() -> None:
    bind_to_parent()
    descriptor, *modules = sys.argv[1:]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # draining is the parent's business; its end ends this process
    gc.disable()
    for module in modules:
        import_module(module)
    gc.freeze()  # forks do not look at, and so do not copy, what was imported
    gc.enable()
    atexit.register(gc.unfreeze)  # or libraries call it a leak
    job = _Server(socket.socket(fileno=int(descriptor))).serve()
    # Not of this module, which is __main__, but of the one that others import.
    import_module("hydra_engine.core.processes.preloaded").INHERITED.update(job.inherited)
    sys.argv[1:] = job.arguments
    runpy.run_module(job.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
