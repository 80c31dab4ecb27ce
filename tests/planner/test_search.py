"""The search for a topology: candidates, estimates, loads, halving, and plans of simulated deployments."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_engine.config import EngineConfig, SchedulerConfig
from hydra_engine.core.cost import Curve
from hydra_engine.core.instances import EPD, Role, Topology
from hydra_engine.core.units import GIB
from hydra_engine.errors import ConfigError
from hydra_engine.models.specs.registry import load_spec
from hydra_planner.records import Record
from hydra_planner.report import explain_lines, plan_lines
from hydra_planner.search.candidates import Candidate, candidates
from hydra_planner.search.estimate import Bound, bound_of
from hydra_planner.search.halving import Effort, Entry, measure_goodputs, race, requests_at
from hydra_planner.search.load import rate_of, repeats, window
from hydra_planner.search.measure import SHARE, Point, Question, Spread, measure
from hydra_planner.search.plan import Search, lasting, make_plan, request_seconds, simplest, with_decoders
from hydra_planner.search.rows import misses, reason, row_of
from hydra_planner.search.settings import InstanceLimits, Setting, settings_to_try
from hydra_planner.search.workers import run_all
from hydra_planner.simulator.costs import Costs, DeviceKind, Host
from hydra_planner.simulator.deployment import SimulationError
from hydra_planner.slo import Goodput, Limits
from hydra_planner.work import RequestSeconds
from hydra_planner.workload.file import Picture, WorkloadRequest
from hydra_planner.workload.generators import make_load
from tests.planner import sites

SURFACE = replace(sites.SURFACE, decode_slowdown=1.5, prefill_slowdown=1.5, vision_slowdown=1.5)
FAST = DeviceKind("fast", Costs(SURFACE, threads=0), memory_bytes=2 * GIB, price=4000, hour_price=4.0)
SLOW = replace(FAST, name="slow", costs=Costs(replace(SURFACE, patches=Curve((4.0, 256.0), (0.02, 0.1))), threads=0))
CHEAP = replace(SLOW, price=1000, hour_price=1.0)
LITTLE = Effort(seconds=1.0, requests=(10, 16), offline=16, finalists=2, seeds=2)


LIMITS = Limits(1.0, 0.05)


@cache
def question(num_devices: int = 2, limits: Limits = LIMITS, kind: DeviceKind = FAST) -> Question:
    config = EngineConfig(scheduler=SchedulerConfig(token_budget=256, max_num_seqs=16), max_model_len=1024)
    spec = load_spec(config.model_path, config.spec_options)
    rows = make_load("mixed", 60, 1.0, 0, scale=0.25)
    return Question(spec, config, {f"cuda:{i}": kind for i in range(num_devices)}, Host(cores=4), rows, limits)


def quiet(what: str, most: int) -> None: ...


# ---- candidates


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
def test_candidates_use_every_device_once_and_serve_every_stage(num_devices: int) -> None:
    names = [f"cuda:{index}" for index in range(num_devices)]
    found = candidates(dict.fromkeys(names, "fast"))
    assert len({candidate.name for candidate in found}) == len(found)
    for candidate in found:
        assert set(candidate.devices) == set(names)
        assert candidate.topology.served == EPD
        assert str(Topology.parse(str(candidate.topology))) == str(candidate.topology)


def test_eight_devices_have_the_ratios_of_every_family_and_those_that_share_devices() -> None:
    found = candidates({f"cuda:{index}": "fast" for index in range(8)})
    families = {family: sum(one.family == family for one in found) for family in {one.family for one in found}}
    assert families["EPD"] == families["(E-PD)"] == 1 and families["E+P+D"] == 21
    assert {families[name] for name in ("EP+D", "ED+P", "E+PD", "EPD+PD", "(E-P)-D", "(E-D)-P")} == {7}
    assert "8(E-PD)" in {one.name for one in found}


def test_with_two_kinds_encoders_may_stand_on_either() -> None:
    found = candidates({"cuda:0": "fast", "cuda:1": "slow"}, together=False)
    pairs = {str(one.topology) for one in found if one.family == "E+PD"}
    assert pairs == {"E@cuda:0+PD@cuda:1", "E@cuda:1+PD@cuda:0"}


def test_text_needs_no_encoders() -> None:
    names = {f"cuda:{index}": "fast" for index in range(3)}
    assert {one.family for one in candidates(names, has_vision=False)} == {"PD", "P+D"}


# ---- loads


@given(rate=st.floats(0.1, 100), count=st.integers(2, 200), seed=st.integers(0, 5))
def test_a_window_has_the_rate_and_stays_in_order(rate: float, count: int, seed: int) -> None:
    rows = window(question().rows, count, rate, seed)
    assert len(rows) == count and rate_of(rows) == pytest.approx(rate)
    assert all(one.at_s <= two.at_s for one, two in pairwise(rows))


def test_what_goes_round_the_workload_shows_pictures_that_nobody_has_seen() -> None:
    rows = [WorkloadRequest(at_s=float(i), prompt_tokens=8, output_tokens=2, pictures=(Picture(32, 32, 7),), session=i)
            for i in range(3)]  # fmt: skip
    again = window(rows, 7, 1.0)
    assert [len({row.pictures[0].number for row in again[first : first + 3]}) for first in (0, 3)] == [1, 1]
    assert len({row.pictures[0].number for row in again}) == 3
    assert len({row.session for row in again}) == 7
    assert [row.at_s for row in window(rows, 4, None)] == [0.0] * 4


def test_a_load_repeats_pictures_or_beginnings_or_nothing() -> None:
    row = WorkloadRequest(at_s=0.0, prompt_tokens=8, output_tokens=2, pictures=(Picture(32, 32, 7),))
    other = msgspec.structs.replace(row, pictures=(Picture(32, 32, 8),))
    assert not repeats([row, other]) and repeats([row, other, row])
    assert repeats([other, msgspec.structs.replace(row, pictures=(), session=1, shared_tokens=4)])


# ---- estimates


def seconds(vision: float, prefill: float, decode: float) -> dict[str, RequestSeconds]:
    return {"fast": RequestSeconds(vision, prefill, decode)}


def candidate(text: str) -> Candidate:
    return Candidate(Topology.parse(text), text)


@pytest.mark.parametrize(
    ("topology", "rate", "stage"),
    [
        ("E@cuda:0+P@cuda:1+D@cuda:2", 1 / 0.3, "decode"),
        ("E@cuda:0+PD@cuda:1+PD@cuda:2", 2 / 0.5, "decode"),
        ("EP@cuda:0+D@cuda:1+D@cuda:2", 2 / 1.5 / 0.3, "prefill"),  # both lanes, each at 1 / 1.5 of its speed
    ],
)
def test_the_bound_is_that_of_the_stage_that_fills_its_devices(topology: str, rate: float, stage: str) -> None:
    kinds = {f"cuda:{index}": FAST for index in range(3)}
    bound = bound_of(candidate(topology), kinds, seconds(0.1, 0.2, 0.3))
    assert (bound.stage, bound.rate) == (stage, pytest.approx(rate, rel=0.01))


def test_lanes_of_one_device_do_as_much_more_than_one_as_they_gain_side_by_side() -> None:
    kinds = {"cuda:0": FAST}
    alone = bound_of(candidate("EPD@cuda:0"), kinds, seconds(0.5, 0.25, 0.25))
    assert alone.rate == pytest.approx(1 / 1.5 + 1 / 1.5, rel=0.01)  # each lane at 1 / 1.5 of its speed
    for has_mps, rate in ((False, 1.0), (True, 1 / 1.5 + 1 / 1.5)):
        shared = bound_of(
            candidate("E@cuda:0+PD@cuda:0"), {"cuda:0": replace(FAST, has_mps=has_mps)}, seconds(0.5, 0.25, 0.25)
        )
        assert shared.rate == pytest.approx(rate, rel=0.01), "processes take turns without MPS"


# ---- halving


def fake(capacities: dict[str, float]) -> object:
    """Attains all below a candidate's capacity, and less and less above."""

    def measure_all(jobs: Sequence[tuple[Candidate, float | None, int, int]]) -> list[Point]:
        points = []
        for one, rate, count, seed in jobs:
            capacity = capacities[one.name] * (1 + 0.02 * seed)
            share = min(1.0, capacity / (rate or 1.0))
            times = Spread(0.1, 0.1, 0.1)
            points.append(Point(rate=rate, seed=seed, requests=count, attainment=share, ttft_met=share, tpot_met=share,
                                ttft=times, tpot=times, requests_per_s=1.0, tokens_per_s=1.0, span_s=1.0, growth=0.0,
                                falls_behind=False, busy={}))  # fmt: skip
        return points

    return measure_all


