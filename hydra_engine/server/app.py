"""The application: routes, middlewares from the outside in, and what every answer carries.

Does not know sockets or signals; `runner.py` does.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.typedefs import Handler

from hydra_engine import __version__
from hydra_engine.config import ServerConfig
from hydra_engine.server import admin, health, info, openapi, requests
from hydra_engine.server.anthropic import messages
from hydra_engine.server.context import (
    CLIENT,
    CONFIG,
    ENGINE,
    MODEL_NAME,
    REQUEST_ID,
    make_request_id,
)
from hydra_engine.server.http import tracing
from hydra_engine.server.http.access import ACCESS, Access, route_of, write_line
from hydra_engine.server.http.auth import KEYS, KeyRing, auth_middleware
from hydra_engine.server.http.body import body_middleware
from hydra_engine.server.http.cors import Cors, is_loopback
from hydra_engine.server.http.errors import error_middleware, has_anthropic_style
from hydra_engine.server.http.isolation import SALT_SECRET
from hydra_engine.server.http.loop_lag import LoopLag
from hydra_engine.server.openai import chat, completions, models, responses, tokenize
from hydra_engine.server.page import events as page
from hydra_engine.server.port import EnginePort
from hydra_engine.server.state import STATE, ServerState

logger = logging.getLogger(__name__)

_PROBES = frozenset({"/livez", "/health", "/ready", "/ping"})  # come every second and say nothing about anybody


def build_app(
    engine: EnginePort,
    config: ServerConfig,
    *,
    model_name: str | None = None,
    debug_endpoints: bool = False,
    keys: KeyRing | None = None,
) -> web.Application:
    """The engine may still be loading. Once it serves, give `app[STATE].metrics.requests.add` to its `add_observer`.
    `keys`: instead of those that the configuration and the environment name. Raises ConfigError where these are
    wrong."""
    secret = secrets.token_bytes(32)
    keys = keys or KeyRing.from_config(config, secret)
    cors = Cors(config.allow_origins, only_this_machine=is_loopback(config.host) and not keys.asks)
    middlewares = [request_middleware, error_middleware, cors.middleware, auth_middleware(keys), body_middleware]
    app = web.Application(middlewares=middlewares, client_max_size=config.max_body_bytes)
    app[KEYS] = keys
    app[SALT_SECRET] = secret
    app[ENGINE] = engine
    app[CONFIG] = config
    app[MODEL_NAME] = model_name or config.served_model_name or engine.model_name
    app[STATE] = ServerState(config, app[MODEL_NAME])
    app[admin.SWITCH] = admin.TopologySwitch(engine)
    app.add_routes(_routes(with_admin=keys.has_admin_key, debug_endpoints=debug_endpoints))
    app[openapi.KEYS] = openapi.Keys(api=keys.asks, admin=keys.has_admin_key)
    if config.ui:
        page.install(app)
    if config.otlp_endpoint is not None:
        tracing.install(app, config.otlp_endpoint)

    async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = f"hydra-engine/{__version__}"
        response.headers["X-Content-Type-Options"] = "nosniff"
        if REQUEST_ID in request:
            response.headers["X-Request-Id"] = request[REQUEST_ID]
            if has_anthropic_style(request.path):
                response.headers["Request-Id"] = request[REQUEST_ID]
        response.headers.update(cors.headers(request))

    app.on_response_prepare.append(add_headers)
    app.cleanup_ctx.append(_watch_loop)
    return app


async def _watch_loop(app: web.Application) -> AsyncIterator[None]:
    lag = LoopLag(app[STATE].metrics.traffic.lagged, is_serving=lambda: app[ENGINE].health()[0])
    lag.start()
    yield
    lag.stop()


def _routes(*, with_admin: bool, debug_endpoints: bool) -> list[web.RouteDef]:
    routes = [
        web.post("/v1/chat/completions", chat.chat_completions),
        web.post("/v1/completions", completions.completions),
        web.post("/v1/responses", responses.responses),
        web.post("/v1/messages", messages.messages),
        web.post("/v1/messages/count_tokens", messages.count_tokens),
        web.delete("/v1/requests/{id}", requests.end_requests),
        web.get("/v1/models", models.list_models),
        web.get("/v1/models/{model:.+}", models.one_model),
        web.post("/tokenize", tokenize.tokenize),
        web.post("/detokenize", tokenize.detokenize),
        web.get("/livez", health.livez),
        web.get("/health", health.health),
        web.get("/ready", health.health),
        web.get("/ping", health.health),
        web.get("/load", info.load),
        web.get("/version", health.version),
        web.get("/server_info", info.server_info),
        web.get("/metrics", health.metrics),
        web.get("/openapi.json", openapi.show),
    ]
    if with_admin:
        routes.append(web.get("/admin/topology", admin.show_topology))
        routes.append(web.post("/admin/topology", admin.set_topology))
        routes.append(web.post("/reset_prefix_cache", admin.reset_prefix_cache))
        routes.append(web.post("/reset_mm_cache", admin.reset_mm_cache))
        routes.append(web.get("/debug/trace", admin.trace))
    if debug_endpoints:
        routes.append(web.get("/debug/ledger", health.ledger))
    return routes


@web.middleware
async def request_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Names the request, counts its answer and, where asked for, logs and traces it."""
    request[REQUEST_ID] = make_request_id(request.headers.get("X-Request-Id"))
    access = request[ACCESS] = Access(time.monotonic())
    status = 499
    try:
        response = await handler(request)
        status = response.status
        if isinstance(response, web.Response) and request.method != "HEAD":  # a stream counts for itself
            access.bytes_out = response.content_length or 0
        return response
    finally:
        access.ended_s = time.monotonic()
        _note(request, status, access)


def _note(request: web.Request, status: int, access: Access) -> None:
    """A request has been answered, or was left by its client (499). The bytes of a whole answer are still to leave."""
    config, metrics = request.app[CONFIG], request.app[STATE].metrics
    route, client = route_of(request), request.get(CLIENT)
    elapsed_s = access.ended_s - access.began_s
    metrics.traffic.answered(route, status, client, method=request.method, seconds=elapsed_s)
    if access.results:
        answers = [result.usage.completion_tokens for result, _ in access.answers]
        metrics.requests.add_choices(len(answers), max(answers))
    is_probe = route in _PROBES
    if config.enable_log_requests and not is_probe:
        line = "%s %s %s %d %.1f ms" + (" for %s" if client else "%s")
        logger.info(line, request[REQUEST_ID], request.method, route, status, elapsed_s * 1e3, client or "")
    if config.access_log != "off" and not is_probe:
        write_line(request, status, access)
    if tracing.TRACER in request.app:
        tracing.trace(request, status, access)
