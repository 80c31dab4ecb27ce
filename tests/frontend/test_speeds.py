"""Instances of different speed: what the frontend learns of them from their steps, and what each then gets."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.cost import Curve
from hydra_engine.core.instances import Role
from hydra_engine.core.plans import LanguageLoad
from hydra_engine.core.reports import StepSpeeds
from hydra_engine.frontend.request import Charge
from hydra_engine.frontend.routing.estimate import Estimate
from hydra_engine.frontend.routing.instances import Instances
from hydra_engine.frontend.routing.pace import ALIKE, Line, Pace, slowness
from hydra_engine.frontend.routing.router import Route, Router
from hydra_engine.scheduler.latency.latency_budget import LatencyBudgets
from hydra_engine.scheduler.step_stats import SpeedMeter
from tests.examples import examples
from tests.frontend.rig import make_request
from tests.frontend.test_router import routed, status, table
from tests.scheduler.surface import make_surface

factors = st.floats(1.0, 10.0)
sizes = st.sets(st.integers(0, 12), min_size=1)


def seconds(size: int) -> float:
    """Seconds of a step on the fastest device, which reads the weights whatever its size."""
    return 0.005 + 1e-5 * (1 << size)


# ---- who is how slow


@given(st.lists(st.tuples(factors, sizes), min_size=1, max_size=6))
def test_devices_are_told_apart_whatever_the_sizes_of_their_steps(devices: list[tuple[float, set[int]]]) -> None:
    """Devices need one size of step in common with the first."""
    common = {size for _, own in devices for size in own}
    taken = {f"i{n}": {s: f * seconds(s) for s in (own if n else common)} for n, (f, own) in enumerate(devices)}
    found, _ = slowness(taken)
    least = min(factor for factor, _ in devices)
    for number, (factor, _) in enumerate(devices):
        expected = factor / least if len(devices) > 1 else 1.0
        if not 0.85 * ALIKE < expected < 1.15 * ALIKE:
            assert found[f"i{number}"] == pytest.approx(expected if expected > ALIKE else 1.0, rel=0.15)


@given(st.lists(sizes, min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_equal_devices_stay_equal(seen: list[set[int]], random: object) -> None:
    """Steps of one size vary a little; one device has had large steps only, another small ones."""
    taken = {
        f"i{n}": {s: seconds(s) * random.uniform(0.95, 1.05) for s in own}  # type: ignore[attr-defined]
        for n, own in enumerate(seen)
    }
    assert set(slowness(taken)[0].values()) == {1.0}


def test_what_cannot_be_compared_counts_as_fast() -> None:
    assert slowness({}) == ({}, {})
    found, by_size = slowness({"a": {}, "b": {3: 1.0}, "c": {4: 2.0}})
    assert found == {"a": 1.0, "b": 1.0, "c": 1.0} and by_size == pytest.approx({3: 1.0, 4: 2.0})
    found, _ = slowness({"a": {}, "b": {3: 1.0}, "c": {4: 9.0}})
    assert found == {"a": 1.0, "b": 1.0, "c": pytest.approx(4.5)}, "twice the rows take twice as long at most"
    chain, _ = slowness({"a": {3: 1.0}, "b": {3: 2.0, 4: 2.0}, "c": {4: 4.0}})
    assert chain == {"a": 1.0, "b": pytest.approx(2.0, rel=0.05), "c": pytest.approx(4.0, rel=0.05)}


def test_an_instance_learns_its_own_speed() -> None:
    meter = SpeedMeter()
    for _ in range(3):
        meter.on_language(LanguageLoad(num_decodes=8), 0.01, 0.0)
    assert meter.report() == StepSpeeds()
    for duration_s, vision_s in ((5.0, 0.0), (0.01, 0.0), (0.09, 0.05)):  # one was stopped, one had vision beside it
        meter.on_language(LanguageLoad(num_decodes=8), duration_s, vision_s)
        meter.on_language(LanguageLoad(num_decodes=8, prefill_tokens=500), 0.04, vision_s)
        meter.on_vision(1000, 0.2)
    report = meter.report()
    assert report.decode.keys() == {4} and report.decode[4] < 0.013
    assert report.prefill == {} and report.vision == {}
    meter.on_vision(1000, 0.2)
    assert meter.report().vision == {10: pytest.approx(0.2)}


def test_sizes_that_no_step_had_are_as_expected_and_as_much_slower_as_those_that_some_had() -> None:
    expected = StepSpeeds({10: 0.04, 11: 0.08}, {3: 0.01, 4: 0.011}, {})
    meter = SpeedMeter(expected)
    assert meter.report() == expected
    for _ in range(4):
        meter.on_language(LanguageLoad(num_decodes=4), 0.02, 0.0)
        meter.on_language(LanguageLoad(num_decodes=40), 0.03, 0.0)
    report = meter.report()
    assert report.prefill == expected.prefill
    assert report.decode == pytest.approx({3: 0.02, 4: 0.022, 6: 0.03})


def test_reports_of_all_instances_are_compared_by_kind_and_forgotten_with_a_death() -> None:
    instances = Instances(dict.fromkeys(("a", "b"), Role.parse("EPD")), lambda name, messages: None)
    speeds = StepSpeeds({9: 0.1}, {4: 0.01}, {10: 0.2}), StepSpeeds({9: 0.3}, {4: 0.011}, {10: 0.5})
    for name, own in zip(instances, speeds, strict=True):
        instances.on_status(name, status(speeds=own))
    slow = instances["b"]
    fast = instances["a"].pace
    assert slow.pace.prefill == pytest.approx(fast.prefill.times(3.0)) and slow.pace.decode == fast.decode
    assert slow.pace.vision == pytest.approx(fast.vision.times(2.5))
    slow.prefill_tokens = instances["a"].prefill_tokens = 100
    slow_s, fast_s = (Estimate(instances[name]).prefilled_s(50, 0) for name in ("b", "a"))
    assert slow_s == pytest.approx(3 * fast_s)
    instances.mark_down("b", restarts=True)
    instances.on_status("a", status(speeds=speeds[0]))
    instances.on_status("a", status(speeds=speeds[0]))
    assert slow.pace == instances["a"].pace


# ---- who gets what


@settings(max_examples=examples(60), deadline=None)
@given(st.floats(ALIKE, 8.0), st.lists(st.integers(10, 400), min_size=30, max_size=60))
def test_load_is_shared_by_speed(factor: float, prompts: list[int]) -> None:
    """Prompts that all wait: tokens go as 1 to the factor, but for the last prompt."""
    instances = table("2P+D")
    instances["p0"].pace = Pace(prefill=Line(0.0, 1e-4))
    instances["p1"].pace = Pace(prefill=Line(0.0, factor * 1e-4))
    router = Router(instances)
    for number, tokens in enumerate(prompts):
        request = make_request(number, prompt=tokens)
        route = router.route(request)
        assert isinstance(route, Route)
        Charge(instances[route.prefill], prefill_tokens=request.num_prompt)
    fast, slow = instances["p0"].prefill_tokens, instances["p1"].prefill_tokens
    assert fast + slow == sum(prompts)
    assert abs(fast - factor * slow) <= factor * max(prompts)


@settings(max_examples=examples(60), deadline=None)
@given(st.floats(ALIKE, 8.0), st.integers(40, 120))
def test_decodes_and_pictures_are_shared_by_speed(factor: float, count: int) -> None:
    """Steps take the time of their rows."""
    instances = table("2E+P+2D")
    for name, instance in instances.items():
        decode, vision = (Line(0.0, factor * 1e-5 if name == slow else 1e-5) for slow in ("d0", "e1"))
        instance.pace = Pace(decode=decode, vision=vision, context=16.0)
    router = Router(instances)
    for number in range(count):
        request = make_request(number, images=[16])
        route = router.route(request)
        assert isinstance(route, Route)
        decoder = router.decoder(route.prefill, request.num_prompt)
        assert isinstance(decoder, str)
        Charge(instances[decoder], decode_tokens=request.num_prompt)
        chosen = router.encoders("p0", list(enumerate(request.images)))
        assert isinstance(chosen, dict)
        Charge(instances[next(iter(chosen))], patches=16)
    assert abs(instances["d1"].decodes - factor * instances["d0"].decodes) <= factor
    assert abs(instances["e0"].patches - factor * instances["e1"].patches) <= 16 * factor


@pytest.mark.parametrize(("room", "least", "most"), [(0, 10, 25), (40, 1, 6)])
def test_of_prompts_that_all_wait_as_many_decodes_move_as_are_done_soonest(room: int, least: int, most: int) -> None:
    """A decoder has no decodes before the first prefill begins, and then more than its KV cache has room for."""
    instances = table("D+PD")
    instances["d0"].kv_tokens = room
    router, moved = Router(instances), 0
    for number in range(40):
        request = make_request(number)
        route = router.route(request)
        assert isinstance(route, Route) and route.prefill == "pd0"
        moved += route.moves
        Charge(instances["pd0"], prefill_tokens=request.num_prompt, decodes_later=not route.moves)
        at = instances[route.decode or route.likely_decoder]
        Charge(at, decode_tokens=request.num_prompt, is_expected=route.moves)
    assert least <= moved <= most


def test_prompts_before_any_step_are_shared_by_what_instances_expect() -> None:
    instances = Instances(dict.fromkeys(("a", "b"), Role.parse("EPD")), lambda name, messages: None)
    for name, factor in (("a", 1.0), ("b", 3.0)):
        instances.mark_up(name)
        config = SchedulerConfig(tpot_slo=0.1)
        surface = make_surface(rows=Curve((1, 1024), (factor * 0.005, factor * 0.066)))
        instances.on_status(name, status(speeds=LatencyBudgets(surface, config, num_slices=0).speeds()))
    router, tokens = Router(instances), {"a": 0, "b": 0}
    for number in range(40):
        request = make_request(number, prompt=500)
        route = router.route(request)
        assert isinstance(route, Route)
        Charge(instances[route.prefill], prefill_tokens=request.num_prompt)
        tokens[route.prefill] += request.num_prompt
    assert 2.5 < tokens["a"] / tokens["b"] < 3.5


def test_a_decode_waits_for_the_copies_that_come_first_as_far_as_they_are_not_done_by_then() -> None:
    instances = table("2P+D")
    decoder = instances["d0"]
    decoder.pace = Pace(decode=Line(0.01, 0.0), kv_token_s=1e-5, chunk_s=0.05)

    def copied_s(ready_s: float) -> float:
        estimate = Estimate(decoder, ahead=True)
        return estimate.arrive(1000, (0.0, 0.0, 0.01), ready_s)[1]

    assert copied_s(0.0) == pytest.approx(0.01), "only its own"
    decoder.expected_tokens = 10000
    assert copied_s(0.0) == pytest.approx(0.11)
    assert copied_s(1.0) == pytest.approx(0.01 + 0.1 * 0.06 / 0.9), "a tenth of the time is taken by others"
    decoder.expected_tokens, decoder.arriving_tokens = 5000, 5000
    assert copied_s(1.0) == pytest.approx(0.06), "those that come now may come together with it"
    assert Estimate(decoder).arrive(1000, (0.0, 0.0, 0.01))[1] == pytest.approx(0.06), "expected ones come later"


def test_a_decode_that_comes_waits_for_prompts_and_copies_that_are_not_done_by_then() -> None:
    decoder = table("P+PD")["pd0"]
    decoder.pace = Pace(Line(0.0, 1e-4), Line(0.01, 0.0), kv_token_s=1e-5, limit_s=0.1)

    def late_s(ready_s: float) -> float:
        return Estimate(decoder).arrive(5000, (0.0, 0.0, 0.01), ready_s)[0]

    assert late_s(0.0) == late_s(0.3) == 0.0
    decoder.prefill_tokens = 3000
    assert late_s(0.1) == pytest.approx(0.01), "its copy, half of a step with prompts, its own step"
    assert late_s(0.3) == 0.0, "the prompts are computed"
    decoder.prefill_tokens, decoder.arriving_tokens = 3000, 5000
    assert late_s(0.1) == pytest.approx(0.01), "what has been copied since waits for the same step"
    decoder.arriving_tokens = 7000
    assert late_s(0.1) == pytest.approx(0.03)


@pytest.mark.parametrize("limit_s", [0.1, math.inf])
def test_no_decode_stays_beside_prompts_that_keep_coming_to_the_only_one_that_prefills(limit_s: float) -> None:
    instances = table("PD+D")
    prefiller, decoder = instances["pd0"], instances["d0"]
    for one in (prefiller, decoder):
        one.pace = Pace(Line(0.0, 1e-4), Line(0.01, 0.0), limit_s=limit_s)
    prefiller.decodes, decoder.decodes = 1, 6
    router, request = Router(instances), make_request(1, prompt=500)

    def stays() -> bool:
        route = router.route(request)
        assert isinstance(route, Route)
        return not route.moves

    assert stays()
    prefiller.prefill_tokens = 5000
    assert stays(), "no answer has ended: the prompts have come at once, and no others will"
    router.arrivals.on_answer(router.arrivals.count - 1, 1)
    assert not stays()
    prefiller.prefill_tokens = 0
    assert stays(), "those that come do not wait"


def test_short_answers_stay_away_from_the_decoder_where_others_would_wait_for_their_prompts() -> None:
    instances = table("P+PD")
    decoder = instances["pd0"]
    for one in instances.values():
        one.pace = Pace(Line(0.0, 1e-4), Line(0.01, 0.0), chunk_s=0.1, limit_s=0.1)
    instances["p0"].prefill_tokens, decoder.expected_decodes, decoder.expected_tokens = 2000, 4, 2000

    def late_s(left: int) -> float:
        return Estimate(decoder, ahead=True).delayed_s(500, 0.2, left)

    assert late_s(2) == pytest.approx(4 * 0.05 * 0.05 / 0.2), "a quarter of four decodes, half of a step each"
    assert late_s(3) == 0.0, "its next step is shorter than the limit by more"
    assert Estimate(decoder).late_s == 0.0, "this instant none is on its way"

    def prefills(answer: int) -> str:
        return routed(instances, make_request(1, prompt=500, max_new=answer)).prefill

    assert prefills(2) == "p0" and prefills(3) == "pd0"
    decoder.expected_decodes = decoder.expected_tokens = 0
    assert prefills(2) == "pd0"


def test_pictures_leave_a_slow_instance_where_another_is_done_sooner() -> None:
    instances = table("EP+E+D")
    instances["ep0"].patches, instances["e0"].patches = 10, 10
    picture = make_request(2, images=[16])

    def remote() -> bool:
        route = Router(instances).route(picture)
        assert isinstance(route, Route)
        return route.remote_images

    assert not remote()
    slow = Pace(vision=Line(2e-3, 2e-3))
    instances["ep0"].pace = slow
    assert remote()
    instances["e0"].pace = slow
    assert not remote()


loads = st.tuples(st.integers(0, 3000), st.integers(0, 3000), st.integers(0, 20), st.integers(0, 99))


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(loads, min_size=2, max_size=6), st.floats(1.0, 1.2))
@example([(0, 0, 0, 0), (0, 0, 1, 0)], 1.0)
def test_equal_devices_are_not_preferred_for_what_they_report(
    counts: list[tuple[int, int, int, int]], noise: float
) -> None:
    """Steps that differ by no more than equal devices do change no choice."""

    def chosen(noise: float) -> str:
        instances = Instances({f"i{n}": Role.parse("EPD") for n in range(len(counts))}, lambda name, messages: None)
        for number, (one, (prefill, held, decodes, nearly)) in enumerate(zip(instances.values(), counts, strict=True)):
            instances.mark_up(one.name)
            one.prefill_tokens, one.decode_tokens, one.decodes = prefill, held * (decodes > 0), decodes
            own = StepSpeeds({9: 0.1 * (noise if number % 2 else 1.0)})
            instances.on_status(one.name, status(kv_blocks_used=nearly, speeds=own))
        route = Router(instances).route(make_request(1))
        assert isinstance(route, Route)
        return route.prefill

    assert chosen(noise) == chosen(1.0)
