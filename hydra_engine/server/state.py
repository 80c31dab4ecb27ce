"""What requests share: typed keys, limits of clients, bytes of bodies, the generations that run and their end, metrics.

A client is the holder of an API key; without keys it is the address at the other end of the connection, for IPv6 the
network of 64 bits that one customer usually has. Headers that name another address are not believed. Beyond its limits
it gets 429, while others are served; how many requests the engine takes in all is the engine's business (503). Does not
know routes, formats or sockets.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from aiohttp import web

from hydra_engine.config import ServerConfig
from hydra_engine.core.fairness.byte_budget import ByteBudget
from hydra_engine.core.fairness.worker_pool import WorkerPool
from hydra_engine.errors import HydraError, RateLimited, RequestAborted, Unavailable
from hydra_engine.server.port import EnginePort
from hydra_engine.telemetry.metrics import Metrics

MAX_CLIENTS = 10_000  # remembered at once
MAX_WAITING_BODIES = 4096  # for the thread that parses large ones; half of them of one client
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")

ENGINE = web.AppKey[EnginePort]("engine")
CONFIG = web.AppKey("config", ServerConfig)
MODEL_NAME = web.AppKey("model_name", str)

REQUEST_ID = web.RequestKey("request_id", str)
ANSWER_ID = web.RequestKey("answer_id", str)  # of a generation: the `id` in its answer
TENANT = web.RequestKey("tenant", str)  # whose caches and share these are; not there where no keys are asked for
CLIENT = web.RequestKey("client", str)  # the name of its key for logs and metrics, if that has one


# ---- limits of clients


@dataclass(slots=True)
class _Client:
    running: int  # answers that it waits for
    tokens: float  # requests that it may send now
    refilled_s: float


class ClientLimits:
    """0 turns a limit off. Both count what was let in; what was refused costs a client nothing."""

    def __init__(self, most_at_once: int, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_at_once = most_at_once
        self._per_minute = per_minute
        self._clock = clock
        self._clients: OrderedDict[str, _Client] = OrderedDict()  # the longest unseen first

    @property
    def num_known(self) -> int:
        return len(self._clients)

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
        """While they are waited for. Raises RateLimited."""
        if not self._most_at_once:
            yield
            return
        state = self._find(client)
        if state.running + num_answers > self._most_at_once:
            raise RateLimited(
                f"Rate limit reached: this client waits for {state.running} answers and asks for {num_answers} more; "
                f"at most {self._most_at_once} at once are allowed. Please wait for one of them.",
                retry_after_s=1,
            )
        state.running += num_answers
        try:
            yield
        finally:
            state.running -= num_answers

    def _find(self, name: str) -> _Client:
        """The client with its tokens up to date. An idle client is forgotten when there are too many; it starts anew
        then."""
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
        """The clients that wait for answers are as many as there are requests at most, which others bound."""
        while len(self._clients) > MAX_CLIENTS:
            idle = next((name for name, client in self._clients.items() if not client.running), None)
            if idle is None:
                return
            del self._clients[idle]


# ---- generations that run


class Scope:
    """`async with`: what happens inside can be ended by others, at whatever is waited for."""

    def __init__(self) -> None:
        self._timeout = asyncio.timeout(None)
        self._error: HydraError | None = None

    def end(self, error: HydraError) -> bool:
        """Ends what is inside with `error`, which the client gets. False: it is ending already."""
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


# ---- the state


class ServerState:
    def __init__(self, config: ServerConfig, model_name: str) -> None:
        self.lifecycle = Lifecycle()
        self.metrics = Metrics(model_name)
        self.bodies = ByteBudget(config.max_inflight_body_bytes)
        # One: parsing holds the interpreter's lock, so that more of them would only take more turns from the loop.
        self.parsing = WorkerPool(
            "large-bodies", num_workers=1, max_waiting=MAX_WAITING_BODIES, of="large request bodies"
        )
        self.clients = ClientLimits(config.max_requests_per_client, config.requests_per_minute)


STATE = web.AppKey("state", ServerState)


def make_request_id(client_id: str | None) -> str:
    """The client's own id where it is short and plain, a new one otherwise."""
    if client_id is not None and _REQUEST_ID.fullmatch(client_id):
        return client_id
    return uuid.uuid4().hex


def loaded_engine(request: web.Request) -> EnginePort:
    """The engine, for everything that needs the model."""
    engine = request.app[ENGINE]
    if engine.health()[1] == "loading":
        raise Unavailable("the model is still loading", code="not_ready", retry_after_s=2)
    return engine


def client_of(request: web.Request) -> str:
    if tenant := request.get(TENANT, ""):
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
    """The scope of a running generation. Raises RateLimited or Unavailable when its client has too many or the server
    drains; when its id or a drain ends it, raises the error that its client gets at whatever is awaited inside."""
    state, ids = request.app[STATE], (request[ANSWER_ID], request[REQUEST_ID])
    async with Scope() as scope:
        with (
            state.clients.running(client_of(request), num_answers),
            state.lifecycle.running(scope, request.get(TENANT, ""), ids),
        ):
            yield
