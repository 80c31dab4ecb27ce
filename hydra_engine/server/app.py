"""`build_app`: the application with its routes and middlewares, listed from the outermost in.

Does not know sockets or signals; `runner.py` does.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

from aiohttp import web

from hydra_engine.config import ServerConfig
from hydra_engine.server import admin, api_page, generate, info, openapi
from hydra_engine.server.anthropic import messages
from hydra_engine.server.http.access_control import KEYS, SALT_SECRET, Cors, KeyRing, auth_middleware, is_loopback
from hydra_engine.server.http.answers import error_middleware
from hydra_engine.server.http.body import body_middleware
from hydra_engine.server.http.loop_lag import LoopLag
from hydra_engine.server.http.routes import with_slashes
from hydra_engine.server.loggers import add_headers, install_tracer, request_middleware
from hydra_engine.server.openai import chat, completions, responses, tokenize
from hydra_engine.server.page import events as page
from hydra_engine.server.port import EnginePort
from hydra_engine.server.state import (
    CONFIG,
    ENGINE,
    MODEL_NAME,
    PLACES,
    STATE,
    Places,
    ServerState,
    max_connections,
)


def build_app(
    engine: EnginePort,
    config: ServerConfig,
    *,
    model_name: str | None = None,
    keys: KeyRing | None = None,
) -> web.Application:
    """Builds the application; the engine may still be loading. Once it serves, pass `app[STATE].metrics.requests.add`
    to its `add_observer`. `keys` replaces the API keys of the configuration and the environment. Raises ConfigError if
    those are invalid."""
    secret = secrets.token_bytes(32)
    keys = keys or KeyRing.from_config(config, secret)
    cors = Cors(config.allow_origins, only_this_machine=is_loopback(config.host) and not keys.requires_key)
    middlewares = [request_middleware, error_middleware, cors.middleware, auth_middleware(keys), body_middleware]
    app = web.Application(middlewares=middlewares, client_max_size=config.max_body_bytes)
    app[KEYS] = keys
    app[SALT_SECRET] = secret
    app[ENGINE] = engine
    app[CONFIG] = config
    app[MODEL_NAME] = model_name or config.served_model_name or engine.model_name
    app[STATE] = ServerState(config, app[MODEL_NAME])
    app[PLACES] = Places(max_connections())
    app[admin.SWITCH] = admin.TopologySwitch(engine)
    app.add_routes(_routes(with_admin=keys.has_admin_key))
    if config.ui:
        page.install(app)
    if config.otlp_endpoint is not None:
        install_tracer(app, config.otlp_endpoint)

    app.on_response_prepare.extend((add_headers, cors.add_headers))
    app.cleanup_ctx.append(_watch_loop)
    app.on_cleanup.append(_end_parsing)
    return app


async def _end_parsing(app: web.Application) -> None:
    app[STATE].parsing.close()


async def _watch_loop(app: web.Application) -> AsyncIterator[None]:
    state = app[STATE]
    lag = LoopLag(state.metrics.traffic.count_lag, is_somebody_waiting=lambda: state.lifecycle.num_running > 0)
    lag.start()
    yield
    lag.stop()


def _routes(*, with_admin: bool) -> list[web.RouteDef]:
    routes = [
        web.post("/v1/chat/completions", chat.chat_completions),
        web.post("/v1/completions", completions.completions),
        web.post("/v1/responses", responses.responses),
        web.post("/v1/messages", messages.messages),
        web.post("/v1/messages/count_tokens", messages.count_tokens),
        web.delete("/v1/requests/{id}", generate.end_requests),
        web.get("/v1/models", info.list_models),
        web.get("/v1/models/{model:.+}", info.one_model),
        web.post("/tokenize", tokenize.tokenize),
        web.post("/detokenize", tokenize.detokenize),
        web.get("/livez", info.livez),
        web.get("/health", info.health),
        web.get("/ready", info.health),
        web.get("/ping", info.health),
        web.get("/load", info.load),
        web.get("/version", info.version),
        web.get("/server_info", info.server_info),
        web.get("/metrics", info.metrics),
        web.get("/openapi.json", openapi.show),
        web.get("/docs", api_page.show),
    ]
    if with_admin:
        routes.append(web.get("/admin/topology", admin.show_topology))
        routes.append(web.post("/admin/topology", admin.set_topology))
        routes.append(web.post("/reset_prefix_cache", admin.reset_prefix_cache))
        routes.append(web.post("/reset_mm_cache", admin.reset_mm_cache))
        routes.append(web.get("/debug/trace", admin.trace))
    return with_slashes(routes)
