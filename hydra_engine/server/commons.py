"""What all processes that serve one port have in common: who may come in, who is in, and what is counted.

There is one truth. `OwnCommons` is it; handlers in another process reach it through `remote_commons.py`, so nothing
here may be asked for more than it says. Does not know formats, sockets or processes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from typing import Protocol

from aiohttp import web

from hydra_engine.config import ServerConfig
from hydra_engine.core.byte_budget import ByteBudget, Lease
from hydra_engine.errors import Unavailable
from hydra_engine.observe.metrics import Metrics
from hydra_engine.observe.request_metrics import Outcomes
from hydra_engine.server.admission import ClientLimits, client_of
from hydra_engine.server.context import ANSWER_ID, REQUEST_ID, TENANT, Endable, Lifecycle, Scope
from hydra_engine.server.port import EnginePort
from hydra_engine.server.running import RunningRequests

MAX_VIEWERS = 8  # of the page's events


class BodyLease(Protocol):
    """What one request's body holds of the bytes that all bodies may; given back when it is left."""

    @property
    def held(self) -> int: ...

    async def fits(self, num_bytes: int) -> bool:
        """Whether there would be room, with nothing taken."""
        ...

    async def take(self, num_bytes: int) -> bool:
        """False, with nothing taken: that would be too much."""
        ...


class Commons(Protocol):
    # ---- who may come in

    async def count(self, client: str) -> None:
        """One request with a body has come. Raises RateLimited."""
        ...

    def lease(self) -> AbstractContextManager[BodyLease]: ...

    def generation(
        self, client: str, tenant: str, ids: Sequence[str], num_answers: int
    ) -> AbstractAsyncContextManager[None]:
        """Where one runs. Raises RateLimited or Unavailable, here or from the submission inside. Inside it raises, at
        whatever is waited for, what its client is told when somebody ends it."""
        ...

    def watching(self) -> AbstractAsyncContextManager[None]:
        """A viewer of the page. Raises Unavailable when there are too many."""
        ...

    # ---- who is in

    async def end(self, tenant: str, one: str) -> int:
        """Ends the generations of this id; how many ran."""
        ...

    async def num_running(self) -> int: ...

    # ---- what is counted

    def answered(self, route: str, status: int, client: str | None, *, method: str, seconds: float) -> None:
        """See `Metrics`, here and below."""
        ...

    def generated(self, num_choices: int, most_tokens: int) -> None: ...

    def rejected(self, code: str | None) -> None: ...

    def lagged(self, seconds: float) -> None: ...

    async def outcomes(self) -> Outcomes: ...

    async def metrics_page(self, accept: str) -> tuple[bytes, str]:
        """With its content type."""
        ...


class OwnCommons:
    """In the process of the engine."""

    def __init__(self, engine: EnginePort, config: ServerConfig, model_name: str) -> None:
        self.lifecycle = Lifecycle()
        self.metrics = Metrics(model_name)
        self.bodies = ByteBudget(config.max_inflight_body_bytes)
        self._engine = engine
        self._clients = ClientLimits(config.max_requests_per_client, config.requests_per_minute)
        self._running = RunningRequests()
        self._num_viewers = 0

    # ---- who may come in

    async def count(self, client: str) -> None:
        self.count_now(client)

    def count_now(self, client: str) -> None:
        self._clients.count(client)

    @contextmanager
    def lease(self) -> Iterator[BodyLease]:
        with self.bodies.lease() as lease:
            yield _OwnLease(self.bodies, lease)

    @asynccontextmanager
    async def generation(self, client: str, tenant: str, ids: Sequence[str], num_answers: int) -> AsyncIterator[None]:
        async with Scope() as scope:
            with self.admit(scope, client, tenant, ids, num_answers):
                yield

    @contextmanager
    def admit(self, scope: Endable, client: str, tenant: str, ids: Sequence[str], num_answers: int) -> Iterator[None]:
        """The same for one that runs inside `scope`, wherever that is."""
        with (
            self._clients.running(client, num_answers),
            self.lifecycle.running(scope),
            self._running.running(tenant, ids, scope),
        ):
            yield

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        with self.seat():
            yield

    @contextmanager
    def seat(self) -> Iterator[None]:
        if self._num_viewers >= MAX_VIEWERS:
            told = f"{MAX_VIEWERS} pages are watching this server already; close one of them"
            raise Unavailable(told, code="overloaded", retry_after_s=5)
        self._num_viewers += 1
        try:
            yield
        finally:
            self._num_viewers -= 1

    # ---- who is in

    async def end(self, tenant: str, one: str) -> int:
        return self.end_now(tenant, one)

    def end_now(self, tenant: str, one: str) -> int:
        return self._running.end(tenant, one)

    async def num_running(self) -> int:
        return self.lifecycle.num_running

    # ---- what is counted

    def answered(self, route: str, status: int, client: str | None, *, method: str, seconds: float) -> None:
        self.metrics.answered(route, status, client, method=method, seconds=seconds)

    def generated(self, num_choices: int, most_tokens: int) -> None:
        self.metrics.generated(num_choices, most_tokens)

    def rejected(self, code: str | None) -> None:
        self.metrics.rejected(code)

    def lagged(self, seconds: float) -> None:
        self.metrics.lagged(seconds)

    async def outcomes(self) -> Outcomes:
        return self.metrics.outcomes

    async def metrics_page(self, accept: str) -> tuple[bytes, str]:
        return self.page_now(accept)

    def page_now(self, accept: str) -> tuple[bytes, str]:
        engine = self._engine
        return self.metrics.page(accept, engine.stats(), engine.instances(), engine.statuses())


class _OwnLease:
    def __init__(self, budget: ByteBudget, lease: Lease) -> None:
        self._budget = budget
        self._lease = lease

    @property
    def held(self) -> int:
        return self._lease.held

    async def fits(self, num_bytes: int) -> bool:
        return self._budget.fits(num_bytes)

    async def take(self, num_bytes: int) -> bool:
        return self._lease.take(num_bytes)


COMMONS = web.AppKey[Commons]("commons")
OWN = web.AppKey("own_commons", OwnCommons)  # the same, where it is in this process


def admitted(request: web.Request, num_answers: int) -> AbstractAsyncContextManager[None]:
    """Where the generation of a request runs: counted, refused while the server drains or its client has too many,
    ended by its id or by the end of a drain."""
    ids = (request[ANSWER_ID], request[REQUEST_ID])
    return request.app[COMMONS].generation(client_of(request), request.get(TENANT, ""), ids, num_answers)
