"""Counters and histograms as Prometheus text, under vLLM's names for dashboards and under `hydra:` for our own.

Fed once per finished request and once per HTTP answer; gauges are read from the latest status when the page is asked
for: summed over instances here, for each of them in `instance_metrics.py`. Labels are the served model's name, names
and roles of instances and words from fixed lists, never anything a client sent. Does not know HTTP or the engine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from hydra_engine.core.instances import InstanceState
from hydra_engine.core.messages import BudgetReport, Status
from hydra_engine.core.outputs import FinishReason, Result, SloReport, StageSpan
from hydra_engine.observe.instance_metrics import instance_families

_LABELS = ("model_name", "engine")
_ENGINE = "0"

# vLLM's bounds, so that its dashboards read well.
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_REQUEST_SECONDS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = tuple(step * 10**power for power in range(5) for step in (1, 2, 5))

_BLAMES = ("prefill", "encode", "preemption", "step", "cpu")
_REJECTIONS = frozenset({"overloaded", "draining", "not_ready", "instance_lost"})


class Histogram:
    """Counts in buckets; one call can add many equal values, which keeps tokens out of the hot path."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help = help
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, labels: Sequence[str]) -> Metric:
        family = HistogramMetricFamily(self.name, self.help, labels=_LABELS)
        buckets, total = [], 0
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(labels, buckets=buckets, sum_value=self._sum)
        return family


@dataclass(slots=True)
class _Totals:
    """What is counted from finished requests and HTTP answers."""

    finished: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    answered: Counter[tuple[str, str]] = field(default_factory=Counter)
    prefix_queries: int = 0
    prefix_hits: int = 0
    images: int = 0
    cached_images: int = 0
    verdicts: Counter[tuple[str, bool]] = field(default_factory=Counter)  # by limit, met or not
    limited: int = 0  # requests with a verdict
    good: int = 0  # of these, all limits met
    late: Counter[str] = field(default_factory=Counter)  # late tokens by what they went to


