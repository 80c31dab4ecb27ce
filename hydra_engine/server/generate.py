"""Runs one generation for a client: submits it, sends the whole answer or a stream of events, and always cancels it at
the end.

Endpoints differ only in their `Answer` class. Does not know their formats or fields.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from hydra_engine.core import outputs
from hydra_engine.core.call import ChatMessage, GenerationCall
from hydra_engine.core.outputs import Piece, Result
from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.core.schemas.numbers import encode_long
from hydra_engine.errors import InvalidRequest, NotFound
from hydra_engine.server.http.access_control import cache_salt
from hydra_engine.server.http.answers import (
    DONE,
    STREAM,
    EventStream,
    MakeChunk,
    Slices,
    TextEvents,
    json_event,
    send_parts,
)
from hydra_engine.server.http.body import read_request
from hydra_engine.server.loggers import ACCESS
from hydra_engine.server.openai.several import Several
from hydra_engine.server.port import EnginePort, Handle
from hydra_engine.server.protocol.common import FINGERPRINT, Metrics, Usage, metrics_of, usage_of
from hydra_engine.server.protocol.fields import GenerationFields, SamplingFields, log_once
from hydra_engine.server.state import (
    ANSWER_ID,
    CONFIG,
    ENGINE,
    MODEL_NAME,
    REQUEST_ID,
    STATE,
    TENANT,
    admitted,
    client_of,
    loaded_engine,
)
from hydra_engine.server.tools.reasoning import Thinking, Wish, always_thinks, apply_wish, marks_of, place_of
from hydra_engine.server.tools.tool_calls import NO_THINKING, ToolUse
from hydra_engine.telemetry import timeline

R = TypeVar("R", bound=GenerationFields)


class Identity(msgspec.Struct, frozen=True):
    """The fields that every chunk of an answer repeats."""

    id: str
    created: int
    model: str

    def head(self, kind: str) -> tuple[str, str, int, str, str]:
        """The first fields of OpenAI's answers, in the order of `CompletionHead`."""
        return self.id, kind, self.created, self.model, FINGERPRINT


class Answer:
    """An endpoint's format: turns results and pieces into JSON and events."""

    last = DONE  # the final event of a stream
    # Optional fast path of `events` for a piece that is only text and has no result. None: nothing was counted, and
    # the piece goes through `events`. Does not raise.
    text_event: Callable[[Piece], bytes | None] | None = None

    def __init__(self, body: GenerationFields, identity: Identity) -> None:
        self._identity = identity
        self._with_metrics = bool(body.return_metrics)
        self.slices = Slices()
        self.prompt: outputs.Usage | None = None  # counts of the prompt, once the request is admitted

    def full_answer(self, result: Result) -> msgspec.Struct:
        raise NotImplementedError

    def _chunks(self, piece: Piece) -> Iterable[msgspec.Struct]:
        """The chunks for a piece of any choice. A piece with a result closes its choice, the last such piece the
        answer."""
        raise NotImplementedError

    def events(self, piece: Piece) -> bytes | Iterator[bytes]:
        """Encodes a piece as complete events: empty if there is nothing to show, in parts if it is long."""
        return self.slices.fill(b"".join(map(json_event, self._chunks(piece))))

    def _metrics(self, result: Result, *, streamed: bool = False) -> Metrics | UnsetType:
        return metrics_of(result, streamed=streamed) if self._with_metrics else UNSET


class ChunkAnswer(Answer):
    """An answer in OpenAI's chunks. Their `usage` is absent by default; with `include_usage` it is null on all but the
    last chunk, or a running count."""

    def __init__(self, body: SamplingFields, identity: Identity, text_chunk: MakeChunk) -> None:
        super().__init__(body, identity)
        self._includes_usage = body.include_usage
        self._counts_along = body.continuous_usage
        self._num_tokens = 0
        self._texts = TextEvents(text_chunk)

    def _usage_now(self) -> Usage | UnsetType | None:
        if not self._includes_usage:
            return UNSET
        return usage_of(self.prompt, self._num_tokens) if self._counts_along and self.prompt is not None else None


