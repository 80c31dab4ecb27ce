"""POST /v1/chat/completions. Does not know how the engine answers, how events are written or how models call tools."""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web
from msgspec import UNSET, UnsetType

from hydra_engine.core.outputs import FinishReason, Piece, Result
from hydra_engine.server.body import read_request
from hydra_engine.server.chunks import TextEvents
from hydra_engine.server.context import CONFIG, LIFECYCLE, loaded_engine
from hydra_engine.server.generate import Identity, UsageMeter, identify, respond
from hydra_engine.server.isolation import cache_salt
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
from hydra_engine.server.protocol.common import FINGERPRINT, Metrics, Usage, metrics_of, prompt_logprobs, usage_of
from hydra_engine.server.protocol.tools import CallDelta, Function, FunctionDelta, MessageCall
from hydra_engine.server.sse import DONE, json_events
from hydra_engine.server.tool_objects import CallArguments, CallStart, Content, Event
from hydra_engine.server.tools import ToolUse, collect, dialect_of


async def chat_completions(request: web.Request) -> web.StreamResponse:
    engine = loaded_engine(request)
    request.app[LIFECYCLE].check()
    asked = await read_request(request, ChatCompletionRequest)
    identity = identify(request, asked, "chatcmpl")
    use = asked.tool_use()
    configured = request.app[CONFIG].tool_parser
    use.check(configured, engine.chat_template)
    dialect = dialect_of(configured, engine.chat_template)
    sampling, template, pixels = use.sampling(asked.sampling(), dialect), asked.template(use), asked.pixels
    messages = plain_messages(asked.messages)
    return await respond(
        request,
        lambda: engine.asubmit(
            messages=messages,
            sampling=sampling,
            request_id=identity.id,
            slo=asked.slo,
            cache_salt=cache_salt(request, asked.cache_salt),
            priority=asked.priority or 0,
            template=template,
            pixels=pixels,
        ),
        ChatAnswer(asked, identity, use, dialect),
        asked,
    )


class _Choice:
    """One of the answers of a stream: which deltas its pieces become."""

    def __init__(self, use: ToolUse, dialect: str) -> None:
        self._parser = use.parser(dialect)
        self.begun = False
        self.calls = False

    @property
    def is_plain(self) -> bool:
        """From here on text is sent as it comes."""
        return self.begun and self._parser is None

    def deltas(self, piece: Piece) -> list[ChatDelta]:
        """An empty one where there are log probabilities and the text is held back."""
        if self._parser is None:
            return [ChatDelta(content=piece.text)] if piece.text or piece.logprobs else []
        events = self._parser.feed(piece.text) if piece.text else []
        if piece.result is not None:
            events += self._parser.finish()
        self.calls = self.calls or any(isinstance(one, CallStart) for one in events)
        deltas = [_delta(one) for one in events]
        return deltas if deltas or not piece.logprobs else [ChatDelta(content="")]


class ChatAnswer:
    def __init__(self, asked: ChatCompletionRequest, identity: Identity, use: ToolUse, dialect: str) -> None:
        self._asked = asked
        self._identity = identity
        self._use = use
        self._dialect = dialect
        self._choices = [_Choice(use, dialect) for _ in range(asked.n or 1)]
        self._num_open = len(self._choices)
        self._texts = TextEvents(self._text_chunk)
        self.meter = UsageMeter(asked)

    def whole(self, result: Result) -> ChatCompletion:
        results = result.choices or (result,)
        return ChatCompletion(
            id=self._identity.id,
            object="chat.completion",
            created=self._identity.created,
            model=self._identity.model,
            system_fingerprint=FINGERPRINT,
            choices=[self._whole_choice(index, one) for index, one in enumerate(results)],
            usage=usage_of(result.usage),
            prompt_logprobs=prompt_logprobs(result.prompt_logprobs, self._asked.prompt_logprobs),
            metrics=metrics_of(result) if self._asked.return_metrics else UNSET,
        )

    def _whole_choice(self, index: int, result: Result) -> ChatChoice:
        logprobs = chat_logprobs(result.logprobs) if result.logprobs is not None else None
        message, has_calls = ChatMessage(result.text), False
        parser = self._use.parser(self._dialect)
        if parser is not None:
            text, calls = collect([*parser.feed(result.text), *parser.finish()])
            told = [MessageCall(call.id, Function(call.name, call.arguments)) for call in calls]
            message, has_calls = ChatMessage(text or (None if told else ""), tool_calls=told or UNSET), bool(told)
        return ChatChoice(index, message, logprobs, self._reason(result, has_calls), result.stop_reason)

    def _reason(self, result: Result, has_calls: bool) -> str:
        """OpenAI's: a call that the request named ends an answer like text does."""
        if has_calls and self._use.mode != "named" and result.finish_reason is FinishReason.STOP:
            return "tool_calls"
        return result.finish_reason.value

    @property
    def last(self) -> bytes:
        return DONE

    def events(self, piece: Piece) -> bytes:
        return json_events(self._chunks(piece))

    def text_event(self, piece: Piece) -> bytes | None:
        choice = self._choices[piece.index]
        if not choice.is_plain or piece.logprobs:
            return None
        self.meter.add(piece)
        return self._texts.event(piece.index, piece.text, self.meter.now()) if piece.text else b""

    def _chunks(self, piece: Piece) -> Iterable[ChatChunk]:
        self.meter.add(piece)
        index, choice = piece.index, self._choices[piece.index]
        if not choice.begun:
            choice.begun = True
            yield self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content="")))
        logprobs = chat_logprobs(piece.logprobs) if piece.logprobs else None
        for delta in choice.deltas(piece):
            yield self._chunk(ChatChunkChoice(index, delta, logprobs))
            logprobs = None  # with the first of them
        if piece.result is not None:
            yield from self._closing(index, piece.result, choice.calls)

    def _text_chunk(self, index: int, text: str, usage: Usage | None) -> ChatChunk:
        return self._chunk(ChatChunkChoice(index, ChatDelta(content=text)), usage=usage)

    def _closing(self, index: int, result: Result, has_calls: bool) -> Iterable[ChatChunk]:
        """The last choice to close brings the metrics, and the usage of all."""
        self._num_open -= 1
        is_last = not self._num_open
        choice = ChatChunkChoice(
            index, ChatDelta(), finish_reason=self._reason(result, has_calls), stop_reason=result.stop_reason
        )
        wants_metrics = is_last and self._asked.return_metrics
        yield self._chunk(choice, metrics_of(result, streamed=True) if wants_metrics else UNSET)
        if is_last and self.meter.wanted:
            counted = self.meter.num_tokens if len(self._choices) > 1 else None
            yield self._chunk(None, usage=usage_of(result.usage, counted))

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


def _delta(one: Event) -> ChatDelta:
    match one:
        case Content(text):
            return ChatDelta(content=text)
        case CallStart(index, id, name):
            call = CallDelta(index, FunctionDelta("", name), id, "function")
        case CallArguments(index, text):
            call = CallDelta(index, FunctionDelta(text))
    return ChatDelta(tool_calls=[call])
