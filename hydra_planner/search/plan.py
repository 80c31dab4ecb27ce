"""Plans a deployment: which topology, in which ratio, with which settings, and why not the others.

The order: can the limits be kept at all (`floors`), what can each candidate do at most (`estimate`), which are good
(`halving`), how much do the best keep (seed by seed), do other settings help the winner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal

import msgspec

from hydra_engine.core.instances import Role, Topology
from hydra_engine.errors import ConfigError, ResourceError
from hydra_planner.search.candidates import Candidate, candidates
from hydra_planner.search.estimate import bound_of, seconds_of
from hydra_planner.search.floors import check_lengths, check_reachable
from hydra_planner.search.halving import Effort, Entry, Progress, measure_goodputs, race, requests_at
from hydra_planner.search.load import repeats
from hydra_planner.search.measure import SHARE, Point, Question, measure
from hydra_planner.search.rows import Row, device_price, misses, refused_row, row_of
from hydra_planner.search.settings import ORDERS, InstanceLimits, settings_to_try
from hydra_planner.search.workers import run_all
from hydra_planner.simulator.preprocessing import pixels_of, preprocess_s
from hydra_planner.simulator.sizing import Sizes, sizes_of
from hydra_planner.work import RequestSeconds, works

_MAX_CANDIDATES = 18  # are simulated: those with the highest bounds
_SAMPLE = 200  # requests of the workload from which work is estimated
# Of the highest goodput: topologies within this share of it, and within its error, are alike, and the simplest wins.
_ALIKE = 0.95
_AT_ONCE_ALIKE = 1.01  # of the earliest last answer: the simplest wins among those that end by then
COLD = 0.3  # of a load that lasts so long
_DECODERS_BUSY = 0.5  # share of their time at the best estimate, so that none of the candidates waits for them

Objective = Literal["goodput", "cost", "offline"]
_Load = tuple[Candidate, float | None, int, int]


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`rows`: the best first. `work`: seconds of a request's encode, prefill and decode on each kind of device.
    `points` and `tokens` were simulated."""

    objective: Objective
    rows: list[Row]
    limits: list[InstanceLimits]
    work: dict[str, tuple[float, float, float]]
    points: int
    tokens: float

    @property
    def best(self) -> Row:
        return self.rows[0]


@dataclass(slots=True)
class Search:
    """A question and what has been simulated for it, each load once. Called with (candidate, rate, number of requests,
    seed)."""

    question: Question
    effort: Effort
    progress: Progress
    seconds: dict[str, RequestSeconds]
    points: dict[_Load, Point] = field(default_factory=dict)

    def __call__(self, jobs: Sequence[_Load]) -> list[Point]:
        new = [job for job in dict.fromkeys(jobs) if job not in self.points]
        points = run_all([_job(self.question, *job) for job in new], self.effort.workers)
        self.points |= zip(new, points, strict=True)
        return [self.points[job] for job in jobs]

    def entries(self, found: Sequence[Candidate]) -> tuple[list[Entry], list[Row]]:
        """Entries of candidates that fit the devices, the highest bound first, and rows of those that do not."""
        entries, refused = [], []
        for candidate in found:
            try:
                _sizes(self.question, candidate)
            except ResourceError as error:
                refused.append(refused_row(self.question, candidate, str(error)))
                continue
            entries.append(Entry(candidate, bound_of(candidate, self.question.kinds, self.seconds)))
        if not entries:
            raise ConfigError(f"the model fits none of these deployments: {refused[0].reason}", param="devices")
        return sorted(entries, key=lambda entry: -entry.bound.rate), refused

    def plan(self, objective: Objective, rows: list[Row], best: Candidate) -> Plan:
        return Plan(
            objective=objective,
            rows=rows,
            limits=limits_of(self.question, best),
            work={name: (one.vision, one.prefill, one.decode) for name, one in self.seconds.items()},
            points=len(self.points),
            tokens=sum(point.tokens_per_s * point.span_s for point in self.points.values()),
        )


def _job(question: Question, candidate: Candidate, rate: float | None, count: int, seed: int) -> Callable[[], Point]:
    return lambda: measure(question, candidate, rate, count, seed)


