"""Requests over several instances, step by step: what each instance is sent, and what follows from its answers."""

from __future__ import annotations

import msgspec
import pytest

from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import Abort, Encode, HandOver, NeedDecoder, StageReport, Submit
from hydra_engine.core.outputs import DelayCause, Departure, FinishReason, StageSpan
from hydra_engine.core.request import Request
from hydra_engine.errors import RequestFailed, Unavailable
from hydra_engine.frontend.active import MAX_LATE
from hydra_engine.frontend.dispatch import MAX_REPLAYS, PAIR_GRACE_S
from hydra_engine.frontend.in_flight import Attempt, Phase
from hydra_engine.frontend.routing.decode_stealing import MOST_LATE_TOKENS
from hydra_engine.frontend.routing.instances import missing_for_good
from hydra_engine.frontend.routing.late_decoder import PATIENCE_S
from tests.frontend.rig import Rig, token
from tests.frontend.test_router import status

STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
MOVED, RETURNED, WITHDRAWN = Departure.MOVED, Departure.RETURNED, Departure.WITHDRAWN


def attempt(rig: Rig) -> Attempt:
    found = rig.dispatcher.requests[RequestId(1)].attempt
    assert found is not None
    return found


def prefilled(rig: Rig, number: int = 1, **options: object) -> Request:
    """A text request on P+D whose KV is on its way."""
    rig.submit(number, **options)
    rig.take("d0")
    request = rig.submitted("p0").request
    rig.speak("p0", request, 0)
    return request


def decoding(rig: Rig, number: int = 1, **options: object) -> Request:
    request = prefilled(rig, number, **options)
    rig.finish("p0", request.id, MOVED, 1)
    rig.speak("d0", request, 1)
    return request


# ---- nothing happens


def test_one_instance_gets_the_whole_request() -> None:
    rig = Rig("EPD")
    rig.submit(1, images=[16])
    submit = rig.submitted("epd0")
    assert (submit.stages, submit.remote_images, submit.source) == ("EPD", (), "")
    assert (submit.request.id, submit.request.age, len(submit.pixels)) == (1, 1, 1)
    rig.speak("epd0", submit.request, 0, 1, 2, 3)
    rig.finish("epd0", 1, LENGTH, 4)
    rig.assert_done(1, 4)
    rig.assert_at_rest()


def test_text_goes_from_prefill_to_decode_and_counts_are_of_both() -> None:
    rig = Rig("E+P+D")
    rig.submit(1)
    prefill, decode = rig.submitted("p0"), rig.submitted("d0")
    assert (prefill.stages, rig.bound[1]) == ("P", "d0")
    assert (decode.stages, decode.source, decode.request) == ("D", "p0", prefill.request)
    assert rig.take("e0") == []
    rig.speak("p0", prefill.request, 0)
    rig.finish("p0", 1, MOVED, 1, num_preemptions=1, cached_tokens=3)
    rig.speak("d0", prefill.request, 1, late=("transfer",))
    rig.speak("d0", prefill.request, 2, 3, late=("cpu", "cpu"))
    rig.finish("d0", 1, LENGTH, 4, num_preemptions=2, cached_tokens=8)
    result = rig.assert_done(1, 4)
    assert {span.instance for span in result.timeline} == {"p0", "d0"}
    assert (result.metrics.num_preemptions, result.usage.cached_tokens) == (3, 3)
    slo = result.metrics.slo
    assert (slo.late_gaps, slo.num_gaps, slo.late_by) == (3, 3, {"transfer": 1, "cpu": 2})
    rig.assert_at_rest()


def test_images_are_encoded_elsewhere_when_they_are_asked_for() -> None:
    rig = Rig("2E+P+D")
    rig.submit(1, images=[16, 32, 16])
    prefill = rig.submitted("p0")
    assert (prefill.stages, prefill.remote_images, prefill.pixels) == ("P", (0, 1, 2), ())
    assert rig.take("e0") == rig.take("e1") == []
    rig.need("p0", 1, 0, 1, 2)
    jobs = {name: rig.encode(name) for name in ("e0", "e1")}
    assert sorted(job.indices for job in jobs.values()) == [(0, 2), (1,)]
    for name, job in jobs.items():
        assert (job.target, job.target_request, job.request.age) == ("p0", 1, 1)
        assert job.request.prompt_token_ids == () and job.request.id not in (1, prefill.request.id)
        assert job.request.images == tuple(prefill.request.images[i] for i in job.indices)
        assert [pixels.digest for pixels in job.pixels] == [image.digest for image in job.request.images]
        rig.finish(name, job.request.id, MOVED, cached_images=1)
    rig.speak("p0", prefill.request, 0)
    rig.finish("p0", 1, MOVED, 1)
    rig.speak("d0", prefill.request, 1)
    rig.finish("d0", 1, STOP, 2)
    result = rig.assert_done(1, 2)
    assert {span.instance for span in result.timeline} == {"e0", "e1", "p0", "d0"}
    assert result.usage.cached_images == 2
    rig.assert_at_rest()


