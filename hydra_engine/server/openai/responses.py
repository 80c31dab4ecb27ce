"""POST /v1/responses. Does not know how the engine answers, how events are written or how models call tools."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from aiohttp import web

from hydra_engine.core.logprobs import TextLogprob, extend_logprobs
from hydra_engine.core.outputs import FinishReason, Piece, Result
from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.errors import HydraError
from hydra_engine.server.generate import (
    Answer,
    Identity,
    build_call,
    read_generation,
    resolve_thinking,
    respond,
    with_tool_dialect,
)
from hydra_engine.server.http.answers import FAILURE, Slices, error_body, json_event
from hydra_engine.server.http.body import parse_in_turn
from hydra_engine.server.protocol import responses as protocol
from hydra_engine.server.protocol.chat import token_logprobs
from hydra_engine.server.protocol.fields import pixel_budget
from hydra_engine.server.protocol.responses import (
    AnyResponseEvent,
    FunctionCall,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseFailure,
    ResponsesRequest,
    Status,
    failure_code,
    response_usage,
    status_of,
)
from hydra_engine.server.tools.reasoning import Thinking
from hydra_engine.server.tools.tool_calls import ToolUse
from hydra_engine.server.tools.tool_objects import CallArguments, CallStart, Content, Event, Reasoning
from hydra_engine.server.tools.tool_parsers import PlainText


async def responses(request: web.Request) -> web.StreamResponse:
    engine, body, identity = await read_generation(request, ResponsesRequest, "resp_")
    use = with_tool_dialect(request, body.tool_use())
    sampling = use.sampling(body.sampling(engine.default_sampling_params))
    messages = await parse_in_turn(request, body.chat_messages)
    options = TemplateOptions(use.prompt_tools, body.chat_template_kwargs or {})
    template, thinking = await resolve_thinking(request, options, messages, body.wish)
    call = replace(
        build_call(request, body, thinking.sampling(sampling)),
        messages=messages,
        template=template,
        pixels=pixel_budget(body.mm_processor_kwargs),
    )
    answer = ResponseAnswer(body, sampling, identity, use, thinking)
    request[FAILURE] = answer.failure
    return await respond(request, [call], answer, body)


@dataclass(slots=True)
class _Message:
    id: str
    texts: list[str] = field(default_factory=list)
    logprobs: Sequence[TextLogprob] = ()  # repeated in the item's final event

    def part(self, slices: Slices) -> OutputText:
        return OutputText("".join(self.texts), logprobs=token_logprobs(self.logprobs, slices))


@dataclass(slots=True)
class _Thoughts:
    id: str
    texts: list[str] = field(default_factory=list)

    def as_item(self, status: Status) -> ReasoningItem:
        return ReasoningItem(self.id, status, [ReasoningText("".join(self.texts))])


@dataclass(slots=True)
class _Call:
    id: str
    call_id: str
    name: str
    texts: list[str] = field(default_factory=list)

    def as_item(self, status: Status) -> FunctionCall:
        return FunctionCall(self.id, self.call_id, self.name, "".join(self.texts), status)


class ResponseAnswer(Answer):
    """An answer of reasoning, messages and function calls, item by item, as the model's text grows. Log probabilities
    of text that is held back come with the next text that is sent."""

    last = b""  # no [DONE]: the event that closes the response is the last one

    def __init__(
        self, body: ResponsesRequest, sampling: SamplingParams, identity: Identity, use: ToolUse, thinking: Thinking
    ) -> None:
        super().__init__(body, identity)
        self._body = body
        self._sampling = sampling
        self._parser = use.parser(thinking) or PlainText()
        self._numbers = itertools.count()
        self._begun = False
        self._closed: list[OutputItem] = []
        self._open: _Message | _Thoughts | _Call | None = None
        self._logprobs: Sequence[TextLogprob] = ()
        self._num_messages = 0

    def full_answer(self, result: Result) -> Response:
        self._feed(result.text, result.logprobs)
        self._finish(result)
        return self._ended(result, streamed=False)

    def _chunks(self, piece: Piece) -> list[AnyResponseEvent]:
        emitted: list[AnyResponseEvent] = []
        if not self._begun:
            self._begun = True
            response = self._begun_response()
            emitted.append(protocol.ResponseCreated(sequence_number=self._next(), response=response))
            emitted.append(protocol.ResponseInProgress(sequence_number=self._next(), response=response))
        emitted += self._feed(piece.text, piece.logprobs)
        if (result := piece.result) is not None:
            emitted += self._finish(result)
            response = self._ended(result, streamed=True)
            last = protocol.ResponseIncomplete if response.status == "incomplete" else protocol.ResponseCompleted
            emitted.append(last(sequence_number=self._next(), response=response))
        return emitted

    def failure(self, error: HydraError) -> bytes:
        """The last event of a stream that fails."""
        body = error_body(error)
        failure = ResponseFailure(failure_code(error.status), body.message, body.param, body.type)
        failed = msgspec.structs.replace(self._begun_response(), status="failed", error=failure)
        return json_event(protocol.ResponseFailed(sequence_number=self._next(), response=failed))

    # ---- items

    def _feed(self, text: str, logprobs: Sequence[TextLogprob] | None) -> list[AnyResponseEvent]:
        self._logprobs = extend_logprobs(self._logprobs, logprobs or ())
        return self._of_text(self._parser.parse(text)) if text else []

    def _finish(self, result: Result) -> list[AnyResponseEvent]:
        """Closes the last item; an empty answer becomes an empty message."""
        emitted = self._of_text(self._parser.finish())
        if self._open is None or (self._logprobs and isinstance(self._open, _Message)):
            emitted += self._text("")
        return emitted + self._close(self._status(result))

    def _status(self, result: Result) -> Status:
        """The status of the last item: incomplete if the token limit ended it or it ends inside a call."""
        return "incomplete" if self._parser.is_cut else status_of(result.finish_reason)

    def _of_text(self, parsed: Iterable[Event]) -> list[AnyResponseEvent]:
        emitted: list[AnyResponseEvent] = []
        for event in parsed:
            match event:
                case Content(text):
                    emitted += self._text(text)
                case Reasoning(text):
                    emitted += self._thought(text)
                case CallStart(_, id, name):
                    emitted += self._close("completed") + self._begin(_Call(id.replace("call_", "fc_", 1), id, name))
                case CallArguments(_, text):
                    assert isinstance(self._open, _Call)
                    self._open.texts.append(text)
                    emitted.append(self._event(protocol.ArgumentsDelta, item_id=self._open.id, delta=text))
        return emitted

    def _text(self, text: str) -> list[AnyResponseEvent]:
        emitted: list[AnyResponseEvent] = []
        if not isinstance(self._open, _Message):
            self._num_messages += 1
            name = "msg_" + self._identity.id.removeprefix("resp_")
            number = f"_{self._num_messages}" if self._num_messages > 1 else ""
            emitted += self._close("completed") + self._begin(_Message(name + number))
        message, logprobs = self._open, self._logprobs
        assert isinstance(message, _Message)
        if text or logprobs:
            self._logprobs = ()
            message.texts.append(text)
            message.logprobs = extend_logprobs(message.logprobs, logprobs)
            shown = token_logprobs(logprobs, self.slices)
            emitted.append(self._event(protocol.OutputTextDelta, item_id=message.id, delta=text, logprobs=shown))
        return emitted

    def _thought(self, text: str) -> list[AnyResponseEvent]:
        emitted: list[AnyResponseEvent] = []
        if not isinstance(self._open, _Thoughts):
            emitted += self._close("completed")
            emitted += self._begin(_Thoughts("rs_" + self._identity.id.removeprefix("resp_")))
        assert isinstance(self._open, _Thoughts)
        self._open.texts.append(text)
        return [*emitted, self._event(protocol.ReasoningDelta, item_id=self._open.id, delta=text)]

    def _event(self, kind: Callable[..., AnyResponseEvent], **fields: Any) -> AnyResponseEvent:
        """The next event for the open item."""
        return kind(sequence_number=self._next(), output_index=len(self._closed), **fields)

    def _begin(self, item: _Message | _Thoughts | _Call) -> list[AnyResponseEvent]:
        self._open = item
        if isinstance(item, _Call):
            return [self._event(protocol.OutputItemAdded, item=item.as_item("in_progress"))]
        if isinstance(item, _Thoughts):
            return [
                self._event(protocol.OutputItemAdded, item=ReasoningItem(item.id, "in_progress")),
                self._event(protocol.ContentPartAdded, item_id=item.id, part=ReasoningText("")),
            ]
        return [
            self._event(protocol.OutputItemAdded, item=OutputMessage(item.id, "in_progress", [])),
            self._event(protocol.ContentPartAdded, item_id=item.id, part=OutputText("")),
        ]

    def _close(self, status: Status) -> list[AnyResponseEvent]:
        item, self._open = self._open, None
        if item is None:
            return []
        done: OutputItem
        if isinstance(item, _Call):
            done = item.as_item(status)
            emitted = [self._event(protocol.ArgumentsDone, item_id=item.id, name=item.name, arguments=done.arguments)]
        elif isinstance(item, _Thoughts):
            done = item.as_item(status)
            emitted = [
                self._event(protocol.ReasoningDone, item_id=item.id, text=done.content[0].text),
                self._event(protocol.ContentPartDone, item_id=item.id, part=done.content[0]),
            ]
        else:
            part = item.part(self.slices)
            done = OutputMessage(item.id, status, [part])
            emitted = [
                self._event(protocol.OutputTextDone, item_id=item.id, text=part.text, logprobs=part.logprobs),
                self._event(protocol.ContentPartDone, item_id=item.id, part=part),
            ]
        emitted.append(self._event(protocol.OutputItemDone, item=done))
        self._closed.append(done)
        return emitted

    # ---- the response

    def _next(self) -> int:
        return next(self._numbers)

    def _begun_response(self) -> Response:
        body = self._body
        return Response(
            id=self._identity.id,
            created_at=self._identity.created,
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self._identity.model,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning=body.reasoning,
            temperature=self._sampling.temperature,
            text=protocol.echo_format(body.text),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=self._sampling.top_p,
            metadata=body.metadata or {},
        )

    def _ended(self, result: Result, *, streamed: bool) -> Response:
        status, is_cut = self._status(result), result.finish_reason is FinishReason.LENGTH
        return msgspec.structs.replace(
            self._begun_response(),
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=protocol.IncompleteDetails("max_output_tokens") if is_cut else None,
            output=self._closed,
            usage=response_usage(result.usage),
            metrics=self._metrics(result, streamed=streamed),
        )
