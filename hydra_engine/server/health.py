"""Health routes: whether the process is up and serves, its version, its load and what is allocated.

GET /livez answers while the front process lives. GET /health and /ready say whether requests are served and make
progress, with the condition of each instance; if the remaining instances serve every stage, the server is degraded, not
down. Does not know generation.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from aiohttp import web

from hydra_engine import __version__
from hydra_engine.core.instances import Condition, InstanceState
from hydra_engine.errors import Unavailable
from hydra_engine.server.generate import json_response
from hydra_engine.server.http.errors import ErrorBody, error_body, error_response
from hydra_engine.server.state import ENGINE, STATE

_REASONS = {
    "loading": ("not_ready", "the model is still loading"),
    "draining": ("draining", "the server is shutting down"),
    "hung": ("not_ready", "the engine makes no progress"),
    "instance_lost": ("instance_lost", "a stage has no instance that is up"),
}
_WANTED = (Condition.STARTING, Condition.SILENT, Condition.FAILED)  # not ready, and not because somebody said so
_MAX_REASON = 200


class Alive(msgspec.Struct, frozen=True):
    status: str = "ok"


class Instance(msgspec.Struct, frozen=True):
    name: str
    role: str
    condition: str
    restarts: int
    reason: str


class Health(msgspec.Struct, frozen=True, kw_only=True):
    status: str = "ok"
    degraded: bool
    instances: list[Instance]


class NotServing(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorBody
    degraded: bool = True
    instances: list[Instance]


class Version(msgspec.Struct, frozen=True):
    version: str


async def livez(_request: web.Request) -> web.Response:
    return json_response(Alive())


def describe(states: Iterable[InstanceState]) -> list[Instance]:
    return [
        Instance(s.name, s.role, s.condition.value, s.restarts, " ".join(s.reason.split())[:_MAX_REASON])
        for s in states
    ]


async def health(request: web.Request) -> web.Response:
    serving, reason = request.app[ENGINE].health()
    states = request.app[ENGINE].instances()
    if request.app[STATE].lifecycle.draining:
        serving, reason = False, "draining"
    if serving:
        return json_response(Health(degraded=any(s.condition in _WANTED for s in states), instances=describe(states)))
    code, message = _REASONS.get(reason, ("not_ready", "the engine is not serving"))
    error = Unavailable(message, code=code, retry_after_s=2)
    response = error_response(error)
    response.body = msgspec.json.encode(NotServing(error=error_body(error), instances=describe(states)))
    return response


async def version(_request: web.Request) -> web.Response:
    return json_response(Version(__version__))


async def metrics(request: web.Request) -> web.Response:
    engine, accept = request.app[ENGINE], request.headers.get("Accept", "")
    text, kind = request.app[STATE].metrics.page(accept, engine.stats(), engine.instances(), engine.statuses())
    return web.Response(body=text, headers={"Content-Type": kind})


async def ledger(request: web.Request) -> web.Response:
    """Blocks and requests that the instance holds right now; registered only where a test asked for it."""
    report = await request.app[ENGINE].aledger()
    fields = {name: getattr(report, name) for name in report.__struct_fields__ if name != "query_id"}
    return web.json_response({**fields, "at_rest": report.at_rest})
