"""From a question to a plan: which topology, in which ratio, with which settings, and why not the others.

The order: can the limits be kept at all (`floors`), what can each candidate do at most (`estimate`), which are good
(`halving`), how much do the best keep (seed by seed), do other settings help the winner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from hydra_engine.errors import ConfigError, ResourceError
from hydra_engine.planner.search.candidates import Candidate, candidates
from hydra_engine.planner.search.estimate import Work, bound_of, requests_of, work_of
from hydra_engine.planner.search.floors import check_reachable
from hydra_engine.planner.search.halving import Entry, measure_goodputs, race
from hydra_engine.planner.search.measure import SHARE, Point, Question, measure
from hydra_engine.planner.search.settings import settings_to_try
from hydra_engine.planner.search.workers import run_all
from hydra_engine.planner.simulator.sizing import Sizes, sizes_of

_MOST_CANDIDATES = 24  # are simulated: those with the highest bounds
_SAMPLE = 200  # requests of the workload from which work is estimated
_BETTER = 1.02  # another setting must win by this much

Progress = Callable[[str, int], None]  # what is done now, and how many simulations it has at most


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """How much is simulated. `seconds`: how long the longest loads last; `requests`: fewest and most of one."""

    seconds: float = 10.0
    requests: tuple[int, int] = (60, 400)
    finalists: int = 4
    seeds: int = 3
    workers: int = 1


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate in the plan's table. Rates in requests per second; `goodput` None: it did not come so far, and
    `reason` says why. `point`: the last one below or at its goodput, else the last one."""

    name: str
    topology: str
    family: str
    bound: float
    binds: str
    goodput: float | None
    uncertainty: float | None
    point: Point | None
    reason: str
    hour_price: float | None
    flags: tuple[str, ...] = ()


class InstanceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Of the instances of one role: what they find by their device's memory, or are given."""

    role: str
    token_budget: int
    max_num_seqs: int
    image_budget: int
    kv_tokens: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`rows`: the best first. `work`: seconds of a request's stages on each kind of device."""

    objective: str
    rows: list[Row]
    limits: list[InstanceLimits]
    work: dict[str, tuple[float, float, float]]
    points: int
    tokens: float  # simulated

    @property
    def best(self) -> Row:
        return self.rows[0]


class _Runner:
    """Counts what is simulated."""

    def __init__(self, question: Question, effort: Effort) -> None:
        self.num_points, self.num_tokens = 0, 0.0
        self._question, self._effort = question, effort

    def __call__(self, jobs: Sequence[tuple[Candidate, float | None, int, int]]) -> list[Point]:
        calls = [_job(self._question, *job) for job in jobs]
        points = run_all(calls, self._effort.workers)
        self.num_points += len(points)
        self.num_tokens += sum(point.tokens_per_s * point.span_s for point in points)
        return points


def _job(question: Question, candidate: Candidate, rate: float | None, count: int, seed: int) -> Callable[[], Point]:
    return lambda: measure(question, candidate, rate, count, seed)


def make_plan(question: Question, effort: Effort, progress: Progress, chosen: Sequence[Candidate] = ()) -> Plan:
    """For the highest goodput. `chosen`: only these candidates. Raises ConfigError where no deployment can keep the
    limits, with the stage that misses them and by how much."""
    works = works_of(question)
    check_reachable(question)
    entries, refused = _entries(question, works, chosen)
    if not entries:
        raise ConfigError(f"the model fits none of these deployments: {refused[0].reason}", param="devices")
    simulated = sorted(entries, key=lambda entry: -entry.bound.rate)[:_MOST_CANDIDATES]
    left_out = [entry for entry in entries if entry not in simulated]
    runner = _Runner(question, effort)
    how = {"seconds": effort.seconds, "requests": effort.requests, "progress": progress}
    finalists = race(simulated, runner, finalists=effort.finalists, **how)  # type: ignore[arg-type]
    measure_goodputs(finalists, runner, seeds=effort.seeds, **how)  # type: ignore[arg-type]
    finalists.sort(key=lambda entry: -entry.goodput)
    better = _with_settings(question, finalists[0], runner, effort, progress)
    final = sorted([*better, *finalists], key=lambda entry: -entry.goodput)
    if not final[0].goodput:
        raise ConfigError(_nothing_keeps(question, final[0]), param="tpot_slo")
    lost = sorted((e for e in simulated if e not in finalists), key=lambda e: (-e.rounds, -e.bound.rate))
    rows = [_row(question, entry, final[0]) for entry in (*final, *lost, *left_out)]
    return Plan(
        objective="goodput",
        rows=[*rows, *refused],
        limits=limits_of(question, final[0].candidate),
        work={name: (work.encode_s, work.prefill_s, work.decode_s) for name, work in works.items()},
        points=runner.num_points,
        tokens=runner.num_tokens,
    )


