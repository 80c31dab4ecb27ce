"""An incarnation of an instance: a process with its two sockets, or a thread of this process.

Starts it, reports whether and how it has ended, kills it, hands it connections. `supervisor.py` makes the decisions.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Protocol

from hydra_engine.clock import Clock
from hydra_engine.cluster import channel
from hydra_engine.cluster.channel import (
    FrontendEnd,
    FrontendSocket,
    LocalFrontendEnd,
    LocalInstanceEnd,
    local_channel,
    send_with,
)
from hydra_engine.cluster.spawn import OPENMP_IDLE, Spawned, spawn
from hydra_engine.core.processes.preloaded import Preloaded, Process
from hydra_engine.core.processes.status import ProcessStatus, process_status, waited_s
from hydra_engine.core.units import describe_exit

REAPING_S = 0.01  # between two looks at a process that is about to end
# LLVM's and Intel's OpenMP, which some builds of torch come with, keep a page of this name for each process and remove
# it in an exit handler, which a killed process never runs. One page for each death would fill the volume in the end.
_OPENMP_PAGE = "/dev/shm/__KMP_REGISTERED_LIB_{pid}_{uid}"


class Child(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def incarnation(self) -> int: ...

    @property
    def end(self) -> FrontendEnd: ...

    @property
    def pid(self) -> int | None:
        """The process id; None: no process of its own on this machine."""
        ...

    @property
    def killable(self) -> bool:
        """False for a thread."""
        ...

    def exit_description(self) -> str | None:
        """Returns how it ended, as the end of a sentence that begins with its name; None while it runs. Reaps a
        process."""
        ...

    def kill(self) -> None: ...

    def status(self) -> ProcessStatus | None:
        """The status of its process and its descendants; None if that cannot be known."""
        ...

    def waited_s(self) -> dict[str, float]:
        """Seconds that each thread was ready but had no CPU, by thread id; empty if the system does not count them."""
        ...

    def close(self) -> None:
        """Closes this process's ends of its channels."""
        ...


class ProcessChild:
    killable = True

    def __init__(
        self, name: str, incarnation: int, end: FrontendSocket, control: socket.socket, process: Process
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.end = end
        self.pid = process.pid
        self._control = control
        self._process = process

    @classmethod
    async def launch(
        cls,
        command: Sequence[str],
        start: channel.Start,
        ahead: Spawned | None = None,
        preloaded: Preloaded | None = None,
    ) -> ProcessChild:
        """Takes `ahead`, a process that was started early for this instance, or starts one. Its messages arrive on the
        next turn of the loop at the earliest. Raises OSError."""
        spawned = ahead or spawn(command, start.name, preloaded)
        try:
            end = await FrontendSocket.open(spawned.channel)
        except BaseException:
            spawned.discard()
            raise
        end.send_start(start)
        return cls(start.name, start.incarnation, end, spawned.control, spawned.process)

    def exit_description(self) -> str | None:
        was_reaped = self._process.returncode is not None
        code = self._process.poll()
        if code is None:
            return None
        if not was_reaped:
            remove_openmp_page(self.pid)
        return describe_exit(code)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def status(self) -> ProcessStatus | None:
        return process_status(self.pid)

    def waited_s(self) -> dict[str, float]:
        return waited_s(self.pid)

    def connect(self, peer: channel.Connect, sock: socket.socket) -> None:
        """Hands over one end of a connection; the caller still closes `sock`. Raises OSError."""
        send_with(self._control, channel.encode_connect(peer), [sock.fileno()])

    def close(self) -> None:
        self.end.close()
        self._control.close()


class ThreadChild:
    """An instance on a thread of this process. It is the only instance, so it has no peers."""

    pid = None
    killable = False

    def __init__(self, name: str, incarnation: int, end: LocalFrontendEnd, thread: threading.Thread) -> None:
        self.name = name
        self.incarnation = incarnation
        self.end = end
        self._thread = thread

    @classmethod
    def launch(cls, start: channel.Start, *, strict: bool) -> ThreadChild:
        frontend, instance_end = local_channel(asyncio.get_running_loop(), strict=strict)
        thread = threading.Thread(
            target=_run_local, args=(start, instance_end), name=f"instance-{start.name}", daemon=True
        )
        thread.start()
        return cls(start.name, start.incarnation, frontend, thread)

    def exit_description(self) -> str | None:
        return None if self._thread.is_alive() else "ended"

    def kill(self) -> None:
        """Does nothing: a thread cannot be killed."""

    def status(self) -> ProcessStatus | None:
        return None

    def waited_s(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.end.close()


async def wait_for_end(children: Sequence[Child], clock: Clock, grace_s: float) -> list[Child]:
    """Waits until the children have ended; returns the processes that are late. `grace_s` excludes the time that a
    process waits for a CPU. Threads are waited for without a limit."""
    begun_s = clock.now()
    before = [child.waited_s() for child in children]
    while True:
        left = [(child, waits) for child, waits in zip(children, before, strict=True) if not child.exit_description()]
        late_s = clock.now() - begun_s - grace_s
        if not left or (late_s >= 0 and all(is_late(child, waits, late_s) for child, waits in left)):
            return [child for child, _ in left]
        await asyncio.sleep(REAPING_S)


def is_late(child: Child, waited_before: Mapping[str, float], late_s: float) -> bool:
    """True if the child can be killed and is late even without the CPU wait of its most starved thread."""
    waits = (waited_s - waited_before.get(thread, 0.0) for thread, waited_s in child.waited_s().items())
    return child.killable and max(waits, default=0.0) <= late_s


def remove_openmp_page(pid: int) -> None:
    """Removes the page of a process that has been reaped; ignores one that is missing or another user's."""
    with contextlib.suppress(OSError):
        os.unlink(_OPENMP_PAGE.format(pid=pid, uid=os.getuid()))


def _run_local(start: channel.Start, end: LocalInstanceEnd) -> None:
    os.environ.setdefault(*OPENMP_IDLE)  # has an effect unless the caller loaded torch before
    # The one place where the frontend's code may load torch: the instance runs in this process.
    build = import_module("hydra_engine.instance.build")
    try:
        build.run_instance(start.config, start.name, end, end, end.wake, context=start.context, connect=None)
    finally:
        end.close()
