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
from hydra_engine.core.byte_budget import ByteBudget
from hydra_engine.observe.metrics import Metrics
from hydra_engine.server import (
    admin,
    chat,
    completions,
    health,
    info,
    messages,
    models,
    openapi,
    page,
    requests,
    responses,
    tokenize,
    tracing,
)
from hydra_engine.server.access import ACCESS, Access, route_of, write_line
from hydra_engine.server.admission import CLIENT_LIMITS, ClientLimits
from hydra_engine.server.auth import KEYS, KeyRing, auth_middleware
from hydra_engine.server.body import BODIES, body_middleware
from hydra_engine.server.context import (
    CLIENT,
    CONFIG,
    ENGINE,
    LIFECYCLE,
    METRICS,
    MODEL_NAME,
    REQUEST_ID,
    Lifecycle,
    make_request_id,
)
from hydra_engine.server.cors import Cors, is_loopback
from hydra_engine.server.errors import error_middleware, has_anthropic_style
from hydra_engine.server.isolation import SALT_SECRET
from hydra_engine.server.loop_lag import LoopLag
from hydra_engine.server.port import EnginePort
from hydra_engine.server.running import RUNNING, RunningRequests

logger = logging.getLogger(__name__)


def build_app(
    engine: EnginePort, config: ServerConfig, *, model_name: str | None = None, debug_endpoints: bool = False
) -> web.Application:
    """The engine may still be loading. Once it serves, give `app[METRICS].observe` to its `add_observer`."""
    secret = secrets.token_bytes(32)
    keys = KeyRing.from_config(config, secret)
    cors = Cors(config.allow_origins, only_this_machine=is_loopback(config.host) and not keys.asks)
    middlewares = [request_middleware, error_middleware, cors.middleware, auth_middleware(keys), body_middleware]
    app = web.Application(middlewares=middlewares, client_max_size=config.max_body_bytes)
    app[KEYS] = keys
    app[SALT_SECRET] = secret
    app[CLIENT_LIMITS] = ClientLimits(config.max_requests_per_client, config.requests_per_minute)
    app[BODIES] = ByteBudget(config.max_inflight_body_bytes)
    app[ENGINE] = engine
    app[CONFIG] = config
    app[MODEL_NAME] = model_name or config.served_model_name or engine.model_name
    app[METRICS] = Metrics(app[MODEL_NAME])
    app[LIFECYCLE] = Lifecycle()
    app[RUNNING] = RunningRequests()
    app[admin.SWITCHES] = set()
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
    lag = LoopLag(app[METRICS].lagged)
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
    config, metrics, route, client = request.app[CONFIG], request.app[METRICS], route_of(request), request.get(CLIENT)
    elapsed_s = access.ended_s - access.began_s
    metrics.answered(route, status, client, method=request.method, seconds=elapsed_s)
    if access.results:
        answers = [result.usage.completion_tokens for result, _ in access.answers]
        metrics.generated(len(answers), max(answers))
    if config.enable_log_requests:
        line = "%s %s %s %d %.1f ms" + (" for %s" if client else "%s")
        logger.info(line, request[REQUEST_ID], request.method, route, status, elapsed_s * 1e3, client or "")
    if config.access_log != "off":
        write_line(request, status, access)
    if tracing.TRACER in request.app:
        tracing.trace(request, status, access)
