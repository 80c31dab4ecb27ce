"""State that requests share: typed keys, limits of clients, places of connections, bytes of bodies, running generations
and their end, metrics.

A client is the holder of an API key; without keys it is the peer address of the connection, for IPv6 the /64 network
that one customer usually has. Headers that name another address are ignored. Beyond its limits a client gets 429, while
others are served; the engine itself limits all requests together (503). Does not know routes, formats or sockets.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import re
import resource
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from aiohttp import web

from hydra_engine.config import ServerConfig
from hydra_engine.core.fairness import ByteBudget, WorkerPool
from hydra_engine.errors import HydraError, RateLimited, RequestAborted, Unavailable
from hydra_engine.server.port import EnginePort
from hydra_engine.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

MAX_CLIENTS = 10_000  # whose state is kept at once
MAX_WAITING_BODIES = 4096  # queued for the thread that parses large ones; one client may have half
MAX_CONNECTIONS = 4096
KEPT_DESCRIPTORS = 256  # reserved, not for connections; at most two thirds of all
SPARE_PLACES = 32  # above the limit, for health probes
_EPISODE_S = 60.0  # repeats within this are logged once
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")

ENGINE = web.AppKey[EnginePort]("engine")
CONFIG = web.AppKey("config", ServerConfig)
MODEL_NAME = web.AppKey("model_name", str)

REQUEST_ID = web.RequestKey("request_id", str)
ANSWER_ID = web.RequestKey("answer_id", str)  # the `id` in a generation's answer
TENANT = web.RequestKey("tenant", str)  # the owner of caches and limits; absent if no keys are required
CLIENT = web.RequestKey("client", str)  # the name of the client's key for logs and metrics, if it has one


# ---- limits of clients


@dataclass(slots=True)
class _Client:
    running: int  # answers in progress
    tokens: float  # requests that it may send now
    refilled_s: float


class ClientLimits:
    """Limits of each client: answers at once, and requests per minute; 0 turns a limit off. Only admitted requests
    count, refused ones cost a client nothing."""

    def __init__(self, max_at_once: int, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_at_once = max_at_once
        self._per_minute = per_minute
        self._clock = clock
        self._clients: OrderedDict[str, _Client] = OrderedDict()  # least recently seen first

    def count(self, client: str) -> None:
        """Counts a request. Raises RateLimited."""
        if not self._per_minute:
            return
        state = self._find(client)
        if state.tokens < 1:
            wait_s = max(1, math.ceil((1 - state.tokens) * 60 / self._per_minute))
            raise RateLimited(
                f"Rate limit reached: this client may send {self._per_minute} requests a minute. Please try again in "
                f"{wait_s} s.",
                retry_after_s=wait_s,
            )
        state.tokens -= 1

    @contextmanager
    def running(self, client: str, num_answers: int) -> Iterator[None]:
        """Counts `num_answers` running answers for the duration of the `with`. Raises RateLimited."""
        if not self._max_at_once:
            yield
            return
        state = self._find(client)
        if state.running + num_answers > self._max_at_once:
            raise RateLimited(
                f"Rate limit reached: this client waits for {state.running} answers and asks for {num_answers} more; "
                f"at most {self._max_at_once} at once are allowed. Please wait for one of them.",
                retry_after_s=1,
            )
        state.running += num_answers
        try:
            yield
        finally:
            state.running -= num_answers

    def _find(self, name: str) -> _Client:
        """The client with its tokens refilled. If there are too many clients an idle one is dropped, and starts over
        when it returns."""
        now = self._clock()
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client(0, self._per_minute, now)
            self._forget()
        self._clients.move_to_end(name)
        refill = (now - client.refilled_s) * self._per_minute / 60
        client.tokens = min(self._per_minute, client.tokens + refill)
        client.refilled_s = now
        return client

    def _forget(self) -> None:
        """Drops idle clients above MAX_CLIENTS. Clients with running answers stay; the limit of requests bounds their
        number."""
        while len(self._clients) > MAX_CLIENTS:
            idle = next((name for name, client in self._clients.items() if not client.running), None)
            if idle is None:
                return
            del self._clients[idle]


# ---- places of connections


def max_connections() -> int:
    """The number of connections that the limit of open files allows."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, max(limit - KEPT_DESCRIPTORS, limit // 3)))


class Occupant(Protocol):
    def close_at_once(self) -> None: ...