def works_of(question: Question) -> dict[str, Work]:
    """By the name of a kind of device."""
    requests = requests_of(question.spec, question.rows[:_SAMPLE])
    surfaces = {kind.name: kind.costs.surface for kind in question.kinds.values()}
    return {name: work_of(surface, requests, question.limits.tpot_s) for name, surface in surfaces.items()}


def _entries(question: Question, works: dict[str, Work], chosen: Sequence[Candidate]) -> tuple[list[Entry], list[Row]]:
    """Those that fit the devices, and rows of those that do not."""
    spec = question.spec
    found = chosen or candidates(
        {name: kind.name for name, kind in question.kinds.items()},
        has_vision=spec.vision is not None,
        keeps_states=spec.language.has_states,
    )
    entries, refused = [], []
    for candidate in found:
        try:
            _sizes(question, candidate)
        except ResourceError as error:
            refused.append(_refused(question, candidate, str(error)))
            continue
        entries.append(Entry(candidate, bound_of(candidate, question.kinds, works)))
    return entries, refused


def _sizes(question: Question, candidate: Candidate) -> dict[str, Sizes]:
    """By role: what an instance of it finds, for the first one of each."""
    site, found = question.site(candidate), dict[str, Sizes]()
    for spec in candidate.topology.instances:
        neighbours = [other.role for other in candidate.topology.instances if other.device == spec.device]
        if spec.role.letters not in found:
            kind = site.devices[spec.device]
            found[spec.role.letters] = sizes_of(site.spec, site.config, kind, spec.role, neighbours)
    return found


def limits_of(question: Question, candidate: Candidate) -> list[InstanceLimits]:
    limits = []
    for role, sizes in _sizes(question, candidate).items():
        scheduler = sizes.config.scheduler
        limits.append(
            InstanceLimits(
                role=role,
                token_budget=scheduler.most_tokens,
                max_num_seqs=scheduler.most_requests,
                image_budget=scheduler.image_budget,
                kv_tokens=sizes.plan.num_kv_blocks * sizes.config.cache.block_size,
            )
        )
    return limits


def _with_settings(
    question: Question, winner: Entry, runner: _Runner, effort: Effort, progress: Progress
) -> list[Entry]:
    """The winner with each setting that makes it better, measured over all seeds."""
    limits = limits_of(question, winner.candidate)
    language = next((one for one in limits if one.kv_tokens), limits[0])
    tried = settings_to_try(question.config, language.token_budget, language.max_num_seqs)
    rate = winner.goodput
    if not rate or not tried:
        return []
    entries = [
        Entry(replace(winner.candidate, settings=(setting,)), winner.bound, list(winner.points)) for setting in tried
    ]
    # Just above what the winner keeps, where a better setting shows at once.
    how = {"seconds": effort.seconds, "requests": effort.requests, "progress": progress}
    hopeful = race(entries, runner, finalists=1, **how)  # type: ignore[arg-type]
    measure_goodputs(hopeful, runner, seeds=effort.seeds, **how)  # type: ignore[arg-type]
    return [entry for entry in hopeful if entry.goodput > _BETTER * winner.goodput]


