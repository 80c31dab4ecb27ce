"""The metrics page: vLLM's names, for its dashboards, where the meaning is the same, and `hydra:` for our own.

Fed once per answer (a request for n answers counts n times, with its prompt) and once per HTTP answer; instances'
reports are read when the page is requested. Families of single instances have the labels `engine_instance` and `role`;
Prometheus itself calls the scraped server `instance`. An instance that is not up has counters only.

Labels are the served model's name, names and roles of instances, routes, statuses, names of API keys, at most
`MAX_CLIENTS` of them, and words from fixed lists, never anything that a client sent. Does not know HTTP or the engine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from hydra_engine import __version__, log
from hydra_engine.core.instances import Condition, InstanceState
from hydra_engine.core.outputs import BLAMES, FinishReason, Result, SloReport, StageSpan
from hydra_engine.core.reports import BudgetReport, Status
from hydra_engine.telemetry.timeline import MOVES, PHASE_OF, phases

# ---- histograms and families

LABELS = ("model_name", "engine")


class Histogram:
    """A histogram: counts in buckets per value of its labels."""

    def __init__(
        self, name: str, help: str, bounds: Sequence[float], labels: Sequence[str] = (), known: Iterable[str] = ()
    ) -> None:
        """`known`: values of its only label that are shown before anything is counted."""
        self.name = name
        self.help = help
        self._bounds = bounds
        self._shown = (*(str(float(bound)) for bound in bounds), "+Inf")
        self._labels = tuple(labels)
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}
        for values in [(value,) for value in known] if labels else [()]:
            self._begin(values)

    def _begin(self, values: tuple[str, ...]) -> None:
        self._counts[values] = [0] * len(self._shown)
        self._sums[values] = 0.0

    def observe(self, value: float, *values: str) -> None:
        """Counts `value` in the series with these label values."""
        if values not in self._counts:
            self._begin(values)
        self._counts[values][bisect_left(self._bounds, value)] += 1
        self._sums[values] += value

    def observe_all(self, seconds: Sequence[float]) -> None:
        """Counts many values at once. Only for a histogram without labels."""
        values = np.asarray(seconds, dtype=np.float64)
        found = np.bincount(np.searchsorted(self._bounds, values), minlength=len(self._shown))
        self._counts[()] = [before + count for before, count in zip(self._counts[()], found.tolist(), strict=True)]
        self._sums[()] += float(values.sum())

    def family(self, labels: Sequence[str]) -> Metric:
        family = HistogramMetricFamily(self.name, self.help, labels=(*LABELS, *self._labels))
        for values, counts in self._counts.items():
            buckets, total = [], 0
            for bound, count in zip(self._shown, counts, strict=True):
                total += count
                buckets.append((bound, total))
            family.add_metric((*labels, *values), buckets=buckets, sum_value=self._sums[values])
        return family


class Families:
    """A factory of families whose series all begin with `labels`, the values of `LABELS`."""

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = tuple(labels)

    def gauge(self, name: str, help: str, value: float) -> Metric:
        return self._filled(GaugeMetricFamily(name, help, labels=LABELS), {(): value})

    def gauge_by(self, name: str, help: str, label: str, values: dict[str, float]) -> Metric:
        family = GaugeMetricFamily(name, help, labels=(*LABELS, label))
        return self._filled(family, {(key,): value for key, value in values.items()})

    def info(self, name: str, help: str, facts: dict[str, str]) -> Metric:
        """A gauge that is always 1; its labels carry the facts."""
        return self._filled(GaugeMetricFamily(name, help, labels=(*LABELS, *facts)), {tuple(facts.values()): 1})

    def counter(self, name: str, help: str, value: float) -> Metric:
        return self._filled(CounterMetricFamily(name, help, labels=LABELS), {(): value})

    def counter_by(self, name: str, help: str, label: str, values: Iterable[str], counts: Counter[str]) -> Metric:
        """A counter with a series for each of `values`, counted or not."""
        family = CounterMetricFamily(name, help, labels=(*LABELS, label))
        return self._filled(family, {(value,): counts[value] for value in values})

    def counter_by_labels(
        self, name: str, help: str, labels: Sequence[str], counts: dict[tuple[str, ...], float]
    ) -> Metric:
        """A counter with a series for each key of `counts`, which has a value for each of `labels`."""
        return self._filled(CounterMetricFamily(name, help, labels=(*LABELS, *labels)), dict(sorted(counts.items())))

    def mean(self, name: str, help: str, count: int, total: float) -> Metric:
        """A histogram with one bucket, for a sum and a count without their distribution."""
        family = HistogramMetricFamily(name, help, labels=LABELS)
        family.add_metric(self.labels, buckets=[("+Inf", count)], sum_value=total)
        return family

    def _filled(self, family: CounterMetricFamily | GaugeMetricFamily, series: dict[tuple[str, ...], float]) -> Metric:
        for values, value in series.items():
            family.add_metric((*self.labels, *values), value)
        return family


# ---- finished requests

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


# ---- HTTP

MAX_CLIENTS = 64  # keys with their own series; further ones share `OTHER`
OTHER = "other"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
_REASONS = (
    *("overloaded", "draining", "not_ready", "instance_lost"),  # 503
    *("rate_limit_exceeded", "request_timeout", "payload_too_large", "unsupported_media_type", "invalid_api_key"),
    OTHER,
)
_ANSWER_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class HttpTraffic:
    """The counters of one server."""

    def __init__(self) -> None:
        self._refused: Counter[str] = Counter()
        self._by_route: Counter[tuple[str, ...]] = Counter()  # route, status
        self._by_client: Counter[tuple[str, ...]] = Counter()  # client, status
        self._by_class: Counter[tuple[str, ...]] = Counter()  # method, route, status in hundreds
        self._clients: set[str] = set()
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Time to an answer's end, by route.",
            _ANSWER_SECONDS,
            ("method", "handler"),
        )
        self._lag = Histogram(
            "hydra:event_loop_lag_seconds", "How late the event loop ran a timer, ten times a second.", _LAG_SECONDS
        )

    def count_refusal(self, reason: str | None) -> None:
        """Counts a request refused because of the server's state or one of its limits."""
        self._refused[reason if reason in _REASONS else OTHER] += 1

    def count_answer(
        self, route: str, status: int, client: str | None = None, *, method: str = "GET", seconds: float = 0.0
    ) -> None:
        """Counts an answer. `route` is a route's pattern, never a path; `client` is the operator's name of an API
        key."""
        method = method if method in _METHODS else OTHER
        self._by_route[route, str(status)] += 1
        self._by_class[method, route, f"{status // 100}xx"] += 1
        self._seconds.observe(seconds, method, route)
        if client is not None:
            self._by_client[self._known(client), str(status)] += 1

    def count_lag(self, seconds: float) -> None:
        """Counts a timer that the event loop ran `seconds` late."""
        self._lag.observe(seconds)

    def _known(self, client: str) -> str:
        if client not in self._clients:
            if len(self._clients) >= MAX_CLIENTS:
                return OTHER
            self._clients.add(client)
        return client

    def families(self, make: Families, client: str | None = None) -> Iterator[Metric]:
        """Yields the families. Series by client are restricted to `client`, unless it is None."""
        refused = "Requests refused because of the server's state or a limit, by reason."
        yield make.counter_by("hydra:admission_rejections", refused, "reason", _REASONS, self._refused)
        answers = "HTTP answers by route and status."
        yield make.counter_by_labels("hydra:http_responses", answers, ("route", "status"), dict(self._by_route))
        by_client: dict[tuple[str, ...], float] = {
            labels: count for labels, count in self._by_client.items() if client in (None, labels[0])
        }
        by_key = "HTTP answers by API key and status."
        yield make.counter_by_labels("hydra:client_responses", by_key, ("client", "status"), by_client)
        in_hundreds = "HTTP answers by method, route and status in hundreds."
        yield make.counter_by_labels(
            "http_requests", in_hundreds, ("method", "handler", "status"), dict(self._by_class)
        )
        yield self._seconds.family(make.labels)
        yield self._lag.family(make.labels)