def test_halving_keeps_the_best_and_finds_their_goodput() -> None:
    found = candidates({f"cuda:{index}": "fast" for index in range(6)})
    kinds = {f"cuda:{index}": FAST for index in range(6)}
    entries = [Entry(one, bound_of(one, kinds, seconds(0.05, 0.04, 0.06))) for one in found]
    # Some can do all that their work allows, others three quarters of it.
    capacities = {e.candidate.name: e.bound.rate * (0.75 if i % 2 else 0.95) for i, e in enumerate(entries)}
    measure_all, effort = fake(capacities), Effort(seconds=10.0, finalists=3, seeds=3)
    finalists = race(entries, measure_all, effort, quiet)  # type: ignore[arg-type]
    best = max(capacities, key=lambda name: capacities[name])
    assert len(finalists) == 3 and best in {entry.candidate.name for entry in finalists}
    measure_goodputs(finalists, measure_all, effort, quiet)  # type: ignore[arg-type]
    for entry in finalists:
        expected = capacities[entry.candidate.name] / SHARE * 1.02
        assert entry.goodput == pytest.approx(expected, rel=0.05)
        assert 0 < entry.uncertainty < 0.2 * expected


@pytest.mark.parametrize("truth", [0.02, 0.3, 0.9, 1.3])
def test_more_workers_find_the_same_goodput_in_fewer_steps(truth: float) -> None:
    one = candidate("EPD@cuda:0+EPD@cuda:1")
    measure_all, steps = fake({one.name: truth * 20.0}), []
    for workers in (1, 2, 3, 8):
        calls: list[int] = []

        def counted(jobs: Sequence[tuple[Candidate, float | None, int, int]], calls: list[int] = calls) -> list[Point]:
            calls.append(len(jobs))
            return measure_all(jobs)  # type: ignore[operator,no-any-return]

        entry, effort = Entry(one, Bound(20.0, "decode")), Effort(seconds=10.0, seeds=1, workers=workers)
        race([entry], counted, effort, quiet)
        measure_goodputs([entry], counted, effort, quiet)
        steps.append(len(calls))
        assert entry.goodput == pytest.approx(truth * 20.0 / SHARE, rel=0.04)
    assert steps[-1] <= steps[0]