def make_plan(
    question: Question,
    effort: Effort,
    progress: Progress,
    objective: Objective = "goodput",
    rate: float | None = None,
    chosen: Sequence[Candidate] = (),
) -> Plan:
    """`rate`: requests per second, for the least cost. `chosen`: only these candidates. Raises ConfigError where no
    deployment can keep the limits, with the stage that misses them and by how much."""
    effort, question = lasting(effort, question), replace(question, cold=COLD, to_the_end=False)
    check_lengths(question)
    search = Search(question, effort, progress, request_seconds(question))
    if objective == "offline":
        return _offline(search, chosen)
    check_reachable(question)
    if objective == "cost":
        assert rate is not None, "the least cost is that of a rate"
        return _cheapest(search, rate, chosen)
    return _highest(search, chosen)


def lasting(effort: Effort, question: Question) -> Effort:
    """Returns `effort` with loads that last as long as a request takes at its limits: a deployment fills up
    meanwhile."""
    if effort.seconds is not None:
        return effort
    tokens = sum(row.output_tokens for row in question.rows) / len(question.rows)
    seconds = question.limits.ttft_s + tokens * question.limits.tpot_limit_s
    return msgspec.structs.replace(effort, seconds=seconds)


def with_decoders(question: Question) -> Question:
    """Returns `question` with as many decode workers as the pictures of the best estimate need, if the frontend has
    cores of its own and the user has not given more: `--decode-workers` is two by default, which eight devices
    outrun."""
    host, media = question.host, question.config.media
    seconds = request_seconds(question)
    found = _candidates(question, list(question.kinds))
    rate = max((bound_of(one, question.kinds, seconds).rate for one in found), default=0.0)
    each_s = sum(preprocess_s(host, pixels_of(row)) for row in question.rows) / len(question.rows)
    wanted = min(math.ceil(rate * each_s / _DECODERS_BUSY), host.cores)
    if wanted <= media.decode_workers:
        return question
    return replace(question, config=replace(question.config, media=replace(media, decode_workers=wanted)))


def request_seconds(question: Question) -> dict[str, RequestSeconds]:
    """Seconds of the mean request by name of the kind of device."""
    asked = list(works(question.spec, question.rows[:_SAMPLE]))
    surfaces = {kind.name: kind.costs.surface for kind in question.kinds.values()}
    return {name: seconds_of(surface, asked, question.limits.tpot_limit_s) for name, surface in surfaces.items()}


def _candidates(question: Question, names: Sequence[str]) -> list[Candidate]:
    spec = question.spec
    return candidates(
        {name: question.kinds[name].name for name in names},
        has_vision=spec.vision is not None,
    )


# ---- objectives


def _highest(search: Search, chosen: Sequence[Candidate]) -> Plan:
    """The highest goodput of all devices."""
    question, effort, progress = search.question, search.effort, search.progress
    entries, refused = search.entries(chosen or _candidates(question, list(question.kinds)))
    simulated, left_out = entries[:_MAX_CANDIDATES], entries[_MAX_CANDIDATES:]
    finalists = race(simulated, search, effort, progress)
    measure_goodputs(finalists, search, effort, progress, [0])
    ranked = sorted(finalists, key=lambda entry: -entry.goodput)
    plain = simplest(ranked)
    measured = [ranked[0], plain] if plain is not ranked[0] else ranked[:2]
    measure_goodputs(measured, search, effort, progress, range(1, effort.seeds))
    better = _with_settings(search, simplest(measured))
    best = simplest([*better, *measured])
    final = sorted([*better, *finalists], key=lambda entry: (entry is not best, -entry.goodput))
    if not best.goodput:
        raise ConfigError(_nothing_keeps(question, best), param="tpot_slo")
    lost = sorted((e for e in simulated if e not in finalists), key=lambda e: (-e.rounds, -e.bound.rate))
    rows = [row_of(question, entry, best) for entry in (*final, *lost, *left_out)]
    return search.plan("goodput", [*rows, *refused], best.candidate)