# ---- instances

_SHORTEST_S = 1.0  # shortest time over which a busy share is measured


class BusyShares:
    """The share of time that each lane computes, between two pages at least `_SHORTEST_S` apart."""

    def __init__(self) -> None:
        self._before: Status | None = None
        self.shares = {"vision": 0.0, "language": 0.0}

    def update(self, status: Status) -> None:
        before = self._before
        if before is None or status.time_s < before.time_s:
            self._before = status
        elif (span_s := status.time_s - before.time_s) >= _SHORTEST_S:
            self.shares["vision"] = min((status.vision_busy_s - before.vision_busy_s) / span_s, 1.0)
            self.shares["language"] = min((status.language_busy_s - before.language_busy_s) / span_s, 1.0)
            self._before = status


def status_families(make: Families, status: Status, busy: BusyShares, cached_tokens: int) -> Iterator[Metric]:
    """Yields the families of summed statuses. `cached_tokens`: prompt tokens found in the prefix cache, of all requests
    that have ended."""
    yield from _gauges(make, status, busy)
    yield from _tokens(make, status, cached_tokens)
    yield from _steps(make, status)
    yield from _budget(make, status.budget)


def _gauges(make: Families, status: Status, busy: BusyShares) -> Iterator[Metric]:
    for name, help, value in (
        ("vllm:num_requests_running", "Requests that hold KV blocks.", status.num_running),
        ("vllm:num_requests_waiting", "Requests that wait for KV blocks.", status.num_waiting),
        ("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", status.kv_used),
        ("hydra:num_requests_encoding", "Requests whose images are not encoded yet.", status.num_encoding),
        ("hydra:num_requests_decoding", "Requests that have their whole prompt.", status.num_decoding),
        ("hydra:image_cache_usage_perc", "Share of the image cache in use, 0 to 1.", status.image_cache_used),
        ("hydra:encoder_cache_entries", "Image-cache blocks in use.", status.image_blocks_used),
    ):
        yield make.gauge(name, help, value)
    yield make.gauge_by("hydra:stream_busy_ratio", "Share of time that a lane computes, 0 to 1.", "stream", busy.shares)
    sizes = {"num_gpu_blocks": str(status.kv_blocks_total), "num_image_blocks": str(status.image_blocks_total)}
    yield make.info("vllm:cache_config_info", "Sizes of the caches.", sizes)