@pytest.mark.parametrize(("truth", "most"), [(0.2, 11), (0.6, 7), (0.95, 2), (1.05, 2), (1.5, 6), (2.5, 10)])
def test_a_finalist_takes_few_loads_and_two_where_the_last_round_was_near(truth: float, most: int) -> None:
    one = candidate("EPD@cuda:0+EPD@cuda:1")
    measure_all = fake({one.name: truth * 20.0 * SHARE})
    entry = Entry(one, Bound(40.0, "decode"), measure_all([(one, 20.0, 60, 0)]))  # type: ignore[operator]
    measure_goodputs([entry], measure_all, Effort(seconds=10.0, seeds=1), quiet)  # type: ignore[arg-type]
    assert entry.goodput == pytest.approx(truth * 20.0, rel=0.05)
    assert len(entry.points) - 1 <= most


def test_the_first_round_is_at_a_rate_that_tells_the_good_from_the_bad() -> None:
    """The truth differs from the estimate by these factors."""
    found = candidates({f"cuda:{index}": "fast" for index in range(4)})
    kinds = {f"cuda:{index}": FAST for index in range(4)}
    for truth in (0.05, 0.4, 0.7, 1.2):
        entries = [Entry(one, bound_of(one, kinds, seconds(0.05, 0.04, 0.06))) for one in found]
        best = max(entry.bound.rate for entry in entries)
        measure_all = fake({entry.candidate.name: truth * entry.bound.rate for entry in entries})
        race(entries, measure_all, Effort(seconds=10.0), quiet)  # type: ignore[arg-type]
        assert 0.9 < min(e.points[0].rate or 0.0 for e in entries) / (truth * best / SHARE) < 1.5