def simplest(entries: Sequence[Entry]) -> Entry:
    """The entry with the fewest kinds of instances, instances and settings among those whose goodput cannot be told
    from the best one's."""
    best = max(entries, key=lambda entry: entry.goodput)
    alike = [entry for entry in entries if entry is best or _alike(entry, best)]
    return min(alike, key=lambda entry: (*_parts(entry.candidate), -entry.goodput))


def _alike(entry: Entry, best: Entry) -> bool:
    error = max(entry.uncertainty, best.uncertainty)
    return best.goodput - entry.goodput <= min((1 - _ALIKE) * best.goodput, error)


def _parts(candidate: Candidate) -> tuple[int, int, int]:
    roles = [one.role for one in candidate.topology.instances]
    return len(set(roles)), len(roles), len(candidate.settings)


def _cheapest(search: Search, rate: float, chosen: Sequence[Candidate]) -> Plan:
    """The fewest dollars an hour (or to buy, or the fewest devices) that keep the limits at `rate` on every seed."""
    question, effort = search.question, search.effort
    count = requests_at(rate, effort)
    failed: list[Entry] = []
    groups = [[candidate] for candidate in chosen] or [_candidates(question, names) for names in _subsets(question)]
    groups = [group for group in groups if group]
    for group in sorted(groups, key=lambda group: device_price(question, group[0].devices)):
        entries, _ = search.entries(group)
        able = [entry for entry in entries if entry.bound.rate >= rate][:_MAX_CANDIDATES]
        search.progress(f"{len(able)} topologies of {len(group[0].devices)} devices at {rate:g} requests/s", len(able))
        for entry, point in zip(able, search([(e.candidate, rate, count, 0) for e in able]), strict=True):
            entry.points.append(point)
        good = [entry for entry in able if entry.points[-1].keeps_limits]
        good.sort(key=lambda entry: (-entry.points[-1].slack, -entry.bound.rate))
        for entry in good[: effort.finalists]:
            entry.points += search([(entry.candidate, rate, count, seed) for seed in range(1, effort.seeds)])
            if all(point.keeps_limits for point in entry.points):
                others = [other for other in able if other is not entry]
                shown = [entry, *sorted(others, key=lambda other: -other.points[-1].slack), *failed[::-1]]
                return search.plan("cost", [row_of(question, one, entry) for one in shown], entry.candidate)
        failed += able or entries[:1]
    raise ConfigError(
        f"none of these devices keep the limits at {rate:g} requests/s; the best was "
        f"{question.name_of(failed[-1].candidate)}"
        + (f": {misses(failed[-1].points[-1])}" if failed[-1].points else ", which has no time left for that"),
        param="rate",
    )


def _subsets(question: Question) -> Iterator[list[str]]:
    """Yields sets of devices to use: of each kind the first 0, 1, .. all; at least one device in all."""
    by_kind: dict[str, list[str]] = {}
    for name, kind in question.kinds.items():
        by_kind.setdefault(kind.name, []).append(name)
    for counts in product(*(range(len(names) + 1) for names in by_kind.values())):
        if any(counts):
            yield [name for names, count in zip(by_kind.values(), counts, strict=True) for name in names[:count]]


