"""POST /v1/chat/completions. Does not know how the engine answers or how events are written."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from hydra_engine.core.outputs import Piece, Result
from hydra_engine.server.body import read_request
from hydra_engine.server.context import LIFECYCLE, loaded_engine
from hydra_engine.server.generate import Identity, UsageMeter, identify, respond
from hydra_engine.server.protocol.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatDelta,
    ChatMessage,
    chat_logprobs,
    plain_messages,
)
from hydra_engine.server.protocol.common import FINGERPRINT, Metrics, Usage, metrics_of, usage_of
from hydra_engine.server.sse import DONE, event


async def chat_completions(request: web.Request) -> web.StreamResponse:
    engine = loaded_engine(request)
    request.app[LIFECYCLE].check()
    asked = await read_request(request, ChatCompletionRequest)
    identity = identify(request, asked, "chatcmpl")
    sampling = asked.sampling()
    messages = plain_messages(asked.messages)
    return await respond(
        request,
        lambda: engine.asubmit(
            messages=messages,
            sampling=sampling,
            request_id=identity.id,
            slo=asked.slo,
            cache_salt=asked.cache_salt or "",
            priority=asked.priority or 0,
        ),
        ChatAnswer(asked, identity),
        asked,
    )


class ChatAnswer:
    def __init__(self, asked: ChatCompletionRequest, identity: Identity) -> None:
        self._asked = asked
        self._identity = identity
        self._begun = False
        self.meter = UsageMeter(asked)

    def whole(self, result: Result) -> ChatCompletion:
        logprobs = chat_logprobs(result.logprobs) if result.logprobs is not None else None
        choice = ChatChoice(0, ChatMessage(result.text), logprobs, result.finish_reason.value, result.stop_reason)
        return ChatCompletion(
            id=self._identity.id,
            object="chat.completion",
            created=self._identity.created,
            model=self._identity.model,
            system_fingerprint=FINGERPRINT,
            choices=[choice],
            usage=usage_of(result.usage),
            metrics=metrics_of(result) if self._asked.return_metrics else UNSET,
        )

    @property
    def last(self) -> bytes:
        return DONE

    def events(self, piece: Piece) -> bytes:
        return b"".join(event(msgspec.json.encode(chunk)) for chunk in self._chunks(piece))

    def _chunks(self, piece: Piece) -> Sequence[msgspec.Struct]:
        self.meter.add(piece)
        chunks = []
        if not self._begun:
            self._begun = True
            chunks.append(self._chunk(ChatChunkChoice(0, ChatDelta(role="assistant", content=""))))
        if piece.text or piece.logprobs:
            logprobs = chat_logprobs(piece.logprobs) if piece.logprobs else None
            chunks.append(self._chunk(ChatChunkChoice(0, ChatDelta(content=piece.text), logprobs)))
        if piece.result is not None:
            chunks += self._closing(piece.result)
        return chunks

    def _closing(self, result: Result) -> list[ChatChunk]:
        choice = ChatChunkChoice(
            0, ChatDelta(), finish_reason=result.finish_reason.value, stop_reason=result.stop_reason
        )
        metrics = metrics_of(result, streamed=True) if self._asked.return_metrics else UNSET
        chunks = [self._chunk(choice, metrics)]
        if self.meter.wanted:
            chunks.append(self._chunk(None, usage=usage_of(result.usage)))
        return chunks

    def _chunk(
        self,
        choice: ChatChunkChoice | None,
        metrics: Metrics | UnsetType = UNSET,
        usage: Usage | None = None,
    ) -> ChatChunk:
        return ChatChunk(
            id=self._identity.id,
            object="chat.completion.chunk",
            created=self._identity.created,
            model=self._identity.model,
            system_fingerprint=FINGERPRINT,
            choices=[choice] if choice is not None else [],
            usage=usage or self.meter.now(),
            metrics=metrics,
        )
