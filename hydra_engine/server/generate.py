"""Runs one generation for a client: submit, then the whole answer or a stream of events, and cancel in any case.

Endpoints differ only in the `Answer` they bring. Does not know their formats or fields.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol, runtime_checkable

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from hydra_engine.core import outputs
from hydra_engine.core.outputs import Piece, Result
from hydra_engine.errors import InvalidRequest, NotFound
from hydra_engine.observe import timeline
from hydra_engine.server.access import ACCESS
from hydra_engine.server.commons import admitted
from hydra_engine.server.context import ANSWER_ID, CONFIG, MODEL_NAME, REQUEST_ID
from hydra_engine.server.errors import STREAM
from hydra_engine.server.port import Forwarding, Handle
from hydra_engine.server.protocol.common import Usage, usage_of
from hydra_engine.server.protocol.fields import GenerationFields, SamplingFields
from hydra_engine.server.sse import EventStream


class Identity(msgspec.Struct, frozen=True):
    """What every chunk of an answer repeats."""

    id: str
    created: int
    model: str


class UsageMeter:
    """The `usage` of a stream's chunks: absent unless asked for, null on all but the last, or a running count."""

    def __init__(self, fields: SamplingFields) -> None:
        self.wanted = fields.include_usage
        self._running = fields.continuous_usage
        self._prompt: outputs.Usage | None = None
        self.num_tokens = 0

    def begin(self, handle: Handle) -> None:
        if self._running:
            self._prompt = handle.prompt_usage

    def add(self, piece: Piece) -> None:
        self.num_tokens += len(piece.token_ids)

    def now(self) -> Usage | UnsetType | None:
        if not self.wanted:
            return UNSET
        return usage_of(self._prompt, self.num_tokens) if self._prompt is not None else None


class Meter(Protocol):
    def begin(self, handle: Handle) -> None:
        """The request is admitted."""
        ...


class Answer(Protocol):
    @property
    def meter(self) -> Meter: ...

    def whole(self, result: Result) -> msgspec.Struct: ...

    def events(self, piece: Piece) -> bytes:
        """Whole events of a piece, of whichever choice it is; empty where there is nothing to show. A piece with a
        result closes its choice, the last one of them the answer."""
        ...

    @property
    def last(self) -> bytes:
        """The event behind all others."""
        ...


@runtime_checkable
class TextAnswer(Protocol):
    """An answer that knows a short way for pieces of nothing but text."""

    def text_event(self, piece: Piece) -> bytes | None:
        """As `events`, for a piece without a result; None, with nothing counted: it takes the long way. Does not
        raise."""
        ...


def identify(request: web.Request, fields: GenerationFields, prefix: str, *, separator: str = "-") -> Identity:
    """Takes over the id that the body asks for. Raises NotFound for another model, InvalidRequest for odd options."""
    model = check_model(request, fields.model)
    if isinstance(fields, SamplingFields) and fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if fields.request_id is not None:
        request[REQUEST_ID] = fields.request_id
    request[ANSWER_ID] = f"{prefix}{separator}{request[REQUEST_ID]}"
    return Identity(request[ANSWER_ID], int(time.time()), model)


def check_model(request: web.Request, asked: str | None) -> str:
    """The served name, which a request may leave out."""
    served = request.app[MODEL_NAME]
    if asked is not None and asked != served:
        raise NotFound(
            f"The model `{asked[:200]}` does not exist; GET /v1/models lists what is served",
            param="model",
            code="model_not_found",
        )
    return served


async def respond(
    request: web.Request, submit: Callable[[], Awaitable[Handle]], answer: Answer, asked: GenerationFields
) -> web.StreamResponse:
    if asked.stream:
        return await _stream(request, submit, answer, asked.num_choices)
    async with admitted(request, asked.num_choices):
        handle = await submit()
        try:
            _begin(request, answer, handle)
            result = await handle
        finally:
            handle.cancel()
    request[ACCESS].add(result)
    response = json_response(answer.whole(result))
    if asked.return_metrics or request.app[CONFIG].server_timing:
        response.headers["Server-Timing"] = timeline.server_timing(result)
    return response


async def _stream(
    request: web.Request, submit: Callable[[], Awaitable[Handle]], answer: Answer, num_answers: int
) -> web.StreamResponse:
    async with admitted(request, num_answers):
        handle = await submit()
        try:
            _begin(request, answer, handle)
            async with EventStream(request, keepalive_s=request.app[CONFIG].keepalive_s) as events:
                request[STREAM] = events
                if isinstance(handle, Forwarding) and isinstance(answer, TextAnswer):
                    handle.forward(partial(_write_text, answer, events))
                async for piece in handle:
                    if piece.result is not None:
                        request[ACCESS].add(piece.result)
                    if data := answer.events(piece):
                        await events.send(data)
        finally:
            handle.cancel()
    return await events.finish(answer.last)


def _begin(request: web.Request, answer: Answer, handle: Handle) -> None:
    answer.meter.begin(handle)
    request[ACCESS].prompt = handle.prompt_usage


def _write_text(answer: TextAnswer, events: EventStream, piece: Piece) -> bool:
    """False: the stream's task has to render it, or to wait for the reader."""
    if not events.is_free or (data := answer.text_event(piece)) is None:
        return False
    if data:
        events.put(data)
    return True


def json_response(answer: msgspec.Struct, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(answer), content_type="application/json")