def test_of_topologies_that_cannot_be_told_apart_the_simplest_wins() -> None:
    def entry(text: str, *rates: float) -> Entry:
        goodputs = [Goodput(rate, "exact") for rate in rates]
        points = fake({candidate(text).name: 10.0})([(candidate(text), 12.0, 60, 0)])  # type: ignore[operator]
        return Entry(candidate(text), Bound(1.0, "decode"), points, goodputs)

    plain = entry("EPD@cuda:0+EPD@cuda:1", 9.8, 10.0, 9.9)
    parts = entry("E@cuda:0+PD@cuda:1", 10.2, 9.9, 10.3)
    three = entry("E@cuda:0+P@cuda:0+D@cuda:1", 10.3, 10.0, 10.4)
    assert simplest([three, parts, plain]) is plain
    assert simplest([parts, three]) is parts
    sure = entry("E@cuda:0+PD@cuda:1", 10.301, 10.3, 10.302)
    assert simplest([sure, entry("EPD@cuda:0+EPD@cuda:1", 10.001, 10.0, 10.002)]) is sure, "less, beyond chance"
    assert simplest([sure, entry("EPD@cuda:0+EPD@cuda:1", 7.0, 9.9, 12.0)]) is sure, "by more than a few percent"
    assert reason(parts, plain).startswith("2% more goodput, which may be chance")


def test_a_load_lasts_as_long_as_its_requests_do_at_their_limits() -> None:
    asked = question(limits=Limits(2.0, 0.1))
    tokens = sum(row.output_tokens for row in asked.rows) / len(asked.rows)
    effort = lasting(Effort(), asked)
    assert effort.seconds == pytest.approx(2.0 + 0.1 * tokens)
    assert lasting(LITTLE, asked) is LITTLE
    assert requests_at(20.0, effort) == int(20.0 * effort.seconds)


def test_a_load_is_simulated_once() -> None:
    search = Search(question(), LITTLE, quiet, request_seconds(question()))
    job = candidate("EPD@cuda:0+EPD@cuda:1"), 6.0, 20, 0
    first, second = search([job, job])
    assert search([job]) == [first] and first is second and len(search.points) == 1


@pytest.mark.slow
def test_jobs_run_in_children_answer_in_order_and_their_failures_are_told() -> None:
    point = fake({"2EPD": 1.0})([(candidate("EPD@cuda:0+EPD@cuda:1"), 1.0, 1, 0)])[0]  # type: ignore[operator]
    jobs = [lambda seed=seed: Point(**{**_fields(point), "seed": seed}) for seed in range(7)]
    assert [one.seed for one in run_all(jobs, 3)] == list(range(7)) == [one.seed for one in run_all(jobs, 1)]

    def fails() -> Point:
        raise SimulationError("the third one has lost a request")

    with pytest.raises(SimulationError, match="the third one"):
        run_all([*jobs[:2], fails], 2)


def _fields(point: Point) -> dict[str, object]:
    return {name: getattr(point, name) for name in point.__struct_fields__}


# ---- settings


def limits(role: str) -> InstanceLimits:
    return InstanceLimits(role=role, token_budget=2048, max_num_seqs=64, image_budget=4096, kv_tokens=1 << 20)


