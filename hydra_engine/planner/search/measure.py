"""One candidate at one rate: the load is simulated, and what comes of it is judged by the limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from hydra_engine.config import EngineConfig
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.planner.records import Record, quantile
from hydra_engine.planner.search.candidates import Candidate
from hydra_engine.planner.search.load import window
from hydra_engine.planner.simulator.costs import DeviceKind, Host
from hydra_engine.planner.simulator.deployment import Deployment
from hydra_engine.planner.simulator.node import Site
from hydra_engine.planner.slo import Limits
from hydra_engine.telemetry.workload import WorkloadRequest

SHARE = 0.9  # of the requests must be within both limits
# A deployment falls behind where first tokens come later and later: by more than this many seconds a second, and by
# more than this share of the limit over what was simulated.
_GROWTH, _GROWN = 0.03, 0.1


@dataclass(frozen=True, slots=True)
class Question:
    """What is planned: the model, the node, the load and its limits. `kinds`: of every device by name. `cold`: the
    share of a load, at its beginning, that is not judged, because the deployment fills up then."""

    spec: ModelSpec
    config: EngineConfig
    kinds: Mapping[str, DeviceKind]
    host: Host
    rows: Sequence[WorkloadRequest]
    limits: Limits
    cold: float = 0.1

    def site(self, candidate: Candidate) -> Site:
        devices = {name: self.kinds[name] for name in candidate.devices}
        config = replace(self.config, topology=str(candidate.topology))  # limits of instances are checked by it
        for setting in candidate.settings:
            config = setting.apply(config)
        return Site(self.spec, config, devices, self.host)

    def limited(self) -> Question:
        """Instances are told the limits, so that their budgets follow from them."""
        scheduler = replace(self.config.scheduler, ttft_slo=self.limits.ttft_s, tpot_slo=self.limits.tpot_s)
        return replace(self, config=replace(self.config, scheduler=scheduler))


class Spread(NamedTuple):
    """Seconds."""

    p50: float
    p90: float
    p99: float


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Shares are of requests; `attainment` of those that met both limits. `growth`: seconds by which first tokens came
    later with every second of the load. `busy`: of each role's instances on the mean, the share of the time that their
    vision and language lanes computed; `preprocessing`: that of the front's decode workers."""

    rate: float | None
    seed: int
    requests: int
    attainment: float
    ttft_met: float
    tpot_met: float
    ttft: Spread
    tpot: Spread
    requests_per_s: float
    tokens_per_s: float
    span_s: float
    growth: float
    falls_behind: bool
    busy: dict[str, tuple[float, float]]
    preprocessing: float = 0.0

    @property
    def kept(self) -> bool:
        """The limits were kept, and would be if the load went on."""
        return self.attainment >= SHARE and not self.falls_behind

    @property
    def slack(self) -> float:
        """For ranking what attains alike: the larger, the farther from the limits."""
        return self.ttft_met + self.tpot_met


def measure(question: Question, candidate: Candidate, rate: float | None, count: int, seed: int = 0) -> Point:
    """Raises ResourceError where the model does not fit a device."""
    rows = window(question.rows, count, rate, seed)
    deployment = Deployment(candidate.topology, question.site(candidate), content=seed)
    for row in rows:
        deployment.submit(row)
    records = deployment.run(audit=False)
    judged = records[int(question.cold * len(records)) :] if rate is not None else records
    limits = question.limits
    span_s = max(record.end_s for record in records)
    growth, grown_s = _growth(judged) if rate is not None else (0.0, 0.0)
    return Point(
        rate=rate,
        seed=seed,
        requests=count,
        attainment=limits.attainment(judged),
        ttft_met=sum(map(limits.ttft_met, judged)) / len(judged),
        tpot_met=sum(map(limits.tpot_met, judged)) / len(judged),
        ttft=_spread([record.ttft_s for record in judged if record.ttft_s is not None]),
        tpot=_spread([record.tpot_s for record in judged if record.tpot_s is not None]),
        requests_per_s=sum(record.ok for record in records) / span_s,
        tokens_per_s=sum(record.num_tokens for record in records) / span_s,
        span_s=span_s,
        growth=growth,
        falls_behind=growth > _GROWTH and grown_s > _GROWN * limits.ttft_s,
        busy=_busy(deployment, candidate),
        preprocessing=deployment.preprocessing_busy(),
    )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(*(quantile(values, share) or 0.0 for share in (0.5, 0.9, 0.99)))


def _growth(records: Sequence[Record]) -> tuple[float, float]:
    """Of the line through the times to first tokens over the times of arrival: its slope, and its rise in all."""
    known = [(record.planned_s, record.ttft_s) for record in records if record.ttft_s is not None]
    middle_x, middle_y = (sum(values) / len(known) for values in zip(*known, strict=True))
    spread = sum((x - middle_x) ** 2 for x, _ in known)
    if not spread:
        return 0.0, 0.0
    slope = sum((x - middle_x) * (y - middle_y) for x, y in known) / spread
    return slope, slope * (known[-1][0] - known[0][0])


def _busy(deployment: Deployment, candidate: Candidate) -> dict[str, tuple[float, float]]:
    found: dict[str, list[tuple[float, float]]] = {}
    shares = deployment.busy()
    for name, spec in zip(candidate.topology.names, candidate.topology.instances, strict=True):
        found.setdefault(spec.role.letters, []).append((shares[name].vision, shares[name].language))
    return {role: (_mean([v for v, _ in pairs]), _mean([w for _, w in pairs])) for role, pairs in found.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