def test_what_a_request_waits_for_can_be_seen_at_any_time() -> None:
    rig = Rig("E+P+D", up=False)
    rig.submit(1, images=[16, 16])

    def seen() -> tuple[object, ...]:
        (in_flight,) = rig.dispatcher.requests.values()
        live = in_flight.live(rig.statuses.stage)
        assert live.id == "r1" and (live.first_token_s is None) == (live.num_tokens == 0)
        return live.stage, live.instance, live.done, live.of

    def report(name: str, number: int, stage: str, *done_of: int) -> None:
        stages = (StageReport(RequestId(number), stage, *done_of),)
        rig.statuses.put(name, msgspec.structs.replace(status(), time_s=rig.now, stages=stages))

    assert seen() == ("queue", "", None, None)
    for name in rig.roles:
        rig.up(name)
    prefill = rig.submitted("p0").request
    assert seen() == ("queue", "p0", None, None)
    rig.need("p0", prefill.id, 0, 1)
    report("p0", prefill.id, "queue", 0, 2)
    job = rig.encode("e0").request
    assert seen() == ("queue", "e0", 0, 2)
    report("e0", job.id, "encode", 1, 2)
    report("p0", prefill.id, "queue", 1, 2)
    assert seen() == ("encode", "e0", 1, 2), "the job counts its own pictures, the request all"
    report("e0", job.id, "transfer")
    report("p0", prefill.id, "transfer", 1, 2)
    assert seen() == ("transfer", "p0", 1, 2)
    rig.finish("e0", job.id, MOVED)
    report("p0", prefill.id, "prefill", 4, 16)
    assert seen() == ("prefill", "p0", 4, 16)
    rig.wait(0.1)
    rig.speak("p0", prefill, 0)
    rig.finish("p0", prefill.id, MOVED, 1)
    assert seen() == ("transfer", "p0", None, None), "what was reported before the first token is over"
    rig.speak("d0", prefill, 1)
    assert seen() == ("decode", "d0", None, None)
    report("d0", prefill.id, "queue")
    assert seen() == ("queue", "d0", None, None), "it has given way"
    rig.down("d0")
    assert seen() == ("lost", "", None, None)
    rig.up("d0")
    again = rig.submitted("p0").request
    assert seen() == ("queue", "p0", None, None)
    rig.speak("p0", again, 2)
    rig.finish("p0", again.id, STOP, 3)
    rig.finish("d0", again.id, ABORT)
    rig.assert_at_rest()


def test_what_an_instance_did_before_it_was_lost_is_told_once() -> None:
    """By the frontend, and not again by an instance that was only silent."""
    rig = Rig("2EPD")
    rig.submit(1)
    (first,) = [name for name in rig.roles if rig.sent[name]]
    (second,) = set(rig.roles) - {first}
    request = rig.submitted(first).request
    for position, late in enumerate(((), ("cpu",), ("cpu",))):
        rig.wait(0.1)
        rig.speak(first, request, position, late=late)
    rig.wait(0.5)
    rig.silent(first)
    again = rig.submitted(second).request
    resumed = again.resumed
    assert resumed is not None and (resumed.blame, resumed.late_gaps) == ("lost", 2)
    assert (resumed.first_token_s, resumed.last_token_s) == pytest.approx((100.1, 100.3))
    rig.silent(first, silent=False)
    rig.finish(first, request.id, ABORT, 5)
    rig.wait(0.2)
    rig.speak(second, again, 3, late=("lost",))
    rig.finish(second, again.id, LENGTH, 4)
    result = rig.assert_done(1, 4)
    told = [(s.stage, s.instance, s.start_s - 100, s.end_s - 100) for s in result.timeline if s.instance == first]
    assert told == [
        ("lost", first, 0.0, pytest.approx(0.1)),
        ("decode", first, pytest.approx(0.1), pytest.approx(0.18)),
        ("decode_wait", first, pytest.approx(0.18), pytest.approx(0.2)),
        ("decode", first, pytest.approx(0.2), pytest.approx(0.28)),
        ("decode_wait", first, pytest.approx(0.28), pytest.approx(0.3)),
        ("lost", first, pytest.approx(0.3), pytest.approx(0.8)),
    ]
    assert result.metrics.slo.late_by == {"cpu": 2, "lost": 1}
    assert list(result.gaps_s) == pytest.approx([0.1, 0.1, 0.7])
    rig.assert_at_rest()


def test_all_late_tokens_are_counted_and_the_longest_gaps_kept() -> None:
    rig = Rig("EPD")
    rig.submit(1, max_new=MAX_LATE + 31)
    request = rig.submitted("epd0").request
    rig.speak("epd0", request, 0)
    for position in range(1, MAX_LATE + 31):
        rig.wait(0.1)
        gap = StageSpan("decode_wait", rig.now - 0.01 - position * 1e-4, rig.now, blame=(DelayCause("cpu", 0.01),))
        rig.say("epd0", 1, position, token(1, position), late=gap)
    rig.finish("epd0", 1, LENGTH, MAX_LATE + 31)
    result = rig.assert_done(1, MAX_LATE + 31)
    assert result.metrics.slo.late_gaps == MAX_LATE + 30
    gaps = [span for span in result.timeline if span.blame]
    assert len(gaps) == MAX_LATE and min(gap.end_s - gap.start_s for gap in gaps) > 0.01 + 30 * 1e-4


