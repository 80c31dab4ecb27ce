"""Runs one generation for a client: submit, then the whole answer or a stream of events, and cancel in any case.

Endpoints differ only in the `Answer` they bring. Does not know their formats or fields.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from hydra_engine.core import outputs
from hydra_engine.core.call import GenerationCall
from hydra_engine.core.outputs import Piece, Result
from hydra_engine.core.request import SamplingParams
from hydra_engine.errors import InvalidRequest, NotFound
from hydra_engine.server.context import ANSWER_ID, CONFIG, ENGINE, MODEL_NAME, REQUEST_ID, loaded_engine
from hydra_engine.server.http.access import ACCESS
from hydra_engine.server.http.body import read_request
from hydra_engine.server.http.errors import STREAM
from hydra_engine.server.http.isolation import cache_salt
from hydra_engine.server.http.json_slices import Slices
from hydra_engine.server.http.sse import DONE, EventStream, json_events, send_parts
from hydra_engine.server.openai import logprob_limit
from hydra_engine.server.openai.several import add_requests
from hydra_engine.server.port import EnginePort, Handle
from hydra_engine.server.protocol.common import FINGERPRINT, Metrics, Usage, metrics_of, usage_of
from hydra_engine.server.protocol.fields import GenerationFields, SamplingFields
from hydra_engine.server.state import STATE, admitted
from hydra_engine.telemetry import timeline

R = TypeVar("R", bound=GenerationFields)


class Identity(msgspec.Struct, frozen=True):
    """What every chunk of an answer repeats."""

    id: str
    created: int
    model: str

    def head(self, kind: str) -> tuple[str, str, int, str, str]:
        """Of an OpenAI answer: the fields of `CompletionHead`."""
        return self.id, kind, self.created, self.model, FINGERPRINT


class UsageMeter:
    """The `usage` of a stream's chunks: absent unless asked for, null on all but the last, or a running count."""

    def __init__(self, fields: SamplingFields) -> None:
        self.included = fields.include_usage
        self._running = fields.continuous_usage
        self._prompt: outputs.Usage | None = None
        self.num_tokens = 0

    def begin(self, handle: Handle) -> None:
        if self._running:
            self._prompt = handle.prompt_usage

    def add(self, piece: Piece) -> None:
        self.num_tokens += len(piece.token_ids)

    def now(self) -> Usage | UnsetType | None:
        if not self.included:
            return UNSET
        return usage_of(self._prompt, self.num_tokens) if self._prompt is not None else None


class Answer:
    """What an endpoint makes of results and pieces."""

    last = DONE  # the event behind all others
    # The short way for pieces of nothing but text, where there is one. As `events`, for a piece without a result; None,
    # with nothing counted: it takes the long way. Does not raise.
    text_event: Callable[[Piece], bytes | None] | None = None

    def __init__(self, body: GenerationFields, identity: Identity) -> None:
        self._identity = identity
        self._with_metrics = bool(body.return_metrics)
        self.slices = Slices()

    def begin(self, handle: Handle) -> None:
        """The request is admitted."""

    def whole(self, result: Result) -> msgspec.Struct:
        raise NotImplementedError

    def _chunks(self, piece: Piece) -> Iterable[msgspec.Struct]:
        """What a piece of any choice adds. One with a result closes its choice, the last such piece the answer."""
        raise NotImplementedError

    def events(self, piece: Piece) -> bytes | Iterator[bytes]:
        """Whole events; empty where there is nothing to show, in parts where that is long."""
        return json_events(self._chunks(piece), self.slices)

    def _metrics(self, result: Result, *, streamed: bool = False) -> Metrics | UnsetType:
        return metrics_of(result, streamed=streamed) if self._with_metrics else UNSET


