"""The application: routes, middlewares from the outside in, and what every answer carries.

Does not know sockets or signals; `runner.py` does.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler

from hydra_engine import __version__
from hydra_engine.config import ServerConfig
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
from hydra_engine.server.auth import KEYS, KeyRing, Keys, auth_middleware
from hydra_engine.server.body import body_middleware
from hydra_engine.server.commons import COMMONS, OWN, Commons, OwnCommons
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

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class House:
    """What applications share that serve one port, in this process or in several."""

    commons: Commons
    keys: Keys
    secret: bytes  # of cache salts
    model_name: str
    lifecycle: Lifecycle
    debug_endpoints: bool = False


def open_house(
    engine: EnginePort,
    config: ServerConfig,
    *,
    model_name: str | None = None,
    debug_endpoints: bool = False,
    keys: KeyRing | None = None,
) -> tuple[House, OwnCommons, KeyRing]:
    """Of the process with the engine, which may still be loading. Raises ConfigError where the keys are wrong."""
    secret = secrets.token_bytes(32)
    name = model_name or config.served_model_name or engine.model_name
    keys, commons = keys or KeyRing.from_config(config, secret), OwnCommons(engine, config, name)
    return House(commons, keys, secret, name, commons.lifecycle, debug_endpoints), commons, keys


def build_app(
    engine: EnginePort,
    config: ServerConfig,
    *,
    model_name: str | None = None,
    debug_endpoints: bool = False,
    keys: KeyRing | None = None,
) -> web.Application:
    """The one of a server with one process. Once the engine serves, give `app[METRICS].observe` to its `add_observer`.
    `keys`: instead of those that the configuration and the environment name."""
    house, commons, _ = open_house(engine, config, model_name=model_name, debug_endpoints=debug_endpoints, keys=keys)
    app = furnish(engine, config, house)
    app[OWN] = commons
    app[METRICS] = commons.metrics
    return app


def furnish(engine: EnginePort, config: ServerConfig, house: House) -> web.Application:
    keys = house.keys
    cors = Cors(config.allow_origins, only_this_machine=is_loopback(config.host) and not keys.asks)
    middlewares = [request_middleware, error_middleware, cors.middleware, auth_middleware(keys), body_middleware]
    app = web.Application(middlewares=middlewares, client_max_size=config.max_body_bytes)
    app[KEYS] = keys
    app[SALT_SECRET] = house.secret
    app[COMMONS] = house.commons
    app[ENGINE] = engine
    app[CONFIG] = config
    app[MODEL_NAME] = house.model_name
    app[LIFECYCLE] = house.lifecycle
    app[admin.SWITCH] = admin.TopologySwitch(engine)
    app.add_routes(_routes(with_admin=keys.has_admin_key, debug_endpoints=house.debug_endpoints))
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
    lag = LoopLag(app[COMMONS].lagged)
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
    config, commons, route, client = request.app[CONFIG], request.app[COMMONS], route_of(request), request.get(CLIENT)
    elapsed_s = access.ended_s - access.began_s
    commons.answered(route, status, client, method=request.method, seconds=elapsed_s)
    if access.results:
        answers = [result.usage.completion_tokens for result, _ in access.answers]
        commons.generated(len(answers), max(answers))
    if config.enable_log_requests:
        line = "%s %s %s %d %.1f ms" + (" for %s" if client else "%s")
        logger.info(line, request[REQUEST_ID], request.method, route, status, elapsed_s * 1e3, client or "")
    if config.access_log != "off":
        write_line(request, status, access)
    if tracing.TRACER in request.app:
        tracing.trace(request, status, access)
