"""Accepted requests end once and with the right tokens, whatever happens: random workloads against the oracle."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.core.outputs import FinishReason
from tests.examples import examples, is_thorough
from tests.scheduler.sim import Img, Simulator, config, expected_tokens, make_request, rows_of

KV_SIZE = IMAGE_SIZE = 4


def blocks(tokens: int) -> int:
    return -(-tokens // 4)


SHARED = [Img(5, name="a"), Img(8, 20, name="b"), Img(14, 30, name="c"), Img(7, name="d", whole=True)]


@st.composite
def requests(draw, number: int, max_images: int = 3):
    """Texts and pictures of their own, or some that others have too."""
    source = draw(st.sampled_from([None, 0, 0, 1]))
    parts: list[int | Img] = [draw(st.integers(0, 9)) if source is None else draw(st.sampled_from([0, 4, 9]))]
    own = st.builds(Img, st.integers(1, 14), st.integers(1, 30), whole=st.booleans())
    for _ in range(draw(st.integers(0, max_images))):
        parts += [draw(own if source is None else st.sampled_from(SHARED)), draw(st.integers(0, 6))]
    parts[-1] = parts[-1] + 1  # never empty
    eos = range(draw(st.integers(0, 120)))
    salt = draw(st.sampled_from(["", "", "", "s"]))
    return make_request(number, *parts, max_new=draw(st.integers(1, 12)), eos=eos, source=source, salt=salt)


@st.composite
def workloads(draw, max_requests: int = 10):
    count = draw(st.integers(1, max_requests))
    times = sorted(draw(st.lists(st.floats(0, 0.5), min_size=count, max_size=count)))
    return [(time_s, draw(requests(number))) for number, time_s in enumerate(times)]


def minimum_pools(work) -> tuple[int, int]:
    """The smallest numbers of KV and image blocks with which each request and each image fits."""
    kv = max(blocks(r.num_prompt + r.max_new_tokens) for _, r in work)
    images = max((blocks(i.num_tokens) for _, r in work for i in r.images), default=0)
    return kv, images


@settings(max_examples=examples(50), deadline=None)
@given(
    workloads(),
    st.integers(1, 5),
    st.integers(1, 20),
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(0, 50),
    st.booleans(),
)
def test_with_pools_of_the_minimum_legal_size_everything_finishes_with_the_right_tokens(
    work, seqs, token_budget, image_budget, bypass, patience, reuse
):
    kv_blocks, image_blocks = minimum_pools(work)
    settings_ = config(
        max_num_seqs=seqs,
        token_budget=token_budget,
        image_budget=image_budget,
        max_bypass=bypass,
        encode_patience_s=patience / 1000,
    )
    sim = Simulator(settings_, kv_blocks=kv_blocks, image_blocks=image_blocks, reuse=reuse)
    for time_s, request in work:
        sim.submit(request, time_s)
    sim.run()
    assert not sim.refused
    sim.assert_all_right()


@settings(max_examples=examples(50), deadline=None)
@given(workloads(), st.data())
def test_under_random_aborts_and_errors_every_request_ends_exactly_once_and_the_ledger_balances(work, data):
    kv_blocks, image_blocks = minimum_pools(work)
    numbers = st.sampled_from([r.id for _, r in work])
    aborts = data.draw(st.lists(st.tuples(numbers, st.floats(0, 1.0)), max_size=5))
    bad_images = data.draw(st.sets(st.tuples(numbers, st.integers(0, 2)), max_size=2))
    bad_rows = data.draw(st.sets(st.tuples(numbers, st.integers(0, 4)), max_size=2))
    slack = data.draw(st.integers(0, 8))
    sim = Simulator(
        config(),
        kv_blocks=kv_blocks + slack,
        image_blocks=image_blocks + slack,
        reuse=data.draw(st.booleans()),
        bad_images=frozenset(bad_images),
        bad_rows=frozenset(bad_rows),
    )
    for time_s, request in work:
        sim.submit(request, time_s)
    for number, time_s in aborts:
        sim.abort(number, time_s)
    sim.run()
    touched = {n for n, _ in aborts} | {n for n, _ in bad_images} | {n for n, _ in bad_rows}
    sim.assert_all_right([r.id for _, r in work if r.id not in touched])
    for number in touched & sim.finished.keys():
        said = sim.tokens[number]
        assert said == expected_tokens(sim.requests[number])[: len(said)]
        if sim.finished[number].reason is FinishReason.ERROR:
            assert sim.finished[number].error is not None


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_many_mixed_requests_in_pools_of_one_largest_request_finish(seed):
    rng = random.Random(seed)
    work = []
    for number in range(64):
        parts: list[int | Img] = [rng.randint(1, 20)]
        for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
            parts += [Img(rng.randint(1, 24), rng.randint(1, 60)), rng.randint(1, 5)]
        work.append((rng.uniform(0, 2.0), make_request(number, *parts, max_new=rng.randint(1, 30))))
    kv_blocks, image_blocks = minimum_pools(work)
    sim = Simulator(config(), kv_blocks=kv_blocks, image_blocks=image_blocks)
    for time_s, request in sorted(work, key=lambda entry: entry[0]):
        sim.submit(request, time_s)
    sim.run()
    sim.assert_all_right()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_preemption_by_recompute_keeps_the_tokens_and_stays_rare(seed):
    """Pool of 1.2 largest requests, long outputs: right tokens, few preemptions, no runaway recompute."""
    rng = random.Random(seed)
    work = [
        make_request(n, rng.randint(1, 20), max_new=rng.randint(20, 60)) for n in range(32 if is_thorough() else 16)
    ]
    largest = max(blocks(r.num_prompt + r.max_new_tokens) for r in work)
    tight = Simulator(config(token_budget=32), kv_blocks=int(largest * 1.2))
    ample = Simulator(config(token_budget=32), kv_blocks=700)
    for sim in (tight, ample):
        for request in work:
            sim.submit(request)
        sim.run()
        sim.assert_all_right()
    assert ample.preemptions() == 0
    assert 0 < tight.preemptions() <= 2 * len(work)
    computed = sum(plan.num_tokens for _, plan in tight.language_plans)
    wanted = sum(plan.num_tokens for _, plan in ample.language_plans)
    assert computed <= 3 * wanted, "most of the work was done again"


def test_the_same_events_and_clock_give_the_same_plans():
    def plans() -> list[tuple]:
        rng = random.Random(7)
        sim = Simulator(config(), kv_blocks=24, image_blocks=8)
        for number in range(30):
            sim.submit(make_request(number, 3, Img(rng.randint(1, 20)), 4, max_new=9), rng.uniform(0, 1))
        sim.run()
        language = [
            (t, p.step_id, [(r.request_id, r.token_ids, r.start, r.block_ids.tolist()) for r in rows_of(p)])
            for t, p in sim.language_plans
        ]
        vision = [
            (t, [(i.request_id, i.image_index, i.block_ids.tolist()) for i in p.items]) for t, p in sim.vision_plans
        ]
        return [language, vision]

    assert plans() == plans()


@pytest.mark.slow
def test_no_request_starves_under_a_load_that_never_ends():
    """Large, small and illustrated requests arrive faster than they are served; each is served in bounded time."""
    rng = random.Random(3)
    sim = Simulator(config(max_bypass=4, max_queue=40, token_budget=32), kv_blocks=30, image_blocks=12)
    for number in range(400):
        parts: list[int | Img] = [rng.choice((2, 4, 80))]
        if rng.random() < 0.3:
            parts += [Img(rng.randint(4, 24)), 2]
        sim.submit(make_request(number, *parts, max_new=rng.randint(1, 8)), number * 0.02)
    first_start: dict[int, float] = {}
    sim.run()
    assert sim.refused, "the load was not too much"
    sim.assert_all_right([n for n in range(400) if n not in sim.refused])
    for time_s, plan in sim.language_plans:
        for row in rows_of(plan):
            first_start.setdefault(row.request_id, time_s)
    waits = [first_start[n] - n * 0.02 for n in first_start]
    assert max(waits) < 8 * sorted(waits)[len(waits) // 2], "somebody waited far longer than the others"


@pytest.mark.quick("[1]")
@pytest.mark.parametrize("max_bypass", [1, 4])
def test_over_random_loads_nobody_who_lacks_room_is_overtaken_more_often_than_allowed(max_bypass):
    """Counted from outside: younger requests that start between a prompt's first refusal and its own start."""
    for seed in range(5 if is_thorough() else 1):
        rng = random.Random(seed)
        sim = Simulator(config(max_bypass=max_bypass, token_budget=32), kv_blocks=26)
        for number in range(80):
            length = rng.choice((2, 4, 6, 60, 90))
            sim.submit(make_request(number, length, max_new=rng.randint(1, 10)), rng.uniform(0, 1.5))
        sim.run()
        sim.assert_all_right()
        order = {s: i for i, s in enumerate(sim.requests)}  # the order in which they were added
        started: list[int] = []
        for _, plan in sim.language_plans:
            started += [row.request_id for row in rows_of(plan) if row.start == 0 and row.num_generated == 0]
        for place, number in enumerate(started):
            if sim.finished[number].num_preemptions == 0:
                passed_by = sum(order[other] > order[number] for other in started[:place])
                assert passed_by <= max_bypass