async def read_generation(request: web.Request, kind: type[R], prefix: str) -> tuple[EnginePort, R, Identity]:
    """What every generating endpoint begins with: the engine, the body, and the answer's identity under the id that the
    body asks for. Raises Unavailable, NotFound for another model, InvalidRequest for odd options."""
    engine = loaded_engine(request)
    request.app[STATE].lifecycle.check()
    body = await read_request(request, kind)
    model = check_model(request, body.model)
    if isinstance(body, SamplingFields) and body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if body.request_id is not None:
        request[REQUEST_ID] = body.request_id
    request[ANSWER_ID] = prefix + request[REQUEST_ID]
    return engine, body, Identity(request[ANSWER_ID], int(time.time()), model)


def check_model(request: web.Request, model: str | None) -> str:
    """The served name, which a request may leave out."""
    served = request.app[MODEL_NAME]
    if model is not None and model != served:
        raise NotFound(
            f"The model `{model[:200]}` does not exist; GET /v1/models lists what is served",
            param="model",
            code="model_not_found",
        )
    return served


def call_of(request: web.Request, body: GenerationFields, sampling: SamplingParams) -> GenerationCall:
    """What the calls of all endpoints have in common; of no prompt yet."""
    return GenerationCall(
        logprob_limit.bounded(request, body, sampling),
        slo=body.slo,
        priority=body.priority or 0,
        cache_salt=cache_salt(request, body.cache_salt),
        request_id=request[ANSWER_ID],
    )


async def respond(
    request: web.Request, calls: Sequence[GenerationCall], answer: Answer, body: GenerationFields
) -> web.StreamResponse:
    """One call for each prompt, all sampled alike."""
    if body.stream:
        return await _stream(request, calls, answer, body)
    async with _running(request, calls, answer, body) as handle:
        result = await handle
    request[ACCESS].add(result)
    headers = {}
    if body.return_metrics or request.app[CONFIG].server_timing:
        headers["Server-Timing"] = timeline.server_timing(result)
    encoded = answer.slices.encode(answer.whole(result))
    if isinstance(encoded, bytes):
        return web.Response(body=encoded, content_type="application/json", headers=headers)
    return await send_parts(request, encoded, headers)


async def _stream(
    request: web.Request, calls: Sequence[GenerationCall], answer: Answer, body: GenerationFields
) -> web.StreamResponse:
    async with (
        _running(request, calls, answer, body) as handle,
        EventStream(request, keepalive_s=request.app[CONFIG].keepalive_s) as events,
    ):
        request[STREAM] = events
        if answer.text_event is not None:
            handle.forward(partial(_write_text, answer.text_event, events))
        async for piece in handle:
            if piece.result is not None:
                request[ACCESS].add(piece.result)
            data = answer.events(piece)
            if not isinstance(data, bytes):
                await events.send_parts(data)
            elif data:
                await events.send(data)
            if piece.logprobs:  # which take their time; others have a turn between two pieces that wait
                await asyncio.sleep(0)
    return await events.finish(answer.last)


@asynccontextmanager
async def _running(
    request: web.Request, calls: Sequence[GenerationCall], answer: Answer, body: GenerationFields
) -> AsyncIterator[Handle]:
    """The admitted requests of these calls as one; cancelled in any case."""
    async with admitted(request, body.num_choices):
        handle = await add_requests(request.app[ENGINE], calls, request[ANSWER_ID])
        try:
            prompt = handle.prompt_usage
            if prompt is not None:
                logprob_limit.check(request, body, calls[0].sampling, prompt.prompt_tokens)
            handle.expect(pieces=bool(body.stream))
            answer.begin(handle)
            request[ACCESS].prompt = prompt
            yield handle
        finally:
            handle.cancel()


def _write_text(text_event: Callable[[Piece], bytes | None], events: EventStream, piece: Piece) -> bool:
    """False: the stream's task has to render it, or to wait for the reader."""
    if not events.is_free or (data := text_event(piece)) is None:
        return False
    if data:
        events.put(data)
    return True


def json_response(answer: msgspec.Struct, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(answer), content_type="application/json")
