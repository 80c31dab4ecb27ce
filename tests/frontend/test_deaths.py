"""Instances that die, fall silent, give requests back or are not there: where their requests go on."""

from __future__ import annotations

import pytest

from hydra_engine.core.messages import Abort, Encode, Submit
from hydra_engine.errors import RequestFailed, Unavailable
from hydra_engine.frontend.routing.instances import missing_for_good
from hydra_engine.frontend.transitions import MAX_REPLAYS, PAIR_GRACE_S
from tests.frontend.rig import Rig, token
from tests.frontend.several import ABORT, LENGTH, MOVED, RETURNED, STOP, WITHDRAWN, attempt, decoding, prefilled

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
    assert prefill.request.id != 1 and prefill.request.arrival_index == 1 and prefill.request.generated_token_ids == ()
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


def test_who_waits_for_a_silent_instance_does_so_since_the_fault() -> None:
    rig = Rig("E+P+D", recovery_s=5.0)
    decoding(rig)
    rig.submit(2)
    rig.wait(2.0)
    rig.silent("d0", for_s=2.0)
    rig.wait(2.9)
    assert rig.results == []
    rig.wait(0.2)
    error = rig.error(1)
    assert isinstance(error, Unavailable) and error.code == "instance_lost"


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


@pytest.mark.parametrize("withdrawn", [False, True])
def test_who_prefills_cut_off_from_the_only_encoder_gives_its_request_to_another(withdrawn: bool) -> None:
    rig = Rig("E+2PD")
    rig.submit(1, images=[16])
    name = next(name for name in ("pd0", "pd1") if any(isinstance(m, Submit) for m in rig.take(name)))
    other = {"pd0": "pd1", "pd1": "pd0"}[name]
    rig.need(name, 1, 0)
    job = rig.encode("e0")
    rig.dispatcher.on_pair("e0", name, False, rig.now)
    if withdrawn:
        rig.finish("e0", job.request.id, WITHDRAWN)
    rig.wait(PAIR_GRACE_S)
    assert rig.aborted(name) == [1]
    assert rig.submitted(other).request.generated_token_ids == ()
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
    assert [m.request.arrival_index for m in rig.take("p0") if isinstance(m, Submit)] == [1, 2, 3]
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
