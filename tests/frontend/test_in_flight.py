"""Requests over several instances, step by step: what each instance is sent, and what follows from its answers."""

from __future__ import annotations

import msgspec
import pytest

from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import Abort, Submit
from hydra_engine.core.outputs import DelayCause, StageSpan
from hydra_engine.core.reports import StageReport
from hydra_engine.errors import RequestFailed
from hydra_engine.frontend.request import MAX_LATE
from tests.frontend.rig import Rig, token
from tests.frontend.several import ABORT, LENGTH, MOVED, STOP, attempt, decoding, prefilled
from tests.frontend.test_router import status

# ---- nothing happens


def test_one_instance_gets_the_whole_request() -> None:
    rig = Rig("EPD")
    rig.submit(1, images=[16])
    submit = rig.submitted("epd0")
    assert (submit.stages, submit.remote_images, submit.source) == ("EPD", (), "")
    assert (submit.request.id, submit.request.arrival_index, len(submit.pixels)) == (1, 1, 1)
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
        assert (job.target, job.target_request, job.request.arrival_index) == ("p0", 1, 1)
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
    """The frontend reports it; an instance that was only silent does not report it again."""
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
        rig.dispatcher.hand_over(rig.dispatcher.requests[1], "ed0" if decoder == "d0" else "d0", rig.now)
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