class Places:
    """The connections of a server. If all places are taken, a new connection replaces the one that has been idle for
    longest, or takes a spare place if all are busy."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_spare = min(SPARE_PLACES, max(1, limit // 4))
        self._open: set[Occupant] = set()
        self._spare: set[Occupant] = set()
        self._idle: OrderedDict[Occupant, None] = OrderedDict()  # wait for headers, longest idle first
        self._full = Episode()

    def is_spare(self, occupant: object) -> bool:
        return occupant in self._spare

    def add(self, occupant: Occupant) -> None:
        self._open.add(occupant)
        if len(self._open) > self.limit:
            self._full.warn("%d connections are open, which is the limit: idle ones are closed", self.limit)
            self.close_idle(1)
            num_over = len(self._open) - self.limit
            if num_over > self.num_spare:
                self.discard(occupant)
                occupant.close_at_once()
                return
            if num_over > 0:
                self._spare.add(occupant)
        self._idle[occupant] = None

    def mark_idle(self, occupant: Occupant) -> None:
        """Marks a connection as idle: it waits for its client's next request."""
        if occupant in self._open:
            self._idle[occupant] = None

    def mark_busy(self, occupant: Occupant) -> None:
        self._idle.pop(occupant, None)

    def close_idle(self, limit: int) -> int:
        """Closes up to `limit` idle connections, the longest idle first; returns the number closed."""
        num_closed = 0
        while self._idle and num_closed < limit:
            occupant, _ = self._idle.popitem(last=False)
            self.discard(occupant)
            occupant.close_at_once()
            num_closed += 1
        return num_closed

    def discard(self, occupant: Occupant) -> None:
        self._open.discard(occupant)
        self._spare.discard(occupant)
        self._idle.pop(occupant, None)


class Episode:
    """A rate limit for a warning: repeats within 60 s of the last occurrence are not logged."""

    def __init__(self) -> None:
        self._latest_s = float("-inf")

    def warn(self, words: str, *values: object) -> None:
        now = time.monotonic()
        if now - self._latest_s > _EPISODE_S:
            logger.warning(words, *values)
        self._latest_s = now


# ---- generations that run


class Scope:
    """An `async with` that other tasks can end: whatever it awaits inside is cancelled."""

    def __init__(self) -> None:
        self._timeout = asyncio.timeout(None)
        self._error: HydraError | None = None

    def end(self, error: HydraError) -> bool:
        """Ends the scope with `error`, which the client gets. False if it is ending already."""
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
        except TimeoutError:  # only from `end`; a TimeoutError of the body is not raised here
            assert self._error is not None
            raise self._error from None


class Lifecycle:
    """The running generations. A drain refuses new ones; running ones are ended by their ids, or all by `expire`.

    A client can end only generations of its tenant. Clients choose ids, so several generations may share one.
    """

    def __init__(self) -> None:
        self.draining = False
        self._running: dict[Scope, tuple[str, tuple[str, ...]]] = {}  # (tenant, ids)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def check_not_draining(self) -> None:
        if self.draining:
            raise Unavailable("the server is shutting down and takes no new requests", code="draining", retry_after_s=5)

    @contextmanager
    def running(self, scope: Scope, tenant: str, ids: tuple[str, ...]) -> Iterator[None]:
        """Registers a generation for the duration of the `with`. Raises Unavailable while the server drains."""
        self.check_not_draining()
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
        """Ends the generations with this id; returns the number that were not ending yet."""
        scopes = [scope for scope, (owner, ids) in self._running.items() if owner == tenant and request_id in ids]
        return sum([scope.end(RequestAborted("the request was ended by its id")) for scope in scopes])

    def expire(self) -> None:
        message = "the server shut down before this request could finish"
        for scope in list(self._running):
            scope.end(Unavailable(message, code="draining", retry_after_s=5))


# ---- the state


class ServerState:
    def __init__(self, config: ServerConfig, model_name: str) -> None:
        self.lifecycle = Lifecycle()
        self.metrics = Metrics(model_name)
        self.bodies = ByteBudget(config.max_inflight_body_bytes)
        # One thread: parsing holds the GIL, so more would only slow the loop.
        self.parsing = WorkerPool(
            "large-bodies", num_workers=1, max_waiting=MAX_WAITING_BODIES, noun="large request bodies"
        )
        self.clients = ClientLimits(config.max_requests_per_client, config.requests_per_minute)


STATE = web.AppKey("state", ServerState)
PLACES = web.AppKey("places", Places)


def make_request_id(client_id: str | None) -> str:
    """Returns the client's own id if it is short and plain, else a new one."""
    if client_id is not None and _REQUEST_ID.fullmatch(client_id):
        return client_id
    return uuid.uuid4().hex


def loaded_engine(request: web.Request) -> EnginePort:
    """Returns the engine. Raises Unavailable while the model loads."""
    engine = request.app[ENGINE]
    if engine.health()[1] == "loading":
        raise Unavailable("the model is still loading", code="not_ready", retry_after_s=2)
    return engine


def client_of(request: web.Request) -> str:
    tenant: str = request.get(TENANT, "")
    if tenant:
        return tenant
    try:
        address = ipaddress.ip_address((request.remote or "").partition("%")[0])
    except ValueError:
        return "unknown"
    if isinstance(address, ipaddress.IPv4Address) or address.ipv4_mapped is not None:
        return str(getattr(address, "ipv4_mapped", None) or address)
    return str(ipaddress.IPv6Network((address, 64), strict=False))


@asynccontextmanager
async def admitted(request: web.Request, num_answers: int) -> AsyncIterator[None]:
    """The scope of a running generation. Raises RateLimited or Unavailable if its client has too many or the server
    drains. If the generation is ended by its id or a drain, raises the client's error at the await inside."""
    state, ids = request.app[STATE], (request[ANSWER_ID], request[REQUEST_ID])
    async with Scope() as scope:
        with (
            state.clients.running(client_of(request), num_answers),
            state.lifecycle.running(scope, request.get(TENANT, ""), ids),
        ):
            yield
