"""POST /v1/responses. Does not know how the engine answers, how events are written or how models call tools."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import msgspec
from aiohttp import web

from hydra_engine.core.outputs import FinishReason, Piece, Result
from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.core.request import SamplingParams
from hydra_engine.errors import HydraError
from hydra_engine.server.generate import Answer, Identity, call_of, read_generation, respond
from hydra_engine.server.http.encoding import json_event
from hydra_engine.server.http.errors import FAILURE, error_body
from hydra_engine.server.openai.response_items import OutputItems
from hydra_engine.server.protocol import response_events as events
from hydra_engine.server.protocol import responses as protocol
from hydra_engine.server.protocol.response_events import AnyResponseEvent
from hydra_engine.server.protocol.responses import (
    OutputItem,
    Response,
    ResponseFailure,
    ResponsesRequest,
    failure_code,
    response_usage,
    status_of,
)
from hydra_engine.server.state import CONFIG
from hydra_engine.server.tools.tool_calls import ToolUse
from hydra_engine.server.tools.tool_parsers import PlainText


async def responses(request: web.Request) -> web.StreamResponse:
    engine, body, identity = await read_generation(request, ResponsesRequest, "resp_")
    use = body.tool_use()
    dialect = use.dialect(request.app[CONFIG].tool_parser, engine.chat_template)
    sampling = use.sampling(body.sampling(engine.default_sampling_params), dialect)
    call = call_of(request, body, sampling)
    call = replace(call, messages=body.chat_messages(), template=TemplateOptions(use.shown))
    answer = ResponseAnswer(body, sampling, identity, use, dialect)
    request[FAILURE] = answer.failure
    return await respond(request, [call], answer, body)


class ResponseAnswer(Answer):
    last = b""  # the event that closes the response is the last one

    def __init__(
        self, body: ResponsesRequest, sampling: SamplingParams, identity: Identity, use: ToolUse, dialect: str
    ) -> None:
        super().__init__(body, identity)
        self._body = body
        self._sampling = sampling
        self._numbers = itertools.count()
        name = "msg_" + identity.id.removeprefix("resp_")
        self._items = OutputItems(name, use.parser(dialect) or PlainText(), self._next, self.slices)
        self._begun = False

    def whole(self, result: Result) -> Response:
        self._items.feed(result.text, result.logprobs)
        self._items.finish(status_of(result.finish_reason))
        return self._closed(result, self._items.closed, streamed=False)

    def _chunks(self, piece: Piece) -> list[AnyResponseEvent]:
        chunks: list[AnyResponseEvent] = []
        if not self._begun:
            self._begun = True
            response = self._open()
            chunks.append(events.ResponseCreated(sequence_number=self._next(), response=response))
            chunks.append(events.ResponseInProgress(sequence_number=self._next(), response=response))
        chunks += self._items.feed(piece.text, piece.logprobs)
        if (result := piece.result) is not None:
            chunks += self._items.finish(status_of(result.finish_reason))
            response = self._closed(result, self._items.closed, streamed=True)
            ends = result.finish_reason is FinishReason.LENGTH
            last = events.ResponseIncomplete if ends else events.ResponseCompleted
            chunks.append(last(sequence_number=self._next(), response=response))
        return chunks

    def failure(self, error: HydraError) -> bytes:
        """The last event of a stream that cannot go on."""
        body = error_body(error)
        failure = ResponseFailure(failure_code(error.status), body.message, body.param, body.type)
        failed = msgspec.structs.replace(self._open(), status="failed", error=failure)
        return json_event(events.ResponseFailed(sequence_number=self._next(), response=failed))

    # ---- inside

    def _next(self) -> int:
        return next(self._numbers)

    def _open(self) -> Response:
        body = self._body
        return Response(
            id=self._identity.id,
            created_at=self._identity.created,
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self._identity.model,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=self._sampling.temperature,
            text=protocol.echoed(body.text),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=self._sampling.top_p,
            metadata=body.metadata or {},
        )

    def _closed(self, result: Result, output: list[OutputItem], *, streamed: bool) -> Response:
        status = status_of(result.finish_reason)
        return msgspec.structs.replace(
            self._open(),
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=None if status == "completed" else protocol.IncompleteDetails("max_output_tokens"),
            output=output,
            usage=response_usage(result.usage),
            metrics=self._metrics(result, streamed=streamed),
        )
