"""Counters of finished requests: latencies, stages, tokens, cache hits, and limits met or missed.

Fed once per answer: a request for n answers counts n times, with its prompt. Does not know HTTP, instances or where the
numbers are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from hydra_engine.core.outputs import BLAMES, FinishReason, Result, SloReport, StageSpan
from hydra_engine.telemetry.families import Families, Histogram
from hydra_engine.telemetry.timeline import MOVES, PHASE_OF, phases

# vLLM's bounds where the name is vLLM's, for its dashboards.
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST_SECONDS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_STAGE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKENS = (*(step * 10**power for power in range(5) for step in (1, 2, 5)), 100_000, 200_000)
_CHOICES = (1, 2, 5, 10, 20, 50)

_STAGES = ("encode", "prefill", "decode")
_STAGE_OF = {"encode_wait": "encode", "encode": "encode", "prefill": "prefill", "decode": "decode"}
_MEDIA = {"fetch": "hydra:media_fetch_seconds", "preprocess": "hydra:media_decode_seconds"}

_PLAIN: tuple[tuple[str, str, Sequence[float]], ...] = (
    ("vllm:time_to_first_token_seconds", "Arrival to first token.", _SECONDS),
    ("vllm:inter_token_latency_seconds", "Time between tokens.", _TOKEN_SECONDS),
    ("vllm:request_time_per_output_token_seconds", "Mean time per token after the first.", _TOKEN_SECONDS),
    ("vllm:e2e_request_latency_seconds", "Arrival to end.", _REQUEST_SECONDS),
    ("vllm:request_queue_time_seconds", "Time spent waiting.", _REQUEST_SECONDS),
    ("vllm:request_prefill_time_seconds", "Time in prefill steps.", _REQUEST_SECONDS),
    ("vllm:request_decode_time_seconds", "Time in decode steps.", _REQUEST_SECONDS),
    ("vllm:request_inference_time_seconds", "Time in encode, prefill and decode steps.", _REQUEST_SECONDS),
    ("vllm:request_prompt_tokens", "Prompt tokens per request.", _TOKENS),
    ("vllm:request_generation_tokens", "Generated tokens per request.", _TOKENS),
    ("vllm:request_prefill_kv_computed_tokens", "Prompt tokens per request that no cache had.", _TOKENS),
    ("vllm:request_max_num_generation_tokens", "Generated tokens of a request's longest answer.", _TOKENS),
    ("vllm:request_params_max_tokens", "Most tokens that an answer could have.", _TOKENS),
    ("vllm:request_params_n", "Answers per request.", _CHOICES),
    ("hydra:request_encode_time_seconds", "Time in encoder steps, requests with images.", _SECONDS),
    ("hydra:request_migrate_time_seconds", "Time that moves between instances added, requests that moved.", _SECONDS),
    ("hydra:media_fetch_seconds", "Time to get a request's images.", _SECONDS),
    ("hydra:media_decode_seconds", "Time to decode and preprocess a request's images.", _SECONDS),
)
_BY_STAGE = (
    ("hydra:stage_queue_seconds", "Time that requests waited for a stage, of those that went through it.", "stage"),
    ("hydra:stage_run_seconds", "Time that requests spent in a stage's steps.", "stage"),
    ("hydra:stage_move_seconds", "Time that a move between instances added to a request.", "move"),
)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Requests that have ended since the server started. `limited` ended well and had a latency limit; `good` of them
    met all their limits. `verdicts` by limit (ttft, tpot): (met, all)."""

    finished: int
    failed: int
    cancelled: int
    limited: int
    good: int
    verdicts: dict[str, tuple[int, int]]


@dataclass(slots=True)
class _Totals:
    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    images: int = 0
    cached_images: int = 0
    verdicts: Counter[tuple[str, bool]] = field(default_factory=Counter)  # (limit, met)
    limited: int = 0  # requests with a verdict
    good: int = 0  # of these, all limits met
    late: Counter[str] = field(default_factory=Counter)  # late tokens by kind of blame


