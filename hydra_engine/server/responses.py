"""POST /v1/responses. Does not know how the engine answers, how events are written or how models call tools."""

from __future__ import annotations

import itertools
import time

import msgspec
from aiohttp import web
from msgspec import UNSET

from hydra_engine.core.outputs import FinishReason, Piece, Result
from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.errors import HydraError
from hydra_engine.server.body import read_request
from hydra_engine.server.context import CONFIG, LIFECYCLE, loaded_engine
from hydra_engine.server.errors import FAILURE, error_body
from hydra_engine.server.generate import Identity, identify, respond
from hydra_engine.server.isolation import cache_salt
from hydra_engine.server.port import Handle
from hydra_engine.server.protocol import response_events as events
from hydra_engine.server.protocol import responses as protocol
from hydra_engine.server.protocol.common import metrics_of
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
from hydra_engine.server.response_items import OutputItems
from hydra_engine.server.sse import json_events
from hydra_engine.server.tool_parsers import PlainText
from hydra_engine.server.tools import ToolUse, dialect_of


async def responses(request: web.Request) -> web.StreamResponse:
    engine = loaded_engine(request)
    request.app[LIFECYCLE].check()
    asked = await read_request(request, ResponsesRequest)
    identity = identify(request, asked, "resp", separator="_")
    use = asked.tool_use()
    configured = request.app[CONFIG].tool_parser
    use.check(configured, engine.chat_template)
    dialect = dialect_of(configured, engine.chat_template)
    sampling = use.sampling(asked.sampling(), dialect)
    messages = asked.messages()
    answer = ResponseAnswer(asked, identity, use, dialect)
    request[FAILURE] = answer.failure
    return await respond(
        request,
        lambda: engine.asubmit(
            messages=messages,
            sampling=sampling,
            request_id=identity.id,
            slo=asked.slo,
            cache_salt=cache_salt(request, asked.cache_salt),
            priority=asked.priority or 0,
            template=TemplateOptions(use.shown),
        ),
        answer,
        asked,
    )


class ResponseAnswer:
    def __init__(self, asked: ResponsesRequest, identity: Identity, use: ToolUse, dialect: str) -> None:
        self._asked = asked
        self._identity = identity
        self._numbers = itertools.count()
        name = "msg_" + identity.id.removeprefix("resp_")
        self._items = OutputItems(name, use.parser(dialect) or PlainText(), self._next)
        self._begun = False

    @property
    def meter(self) -> ResponseAnswer:
        return self

    def begin(self, handle: Handle) -> None:
        """Counts come at the end only."""

    @property
    def last(self) -> bytes:
        """The event that closes the response is the last one."""
        return b""

    def whole(self, result: Result) -> Response:
        self._items.feed(result.text, result.logprobs)
        self._items.finish(status_of(result.finish_reason))
        return self._closed(result, self._items.closed, streamed=False)

    def events(self, piece: Piece) -> bytes:
        found: list[AnyResponseEvent] = []
        if not self._begun:
            self._begun = True
            response = self._open()
            found.append(events.ResponseCreated(sequence_number=self._next(), response=response))
            found.append(events.ResponseInProgress(sequence_number=self._next(), response=response))
        found += self._items.feed(piece.text, piece.logprobs)
        if (result := piece.result) is not None:
            found += self._items.finish(status_of(result.finish_reason))
            response = self._closed(result, self._items.closed, streamed=True)
            ends = result.finish_reason is FinishReason.LENGTH
            last = events.ResponseIncomplete if ends else events.ResponseCompleted
            found.append(last(sequence_number=self._next(), response=response))
        return json_events(found)

    def failure(self, error: HydraError) -> bytes:
        """The last event of a stream that cannot go on."""
        body = error_body(error)
        failure = ResponseFailure(failure_code(error.status), body.message, body.param, body.type)
        failed = msgspec.structs.replace(self._open(), status="failed", error=failure)
        return json_events([events.ResponseFailed(sequence_number=self._next(), response=failed)])

    # ---- inside

    def _next(self) -> int:
        return next(self._numbers)

    def _open(self) -> Response:
        asked = self._asked
        return Response(
            id=self._identity.id,
            created_at=self._identity.created,
            status="in_progress",
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            model=self._identity.model,
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            temperature=1.0 if asked.temperature is None else asked.temperature,
            text=protocol.echoed(asked.text),
            tool_choice=asked.tool_choice or "auto",
            tools=asked.tools or [],
            top_logprobs=asked.top_logprobs or 0,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            metadata=asked.metadata or {},
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
            metrics=metrics_of(result, streamed=streamed) if self._asked.return_metrics else UNSET,
        )