def test_what_prefills_and_encodes_gets_the_pixels() -> None:
    rig = Rig("EP+D")
    rig.submit(1, images=[16, 16])
    submit = rig.submitted("ep0")
    assert (submit.stages, submit.remote_images, len(submit.pixels), rig.bound[1]) == ("EP", (), 2, "d0")


def test_the_first_token_may_be_the_last_one() -> None:
    rig = Rig("P+D+E")
    request = prefilled(rig, max_new=1)
    rig.finish("p0", request.id, LENGTH, 1)
    assert rig.results == []  # what the other has to say belongs to the timeline
    assert rig.aborted("d0") == [1]
    rig.finish("d0", request.id, ABORT)
    rig.assert_done(1, 1)
    rig.assert_at_rest()


def test_the_decoder_may_be_faster_than_the_first_token() -> None:
    rig = Rig("P+D+E")
    rig.submit(1)
    request = rig.submitted("p0").request
    rig.speak("d0", request, 1, 2, 3)
    rig.finish("d0", request.id, LENGTH, 4)
    assert rig.results == []
    rig.speak("p0", request, 0)
    rig.finish("p0", request.id, MOVED, 1)
    rig.assert_done(1, 4)


def test_loads_follow_a_request() -> None:
    rig = Rig("E+P+D")
    rig.submit(1, images=[16])
    instances = rig.dispatcher.instances
    request = rig.submitted("p0").request
    assert (instances["p0"].prefill_tokens, instances["d0"].decodes) == (request.num_prompt, 1)
    rig.need("p0", 1, 0)
    assert instances["e0"].patches == 16
    rig.finish("e0", rig.encode("e0").request.id, MOVED)
    assert instances["e0"].patches == 0
    rig.speak("p0", request, 0)
    rig.speak("d0", request, 1)
    assert (instances["p0"].prefill_tokens, instances["d0"].decode_tokens) == (0, request.num_prompt + 2)


# ---- tokens that cannot be


def test_tokens_that_are_repeated_are_taken_once() -> None:
    rig = Rig("P+D+E")
    request = decoding(rig)
    rig.speak("d0", request, 0, 1, 2, 3)
    rig.finish("d0", request.id, LENGTH, 4)
    rig.assert_done(1, 4)


@pytest.mark.parametrize("position", [0, 1, 5])
def test_tokens_that_contradict_or_leave_a_gap_end_the_request_loudly(position: int) -> None:
    rig = Rig("P+D+E")
    request = decoding(rig)
    rig.say("d0", request.id, position, 99)
    assert isinstance(rig.error(1), RequestFailed)
    assert rig.aborted("d0") == [1]
    rig.assert_at_rest()


def test_a_part_that_refuses_ends_the_request_everywhere() -> None:
    rig = Rig("P+D+E")
    rig.submit(1)
    rig.take("p0")
    rig.refuse("d0", 1)
    error = rig.error(1)
    assert error is not None and error.code == "request_too_large_for_deployment"
    assert rig.aborted("p0") == [1]


def test_unknown_ids_are_answered_once() -> None:
    rig = Rig("EPD")
    rig.say("epd0", 77, 0, 40)
    rig.say("epd0", 77, 1, 40)
    assert rig.aborted("epd0") == [77]
    rig.finish("epd0", 77, ABORT)
    rig.finish("epd0", 78, ABORT)
    assert rig.take("epd0") == []


# ---- deaths


def test_prefill_dies_before_the_first_token() -> None:
    rig = Rig("2P+D+E")
    rig.submit(1)
    rig.take("d0")
    rig.submitted("p0")
    rig.down("p0")
    abort, again = rig.take("d0")
    prefill = rig.submitted("p1")
    assert abort == Abort(1)
    assert isinstance(again, Submit) and again.source == "p1" and again.request == prefill.request
    assert prefill.request.id != 1 and prefill.request.age == 1 and prefill.request.generated_token_ids == ()
    rig.speak("p1", prefill.request, 0)
    rig.finish("p1", prefill.request.id, MOVED, 1)
    rig.speak("d0", prefill.request, 1, 2, 3)
    rig.finish("d0", prefill.request.id, LENGTH, 4)
    rig.assert_done(1, 4)
    rig.finish("d0", 1, ABORT)
    rig.assert_at_rest()


