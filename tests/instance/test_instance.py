"""The loop of an instance over the fake lanes: what it sends, and when it plans ahead."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from hydra_engine.cache.blocks import CacheManager
from hydra_engine.core.ids import RequestId, StepId
from hydra_engine.core.instances import EPD
from hydra_engine.core.messages import (
    Abort,
    Delta,
    Finished,
    QueryLedger,
    ResetCaches,
    Shutdown,
    Submit,
    ToFrontend,
    ToInstance,
    Tokens,
)
from hydra_engine.core.plans import LanguagePlan, VisionPlan
from hydra_engine.core.reports import Status, StepReport
from hydra_engine.core.request import Request, Slo
from hydra_engine.core.results import LanguageResult, TokenLogprobs, VisionResult
from hydra_engine.instance.instance import LEAD_S, STATUS_PERIOD_S, Instance
from hydra_engine.scheduler.latency.attribution import StepHistory
from hydra_engine.scheduler.scheduler import StageScheduler
from tests.scheduler.audit import check
from tests.scheduler.sim import BROKEN, FakeLanes, Img, config, expected_tokens, make_request, rows_of
from tests.virtual_clock import VirtualClock


class FakeWorker:
    """Runs a step when a test says so; both ends of the channel are lists."""

    pixel_bytes = 0

    def __init__(self, kv: CacheManager, images: CacheManager, clock: VirtualClock) -> None:
        self.language: list[LanguagePlan] = []
        self.vision: list[VisionPlan] = []
        self.dropped: list[StepId] = []
        self.live: set[RequestId] = set()
        self.inbox: list[ToInstance] = []
        self.sent: list[ToFrontend] = []
        self.wants_logprobs: set[int] = set()
        self._lanes = FakeLanes(kv, images)
        self._clock = clock
        self._results: list[VisionResult | LanguageResult] = []

    def add_request(self, request: Request, pixels: Sequence[object]) -> None:
        self.live.add(request.id)

    def remove_request(self, request_id: RequestId) -> None:
        self.live.remove(request_id)

    def submit_vision(self, plan: VisionPlan) -> None:
        self.vision.append(plan)

    def drop_vision(self, step_id: StepId) -> None:
        self.dropped.append(step_id)

    def submit_language(self, plan: LanguagePlan) -> None:
        self.language.append(plan)

    def poll(self) -> list[VisionResult | LanguageResult]:
        results, self._results = self._results, []
        return results

    def close(self) -> None: ...

    def end_language(self, started_s: float) -> None:
        """The first step in flight has ended now."""
        plan = self.language.pop(0)
        result = self._lanes.compute(plan, started_s, self._clock.now(), lambda row: False)
        found = [
            (index, TokenLogprobs(int(result.token_ids[index]), -0.5, 1))
            for index, row in enumerate(rows_of(plan))
            if row.request_id in self.wants_logprobs
        ]
        self._results.append(replace(result, logprobs=tuple(found)))

    def end_vision(self, started_s: float) -> None:
        plan = self.vision.pop(0)
        error = BROKEN if plan.step_id in self.dropped else None
        if error is None:
            self._lanes.encode(plan)
        self._results.append(VisionResult(plan.step_id, started_s, self._clock.now(), (error,) * len(plan.items)))

    def drain(self) -> list[ToInstance]:
        messages, self.inbox = self.inbox, []
        return messages

    def send(self, messages: Sequence[ToFrontend]) -> None:
        self.sent += messages


class Rig:
    def __init__(self, *, look_ahead: bool = True, scheduler=StageScheduler, vision_plans: int = 1, **changes) -> None:
        kv, images = CacheManager(64, 4), CacheManager(64, 4)
        self.clock = VirtualClock(100.0)
        self.worker = FakeWorker(kv, images, self.clock)
        settings = config(look_ahead=look_ahead, token_budget=32, **changes)
        self.scheduler = scheduler(
            EPD, kv, images, settings, instance="test", observer=StepHistory(), vision_plans=vision_plans
        )
        self.instance = Instance(
            scheduler=self.scheduler,
            worker=self.worker,
            inbox=self.worker,
            outbox=self.worker,
            wake=threading.Event(),
            clock=self.clock,
            look_ahead=look_ahead,
        )

    def submit(self, request: Request) -> None:
        self.worker.inbox.append(Submit(request))

    def turn(self) -> None:
        self.instance.turn()
        check(self.scheduler)

    def step(self, took_s: float) -> None:
        """The running step takes so long, and the loop notices its end at once."""
        started_s = self.clock.now()
        self.clock.advance(took_s)
        self.worker.end_language(started_s)
        self.turn()

    def tokens(self) -> dict[int, list[int]]:
        """Tokens of each request from both forms of messages; checks positions."""
        found: dict[int, list[int]] = {}
        for message in self.worker.sent:
            if isinstance(message, Tokens):
                columns = zip(message.request_ids, message.positions, message.token_ids, strict=True)
            elif isinstance(message, Delta):
                columns = [(message.request_id, message.position, message.token_ids[0])]
            else:
                continue
            for number, position, token_id in columns:
                assert position == len(found.setdefault(number, []))
                found[number].append(token_id)
        return found

    def of(self, kind: type) -> list:
        return [message for message in self.worker.sent if isinstance(message, kind)]


# ---- what is sent


@pytest.mark.parametrize("look_ahead", [False, True])
def test_one_message_has_all_tokens_of_a_step_and_those_with_log_probabilities_travel_alone(look_ahead: bool) -> None:
    rig = Rig(look_ahead=look_ahead)
    requests = [make_request(number, 5, max_new=4) for number in range(3)]
    rig.worker.wants_logprobs = {1}
    for request in requests:
        rig.submit(request)
    rig.turn()
    while rig.worker.language:
        rig.step(0.01)
    assert rig.tokens() == {request.id: expected_tokens(request) for request in requests}
    assert [message.request_ids for message in rig.of(Tokens)] == [[0, 2]] * 4
    assert [(message.request_id, message.logprobs[0].logprob) for message in rig.of(Delta)] == [(1, -0.5)] * 4
    assert {message.request_id for message in rig.of(Finished)} == {0, 1, 2} and not rig.worker.live


@pytest.mark.parametrize("alone", [False, True])
def test_a_late_token_travels_with_its_gap_and_the_time_of_its_step(alone: bool) -> None:
    """`alone`: with log probabilities."""
    rig = Rig(look_ahead=False)
    rig.worker.wants_logprobs = {1} if alone else set()
    rig.submit(replace(make_request(1, 4, max_new=5), slo=Slo(tpot_s=0.02)))
    rig.turn()
    for took_s in (0.5, 0.01, 0.03, 0.01, 0.05):
        rig.step(took_s)
    (finished,) = rig.of(Finished)
    assert finished.num_generated == 5
    tokens = rig.of(Delta if alone else Tokens)
    assert [message.time_s for message in tokens] == pytest.approx([100.5, 100.51, 100.54, 100.55, 100.6])
    gaps = [message.late if alone else message.late.get(1) for message in tokens]
    assert [gap is not None for gap in gaps] == [False, False, True, False, True]
    told = [gap for gap in gaps if gap is not None]
    assert told == [span for span in finished.spans if span.stage == "decode_wait"] and all(gap.blame for gap in told)


def test_two_vision_plans_are_in_flight_and_come_back_in_order() -> None:
    """A third one waits for the first; an abort meanwhile is answered when the plan that names the request is back."""
    rig = Rig(vision_plans=2, image_budget=4)
    for number in range(1, 5):
        rig.submit(make_request(number, Img(4), 2, max_new=2))
    rig.turn()
    assert [[item.request_id for item in plan.items] for plan in rig.worker.vision] == [[1], [2]]
    rig.worker.inbox.append(Abort(RequestId(2)))
    rig.turn()
    assert rig.of(Finished) == [] and len(rig.worker.vision) == 2
    for count, took_s in enumerate((0.3, 0.4), start=1):
        started_s = rig.clock.now()
        rig.clock.advance(took_s)
        rig.worker.end_vision(started_s)
        rig.turn()
        assert rig.of(Status)[-1].vision_step.since_s == rig.clock.now(), "the next one runs since then"
        assert [message.request_id for message in rig.of(Finished)] == [2] * (count == 2)
    assert [[item.request_id for item in plan.items] for plan in rig.worker.vision] == [[3], [4]]
    while rig.worker.vision or rig.worker.language:
        rig.clock.advance(0.01)
        if rig.worker.vision:
            rig.worker.end_vision(rig.clock.now() - 0.01)
        if rig.worker.language:
            rig.worker.end_language(rig.clock.now() - 0.01)
        rig.turn()
    assert {message.request_id for message in rig.of(Finished)} == {1, 2, 3, 4} and not rig.worker.live
    assert rig.scheduler.ledger().at_rest


def test_an_encode_is_dropped_when_the_last_request_that_needs_it_has_gone() -> None:
    """A request that asks for the picture afterwards gets it encoded again, and ends like any other."""
    rig = Rig(vision_plans=2, image_budget=4)
    latest = make_request(4, Img(4, name="shared"), 2, max_new=2)
    for number, name in ((1, "shared"), (2, "shared"), (3, "own")):
        rig.submit(make_request(number, Img(4, name=name), 2, max_new=2))
    rig.turn()
    shared, own = rig.worker.vision
    for number, dropped in ((1, []), (2, [shared.step_id])):
        rig.worker.inbox.append(Abort(RequestId(number)))
        rig.turn()
        assert rig.worker.dropped == dropped
    assert [message.request_id for message in rig.of(Finished)] == [2], "a plan in flight names the other"
    rig.submit(latest)
    rig.turn()
    rig.worker.end_vision(rig.clock.now())
    rig.turn()
    assert [message.request_id for message in rig.of(Finished)] == [2, 1] and rig.scheduler.status().images_encoded == 0
    assert rig.worker.vision[0] is own and [item.request_id for item in rig.worker.vision[1].items] == [4]
    while rig.worker.vision or rig.worker.language:
        rig.clock.advance(0.01)
        if rig.worker.vision:
            rig.worker.end_vision(rig.clock.now() - 0.01)
        if rig.worker.language:
            rig.worker.end_language(rig.clock.now() - 0.01)
        rig.turn()
    assert rig.tokens()[latest.id] == expected_tokens(latest)
    assert not rig.worker.live and rig.scheduler.ledger().at_rest and rig.worker.dropped == [shared.step_id]


def test_an_encode_that_nobody_waits_behind_goes_on_for_a_client_that_asks_again() -> None:
    rig = Rig()
    for number, name in ((1, "same"), (2, "same"), (3, "other")):
        rig.submit(make_request(number, Img(4, name=name), 2, max_new=2))
        rig.turn()
        if number < 3:
            rig.worker.inbox.append(Abort(RequestId(number)))
            rig.turn()
        assert bool(rig.worker.dropped) == (number == 3), "now another one waits"
    assert len(rig.worker.vision) == 1


def test_the_status_says_what_budgets_allow() -> None:
    rig = Rig()
    rig.submit(make_request(1, 5, max_new=4))
    rig.turn()
    (status,) = rig.of(Status)
    assert status.budget == rig.scheduler.status().budget and status.budget.token_budget == 32


@pytest.mark.parametrize("look_ahead", [False, True])
def test_the_status_says_what_the_lanes_run(look_ahead: bool) -> None:
    rig = Rig(look_ahead=look_ahead)
    rig.submit(make_request(1, 5, max_new=40))
    rig.submit(make_request(2, 3, Img(4), 6, max_new=40))
    rig.turn()
    (status,) = rig.of(Status)
    assert status.language_step == StepReport(True, 100.0, decodes=0, prefills=2, tokens=8)
    assert status.vision_step.running and status.vision_step.images == 1 and status.num_decoding == 0
    rig.clock.advance(0.1)
    rig.worker.end_vision(100.0)
    rig.turn()
    for _ in range(4):
        rig.step(0.1)
    status = rig.of(Status)[-1]
    assert status.language_step == StepReport(True, status.time_s, decodes=2, tokens=2) and status.num_decoding == 2
    assert not status.vision_step.running and status.vision_step.images == 1
    rig.worker.inbox += [Abort(RequestId(1)), Abort(RequestId(2))]
    rig.clock.advance(STATUS_PERIOD_S)
    rig.step(0.1)
    while rig.worker.language:
        rig.step(0.1)
    assert not rig.of(Status)[-1].language_step.running


def test_requests_that_are_refused_aborted_or_asked_about() -> None:
    rig = Rig()
    rig.submit(make_request(1, 500, max_new=4))
    rig.submit(make_request(2, 5, max_new=4))
    rig.worker.inbox += [Abort(RequestId(2)), QueryLedger(7), Shutdown()]
    rig.turn()
    first, second = rig.of(Finished)
    assert (first.request_id, first.error.code) == (1, "request_too_large_for_deployment")
    assert (second.request_id, second.reason) == (2, "abort")
    assert rig.worker.sent[2].query_id == 7 and rig.worker.sent[2].at_rest


def test_caches_are_reset_in_the_order_of_messages() -> None:
    rig = Rig(look_ahead=False)
    for number, reset in ((1, None), (2, ResetCaches(kv=False, images=True)), (3, ResetCaches(kv=True, images=False))):
        if reset is not None:
            rig.worker.inbox.append(reset)
        rig.submit(make_request(number, 9, max_new=1, source=0))
        rig.turn()
        rig.step(0.01)
    assert [message.cached_tokens for message in rig.of(Finished)] == [0, 8, 0]


# ---- looking ahead


def running(took_s: float = 0.03) -> Rig:
    """A decode runs, whose steps have always taken as long; its step has just begun."""
    rig = Rig()
    rig.submit(make_request(1, 4, max_new=50))
    rig.turn()
    for _ in range(4):
        rig.step(took_s)
    assert len(rig.worker.language) == 1
    return rig


@pytest.mark.parametrize(("took_s", "lead_s"), [(0.03, LEAD_S), (0.003, 0.001)])
def test_the_next_step_is_planned_shortly_before_the_running_one_is_expected_to_end(
    took_s: float, lead_s: float
) -> None:
    rig = running(took_s)
    assert rig.instance.wait_s() == pytest.approx(took_s - lead_s)
    rig.turn()
    assert len(rig.worker.language) == 1, "it is not time yet"
    rig.clock.advance(took_s - lead_s)
    rig.submit(make_request(2, 4, max_new=2))
    rig.turn()
    assert len(rig.worker.language) == 2
    assert [row.request_id for row in rows_of(rig.worker.language[1])] == [1, 2], "what has arrived meanwhile is in it"
    assert rig.instance.wait_s() == STATUS_PERIOD_S
    rig.clock.advance(lead_s)
    rig.worker.end_language(rig.clock.now() - took_s)
    rig.turn()
    assert len(rig.worker.language) == 1 and 0 < rig.instance.wait_s() < took_s, "the second one has just begun"


def test_a_result_that_comes_before_it_is_expected_is_followed_by_a_plan_as_before() -> None:
    rig = running()
    rig.step(0.01)
    assert len(rig.worker.language) == 1 and rig.instance.wait_s() > 0


def test_while_a_picture_is_encoded_steps_are_planned_when_the_one_before_has_ended() -> None:
    rig = running()
    rig.submit(make_request(2, Img(4), 3, max_new=3))
    rig.turn()
    assert rig.worker.vision and not rig.scheduler.no_image_pending
    rig.clock.advance(0.0285)
    rig.turn()
    assert len(rig.worker.language) == 1, "the picture may be ready before this step has ended"
    rig.worker.end_vision(rig.clock.now())
    rig.step(0.0015)
    assert rig.scheduler.no_image_pending
    assert [row.request_id for row in rows_of(rig.worker.language[0])] == [1, 2]


def test_what_cannot_be_planned_ahead_is_tried_once_and_then_after_the_result() -> None:
    rig = running()
    rig.clock.advance(0.0285)
    asked = []
    plan_language = rig.scheduler.plan_language
    rig.scheduler.plan_language = lambda now: asked.append(now)
    rig.turn()
    rig.turn()
    assert len(asked) == 1 and rig.instance.wait_s() == STATUS_PERIOD_S
    rig.scheduler.plan_language = plan_language
    rig.step(0.0015)
    assert len(rig.worker.language) == 1


def test_nothing_is_planned_ahead_before_a_step_has_been_seen_or_if_it_is_off() -> None:
    rig = Rig()
    rig.submit(make_request(1, 4, max_new=50))
    rig.turn()
    assert rig.instance.wait_s() == STATUS_PERIOD_S
    rig = Rig(look_ahead=False)
    rig.submit(make_request(1, 4, max_new=50))
    rig.turn()
    rig.step(0.03)
    assert rig.instance.wait_s() == STATUS_PERIOD_S