def test_settings_are_flags_and_change_the_configuration() -> None:
    config = EngineConfig(topology="E+P+D")
    tried = settings_to_try(config, [limits("E"), limits("P"), limits("D")])
    assert [one.flags for one in tried] == [
        "--instance-limits E:image_budget=2048", "--instance-limits E:image_budget=8192",
        "--instance-limits P:token_budget=1024", "--instance-limits P:token_budget=4096",
        "--instance-limits D:max_num_seqs=32", "--instance-limits D:max_num_seqs=128",
        "--scheduling-policy sjf", "--encode-policy srpt", "--router affinity",
    ]  # fmt: skip
    assert tried[0].apply(config).for_instance("e0", Role.E).scheduler.image_budget == 2048
    assert tried[2].apply(config).for_instance("p0", Role.P).scheduler.token_budget == 1024
    assert tried[2].apply(config).for_instance("d0", Role.D).scheduler == config.scheduler
    assert tried[-1].apply(config).cluster.router == "affinity"
    limited = SchedulerConfig(token_budget=512, max_num_seqs=8, image_budget=4096, scheduling_policy="fcfs")
    given = replace(config, scheduler=limited)
    assert [one.field for one in settings_to_try(given, [limits("EPD")])] == ["encode_policy", "router"]
    assert [one.field for one in settings_to_try(given, [limits("EPD")], repeats=False)] == ["encode_policy"]
    assert "--no-steal-decodes" in {one.flags for one in settings_to_try(config, [limits("ED"), limits("PD")])}


# ---- plans of simulated deployments


def test_a_point_repeats_itself_and_says_what_was_busy() -> None:
    one = candidate("E@cuda:0+PD@cuda:1")
    points = [measure(question(), one, 6.0, 20, seed) for seed in (0, 0, 1)]
    assert points[0] == points[1] != points[2]
    assert points[0].busy.keys() == {"E", "PD"}
    assert 0 < points[0].busy["E"][0] < 1 and points[0].busy["E"][1] == 0


def test_pictures_get_as_many_decode_workers_as_they_need_and_what_lacks_them_is_named() -> None:
    asked = replace(question(), host=Host(cores=8, pixel_s=4e-6))  # a picture of 256 x 256 takes 0.26 s
    helped = with_decoders(asked)
    assert asked.config.media.decode_workers == 2 and helped.config.media.decode_workers == 8, "all there are"
    assert with_decoders(helped) is helped
    shared = replace(asked, host=Host())
    assert with_decoders(shared) is shared, "its cores are the device's"
    one = candidate("EPD@cuda:0+EPD@cuda:1")
    point = measure(asked, one, 40.0, 40)
    assert not point.keeps_limits and point.preprocessing > 0.8
    assert "preprocessing binds (decode workers busy" in misses(point)
    assert measure(helped, one, 40.0, 40).preprocessing < point.preprocessing


def test_a_load_beyond_what_can_be_done_falls_behind() -> None:
    one = candidate("E@cuda:0+PD@cuda:1")
    calm, wild = (measure(question(limits=Limits(0.2, 0.05)), one, *load) for load in ((2.0, 20), (200.0, 160)))
    assert calm.keeps_limits and not calm.falls_behind
    assert not wild.keeps_limits and wild.falls_behind and wild.growth > 0.2


@pytest.mark.slow
def test_a_load_of_a_plan_is_judged_while_it_lasts_and_ends_where_it_is_too_much() -> None:
    one = candidate("E@cuda:0+PD@cuda:1")
    asked = question(limits=Limits(0.2, 0.05))
    shorter = replace(asked, to_the_end=False)
    calm, wild = (2.0, 40), (200.0, 160)
    whole, part = measure(asked, one, *calm), measure(shorter, one, *calm)
    assert part.keeps_limits and part.attainment == pytest.approx(whole.attainment, abs=0.05)
    assert part.ttft == whole.ttft and part.requests == calm[1] and part.span_s <= whole.span_s
    whole, part = measure(asked, one, *wild), measure(shorter, one, *wild)
    assert not part.keeps_limits and part.falls_behind and part.requests < wild[1]
    assert part.span_s < 0.7 * whole.span_s and 0 < part.busy["E"][0] <= 1