def test_prefill_dies_before_everything_was_fetched() -> None:
    rig = Rig("2P+D+E")
    request = prefilled(rig)
    rig.down("p0")
    again = rig.submitted("p1").request
    assert again.generated_token_ids == (token(1, 0),)
    rig.say("d0", request.id, 1, token(1, 1))  # of the old attempt: nobody listens
    rig.speak("p1", again, 1)
    rig.finish("p1", again.id, MOVED, 2)
    rig.speak("d0", again, 2, 3)
    rig.finish("d0", again.id, LENGTH, 4)
    rig.assert_done(1, 4)


def test_prefill_dies_with_a_token_that_the_decoder_has_overtaken() -> None:
    rig = Rig("2P+D+E")
    rig.submit(1)
    request = next(m.request for name in ("p0", "p1") for m in rig.take(name) if isinstance(m, Submit))
    rig.take("d0")
    name = next(part for part in attempt(rig).instances if part != "d0")
    rig.speak("d0", request, 1, 2, 3)
    rig.finish("d0", request.id, LENGTH, 4)
    rig.down(name)
    again = rig.submitted({"p0": "p1", "p1": "p0"}[name]).request
    assert again.generated_token_ids == ()
    rig.speak("d0", again, 1, 2, 3)
    rig.speak({"p0": "p1", "p1": "p0"}[name], again, 0)
    rig.finish("d0", again.id, LENGTH, 4)
    rig.wait(9.0)
    rig.assert_done(1, 4)


def test_the_death_of_prefill_harms_nobody_who_decodes() -> None:
    rig = Rig("P+D+E")
    request = prefilled(rig)
    rig.speak("d0", request, 1)  # it has all it needs; the acknowledgement is still under way
    rig.down("p0")
    assert rig.take("d0") == []
    rig.speak("d0", request, 2, 3)
    rig.finish("d0", request.id, LENGTH, 4)
    rig.assert_done(1, 4)
    rig.assert_at_rest()


def test_decode_dies_and_the_tokens_go_on_where_they_were() -> None:
    rig = Rig("P+2D+E")
    rig.submit(1, max_new=6)
    first = rig.submitted("p0").request
    name = next(name for name in ("d0", "d1") if rig.take(name))
    rig.speak("p0", first, 0)
    rig.finish("p0", first.id, MOVED, 1)
    rig.speak(name, first, 1, 2)
    rig.down(name)
    other = {"d0": "d1", "d1": "d0"}[name]
    again = rig.submitted("p0").request
    assert rig.submitted(other).request == again
    assert again.generated_token_ids == tuple(token(1, i) for i in range(3))
    rig.speak("p0", again, 3)
    rig.finish("p0", again.id, MOVED, 4)
    rig.speak(other, again, 4, 5)
    rig.finish(other, again.id, LENGTH, 6)
    rig.assert_done(1, 6)


def test_all_tokens_but_not_the_end_were_heard_of() -> None:
    rig = Rig("P+D+E")
    request = decoding(rig)
    rig.speak("d0", request, 2, 3)
    rig.down("d0")
    assert rig.assert_done(1, 4).finish_reason is LENGTH
    rig.assert_at_rest()


def test_an_encoder_dies_and_only_its_images_are_encoded_again() -> None:
    rig = Rig("2E+P+D")
    rig.submit(1, images=[16, 16, 16])
    request = rig.submitted("p0").request
    rig.need("p0", 1, 0, 1, 2)
    first, second = rig.encode("e0"), rig.encode("e1")
    rig.down("e0")
    again = rig.encode("e1")
    assert again.indices == first.indices and again.request.id != first.request.id
    assert rig.take("p0") == []
    for job in (second, again):
        rig.finish("e1", job.request.id, MOVED)
    rig.speak("p0", request, 0)
    rig.finish("p0", 1, MOVED, 1)
    rig.speak("d0", request, 1)
    rig.finish("d0", 1, STOP, 2)
    rig.assert_done(1, 2)
    rig.assert_at_rest()


def test_images_asked_for_again_are_not_encoded_a_third_time_for_a_dead_job() -> None:
    rig = Rig("2E+P+D")
    rig.submit(1, images=[16, 16])
    rig.need("p0", 1, 0, 1)
    name = next(name for name in ("e0", "e1") if 0 in rig.encode(name).indices)
    other = {"e0": "e1", "e1": "e0"}[name]
    rig.sent[other].clear()
    rig.need("p0", 1, 0)
    (again,) = [m for n in ("e0", "e1") for m in rig.take(n) if isinstance(m, Encode)]
    assert again.indices == (0,)
    rig.finish(name, next(j.id for j in attempt(rig).jobs.values() if not j.pending), WITHDRAWN)
    assert rig.take("e0") == rig.take("e1") == []


def test_an_error_of_an_encoder_is_the_requests() -> None:
    rig = Rig("E+P+D")
    rig.submit(1, images=[16])
    rig.take("p0")
    rig.take("d0")
    rig.need("p0", 1, 0)
    rig.refuse("e0", rig.encode("e0").request.id, "RequestFailed")
    assert isinstance(rig.error(1), RequestFailed)
    assert (rig.aborted("p0"), rig.aborted("d0")) == ([1], [1])
    rig.assert_at_rest()


