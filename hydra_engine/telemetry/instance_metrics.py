"""Instances' reports as Prometheus families: sums (requests, caches, steps, lanes, budgets), and per instance its load
and transfers.

Families of single instances have the labels `engine_instance` and `role`; Prometheus itself calls the scraped server
`instance`. The topology bounds the number of series: names and roles come from it, never from a client. An instance
that is not up has counters only. Does not know requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hydra_engine.core.instances import Condition, InstanceState
from hydra_engine.core.messages import BudgetReport, Status
from hydra_engine.telemetry.families import Families

_SHORTEST_S = 1.0  # shortest time over which a busy share is measured


class BusyShares:
    """The share of time that each lane computes, over the time since the last page that is at least `_SHORTEST_S`
    old."""

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
