"""The admin routes: read and change the topology while requests are served, clear the caches, and read the trace of all
clients' requests.

The routes exist only if an admin key is configured (`access_control.py`). Does not know how instances change their
roles or clear their caches.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Annotated, Any

import msgspec
from aiohttp import web

from hydra_engine.core.instances import MAX_INSTANCES
from hydra_engine.errors import HydraError, InvalidRequest, Unavailable
from hydra_engine.server.generate import json_response
from hydra_engine.server.http.body import read_request
from hydra_engine.server.info import Alive, Instance, describe, topology_of
from hydra_engine.server.port import EnginePort
from hydra_engine.server.state import STATE, loaded_engine

logger = logging.getLogger(__name__)

MAX_TRACE_S = 3600.0
TRACE_S = 30.0
TraceSeconds = Annotated[float, msgspec.Meta(gt=0.0, le=MAX_TRACE_S)]


class TopologySwitch:
    """A lock around topology changes: one at a time. A change that has begun continues when its client leaves."""

    def __init__(self, engine: EnginePort) -> None:
        self._engine = engine
        self._under_way: asyncio.Task[None] | None = None

    async def apply(self, text: str) -> None:
        """Changes the topology to `text` and returns when that is done. Raises Unavailable during another change, and
        ConfigError, with nothing changed, for an impossible topology."""
        if self._under_way is not None:
            raise Unavailable("the topology is being changed already; try again when that has ended", code="not_ready")
        switch = self._under_way = asyncio.create_task(self._engine.aset_topology(text))
        switch.add_done_callback(self._ended)
        try:
            await asyncio.shield(switch)
        except asyncio.CancelledError:
            switch.add_done_callback(_log_end)
            raise

    def _ended(self, _: asyncio.Task[None]) -> None:
        self._under_way = None


SWITCH = web.AppKey("topology_switch", TopologySwitch)


class TopologyRequest(msgspec.Struct, frozen=True):
    topology: Annotated[str, msgspec.Meta(min_length=1, max_length=16 * MAX_INSTANCES)]


class TopologyAnswer(msgspec.Struct, frozen=True):
    topology: str
    instances: list[Instance]


async def show_topology(request: web.Request) -> web.Response:
    return json_response(_answer(loaded_engine(request)))


async def set_topology(request: web.Request) -> web.Response:
    engine = loaded_engine(request)
    request.app[STATE].lifecycle.check_not_draining()
    body = await read_request(request, TopologyRequest)
    await request.app[SWITCH].apply(body.topology)
    answer = _answer(engine)
    logger.warning("the topology is now %s", answer.topology)
    return json_response(answer)


# ---- caches and trace


async def reset_prefix_cache(request: web.Request) -> web.Response:
    await loaded_engine(request).areset_caches(kv=True, images=False)
    return json_response(Alive())


async def reset_mm_cache(request: web.Request) -> web.Response:
    await loaded_engine(request).areset_caches(kv=False, images=True)
    return json_response(Alive())


class Trace(msgspec.Struct, frozen=True, rename="camel"):
    """A trace in Chrome's format: a file for ui.perfetto.dev."""

    trace_events: list[dict[str, Any]]
    display_time_unit: str = "ms"


async def trace(request: web.Request) -> web.Response:
    engine, seconds = loaded_engine(request), _seconds(request.query.get("seconds"))
    return web.Response(body=await asyncio.to_thread(_trace_json, engine, seconds), content_type="application/json")


def _trace_json(engine: EnginePort, seconds: float) -> bytes:
    """Encodes the trace. Run it in a thread: thousands of spans would block the event loop."""
    return msgspec.json.encode(Trace(engine.trace_events(seconds)))


def _seconds(text: str | None) -> float:
    try:
        seconds = TRACE_S if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TRACE_S:
        raise InvalidRequest(f"seconds must be a number above 0 and up to {MAX_TRACE_S:g}", param="seconds")
    return seconds


# ---- inside


def _log_end(switch: asyncio.Task[None]) -> None:
    """Logs the outcome of a change whose client has gone."""
    error = None if switch.cancelled() else switch.exception()
    if isinstance(error, HydraError):
        logger.warning("the topology was not changed: %s", error.message)
    elif error is not None:
        logger.error("the topology could not be changed", exc_info=error)


def _answer(engine: EnginePort) -> TopologyAnswer:
    states = engine.instances()
    return TopologyAnswer(topology_of(states), describe(states))
