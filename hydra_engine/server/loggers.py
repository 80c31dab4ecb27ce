"""Logs of requests: the access log, traces, and lines about the load.

The outermost middleware gives a request its id, the headers of its answer, and its record (sizes, times, counts and
codes) for the access log, the metrics and traces. A record has no prompts, answers, paths or keys. While requests run,
the load is logged every ten seconds: running and waiting requests, tokens in and out, caches and hits, in vLLM's
wording, which users know and search for. Does not know where lines go, or how traces are exported
(`telemetry/otel.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.typedefs import Handler

from hydra_engine import __version__, log
from hydra_engine.core.outputs import Result, Usage
from hydra_engine.core.reports import Status
from hydra_engine.server.port import EnginePort
from hydra_engine.server.state import CLIENT, CONFIG, MODEL_NAME, REQUEST_ID, STATE, make_request_id
from hydra_engine.telemetry.otel import Traced, Tracer, Value, answer_attributes

logger = logging.getLogger(__name__)
access_log = logging.getLogger("hydra_engine.access")
load_log = logging.getLogger("hydra_engine.load")

_MESSAGES = "/v1/messages"  # below it, Anthropic's API
_MAX_METHOD = 16  # characters; the client chooses the word


@dataclass(slots=True)
class Access:
    """The record of a request; times on the monotonic clock. `results` are (result, time of arrival): one per answer
    for a stream, one with all answers otherwise."""

    began_s: float
    ended_s: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    error_code: str | None = None
    prompt: Usage | None = None
    results: list[tuple[Result, float]] = field(default_factory=list)

    def add(self, result: Result) -> None:
        self.results.append((result, time.monotonic()))

    @property
    def answers(self) -> list[tuple[Result, float]]:
        """(answer, time of its end) for each single answer."""
        return [(answer, ended_s) for result, ended_s in self.results for answer in (result.choices or (result,))]


ACCESS = web.RequestKey("access", Access)


def route_of(request: web.Request) -> str:
    """The pattern of the request's route, never its path; without the slash that a path may end in."""
    resource = request.match_info.route.resource
    return (resource.canonical.rstrip("/") or "/") if resource is not None else "unknown"


def has_anthropic_style(path: str) -> bool:
    return path == _MESSAGES or path.startswith(_MESSAGES + "/")


def enable_access_log(form: str) -> None:
    """Turns the access log on, regardless of the log level. `form`: text or json; JSON lines are whole lines of
    standard error, even if the rest of the log is text."""
    access_log.setLevel(logging.INFO)
    if form == "json":
        log.write_json(access_log)


def _write_line(request: web.Request, status: int, access: Access) -> None:
    facts: dict[str, object] = {
        "request_id": request[REQUEST_ID],
        "client": request.get(CLIENT) or request.remote or "unknown",
        "method": request.method[:_MAX_METHOD],
        "route": route_of(request),
        "status": status,
        "bytes_in": access.bytes_in,
        "bytes_out": access.bytes_out,
        "duration_s": round(access.ended_s - access.began_s, 6),
    }
    if access.prompt is not None:
        facts["prompt_tokens"] = access.prompt.prompt_tokens
        facts["image_tokens"] = access.prompt.image_tokens
    if access.results:
        answers = [answer for answer, _ in access.answers]
        facts["completion_tokens"] = sum(answer.usage.completion_tokens for answer in answers)
        facts["finish_reason"] = ",".join(dict.fromkeys(answer.finish_reason.value for answer in answers))
        ttfts_s = [answer.metrics.ttft_s for answer in answers if answer.metrics.ttft_s is not None]
        if ttfts_s:
            facts["ttft_s"] = round(min(ttfts_s), 6)
    if access.error_code is not None:
        facts["error_code"] = access.error_code
    text = " ".join(f"{name}={value}" for name, value in facts.items())
    access_log.info("%s", text, extra={log.FACTS: facts})


# ---- traces: the traced requests and their attributes


TRACER = web.AppKey("tracer", Tracer)

# Traced routes, and OpenTelemetry's name of their operation.
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}


def install_tracer(app: web.Application, endpoint: str) -> None:
    """Exports a trace per request to `endpoint`. Raises ConfigError if the library is missing."""
    app[TRACER] = Tracer(endpoint)

    async def closing(app: web.Application) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(app[TRACER].close)

    app.cleanup_ctx.append(closing)