def test_poison_is_not_passed_on_for_ever() -> None:
    rig = Rig("4EPD", max_attempts=3)
    rig.submit(1)
    for _ in range(3):
        (name,) = [name for name in rig.roles if rig.sent[name]]
        rig.take(name)
        rig.down(name)
    error = rig.error(1)
    assert isinstance(error, RequestFailed) and error.code == "request_poisoned"
    rig.assert_at_rest()


def test_poison_for_encoders_is_not_passed_on_either() -> None:
    rig = Rig("4E+P+D", max_attempts=2)
    rig.submit(1, images=[16])
    rig.need("p0", 1, 0)
    for _ in range(2):
        (name,) = [name for name in ("e0", "e1", "e2", "e3") if rig.sent[name]]
        rig.down(name)
    error = rig.error(1)
    assert error is not None and error.code == "request_poisoned"


# ---- silence


def test_a_silent_instance_loses_its_requests_and_says_nothing_new_when_it_wakes() -> None:
    rig = Rig("2EPD")
    rig.submit(1)
    old = rig.submitted("epd0").request
    rig.speak("epd0", old, 0)
    rig.silent("epd0")
    again = rig.submitted("epd1").request
    assert again.generated_token_ids == (token(1, 0),)
    assert rig.aborted("epd0") == [1]
    rig.silent("epd0", False)
    assert rig.aborted("epd0") == [1]
    rig.say("epd0", 1, 1, 99)  # stale
    rig.finish("epd0", 1, ABORT, 2, num_preemptions=1)
    rig.speak("epd1", again, 1, 2, 3)
    rig.finish("epd1", again.id, LENGTH, 4)
    result = rig.assert_done(1, 4)
    assert rig.take("epd0") == []
    assert {span.instance for span in result.timeline} == {"epd0", "epd1"}
    rig.assert_at_rest()


def test_a_silent_instance_gets_nothing_new() -> None:
    rig = Rig("2EPD")
    rig.silent("epd0")
    for number in range(1, 4):
        rig.submit(number)
    assert rig.take("epd0") == []
    assert len(rig.take("epd1")) == 3


def test_the_only_instance_is_silent_for_a_while() -> None:
    rig = Rig("EPD")
    rig.submit(1)
    rig.take("epd0")
    rig.silent("epd0")
    rig.silent("epd0", False)
    messages = rig.take("epd0")
    assert messages[:2] == [Abort(1), Abort(1)]
    assert isinstance(messages[2], Submit) and messages[2].request.id != 1


# ---- giving way


def test_what_gave_way_says_so_when_it_comes_again() -> None:
    rig = Rig("P+D+E")
    request = decoding(rig)
    rig.take("d0")
    rig.finish("d0", request.id, RETURNED, 2)
    again = rig.submitted("p0").request
    assert again.preempted and again.generated_token_ids == (token(1, 0), token(1, 1))
    rig.finish("p0", again.id, WITHDRAWN)
    assert rig.submitted("p0").request.preempted
    assert rig.dispatcher.requests[1].deaths == 0


def test_moving_about_ends_somewhen() -> None:
    rig = Rig("P+D+E")
    rig.submit(1)
    for _ in range(MAX_REPLAYS + 1):
        (submit,) = [m for m in rig.take("p0") if isinstance(m, Submit)]
        rig.finish("p0", submit.request.id, WITHDRAWN)
    assert isinstance(rig.error(1), RequestFailed)


def test_kv_that_was_moved_to_nobody_is_computed_again() -> None:
    rig = Rig("P+D+E")
    request = prefilled(rig)
    rig.finish("d0", request.id, ABORT)
    assert isinstance(rig.error(1), RequestFailed)  # an instance does not abort of its own accord
    rig = Rig("P+D+E")
    request = prefilled(rig)
    rig.dispatcher.abort_at(rig.dispatcher.requests[1], "d0")
    rig.finish("p0", request.id, MOVED, 1)
    assert rig.submitted("p0").request.generated_token_ids == (token(1, 0),)


def test_a_pair_goes_down_between_two_that_live() -> None:
    rig = Rig("P+2D+2E")
    rig.submit(1, images=[16])
    request = rig.submitted("p0").request
    name = next(name for name in ("d0", "d1") if rig.take(name))
    rig.need("p0", request.id, 0)
    encoder = next(n for n in ("e0", "e1") if rig.take(n))
    rig.dispatcher.on_pair(encoder, "p0", False, rig.now)
    assert rig.take(encoder) == []  # perhaps one of them has died
    rig.wait(PAIR_GRACE_S)
    assert rig.aborted(encoder)
    rig.encode({"e0": "e1", "e1": "e0"}[encoder])
    rig.dispatcher.on_pair("p0", name, False, rig.now)
    rig.dispatcher.on_pair("p0", name, True, rig.now)
    rig.wait(PAIR_GRACE_S)
    other = {"d0": "d1", "d1": "d0"}[name]
    assert rig.aborted(name) == [1]
    assert rig.submitted(other).source == "p0"
    assert rig.dispatcher.requests[1].deaths == 0