def _tokens(make: Families, status: Status, cached_tokens: int) -> Iterator[Metric]:
    """Token counters with vLLM's meaning: whole prompts, computed or cached, plus tokens computed again after a
    preemption."""
    help = "Prompt tokens: those computed when they are, those found in the cache when their request ends."
    yield make.counter("vllm:prompt_tokens", help, status.prompt_tokens + cached_tokens)
    yield make.counter_by_labels(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens by what gave their KV.",
        ("source",),
        {("local_compute",): status.prompt_tokens, ("local_cache_hit",): cached_tokens},
    )
    yield make.counter("vllm:generation_tokens", "Tokens generated.", status.generation_tokens)


def _steps(make: Families, status: Status) -> Iterator[Metric]:
    preempted = "Requests that had to give up their KV blocks."
    yield make.counter("vllm:num_preemptions", preempted, status.num_preemptions)
    yield make.counter("hydra:images_encoded", "Images that went through the encoder.", status.images_encoded)
    yield make.counter_by_labels(
        "hydra:stream_busy_seconds",
        "Seconds that a lane has computed.",
        ("stream",),
        {("vision",): status.vision_busy_s, ("language",): status.language_busy_s},
    )
    tokens = status.prompt_tokens + status.generation_tokens
    yield make.mean("vllm:iteration_tokens_total", "Tokens per language step.", status.language_steps, tokens)
    images = "Images per encoder step."
    yield make.mean("hydra:encoder_items_per_batch", images, status.vision_steps, status.images_encoded)


