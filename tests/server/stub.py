"""An engine without a model: it answers with the words of the last message, one token each, as slowly as told. Of
several answers each begins one word later, and ends with the words left out.

Tests set its attributes before a request; what it was asked for and what was cancelled can be read afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jinja2 import Template

from hydra_engine.core.call import GenerationCall, Role
from hydra_engine.core.instances import Condition, InstanceState, Topology
from hydra_engine.core.logprobs import TextLogprob, TopLogprob
from hydra_engine.core.outputs import (
    DelayCause,
    FinishReason,
    Piece,
    RequestMetrics,
    Result,
    SloReport,
    StageSpan,
    Usage,
)
from hydra_engine.core.prompting import MediaLimits, TemplateOptions
from hydra_engine.core.reports import InstanceSummary, LedgerReport, Status
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.errors import HydraError, InvalidRequest, RequestAborted
from hydra_engine.telemetry.trace import Activity, LiveRequest, TraceRing

IMAGE_TOKENS = 16
VOCABULARY = 1000


class StubHandle:
    def __init__(self, engine: StubEngine, call: GenerationCall, words: list[str], usage: Usage) -> None:
        assert call.request_id is not None
        self.id = call.request_id
        self.prompt_usage = usage
        self._engine = engine
        self._call = call
        self._words = words
        self._done = False
        self._results: list[Result] = []
        self._cancelled = asyncio.Event()

    def cancel(self) -> None:
        if not self._done:
            self._done = True
            self._engine.cancelled.append(self.id)
            self._cancelled.set()

    def expect(self, *, pieces: bool) -> None:
        self._engine.expected.append(pieces)

    def offer_pieces_to(self, write: Callable[[Piece], bool]) -> None:
        """Does nothing: all pieces are queued and read."""

    async def __aiter__(self) -> AsyncIterator[Piece]:
        engine, sampling = self._engine, self._call.sampling
        limit = sampling.max_tokens if sampling.max_tokens is not None else len(self._words)
        answers = [self._words[first:] + self._words[:first] for first in self._beginnings()]
        await self._pause(engine.prefill_s)
        for index in range(min(limit, len(self._words))):
            self._fail_if_told(index)
            for choice, words in enumerate(answers):
                yield self._piece(choice, index, self._text(index, words[index]))
            await self._pause(engine.token_s)
        self._fail_if_told(min(limit, len(self._words)))
        reason = FinishReason.LENGTH if limit < len(self._words) else FinishReason.STOP
        results = [self._result(words[:limit], reason) for words in answers]
        self._done = True
        for choice, result in enumerate(results):
            engine.report(result)
            self._results.append(result)
            yield Piece("", result=result, index=choice)

    def __await__(self) -> Generator[Any, None, Result]:
        return self._last().__await__()

    async def _last(self) -> Result:
        async for _ in self:
            pass
        first = self._results[0]
        if len(self._results) == 1:
            return first
        num_tokens = sum(result.usage.completion_tokens for result in self._results)
        usage = replace(first.usage, completion_tokens=num_tokens)
        return replace(first, choices=tuple(self._results), usage=usage)

    def _beginnings(self) -> list[int]:
        """First words of the answers; all the same if the pieces are given."""
        num_words = 1 if self._engine.pieces is not None else max(len(self._words), 1)
        return [choice % num_words for choice in range(self._call.sampling.n)]

    def _fail_if_told(self, num_tokens: int) -> None:
        engine = self._engine
        meant = engine.fails_for in (None, self._call.prompt)
        if engine.fail_after == num_tokens and engine.error is not None and meant:
            self._done = True
            raise engine.error

    def _piece(self, choice: int, index: int, text: str) -> Piece:
        sampling = self._call.sampling
        logprobs = (self._logprob(index, text),) if sampling.logprobs is not None else ()
        piece = Piece(text, (index,), logprobs, index=choice)
        if index:
            return piece
        return replace(piece, prompt_token_ids=self._prompt_ids(), prompt_logprobs=self._prompt_logprobs())

    def _prompt_ids(self) -> tuple[int, ...]:
        prompt = self._call.prompt
        if prompt is None or isinstance(prompt, str):
            return tuple(ord(letter) for letter in _text_of(self._call)[0])
        return tuple(prompt)

    def _prompt_logprobs(self) -> tuple[TextLogprob | None, ...] | None:
        """Log probabilities by position, with a second best token, unless the engine has its own."""
        if self._engine.prompt_logprobs is not None:
            return self._engine.prompt_logprobs
        num_top = self._call.sampling.prompt_logprobs
        if num_top is None:
            return None
        entries: list[TextLogprob | None] = [None]
        for place, token in enumerate(self._prompt_ids()[1:], start=1):
            best = (top_logprob(token + 1, chr(token + 1), -0.125), top_logprob(token, chr(token), -place / 4))
            entries.append(TextLogprob(token, chr(token), -place / 4, 2, best[:num_top], chr(token).encode()))
        return tuple(entries)

    def _text(self, index: int, word: str) -> str:
        return word if index == 0 or self._engine.pieces is not None else " " + word

    async def _pause(self, seconds: float) -> None:
        if seconds:
            try:
                await asyncio.wait_for(self._cancelled.wait(), seconds)
            except TimeoutError:
                return
        if self._cancelled.is_set():
            raise RequestAborted("the request was cancelled")

    def _logprob(self, index: int, text: str) -> TextLogprob:
        top = tuple(
            top_logprob(index + i, text if i == 0 else f"alt{i}", -0.5 - i)
            for i in range(self._call.sampling.logprobs or 0)
        )
        return TextLogprob(index, text, -0.5, 1, top, text.encode())

    def _slo_report(self) -> SloReport:
        """A report in which one of four gaps was late, which misses the limit."""
        slo = self._call.slo
        return SloReport(
            ttft_limit_s=slo.ttft_s,
            tpot_limit_s=slo.tpot_s,
            ttft_met=None if slo.ttft_s is None else slo.ttft_s >= 0.2,
            tpot_met=None if slo.tpot_s is None else False,
            late_gaps=0 if slo.tpot_s is None else 1,
            num_gaps=4,
            reason=None if slo.tpot_s is None else "encode of another request",
        )

    def _result(self, words: list[str], reason: FinishReason) -> Result:
        usage, num_tokens = self.prompt_usage, len(words)
        logprobs = None
        if self._call.sampling.logprobs is not None:
            logprobs = tuple(self._logprob(i, self._text(i, word)) for i, word in enumerate(words))
        return Result(
            request_id=self.id,
            text="".join(self._text(i, word) for i, word in enumerate(words)),
            token_ids=tuple(range(num_tokens)),
            finish_reason=reason,
            usage=Usage(usage.prompt_tokens, num_tokens, usage.image_tokens, 0, usage.num_images),
            metrics=RequestMetrics(
                ttft_s=0.2,
                tpot_s=0.03 if num_tokens > 1 else None,
                e2e_s=0.5,
                queue_s=0.1,
                prefill_s=0.1,
                slo=self._slo_report(),
            ),
            timeline=(
                StageSpan("fetch", 0.0, 0.01),
                StageSpan("prefill", 0.1, 0.2, "epd0", "language", 3, usage.prompt_tokens),
                *self._engine.late_spans,
            ),
            logprobs=logprobs,
            prompt_token_ids=self._prompt_ids(),
            prompt_logprobs=self._prompt_logprobs(),
            max_tokens=self._call.sampling.max_tokens or self._engine.max_model_len,
            stop_reason=self._engine.stop_reason if reason is FinishReason.STOP else None,
        )


def top_logprob(token_id: int, text: str, logprob: float) -> TopLogprob:
    return TopLogprob(token_id, text, logprob, text.encode())


def instances_of(topology: str, **changes: Any) -> tuple[InstanceState, ...]:
    """Instance states by name; `changes`: fields of the state by name."""
    parsed = Topology.parse(topology)
    return tuple(
        replace(InstanceState(name, spec.role.letters, spec.role.letters, Condition.READY, 1), **changes.get(name, {}))
        for name, spec in zip(parsed.names, parsed.instances, strict=True)
    )


@dataclass
class StubEngine:
    model_name: str = "stub"
    chat_template: str | None = "{{ messages }} {{ tools }} <tool_call>"
    own_tool_template: str | None = None
    max_model_len: int = 4096
    media_limits: MediaLimits = field(default_factory=lambda: MediaLimits(16, 20 << 20, 0, 64 << 20))
    default_sampling_params: SamplingParams = field(default_factory=SamplingParams)
    created: int = field(default_factory=lambda: int(time.time()))
    state: str = "ok"
    intake_s: float = 0.0
    prefill_s: float = 0.0
    token_s: float = 0.0
    refusal: Exception | None = None  # raised by add_request
    bad_prompt: str | None = None  # refused by add_request
    error: HydraError | Exception | None = None  # raised by the handle after `fail_after` tokens
    fail_after: int = -1
    fails_for: str | None = None  # the only prompt whose handle raises it
    answer: str | None = None  # instead of the echo
    pieces: list[str] | None = None  # instead of words: the texts of the answer's tokens, as they are
    prompt_logprobs: tuple[TextLogprob | None, ...] | None = None
    status: Status | None = None
    stop_reason: str | int | None = None  # of answers that end by themselves
    trace: list[dict[str, Any]] = field(default_factory=list)
    traced_s: list[float] = field(default_factory=list)
    resets: list[tuple[bool, bool]] = field(default_factory=list)  # (kv, images)
    expected: list[bool] = field(default_factory=list)  # of each handle: whether its pieces are read
    counted: list[GenerationCall] = field(default_factory=list)
    lost: bool = False
    states: tuple[InstanceState, ...] = field(default_factory=lambda: instances_of("EPD"))
    reports: dict[str, Status] = field(default_factory=dict)
    summaries: tuple[InstanceSummary, ...] = ()
    switch_s: float = 0.0
    switched: list[str] = field(default_factory=list)
    submissions: list[GenerationCall] = field(default_factory=list)
    tokenized: list[GenerationCall] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    intakes_cancelled: int = 0
    late_spans: tuple[StageSpan, ...] = ()
    observers: list[Callable[[Result], None]] = field(default_factory=list)
    ring: TraceRing = field(default_factory=TraceRing)
    running: list[LiveRequest] = field(default_factory=list)
    clients: dict[str, str] = field(default_factory=dict)  # by the ids of running requests

    @property
    def tool_template(self) -> str | None:
        return self.own_tool_template or self.chat_template

    async def generation_prompt(self, options: TemplateOptions, role: Role, client: str = "") -> str:
        """The text that the template, rendered with plain Jinja, writes after a message."""
        messages = [{"role": role, "content": "hydra9probe"}]
        more = {"tools": options.tools or None, "add_generation_prompt": options.add_generation_prompt}
        rendered = Template((self.tool_template if options.tools else self.chat_template) or "").render(
            messages=messages, **more, **options.variables
        )
        return rendered.rpartition("hydra9probe")[2]

    async def add_request(self, call: GenerationCall) -> StubHandle:
        try:
            await asyncio.sleep(self.intake_s)
        except asyncio.CancelledError:
            self.intakes_cancelled += 1
            raise
        if self.refusal is not None:
            raise self.refusal
        if call.prompt is not None and call.prompt == self.bad_prompt:
            raise InvalidRequest("this prompt is bad", param="prompt")
        self.submissions.append(call)
        text, num_images = _text_of(call)
        words = self.pieces if self.pieces is not None else (self.answer if self.answer is not None else text).split()
        num_prompt = max(len(text.split()), 1) + IMAGE_TOKENS * num_images
        return StubHandle(self, call, words, Usage(num_prompt, 0, IMAGE_TOKENS * num_images, 0, num_images))

    def stats(self) -> Status | None:
        return self.status

    def instances(self) -> tuple[InstanceState, ...]:
        return self.states

    def statuses(self) -> dict[str, Status]:
        return self.reports

    def activity(self, since: int = 0, limit: int = 100, client: str | None = None) -> Activity:
        running = [live for live in self.running if client in (None, self.clients.get(live.id, ""))]
        return Activity(*self.ring.added_since(since, limit, client), running[:limit])

    async def aset_topology(self, text: str) -> None:
        states = instances_of(text)
        await asyncio.sleep(self.switch_s)
        self.states = states
        self.switched.append(text)

    def health(self) -> tuple[bool, str]:
        return self.state == "ok", self.state

    async def aledger(self) -> LedgerReport:
        return LedgerReport(0, 0, 8, 0, 8, query_id=1)

    async def tokenize_call(self, call: GenerationCall) -> list[int]:
        self.tokenized.append(call)
        text = call.prompt if isinstance(call.prompt, str) else " ".join(str(m.content) for m in call.messages)
        return [ord(c) % VOCABULARY for c in text]

    async def count_call_tokens(self, call: GenerationCall) -> int:
        if self.refusal is not None:
            raise self.refusal
        self.counted.append(call)
        return 17

    async def areset_caches(self, *, kv: bool = True, images: bool = True) -> None:
        self.resets.append((kv, images))

    def trace_events(self, seconds: float) -> list[dict[str, Any]]:
        self.traced_s.append(seconds)
        return self.trace

    async def atoken_strs(self, token_ids: Sequence[int]) -> list[str]:
        return [f"<{chr(token)}>" for token in token_ids]

    async def adetokenize(self, token_ids: Sequence[int], client: str) -> str:
        if any(token >= VOCABULARY for token in token_ids):
            raise InvalidRequest("a token id is outside the vocabulary", param="tokens")
        return "".join(chr(token) for token in token_ids)

    def add_observer(self, observer: Callable[[Result], None]) -> None:
        self.observers.append(observer)

    def report(self, result: Result) -> None:
        for observer in self.observers:
            observer(result)


def _text_of(call: GenerationCall) -> tuple[str, int]:
    if not call.messages:
        prompt = call.prompt
        return (prompt if isinstance(prompt, str) else " ".join(map(str, prompt or ()))), 0
    last = call.messages[-1]
    return " ".join(text for _, text in last.texts()), len(list(last.media))


LATE = StageSpan(
    "decode_wait",
    0.3,
    0.4,
    "epd0",
    "language",
    blame=(DelayCause("encode", 0.07, request=41, amount=576), DelayCause("cpu", 0.03)),
)


def example_status(**changes: Any) -> Status:
    fields: dict[str, Any] = {
        "time_s": 10.0,
        "num_running": 3,
        "num_waiting": 2,
        "num_encoding": 1,
        "kv_blocks_used": 25,
        "kv_blocks_total": 100,
        "image_blocks_used": 4,
        "image_blocks_total": 8,
        "num_preemptions": 5,
        "language_steps": 70,
        "vision_steps": 6,
        "language_busy_s": 4.0,
        "vision_busy_s": 2.0,
        "prompt_tokens": 600,
        "generation_tokens": 100,
        "images_encoded": 12,
        "progress": 99,
    }
    return Status(**(fields | changes))