# ---- nobody there


def test_without_an_instance_for_a_stage_a_request_waits_and_then_fails() -> None:
    rig = Rig("P+D+E", recovery_s=5.0)
    request = decoding(rig)
    rig.take("d0")
    rig.down("d0")
    rig.submit(2)
    rig.wait(4.9)
    assert rig.results == []
    rig.wait(0.2)
    for number in (1, 2):
        error = rig.error(number)
        assert isinstance(error, Unavailable) and error.code == "instance_lost" and error.retry_after_s
    assert request.id not in rig.dispatcher.requests
    rig.assert_at_rest()


def test_those_that_wait_go_on_by_age_when_it_is_back() -> None:
    rig = Rig("P+D+E")
    rig.down("d0")
    for number in (3, 1, 2):
        rig.submit(number)
    rig.wait(3.0)
    rig.up("d0")
    assert [m.request.age for m in rig.take("p0") if isinstance(m, Submit)] == [1, 2, 3]
    rig.wait(10.0)
    assert rig.results == []


def test_images_wait_for_an_encoder() -> None:
    rig = Rig("E+P+D", recovery_s=5.0)
    rig.submit(1, images=[16])
    rig.submit(2, images=[16])
    rig.down("e0")
    rig.need("p0", 1, 0)
    rig.need("p0", 2, 0)
    rig.wait(4.0)
    rig.up("e0")
    assert [m.target_request for m in rig.take("e0") if isinstance(m, Encode)] == [1, 2]
    rig.wait(60.0)
    assert rig.results == []


def test_where_nobody_comes_back_it_fails_at_once() -> None:
    rig = Rig("P+D+E")
    decoding(rig)
    rig.down("d0", restarts=False)
    error = rig.error(1)
    assert isinstance(error, Unavailable) and error.code == "instance_lost"
    rig.submit(2)
    assert isinstance(rig.error(2), Unavailable)
    assert missing_for_good(rig.dispatcher.instances.values(), images=False) is not None


def test_the_last_hope_of_those_that_wait_dies() -> None:
    rig = Rig("P+2D+E")
    rig.down("d0", restarts=True)
    rig.down("d1", restarts=True)
    rig.submit(1)
    rig.down("d0", restarts=False)
    assert rig.results == []
    rig.down("d1", restarts=False)
    assert isinstance(rig.error(1), Unavailable)


# ---- the user


@pytest.mark.parametrize("state", ["waiting", "prefill", "encoding", "moving", "decoding", "handing over"])
def test_cancel_in_every_state(state: str) -> None:
    rig = Rig("P+D+E+ED")
    if state == "waiting":
        rig.down("p0")
    rig.submit(1, images=[16] if state == "encoding" else ())
    if state != "waiting":
        request = next(m.request for m in rig.take("p0") if isinstance(m, Submit))
    if state == "encoding":
        rig.need("p0", 1, 0)
    if state in ("moving", "decoding", "handing over"):
        rig.speak("p0", request, 0)
    decoder = "" if state == "waiting" else attempt(rig).decoder
    if state in ("decoding", "handing over"):
        rig.finish("p0", 1, MOVED, 1)
        rig.speak(decoder, request, 1)
    if state == "handing over":
        rig.stealing._hand_over(rig.dispatcher.requests[1], "ed0" if decoder == "d0" else "d0")
    holding = [] if state == "waiting" else sorted(attempt(rig).holders())
    rig.handles[1].cancel()
    rig.handles[1].cancel()
    for name in holding:
        aborts = [m.request_id for m in rig.take(name) if isinstance(m, Abort)]
        assert len(aborts) == 1, name
        rig.finish(name, aborts[0], ABORT)
    ((_, result),) = rig.results
    assert result.finish_reason is ABORT
    rig.assert_at_rest()


def test_a_stop_string_ends_it_everywhere_and_for_good() -> None:
    rig = Rig("P+2D+E")
    text = "".join(chr(ord("A") + token(1, i) - 40 + 1) for i in range(3))  # the demo model's letters
    rig.submit(1, max_new=20, stop=(text[1:],))
    request = rig.submitted("p0").request
    name = next(name for name in ("d0", "d1") if rig.take(name))
    rig.speak("p0", request, 0)
    rig.speak(name, request, 1, 2)
    assert rig.aborted("p0") == rig.aborted(name) == [1]
    rig.speak(name, request, 3)  # sampled before it heard
    rig.down(name)
    assert rig.results == []
    rig.finish("p0", 1, ABORT)
    result = rig.assert_done(1, 3)
    assert (result.text, result.finish_reason, result.stop_reason) == (text[:1], STOP, text[1:])
    rig.assert_at_rest()