def _budget(make: Families, budget: BudgetReport) -> Iterator[Metric]:
    allowance = budget.vision_s if budget.vision_s >= 0 else inf
    for name, help, value in (
        ("hydra:tpot_limit_seconds", "Limit for the time between two tokens; 0: none.", budget.tpot_limit_s),
        ("hydra:token_budget", "Prefill-token budget of the latest language step.", budget.token_budget),
        ("hydra:image_budget_patches", "Patches that a vision step may hold.", budget.image_budget),
        ("hydra:vision_allowance_seconds", "Vision beside the latest language step; +Inf: no bound.", allowance),
        ("hydra:budget_correction_ratio", "Measured over predicted time of steps.", budget.correction),
        ("hydra:limit_used_ratio", "Share of the TPOT limit that the latest full steps took.", budget.limit_used),
    ):
        yield make.gauge(name, help, value)
    for name, help, count in (
        ("hydra:decode_steps", "Language steps with decodes.", budget.decode_steps),
        ("hydra:late_steps", "Steps with decodes that took longer than the TPOT limit.", budget.late_steps),
        (
            "hydra:stretched_steps",
            "Steps made longer than the limit for a first token that was nearly due.",
            budget.stretched_steps,
        ),
        ("hydra:full_steps", "Steps with decodes that were filled up to their budget.", budget.full_steps),
    ):
        yield make.counter(name, help, count)


_UP = (Condition.READY, Condition.DRAINING)
_Reading = tuple[str, str, Callable[[Status], float]]

_GAUGES: tuple[_Reading, ...] = (
    ("hydra:instance_num_requests_running", "Requests that hold KV blocks.", lambda s: s.num_running),
    ("hydra:instance_num_requests_waiting", "Requests that wait for KV blocks.", lambda s: s.num_waiting),
    (
        "hydra:instance_num_requests_encoding",
        "Requests whose images are not encoded yet.",
        lambda s: s.num_encoding,
    ),
    (
        "hydra:instance_num_requests_handing_over",
        "Requests that are computed here and not fetched yet.",
        lambda s: s.num_handing_over,
    ),
    (
        "hydra:instance_num_requests_arriving",
        "Requests that wait for KV of other instances.",
        lambda s: s.num_arriving,
    ),
    ("hydra:instance_kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", lambda s: s.kv_used),
    (
        "hydra:instance_image_cache_usage_perc",
        "Share of the image cache in use, 0 to 1.",
        lambda s: s.image_cache_used,
    ),
    ("hydra:transfer_live_offers", "Offers to other instances not acknowledged yet.", lambda s: s.transfer.offers),
    ("hydra:transfer_live_staged", "Pieces of them that host memory holds.", lambda s: s.transfer.staged),
    ("hydra:transfer_live_pulls", "Offers of other instances not fetched yet.", lambda s: s.transfer.pulls),
)
_COUNTERS: tuple[_Reading, ...] = (
    ("hydra:transfer_offered", "Offers made to other instances.", lambda s: s.transfer.offered),
    ("hydra:transfer_acknowledged", "Offers that were fetched whole.", lambda s: s.transfer.acknowledged),
    ("hydra:transfer_withdrawn", "Offers taken back before they were fetched.", lambda s: s.transfer.withdrawn),
    ("hydra:transfer_expired", "Offers taken back because their lease was over.", lambda s: s.transfer.expired),
    ("hydra:transfer_pulled", "Offers of other instances fetched whole.", lambda s: s.transfer.pulled),
    ("hydra:transfer_pulled_bytes", "Bytes copied from other instances.", lambda s: s.transfer.pulled_bytes),
    ("hydra:transfer_host_bytes", "Of these, bytes that came through host memory.", lambda s: s.transfer.host_bytes),
    ("hydra:transfer_pull_seconds", "Seconds that copies took.", lambda s: s.transfer.pull_s),
    ("hydra:transfer_invalid", "Copies discarded because the offer was withdrawn.", lambda s: s.transfer.invalid),
    ("hydra:transfer_ignored", "Messages about unknown offers.", lambda s: s.transfer.ignored),
)


