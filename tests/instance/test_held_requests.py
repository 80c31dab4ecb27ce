"""Requests that are held for what the worker prepares for them: they hold nothing, and nobody waits for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import EPD
from hydra_engine.core.messages import Abort, Finished, NeedImages, QueryLedger, Submit, Tokens
from hydra_engine.core.outputs import FinishReason
from hydra_engine.core.request import Request
from hydra_engine.core.results import ReadyResult
from hydra_engine.core.state import RequestPhase
from hydra_engine.errors import ErrorInfo, Unavailable
from hydra_engine.instance.instance import HOLD_S, STATUS_PERIOD_S
from hydra_engine.scheduler.handover.state import Parking, handover_of
from tests.instance.test_instance import Rig
from tests.scheduler.audit import check
from tests.scheduler.handover.handover import A, D, P, Part, arrive, end_of
from tests.scheduler.sim import Img, expected_tokens, make_request

FAILED = Unavailable("it was not ready").info()


def hold(s: Part, number: int, *parts: int | Img, max_new: int = 4, arrival_index: int = 0, **kwargs) -> Request:
    return s.put(
        make_request(number, *parts, max_new=max_new), arrival_index=arrival_index, held_for="grammar", **kwargs
    )


# ---- the scheduler


def test_what_is_held_has_no_blocks_no_features_and_no_rows_whoever_waits() -> None:
    """Slots, KV blocks and image blocks would be enough for one of them only."""
    s = Part(EPD, kv_blocks=4, image_blocks=1, max_num_seqs=1)
    hold(s, 1, A, 3)
    s.put(make_request(2, Img(4, name="c"), 3, max_new=6), arrival_index=1)
    while s.scheduler.has_work and 2 not in s.finished:
        assert s.state(1).phase is RequestPhase.HELD
        s.vision()
        s.language()
    assert s.scheduler.plan_vision(s.now) is None and s.scheduler.plan_language(s.now) is None
    status = s.scheduler.status()
    assert status.num_waiting == 1 and [(r.request_id, r.stage) for r in status.stages] == [(1, "queue")]
    s.release(1)
    s.finish_all()
    assert s.tokens[1] == expected_tokens(s.requests[1])


def test_its_pictures_are_looked_for_when_it_is_released() -> None:
    """Features that are there are not kept for it, and those that others wait for are shared again."""
    s = Part(EPD, image_blocks=2, kv_blocks=16)
    hold(s, 1, 4, A, 3)
    for number, image in ((2, A), (3, Img(8, name="b"))):  # of which the second takes all of the image cache
        s.put(make_request(number, image, 2), arrival_index=number)
        while number not in s.finished:
            s.vision(took_s=0.01)
            s.language(took_s=0.01)
    s.release(1)
    assert s.state(1).phase is RequestPhase.ENCODING
    s.finish_all()
    waits = [span.cause for span in s.finished[1].spans if span.stage == "prefill_wait"]
    assert waits[0] == "grammar" and "grammar" not in waits[1:]


def test_its_place_in_the_queue_is_that_of_its_age() -> None:
    s = Part(EPD, token_budget=8, max_num_seqs=1)
    hold(s, 1, 8, arrival_index=1)
    s.put(make_request(2, 8, max_new=2), arrival_index=2)
    s.put(make_request(3, 8, max_new=2), arrival_index=3)
    s.language()
    s.release(1)
    order = [s.language()[0][0] for _ in range(3)]
    assert order[:1] == [2] and order[1:] == [1, 1], "the one that runs goes on, then the oldest"
    s.finish_all()


@pytest.mark.parametrize("policy", ["priority", "fcfs", "sjf"])
def test_every_policy_takes_what_is_released(policy: str) -> None:
    s = Part(EPD, scheduling_policy=policy)
    hold(s, 1, A, 9)
    s.put(make_request(2, 5))
    s.release(1)
    s.release(1)  # a second time, or of one that is not held, means nothing
    s.release(2)
    s.release(7)
    s.finish_all()
    assert len(s.finished) == 2


@pytest.mark.parametrize("how", ["abort", "error"])
def test_it_ends_without_having_been_released(how: str) -> None:
    s = Part(EPD)
    hold(s, 1, A, 3)
    if how == "abort":
        s.abort(1)
    else:
        s.release(1, FAILED)
    ended = s.finished[1]
    assert ended.reason == (FinishReason.ABORT if how == "abort" else FinishReason.ERROR)
    assert ended.error == (None if how == "abort" else FAILED)
    s.release(1)
    assert not s.scheduler.has_work and s.scheduler.ledger().at_rest


# ---- between instances


def test_pictures_are_asked_of_others_when_it_is_released() -> None:
    s = Part(P)
    hold(s, 1, A, 5, external_images=frozenset({0}))
    assert s.told() == [] and s.language() == []
    s.release(1)
    assert s.told() == [NeedImages(RequestId(1), (0,))]


def test_kv_that_is_offered_meanwhile_is_fetched_when_it_is_released() -> None:
    """The held request has no blocks, so KV for others may take all of them."""
    s = Part(D, kv_blocks=4, max_num_seqs=1)
    request = hold(s, 1, 9, max_new=3, stages=D, external_kv=True)
    s.offer_kv(1, 7, 2, None)
    s.offer_kv(1, 7, 3, end_of(request))
    assert s.pulls() == [] and s.language() == [] and handover_of(s.state(1)).parking is Parking.REMOTE_PREFILL
    s.put(make_request(2, 9, max_new=3), stages=D, external_kv=True)
    arrive(s, 2, 8)
    while 2 not in s.finished:
        assert s.language() == [(2, 1)] and s.state(1).held
    s.release(1)
    s.pulled(s.pull())
    s.tokens[1] = expected_tokens(request)[:1]
    s.finish_all()


@pytest.mark.parametrize("how", ["abort", "error", "gone"])
def test_an_offer_of_what_is_held_is_let_go(how: str) -> None:
    s = Part(D)
    request = hold(s, 1, 9, stages=D, external_kv=True)
    s.offer_kv(1, 7, 3, end_of(request))
    if how == "gone":
        s.connector.pulls.on_kv_offer_gone(7)
        check(s.scheduler)
        s.release(1)
        assert handover_of(s.state(1)).parking is Parking.REMOTE_PREFILL
        s.offer_kv(1, 8, 3, end_of(request))
        assert s.pull().offer == 8
        return
    if how == "abort":
        s.abort(1)
    else:
        s.release(1, FAILED)
    assert [event.offer for event in s.told()] == [7] and not s.scheduler.has_work


# ---- the loop


class HoldingRig(Rig):
    """The worker holds some requests until the test says that they are ready."""

    def __init__(self, *held: int, **changes) -> None:
        super().__init__(look_ahead=False, **changes)
        add = self.worker.add_request

        def add_request(request: Request, pixels: object) -> str | None:
            add(request, ())
            return "grammar" if request.id in held else None

        self.worker.add_request = add_request

    def ready(self, number: int, error: ErrorInfo | None = None) -> None:
        self.worker._results.append(ReadyResult(RequestId(number), error))
        self.turn()

    def run(self) -> None:
        while self.worker.language:
            self.step(0.01)

    def ends(self) -> dict[int, Finished]:
        return {int(end.request_id): end for end in self.of(Finished)}


def test_others_go_on_while_one_is_held_and_it_begins_with_the_result() -> None:
    rig = HoldingRig(1)
    first, second = make_request(1, 5, max_new=3), make_request(2, 5, max_new=20)
    rig.submit(first)
    rig.submit(second)
    rig.turn()
    rig.run()
    assert rig.tokens() == {2: expected_tokens(second)} and set(rig.ends()) == {2}
    rig.ready(1)
    rig.run()
    assert rig.tokens()[1] == expected_tokens(first) and not rig.worker.live
    assert rig.scheduler.ledger().at_rest


def test_the_loop_sleeps_while_requests_are_held() -> None:
    rig = HoldingRig(1)
    rig.submit(make_request(1, 5))
    rig.turn()
    assert rig.instance.wait_s() == STATUS_PERIOD_S
    rig.clock.advance(HOLD_S - 0.01)
    rig.turn()
    assert rig.ends() == {} and rig.instance.wait_s() == pytest.approx(0.01)


def test_who_is_held_too_long_is_told_so_and_the_others_stay() -> None:
    rig = HoldingRig(1, 2)
    rig.submit(make_request(1, 5))
    rig.turn()
    rig.clock.advance(HOLD_S / 2)
    rig.submit(make_request(2, 5))
    rig.turn()
    rig.clock.advance(HOLD_S / 2)
    rig.turn()
    error = rig.ends()[1].error
    assert error is not None and error.kind == "Unavailable"
    assert error.message == "the grammar of this request was not ready within 60 s; try again later"
    assert set(rig.ends()) == {1} and rig.worker.live == {2}
    rig.ready(1)  # too late
    rig.ready(2)
    rig.run()
    assert rig.ends()[2].error is None and not rig.worker.live


def test_cancelling_and_refusing_leave_nothing_behind() -> None:
    rig = HoldingRig(1, 2, 3)
    rig.submit(make_request(1, Img(4), 5))
    rig.submit(make_request(2, 5))
    rig.submit(make_request(3, 500))
    rig.worker.inbox.append(Abort(RequestId(1)))
    rig.turn()
    ends = rig.ends()
    assert set(ends) == {1, 3} and ends[3].error is not None and ends[3].error.kind == "RequestTooLarge"
    rig.ready(1)
    rig.ready(2, FAILED)
    assert rig.ends()[2].error == FAILED and not rig.worker.live and not rig.of(Tokens)
    rig.worker.inbox.append(QueryLedger(1))
    rig.turn()
    assert rig.worker.sent[-1].at_rest and rig.instance.wait_s() == STATUS_PERIOD_S


def test_what_the_worker_does_not_take_is_refused() -> None:
    rig = HoldingRig()

    def full(request: Request, pixels: object) -> None:
        raise Unavailable("too many grammars are waiting; try again later")

    rig.worker.add_request = full
    rig.worker.inbox.append(Submit(replace(make_request(1, 5))))
    rig.turn()
    assert rig.ends()[1].error is not None and not rig.scheduler.has_work
