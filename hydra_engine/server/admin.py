"""GET and POST /admin/topology: which instances serve which stages, and a change of that while requests are served.

The routes exist only where an admin key is configured (`auth.py`). Does not know how instances change their roles.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated

import msgspec
from aiohttp import web

from hydra_engine.core.instances import Condition
from hydra_engine.core.roles import MAX_INSTANCES, InstanceSpec, Role, Topology
from hydra_engine.errors import HydraError, Unavailable
from hydra_engine.server.body import read_request
from hydra_engine.server.context import LIFECYCLE, loaded_engine
from hydra_engine.server.generate import json_response
from hydra_engine.server.health import Instance, describe
from hydra_engine.server.port import EnginePort

logger = logging.getLogger(__name__)

SWITCHES = web.AppKey[set[asyncio.Task[None]]]("switches")  # a change that is under way, if any


class TopologyRequest(msgspec.Struct, frozen=True):
    topology: Annotated[str, msgspec.Meta(min_length=1, max_length=16 * MAX_INSTANCES)]


class TopologyAnswer(msgspec.Struct, frozen=True):
    topology: str
    instances: list[Instance]


async def show_topology(request: web.Request) -> web.Response:
    return json_response(_answer(loaded_engine(request)))


async def set_topology(request: web.Request) -> web.Response:
    """Answers when the change is made. One that has begun goes on when the client leaves."""
    engine = loaded_engine(request)
    request.app[LIFECYCLE].check()
    asked = await read_request(request, TopologyRequest)
    switches = request.app[SWITCHES]
    if switches:
        raise Unavailable("the topology is being changed already; try again when that has ended", code="not_ready")
    switch = asyncio.create_task(engine.aset_topology(asked.topology))
    switches.add(switch)
    switch.add_done_callback(switches.discard)
    try:
        await asyncio.shield(switch)
    except asyncio.CancelledError:
        switch.add_done_callback(_log_end)
        raise
    answer = _answer(engine)
    logger.warning("the topology is now %s", answer.topology)
    return json_response(answer)


def _log_end(switch: asyncio.Task[None]) -> None:
    """Of a change whose client has gone."""
    error = None if switch.cancelled() else switch.exception()
    if isinstance(error, HydraError):
        logger.warning("the topology was not changed: %s", error.message)
    elif error is not None:
        logger.error("the topology could not be changed", exc_info=error)


def _answer(engine: EnginePort) -> TopologyAnswer:
    states = engine.instances()
    specs = [InstanceSpec(Role.parse(s.role), "auto") for s in states if s.condition is not Condition.STOPPED]
    return TopologyAnswer(str(Topology(tuple(specs))), describe(states))
