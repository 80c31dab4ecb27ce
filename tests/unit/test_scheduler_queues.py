"""The arrival queue against a sorted list, and the legal moves and derived numbers of a request's state."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hydra_engine.core.stages import Stage
from hydra_engine.core.state import ImageProgress, RequestState
from hydra_engine.scheduler.queues import ArrivalQueue
from tests.unit.sim import Img, make_request


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
        assert all((o in queue) == (o in model) for o in range(13))


def test_tokens_are_read_across_the_end_of_the_prompt() -> None:
    one = state(0, 5)
    one.generated += [91, 92, 93]
    everything = (*one.request.prompt_token_ids, 91, 92, 93)
    for start in range(9):
        for end in range(start, 9):
            assert one.tokens(start, end) == everything[start:end]


def test_the_stage_follows_from_the_integers() -> None:
    one = state(0, 2, Img(3), 2)
    assert one.stage is Stage.ENCODE and one.num_computable == 2
    one.images[0] = ImageProgress.ENCODING
    assert one.stage is Stage.ENCODE and one.num_computable == 2
    one.images[0] = ImageProgress.ENCODED
    assert one.stage is Stage.PREFILL and one.num_computable == 7
    one.num_prefilled = 7
    one.images[0] = ImageProgress.CONSUMED
    one.generated.append(1)
    assert one.stage is Stage.DECODE and one.is_decode
    one.num_prefilled = 0
    assert one.stage is Stage.PREFILL and one.num_computable == one.num_tokens == 8


def test_features_lost_in_the_middle_of_their_span_stop_prefill_where_it_is() -> None:
    one = state(0, 2, Img(6), 2)
    one.num_prefilled = 5
    assert one.num_computable == 5


def test_end_of_sequence_ids_stop_unless_ignored() -> None:
    keeps = make_request(1, 3, eos=(7, 8), stop_token_ids=(9,))
    ignores = make_request(2, 3, eos=(7, 8), stop_token_ids=(9,), ignore_eos=True)
    assert RequestState.new(keeps, 0, 0.0).stop_ids == {7, 8, 9}
    assert RequestState.new(ignores, 0, 0.0).stop_ids == {9}