def test_a_report_that_never_comes_does_not_hold_the_result_back() -> None:
    rig = Rig("P+D+E", recovery_s=5.0)
    request = prefilled(rig)
    rig.speak("d0", request, 1, 2, 3)
    rig.finish("d0", request.id, LENGTH, 4)
    assert rig.results == []
    rig.wait(5.1)
    rig.assert_done(1, 4)
    rig.assert_at_rest()


# ---- where it decodes is decided late


def waiting(topology: str = "P+2D") -> tuple[Rig, Request]:
    """A request whose prefill has not begun."""
    rig = Rig(topology, prefills_at_once=False)
    rig.submit(1)
    return rig, rig.submitted("p0").request


def ask(rig: Rig, number: int = 1) -> None:
    rig.incoming.take("p0", NeedDecoder(RequestId(number)), rig.now)


def test_a_request_decodes_where_there_is_room_when_its_prefill_begins() -> None:
    rig, request = waiting()
    assert not rig.take("d0") and not rig.take("d1")
    assert rig.dispatcher.instances["d0"].decodes == rig.dispatcher.instances["d1"].decodes == 0
    rig.dispatcher.instances["d0"].status = status(kv_blocks_used=99)
    rig.dispatcher.instances["d1"].decode_tokens = 5000
    ask(rig)
    submit = rig.submitted("d1")
    assert (submit.stages, submit.source, submit.request) == ("D", "p0", request)
    assert rig.take("p0") == [HandOver(1, "d1")] and not rig.take("d0")
    assert (rig.dispatcher.instances["d1"].decodes, rig.dispatcher.instances["d1"].decode_tokens) == (1, 5008)
    ask(rig)  # it gave way and started again before it had heard
    assert not rig.take("d0") and not rig.take("d1") and not rig.take("p0")
    rig.dispatcher.instances["d1"].decode_tokens -= 5000
    rig.speak("p0", request, 0)
    rig.finish("p0", 1, MOVED, 1)
    rig.speak("d1", request, 1, 2, 3)
    rig.finish("d1", 1, LENGTH, 4)
    rig.assert_done(1, 4)
    rig.assert_at_rest()


def test_a_first_token_may_come_before_the_decoder_is_known() -> None:
    """What the decoder is told is what its source was told: it gets that token with the KV."""
    rig, request = waiting("P+D")
    rig.down("d0")
    ask(rig)
    rig.speak("p0", request, 0)
    assert rig.dispatcher.requests[1].phase is Phase.MOVING
    rig.up("d0")
    assert rig.submitted("d0").request == request and rig.take("p0") == [HandOver(1, "d0")]
    rig.finish("p0", 1, MOVED, 1)
    rig.speak("d0", request, 1, 2, 3)
    rig.finish("d0", 1, LENGTH, 4)
    rig.assert_done(1, 4)
    rig.assert_at_rest()


def test_no_decoder_in_time_is_the_end() -> None:
    rig, _ = waiting("P+D")
    rig.down("d0")
    ask(rig)
    rig.wait(rig.config.cluster.recovery_s + 1.0)
    assert isinstance(rig.error(1), Unavailable) and rig.aborted("p0") == [1]
    rig.assert_at_rest()


def test_a_decoder_that_dies_before_it_is_chosen_costs_nothing() -> None:
    rig, request = waiting()
    rig.down("d0")
    ask(rig)
    assert rig.submitted("d1").request == request and rig.dispatcher.requests[1].attempts == 1


def chosen_again() -> tuple[Rig, Request]:
    """Its KV has waited for room at d0, and is to go to the idle d1."""
    rig, request = waiting()
    other = rig.submit(2)
    assert other is not None and rig.submitted("p0").request.id == 2
    ask(rig)
    ask(rig, 2)
    (first,) = [message for message in rig.take("d0") if isinstance(message, Submit)]
    assert first.request == request
    rig.take("d1"), rig.take("p0")
    rig.handles[2].cancel()
    rig.finish("p0", 2, ABORT)
    rig.finish("d1", 2, ABORT)
    rig.take("d1"), rig.take("p0")
    rig.dispatcher.instances["d0"].status = status(num_running=60, num_arriving=9, kv_blocks_used=99)
    rig.dispatcher.instances["d1"].status = status()
    rig.speak("p0", request, 0)
    rig.wait(PATIENCE_S / 2)
    assert not rig.take("d1"), "the copy may be under way"
    rig.wait(PATIENCE_S)
    assert rig.submitted("d1").request == request and rig.take("p0") == [HandOver(1, "d1")]
    rig.wait(10 * PATIENCE_S)
    assert not rig.take("d1") and not rig.take("p0"), "once"
    return rig, request


def test_what_waits_for_room_goes_to_an_instance_that_has_some() -> None:
    rig, request = chosen_again()
    assert rig.aborted("d0") == [], "it may have the KV"
    rig.finish("p0", 1, MOVED, 1)
    rig.speak("d1", request, 1)
    assert rig.aborted("d0") == [1]
    rig.finish("d0", 1, ABORT)
    rig.speak("d1", request, 2, 3)
    rig.finish("d1", 1, LENGTH, 4)
    rig.assert_done(1, 4)
    rig.assert_at_rest()