def test_a_plan_names_a_winner_and_says_why_the_others_lost() -> None:
    chosen = [*pair(), candidate("EP@cuda:0+D@cuda:1")]
    plan = make_plan(question().limited(), LITTLE, quiet, chosen=chosen)
    best = plan.best
    assert best.goodput and best.goodput == max(row.goodput or 0.0 for row in plan.rows)
    assert not best.reason and all(row.reason for row in plan.rows[1:])
    assert len({(row.topology, row.settings) for row in plan.rows}) == len(plan.rows)
    assert Topology.parse(best.topology).served == EPD
    lines = plan_lines(plan, question(), ["demo", "--load-format random"], 1.0)
    assert any(line.startswith("to start    hydra-engine serve demo --load-format random --topology") for line in lines)
    assert "limits      TTFT 1000 ms, TPOT 50 ms, for 90% of the requests" in lines
    titles, units = lines[(at := lines.index("") + 1) : at + 2]
    for title, unit in (("TTFT p50", "ms"), ("TPOT p50", "ms"), ("goodput", "requests/s"), ("price", "$/h")):
        assert units[: titles.index(title) + len(title)].endswith(unit), units
    plain = replace(question(), kinds=dict.fromkeys(question().kinds, replace(FAST, price=None, hour_price=None)))
    for prices, unit in (({"hour_price": None}, "$"), ({"hour_price": None, "price": None}, None)):
        rows = [msgspec.structs.replace(row, **prices) for row in plan.rows]
        found = plan_lines(msgspec.structs.replace(plan, rows=rows), plain, ["demo"], 1.0)
        at = next(place for place, line in enumerate(found) if line.startswith("  topology"))
        assert ("price" in found[at], found[at + 1].split()[-1] == "$") == (unit == "$", unit == "$")
    assert any("rho" in line for line in explain_lines(plan, question()))


def test_a_model_without_a_tower_is_planned_and_explained() -> None:
    asked = question()
    spec, rows = replace(asked.spec, vision=None), make_load("text", 40, 1.0, 0, scale=0.25)
    asked = replace(asked, spec=spec, rows=rows, kinds={"cuda:0": FAST, "cuda:1": CHEAP})
    work = request_seconds(asked)
    one, both = (bound_of(candidate(text), asked.kinds, work) for text in ("PD@cuda:0", "PD@cuda:0+PD@cuda:1"))
    assert one.rate == pytest.approx(1 / (work["fast"].prefill + work["fast"].decode), rel=0.01)
    assert both.rate == pytest.approx(2 * one.rate, rel=0.01) and {one.stage, both.stage} <= {"prefill", "decode"}
    plan = make_plan(asked, LITTLE, quiet)
    assert plan.best.goodput and all("E" not in one.role for one in plan.limits)
    text = "\n".join([*plan_lines(plan, asked, ["demo"], 1.0), *explain_lines(plan, asked)])
    assert "encode" not in text.replace("nothing to hand over from an encode", "")
    assert "A request keeps fast busy for" in text and "A request keeps slow busy for" in text


def test_tiers_that_were_asked_for_are_compared_whatever_has_won() -> None:
    asked = replace(question(), kinds={"cuda:0": FAST, "cuda:1": CHEAP})
    alone = candidate("EPD@cuda:0+EPD@cuda:1")
    search = Search(asked, LITTLE, quiet, request_seconds(asked))
    plan = search.plan(
        "goodput", [row_of(asked, Entry(alone, Bound(1.0, "decode")), Entry(alone, Bound(1.0, "")))], alone
    )
    text = "\n".join(explain_lines(plan, asked))
    assert "gamma = 0.25 (slow at 1000 $, fast at 4000 $)" in text and text.count("with pictures. On average") == 1


def test_devices_are_named_where_they_differ() -> None:
    one = candidate("EPD@cuda:0+PD@cuda:1+PD@cuda:2")
    kinds = {"cuda:0": FAST, "cuda:1": CHEAP, "cuda:2": CHEAP}
    assert replace(question(), kinds=kinds).name_of(one) == "EPD@fast+2PD@slow"
    assert replace(question(), kinds=dict.fromkeys(kinds, FAST)).name_of(one) == "EPD+2PD"
    names = {"cuda:0": "RTX 4090", "cuda:1": "A100-80GB", "cuda:2": "RTX 4090"}
    found = candidates(names)
    assert len({each.name_on(names) for each in found}) == len(found)
    assert candidate("E@cuda:0+PD@cuda:0+EPD@cuda:1").name_on(names) == "(E-PD)@RTX4090+EPD@A100-80GB"