class Metrics(Collector):
    """One per server."""

    def __init__(self, model_name: str) -> None:
        self._labels = (model_name, _ENGINE)
        self._status: Status | None = None
        self._instances: Sequence[InstanceState] = ()
        self._statuses: Mapping[str, Status] = {}
        self._last_busy: Status | None = None
        self._busy_ratio = {"vision": 0.0, "language": 0.0}
        self._totals = _Totals()
        self._histograms: dict[str, Histogram] = {name: Histogram(name, help, bounds) for name, help, bounds in _ALL}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    # ---- feeding

    def observe(self, result: Result) -> None:
        """A request has ended; failed and cancelled ones count only as that."""
        totals, usage = self._totals, result.usage
        totals.finished[result.finish_reason.value] += 1
        if result.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            return
        totals.prefix_queries += usage.prompt_tokens
        totals.prefix_hits += usage.cached_tokens
        totals.images += usage.num_images
        totals.cached_images += usage.cached_images
        self._observe_times(result)
        self._observe_stages(result.timeline)
        self._observe_slo(result.metrics.slo)

    def rejected(self, code: str | None) -> None:
        """A generation was refused because of the server's state."""
        self._totals.rejected[code if code in _REJECTIONS else "other"] += 1

    def answered(self, route: str, status: int) -> None:
        """`route` is a route's pattern, never a path."""
        self._totals.answered[route, str(status)] += 1

    def _observe_times(self, result: Result) -> None:
        usage, metrics = result.usage, result.metrics
        self._observe("vllm:request_prompt_tokens", usage.prompt_tokens)
        self._observe("vllm:request_generation_tokens", usage.completion_tokens)
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
            self._observe("vllm:inter_token_latency_seconds", metrics.tpot_s, usage.completion_tokens - 1)
        if usage.num_images:
            self._observe("hydra:request_encode_time_seconds", metrics.encode_s)

    def _observe_stages(self, timeline: Iterable[StageSpan]) -> None:
        for span in timeline:
            if span.stage in _STAGE_HISTOGRAMS:
                self._observe(_STAGE_HISTOGRAMS[span.stage], span.end_s - span.start_s)
            if span.blame:  # the largest part first
                self._totals.late[span.blame[0].kind] += 1

    def _observe_slo(self, slo: SloReport) -> None:
        totals = self._totals
        for limit, met in (("ttft", slo.ttft_met), ("tpot", slo.tpot_met)):
            if met is not None:
                totals.verdicts[limit, met] += 1
        if slo.met is not None:
            totals.limited += 1
            totals.good += slo.met

    def _observe(self, name: str, value: float, times: int = 1) -> None:
        self._histograms[name].observe(value, times)

    # ---- reading

    def text(
        self,
        status: Status | None,
        instances: Sequence[InstanceState] = (),
        statuses: Mapping[str, Status] | None = None,
    ) -> bytes:
        """The page, with gauges as of `status`, the sum over all instances, and of `statuses`, by their names."""
        if status is not None:
            self._measure_busy(status)
        self._status = status
        self._instances, self._statuses = instances, statuses or {}
        return generate_latest(self._registry)

    def _measure_busy(self, status: Status) -> None:
        """Busy shares since the last page that was at least a second ago."""
        before = self._last_busy
        if before is None or status.time_s < before.time_s:
            self._last_busy = status
        elif (span_s := status.time_s - before.time_s) >= 1.0:
            self._busy_ratio["vision"] = min((status.vision_busy_s - before.vision_busy_s) / span_s, 1.0)
            self._busy_ratio["language"] = min((status.language_busy_s - before.language_busy_s) / span_s, 1.0)
            self._last_busy = status

    def collect(self) -> Iterator[Metric]:
        yield from self._request_counters()
        yield from self._slo_counters()
        for histogram in self._histograms.values():
            yield histogram.family(self._labels)
        yield from self._http_counters()
        if self._status is not None:
            yield from self._gauges(self._status)
            yield from self._step_counters(self._status)
            yield from self._budget(self._status.budget)
        yield from instance_families(_LABELS, self._labels, self._instances, self._statuses)

    def _request_counters(self) -> Iterator[Metric]:
        totals = self._totals
        reasons = [reason.value for reason in FinishReason]
        yield self._counter_by(
            "vllm:request_success", "Requests that ended, by reason.", "finished_reason", reasons, totals.finished
        )
        for name, help, value in (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", totals.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", totals.prefix_hits),
            ("vllm:mm_cache_queries", "Images of finished requests.", totals.images),
            (
                "vllm:mm_cache_hits",
                "Images of finished requests that needed no encode of their own.",
                totals.cached_images,
            ),
        ):
            yield self._counter(name, help, value)

    def _slo_counters(self) -> Iterator[Metric]:
        totals = self._totals
        verdicts = CounterMetricFamily(
            "hydra:slo_requests", "Finished requests by limit, met or not.", labels=(*_LABELS, "limit", "met")
        )
        for limit in ("ttft", "tpot"):
            for met in (True, False):
                verdicts.add_metric((*self._labels, limit, str(met).lower()), totals.verdicts[limit, met])
        yield verdicts
        yield self._counter("hydra:limited_requests", "Finished requests that had a limit.", totals.limited)
        yield self._counter("hydra:goodput_requests", "Finished requests that met all their limits.", totals.good)
        yield self._counter_by(
            "hydra:late_tokens", "Long gaps between tokens by what most of each went to.", "blame", _BLAMES, totals.late
        )

    def _http_counters(self) -> Iterator[Metric]:
        rejections = self._totals.rejected
        codes = [*sorted(_REJECTIONS), "other"]
        yield self._counter_by(
            "hydra:admission_rejections", "Generations refused with 503, by reason.", "reason", codes, rejections
        )
        answers = CounterMetricFamily(
            "hydra:http_responses", "HTTP answers by route and status.", labels=(*_LABELS, "route", "status")
        )
        for (route, status), count in sorted(self._totals.answered.items()):
            answers.add_metric((*self._labels, route, status), count)
        yield answers

    def _gauges(self, status: Status) -> Iterator[Metric]:
        for name, help, value in (
            ("vllm:num_requests_running", "Requests that hold KV blocks.", status.num_running),
            ("vllm:num_requests_waiting", "Requests that wait for KV blocks.", status.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", status.kv_used),
            ("hydra:num_requests_encoding", "Requests whose images are not encoded yet.", status.num_encoding),
            ("hydra:image_cache_usage_perc", "Share of the image cache in use, 0 to 1.", status.image_cache_used),
            ("hydra:encoder_cache_entries", "Image-cache blocks in use.", status.image_blocks_used),
        ):
            yield self._gauge(name, help, value)
        busy = GaugeMetricFamily(
            "hydra:stream_busy_ratio", "Share of time that a lane computes, 0 to 1.", labels=(*_LABELS, "stream")
        )
        for stream, ratio in self._busy_ratio.items():
            busy.add_metric((*self._labels, stream), ratio)
        yield busy
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "Sizes of the caches.", labels=(*_LABELS, "num_gpu_blocks", "num_image_blocks")
        )
        config.add_metric((*self._labels, str(status.kv_blocks_total), str(status.image_blocks_total)), 1)
        yield config

    def _step_counters(self, status: Status) -> Iterator[Metric]:
        for name, help, value in (
            (
                "vllm:prompt_tokens",
                "Prompt tokens computed, those found in the cache not counted.",
                status.prompt_tokens,
            ),
            ("vllm:generation_tokens", "Tokens generated.", status.generation_tokens),
            ("vllm:num_preemptions", "Requests that had to give up their KV blocks.", status.num_preemptions),
            ("hydra:images_encoded", "Images that went through the encoder.", status.images_encoded),
        ):
            yield self._counter(name, help, value)
        busy = CounterMetricFamily(
            "hydra:stream_busy_seconds", "Seconds that a lane has computed.", labels=(*_LABELS, "stream")
        )
        busy.add_metric((*self._labels, "vision"), status.vision_busy_s)
        busy.add_metric((*self._labels, "language"), status.language_busy_s)
        yield busy
        # The instance reports sums, not single steps: the mean is exact, the distribution is not known.
        tokens = status.prompt_tokens + status.generation_tokens
        yield self._mean("vllm:iteration_tokens_total", "Tokens per language step.", status.language_steps, tokens)
        yield self._mean(
            "hydra:encoder_items_per_batch", "Images per encoder step.", status.vision_steps, status.images_encoded
        )

    def _budget(self, budget: BudgetReport) -> Iterator[Metric]:
        allowance = budget.vision_s if budget.vision_s >= 0 else inf
        for name, help, value in (
            ("hydra:tpot_limit_seconds", "Limit for the time between two tokens; 0: none.", budget.tpot_limit_s),
            ("hydra:token_budget", "Prefill tokens that the latest language step might hold.", budget.token_budget),
            ("hydra:image_budget_patches", "Patches that a vision step may hold.", budget.image_budget),
            ("hydra:vision_allowance_seconds", "Vision beside the latest language step; +Inf: no bound.", allowance),
            ("hydra:budget_correction_ratio", "Measured over predicted time of steps.", budget.correction),
            ("hydra:limit_used_ratio", "Share of the TPOT limit that the latest full steps took.", budget.limit_used),
        ):
            yield self._gauge(name, help, value)
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
            yield self._counter(name, help, count)

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, help, labels=_LABELS)
        gauge.add_metric(self._labels, value)
        return gauge

    def _counter(self, name: str, help: str, value: float) -> Metric:
        counter = CounterMetricFamily(name, help, labels=_LABELS)
        counter.add_metric(self._labels, value)
        return counter

    def _counter_by(self, name: str, help: str, label: str, values: Iterable[str], counts: Counter[str]) -> Metric:
        counter = CounterMetricFamily(name, help, labels=(*_LABELS, label))
        for value in values:
            counter.add_metric((*self._labels, value), counts[value])
        return counter

    def _mean(self, name: str, help: str, count: int, total: float) -> Metric:
        """A histogram with one bucket."""
        family = HistogramMetricFamily(name, help, labels=_LABELS)
        family.add_metric(self._labels, buckets=[("+Inf", count)], sum_value=total)
        return family


