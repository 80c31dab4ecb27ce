"""Which requests become traces, and what traces say of them. Does not know how traces leave (`telemetry/otel.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web

from hydra_engine.server.context import MODEL_NAME
from hydra_engine.server.http.access import Access, route_of
from hydra_engine.telemetry.otel import Traced, Tracer, Value, answer_attributes

TRACER = web.AppKey("tracer", Tracer)

# Routes that are traced, and what OpenTelemetry calls what they do.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}


def install(app: web.Application, endpoint: str) -> None:
    """Raises ConfigError where the library is missing."""
    app[TRACER] = Tracer(endpoint)

    async def closing(app: web.Application) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(app[TRACER].close)

    app.cleanup_ctx.append(closing)


def check(endpoint: str) -> None:
    """Raises ConfigError where `install` would."""
    Tracer(endpoint).close()


def trace(request: web.Request, status: int, access: Access) -> None:
    route = route_of(request)
    if route not in _OPERATIONS or request.method != "POST":
        return
    answers = access.answers
    attributes: dict[str, Value] = {
        "http.request.method": "POST",
        "http.route": route,
        "http.response.status_code": status,
        "gen_ai.operation.name": _OPERATIONS[route],
        "gen_ai.provider.name": "hydra-engine",
        "gen_ai.request.model": request.app[MODEL_NAME],
        **answer_attributes(answers),
    }
    if access.prompt is not None:
        attributes["gen_ai.usage.input_tokens"] = access.prompt.prompt_tokens
    if access.error_code is not None:
        attributes["error.type"] = access.error_code
    request.app[TRACER].add(
        Traced(
            name=f"POST {route}",
            began_s=access.began_s,
            ended_s=access.ended_s,
            attributes=attributes,
            answers=answers,
            failed=(access.error_code or str(status)) if status >= 500 else None,
            parent={name: request.headers[name] for name in ("traceparent", "tracestate") if name in request.headers},
        )
    )