def _trace(request: web.Request, status: int, access: Access) -> None:
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
    request.app[TRACER].export(
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


# ---- every request

PROBES = frozenset({"/livez", "/health", "/ready", "/ping"})  # come every second and concern no client


@web.middleware
async def request_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives the request an id, counts its answer and, if enabled, logs and traces it."""
    request[REQUEST_ID] = make_request_id(request.headers.get("X-Request-Id"))
    access = request[ACCESS] = Access(time.monotonic())
    status = 499
    try:
        response = await handler(request)
        status = response.status
        if isinstance(response, web.Response) and request.method != "HEAD":  # a stream counts its own bytes
            access.bytes_out = response.content_length or 0
        return response
    finally:
        access.ended_s = time.monotonic()
        _note(request, status, access)


def _note(request: web.Request, status: int, access: Access) -> None:
    """Records a request that has been answered, or left by its client (status 499). The bytes of a whole answer are
    still to be sent."""
    config, metrics = request.app[CONFIG], request.app[STATE].metrics
    route, client = route_of(request), request.get(CLIENT)
    elapsed_s = access.ended_s - access.began_s
    metrics.traffic.count_answer(route, status, client, method=request.method, seconds=elapsed_s)
    if access.results:
        answers = [result.usage.completion_tokens for result, _ in access.answers]
        metrics.requests.add_choices(len(answers), max(answers))
    is_probe = route in PROBES
    if config.enable_log_requests and config.access_log != "text" and not is_probe:
        line = "%s %s %s %d %.1f ms" + (" for %s" if client else "%s")
        logger.info(line, request[REQUEST_ID], request.method, route, status, elapsed_s * 1e3, client or "")
    if config.access_log != "off" and not is_probe:
        _write_line(request, status, access)
    if TRACER in request.app:
        _trace(request, status, access)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Adds the headers that every answer has."""
    response.headers["Server"] = f"hydra-engine/{__version__}"
    response.headers["X-Content-Type-Options"] = "nosniff"
    if REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]
        if has_anthropic_style(request.path):
            response.headers["Request-Id"] = request[REQUEST_ID]


# ---- the load

EVERY_S = 10.0

_WORDS = (
    ("prompt_tokens_per_s", "Avg prompt throughput: {:.1f} tokens/s"),
    ("generation_tokens_per_s", "Avg generation throughput: {:.1f} tokens/s"),
    ("running", "Running: {} reqs"),
    ("encoding", "Encoding: {} reqs"),
    ("waiting", "Waiting: {} reqs"),
    ("kv_cache_usage", "KV cache usage: {:.1%}"),
    ("image_cache_usage", "Image cache usage: {:.1%}"),
    ("prefix_cache_hit_rate", "Prefix cache hit rate: {:.1%}"),
    ("image_cache_hit_rate", "Image cache hit rate: {:.1%}"),
)


class Load:
    """Counts the load between two calls of `summarise`. `stats` is `Engine.stats`; `add` receives every result."""

    def __init__(self, stats: Callable[[], Status | None], now_s: float) -> None:
        self._stats = stats
        self._ended: list[Usage] = []  # usage of the requests that ended in this interval
        self._began_s = now_s
        self._before = self._totals(stats())

    def add(self, result: Result) -> None:
        self._ended.append(result.usage)

    def summarise(self, now_s: float) -> dict[str, object] | None:
        """The facts of the interval since the last call; None if nothing ran. Hit rates count the requests that ended
        in it."""
        status, ended, span_s = self._stats(), self._ended, max(now_s - self._began_s, 1e-9)
        totals = self._totals(status)
        # Totals shrink when an instance restarts.
        prompt, generated = (max(now - before, 0) for now, before in zip(totals, self._before, strict=True))
        self._ended, self._began_s, self._before = [], now_s, totals
        if status is None or not (
            prompt or generated or ended or status.num_running or status.num_encoding or status.num_waiting
        ):
            return None
        facts: dict[str, object] = {
            "prompt_tokens_per_s": round(prompt / span_s, 3),
            "generation_tokens_per_s": round(generated / span_s, 3),
            "running": status.num_running,
            "encoding": status.num_encoding,
            "waiting": status.num_waiting,
            "kv_cache_usage": round(status.kv_used, 6),
        }
        if status.image_blocks_total:
            facts["image_cache_usage"] = round(status.image_cache_used, 6)
        if prompt_tokens := sum(usage.prompt_tokens for usage in ended):
            facts["prefix_cache_hit_rate"] = round(sum(usage.cached_tokens for usage in ended) / prompt_tokens, 6)
        if images := sum(usage.num_images for usage in ended):
            facts["image_cache_hit_rate"] = round(sum(usage.cached_images for usage in ended) / images, 6)
        return facts

    @staticmethod
    def _totals(status: Status | None) -> tuple[int, int]:
        return (0, 0) if status is None else (status.prompt_tokens, status.generation_tokens)


@contextlib.asynccontextmanager
async def load_lines(engine: EnginePort) -> AsyncIterator[None]:
    """Logs the load during the `async with`, regardless of the log level."""
    load = Load(engine.stats, time.monotonic())
    engine.add_observer(load.add)
    load_log.setLevel(logging.INFO)

    async def write() -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            if (facts := load.summarise(time.monotonic())) is not None:
                words = (form.format(facts[name]) for name, form in _WORDS if name in facts)
                load_log.info("%s", ", ".join(words), extra={log.FACTS: facts})

    task = asyncio.create_task(write())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