@pytest.mark.parametrize("told", [False, True])
def test_the_first_choice_may_have_the_kv_all_the_same(told: bool) -> None:
    """The source had given it away, or had not heard yet that it did."""
    rig, request = chosen_again()
    if told:
        rig.finish("p0", 1, MOVED, 1)
    rig.speak("d0", request, 1)
    assert rig.aborted("d1") == [1] and rig.aborted("p0") == ([] if told else [1])
    assert (rig.dispatcher.instances["d0"].decodes, rig.dispatcher.instances["d1"].decodes) == (1, 0)
    rig.speak("d1", request, 1)  # both had it for a moment
    rig.finish("d1", 1, ABORT)
    rig.speak("d0", request, 2, 3)
    rig.finish("d0", 1, LENGTH, 4)
    rig.assert_done(1, 4)
    rig.assert_at_rest()


@pytest.mark.parametrize("name", ["p0", "d0", "d1"])
def test_a_death_while_either_may_have_the_kv_begins_another_attempt(name: str) -> None:
    rig, _ = chosen_again()
    rig.down(name)
    for other in {"p0", "d0", "d1"} - {name}:
        assert 1 in [message.request_id for message in rig.take(other) if isinstance(message, Abort)]
    rig.up(name)
    assert rig.dispatcher.requests[1].attempts == 2


def test_who_asks_for_a_request_that_is_over_is_told_so() -> None:
    rig, _ = waiting()
    rig.handles[1].cancel()
    rig.finish("p0", 1, FinishReason.ABORT)
    rig.take("p0")
    ask(rig)
    assert rig.aborted("p0") == [1] and not rig.take("d0") and not rig.take("d1")
    rig.assert_at_rest()


# ---- decodes that move


def lent(rig: Rig) -> Request:
    """One that the busy pd0 has been told to hand over to the idle ed0."""
    rig.submit(1, max_new=200)
    request = rig.submitted("pd0").request
    rig.speak("pd0", request, 0, 1, 2)
    rig.dispatcher.instances["pd0"].status = status(num_running=60, num_waiting=9, kv_blocks_used=99)
    rig.dispatcher.instances["ed0"].status = status()
    rig.wait(0.1)
    rig.wait(1.0)
    return request


def test_an_idle_encoder_takes_a_decode_over() -> None:
    rig = Rig("ED+PD")
    request = lent(rig)
    submit = rig.submitted("ed0")
    assert (submit.stages, submit.source, submit.request.id) == ("D", "pd0", request.id)
    assert submit.request.generated_token_ids == tuple(token(1, i) for i in range(3))
    assert rig.take("pd0") == [HandOver(request.id, "ed0")]
    rig.speak("pd0", request, 3, 4)  # of the steps in flight
    rig.finish("pd0", request.id, MOVED, 5)
    rig.speak("ed0", request, 5, 6)
    assert (rig.dispatcher.instances["pd0"].decodes, rig.dispatcher.instances["ed0"].decodes) == (0, 1)
    rig.wait(5.0)
    rig.finish("ed0", request.id, STOP, 7)
    rig.assert_done(1, 7)
    assert rig.take("ed0") == rig.take("pd0") == []
    rig.assert_at_rest()


def test_the_victim_may_end_or_keep_it() -> None:
    rig = Rig("ED+PD")
    request = lent(rig)
    rig.take("ed0")
    rig.speak("pd0", request, 3)
    rig.finish("pd0", request.id, STOP, 4)
    assert rig.aborted("ed0") == [1]
    rig.finish("ed0", request.id, ABORT)
    rig.assert_done(1, 4)

    rig = Rig("ED+PD")
    request = lent(rig)
    rig.take("ed0")
    rig.speak("pd0", request, *range(3, 4 + MOST_LATE_TOKENS))
    assert rig.aborted("ed0") == [1]
    assert attempt(rig).decoder == "pd0" and rig.dispatcher.requests[1].moved
    rig.wait(9.0)
    assert rig.take("ed0") == []
    rig.finish("ed0", request.id, ABORT)
    rig.finish("pd0", request.id, STOP, 4 + MOST_LATE_TOKENS)
    rig.assert_done(1, 4 + MOST_LATE_TOKENS)
    rig.assert_at_rest()


@pytest.mark.parametrize("dead", ["ed0", "pd0"])
def test_a_death_while_a_decode_moves_begins_it_again(dead: str) -> None:
    rig = Rig("ED+2PD")
    rig.down("pd1")
    request = lent(rig)
    rig.take("ed0"), rig.take("pd0")
    rig.up("pd1")
    rig.down(dead)
    submits = [m for name in rig.roles for m in rig.take(name) if isinstance(m, Submit)]
    assert len(submits) == 1 and submits[0].request.id != request.id
    assert submits[0].request.generated_token_ids == tuple(token(1, i) for i in range(3))
