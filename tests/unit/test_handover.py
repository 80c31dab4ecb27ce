"""Parts of requests: encode jobs, images from elsewhere, KV that moves on or arrives, decodes that are lent.

One scheduler at a time; the test is the other instance. Tokens of whole clusters are in `test_cluster_machine.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.cache.manager import CacheManager
from hydra_engine.config import ClusterConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import Finished, NeedDecoder, NeedImages, Tokens
from hydra_engine.core.outputs import Departure, FinishReason
from hydra_engine.core.plans import KvEnd, PullPlan
from hydra_engine.core.request import Request
from hydra_engine.core.roles import EPD, Role
from hydra_engine.core.state import ImageProgress, RequestPhase
from hydra_engine.scheduler.handover.connector import PeerConnector
from hydra_engine.scheduler.handover.events import FeaturesEvent, FeaturesGoneEvent, KvEvent, KvGoneEvent, UnneededEvent
from hydra_engine.scheduler.latency.attribution import StepHistory
from hydra_engine.scheduler.policy import MAX_IMAGE_PULLS, STEAL_PATIENCE_S, part_end
from hydra_engine.scheduler.scheduler import StageScheduler
from hydra_engine.worker.language.sampler import SamplingState
from tests.examples import examples
from tests.unit.sim import Img, expected_tokens, feature, make_request
from tests.unit.stepper import Stepper

WAITING, ENCODING, ENCODED = ImageProgress.WAITING, ImageProgress.ENCODING, ImageProgress.ENCODED
CACHED, CONSUMED = ImageProgress.CACHED, ImageProgress.CONSUMED
E, P, D = Role.E, Role.P, Role.D
ALL_ON = ClusterConfig()
A, B = Img(4, name="a"), Img(8, name="b")


class NoOracle:
    """The one of `Stepper` knows only what is computed here."""

    def look(self) -> None: ...

    def language_ends(self, *args) -> None: ...


class Part(Stepper):
    """An instance of some role. A test plays the others: it sees events with `told` and does what they would do."""

    def __init__(
        self, role: Role, *, kv_blocks: int = 64, image_blocks: int = 64, cluster: ClusterConfig = ALL_ON, **changes
    ) -> None:
        super().__init__(kv_blocks=kv_blocks, image_blocks=image_blocks, **changes)
        kv, images = CacheManager(kv_blocks, 4), CacheManager(image_blocks, 4)
        self.connector = PeerConnector(self.config, cluster)
        self.scheduler = StageScheduler(
            role, kv, images, self.config, instance="test", observer=StepHistory(), connector=self.connector
        )
        self.oracle = NoOracle()

    def put(self, request: Request, *, age: int = 0, **kwargs) -> Request:
        request = replace(request, age=age)
        self.requests[request.id] = request
        self.scheduler.add(request, self.now, **kwargs)
        self.scheduler.check()
        return request

    def job(self, number: int, *images: Img, age: int = 0, at: int = 0) -> None:
        request = make_request(number, *([at] if at else []), *images)
        self.put(replace(request, prompt_token_ids=()), age=age, stages=E)

    def told(self) -> list:
        events = self.connector.take_events()
        self._collect([event for event in events if isinstance(event, Finished)])
        return events

    def pulls(self) -> list[PullPlan]:
        plans = self.connector.pulls.plan(self.now)
        self.scheduler.check()
        return plans

    def pull(self) -> PullPlan:
        (plan,) = self.pulls()
        return plan

    def pulled(self, plan: PullPlan, *, valid: bool = True, took_s: float = 0.0) -> list:
        """What the source holds is written here, as a copy would."""
        request = self.requests[plan.request_id]
        if plan.image_index is not None:
            image = request.images[plan.image_index]
            rows = [feature(image.digest, row) for row in range(image.num_tokens)]
            memory, first = self.lanes._images, 0
        else:
            rows = context_of(request)
            memory, first = self.lanes._kv, plan.first_block
        for place, block in enumerate(plan.block_ids.tolist(), first):
            part = rows[place * 4 : place * 4 + 4]
            memory[block * 4 : block * 4 + len(part)] = part
        started_s, self.now = self.now, self.now + took_s
        times = {"started_s": started_s, "ended_s": self.now}
        return self._collect(self.connector.on_pull(plan.step_id, self.now, valid=valid, **times))

    def offer_kv(self, number: int, offer: int, num_blocks: int, end: KvEnd | None = None) -> None:
        self.connector.pulls.kv_offered(RequestId(number), offer, num_blocks, end)
        self.scheduler.check()

    def offer_image(self, number: int, index: int, offer: int) -> None:
        self.connector.pulls.images.offered(RequestId(number), index, offer)
        self.scheduler.check()


def context_of(request: Request) -> list[int]:
    """What the KV of prompt and answer stands for."""
    context = list(request.prompt_token_ids)
    for image in request.images:
        context[image.start : image.end] = [feature(image.digest, row) for row in range(image.num_tokens)]
    return context + expected_tokens(request)


def end_of(request: Request, num_generated: int = 1, **kwargs) -> KvEnd:
    tokens = expected_tokens(request)
    return KvEnd(request.num_prompt + num_generated - 1, tokens[num_generated - 1], 0.0, 0.0, **kwargs)


# ---- order


def test_age_goes_before_arrival() -> None:
    s = Part(EPD, token_budget=4)
    s.put(make_request(1, 8), age=7)
    s.put(make_request(2, 8), age=3)
    s.put(make_request(3, 8), age=3)
    assert s.language() == [(2, 4)] and s.language() == [(2, 4)]
    assert s.language()[-1][0] == 3


def test_an_older_request_that_comes_later_takes_room_from_one_that_stands_before_an_image() -> None:
    s = Part(EPD, kv_blocks=4, token_budget=32)
    s.put(make_request(1, 10, Img(4), max_new=2), age=5)
    assert s.language() == [(1, 10)]
    s.put(make_request(2, 8, max_new=2), age=6)
    s.language()
    assert s.state(1).num_preemptions == 0, "a younger one takes nothing"
    s.put(make_request(3, 12, max_new=2), age=1)
    s.language()
    assert s.state(1).num_preemptions == 1
    s.finish_all()


# ---- where requests are, for a person


def reported(part: Part) -> list[tuple[object, ...]]:
    return [(r.request_id, r.stage, r.done, r.of) for r in part.scheduler.status().stages]


def test_what_requests_wait_for_is_reported_with_how_far_it_is() -> None:
    s = Part(EPD, kv_blocks=8, token_budget=6, image_budget=4, max_num_seqs=1)
    s.put(make_request(1, A, 2, Img(4, name="c"), 4, max_new=3))
    s.put(make_request(2, 5, max_new=2))
    assert reported(s) == [(1, "queue", 0, 2), (2, "queue", None, None)]
    plan = s.plan_vision()
    assert reported(s)[0] == (1, "encode", 0, 2)
    s.end_vision(plan)
    assert reported(s)[0] == (1, "queue", 1, 2)
    s.vision()
    s.language()
    assert reported(s)[0] == (1, "prefill", 6, 14)
    s.language()
    s.language()
    assert reported(s) == [(2, "queue", None, None)], "one that gets tokens waits for nothing"
    s.finish_all()


def test_jobs_and_what_comes_from_elsewhere_are_reported_too() -> None:
    e = Part(E, kv_blocks=0)
    e.job(1, A, B)
    plan = e.plan_vision()
    assert reported(e) == [(1, "encode", 0, 2)]
    e.end_vision(plan)
    assert reported(e) == [(1, "transfer", None, None)]
    p = Part(P | D)
    p.put(make_request(1, A, 2, max_new=2), stages=P | D)
    p.told()
    assert reported(p) == [(1, "queue", 0, 1)]
    p.offer_image(1, 0, 7)
    pull = p.pull()
    assert reported(p) == [(1, "transfer", 0, 1)]
    p.pulled(pull)
    p.language()
    p.put(make_request(2, 8, max_new=2), stages=D, pulls_kv=True)
    assert reported(p) == [(2, "transfer", None, None)]


# ---- encode jobs


def test_an_encode_job_offers_each_image_and_ends_when_all_are_released() -> None:
    s = Part(E, kv_blocks=0)
    s.job(1, A, B)
    assert s.scheduler.plan_language(0.0) is None and s.scheduler.status().num_encoding == 1
    assert s.vision() == [(1, 0), (1, 1)]
    first, second = s.told()
    assert (first.image_index, len(first.block_ids)) == (0, 1)
    assert (second.image_index, len(second.block_ids)) == (1, 2)
    s.now = 2.0
    assert not s.connector.offers.release_features(RequestId(1), 1, s.now)
    assert not s.connector.offers.release_features(RequestId(1), 1, s.now), "once is enough"
    assert s.scheduler.ledger().image_blocks_held == 1
    s.now = 3.0
    s._collect(s.connector.offers.release_features(RequestId(1), 0, s.now))
    assert s.finished[1].reason == Departure.MOVED and not s.told()
    offered = [
        (span.start_s, span.end_s, span.tokens) for span in s.finished[1].spans if span.stage.startswith("offered")
    ]
    assert offered == [(0.0, 2.0, 8), (0.0, 3.0, 4)]
    assert not s.scheduler.has_work and not s.scheduler.ledger().holders


def test_a_job_offers_what_is_cached_already_and_what_another_one_encodes() -> None:
    s = Part(E, kv_blocks=0)
    s.job(1, A)
    s.job(2, A)
    assert s.vision() == [(1, 0)]
    assert [event.request_id for event in s.told()] == [1, 2]
    s.job(3, A)
    assert isinstance(s.told()[0], FeaturesEvent) and s.plan_vision() is None
    for number in (1, 2, 3):
        s._collect(s.connector.offers.release_features(RequestId(number), 0, 0.0))
    s.job(4, A)
    assert isinstance(s.told()[0], FeaturesEvent), "they stay until their room is needed"
    assert s.finished[2].cached_images == 1


def test_features_that_give_way_are_encoded_and_offered_again() -> None:
    s = Part(E, kv_blocks=0, image_blocks=2)
    s.job(1, B, age=5)
    s.vision()
    s.told()
    s.job(2, B, Img(4), age=6)
    s.job(3, Img(8), age=1)
    assert s.vision() == [(3, 0)]
    shared, *gone, offered = s.told()
    assert gone == [FeaturesGoneEvent(RequestId(1), 0), FeaturesGoneEvent(RequestId(2), 0)]
    assert (shared.request_id, offered.request_id) == (2, 3)
    assert s.plan_vision() is None
    s._collect(s.connector.offers.release_features(RequestId(3), 0, 0.0))
    assert s.vision() == [(1, 0)] and [event.request_id for event in s.told()] == [1, 2]


@pytest.mark.parametrize("how", ["abort", "withdraw"])
def test_a_job_that_ends_takes_back_what_it_has_offered(how: str) -> None:
    s = Part(E, kv_blocks=0, image_budget=4)
    s.job(1, A, B)
    s.vision()
    s.told()
    plan = s.plan_vision()
    events = (
        s.scheduler.abort(1, 1.0) if how == "abort" else s.connector.offers.withdraw(RequestId(1), 1.0, "lease over")
    )
    assert not events, "a plan in flight names it"
    assert s.told() == [FeaturesGoneEvent(RequestId(1), 0)]
    s.end_vision(plan)
    assert s.finished[1].reason == (FinishReason.ABORT if how == "abort" else Departure.WITHDRAWN)
    assert not s.told() and not s.scheduler.has_work
    if how == "withdraw":
        assert [span.cause for span in s.finished[1].spans if span.stage.startswith("offered")] == ["lease over"]


def test_an_image_that_fails_ends_its_job() -> None:
    s = Part(E, kv_blocks=0)
    s.job(1, A)
    s.vision(bad=(1,))
    assert s.finished[1].reason == FinishReason.ERROR and not s.told()


def test_jobs_leave_room_for_the_largest_image_of_a_request_that_is_here() -> None:
    s = Part(E | P, image_blocks=5, image_budget=64)
    for number in (1, 2, 3):
        s.job(number, Img(8), age=number)
    s.put(make_request(4, Img(8), 1), age=4)
    assert s.vision() == [(1, 0), (4, 0)], "two blocks for it, so three for jobs"
    s.language()
    s.job(5, Img(4), age=5)
    assert s.vision() == [(2, 0)], "nobody here waits for an image any more"


def test_a_job_too_large_for_that_goes_by_age_alone() -> None:
    s = Part(E | P, image_blocks=3, image_budget=64)
    s.job(1, Img(12), age=1)
    s.put(make_request(2, Img(8), 1), age=2)
    assert s.vision() == [(1, 0)]


def test_images_of_one_request_are_encoded_in_the_order_of_its_prompt_whatever_job_they_are_in() -> None:
    """The target takes the first one first: in a cache for one image, the later one has to give way."""
    s = Part(E, kv_blocks=0, image_blocks=2)
    s.job(1, Img(8), age=3, at=20)
    assert s.vision() == [(1, 0)]
    s.job(2, Img(8), age=3, at=30)
    s.job(3, Img(8), age=3, at=10)
    assert s.vision() == [(3, 0)]
    assert FeaturesGoneEvent(RequestId(1), 0) in s.told()


# ---- images from elsewhere


def test_remote_images_are_asked_for_pulled_and_consumed() -> None:
    s = Part(P | D, token_budget=64)
    s.put(make_request(1, 3, A, 2, B, 1), remote_images=frozenset({0, 1}))
    assert s.told() == [NeedImages(RequestId(1), (0, 1))] and s.plan_vision() is None and not s.pulls()
    s.offer_image(1, 1, 71)
    s.offer_image(1, 0, 70)
    plan, later = s.pulls()
    assert (plan.offer, plan.image_index, plan.first_block, plan.last, len(plan.block_ids)) == (70, 0, 0, True, 1)
    assert (later.offer, later.image_index) == (71, 1) and s.state(1).images == [ENCODING, ENCODING]
    s.pulled(plan, took_s=0.5)
    assert s.language() == [(1, 9)], "up to the image that is still missing"
    s.pulled(later)
    s.finish_all()
    assert not s.told(), "what was pulled is acknowledged by whoever copied it"
    pulls = [
        (span.lane, span.end_s - span.start_s, span.tokens) for span in s.finished[1].spans if "pull" in span.stage
    ]
    assert pulls == [("transfer", 0.5, 4), ("transfer", 0.0, 8)]


def test_without_prefetching_features_are_fetched_when_nothing_goes_before() -> None:
    s = Part(P | D, token_budget=8, max_num_seqs=8, cluster=ClusterConfig(prefetch_features=False))
    s.put(make_request(1, 16, max_new=1), age=1)
    for number, image in ((2, A), (3, B)):
        s.put(make_request(number, image, 1, max_new=1), age=number, remote_images=frozenset({0}))
        s.offer_image(number, 0, number)
    assert not s.pulls(), "the first request computes before them"
    assert [s.language(), s.language()] == [[(1, 8)], [(1, 8)]]
    plan = s.pull()
    assert plan.request_id == 2
    s.pulled(plan)
    assert not s.pulls(), "it waits for its start now"
    assert s.language() == [(2, 5)]
    s.pulled(s.pull())
    s.finish_all()
    assert len(s.finished) == 3


def test_an_invalid_pull_waits_for_the_next_offer_and_asks_nobody() -> None:
    s = Part(P | D)
    s.put(make_request(1, A, 1), remote_images=frozenset({0}))
    s.told()
    s.offer_image(1, 0, 1)
    s.pulled(s.pull(), valid=False)
    assert s.state(1).images == [WAITING] and not s.told() and not s.pulls()
    assert s.scheduler.ledger().image_blocks_held == 0
    s.offer_image(1, 0, 2)
    s.connector.pulls.images.offer_gone(2)
    assert not s.pulls()
    s.offer_image(1, 0, 3)
    plan = s.pull()
    s.offer_image(1, 0, 4)  # the one that is copied is gone, as will be seen
    s.pulled(plan, valid=False)
    s.pulled(s.pull())
    s.finish_all()


def test_of_two_offers_for_an_image_none_is_refused_before_the_features_are_here() -> None:
    """The one that comes later may be gone already, which is told later still."""
    s = Part(P | D)
    s.put(make_request(1, A, 1), remote_images=frozenset({0}))
    s.told()
    for offer in (1, 2, 3):
        s.offer_image(1, 0, offer)
    s.connector.pulls.images.offer_gone(2)
    s.pulled(s.pull(), valid=False)
    assert not s.told()
    plan = s.pull()
    s.offer_image(1, 0, 4)
    s.pulled(plan)
    assert plan.offer == 1 and s.told() == [UnneededEvent(4)]
    s.finish_all()


def test_two_requests_share_one_pull_and_the_second_offer_is_not_needed() -> None:
    s = Part(P | D, token_budget=64)
    s.put(make_request(1, 3, A, 1), remote_images=frozenset({0}))
    s.put(make_request(2, 5, A, 1), remote_images=frozenset({0}))
    assert len(s.told()) == 2
    s.offer_image(2, 0, 22)
    s.offer_image(1, 0, 11)
    plan = s.pull()
    assert plan.offer == 11
    s.pulled(plan)
    assert s.told() == [UnneededEvent(22)]
    s.finish_all()


def test_an_offer_for_nobody_or_for_what_is_there_is_not_needed() -> None:
    s = Part(P | D, token_budget=64)
    s.offer_image(9, 0, 1)
    s.put(make_request(1, A, 1), remote_images=frozenset({0}))
    s.put(make_request(2, A, 1), remote_images=frozenset({0}))
    s.offer_image(1, 0, 2)
    s.pulled(s.pull())
    s.offer_image(2, 0, 3)
    assert [event for event in s.told() if isinstance(event, UnneededEvent)] == [UnneededEvent(1), UnneededEvent(3)]
    s.offer_image(1, 0, 4)
    s.abort(1)
    assert s.told() == [UnneededEvent(4)]
    s.finish_all()


def test_offers_of_a_request_that_ends_are_let_go_but_not_the_one_that_is_copied() -> None:
    s = Part(P | D)
    s.put(make_request(1, A, B, 1), remote_images=frozenset({0, 1}))
    s.told()
    s.offer_image(1, 0, 1)
    plan = s.pull()
    s.offer_image(1, 1, 2)
    assert not s.abort(1) and s.told() == [UnneededEvent(2)]
    s.pulled(plan)
    assert s.finished[1].reason == FinishReason.ABORT and not s.told()
    assert s.scheduler.ledger().image_blocks_held == 0


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
@pytest.mark.parametrize("lost", [None, 0, 2])
def test_copies_of_one_requests_images_end_in_any_order(order: tuple[int, ...], lost: int | None) -> None:
    """One that is not valid waits for its next offer; the others are not touched."""
    s = Part(P | D, token_budget=64)
    s.put(make_request(1, 3, A, 2, B, 1, Img(3), 1), remote_images=frozenset({0, 1, 2}))
    s.told()
    for index in (2, 0, 1):
        s.offer_image(1, index, 10 + index)
    plans = s.pulls()
    assert [plan.image_index for plan in plans] == [0, 1, 2]
    for index in order:
        s.pulled(plans[index], valid=index != lost)
    assert s.state(1).images == [WAITING if index == lost else ENCODED for index in range(3)]
    if lost is not None:
        s.offer_image(1, lost, 20)
        s.pulled(s.pull())
    s.finish_all()
    assert not s.told() and s.scheduler.ledger().image_blocks_held == 0


def test_no_more_images_of_a_request_are_copied_at_once_than_is_allowed() -> None:
    """Others are copied beside them, and the next one begins as soon as one has ended, whichever it was."""
    s = Part(P | D, token_budget=64)
    count = MAX_IMAGE_PULLS + 2
    s.put(make_request(1, *(Img(4, name=str(i)) for i in range(count)), 1), remote_images=frozenset(range(count)))
    s.put(make_request(2, 3, A, 1), remote_images=frozenset({0}))
    for index in range(count):
        s.offer_image(1, index, index)
    s.offer_image(2, 0, 99)
    plans = s.pulls()
    assert [plan.offer for plan in plans] == [*range(MAX_IMAGE_PULLS), 99] and not s.pulls()
    s.pulled(plans[2])
    assert s.pull().image_index == MAX_IMAGE_PULLS


def test_a_request_that_ends_waits_for_every_copy_of_its_images() -> None:
    s = Part(P | D)
    s.put(make_request(1, A, B, 1), remote_images=frozenset({0, 1}))
    s.offer_image(1, 0, 1)
    s.offer_image(1, 1, 2)
    first, second = s.pulls()
    assert not s.abort(1)
    s.pulled(second)
    assert 1 not in s.finished and s.scheduler.ledger().image_blocks_held > 0
    s.pulled(first, valid=False)
    assert s.finished[1].reason == FinishReason.ABORT and s.scheduler.ledger().image_blocks_held == 0


def test_room_is_kept_for_an_earlier_image_and_taken_from_later_ones() -> None:
    s = Part(P | D, image_blocks=2)
    s.put(make_request(2, B, 1), age=2, remote_images=frozenset({0}))
    s.offer_image(2, 0, 2)
    s.pulled(s.pull())
    s.put(make_request(3, A, 1), age=3, remote_images=frozenset({0}))
    s.put(make_request(1, Img(8), 1), age=1, remote_images=frozenset({0}))
    s.told()
    s.offer_image(3, 0, 3)
    assert not s.pulls(), "the oldest may need the room"
    s.offer_image(1, 0, 1)
    plan = s.pull()
    assert plan.request_id == 1 and s.state(2).images == [WAITING]
    assert s.told() == [NeedImages(RequestId(2), (0,))]
    s.put(make_request(4, Img(8), 1), age=0, remote_images=frozenset({0}))
    s.offer_image(4, 0, 4)
    assert not s.pulls(), "a copy in flight is not cut"
    s.pulled(plan)
    assert s.pull().request_id == 4


def test_features_are_asked_for_again_when_kv_that_was_counted_on_is_gone() -> None:
    s = Part(P | D, kv_blocks=6, image_blocks=1, token_budget=64)
    for number, parts, offer in ((1, (A, 5), 1), (2, (Img(4), 10), 2)):
        s.put(make_request(number, *parts, max_new=8, source=0), remote_images=frozenset({0}))
        s.offer_image(number, 0, offer)
        if number == 1:
            s.pulled(s.pull())
            s.finish_all()
    s.put(make_request(3, A, 5, max_new=3, source=0), remote_images=frozenset({0}))
    assert s.state(3).images == [CACHED]
    s.told()
    s.pulled(s.pull())
    while 2 not in s.finished:
        s.language()
        assert not s.told() or s.state(3).images == [WAITING]
    s.language()
    assert s.state(3).images == [WAITING] and s.state(3) in s.scheduler._requests.unfetched
    s.offer_image(3, 0, 3)
    s.pulled(s.pull())
    s.finish_all()


# ---- KV that moves on


def test_kv_is_offered_chunk_by_chunk_and_the_request_stays_until_it_is_fetched() -> None:
    s = Part(P, token_budget=6)
    request = s.put(make_request(1, 14, max_new=5))
    plan = s.plan_language()
    assert s.told() == [NeedDecoder(RequestId(1))], "it is asked for before the first blocks are there"
    s.end_language(plan, took_s=1.0)
    (event,) = s.told()
    assert len(event.block_ids) == 1 and event.end is None
    s.language(took_s=1.0)
    (event,) = s.told()
    assert len(event.block_ids) == 2
    plan = s.plan_language()
    events = s.end_language(plan, took_s=1.0)
    assert isinstance(events[0], Tokens) and s.tokens[1] == expected_tokens(request)[:1]
    (event,) = s.told()
    assert len(event.block_ids) == 1 and event.end == KvEnd(14, s.tokens[1][0], 3.0, 3.0)
    assert s.plan_language() is None and s.scheduler.status().num_handing_over == 1
    s.now = 5.0
    s._collect(s.connector.offers.release_kv(RequestId(1), s.now))
    assert s.finished[1].reason == Departure.MOVED and s.finished[1].num_generated == 1
    assert [
        (span.start_s, span.end_s, span.tokens) for span in s.finished[1].spans if span.stage.startswith("offered")
    ] == [(3.0, 5.0, 14)]
    assert not s.told() and s.scheduler.ledger().kv_blocks_held == 0


def test_a_prompt_that_moves_on_is_computed_in_parts_of_which_each_can_be_copied_behind_the_next() -> None:
    s = Part(P | D, token_budget=128, handover_tokens=10)
    s.put(make_request(1, 100, max_new=5), stages=P)
    s.put(make_request(2, 30, max_new=2))
    assert s.language() == [(1, 52), (2, 30)], "others have what is left of the step"
    assert s.language() == [(2, 1), (1, 24)] and s.language() == [(1, 12)] and s.language() == [(1, 12)]
    offered = [event for event in s.told() if isinstance(event, KvEvent)]
    assert [len(event.block_ids) for event in offered] == [13, 6, 3, 3] and offered[-1].end is not None


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 300), st.sampled_from([1, 4, 16]))
def test_parts_end_behind_blocks_and_are_not_too_small(num_tokens: int, least: int, block_size: int) -> None:
    ends = [0]
    while ends[-1] < num_tokens:
        ends.append(part_end(ends[-1], num_tokens, least, block_size))
    assert ends[-1] == num_tokens and all(end % block_size == 0 for end in ends[:-1])
    sizes = [end - start for start, end in pairwise(ends)]
    assert all(size >= least for size in sizes[:-1]) and sizes[-1] > min(num_tokens, least) - block_size
    assert all(after < before + block_size for before, after in pairwise(sizes))


def test_without_early_kv_all_of_it_is_offered_when_it_is_computed() -> None:
    s = Part(P, token_budget=8, cluster=ClusterConfig(early_kv=False))
    s.put(make_request(1, 18))
    for _ in range(2):
        s.language()
        assert not [event for event in s.told() if isinstance(event, KvEvent)]
    s.language()
    (event,) = [event for event in s.told() if isinstance(event, KvEvent)]
    assert isinstance(event, KvEvent) and event.end is not None
    assert (len(event.block_ids), event.end.num_tokens) == (5, 18)
    s.connector.offers.release_kv(RequestId(1), 1.0)
    assert not s.scheduler.has_work


def test_blocks_of_the_prefix_cache_are_offered_with_the_first_chunk() -> None:
    s = Part(P, token_budget=64)
    s.put(make_request(1, 13, source=0))
    s.language()
    s.told()
    s._collect(s.connector.offers.release_kv(RequestId(1), 0.0))
    s.put(make_request(2, 15, source=0))
    assert s.language() == [(2, 3)]
    _, event = s.told()
    assert len(event.block_ids) == 4 and event.end is not None


@pytest.mark.parametrize("how", ["stop", "length", "abort", "error"])
def test_a_request_that_ends_where_it_is_prefilled_takes_its_offer_back(how: str) -> None:
    s = Part(P, token_budget=8)
    eos = range(1000) if how == "stop" else ()
    s.put(make_request(1, 12, eos=eos, max_new=1 if how == "length" else 5))
    s.language()
    s.told()
    if how == "abort":
        s.abort(1)
    else:
        s.language(bad=(1,) if how == "error" else ())
    assert s.told() == [KvGoneEvent(RequestId(1))] and s.finished[1].reason.value == how
    assert not s.scheduler.has_work


def test_what_gives_way_before_an_image_takes_its_offer_back_and_offers_again() -> None:
    s = Part(P, kv_blocks=5, token_budget=32)
    s.put(make_request(1, 8, A, 1), age=5, remote_images=frozenset({0}))
    assert s.language() == [(1, 8)]
    s.told()
    s.put(make_request(2, 12), age=1)
    assert s.language() == [(2, 12)]
    assert s.told()[0] == KvGoneEvent(RequestId(1))
    s.offer_image(1, 0, 1)
    s.pulled(s.pull())
    assert not s.language(), "what is handed over gives way to nobody"
    s._collect(s.connector.offers.release_kv(RequestId(2), 0.0))
    assert s.language() == [(1, 13)]
    assert s.finished[2].reason == Departure.MOVED and s.state(1).num_preemptions == 1


def test_a_prefill_that_moves_on_takes_all_its_blocks_at_once() -> None:
    """Else a younger one could get between them, and wait at its target for what this one holds there."""
    s = Part(P, kv_blocks=6, token_budget=4)
    s.put(make_request(1, 20, max_new=30))
    s.language()
    assert s.scheduler.ledger().kv_blocks_held == 5


def test_a_lease_that_is_over_ends_the_part() -> None:
    s = Part(P, token_budget=64)
    s.put(make_request(1, 9))
    s.language()
    s._collect(s.connector.offers.withdraw(RequestId(1), 2.0, "lease over"))
    assert s.finished[1].reason == Departure.WITHDRAWN
    assert s.told()[-1] == KvGoneEvent(RequestId(1))
    assert not s.connector.offers.withdraw(RequestId(1), 2.0, "lease over") and not s.connector.offers.release_kv(
        RequestId(1), 2.0
    )


# ---- KV that arrives


def test_kv_is_pulled_behind_the_prefill_and_the_request_goes_on_from_its_first_token() -> None:
    s = Part(D, image_blocks=0)
    request = s.put(make_request(1, 9, A, 2, max_new=5), pulls_kv=True)
    assert s.plan_language() is None and not s.pulls() and s.scheduler.status().num_arriving == 1
    s.offer_kv(1, 7, 2)
    first = s.pull()
    assert (first.first_block, len(first.block_ids), first.last) == (0, 2, False)
    assert s.scheduler.ledger().kv_blocks_held == 4, "room for the prompt and a token more"
    s.offer_kv(1, 7, 4, end_of(request))
    assert not s.pulls(), "one copy at a time"
    s.pulled(first, took_s=1.0)
    second = s.pull()
    assert (second.first_block, len(second.block_ids), second.last) == (2, 2, True)
    assert not s.pulled(second) and s.state(1).images == [CONSUMED]
    assert s.scheduler.status().num_arriving == 0
    s.tokens[1] = expected_tokens(request)[:1]
    assert s.language() == [(1, 1)]
    s.finish_all()
    assert s.finished[1].num_generated == 5 and not s.told()
    spans = [(span.lane, span.end_s - span.start_s) for span in s.finished[1].spans if span.stage == "pull_kv"]
    assert spans == [("transfer", 1.0), ("transfer", 0.0)]


def arrive(s: Part, number: int, offer: int) -> None:
    """Pulls everything at once."""
    request = s.requests[number]
    s.offer_kv(number, offer, -(-request.num_prompt // 4), end_of(request))
    s.pulled(s.pull())
    s.tokens[number] = expected_tokens(request)[:1]


def test_cached_blocks_are_not_pulled_and_others_find_pulled_ones_only_when_all_are_there() -> None:
    s = Part(D)
    one = s.put(make_request(1, 13, source=0), pulls_kv=True)
    s.offer_kv(1, 1, 3)
    s.pulled(s.pull())
    two = s.put(make_request(2, 13, source=0), pulls_kv=True)
    s.offer_kv(2, 2, 4, end_of(two))
    plan = s.pull()
    assert plan.first_block == 0, "nobody has proved yet what the first one holds"
    s.offer_kv(1, 1, 4, end_of(one))
    s.pulled(s.pull())
    s.put(make_request(3, 13, source=0), pulls_kv=True)
    s.offer_kv(3, 3, 4, end_of(s.requests[3]))
    late = s.pull()
    assert (late.first_block, len(late.block_ids)) == (3, 1)
    s.pulled(plan)
    s.pulled(late)
    for number in (1, 2, 3):
        s.tokens[number] = expected_tokens(s.requests[number])[:1]
    s.finish_all()
    assert s.finished[3].cached_tokens == 12


@pytest.mark.parametrize("in_flight", [False, True])
def test_an_offer_that_is_gone_frees_the_blocks_as_soon_as_nothing_is_copied_into_them(in_flight: bool) -> None:
    s = Part(D)
    s.put(make_request(1, 13), pulls_kv=True)
    s.offer_kv(1, 1, 2)
    plan = s.pull()
    if not in_flight:
        s.pulled(plan)
    s.connector.pulls.kv_offer_gone(1)
    s.scheduler.check()
    assert s.scheduler.ledger().kv_blocks_held == 4 * in_flight
    if in_flight:
        s.pulled(plan, valid=False)
    assert s.scheduler.ledger().kv_blocks_held == 0 and s.scheduler.status().num_arriving == 1
    arrive(s, 1, 2)
    s.finish_all()
    assert s.finished[1].num_preemptions == 0


def test_an_invalid_copy_of_kv_begins_anew_with_the_next_offer() -> None:
    s = Part(D)
    s.put(make_request(1, 13), pulls_kv=True)
    s.offer_kv(1, 1, 4, end_of(s.requests[1]))
    s.pulled(s.pull(), valid=False)
    assert not s.pulls() and s.scheduler.ledger().kv_blocks_held == 0
    arrive(s, 1, 2)
    s.finish_all()


def test_an_offer_of_kv_for_nobody_is_not_needed_and_neither_is_that_of_a_request_that_ends() -> None:
    s = Part(D)
    s.offer_kv(9, 1, 1)
    assert s.told() == [UnneededEvent(1)]
    s.put(make_request(1, 13), pulls_kv=True)
    s.offer_kv(1, 2, 1)
    s.abort(1)
    assert s.told() == [UnneededEvent(2)]
    s.put(make_request(2, 13), pulls_kv=True)
    s.offer_kv(2, 3, 1)
    plan = s.pull()
    assert not s.abort(2) and not s.told()
    s.pulled(plan)
    assert s.told() == [UnneededEvent(3)] and not s.scheduler.has_work


def test_an_older_arrival_takes_the_room_of_one_that_is_still_pulled() -> None:
    s = Part(D, kv_blocks=6)
    s.put(make_request(5, 17, max_new=4), age=5, pulls_kv=True)
    s.offer_kv(5, 5, 2)
    plan = s.pull()
    s.put(make_request(1, 12, max_new=4), age=1, pulls_kv=True)
    s.offer_kv(1, 1, 3, end_of(s.requests[1]))
    assert not s.pulls(), "between two language steps nobody gives way"
    assert s.plan_language() is None and s.scheduler.ledger().kv_blocks_held == 5, "the copy is not cut"
    s.pulled(plan)
    assert s.state(5).num_preemptions == 1 and s.scheduler.ledger().kv_blocks_held == 0
    plan = s.pull()
    assert plan.request_id == 1 and plan.last
    s.pulled(plan)
    s.tokens[1] = expected_tokens(s.requests[1])[:1]
    while 1 not in s.finished:
        s.language()
    again = s.pull()
    assert again.offer == 5 and again.first_block == 0, "pulled again from the start"
    assert s.scheduler.ledger().kv_blocks_held == 6, "with room for all that it can need"


def test_what_is_computed_to_its_end_takes_the_room_of_older_ones_that_are_not() -> None:
    """Else it would hold, where it was computed, what others need there: a decode waits for no prefill."""
    s = Part(D, kv_blocks=6)
    s.put(make_request(1, 17, max_new=4), age=1, pulls_kv=True)
    s.offer_kv(1, 1, 2)
    s.pulled(s.pull())
    s.put(make_request(5, 12, max_new=4), age=5, pulls_kv=True)
    s.offer_kv(5, 5, 2)
    assert s.plan_language() is None and not s.pulls() and not s.state(1).num_preemptions, "both are on their way"
    s.offer_kv(5, 5, 3, end_of(s.requests[5]))
    assert s.plan_language() is None and s.state(1).num_preemptions == 1
    assert s.pull().request_id == 5


def test_what_is_computed_to_its_end_goes_before_a_prefill_that_stands_before_an_image() -> None:
    s = Part(P | D, kv_blocks=6, token_budget=32)
    s.put(make_request(1, 16, A, 1, max_new=2), age=1, remote_images=frozenset({0}))
    assert s.language() == [(1, 16)]
    s.put(make_request(5, 12, max_new=4), age=5, pulls_kv=True)
    s.offer_kv(5, 5, 3, end_of(s.requests[5]))
    assert s.plan_language() is None and s.state(1).num_preemptions == 1
    assert s.pull().request_id == 5


def test_an_older_prefill_takes_no_room_of_what_goes_on_in_the_same_step() -> None:
    """What goes on comes first in a step whatever its age, so it has its row when the older one lacks blocks."""
    s = Part(P | D, kv_blocks=6, token_budget=12)
    s.put(make_request(1, 23, max_new=1), age=1)
    assert s.language() == [(1, 12)]
    s.put(make_request(2, 7, max_new=2), age=2, pulls_kv=True)
    arrive(s, 2, 2)
    assert s.language() == [(2, 1)] and 2 in s.finished
    assert s.language() == [(1, 11)] and s.finished[1].num_preemptions == 0


def test_a_decode_without_prefill_returns_when_it_must_give_way() -> None:
    s = Part(D, kv_blocks=8)
    for number in (1, 2):
        s.put(make_request(number, 12, max_new=16), age=number, pulls_kv=True)
        arrive(s, number, number)
    while not s.finished:
        s.language()
        s.told()
    assert s.finished[2].reason == Departure.RETURNED and s.finished[2].num_preemptions == 1
    assert s.finished[2].num_generated == len(s.tokens[2])
    while 1 not in s.finished:
        s.language()
    assert s.tokens[1] == expected_tokens(s.requests[1])


def test_a_decode_with_prefill_in_its_part_is_computed_again_here() -> None:
    s = Part(P | D, kv_blocks=9, token_budget=32)
    for number in (1, 2):
        s.put(make_request(number, 8, A, max_new=20), age=number, pulls_kv=True, remote_images=frozenset({0}))
        arrive(s, number, number)
    assert not s.told()
    while s.state(2) not in s.scheduler._requests.encoding:
        s.language()
    assert s.told() == [NeedImages(RequestId(2), (0,))]
    s.offer_image(2, 0, 9)
    s.pulled(s.pull())
    s.finish_all()
    assert s.finished[2].num_preemptions == 1


def test_arrivals_start_by_urgency_and_none_passes_another_too_often() -> None:
    s = Part(D, kv_blocks=8, max_bypass=2, max_num_seqs=8)
    s.put(make_request(1, 12, max_new=16), age=1, pulls_kv=True)
    arrive(s, 1, 1)
    s.put(make_request(2, 20, max_new=4), age=2, pulls_kv=True)
    s.offer_kv(2, 2, 5, end_of(s.requests[2]))
    order = []
    for number in range(3, 7):
        s.put(make_request(number, 3, max_new=1 + 1), age=number, pulls_kv=True)
        s.offer_kv(number, number, 1, end_of(s.requests[number]))
        for plan in s.pulls():
            order.append(int(plan.request_id))
            s.pulled(plan)
            s.tokens[plan.request_id] = expected_tokens(s.requests[plan.request_id])[:1]
        while number in order and number not in s.finished:
            s.language()
    assert order == [3, 4], "then room is saved for the second"


# ---- earlier attempts


def test_tokens_of_earlier_attempts_are_prefilled_and_counted() -> None:
    s = Part(EPD, token_budget=64)
    request = make_request(1, 9, max_new=6)
    known = expected_tokens(request)[:4]
    s.put(replace(request, generated_token_ids=tuple(known)))
    s.tokens[1] = list(known)
    assert s.language() == [(1, 13)]
    assert s.tokens[1] == expected_tokens(request)[:5]
    s.finish_all()
    assert s.finished[1].num_generated == 6 and s.scheduler.status().generation_tokens == 2


def test_what_gave_way_elsewhere_starts_only_with_room_for_all() -> None:
    s = Part(EPD, kv_blocks=8, token_budget=64)
    s.put(make_request(1, 10, max_new=2))
    s.language()
    s.put(replace(make_request(2, 5, max_new=19), preempted=True))
    assert s.language() == [(1, 1)] and 1 in s.finished
    assert s.language() == [(2, 5)] and s.scheduler.ledger().kv_blocks_held == 6
    s.finish_all()
    assert s.finished[2].num_preemptions == 0


def test_the_sampler_counts_tokens_of_earlier_attempts_as_output() -> None:
    request = replace(make_request(1, 5, frequency_penalty=1.0), generated_token_ids=(7, 8, 7))
    history = SamplingState.of(request).history
    assert history is not None and history.output_counts == {7: 2, 8: 1}
    history.record(0, (*request.prompt_token_ids, 7, 8, 7, 9))
    assert history.output_counts == {7: 2, 8: 1, 9: 1}, "prefilled again, they count once"


# ---- lending


def test_a_decode_is_handed_over_with_everything_and_a_row_in_flight_is_passed_over() -> None:
    s = Part(P | D, token_budget=64)
    request = s.put(make_request(1, 9, max_new=9))
    s.language(took_s=1.0)
    s.language(took_s=1.0)
    plan = s.plan_language()
    assert s.connector.offers.hand_over(RequestId(1), s.now)
    s.scheduler.check()
    (event,) = s.told()
    tokens = expected_tokens(request)
    assert isinstance(event, KvEvent) and len(event.block_ids) == 3
    assert event.end == KvEnd(10, tokens[1], 2.0, 1.0, earlier_token_ids=(tokens[0],))
    assert not s.connector.offers.hand_over(RequestId(1), s.now), "once"
    assert not s.end_language(plan, took_s=1.0) and s.tokens[1] == tokens[:2]
    assert s.plan_language() is None
    s._collect(s.connector.offers.release_kv(RequestId(1), s.now))
    assert s.finished[1].reason == Departure.MOVED and s.finished[1].num_generated == 2


def test_what_is_fetched_while_a_row_is_in_flight_is_forgotten_behind_it() -> None:
    s = Part(P | D, token_budget=64)
    s.put(make_request(1, 9, max_new=9))
    s.language()
    plan = s.plan_language()
    assert s.connector.offers.hand_over(RequestId(1), s.now)
    assert not s.connector.offers.release_kv(RequestId(1), s.now)
    s.end_language(plan)
    assert s.finished[1].reason == Departure.MOVED and not s.scheduler.has_work


def test_only_a_running_decode_without_penalties_is_handed_over() -> None:
    s = Part(P | D, token_budget=8)
    s.put(make_request(1, 9, max_new=9))
    s.language()
    assert not s.connector.offers.hand_over(RequestId(1), s.now) and not s.connector.offers.hand_over(
        RequestId(9), s.now
    )
    s.put(make_request(2, 3, max_new=9, frequency_penalty=1.0))
    s.language()
    s.language()
    assert s.state(2).phase is RequestPhase.DECODING and not s.connector.offers.hand_over(RequestId(2), s.now)


def test_a_lent_decode_goes_on_behind_tokens_that_its_new_place_was_not_told_of() -> None:
    s = Part(E | D)
    request = make_request(1, 9, max_new=6)
    tokens = expected_tokens(request)
    s.put(replace(request, generated_token_ids=tuple(tokens[:1])), stages=D, pulls_kv=True)
    end = end_of(request, 4, earlier_token_ids=tuple(tokens[:3]), late_gaps=2)
    s.offer_kv(1, 1, 3, end)
    s.requests[1] = request
    s.pulled(s.pull())
    assert s.scheduler._requests.timelines[1].late_gaps == 2, "they count against what the request may still lose"
    s.tokens[1] = tokens[:4]
    s.finish_all()
    assert s.finished[1].num_generated == 6


def lend(s: Part, number: int) -> None:
    """A decode that ran elsewhere goes on here."""
    request = make_request(number, 9, max_new=200)
    tokens = expected_tokens(request)
    s.put(replace(request, generated_token_ids=tuple(tokens[:1])), stages=D, pulls_kv=True)
    s.offer_kv(number, number, 3, end_of(request, 2, earlier_token_ids=tuple(tokens[:1])))
    s.tokens[number] = tokens[:2]
    s.pulled(s.pull())


@pytest.mark.parametrize(("tpot_slo", "patience_s"), [(None, STEAL_PATIENCE_S), (0.04, 0.02), (3.0, STEAL_PATIENCE_S)])
@settings(max_examples=examples(20), deadline=None)
@given(steps=st.lists(st.tuples(st.floats(0.001, 0.3), st.floats(0.001, 0.3)), min_size=1, max_size=10))
def test_borrowed_decodes_stand_still_for_vision_no_longer_than_the_patience(steps, tpot_slo, patience_s) -> None:
    """One vision step behind the other, and language steps whenever they may: vision never waits, not even for the
    language step that runs, and decodes get a step at least every patience."""
    s = Part(E | D, tpot_slo=tpot_slo)
    lend(s, 1)
    assert s.scheduler.vision_first
    language_ended_s = 0.0
    for number, (vision_s, language_s) in enumerate(steps, 10):
        s.job(number, Img(4))
        encode, vision_until_s = s.plan_vision(), s.now + vision_s
        assert encode is not None
        while s.now < vision_until_s:
            plan = s.plan_language()
            if plan is None:
                assert s.now <= s.scheduler.language_due_s == language_ended_s + patience_s
                s.now = min(s.scheduler.language_due_s + 1e-9, vision_until_s)
                continue
            assert s.now - language_ended_s <= patience_s + 1e-6
            s.end_language(plan, took_s=language_s)
            language_ended_s = s.now
        s.end_vision(encode)
    assert s.plan_language() is not None, "the lane is free"


@pytest.mark.parametrize("role", [E | D, EPD])
def test_only_where_all_decodes_are_borrowed_does_vision_go_first(role: Role) -> None:
    s = Part(role, look_ahead=True)
    assert s.scheduler.vision_first == (role == E | D)
    lend(s, 1)
    running = s.plan_language()
    s.job(10, Img(4))
    encode = s.plan_vision()
    assert running is not None and encode is not None
    assert s.plan_language() is None and s.scheduler.language_due_s == math.inf, "the result comes first"
    s.end_language(running, took_s=0.01)
    assert s.plan_language() is None and s.scheduler.language_due_s == 0.01 + STEAL_PATIENCE_S
    s.put(make_request(2, 5, max_new=9), stages=D, pulls_kv=True)
    s.offer_kv(2, 2, 2, end_of(s.requests[2]))
    s.pulled(s.pull())
    assert s.plan_language() is not None, "one of its own"


def test_kv_that_does_not_fit_what_is_known_is_of_no_use() -> None:
    s = Part(D)
    request = s.put(make_request(1, 9, max_new=6), pulls_kv=True)
    s.offer_kv(1, 1, 3, replace(end_of(request), num_tokens=8))
    s.pulled(s.pull())
    assert s.finished[1].reason == Departure.RETURNED


# ---- look-ahead


def test_nobody_gives_way_to_an_arrival_while_a_step_runs() -> None:
    s = Part(D, kv_blocks=9, look_ahead=True)
    s.put(make_request(2, 8, max_new=12), age=2, pulls_kv=True)
    arrive(s, 2, 2)
    running = s.plan_language()
    s.put(make_request(3, 12, max_new=4), age=3, pulls_kv=True)
    s.offer_kv(3, 3, 1)
    (plan,) = s.pulls()
    s.pulled(plan)
    s.put(make_request(1, 16, max_new=4), age=1, pulls_kv=True)
    s.offer_kv(1, 1, 4, end_of(s.requests[1]))
    assert s.plan_language() is None or not s.state(3).num_preemptions
    s.end_language(running)
    s.language()
    assert s.state(3).num_preemptions == 1
    assert s.pull().request_id == 1
