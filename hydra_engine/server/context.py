"""Typed keys of what handlers share, the request's id, and the state of the server's life.

Does not know routes or formats.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, Self

from aiohttp import web

from hydra_engine.config import ServerConfig
from hydra_engine.errors import HydraError, Unavailable
from hydra_engine.observe.metrics import Metrics
from hydra_engine.server.port import EnginePort

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


class Endable(Protocol):
    """A generation that runs, here or in another process."""

    def end(self, error: HydraError) -> bool:
        """`error` is what its client is told. False: it is ending already."""
        ...


class Scope:
    """`async with`: what happens inside can be ended by others, at whatever is waited for."""

    def __init__(self) -> None:
        self._timeout = asyncio.timeout(None)
        self._error: HydraError | None = None

    def end(self, error: HydraError) -> bool:
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
    """Counts the generations that run and ends them when a drain runs out of time.

    Draining refuses new ones; `expire()` ends the running ones with the error that their clients are told.
    """

    def __init__(self) -> None:
        self.draining = False
        self._scopes: set[Endable] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        return len(self._scopes)

    def check(self) -> None:
        if self.draining:
            raise Unavailable("the server is shutting down and takes no new requests", code="draining", retry_after_s=5)

    @contextmanager
    def running(self, scope: Endable) -> Iterator[None]:
        """Raises Unavailable while it drains."""
        self.check()
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
        told = "the server shut down before this request could finish"
        for scope in list(self._scopes):
            scope.end(Unavailable(told, code="draining", retry_after_s=5))


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
