"""Starts the instances of a topology and gives the front one link to each.

Two ways to run an instance: on a thread of this process with an in-memory channel (the embedded default), or as a
process of its own with a socketpair that only it inherits. Either way the link reports progress, readiness and death
in the same form. Does not know requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from hydra_engine.cluster import wire
from hydra_engine.cluster.channel import FrontEnd, FrontSocket, LocalInstanceEnd, local_channel
from hydra_engine.config import EngineConfig
from hydra_engine.core.messages import WIRE_VERSION, Failed, InstanceSummary, Loading, Ready, Shutdown, ToFront
from hydra_engine.core.roles import Topology
from hydra_engine.errors import ConfigError, EngineClosed, HydraError, from_info

logger = logging.getLogger(__name__)

OnProgress = Callable[[Loading], None]
_EXIT_GRACE_S = 5.0
# An idle OpenMP team that spins would steal the cores from the other lane and from the extension's threads.
_OPENMP_IDLE = ("OMP_WAIT_POLICY", "PASSIVE")


@dataclass(slots=True)
class InstanceLink:
    """What the front holds of one instance. `send` and the callbacks belong to the front's loop."""

    name: str
    end: FrontEnd
    summary: InstanceSummary
    process: subprocess.Popen[bytes] | None
    thread: threading.Thread | None


class Supervisor:
    """Starts, stops and watches instances. Callbacks run on the loop that called `start`."""

    def __init__(self, config: EngineConfig, *, processes: bool, strict_channel: bool = False) -> None:
        topology = Topology.parse(config.topology)
        if len(topology.instances) > 1:
            raise ConfigError(
                f"topology {config.topology}: this version serves one instance; use EPD", param="topology"
            )
        if topology.instances[0].role.letters != "EPD":
            raise ConfigError(f"topology {config.topology}: one instance must serve EPD", param="topology")
        self._config = config
        self._processes = processes
        self._strict = strict_channel
        self._links: list[InstanceLink] = []
        self._end: FrontEnd | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    async def start(
        self,
        on_progress: OnProgress,
        on_messages: Callable[[list[ToFront]], None],
        on_lost: Callable[[str], None],
    ) -> list[InstanceLink]:
        """Returns when every instance is ready; raises its HydraError when one cannot start."""
        name = "epd0"
        ready: asyncio.Future[InstanceSummary] = asyncio.get_running_loop().create_future()

        def receive(messages: list[ToFront]) -> None:
            rest: list[ToFront] = []
            for message in messages:
                if isinstance(message, Loading):
                    on_progress(message)
                elif isinstance(message, Ready):
                    _resolve(ready, _checked(message))
                elif isinstance(message, Failed):
                    _resolve(ready, from_info(message.error))
                else:
                    rest.append(message)
            if rest:
                on_messages(rest)

        def closed() -> None:
            if not ready.done():
                _resolve(ready, EngineClosed(f"instance {name} ended while it started; see its log above"))
            else:
                on_lost(name)

        self._end = await self._spawn(name, receive, closed)
        try:
            summary = await ready
        except BaseException:
            await self.stop()
            raise
        self._links = [InstanceLink(name, self._end, summary, self._process, self._thread)]
        return self._links

    async def _spawn(self, name: str, receive: Callable[[list[ToFront]], None], closed: Callable[[], None]) -> FrontEnd:
        if not self._processes:
            front, instance_end = local_channel(asyncio.get_running_loop(), strict=self._strict)
            front.attach(receive, closed)
            self._thread = threading.Thread(
                target=_run_local, args=(self._config, name, instance_end), name=f"instance-{name}", daemon=True
            )
            self._thread.start()
            return front
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._process = _spawn_process(theirs)
        theirs.close()
        end = await FrontSocket.open(ours)
        end.attach(receive, closed)
        end.send_start(wire.Start(WIRE_VERSION, name, "EPD", self._config))
        return end

    async def stop(self) -> None:
        """Asks instances to end and waits; a process that does not follow is killed."""
        if self._end is not None:
            self._end.send([Shutdown()])
        loop = asyncio.get_running_loop()
        if self._thread is not None:
            await loop.run_in_executor(None, self._thread.join)
        if self._process is not None:
            await loop.run_in_executor(None, _end_process, self._process)
        if self._end is not None:
            self._end.close()


def _checked(message: Ready) -> InstanceSummary | HydraError:
    if message.version != WIRE_VERSION:
        return ConfigError(f"the instance speaks wire version {message.version}, the front {WIRE_VERSION}")
    return message.summary


def _resolve(future: asyncio.Future[InstanceSummary], outcome: InstanceSummary | HydraError) -> None:
    if future.done():
        return
    if isinstance(outcome, HydraError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _run_local(config: EngineConfig, name: str, end: LocalInstanceEnd) -> None:
    os.environ.setdefault(*_OPENMP_IDLE)  # has an effect unless the caller loaded torch before
    # The one place where the front's code may load torch: the instance runs in this process.
    build = import_module("hydra_engine.instance.build")
    try:
        build.run_instance(config, name, end, end, end.wake)
    finally:
        end.close()


def _spawn_process(theirs: socket.socket) -> subprocess.Popen[bytes]:
    package_parent = str(Path(__file__).resolve().parents[2])
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_parent, environment.get("PYTHONPATH")]))
    environment.setdefault(*_OPENMP_IDLE)
    command = [sys.executable, "-m", "hydra_engine.cluster.process", "--fd", str(theirs.fileno())]
    return subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_EXIT_GRACE_S)
    except subprocess.TimeoutExpired:
        logger.warning("instance process did not end in %.0f s and is killed", _EXIT_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
