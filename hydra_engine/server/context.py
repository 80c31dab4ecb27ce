"""Typed keys of what handlers share, the request's id, and the state of the server's life.

Does not know routes or formats.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from hydra_engine.config import ServerConfig
from hydra_engine.errors import HydraError, Unavailable
from hydra_engine.observe.metrics import Metrics
from hydra_engine.server.port import EnginePort

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


@asynccontextmanager
async def endable(error: HydraError) -> AsyncIterator[asyncio.Timeout]:
    """A scope that others can end by rescheduling it: then `error` is raised inside, at whatever is waited for."""
    scope = asyncio.timeout(None)
    try:
        async with scope:
            yield scope
    except TimeoutError:
        if not scope.expired():
            raise
        raise error from None


class Lifecycle:
    """Counts the generations that run and ends them when a drain runs out of time.

    Each one runs inside `admit()`. Draining refuses new ones; `expire()` turns the running ones, at whatever they
    wait for, into the error that their clients are told.
    """

    def __init__(self) -> None:
        self.draining = False
        self._scopes: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        return len(self._scopes)

    def check(self) -> None:
        if self.draining:
            raise Unavailable("the server is shutting down and takes no new requests", code="draining", retry_after_s=5)

    @asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        self.check()
        late = Unavailable("the server shut down before this request could finish", code="draining", retry_after_s=5)
        async with endable(late) as scope:
            self._scopes.add(scope)
            self._idle.clear()
            try:
                yield
            finally:
                self._scopes.discard(scope)
                if not self._scopes:
                    self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def expire(self) -> None:
        now = asyncio.get_running_loop().time()
        for scope in self._scopes:
            scope.reschedule(now)


ENGINE = web.AppKey[EnginePort]("engine")
CONFIG = web.AppKey("config", ServerConfig)
MODEL_NAME = web.AppKey("model_name", str)
METRICS = web.AppKey("metrics", Metrics)
LIFECYCLE = web.AppKey("lifecycle", Lifecycle)

REQUEST_ID = web.RequestKey("request_id", str)
ANSWER_ID = web.RequestKey("answer_id", str)  # of a generation: the `id` in its answer
TENANT = web.RequestKey("tenant", str)  # whose caches and share these are; not there where no keys are asked for
CLIENT = web.RequestKey("client", str)  # the name of its key for logs and metrics, if that has one


def make_request_id(wanted: str | None) -> str:
    """The client's own id where it is short and plain, a new one otherwise."""
    if wanted is not None and _REQUEST_ID.fullmatch(wanted):
        return wanted
    return uuid.uuid4().hex


def loaded_engine(request: web.Request) -> EnginePort:
    """The engine, for everything that needs the model."""
    engine = request.app[ENGINE]
    if engine.health()[1] == "loading":
        raise Unavailable("the model is still loading", code="not_ready", retry_after_s=2)
    return engine