async def read_generation(request: web.Request, kind: type[R], prefix: str) -> tuple[EnginePort, R, Identity]:
    """Reads the request of a generating endpoint: the engine, the body, and the answer's identity under the id that the
    body asks for. Raises Unavailable while loading or draining, NotFound for another model, InvalidRequest for invalid
    options."""
    engine = loaded_engine(request)
    request.app[STATE].lifecycle.check_not_draining()
    body = await read_request(request, kind)
    model = check_model(request, body.model)
    if isinstance(body, SamplingFields) and body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    if body.request_id is not None:
        request[REQUEST_ID] = body.request_id
    request[ANSWER_ID] = prefix + request[REQUEST_ID]
    return engine, body, Identity(request[ANSWER_ID], int(time.time()), model)


def check_model(request: web.Request, model: str | None) -> str:
    """Returns the served name. Raises NotFound if the request names another model; None is accepted."""
    served = request.app[MODEL_NAME]
    if model is not None and model != served:
        raise NotFound(
            f"The model `{model[:200]}` does not exist; GET /v1/models lists what is served",
            param="model",
            code="model_not_found",
        )
    return served


def with_tool_dialect(request: web.Request, use: ToolUse) -> ToolUse:
    """Returns `use` with the tool dialect of the served model. Raises InvalidRequest if the model has none."""
    return use.with_dialect(request.app[CONFIG].tool_parser, request.app[ENGINE].tool_template)


async def resolve_thinking(
    request: web.Request, template: TemplateOptions, messages: Sequence[ChatMessage], wish: Wish
) -> tuple[TemplateOptions, Thinking]:
    """Applies the client's wish about thinking: returns the template's options and how the model thinks with them.
    Raises InvalidRequest for a wish that the model cannot meet."""
    engine, parser = request.app[ENGINE], request.app[CONFIG].reasoning_parser
    text = (engine.tool_template if template.tools else engine.chat_template) or ""
    variables, ignored = apply_wish(template.variables, wish, text)
    for name in ignored:
        log_once(name)
    if variables != template.variables:
        template = replace(template, variables=variables)
    marks = marks_of(parser, text)
    if marks is None:
        return template, NO_THINKING
    if template.continue_final_message:
        last = "".join(text for _, text in messages[-1].texts())
        place = "opened" if place_of(last, marks, "") == "opened" else "closed"
    elif template.add_generation_prompt:
        place = place_of(await engine.generation_prompt(template, messages[-1].role, client_of(request)), marks, parser)
    else:
        place = "free"
    if (problem := always_thinks(wish, place, text)) is not None:
        raise problem
    known = parser != "none"
    return template, Thinking(marks, place, known, known and wish.read, wish.shown, wish.streamed)


def build_call(request: web.Request, body: GenerationFields, sampling: SamplingParams) -> GenerationCall:
    """Builds the part of a call that all endpoints share, still without a prompt. Raises InvalidRequest for too many
    log probabilities."""
    return GenerationCall(
        _bounded(request, body, sampling),
        slo=body.slo,
        priority=body.priority or 0,
        cache_salt=cache_salt(request, body.cache_salt),
        client=client_of(request),
        request_id=request[ANSWER_ID],
    )


async def respond(
    request: web.Request, calls: Sequence[GenerationCall], answer: Answer, body: GenerationFields
) -> web.StreamResponse:
    """Runs one call per prompt, all with the same sampling, and returns their answer."""
    if body.stream:
        return await _stream(request, calls, answer, body)
    async with _running(request, calls, answer, body) as handle:
        result = await handle
    request[ACCESS].add(result)
    headers = {}
    if body.return_metrics or request.app[CONFIG].server_timing:
        headers["Server-Timing"] = timeline.server_timing(result)
    encoded = answer.slices.encode(answer.full_answer(result))
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
            handle.offer_pieces_to(partial(_write_text, answer.text_event, events))
        async for piece in handle:
            if piece.result is not None:
                request[ACCESS].add(piece.result)
            data = answer.events(piece)
            if not isinstance(data, bytes):
                await events.send_parts(data)
            elif data:
                await events.send(data)
            if piece.logprobs:  # these are slow to encode: other tasks run between two queued pieces
                await asyncio.sleep(0)
    return await events.finish(answer.last)


