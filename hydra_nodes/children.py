"""`NodeChild`: an incarnation of an instance on a node, as the supervisor sees it, and its end of the channel, which
queues until the instance has connected."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from hydra_engine.cluster.channel import FrontendEnd, OnClosed, OnMessages
from hydra_engine.core.messages import Failed, ToInstance
from hydra_engine.core.processes.status import ProcessStatus
from hydra_engine.errors import HydraError
from hydra_nodes.agent import Address

KILL_S = 5.0  # for an agent to answer


class AgentLost(Exception):
    """The agent does not answer; the message says why, as the end of a sentence that begins with the instance's
    name."""


class Agent(Protocol):
    """The methods of `NodeAgent`, called from the frontend. Each raises AgentLost besides its own errors."""

    async def host(self) -> str:
        """Returns the address of its node, which may be another after a restart."""
        ...

    async def start(self, name: str, incarnation: int, frontend: Address, order: bytes) -> None: ...

    async def wait(self, incarnation: int) -> str: ...

    async def kill(self, incarnation: int) -> None: ...

    async def find_tls_problem(self, folder: str) -> str: ...

    async def listen(self, incarnation: int, peer: str, peer_incarnation: int, ticket: bytes, host: str) -> Address: ...

    async def dial(
        self, incarnation: int, peer: str, peer_incarnation: int, ticket: bytes, address: Address
    ) -> None: ...


class QueuedEnd:
    """A `FrontendEnd` of an instance that connects later, or never."""

    def __init__(self) -> None:
        self._end: FrontendEnd | None = None
        self._queued: list[ToInstance] = []
        self._on_messages: OnMessages | None = None
        self._on_closed: OnClosed | None = None
        self._closed = False

    def attach(self, on_messages: OnMessages, on_closed: OnClosed) -> None:
        self._on_messages, self._on_closed = on_messages, on_closed
        if self._end is not None:
            self._end.attach(on_messages, on_closed)

    def connect(self, end: FrontendEnd) -> None:
        """Continues with `end`, which becomes this one's to close."""
        if self._closed:
            end.close()
            return
        self._end = end
        if self._on_messages is not None and self._on_closed is not None:
            end.attach(self._on_messages, self._on_closed)
        end.send(self._queued)
        self._queued = []

    def refuse(self, error: HydraError) -> None:
        """Reports why the instance may not connect, as if it had said so itself."""
        if self._on_messages is not None:
            self._on_messages([Failed(error.info(), error.exit_code)])

    def fail(self) -> None:
        """Reports that the instance will not connect."""
        if self._end is None and not self._closed:
            self._closed = True
            if self._on_closed is not None:
                self._on_closed()

    def send(self, messages: Sequence[ToInstance]) -> None:
        if self._end is not None:
            self._end.send(messages)
        elif not self._closed:
            self._queued += messages

    def close(self) -> None:
        self._closed = True
        if self._end is not None:
            self._end.close()


class NodeChild:
    pid = None
    killable = True

    def __init__(self, name: str, incarnation: int, agent: Agent) -> None:
        self.name = name
        self.incarnation = incarnation
        self.end = QueuedEnd()
        self.started = False  # the agent has started its process
        self._agent = agent
        self._how: str | None = None
        self._life: asyncio.Task[None] | None = None
        self._killing: asyncio.Task[None] | None = None

    def run(self, live: Callable[[], Awaitable[str]]) -> None:
        """Runs `live`, which returns how this incarnation ended."""

        async def run() -> None:
            self._end(await live())

        self._life = asyncio.create_task(run(), name=f"instance {self.name}")

    def _end(self, how: str) -> None:
        self._how = self._how or how
        self.end.fail()

    def exit_description(self) -> str | None:
        return self._how

    def kill(self) -> None:
        if not self.started:
            self.cancel()
            self._end("was killed while it started")
        elif self._how is None and self._killing is None:
            self._killing = asyncio.create_task(self._kill())

    async def _kill(self) -> None:
        """Kills the process. If its agent does not answer, the process ends with its node or with its channel, at the
        latest when the agent is asked to start the next one."""
        try:
            async with asyncio.timeout(KILL_S):
                await self._agent.kill(self.incarnation)
        except (AgentLost, TimeoutError):
            self.cancel()
            self.end.close()
            self._end("was lost with its node")

    def cancel(self) -> None:
        """Waits no longer for its end."""
        if self._life is not None:
            self._life.cancel()

    def status(self) -> ProcessStatus | None:
        return None

    def waited_s(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.end.close()
