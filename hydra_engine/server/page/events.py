"""The web page: its files, and the events for its live view.

GET / and GET /ui/{file} are the files of `static/` and the demo's pictures, read once and never from a path that a
client names. GET /ui/events is a stream of snapshots, four per second: gauges of every instance, counts, positions of
running requests, and the stages of requests that have ended since the last one. A snapshot has numbers, stages, names
of instances and ids of requests, never prompts or answers. The holder of an API key sees the requests of that key; with
the admin key, or if no keys are required, all requests are seen. Does not know how the page draws them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from hydra_engine import __version__
from hydra_engine.core.instances import InstanceState
from hydra_engine.core.outputs import StageSpan, Usage
from hydra_engine.core.prompting import MediaLimits
from hydra_engine.core.reports import InstanceSummary, Status
from hydra_engine.errors import InvalidRequest, Unavailable
from hydra_engine.server.http.answers import STREAM, EventStream, event
from hydra_engine.server.state import CONFIG, ENGINE, MODEL_NAME, STATE, TENANT
from hydra_engine.telemetry.metrics import Outcomes
from hydra_engine.telemetry.trace import EndedRequest, LiveRequest

PERIOD_S = 0.25
MAX_VIEWERS = 8  # pages that may read /ui/events at once
STALL_S = 5.0  # a viewer that reads nothing for this long is dropped
MAX_REQUESTS = 100  # running, and ended, in one event
MAX_SPANS = 200  # of one request

_STATIC = Path(__file__).parent / "static"
_DEMO = Path(__file__).parents[2] / "demo"
_INDEX = "index.html"
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".png": "image/png",
    ".json": "application/json",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "media-src data:; font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


# ---- files


class File(NamedTuple):
    body: bytes
    content_type: str
    etag: str


def _read_files() -> dict[str, File]:
    """The files by their paths after /ui/."""
    paths = {path.relative_to(_STATIC).as_posix(): path for path in _STATIC.rglob("*")}
    samples = [_DEMO / "questions.json", *_DEMO.glob("pictures/*.png")]
    paths |= {f"samples/{path.relative_to(_DEMO).as_posix()}": path for path in samples}
    files = {}
    for name, path in paths.items():
        if path.suffix in _TYPES:
            body = path.read_bytes()
            files[name] = File(body, _TYPES[path.suffix], hashlib.sha256(body).hexdigest()[:16])
    return files


async def index(request: web.Request) -> web.Response:
    return _answer(request, request.app[FILES][_INDEX])


async def static_file(request: web.Request) -> web.Response:
    file = request.app[FILES].get(request.match_info["file"])
    if file is None:
        raise web.HTTPNotFound
    return _answer(request, file)


def _answer(request: web.Request, file: File) -> web.Response:
    if any(tag.value in (file.etag, "*") for tag in request.if_none_match or ()):
        response = web.Response(status=304, headers=_HEADERS)
    else:
        charset = None if file.content_type.startswith(("image/png", "font/")) else "utf-8"
        response = web.Response(body=file.body, content_type=file.content_type, charset=charset, headers=_HEADERS)
    response.etag = file.etag
    return response


# ---- events


class Span(msgspec.Struct, frozen=True, array_like=True):
    """An `outputs.StageSpan` without the attribution of waiting time."""

    stage: str
    start_s: float
    end_s: float
    instance: str
    lane: str
    batch: int
    tokens: int
    cause: str | None


class Ended(msgspec.Struct, frozen=True):
    id: str
    arrival_s: float
    spans: list[Span]
    pictures: int
    prompt_tokens: int
    tokens: int


class Instance(msgspec.Struct, frozen=True):
    name: str
    role: str
    condition: str
    restarts: int
    device: str
    kv_block_size: int
    image_block_size: int
    kv_block_bytes: int
    status: Status | None
    node: str


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """An event of the live view. `time_s` is on the monotonic clock, like all times of statuses and requests. `number`
    counts ended requests: a viewer that reconnects passes it as `since`. `title` is the model's short name;
    `media` is None while the model loads."""

    time_s: float
    state: str
    model: str
    title: str
    version: str
    outcomes: Outcomes
    ttft_limit_s: float = 0.0
    tpot_limit_s: float = 0.0
    default_sampling_params: dict[str, Any] = {}
    media: MediaLimits | None = None
    max_body_bytes: int = 0
    instances: list[Instance] = []
    number: int = 0
    ended: list[Ended] = []
    running: Sequence[LiveRequest] = ()


class Viewers:
    """The open pages, each of which gets a snapshot every period until the server ends."""

    def __init__(self) -> None:
        self._closing = asyncio.Event()
        self._num_open = 0

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        """Counts a page for the duration of the `with`. Raises Unavailable if there are too many."""
        if self._num_open >= MAX_VIEWERS:
            message = f"{MAX_VIEWERS} pages are watching this server already; close one of them"
            raise Unavailable(message, code="overloaded", retry_after_s=5)
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1

    async def ticks(self) -> AsyncIterator[None]:
        """Yields at once, then once per period until the server ends."""
        while not self._closing.is_set():
            yield
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), PERIOD_S)

    def close(self) -> None:
        self._closing.set()


def _title(model_name: str) -> str:
    """The name of the folder or file that `model_name` is a path of, else the name as it is."""
    path = Path(model_name)
    return path.resolve().name if path.exists() else model_name


FILES = web.AppKey[dict[str, File]]("files")
VIEWERS = web.AppKey("viewers", Viewers)
TITLE = web.AppKey("title", str)


async def events(request: web.Request) -> web.StreamResponse:
    since = _parse_since(request.query.get("since", "0"))
    viewers = request.app[VIEWERS]
    with viewers.admit():
        async with EventStream(request, keepalive_s=0.0, stall_s=STALL_S) as stream:
            request[STREAM] = stream
            async for _ in viewers.ticks():
                snapshot = _snapshot(request, since)
                since = snapshot.number
                await stream.send(event(msgspec.json.encode(snapshot)))
        return await stream.finish(b"")


def _parse_since(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise InvalidRequest("since must be the number of a snapshot", param="since")
    return int(text)


def _snapshot(request: web.Request, since: int) -> Snapshot:
    engine = request.app[ENGINE]
    serving, reason = engine.health()
    state = "ok" if serving else reason
    if request.app[STATE].lifecycle.draining:
        state = "draining"
    snapshot = Snapshot(
        time_s=time.monotonic(),
        state=state,
        model=request.app[MODEL_NAME],
        title=request.app[TITLE],
        version=__version__,
        outcomes=request.app[STATE].metrics.requests.outcomes,
        number=since,
    )
    if reason in ("loading", "closed"):
        return snapshot
    activity = engine.activity(since, MAX_REQUESTS, request.get(TENANT))
    summaries = {summary.name: summary for summary in engine.summaries}
    limits = [summary.limits for summary in summaries.values()]
    return msgspec.structs.replace(
        snapshot,
        ttft_limit_s=max((limit.ttft_limit_s for limit in limits), default=0.0),
        tpot_limit_s=max((limit.tpot_limit_s for limit in limits), default=0.0),
        default_sampling_params=engine.default_sampling_params.non_default_fields,
        media=engine.media_limits,
        max_body_bytes=request.app[CONFIG].max_body_bytes,
        instances=[_instance(state, summaries.get(state.name)) for state in engine.instances()],
        number=activity.number,
        ended=[_ended(request) for request in activity.finished],
        running=activity.running,
    )


def _instance(state: InstanceState, summary: InstanceSummary | None) -> Instance:
    return Instance(
        name=state.name,
        role=state.role,
        condition=state.condition.value,
        restarts=state.restarts,
        device=summary.device if summary is not None else "",
        kv_block_size=summary.kv_block_size if summary is not None else 0,
        image_block_size=summary.image_block_size if summary is not None else 0,
        kv_block_bytes=summary.kv_cache_bytes // max(summary.num_kv_blocks, 1) if summary is not None else 0,
        status=None
        if state.status is None
        else msgspec.structs.replace(state.status, stages=()),  # they are in `running`
        node=state.node,
    )


def _ended(request: EndedRequest) -> Ended:
    usage = request.usage or Usage(0, 0)
    sizes = (usage.num_images, usage.prompt_tokens, usage.completion_tokens)
    return Ended(request.id, request.arrival_s, _spans(request.spans), *sizes)


def _spans(spans: Sequence[StageSpan]) -> list[Span]:
    return [
        Span(s.stage, round(s.start_s, 5), round(s.end_s, 5), s.instance, s.lane, s.batch, s.tokens, s.cause)
        for s in spans[:MAX_SPANS]
    ]


# ---- the application


def install(app: web.Application) -> None:
    app[FILES] = _read_files()
    app[VIEWERS] = Viewers()
    app[TITLE] = app[MODEL_NAME] if app[CONFIG].served_model_name else _title(app[MODEL_NAME])
    app.add_routes(
        [
            web.get("/", index),
            web.get("/ui/events", events, allow_head=False),
            web.get("/ui/{file:.+}", static_file),
        ]
    )

    async def close(app: web.Application) -> None:
        app[VIEWERS].close()

    app.on_shutdown.append(close)
