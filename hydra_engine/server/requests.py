"""DELETE /v1/requests/{id}: ends running generations by the id that their client knows. Does not know how they run."""

from __future__ import annotations

import msgspec
from aiohttp import web

from hydra_engine.errors import NotFound
from hydra_engine.server.context import TENANT
from hydra_engine.server.generate import json_response
from hydra_engine.server.state import STATE


class EndedRequests(msgspec.Struct, frozen=True, kw_only=True):
    """`ended`: how many requests with this id ran and were told to stop."""

    id: str
    object: str = "request.ended"
    ended: int


async def end_requests(request: web.Request) -> web.Response:
    request_id = request.match_info["id"]
    ended = request.app[STATE].lifecycle.end(request.get(TENANT, ""), request_id)
    if not ended:
        raise NotFound("no request with this id is running; ids are the `id` of an answer or its X-Request-Id header")
    return json_response(EndedRequests(id=request_id, ended=ended))