def instance_families(
    names: Sequence[str], labels: Sequence[str], instances: Sequence[InstanceState], statuses: Mapping[str, Status]
) -> Iterator[Metric]:
    """Yields the families of single instances. `names` and `labels` are the names and values of the labels of every
    series; `statuses` are by instance, as far as there are any."""
    names = (*names, "engine_instance", "role")
    up = GaugeMetricFamily("hydra:instance_up", "1: it is ready, or finishes what it has; 0: not.", labels=names)
    restarts = CounterMetricFamily("hydra:instance_restarts", "How often it was started again.", labels=names)
    reported: list[tuple[tuple[str, ...], bool, Status]] = []
    for state in instances:
        own = (*labels, state.name, state.role)
        is_up = state.condition in _UP
        up.add_metric(own, float(is_up))
        restarts.add_metric(own, state.restarts)
        if (status := statuses.get(state.name)) is not None:
            reported.append((own, is_up, status))
    yield up
    yield restarts
    for kind, readings in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, help, read in readings:
            family = kind(name, help, labels=names)
            for own, is_up, status in reported:
                if is_up or kind is CounterMetricFamily:
                    family.add_metric(own, read(status))
            yield family
    busy = CounterMetricFamily(
        "hydra:instance_busy_seconds", "Seconds that a lane has computed.", labels=(*names, "stream")
    )
    for own, _, status in reported:
        busy.add_metric((*own, "vision"), status.vision_busy_s)
        busy.add_metric((*own, "language"), status.language_busy_s)
    yield busy


# ---- the page

_ENGINE = "0"
_OPENMETRICS = "application/openmetrics-text"
_WITH_COLONS = f"{_OPENMETRICS};version=1.0.0;escaping=allow-utf-8"  # other escapings lose the colons of our names


class Metrics(Collector):
    """The metrics of one server. Add ended requests to `requests` and HTTP events to `traffic`."""

    def __init__(self, model_name: str) -> None:
        self._make = Families((model_name, _ENGINE))
        self.requests = FinishedRequests()
        self.traffic = HttpTraffic()
        self._busy = BusyShares()
        self._status: Status | None = None
        self._instances: Sequence[InstanceState] = ()
        self._statuses: Mapping[str, Status] = {}
        self._client: str | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)  # memory, CPU time and open files of this process, start included

    def page(
        self,
        accept: str,
        status: Status | None,
        instances: Sequence[InstanceState] = (),
        statuses: Mapping[str, Status] | None = None,
        client: str | None = None,
    ) -> tuple[bytes, str]:
        """Returns the page and its content type: OpenMetrics if `accept`, the HTTP header, asks for it. Gauges come
        from `status`, the sum over all instances, and from `statuses`, by instance name. Series by client are
        restricted to `client`, unless it is None."""
        if status is not None:
            self._busy.update(status)
        self._status = status
        self._instances, self._statuses, self._client = instances, statuses or {}, client
        # The header itself is not passed on: the library fails on some of its words.
        escaping = _WITH_COLONS if _OPENMETRICS in accept.lower() else ""
        encode, content_type = choose_encoder(escaping)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        make = self._make
        yield make.info("hydra:build_info", "Which version serves.", {"version": __version__})
        yield from self.requests.families(make)
        yield from self.traffic.families(make, self._client)
        dropped = "Lines of the log that were dropped since standard error could not be written."
        yield make.counter("hydra:log_lines_dropped", dropped, log.num_dropped())
        if self._status is not None:
            yield from status_families(make, self._status, self._busy, self.requests.cached_tokens)
        yield from instance_families(LABELS, make.labels, self._instances, self._statuses)