def _offline(search: Search, chosen: Sequence[Candidate]) -> Plan:
    """Plans for all requests at once, with the last answer as early as possible."""
    question, effort = search.question, search.effort
    entries, refused = search.entries(chosen or _candidates(question, list(question.kinds)))
    running, count = entries[:_MAX_CANDIDATES], min(effort.requests[0], effort.offline)
    while True:
        search.progress(f"{len(running)} topologies with {count} requests at once", len(running))
        for entry, point in zip(running, search([(e.candidate, None, count, 0) for e in running]), strict=True):
            entry.points.append(point)
            entry.rounds += 1
        running.sort(key=lambda entry: entry.points[-1].span_s)
        if len(running) <= effort.finalists and count >= effort.offline:
            break
        running = running[: max(effort.finalists, len(running) // 2)]
        count = min(2 * count, effort.offline)
    lost = sorted((e for e in entries if e not in running), key=lambda e: (-e.rounds, -e.bound.rate))
    latest_s = _AT_ONCE_ALIKE * running[0].points[-1].span_s
    alike = [entry for entry in running if entry.points[-1].span_s <= latest_s]
    best = min(alike, key=lambda entry: (*_parts(entry.candidate), entry.points[-1].span_s))
    rows = [row_of(question, entry, best) for entry in (best, *(e for e in (*running, *lost) if e is not best))]
    return search.plan("offline", [*rows, *refused], best.candidate)


def _with_settings(search: Search, winner: Entry) -> list[Entry]:
    """The winner with the setting that keeps a load best which it has just not kept without, if one does, and if that
    is more goodput over all seeds."""
    question = search.question
    tried = settings_to_try(question.config, limits_of(question, winner.candidate), repeats=repeats(question.rows))
    missed = [
        point for point in winner.points if point.seed == 0 and not point.keeps_limits and (point.rate or 0.0) > 0
    ]
    if not winner.goodput or not tried or not missed:
        return []
    load = min(missed, key=lambda point: point.rate or 0.0)
    if load.attainment >= SHARE:  # it falls behind, which no order of requests changes
        tried = [one for one in tried if one.field not in ORDERS]
    changed = [replace(winner.candidate, settings=(one,)) for one in tried]
    entries = [Entry(one, winner.bound) for one in changed if _fits(question, one)]
    if not entries:
        return []
    search.progress(f"{len(entries)} settings at {load.rate:.3g} requests/s", len(entries))
    points = search([(entry.candidate, load.rate, load.requests, load.seed) for entry in entries])
    for entry, point in zip(entries, points, strict=True):
        entry.points.append(point)
    hopeful = max(entries, key=lambda entry: (entry.points[0].keeps_limits, entry.points[0].slack))
    if not hopeful.points[0].keeps_limits:
        return []
    for seeds in ([0], range(1, search.effort.seeds)):
        measure_goodputs([hopeful], search, search.effort, search.progress, seeds)
        if hopeful.goodput * _ALIKE <= winner.goodput:
            return []
    return [hopeful]


# ---- limits


def _sizes(question: Question, candidate: Candidate) -> dict[tuple[str, str], Sizes]:
    """Limits and caches of the first instance of each role on each kind of device. Raises ResourceError."""
    site, topology, found = question.site(candidate), candidate.topology, dict[tuple[str, str], Sizes]()
    configs = [site.config.for_instance(*named) for named in zip(topology.names, _roles(topology), strict=True)]
    for spec, config in zip(topology.instances, configs, strict=True):
        kind = site.devices[spec.device]
        if (spec.role.letters, kind.name) not in found:
            beside = [place for place, other in enumerate(topology.instances) if other.device == spec.device]
            roles = [topology.instances[place].role for place in beside]
            neighbours = [configs[place] for place in beside]
            found[spec.role.letters, kind.name] = sizes_of(site.spec, config, kind, spec.role, roles, neighbours)
    return found


def _fits(question: Question, candidate: Candidate) -> bool:
    try:
        _sizes(question, candidate)
    except ResourceError:  # its larger steps need the memory
        return False
    return True


def _roles(topology: Topology) -> list[Role]:
    return [spec.role for spec in topology.instances]


def limits_of(question: Question, candidate: Candidate) -> list[InstanceLimits]:
    limits = []
    for (role, device), sizes in _sizes(question, candidate).items():
        scheduler = sizes.config.scheduler
        limits.append(
            InstanceLimits(
                role=role,
                device=device,
                token_budget=scheduler.max_step_tokens,
                max_num_seqs=scheduler.max_running_requests,
                image_budget=scheduler.image_budget,
                kv_tokens=sizes.plan.num_kv_blocks * sizes.config.cache.block_size,
            )
        )
    return limits


def _nothing_keeps(question: Question, entry: Entry) -> str:
    limits, point, name = question.limits, entry.points[-1], question.name_of(entry.candidate)
    return (
        f"no topology keeps TTFT {limits.ttft_s:g} s and TPOT {limits.tpot_limit_s:g} s for {SHARE:.0%} of the "
        f"requests at any rate; the best, {name}, at {point.rate:.3g} requests/s: {misses(point)}"
    )