@asynccontextmanager
async def _running(
    request: web.Request, calls: Sequence[GenerationCall], answer: Answer, body: GenerationFields
) -> AsyncIterator[Handle]:
    """Admits the calls as one request for the duration of the `async with`; cancels it at the end in any case."""
    async with admitted(request, body.num_choices):
        handle = await _add_requests(request.app[ENGINE], calls, request[ANSWER_ID])
        try:
            prompt = handle.prompt_usage
            if prompt is not None:
                _check_logprobs(request, body, calls[0].sampling, prompt.prompt_tokens)
            handle.expect(pieces=bool(body.stream))
            request[ACCESS].prompt = answer.prompt = prompt
            yield handle
        finally:
            handle.cancel()


async def _add_requests(engine: EnginePort, calls: Sequence[GenerationCall], name: str) -> Handle:
    """Submits all calls as one request of this name, or none if one is refused."""
    handles: list[Handle] = []
    with ExitStack() as admitted:
        for call in calls:
            handle = await engine.add_request(call)
            admitted.callback(handle.cancel)
            await asyncio.sleep(0)  # other tasks run between two prompts
            handles.append(handle)
        admitted.pop_all()
    return handles[0] if len(handles) == 1 else Several(name, handles, calls[0].sampling.n)


def _write_text(text_event: Callable[[Piece], bytes | None], events: EventStream, piece: Piece) -> bool:
    """Writes a piece of plain text directly. False: the stream's task must render it, or wait for the reader."""
    if not events.is_free or (data := text_event(piece)) is None:
        return False
    if data:
        events.send_now(data)
    return True


def json_response(answer: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer, enc_hook=encode_long), content_type="application/json")


# ---- the end of a generation by its id


class EndedRequests(msgspec.Struct, frozen=True, kw_only=True):
    """`ended`: number of requests with this id that ran and were stopped."""

    id: str
    object: str = "request.ended"
    ended: int


async def end_requests(request: web.Request) -> web.Response:
    request_id = request.match_info["id"]
    ended = request.app[STATE].lifecycle.end(request.get(TENANT, ""), request_id)
    if not ended:
        raise NotFound("no request with this id is running; ids are the `id` of an answer or its X-Request-Id header")
    return json_response(EndedRequests(id=request_id, ended=ended))


# ---- the limit of log probabilities in one answer, checked before the request runs


def _num_logprobs(body: GenerationFields, sampling: SamplingParams, num_prompt: int = 0) -> int:
    """Upper bound of the log probabilities in one answer: answers (of all prompts) x tokens x (1 + candidates), plus
    `num_prompt` tokens of all prompts in each place that repeats them. Without `max_tokens` answers count as 0."""
    count = 0
    if sampling.logprobs is not None:
        count += body.num_choices * (sampling.max_tokens or 0) * (1 + sampling.logprobs)
    if sampling.prompt_logprobs is not None:
        count += body.num_prompt_copies * num_prompt * (1 + sampling.prompt_logprobs)
    return count


def _bounded(request: web.Request, body: GenerationFields, sampling: SamplingParams) -> SamplingParams:
    """Checks the number of log probabilities. Returns `sampling`, with a `max_tokens` if the request has none and could
    exceed the limit. Raises InvalidRequest."""
    most = request.app[CONFIG].max_logprob_entries
    if sampling.logprobs is not None and sampling.max_tokens is None:
        room, engine = most // (body.num_choices * (1 + sampling.logprobs)), request.app[ENGINE]
        if room < min(engine.max_model_len, engine.default_sampling_params.max_tokens or engine.max_model_len):
            sampling = replace(sampling, max_tokens=max(room, sampling.min_tokens, 1))
    _check_logprobs(request, body, sampling)
    sampling.check_answers(body.num_choices, body.answer_fields)
    return sampling


def _check_logprobs(
    request: web.Request, body: GenerationFields, sampling: SamplingParams, num_prompt: int = 0
) -> None:
    """Raises InvalidRequest for more than `max_logprob_entries` log probabilities. `num_prompt`: tokens of the prompts,
    0 until they are known."""
    count, most = _num_logprobs(body, sampling, num_prompt), request.app[CONFIG].max_logprob_entries
    if count > most:
        fields = body.logprob_fields
        raise InvalidRequest(
            f"this request asks for up to {count} log probabilities (answers x tokens x (1 + candidates), and those of "
            f"the prompt); at most {most} are given in one answer: lower {', '.join(fields[:-1])} or {fields[-1]}",
            param=fields[-1],
        )
