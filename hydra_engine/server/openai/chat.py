"""POST /v1/chat/completions. Does not know how the engine answers, how events are written or how models call tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from aiohttp import web
from msgspec import UNSET, UnsetType

from hydra_engine.core.outputs import FinishReason, Piece, Result
from hydra_engine.server.generate import (
    ChunkAnswer,
    Identity,
    build_call,
    read_generation,
    resolve_thinking,
    respond,
    with_tool_dialect,
)
from hydra_engine.server.http.body import parse_in_turn
from hydra_engine.server.protocol.chat import (
    AssistantMessage,
    CallDelta,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatDelta,
    Function,
    FunctionDelta,
    MessageCall,
    chat_logprobs,
    chat_messages,
)
from hydra_engine.server.protocol.common import Metrics, Usage, prompt_logprobs, usage_of
from hydra_engine.server.tools.reasoning import ReasoningParser, Thinking
from hydra_engine.server.tools.tool_calls import NO_THINKING, ToolUse, collect
from hydra_engine.server.tools.tool_objects import CallArguments, CallStart, Content, Event, Reasoning


async def chat_completions(request: web.Request) -> web.StreamResponse:
    engine, body, identity = await read_generation(request, ChatCompletionRequest, "chatcmpl-")
    use = with_tool_dialect(request, body.tool_use())
    sampling = use.sampling(body.sampling(engine.default_sampling_params))
    messages = await parse_in_turn(request, chat_messages, body.messages)
    template, thinking = await resolve_thinking(request, body.template(use), messages, body.wish)
    call = build_call(request, body, thinking.sampling(sampling))
    call = replace(call, template=template, pixels=body.pixels, messages=messages)
    return await respond(request, [call], ChatAnswer(body, identity, use, thinking), body)


class _Choice:
    """A choice of a stream: converts its pieces to deltas."""

    def __init__(self, use: ToolUse, thinking: Thinking) -> None:
        self._parser = use.parser(thinking)
        self.begun = False
        self.calls = False

    @property
    def is_plain(self) -> bool:
        """True if text is sent unparsed from here on."""
        return self.begun and self._parser is None

    @property
    def is_cut(self) -> bool:
        """True if the text has ended inside the arguments of a call."""
        return self._parser is not None and self._parser.is_cut

    def deltas(self, piece: Piece) -> list[ChatDelta]:
        """The deltas of a piece; an empty one if the piece has log probabilities and its text is held back."""
        if self._parser is None:
            return [ChatDelta(content=piece.text)] if piece.text or piece.logprobs else []
        events = self._parser.parse(piece.text) if piece.text else []
        if piece.result is not None:
            events += self._parser.finish()
        elif isinstance(self._parser, ReasoningParser) and self._parser.is_answering and self._parser.is_plain:
            self._parser = None
        self.calls = self.calls or any(isinstance(event, CallStart) for event in events)
        deltas = [_delta(event) for event in events]
        return deltas if deltas or not piece.logprobs else [ChatDelta(content="")]


class ChatAnswer(ChunkAnswer):
    def __init__(
        self, body: ChatCompletionRequest, identity: Identity, use: ToolUse, thinking: Thinking = NO_THINKING
    ) -> None:
        super().__init__(body, identity, self._text_chunk)
        self._body = body
        self._use = use
        self._thinking = thinking
        self._choices = [_Choice(use, thinking) for _ in range(body.n or 1)]
        self._num_open = len(self._choices)

    def full_answer(self, result: Result) -> ChatCompletion:
        results = result.choices or (result,)
        return ChatCompletion(
            *self._identity.head("chat.completion"),
            choices=[self._whole_choice(index, choice) for index, choice in enumerate(results)],
            usage=usage_of(result.usage),
            prompt_logprobs=prompt_logprobs(result.prompt_logprobs, self._body.prompt_logprobs, self.slices),
            metrics=self._metrics(result),
        )

    def _whole_choice(self, index: int, result: Result) -> ChatChoice:
        logprobs = chat_logprobs(result.logprobs, self.slices) if result.logprobs is not None else None
        message, has_calls, is_cut = AssistantMessage(result.text), False, False
        parser = self._use.parser(self._thinking)
        if parser is not None:
            read = collect([*parser.parse(result.text), *parser.finish()])
            is_cut = parser.is_cut
            # A partial call is returned only if the token limit ended it.
            calls = read.calls[:-1] if is_cut and result.finish_reason is FinishReason.STOP else read.calls
            has_calls = bool(calls)
            message = AssistantMessage(
                read.text or (None if has_calls or read.reasoning else ""),
                reasoning_content=read.reasoning or UNSET,
                reasoning=read.reasoning or UNSET,
                tool_calls=[MessageCall(call.id, Function(call.name, call.arguments)) for call in calls] or UNSET,
            )
        reason = self._reason(result, has_calls and not is_cut)
        return ChatChoice(index, message, logprobs, reason, result.stop_reason)

    def _reason(self, result: Result, has_calls: bool) -> str:
        """OpenAI's finish reason: `tool_calls` only for a complete call that the request did not name."""
        if has_calls and self._use.mode != "named" and result.finish_reason is FinishReason.STOP:
            return "tool_calls"
        return result.finish_reason.value

    def text_event(self, piece: Piece) -> bytes | None:
        choice = self._choices[piece.index]
        if not choice.is_plain or piece.logprobs:
            return None
        self._num_tokens += len(piece.token_ids)
        return self._texts.event(piece.index, piece.text, self._usage_now()) if piece.text else b""

    def _chunks(self, piece: Piece) -> Iterable[ChatChunk]:
        self._num_tokens += len(piece.token_ids)
        index, choice = piece.index, self._choices[piece.index]
        if not choice.begun:
            choice.begun = True
            yield self._chunk(ChatChunkChoice(index, ChatDelta(role="assistant", content="")))
        logprobs = chat_logprobs(piece.logprobs, self.slices) if piece.logprobs else None
        for delta in choice.deltas(piece):
            yield self._chunk(ChatChunkChoice(index, delta, logprobs))
            logprobs = None  # only in the first chunk
        if piece.result is not None:
            yield from self._closing(index, piece.result, choice.calls and not choice.is_cut)

    def _text_chunk(self, index: int, text: str, usage: Usage | None) -> ChatChunk:
        return self._chunk(ChatChunkChoice(index, ChatDelta(content=text)), usage=usage)

    def _closing(self, index: int, result: Result, has_calls: bool) -> Iterable[ChatChunk]:
        """The chunks that close a choice; the last choice adds the metrics, and the usage of all."""
        self._num_open -= 1
        is_last = not self._num_open
        choice = ChatChunkChoice(
            index, ChatDelta(), finish_reason=self._reason(result, has_calls), stop_reason=result.stop_reason
        )
        yield self._chunk(choice, self._metrics(result, streamed=True) if is_last else UNSET)
        if is_last and self._includes_usage:
            counted = self._num_tokens if len(self._choices) > 1 else None
            yield self._chunk(None, usage=usage_of(result.usage, counted))

    def _chunk(
        self,
        choice: ChatChunkChoice | None,
        metrics: Metrics | UnsetType = UNSET,
        usage: Usage | None = None,
    ) -> ChatChunk:
        return ChatChunk(
            *self._identity.head("chat.completion.chunk"),
            choices=[choice] if choice is not None else [],
            usage=usage or self._usage_now(),
            metrics=metrics,
        )


def _delta(event: Event) -> ChatDelta:
    match event:
        case Content(text):
            return ChatDelta(content=text)
        case Reasoning(text):
            return ChatDelta(reasoning_content=text, reasoning=text)
        case CallStart(index, id, name):
            call = CallDelta(index, FunctionDelta("", name), id, "function")
        case CallArguments(index, text):
            call = CallDelta(index, FunctionDelta(text))
    return ChatDelta(tool_calls=[call])
