"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's. Does not know how the engine answers or how events are
written.
"""

from __future__ import annotations

import msgspec
from aiohttp import web
from msgspec import UNSET

from hydra_engine.core import outputs
from hydra_engine.core.outputs import Piece, Result
from hydra_engine.server.body import read_request
from hydra_engine.server.context import LIFECYCLE, loaded_engine
from hydra_engine.server.generate import Identity, check_model, identify, json_response, respond
from hydra_engine.server.isolation import cache_salt
from hydra_engine.server.port import Handle
from hydra_engine.server.protocol.common import metrics_of
from hydra_engine.server.protocol.messages import (
    AnthropicMessage,
    AnyMessageEvent,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    CountTokensRequest,
    MessageDelta,
    MessagesRequest,
    MessageStart,
    MessageStop,
    OutputBlock,
    Ping,
    StopDelta,
    TextDelta,
    TokensCount,
    conversation,
    message_usage,
    stop_of,
    template_of,
)
from hydra_engine.server.sse import event


async def messages(request: web.Request) -> web.StreamResponse:
    engine = loaded_engine(request)
    request.app[LIFECYCLE].check()
    asked = await read_request(request, MessagesRequest)
    identity = identify(request, asked, "msg", separator="_")
    sampling = asked.sampling()
    turns = conversation(asked.messages, asked.system)
    return await respond(
        request,
        lambda: engine.asubmit(
            messages=turns,
            sampling=sampling,
            request_id=identity.id,
            slo=asked.slo,
            cache_salt=cache_salt(request, asked.cache_salt),
            priority=asked.priority or 0,
            template=template_of(asked.messages),
        ),
        MessageAnswer(asked, identity),
        asked,
    )


async def count_tokens(request: web.Request) -> web.Response:
    engine = loaded_engine(request)
    request.app[LIFECYCLE].check()
    asked = await read_request(request, CountTokensRequest)
    check_model(request, asked.model)
    turns = conversation(asked.messages, asked.system)
    return json_response(TokensCount(await engine.acount_tokens(turns, template=template_of(asked.messages))))


class MessageAnswer:
    """One block of text."""

    def __init__(self, asked: MessagesRequest, identity: Identity) -> None:
        self._asked = asked
        self._identity = identity
        self._prompt = outputs.Usage(0, 0)
        self._begun = False

    @property
    def meter(self) -> MessageAnswer:
        return self

    def begin(self, handle: Handle) -> None:
        if handle.prompt_usage is not None:
            self._prompt = handle.prompt_usage

    @property
    def last(self) -> bytes:
        return _written(MessageStop())

    def whole(self, result: Result) -> AnthropicMessage:
        reason, sequence = stop_of(result)
        return AnthropicMessage(
            id=self._identity.id,
            model=self._identity.model,
            content=[OutputBlock(result.text)],
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
            found += [MessageStart(start), ContentBlockStart(OutputBlock("")), Ping()]
        if piece.text:
            found.append(ContentBlockDelta(TextDelta(piece.text)))
        if (result := piece.result) is not None:
            metrics = metrics_of(result, streamed=True) if self._asked.return_metrics else UNSET
            found += [
                ContentBlockStop(),
                MessageDelta(StopDelta(*stop_of(result)), message_usage(result.usage), metrics),
            ]
        return b"".join(_written(one) for one in found)


def _written(one: AnyMessageEvent) -> bytes:
    name = one.__struct_config__.tag
    assert isinstance(name, str)
    return event(msgspec.json.encode(one), name)
