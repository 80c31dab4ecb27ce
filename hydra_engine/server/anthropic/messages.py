"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's. Does not know how the engine answers, how events are
written or how models call tools.
"""

from __future__ import annotations

from dataclasses import replace

from aiohttp import web

from hydra_engine.core import outputs
from hydra_engine.core.call import GenerationCall
from hydra_engine.core.outputs import Piece, Result
from hydra_engine.server.anthropic.message_blocks import MessageBlocks, whole_blocks
from hydra_engine.server.generate import Answer, Identity, call_of, check_model, json_response, read_generation, respond
from hydra_engine.server.http.auth import cache_salt
from hydra_engine.server.http.body import read_request
from hydra_engine.server.http.encoding import json_event
from hydra_engine.server.port import EnginePort, Handle
from hydra_engine.server.protocol.anthropic import (
    AnthropicMessage,
    AnyMessageEvent,
    CountTokensRequest,
    MessageDelta,
    MessagesRequest,
    MessageStart,
    MessageStop,
    Ping,
    StopDelta,
    TokensCount,
    ToolUseOutput,
    message_usage,
    stop_of,
    tool_use_of,
)
from hydra_engine.server.protocol.message_history import conversation, template_of
from hydra_engine.server.state import CONFIG, STATE, loaded_engine
from hydra_engine.server.tools.tool_calls import ToolUse
from hydra_engine.server.tools.tool_parsers import PlainText


async def messages(request: web.Request) -> web.StreamResponse:
    engine, body, identity = await read_generation(request, MessagesRequest, "msg_")
    use, dialect = _tools(request, engine, body)
    sampling = use.sampling(body.sampling(engine.default_sampling_params), dialect)
    call = replace(
        call_of(request, body, sampling),
        messages=conversation(body.messages, body.system),
        template=template_of(body.messages, use),
    )
    return await respond(request, [call], MessageAnswer(body, identity, use, dialect), body)


async def count_tokens(request: web.Request) -> web.Response:
    engine = loaded_engine(request)
    request.app[STATE].lifecycle.check()
    body = await read_request(request, CountTokensRequest)
    check_model(request, body.model)
    use, _ = _tools(request, engine, body)
    call = GenerationCall(
        messages=conversation(body.messages, body.system),
        template=template_of(body.messages, use),
        cache_salt=cache_salt(request, None),
    )
    return json_response(TokensCount(await engine.count_tokens(call)))


def _tools(request: web.Request, engine: EnginePort, body: MessagesRequest | CountTokensRequest) -> tuple[ToolUse, str]:
    use = tool_use_of(body)
    return use, use.dialect(request.app[CONFIG].tool_parser, engine.chat_template)


class MessageAnswer(Answer):
    last = json_event(MessageStop())

    def __init__(self, body: MessagesRequest, identity: Identity, use: ToolUse, dialect: str) -> None:
        super().__init__(body, identity)
        self._prompt = outputs.Usage(0, 0)
        self._parser = use.parser(dialect) or PlainText()
        self._reads_calls = bool(use.shown)
        self._blocks = MessageBlocks(self._parser)
        self._begun = False

    def begin(self, handle: Handle) -> None:
        if handle.prompt_usage is not None:
            self._prompt = handle.prompt_usage

    def whole(self, result: Result) -> AnthropicMessage:
        content = whole_blocks([*self._parser.feed(result.text), *self._parser.finish()])
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
        events: list[AnyMessageEvent] = []
        if not self._begun:
            self._begun = True
            start = AnthropicMessage(
                id=self._identity.id, model=self._identity.model, usage=message_usage(self._prompt)
            )
            # Where nothing but text can come, its block is there from the beginning.
            events += [MessageStart(start), *([] if self._reads_calls else self._blocks.begin_text()), Ping()]
        events += self._blocks.feed(piece.text)
        if (result := piece.result) is not None:
            events += self._blocks.finish()
            stop = StopDelta(*stop_of(result, has_calls=self._blocks.has_calls))
            events.append(MessageDelta(stop, message_usage(result.usage), self._metrics(result, streamed=True)))
        return events
