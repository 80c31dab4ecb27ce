"""State that requests share: limits of clients, bytes of bodies, the generations that run and their end, metrics,
viewers.

Does not know formats or sockets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Self

from aiohttp import web

from hydra_engine.config import ServerConfig
from hydra_engine.core.byte_budget import ByteBudget
from hydra_engine.errors import HydraError, RequestAborted, Unavailable
from hydra_engine.server.context import ANSWER_ID, REQUEST_ID, TENANT
from hydra_engine.server.http.admission import ClientLimits, client_of
from hydra_engine.telemetry.metrics import Metrics

MAX_VIEWERS = 8  # of the page's events


class Scope:
    """`async with`: what happens inside can be ended by others, at whatever is waited for."""

    def __init__(self) -> None:
        self._timeout = asyncio.timeout(None)
        self._error: HydraError | None = None

    def end(self, error: HydraError) -> bool:
        """`error` is what the client is told. False: it is ending already."""
        if self._error is not None:
            return False
        self._error = error
        self._timeout.reschedule(asyncio.get_running_loop().time())
        return True

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, value, traceback)
        except TimeoutError:  # a TimeoutError of what was inside does not come from there
            assert self._error is not None
            raise self._error from None


class Lifecycle:
    """The generations that run. A drain refuses new ones; running ones are ended by their ids, or all by `expire`.

    A client reaches those of its tenant only. Clients choose ids, so several generations may share one.
    """

    def __init__(self) -> None:
        self.draining = False
        self._running: dict[Scope, tuple[str, tuple[str, ...]]] = {}  # (tenant, ids)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def check(self) -> None:
        if self.draining:
            raise Unavailable("the server is shutting down and takes no new requests", code="draining", retry_after_s=5)

    @contextmanager
    def running(self, scope: Scope, tenant: str, ids: tuple[str, ...]) -> Iterator[None]:
        """Raises Unavailable while it drains."""
        self.check()
        self._running[scope] = tenant, ids
        self._idle.clear()
        try:
            yield
        finally:
            del self._running[scope]
            if not self._running:
                self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def end(self, tenant: str, request_id: str) -> int:
        """Ends those with this id; how many were not ending yet."""
        scopes = [scope for scope, (owner, ids) in self._running.items() if owner == tenant and request_id in ids]
        return sum([scope.end(RequestAborted("the request was ended by its id")) for scope in scopes])

    def expire(self) -> None:
        message = "the server shut down before this request could finish"
        for scope in list(self._running):
            scope.end(Unavailable(message, code="draining", retry_after_s=5))


class ServerState:
    def __init__(self, config: ServerConfig, model_name: str) -> None:
        self.lifecycle = Lifecycle()
        self.metrics = Metrics(model_name)
        self.bodies = ByteBudget(config.max_inflight_body_bytes)
        self.clients = ClientLimits(config.max_requests_per_client, config.requests_per_minute)
        self._num_viewers = 0

    @contextmanager
    def viewer(self) -> Iterator[None]:
        """One that watches the page. Raises Unavailable when there are too many."""
        if self._num_viewers >= MAX_VIEWERS:
            message = f"{MAX_VIEWERS} pages are watching this server already; close one of them"
            raise Unavailable(message, code="overloaded", retry_after_s=5)
        self._num_viewers += 1
        try:
            yield
        finally:
            self._num_viewers -= 1


STATE = web.AppKey("state", ServerState)


@asynccontextmanager
async def admitted(request: web.Request, num_answers: int) -> AsyncIterator[None]:
    """Where the generation of a request runs. Raises RateLimited or Unavailable when its client has too many or the
    server drains, and inside, at whatever is waited for, what the client is told when its id or a drain ends it."""
    state, ids = request.app[STATE], (request[ANSWER_ID], request[REQUEST_ID])
    async with Scope() as scope:
        with (
            state.clients.running(client_of(request), num_answers),
            state.lifecycle.running(scope, request.get(TENANT, ""), ids),
        ):
            yield
