"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's. Does not know how the engine answers, how events are
written or how models call tools.
"""

from __future__ import annotations

from aiohttp import web
from msgspec import UNSET

from hydra_engine.core import outputs
from hydra_engine.core.outputs import Piece, Result
from hydra_engine.server.body import read_request
from hydra_engine.server.context import CONFIG, LIFECYCLE, loaded_engine
from hydra_engine.server.generate import Identity, check_model, identify, json_response, respond
from hydra_engine.server.isolation import cache_salt
from hydra_engine.server.message_blocks import MessageBlocks, whole_blocks
from hydra_engine.server.port import EnginePort, Handle
from hydra_engine.server.protocol.common import metrics_of
from hydra_engine.server.protocol.message_history import conversation, template_of
from hydra_engine.server.protocol.messages import (
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
from hydra_engine.server.sse import json_events
from hydra_engine.server.tool_parsers import PlainText
from hydra_engine.server.tools import ToolUse, dialect_of


async def messages(request: web.Request) -> web.StreamResponse:
    engine = loaded_engine(request)
    request.app[LIFECYCLE].check()
    asked = await read_request(request, MessagesRequest)
    identity = identify(request, asked, "msg", separator="_")
    use, dialect = _tools(request, engine, asked)
    sampling = use.sampling(asked.sampling(), dialect)
    turns, template = conversation(asked.messages, asked.system), template_of(asked.messages, use)
    return await respond(
        request,
        lambda: engine.asubmit(
            messages=turns,
            sampling=sampling,
            request_id=identity.id,
            slo=asked.slo,
            cache_salt=cache_salt(request, asked.cache_salt),
            priority=asked.priority or 0,
            template=template,
        ),
        MessageAnswer(asked, identity, use, dialect),
        asked,
    )


async def count_tokens(request: web.Request) -> web.Response:
    engine = loaded_engine(request)
    request.app[LIFECYCLE].check()
    asked = await read_request(request, CountTokensRequest)
    check_model(request, asked.model)
    use, _ = _tools(request, engine, asked)
    turns = conversation(asked.messages, asked.system)
    return json_response(TokensCount(await engine.acount_tokens(turns, template=template_of(asked.messages, use))))


def _tools(
    request: web.Request, engine: EnginePort, asked: MessagesRequest | CountTokensRequest
) -> tuple[ToolUse, str]:
    use, configured = tool_use_of(asked), request.app[CONFIG].tool_parser
    use.check(configured, engine.chat_template)
    return use, dialect_of(configured, engine.chat_template)


class MessageAnswer:
    def __init__(self, asked: MessagesRequest, identity: Identity, use: ToolUse, dialect: str) -> None:
        self._asked = asked
        self._identity = identity
        self._prompt = outputs.Usage(0, 0)
        self._parser = use.parser(dialect) or PlainText()
        self._reads_calls = bool(use.shown)
        self._blocks = MessageBlocks(self._parser)
        self._begun = False

    @property
    def meter(self) -> MessageAnswer:
        return self

    def begin(self, handle: Handle) -> None:
        if handle.prompt_usage is not None:
            self._prompt = handle.prompt_usage

    @property
    def last(self) -> bytes:
        return json_events([MessageStop()])

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
            metrics=metrics_of(result) if self._asked.return_metrics else UNSET,
        )

    def events(self, piece: Piece) -> bytes:
        found: list[AnyMessageEvent] = []
        if not self._begun:
            self._begun = True
            start = AnthropicMessage(
                id=self._identity.id, model=self._identity.model, usage=message_usage(self._prompt)
            )
            # Where nothing but text can come, its block is there from the beginning.
            found += [MessageStart(start), *([] if self._reads_calls else self._blocks.begin_text()), Ping()]
        found += self._blocks.feed(piece.text)
        if (result := piece.result) is not None:
            found += self._blocks.finish()
            metrics = metrics_of(result, streamed=True) if self._asked.return_metrics else UNSET
            stop = StopDelta(*stop_of(result, has_calls=self._blocks.has_calls))
            found.append(MessageDelta(stop, message_usage(result.usage), metrics))
        return json_events(found)
