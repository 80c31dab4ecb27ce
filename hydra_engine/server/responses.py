"""POST /v1/responses. Does not know how the engine answers or how events are written."""

from __future__ import annotations

import itertools
import time

import msgspec
from aiohttp import web
from msgspec import UNSET

from hydra_engine.core.outputs import FinishReason, Piece, Result
from hydra_engine.errors import HydraError
from hydra_engine.server.body import read_request
from hydra_engine.server.context import LIFECYCLE, loaded_engine
from hydra_engine.server.errors import FAILURE, error_body
from hydra_engine.server.generate import Identity, identify, respond
from hydra_engine.server.isolation import cache_salt
from hydra_engine.server.port import Handle
from hydra_engine.server.protocol import responses as protocol
from hydra_engine.server.protocol.common import metrics_of
from hydra_engine.server.protocol.responses import (
    AnyResponseEvent,
    OutputMessage,
    OutputText,
    Response,
    ResponseFailure,
    ResponsesRequest,
    failure_code,
    response_usage,
    status_of,
    token_logprobs,
)
from hydra_engine.server.sse import event


async def responses(request: web.Request) -> web.StreamResponse:
    engine = loaded_engine(request)
    request.app[LIFECYCLE].check()
    asked = await read_request(request, ResponsesRequest)
    identity = identify(request, asked, "resp", separator="_")
    sampling = asked.sampling()
    messages = asked.messages()
    answer = ResponseAnswer(asked, identity)
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
        ),
        answer,
        asked,
    )


class ResponseAnswer:
    """One message with one part of text."""

    def __init__(self, asked: ResponsesRequest, identity: Identity) -> None:
        self._asked = asked
        self._identity = identity
        self._item_id = "msg_" + identity.id.removeprefix("resp_")
        self._numbers = itertools.count()
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
        return self._closed(result, streamed=False)

    def events(self, piece: Piece) -> bytes:
        found: list[AnyResponseEvent] = []
        if not self._begun:
            self._begun = True
            found += self._opening()
        if piece.text or piece.logprobs:
            found.append(
                protocol.OutputTextDelta(
                    sequence_number=self._next(),
                    item_id=self._item_id,
                    delta=piece.text,
                    logprobs=token_logprobs(piece.logprobs),
                )
            )
        if piece.result is not None:
            found += self._closing(piece.result)
        return b"".join(_written(one) for one in found)

    def failure(self, error: HydraError) -> bytes:
        """The last event of a stream that cannot go on."""
        body = error_body(error)
        failure = ResponseFailure(failure_code(error.status), body.message, body.param, body.type)
        failed = msgspec.structs.replace(self._open(), status="failed", error=failure)
        return _written(protocol.ResponseFailed(sequence_number=self._next(), response=failed))

    # ---- inside

    def _next(self) -> int:
        return next(self._numbers)

    def _opening(self) -> list[AnyResponseEvent]:
        response = self._open()
        message = OutputMessage(self._item_id, "in_progress", [])
        return [
            protocol.ResponseCreated(sequence_number=self._next(), response=response),
            protocol.ResponseInProgress(sequence_number=self._next(), response=response),
            protocol.OutputItemAdded(sequence_number=self._next(), item=message),
            protocol.ContentPartAdded(sequence_number=self._next(), item_id=self._item_id, part=OutputText("")),
        ]

    def _closing(self, result: Result) -> list[AnyResponseEvent]:
        response = self._closed(result, streamed=True)
        [message] = response.output
        [part] = message.content
        ends = result.finish_reason is FinishReason.LENGTH
        last = protocol.ResponseIncomplete if ends else protocol.ResponseCompleted
        return [
            protocol.OutputTextDone(
                sequence_number=self._next(), item_id=self._item_id, text=part.text, logprobs=part.logprobs
            ),
            protocol.ContentPartDone(sequence_number=self._next(), item_id=self._item_id, part=part),
            protocol.OutputItemDone(sequence_number=self._next(), item=message),
            last(sequence_number=self._next(), response=response),
        ]

    def _open(self) -> Response:
        asked = self._asked
        return Response(
            id=self._identity.id,
            created_at=self._identity.created,
            status="in_progress",
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            model=self._identity.model,
            temperature=1.0 if asked.temperature is None else asked.temperature,
            text=protocol.echoed(asked.text),
            top_logprobs=asked.top_logprobs or 0,
            top_p=1.0 if asked.top_p is None else asked.top_p,
            metadata=asked.metadata or {},
        )

    def _closed(self, result: Result, *, streamed: bool) -> Response:
        status = status_of(result.finish_reason)
        part = OutputText(result.text, logprobs=token_logprobs(result.logprobs))
        return msgspec.structs.replace(
            self._open(),
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=None if status == "completed" else protocol.IncompleteDetails("max_output_tokens"),
            output=[OutputMessage(self._item_id, status, [part])],
            usage=response_usage(result.usage),
            metrics=metrics_of(result, streamed=streamed) if self._asked.return_metrics else UNSET,
        )


def _written(one: AnyResponseEvent) -> bytes:
    name = one.__struct_config__.tag
    assert isinstance(name, str)
    return event(msgspec.json.encode(one), name)
