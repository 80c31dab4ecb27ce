"""What operators ask: is the process up, is it serving, which version, how busy, what is held.

GET /livez answers while the front process lives. GET /health and /ready say whether requests are served and make
progress. Does not know generation.
"""

from __future__ import annotations

import msgspec
from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from hydra_engine import __version__
from hydra_engine.errors import Unavailable
from hydra_engine.server.context import ENGINE, LIFECYCLE, METRICS
from hydra_engine.server.generate import json_response

_REASONS = {
    "loading": ("not_ready", "the model is still loading"),
    "draining": ("draining", "the server is shutting down"),
    "hung": ("not_ready", "the engine makes no progress"),
    "instance_lost": ("instance_lost", "the engine process has ended"),
}


class Alive(msgspec.Struct, frozen=True):
    status: str = "ok"


class Version(msgspec.Struct, frozen=True):
    version: str


async def livez(_request: web.Request) -> web.Response:
    return json_response(Alive())


async def health(request: web.Request) -> web.Response:
    serving, reason = request.app[ENGINE].health()
    if request.app[LIFECYCLE].draining:
        serving, reason = False, "draining"
    if not serving:
        code, message = _REASONS.get(reason, ("not_ready", "the engine is not serving"))
        raise Unavailable(message, code=code, retry_after_s=2)
    return json_response(Alive())


async def version(_request: web.Request) -> web.Response:
    return json_response(Version(__version__))


async def metrics(request: web.Request) -> web.Response:
    text = request.app[METRICS].text(request.app[ENGINE].stats())
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


async def ledger(request: web.Request) -> web.Response:
    """Blocks and requests that the instance holds right now; registered only where a test asked for it."""
    report = await request.app[ENGINE].aledger()
    fields = {name: getattr(report, name) for name in report.__struct_fields__ if name != "query_id"}
    return web.json_response({**fields, "at_rest": report.at_rest})
