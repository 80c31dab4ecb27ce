"""Simulates a candidate at a rate and judges the records by the limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from hydra_engine.config import EngineConfig
from hydra_engine.models.specs.base import ModelSpec
from hydra_planner.records import Record, quantile
from hydra_planner.search.candidates import Candidate
from hydra_planner.search.load import window
from hydra_planner.simulator.costs import DeviceKind, Host
from hydra_planner.simulator.deployment import Deployment
from hydra_planner.simulator.node import Site
from hydra_planner.slo import Limits
from hydra_planner.workload.file import WorkloadRequest

SHARE = 0.9  # of the requests must be within both limits
# A deployment falls behind where first tokens come later and later: by more than this many seconds a second, and by
# more than this share of the limit over what was simulated.
_GROWTH, _GROWN = 0.03, 0.1
# A load ends before its time where it falls behind by so many times that, or where fewer attain. It is asked so often,
# from so many judged requests on.
_CLEARLY, _HOPELESS, _PARTS, _FEWEST = 3, SHARE / 2, 5, 20


@dataclass(frozen=True, slots=True)
class Question:
    """The question of a plan: model, node, load and limits. `kinds`: kind of every device by name. `cold`: share of a
    load, at its beginning, that is not judged, because the deployment fills up then. `to_the_end`: True simulates every
    request to its end. False stops when the last one's first token would be late, and judges running decodes by their
    tokens so far: quicker, no request is judged in an emptying deployment, and a load that is too high ends sooner."""

    spec: ModelSpec
    config: EngineConfig
    kinds: Mapping[str, DeviceKind]
    host: Host
    rows: Sequence[WorkloadRequest]
    limits: Limits
    cold: float = 0.1
    to_the_end: bool = True

    def site(self, candidate: Candidate) -> Site:
        devices = {name: self.kinds[name] for name in candidate.devices}
        config = replace(self.config, topology=str(candidate.topology))  # limits of instances are checked by it
        for setting in candidate.settings:
            config = setting.apply(config)
        return Site(self.spec, config, devices, self.host)

    def name_of(self, candidate: Candidate) -> str:
        """Returns the candidate's name in tables, with kinds of devices where this question has several."""
        return candidate.name_on({name: kind.name for name, kind in self.kinds.items()})

    def limited(self) -> Question:
        """The question with the limits in the configuration of the instances, so that their budgets follow from
        them."""
        scheduler = replace(self.config.scheduler, ttft_slo=self.limits.ttft_s, tpot_slo=self.limits.tpot_limit_s)
        return replace(self, config=replace(self.config, scheduler=scheduler))


class Spread(NamedTuple):
    """Seconds."""

    p50: float
    p90: float
    p99: float


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Shares are of requests; `attainment` of those that met both limits. `growth`: seconds by which first tokens came
    later with every second of the load. `busy`: of each role's instances on the mean, the share of the time that their
    vision and language lanes computed; `preprocessing`: that of the frontend's decode workers."""

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
    def keeps_limits(self) -> bool:
        """True if the limits were kept and still would be if the load continued."""
        return self.attainment >= SHARE and not self.falls_behind

    @property
    def slack(self) -> float:
        """Distance from the limits, to rank points of equal attainment: larger is better."""
        return self.ttft_met + self.tpot_met


def measure(question: Question, candidate: Candidate, rate: float | None, count: int, seed: int = 0) -> Point:
    """Raises ResourceError where the model does not fit a device."""
    rows = window(question.rows, count, rate, seed)
    deployment = Deployment(candidate.topology, question.site(candidate), content=seed)
    for row in rows:
        deployment.submit(row)
    if rate is None or question.to_the_end:
        records = deployment.run(audit=False)
    else:
        records = _while_it_lasts(question, deployment, rows)
    limits, judged = question.limits, records[_num_cold(question, rows) :] if rate is not None else records
    span_s = max(record.end_s for record in records)
    growth, grown_s = _growth(judged) if rate is not None else (0.0, 0.0)
    return Point(
        rate=rate,
        seed=seed,
        requests=len(records),
        attainment=limits.attainment(judged),
        ttft_met=sum(map(limits.ttft_met, judged)) / len(judged),
        tpot_met=sum(map(limits.tpot_met, judged)) / len(judged),
        ttft=_spread([record.ttft_s for record in judged if record.ttft_s is not None]),
        tpot=_spread([record.tpot_s for record in judged if record.tpot_s is not None]),
        requests_per_s=sum(record.ok and record.num_tokens == record.wanted_tokens for record in records) / span_s,
        tokens_per_s=sum(record.num_tokens for record in records) / span_s,
        span_s=span_s,
        growth=growth,
        falls_behind=growth > _GROWTH and grown_s > _GROWN * limits.ttft_s,
        busy=_busy(deployment, candidate),
        preprocessing=deployment.preprocessing_busy(),
    )


def _num_cold(question: Question, rows: Sequence[WorkloadRequest]) -> int:
    return int(question.cold * len(rows))


def _while_it_lasts(question: Question, deployment: Deployment, rows: Sequence[WorkloadRequest]) -> list[Record]:
    """Records of requests whose first tokens have come or are late. Ends early where it is clear that the limits are
    not kept."""
    limits, cold, last_s = question.limits, _num_cold(question, rows), rows[-1].at_s
    for part in range(1, _PARTS + 1):
        due_s = last_s * (part / _PARTS)
        due = deployment.run(audit=False, until_s=due_s + limits.ttft_s, due_s=due_s)
        judged = due[cold:]
        if len(judged) < _FEWEST or len(due) == len(rows):
            continue
        growth, grown_s = _growth(judged)
        hopeless = growth > _CLEARLY * _GROWTH and grown_s > _CLEARLY * _GROWN * limits.ttft_s
        if hopeless or limits.attainment(judged) < _HOPELESS:
            break
    return due


def _spread(values: Sequence[float]) -> Spread:
    return Spread(*(quantile(values, share) or 0.0 for share in (0.5, 0.9, 0.99)))


def _growth(records: Sequence[Record]) -> tuple[float, float]:
    """(slope, total rise) of the line through TTFT over arrival times. A request without a first token has waited until
    the end."""
    known = [
        (record.planned_s, record.latency_s if record.ttft_s is None else record.ttft_s)
        for record in records
        if record.ok
    ]
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