def test_a_request_that_waits_for_its_next_token_too_long_misses_the_limit() -> None:
    # Its keys and values have no room at the decoder: nothing but the first token has come.
    waits = Record(0, "", 0.0, 0.0, end_s=1.0, wanted_tokens=8, stamps=(0.2,), counts=(1,))
    assert not LIMITS.tpot_met(waits) and LIMITS.tpot_met(replace(waits, end_s=0.22))
    assert LIMITS.tpot_met(replace(waits, wanted_tokens=1)), "it has ended"


@pytest.mark.slow
def test_the_least_cost_is_fewer_or_cheaper_devices() -> None:
    plan = make_plan(question(3), LITTLE, quiet, "cost", 4.0)
    assert plan.best.hour_price == 4.0  # one device is enough
    mixed = replace(question(), kinds={"cuda:0": FAST, "cuda:1": CHEAP})
    assert make_plan(mixed, LITTLE, quiet, "cost", 2.0).best.hour_price == 1.0
    with pytest.raises(ConfigError, match="none of these devices keep the limits at 500 requests/s"):
        make_plan(question(1), LITTLE, quiet, "cost", 500.0)


def test_offline_is_the_earliest_last_answer() -> None:
    plan = make_plan(question(), LITTLE, quiet, "offline", chosen=[candidate("E@cuda:0+PD@cuda:0"), *pair()])
    points = [row.point for row in plan.rows if row.point is not None]
    last = [point.span_s for point in points if point.requests == LITTLE.offline]
    assert len(last) == 2 and points[0].span_s <= 1.01 * min(last)
    assert all("answers" in row.reason for row in plan.rows[1:])
    text = replace(question(1), rows=make_load("text", 40, None, 0, scale=0.25))
    same = make_plan(text, LITTLE, quiet, "offline", chosen=[candidate("E@cuda:0+PD@cuda:0"), candidate("EPD@cuda:0")])
    assert same.best.name == "EPD", "the simplest of equal ones"


def test_a_plan_for_requests_at_once_has_only_the_limits_that_were_given() -> None:
    lines = {}
    for limits in (Limits(math.inf, math.inf), Limits(1e-3, math.inf)):
        asked = replace(question(limits=limits), rows=make_load("mixed", 60, None, 0, scale=0.25))
        plan = make_plan(asked, LITTLE, quiet, "offline", chosen=pair())
        lines[limits.ttft_s] = "\n".join(plan_lines(plan, asked, ["demo"], 1.0))
        assert "later;" in plan.rows[1].reason
    assert not {"within", "limits", "slo"} & set(re.findall(r"[a-z]+", lines[math.inf]))
    assert "limits      TTFT 1 ms, for 90%" in lines[1e-3] and "--ttft-slo 1ms" in lines[1e-3]
    assert "--tpot-slo" not in lines[1e-3]


def pair() -> list[Candidate]:
    return [candidate("EPD@cuda:0+EPD@cuda:1"), candidate("E@cuda:0+PD@cuda:1")]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(0.001, 1.0), "no topology keeps the time to the first token within 1 ms: on an idle fast .*encode"),
        (Limits(10.0, 0.001), "no topology keeps the time between tokens within 1 ms: .*a decode step 4"),
    ],
)
def test_a_limit_that_an_idle_device_misses_is_refused_with_the_stage(limits: Limits, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(question(limits=limits), LITTLE, quiet)


def test_limits_of_roles_hold_where_they_are_tried() -> None:
    limited = replace(candidate("E@cuda:0+PD@cuda:1"), settings=(Setting("", "instance_limits", "PD:max_num_seqs=1"),))
    site = question().site(limited)
    assert site.config.for_instance("pd0", Role.P | Role.D).scheduler.max_num_seqs == 1
    assert measure(question(), limited, 20.0, 12).ttft.p90 > measure(question(), pair()[1], 20.0, 12).ttft.p90


def test_a_model_that_fits_no_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model fits none of these deployments"):
        make_plan(question(kind=replace(FAST, memory_bytes=GIB >> 8)), LITTLE, quiet)
