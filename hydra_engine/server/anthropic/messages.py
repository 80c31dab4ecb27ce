"""POST /v1/messages and /v1/messages/count_tokens, in Anthropic's format. Does not know how the engine answers, how
events are written or how models call tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec
from aiohttp import web

from hydra_engine.core import outputs
from hydra_engine.core.call import GenerationCall
from hydra_engine.core.outputs import Piece, Result
from hydra_engine.server.generate import (
    Answer,
    Identity,
    build_call,
    check_model,
    json_response,
    read_generation,
    resolve_thinking,
    respond,
    with_tool_dialect,
)
from hydra_engine.server.http.access_control import cache_salt
from hydra_engine.server.http.answers import json_event
from hydra_engine.server.http.body import parse_in_turn, read_request
from hydra_engine.server.protocol.anthropic import (
    AnthropicMessage,
    AnyMessageEvent,
    AnyOutputBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    CountTokensRequest,
    InputJsonDelta,
    MessageDelta,
    MessagesRequest,
    MessageStart,
    MessageStop,
    OutputBlock,
    Ping,
    SignatureDelta,
    StopDelta,
    TextDelta,
    ThinkingDelta,
    ThinkingOutput,
    TokensCount,
    ToolUseOutput,
    conversation,
    message_usage,
    stop_of,
    template_of,
    tool_use_of,
    wish_of,
)
from hydra_engine.server.protocol.fields import pixel_budget
from hydra_engine.server.state import STATE, client_of, loaded_engine
from hydra_engine.server.tools.reasoning import Thinking
from hydra_engine.server.tools.tool_calls import ParsedCall, ToolUse, join_events
from hydra_engine.server.tools.tool_objects import CallArguments, CallStart, Content, Event, Reasoning
from hydra_engine.server.tools.tool_parsers import PlainText


async def messages(request: web.Request) -> web.StreamResponse:
    engine, body, identity = await read_generation(request, MessagesRequest, "msg_")
    use = with_tool_dialect(request, tool_use_of(body))
    sampling = use.sampling(body.sampling(engine.default_sampling_params))
    turns = await parse_in_turn(request, conversation, body.messages, body.system)
    template, thinking = await resolve_thinking(request, template_of(body, use), turns, body.wish)
    call = replace(
        build_call(request, body, thinking.sampling(sampling)),
        messages=turns,
        template=template,
        pixels=pixel_budget(body.mm_processor_kwargs),
    )
    return await respond(request, [call], MessageAnswer(body, identity, use, thinking), body)


async def count_tokens(request: web.Request) -> web.Response:
    engine = loaded_engine(request)
    request.app[STATE].lifecycle.check_not_draining()
    body = await read_request(request, CountTokensRequest)
    check_model(request, body.model)
    use = with_tool_dialect(request, tool_use_of(body))
    turns = await parse_in_turn(request, conversation, body.messages, body.system)
    template, _ = await resolve_thinking(request, template_of(body, use), turns, wish_of(body.thinking))
    call = GenerationCall(
        messages=turns,
        template=template,
        pixels=pixel_budget(body.mm_processor_kwargs),
        cache_salt=cache_salt(request, None),
        client=client_of(request),
    )
    return json_response(TokensCount(await engine.count_call_tokens(call)))


class MessageAnswer(Answer):
    """An answer of reasoning, text and tool uses, block by block, as the model's text grows. A tool use is sent when it
    is complete, for only then it is known to be one: a client must not run what the model has not written."""

    last = json_event(MessageStop())

    def __init__(self, body: MessagesRequest, identity: Identity, use: ToolUse, thinking: Thinking) -> None:
        super().__init__(body, identity)
        self._parser = use.parser(thinking) or PlainText()
        self._is_text = not use.prompt_tools and not thinking.reads
        self._omits_thoughts = body.thinking is not None and body.thinking.display == "omitted"
        self._begun = False
        self._has_calls = False
        self._num_closed = 0
        self._open: AnyOutputBlock | None = None
        self._call: list[Event] = []  # start and arguments of a call that is not complete yet

    def full_answer(self, result: Result) -> AnthropicMessage:
        items = join_events([*self._parser.parse(result.text), *self._parser.finish()])
        content = [self._block(item) for item in (items[:-1] if self._parser.is_cut else items)] or [OutputBlock("")]
        has_calls = any(isinstance(block, ToolUseOutput) for block in content)
        reason, sequence = stop_of(result, has_calls=has_calls)
        return AnthropicMessage(
            id=self._identity.id,
            model=self._identity.model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=message_usage(result.usage),
            metrics=self._metrics(result),
        )

    def _chunks(self, piece: Piece) -> list[AnyMessageEvent]:
        events = [] if self._begun else self._begin()
        if piece.text:
            events += self._of_text(self._parser.parse(piece.text))
        if (result := piece.result) is not None:
            events += self._of_text(self._parser.finish())
            events += [] if self._parser.is_cut else self._end_call()
            if self._open is None and not self._num_closed:  # an empty answer becomes an empty text
                events += self._begin_text()
            events += self._close_block()
            stop = StopDelta(*stop_of(result, has_calls=self._has_calls))
            events.append(MessageDelta(stop, message_usage(result.usage), self._metrics(result, streamed=True)))
        return events

    def _begin(self) -> list[AnyMessageEvent]:
        self._begun = True
        usage = message_usage(self.prompt or outputs.Usage(0, 0))
        start = AnthropicMessage(id=self._identity.id, model=self._identity.model, usage=usage)
        # An answer that can only be text opens its block at once.
        return [MessageStart(start), *(self._begin_text() if self._is_text else []), Ping()]

    def _of_text(self, parsed_events: Iterable[Event]) -> list[AnyMessageEvent]:
        events: list[AnyMessageEvent] = []
        for event in parsed_events:
            match event:
                case Content(text):
                    events += [*self._end_call(), *self._begin_text()]
                    events.append(ContentBlockDelta(TextDelta(text), self._num_closed))
                case Reasoning(text):
                    if not isinstance(self._open, ThinkingOutput):
                        events += self._begin_block(ThinkingOutput(""))
                    if not self._omits_thoughts:
                        events.append(ContentBlockDelta(ThinkingDelta(text), self._num_closed))
                case CallStart():
                    events += self._end_call()
                    self._call = [event]
                case CallArguments():
                    self._call.append(event)
        return events

    def _end_call(self) -> list[AnyMessageEvent]:
        """The events of the block of a complete call, from its start to its end."""
        events: list[AnyMessageEvent] = []
        for item in join_events(self._call):
            block = self._block(item)
            if isinstance(block, ToolUseOutput) and isinstance(item, ParsedCall):
                self._has_calls = True
                events += self._begin_block(ToolUseOutput(block.id, block.name))
                events.append(ContentBlockDelta(InputJsonDelta(item.arguments), self._num_closed))
            elif isinstance(block, OutputBlock):
                events += self._begin_block(OutputBlock(""))
                events.append(ContentBlockDelta(TextDelta(block.text), self._num_closed))
            events += self._close_block()
        self._call = []
        return events

    def _block(self, item: str | Reasoning | ParsedCall) -> AnyOutputBlock:
        """The block of a complete item. A call whose input is not a JSON object (it was not constrained) stays text."""
        if isinstance(item, str):
            return OutputBlock(item)
        if isinstance(item, Reasoning):
            return ThinkingOutput("" if self._omits_thoughts else item.text)
        arguments = _object(item.arguments)
        if arguments is None:
            return OutputBlock(item.arguments)
        return ToolUseOutput(item.id.replace("call_", "toolu_", 1), item.name, arguments)

    def _begin_text(self) -> list[AnyMessageEvent]:
        """Opens a block of text, unless one is open."""
        return [] if isinstance(self._open, OutputBlock) else self._begin_block(OutputBlock(""))

    def _begin_block(self, block: AnyOutputBlock) -> list[AnyMessageEvent]:
        events = self._close_block()
        self._open = block
        return [*events, ContentBlockStart(block, self._num_closed)]

    def _close_block(self) -> list[AnyMessageEvent]:
        if self._open is None:
            return []
        index, block, self._open = self._num_closed, self._open, None
        self._num_closed += 1
        signed = (
            [ContentBlockDelta(SignatureDelta(block.signature), index)] if isinstance(block, ThinkingOutput) else []
        )
        return [*signed, ContentBlockStop(index)]


def _object(text: str) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
