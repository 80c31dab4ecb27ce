"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's. Does not know how the engine answers, how events are
written or how models call tools.
"""

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
    call_of,
    check_model,
    json_response,
    offered,
    read_generation,
    respond,
)
from hydra_engine.server.http.auth import cache_salt
from hydra_engine.server.http.body import read_request
from hydra_engine.server.http.encoding import json_event
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
    StopDelta,
    TextDelta,
    TokensCount,
    ToolUseOutput,
    conversation,
    message_usage,
    stop_of,
    template_of,
    tool_use_of,
)
from hydra_engine.server.state import STATE, loaded_engine
from hydra_engine.server.tools.tool_calls import ToolUse, parsed
from hydra_engine.server.tools.tool_objects import CallArguments, CallStart, Content, Event
from hydra_engine.server.tools.tool_parsers import PlainText


async def messages(request: web.Request) -> web.StreamResponse:
    engine, body, identity = await read_generation(request, MessagesRequest, "msg_")
    use = offered(request, tool_use_of(body))
    sampling = use.sampling(body.sampling(engine.default_sampling_params))
    call = replace(
        call_of(request, body, sampling),
        messages=conversation(body.messages, body.system),
        template=template_of(body.messages, use),
    )
    return await respond(request, [call], MessageAnswer(body, identity, use), body)


async def count_tokens(request: web.Request) -> web.Response:
    engine = loaded_engine(request)
    request.app[STATE].lifecycle.check()
    body = await read_request(request, CountTokensRequest)
    check_model(request, body.model)
    use = offered(request, tool_use_of(body))
    call = GenerationCall(
        messages=conversation(body.messages, body.system),
        template=template_of(body.messages, use),
        cache_salt=cache_salt(request, None),
    )
    return json_response(TokensCount(await engine.count_tokens(call)))


class MessageAnswer(Answer):
    """Text and uses of tools, block by block, as the text of the model grows."""

    last = json_event(MessageStop())

    def __init__(self, body: MessagesRequest, identity: Identity, use: ToolUse) -> None:
        super().__init__(body, identity)
        self._parser = use.parser() or PlainText()
        self._reads_calls = bool(use.shown)
        self._begun = False
        self._has_calls = False
        self._num_closed = 0
        self._open: AnyOutputBlock | None = None

    def whole(self, result: Result) -> AnthropicMessage:
        content = _whole_blocks([*self._parser.feed(result.text), *self._parser.finish()])
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
            events += self._of_text(self._parser.feed(piece.text))
        if (result := piece.result) is not None:
            events += self._of_text(self._parser.finish())
            if self._open is None:  # of nothing at all becomes an empty text
                events += self._begin_text()
            events += self._close_block()
            stop = StopDelta(*stop_of(result, has_calls=self._has_calls))
            events.append(MessageDelta(stop, message_usage(result.usage), self._metrics(result, streamed=True)))
        return events

    def _begin(self) -> list[AnyMessageEvent]:
        self._begun = True
        usage = message_usage(self.prompt or outputs.Usage(0, 0))
        start = AnthropicMessage(id=self._identity.id, model=self._identity.model, usage=usage)
        # Where nothing but text can come, its block is there from the beginning.
        return [MessageStart(start), *([] if self._reads_calls else self._begin_text()), Ping()]

    def _of_text(self, parsed_events: Iterable[Event]) -> list[AnyMessageEvent]:
        events: list[AnyMessageEvent] = []
        for event in parsed_events:
            match event:
                case Content(text):
                    events += [*self._begin_text(), ContentBlockDelta(TextDelta(text), self._num_closed)]
                case CallStart(_, id, name):
                    self._has_calls = True
                    events += self._begin_block(ToolUseOutput(_use_id(id), name))
                case CallArguments(_, text):
                    events.append(ContentBlockDelta(InputJsonDelta(text), self._num_closed))
        return events

    def _begin_text(self) -> list[AnyMessageEvent]:
        """Opens a block of text, unless one is open already."""
        return [] if isinstance(self._open, OutputBlock) else self._begin_block(OutputBlock(""))

    def _begin_block(self, block: AnyOutputBlock) -> list[AnyMessageEvent]:
        events = self._close_block()
        self._open = block
        return [*events, ContentBlockStart(block, self._num_closed)]

    def _close_block(self) -> list[AnyMessageEvent]:
        if self._open is None:
            return []
        self._open = None
        self._num_closed += 1
        return [ContentBlockStop(self._num_closed - 1)]


def _whole_blocks(events: Iterable[Event]) -> list[AnyOutputBlock]:
    """The blocks of a whole answer. A call whose input is no JSON object, for it was cut off or not constrained,
    stays text: a client must not run what the model has not written."""
    blocks: list[AnyOutputBlock] = []
    for item in parsed(events):
        if isinstance(item, str):
            blocks.append(OutputBlock(item))
        elif (arguments := _object(item.arguments)) is not None:
            blocks.append(ToolUseOutput(_use_id(item.id), item.name, arguments))
        else:
            blocks.append(OutputBlock(item.arguments))
    return blocks or [OutputBlock("")]


def _use_id(call_id: str) -> str:
    return call_id.replace("call_", "toolu_", 1)


def _object(text: str) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None