_ALL: tuple[tuple[str, str, Sequence[float]], ...] = (
    ("vllm:time_to_first_token_seconds", "Arrival to first token.", _SECONDS),
    ("vllm:inter_token_latency_seconds", "Time between tokens, each request's mean for each.", _TOKEN_SECONDS),
    ("vllm:request_time_per_output_token_seconds", "Mean time per token after the first.", _TOKEN_SECONDS),
    ("vllm:e2e_request_latency_seconds", "Arrival to end.", _REQUEST_SECONDS),
    ("vllm:request_queue_time_seconds", "Time spent waiting.", _REQUEST_SECONDS),
    ("vllm:request_prefill_time_seconds", "Time in prefill steps.", _REQUEST_SECONDS),
    ("vllm:request_decode_time_seconds", "Time in decode steps.", _REQUEST_SECONDS),
    ("vllm:request_inference_time_seconds", "Time in encode, prefill and decode steps.", _REQUEST_SECONDS),
    ("vllm:request_prompt_tokens", "Prompt tokens per request.", _TOKENS),
    ("vllm:request_generation_tokens", "Generated tokens per request.", _TOKENS),
    ("hydra:request_encode_time_seconds", "Time in encoder steps, requests with images.", _SECONDS),
    ("hydra:media_fetch_seconds", "Time to get a request's images.", _SECONDS),
    ("hydra:media_decode_seconds", "Time to decode and preprocess a request's images.", _SECONDS),
)
_STAGE_HISTOGRAMS = {"fetch": "hydra:media_fetch_seconds", "preprocess": "hydra:media_decode_seconds"}
