"""What every instance of a topology does and exchanges, as Prometheus families with the labels `engine_instance` and
`role`; Prometheus itself calls the server that a page comes from `instance`.

There are as many series as the topology has instances: names and roles come from it, never from a client. Of an
instance that is not up, only counters are shown. Does not know what is summed over instances (`metrics.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from hydra_engine.core.instances import Condition, InstanceState
from hydra_engine.core.messages import Status

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
    ("hydra:transfer_live_pulls", "Offers of other instances not fetched yet.", lambda s: s.transfer.pulls),
)
_COUNTERS: tuple[_Reading, ...] = (
    ("hydra:transfer_offered", "Offers made to other instances.", lambda s: s.transfer.offered),
    ("hydra:transfer_acknowledged", "Offers that were fetched whole.", lambda s: s.transfer.acknowledged),
    ("hydra:transfer_withdrawn", "Offers taken back before they were fetched.", lambda s: s.transfer.withdrawn),
    ("hydra:transfer_expired", "Offers taken back because their lease was over.", lambda s: s.transfer.expired),
    ("hydra:transfer_pulled", "Offers of other instances fetched whole.", lambda s: s.transfer.pulled),
    ("hydra:transfer_pulled_bytes", "Bytes copied from other instances.", lambda s: s.transfer.pulled_bytes),
    ("hydra:transfer_pull_seconds", "Seconds that copies took.", lambda s: s.transfer.pull_s),
    ("hydra:transfer_invalid", "Copies that came too late and were thrown away.", lambda s: s.transfer.invalid),
    ("hydra:transfer_ignored", "Messages about unknown offers.", lambda s: s.transfer.ignored),
)


def instance_families(
    names: Sequence[str], labels: Sequence[str], instances: Sequence[InstanceState], statuses: Mapping[str, Status]
) -> Iterator[Metric]:
    """`names` and `labels`: of what every series carries. `statuses` by instance, where there is one."""
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