class FinishedRequests:
    """The counters of one server."""

    def __init__(self) -> None:
        self._totals = _Totals()
        self._plain = {name: Histogram(name, help, bounds) for name, help, bounds in _PLAIN}
        self._queue, self._run, self._move = (
            Histogram(name, help, _STAGE_SECONDS, (label,), _STAGES if label == "stage" else MOVES.values())
            for name, help, label in _BY_STAGE
        )

    # ---- counting

    def add(self, result: Result) -> None:
        """Counts an answer. Prompt tokens, images and cache hits count if it reached its first token, however it ended;
        times, lengths and limits only if it ended well."""
        totals, usage = self._totals, result.usage
        totals.finished[result.finish_reason.value] += 1
        ended_well = result.finish_reason not in (FinishReason.ABORT, FinishReason.ERROR)
        if ended_well or result.metrics.ttft_s is not None:
            totals.prompt_tokens += usage.prompt_tokens
            totals.cached_tokens += usage.cached_tokens
            totals.images += usage.num_images
            totals.cached_images += usage.cached_images
        if not ended_well:
            return
        self._add_times(result)
        self._add_stages(result)
        self._add_slo(result.metrics.slo)

    def add_choices(self, num_choices: int, longest: int) -> None:
        """Counts a whole request that ended well; its longest answer has `longest`."""
        self._plain["vllm:request_params_n"].observe(num_choices)
        self._plain["vllm:request_max_num_generation_tokens"].observe(longest)

    def _add_times(self, result: Result) -> None:
        usage, metrics = result.usage, result.metrics
        self._observe("vllm:request_prompt_tokens", usage.prompt_tokens)
        self._observe("vllm:request_generation_tokens", usage.completion_tokens)
        if result.max_tokens is not None:
            self._observe("vllm:request_params_max_tokens", result.max_tokens)
        self._observe("vllm:request_prefill_kv_computed_tokens", usage.prompt_tokens - usage.cached_tokens)
        self._observe("vllm:e2e_request_latency_seconds", metrics.e2e_s)
        self._observe("vllm:request_queue_time_seconds", metrics.queue_s)
        self._observe("vllm:request_prefill_time_seconds", metrics.prefill_s)
        self._observe("vllm:request_decode_time_seconds", metrics.decode_s)
        inference_s = metrics.encode_s + metrics.prefill_s + metrics.decode_s
        self._observe("vllm:request_inference_time_seconds", inference_s)
        if metrics.ttft_s is not None:
            self._observe("vllm:time_to_first_token_seconds", metrics.ttft_s)
        if metrics.tpot_s is not None:
            self._observe("vllm:request_time_per_output_token_seconds", metrics.tpot_s)
        self._plain["vllm:inter_token_latency_seconds"].observe_all(result.gaps_s)
        if usage.num_images:
            self._observe("hydra:request_encode_time_seconds", metrics.encode_s)

    def _add_stages(self, result: Result) -> None:
        """Counts the breakdown that `Server-Timing` shows, so both agree."""
        timeline: Sequence[StageSpan] = result.timeline
        ran: set[str] = set()
        moved: set[str] = set()
        for span in timeline:
            if span.stage in _STAGE_OF:
                ran.add(_STAGE_OF[span.stage])
            elif PHASE_OF.get(span.stage) in MOVES:
                moved.add(PHASE_OF[span.stage])
            elif span.stage in _MEDIA:
                self._observe(_MEDIA[span.stage], span.end_s - span.start_s)
        if not ran and not moved:
            return
        seconds = phases(timeline, result.metrics.e2e_s, ttft_s=result.metrics.ttft_s)
        for stage in ran:
            self._queue.observe(seconds[f"{stage}_queue"], stage)
            self._run.observe(seconds[stage], stage)
        for phase in moved:
            self._move.observe(seconds[phase], MOVES[phase])
        if moved:
            self._observe("hydra:request_migrate_time_seconds", sum(seconds[phase] for phase in moved))

    def _add_slo(self, slo: SloReport) -> None:
        totals = self._totals
        totals.late.update(slo.late_by)
        for limit, met in (("ttft", slo.ttft_met), ("tpot", slo.tpot_met)):
            if met is not None:
                totals.verdicts[limit, met] += 1
        if slo.met is not None:
            totals.limited += 1
            totals.good += slo.met

    def _observe(self, name: str, value: float) -> None:
        self._plain[name].observe(value)

    # ---- reading

    @property
    def outcomes(self) -> Outcomes:
        totals = self._totals
        failed, cancelled = totals.finished[FinishReason.ERROR.value], totals.finished[FinishReason.ABORT.value]
        verdicts = {}
        for limit in ("ttft", "tpot"):
            met = totals.verdicts[limit, True]
            verdicts[limit] = (met, met + totals.verdicts[limit, False])
        ended = totals.finished.total()
        return Outcomes(ended - failed - cancelled, failed, cancelled, totals.limited, totals.good, verdicts)

    @property
    def cached_tokens(self) -> int:
        return self._totals.cached_tokens

    def families(self, make: Families) -> Iterator[Metric]:
        totals = self._totals
        yield make.counter_by(
            "vllm:request_success",
            "Requests that ended, by reason.",
            "finished_reason",
            [reason.value for reason in FinishReason],
            totals.finished,
        )
        for name, help, value in (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", totals.prompt_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", totals.cached_tokens),
            ("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.", totals.cached_tokens),
            ("vllm:mm_cache_queries", "Images of requests that came to their first token.", totals.images),
            ("vllm:mm_cache_hits", "Of these, images without an encode of their own.", totals.cached_images),
        ):
            yield make.counter(name, help, value)
        yield from self._limits(make)
        for histogram in (*self._plain.values(), self._queue, self._run, self._move):
            yield histogram.family(make.labels)

    def _limits(self, make: Families) -> Iterator[Metric]:
        totals = self._totals
        counts: dict[tuple[str, ...], float] = {
            (limit, str(met).lower()): totals.verdicts[limit, met]
            for limit in ("ttft", "tpot")
            for met in (True, False)
        }
        yield make.counter_by_labels(
            "hydra:slo_requests", "Finished requests by limit, met or not.", ("limit", "met"), counts
        )
        yield make.counter("hydra:limited_requests", "Finished requests that had a limit.", totals.limited)
        yield make.counter("hydra:goodput_requests", "Finished requests that met all their limits.", totals.good)
        late = "Late gaps between tokens by what most of each went to."
        yield make.counter_by("hydra:late_tokens", late, "blame", BLAMES, totals.late)
