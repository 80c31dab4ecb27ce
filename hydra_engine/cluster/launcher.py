"""The interface of what starts and connects instances, and its version for this machine.

Packages beside the engine add others, for clusters of machines, as entry points of the group `hydra_engine.launchers`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, MutableMapping, Sequence
from typing import Protocol

from hydra_engine.cluster import channel
from hydra_engine.cluster.children import Child, ProcessChild, ThreadChild
from hydra_engine.cluster.spawn import COMMAND, Spawned
from hydra_engine.config import EngineConfig
from hydra_engine.core.options import LAUNCHERS
from hydra_engine.core.processes.preloaded import Preloaded
from hydra_engine.entry_points import load_entry_point
from hydra_engine.errors import ConfigError

Ahead = MutableMapping[str, Spawned]  # by the names of instances; an entry is removed when it is used
OnFailure = Callable[[str], None]


class Launcher(Protocol):
    """The starter of instances. Its methods run on the supervisor's loop and must not block it."""

    def describe(self) -> list[tuple[str, str]]:
        """Returns what `doctor` says of the machines, by name. Call it on a launcher that is not opened. Raises
        HydraError."""
        ...

    async def open(self) -> None:
        """Prepares for the instances of the topology. Raises HydraError if they cannot be placed; `close` is called
        after that too."""
        ...

    async def launch(self, start: channel.Start, node: str, preloaded: Preloaded | None) -> Child:
        """Starts an instance without waiting for it: a failed start shows in the child's `exit_description`. It is a
        fork of `preloaded` where that is possible. Raises OSError."""
        ...

    def connect(self, one: Child, other: Child, on_failure: OnFailure) -> None:
        """Connects two live children of this launcher. Raises OSError, or calls `on_failure` with the problem later,
        on the loop."""
        ...

    async def close(self) -> None:
        """Frees what `open` took, after all children have been closed. Idempotent."""
        ...


class LocalLauncher:
    """Runs each instance in a process of this machine or, if not `processes`, the only one on a thread of this
    process. `ahead`: processes that have been started already, for the first incarnation of their instances."""

    def __init__(
        self, *, processes: bool, strict: bool = False, command: Sequence[str] = COMMAND, ahead: Ahead | None = None
    ) -> None:
        self._processes = processes
        self._strict = strict
        self._command = command
        self._ahead = {} if ahead is None else ahead

    def describe(self) -> list[tuple[str, str]]:
        return []

    async def open(self) -> None:
        """Does nothing."""

    async def launch(self, start: channel.Start, node: str, preloaded: Preloaded | None) -> Child:
        assert not node
        if self._processes:
            return await ProcessChild.launch(self._command, start, self._ahead.pop(start.name, None), preloaded)
        return ThreadChild.launch(start, strict=self._strict)

    def connect(self, one: Child, other: Child, on_failure: OnFailure) -> None:
        """Raises OSError. This process closes its copies of both ends at once, so that a death of one ends the
        connection for the other."""
        assert isinstance(one, ProcessChild) and isinstance(other, ProcessChild)
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with left, right:
            one.connect(channel.Connect(other.name, other.incarnation), left)
            other.connect(channel.Connect(one.name, one.incarnation), right)

    async def close(self) -> None:
        """Does nothing."""


def load_launcher(name: str, config: EngineConfig) -> Launcher:
    """Returns the launcher of this name. Raises ConfigError."""
    make: Callable[[EngineConfig], Launcher] | None = load_entry_point(LAUNCHERS, name)
    if make is None:
        raise ConfigError(f"nothing is installed for --cluster {name[:20]}", param="launcher")
    return make(config)