# ---- rows


def _row(question: Question, entry: Entry, best: Entry) -> Row:
    candidate = entry.candidate
    measured = bool(entry.goodputs)
    uncertainty = entry.uncertainty if measured and math.isfinite(entry.uncertainty) else None
    return Row(
        name=candidate.name,
        topology=str(candidate.topology),
        family=candidate.family,
        bound=entry.bound.rate,
        binds=entry.bound.stage,
        goodput=entry.goodput if measured else None,
        uncertainty=uncertainty,
        point=shown_point(entry),
        reason="" if entry is best else _reason(entry, best),
        hour_price=hour_price(question, candidate),
        flags=tuple(setting.flags for setting in candidate.settings),
    )


def shown_point(entry: Entry) -> Point | None:
    kept = [point for point in entry.points if point.attainment >= SHARE and point.rate is not None]
    if kept:
        return max(kept, key=lambda point: point.rate or 0.0)
    return entry.points[-1] if entry.points else None


def _reason(entry: Entry, best: Entry) -> str:
    """Why it was not chosen."""
    bound = entry.bound
    if not entry.points:
        return f"not simulated: its bound is {bound.rate:.3g} requests/s, where {bound.stage} has no time left"
    failed = [point for point in entry.points if point.attainment < SHARE]
    point = failed[0] if failed else entry.points[-1]
    if entry.goodputs:
        less = 1 - entry.goodput / best.goodput if best.goodput else 0.0
        return f"{less:.0%} less goodput; above it {_misses(point)}" if failed else f"{less:.0%} less goodput"
    if failed:
        return f"out in round {entry.rounds}: at {point.rate:.3g} requests/s {_misses(point)}"
    return f"out in round {entry.rounds}: kept the limits with less to spare than others"


def _misses(point: Point) -> str:
    stage, role, share = binding(point)
    return (
        f"{point.ttft_met:.0%} of the requests keep the TTFT limit and {point.tpot_met:.0%} the TPOT limit; "
        f"{stage} binds ({role} busy {share:.0%})"
    )


def binding(point: Point) -> tuple[str, str, float]:
    """(stage, role, busy share): what most probably misses the limit that is missed more. A late first token is for
    want of encodes or prefills, a late next one for want of time beside decodes."""
    if point.tpot_met < point.ttft_met:
        role, share = _busiest(point, "D", 1)
        return "decode", role, share
    encoders, prefillers = _busiest(point, "E", 0), _busiest(point, "P", 1)
    if encoders[1] > prefillers[1]:
        return "encode", *encoders
    return "prefill", *prefillers


def _busiest(point: Point, stage: str, lane: int) -> tuple[str, float]:
    shares = {role: busy[lane] for role, busy in point.busy.items() if stage in role}
    if not shares:
        return stage, 0.0
    role = max(shares, key=lambda role: shares[role])
    return role, shares[role]


def hour_price(question: Question, candidate: Candidate) -> float | None:
    prices = [question.kinds[name].hour_price for name in candidate.devices]
    return None if any(price is None for price in prices) else sum(price or 0.0 for price in prices)


def _refused(question: Question, candidate: Candidate, reason: str) -> Row:
    return Row(
        name=candidate.name,
        topology=str(candidate.topology),
        family=candidate.family,
        bound=0.0,
        binds="memory",
        goodput=None,
        uncertainty=None,
        point=None,
        reason=reason,
        hour_price=hour_price(question, candidate),
    )


def _nothing_keeps(question: Question, entry: Entry) -> str:
    point = shown_point(entry)
    assert point is not None
    limits = question.limits
    return (
        f"no topology keeps TTFT {limits.ttft_s:g} s and TPOT {limits.tpot_s:g} s for {SHARE:.0%} of the requests at "
        f"any rate; the best, {entry.candidate.name}, at {point.rate:.3g} requests/s: {_misses(point)}"
    )
