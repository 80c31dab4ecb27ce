"""The application: routes, middlewares from the outside in, and what every answer carries.

Does not know sockets or signals; `runner.py` does.
"""

from __future__ import annotations

import logging
import time

from aiohttp import web
from aiohttp.typedefs import Handler

from hydra_engine import __version__
from hydra_engine.config import ServerConfig, environment_admin_key, environment_api_keys
from hydra_engine.observe.metrics import Metrics
from hydra_engine.server import admin, chat, completions, health, models, tokenize
from hydra_engine.server.auth import auth_middleware
from hydra_engine.server.context import (
    CONFIG,
    ENGINE,
    LIFECYCLE,
    METRICS,
    MODEL_NAME,
    REQUEST_ID,
    Lifecycle,
    make_request_id,
)
from hydra_engine.server.cors import Cors
from hydra_engine.server.errors import error_middleware
from hydra_engine.server.port import EnginePort

logger = logging.getLogger(__name__)


def build_app(
    engine: EnginePort, config: ServerConfig, *, model_name: str | None = None, debug_endpoints: bool = False
) -> web.Application:
    """The engine may still be loading. Once it serves, give `app[METRICS].observe` to its `add_observer`."""
    keys = [key for key in (*config.api_key, *environment_api_keys()) if key]
    admin_key = config.admin_key or environment_admin_key()
    cors = Cors(config.allow_origins)
    middlewares = [request_middleware, error_middleware, cors.middleware]
    if keys or admin_key:
        middlewares.append(auth_middleware(keys, admin_key))
    app = web.Application(middlewares=middlewares, client_max_size=config.max_body_bytes)
    app[ENGINE] = engine
    app[CONFIG] = config
    app[MODEL_NAME] = model_name or config.served_model_name or engine.model_name
    app[METRICS] = Metrics(app[MODEL_NAME])
    app[LIFECYCLE] = Lifecycle()
    app[admin.SWITCHES] = set()
    app.add_routes(_routes(with_admin=bool(admin_key), debug_endpoints=debug_endpoints))

    async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = f"hydra-engine/{__version__}"
        response.headers["X-Content-Type-Options"] = "nosniff"
        if REQUEST_ID in request:
            response.headers["X-Request-Id"] = request[REQUEST_ID]
        response.headers.update(cors.headers(request))

    app.on_response_prepare.append(add_headers)
    return app


def _routes(*, with_admin: bool, debug_endpoints: bool) -> list[web.RouteDef]:
    routes = [
        web.post("/v1/chat/completions", chat.chat_completions),
        web.post("/v1/completions", completions.completions),
        web.get("/v1/models", models.list_models),
        web.get("/v1/models/{model:.+}", models.one_model),
        web.post("/tokenize", tokenize.tokenize),
        web.post("/detokenize", tokenize.detokenize),
        web.get("/livez", health.livez),
        web.get("/health", health.health),
        web.get("/ready", health.health),
        web.get("/version", health.version),
        web.get("/metrics", health.metrics),
    ]
    if with_admin:
        routes.append(web.get("/admin/topology", admin.show_topology))
        routes.append(web.post("/admin/topology", admin.set_topology))
    if debug_endpoints:
        routes.append(web.get("/debug/ledger", health.ledger))
    return routes


@web.middleware
async def request_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Names the request, counts its answer and, where asked for, logs one line about it."""
    request[REQUEST_ID] = make_request_id(request.headers.get("X-Request-Id"))
    began_s = time.monotonic()
    status = 499
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "unknown"
        request.app[METRICS].answered(route, status)
        if request.app[CONFIG].enable_log_requests:
            elapsed_ms = (time.monotonic() - began_s) * 1e3
            logger.info("%s %s %s %d %.1f ms", request[REQUEST_ID], request.method, route, status, elapsed_ms)
