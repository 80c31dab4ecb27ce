"""The queues against sorted lists, who has overtaken whom, and the derived numbers of a request's state."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hydra_engine.core.request import Slo
from hydra_engine.core.state import ImageProgress, RequestState
from hydra_engine.scheduler.queues import ArrivalQueue, StartedOrders, UrgencyQueue
from tests.scheduler.sim import Img, make_request


def state(order: int, *parts) -> RequestState:
    return RequestState.new(make_request(order, *(parts or (4,)), max_new=8), order, 0.0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_the_queue_is_always_in_order_of_arrival(calls) -> None:
    queue, model = ArrivalQueue(), {}
    for push, order in calls:
        if push and order not in model:
            model[order] = state(order)
            queue.push(model[order])
        elif not push and order in model:
            queue.discard(model.pop(order))
        expected = [model[o] for o in sorted(model)]
        assert list(queue) == expected and len(queue) == len(expected)
        assert queue.oldest() is (expected[0] if expected else None)
        assert queue.youngest() is (expected[-1] if expected else None)
        assert all((state(o) in queue) == (o in model) for o in range(13))


def ranked(order: int, priority: int, ttft_s: float | None) -> RequestState:
    request = replace(make_request(order, 4), priority=priority, slo=Slo(ttft_s=ttft_s), arrival_s=float(order))
    return RequestState.new(request, order, 0.0)


RANKS = st.tuples(st.integers(-1, 1), st.sampled_from([None, 0.5, 20.0]))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=50), st.lists(RANKS, min_size=10, max_size=10))
def test_urgency_is_priority_then_due_time_then_arrival(calls, ranks) -> None:
    queue, model = UrgencyQueue(), {}
    for push, order in calls:
        if push and order not in model:
            model[order] = ranked(order, *ranks[order])
            queue.push(model[order])
        elif not push and order in model:
            queue.discard(model.pop(order))
        by_urgency = sorted(model.values(), key=lambda s: (s.request.priority, s.due_s, s.order))
        assert list(queue.by_urgency()) == by_urgency and list(queue) == [model[o] for o in sorted(model)]
        assert queue.is_ranked == any(ranks[o] != (0, None) for o in model)


@given(st.lists(st.integers(0, 20), unique=True), st.randoms(use_true_random=False))
def test_queues_may_change_while_they_are_walked_through(orders, rng) -> None:
    """A walk meets a request once if it stays all the time, and not if it leaves before its turn."""
    for walk in ("by_age", "by_urgency"):
        queue = UrgencyQueue()
        states = {order: ranked(order, rng.choice((0, 1)), None) for order in orders}
        for one in states.values():
            queue.push(one)
        met, gone = [], set()
        for one in getattr(queue, walk)():
            assert one.order not in gone
            met.append(one.order)
            for other in list(states.values()):
                if rng.random() < 0.2 and other.order not in gone:
                    queue.discard(other)
                    gone.add(other.order)
        assert len(met) == len(set(met)) and set(met) | gone == {(0, order) for order in orders}


@given(st.lists(st.tuples(st.sampled_from(["arrive", "start", "return"]), st.integers(0, 9)), max_size=60))
def test_overtaking_is_counted_exactly_and_what_nobody_can_ask_for_is_forgotten(calls) -> None:
    started = StartedOrders()
    waiting: dict[int, tuple[int, int]] = {}  # order -> (younger ones at the beginning, truth since then)
    running: list[int] = []
    arrived = 0
    for what, place in calls:
        if what == "arrive":
            waiting[arrived] = started.younger_than(arrived), 0
            arrived += 1
        elif what == "start" and waiting:
            order = sorted(waiting)[place % len(waiting)]
            del waiting[order]
            running.append(order)
            started.add(order, min(waiting, default=None))
            waiting = {o: (first, truth + (order > o)) for o, (first, truth) in waiting.items()}
        elif what == "return" and running:
            order = running.pop(place % len(running))
            waiting[order] = started.younger_than(order), 0
        for order, (first, truth) in waiting.items():
            assert started.younger_than(order) - first == truth
    if not waiting and running:
        assert started.younger_than(-1) == 0


def test_tokens_are_read_across_the_end_of_the_prompt() -> None:
    one = state(0, 5)
    one.generated += [91, 92, 93]
    everything = (*one.request.prompt_token_ids, 91, 92, 93)
    for start in range(9):
        for end in range(start, 9):
            assert one.tokens(start, end) == everything[start:end]


def test_what_can_be_computed_follows_from_the_integers() -> None:
    one = state(0, 2, Img(3), 2)
    assert one.waits_for_images and one.num_computable == 2
    one.images[0] = ImageProgress.ENCODING
    assert one.waits_for_images and one.num_computable == 2
    one.images[0] = ImageProgress.ENCODED
    assert not one.waits_for_images and not one.is_decode and one.num_computable == 7
    one.num_prefilled = 7
    one.images[0] = ImageProgress.CONSUMED
    one.generated.append(1)
    assert one.is_decode
    one.num_prefilled = 0
    assert not one.is_decode and one.num_computable == one.num_tokens == 8


def test_features_lost_in_the_middle_of_their_span_stop_prefill_where_it_is() -> None:
    one = state(0, 2, Img(6), 2)
    one.num_prefilled = 5
    assert one.num_computable == 5


def test_end_of_sequence_ids_stop_unless_ignored() -> None:
    keeps = make_request(1, 3, eos=(7, 8), stop_token_ids=(9,))
    ignores = make_request(2, 3, eos=(7, 8), stop_token_ids=(9,), ignore_eos=True)
    assert RequestState.new(keeps, 0, 0.0).stop_ids == {7, 8, 9}
    assert RequestState.new(ignores, 0, 0.0).stop_ids == {9}
