"""The events of a stream of POST /v1/responses, in OpenAI's format. Does not know when one is sent."""

from __future__ import annotations

import msgspec

from hydra_engine.server.protocol.chat import TokenLogprob
from hydra_engine.server.protocol.response_input import ReasoningText
from hydra_engine.server.protocol.responses import OutputItem, OutputText, Response


class ResponseEvent(msgspec.Struct, frozen=True, tag_field="type", kw_only=True):
    sequence_number: int


class ContentEvent(ResponseEvent, frozen=True, kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0


class ResponseCreated(ResponseEvent, frozen=True, tag="response.created", kw_only=True):
    response: Response


class ResponseInProgress(ResponseEvent, frozen=True, tag="response.in_progress", kw_only=True):
    response: Response


class OutputItemAdded(ResponseEvent, frozen=True, tag="response.output_item.added", kw_only=True):
    output_index: int
    item: OutputItem


class ContentPartAdded(ContentEvent, frozen=True, tag="response.content_part.added", kw_only=True):
    part: OutputText | ReasoningText


class OutputTextDelta(ContentEvent, frozen=True, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[TokenLogprob] = []


class OutputTextDone(ContentEvent, frozen=True, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[TokenLogprob] = []


class ContentPartDone(ContentEvent, frozen=True, tag="response.content_part.done", kw_only=True):
    part: OutputText | ReasoningText


class ReasoningDelta(ContentEvent, frozen=True, tag="response.reasoning_text.delta", kw_only=True):
    delta: str


class ReasoningDone(ContentEvent, frozen=True, tag="response.reasoning_text.done", kw_only=True):
    text: str


class OutputItemDone(ResponseEvent, frozen=True, tag="response.output_item.done", kw_only=True):
    output_index: int
    item: OutputItem


class ArgumentsDelta(ResponseEvent, frozen=True, tag="response.function_call_arguments.delta", kw_only=True):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(ResponseEvent, frozen=True, tag="response.function_call_arguments.done", kw_only=True):
    item_id: str
    output_index: int
    name: str
    arguments: str


class ResponseCompleted(ResponseEvent, frozen=True, tag="response.completed", kw_only=True):
    response: Response


class ResponseIncomplete(ResponseEvent, frozen=True, tag="response.incomplete", kw_only=True):
    response: Response


class ResponseFailed(ResponseEvent, frozen=True, tag="response.failed", kw_only=True):
    response: Response


AnyResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | OutputItemAdded
    | ContentPartAdded
    | OutputTextDelta
    | OutputTextDone
    | ContentPartDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | OutputItemDone
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
)
