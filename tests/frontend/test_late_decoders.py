"""Late and changing choices of the instance that decodes a request."""

from __future__ import annotations

import pytest

from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import Abort, HandOver, NeedDecoder, Submit
from hydra_engine.core.outputs import FinishReason
from hydra_engine.core.request import Request
from hydra_engine.errors import Unavailable
from hydra_engine.frontend.request import Phase
from hydra_engine.frontend.transitions import MAX_LATE_TOKENS, PATIENCE_S
from tests.frontend.rig import Rig, token
from tests.frontend.several import ABORT, LENGTH, MOVED, STOP, attempt
from tests.frontend.test_router import status

# ---- where it decodes is decided late


def waiting(topology: str = "P+2D") -> tuple[Rig, Request]:
    """A request whose prefill has not begun."""
    rig = Rig(topology, prefills_at_once=False)
    rig.submit(1)
    return rig, rig.submitted("p0").request


def ask(rig: Rig, number: int = 1) -> None:
    rig.dispatcher.on_message("p0", NeedDecoder(RequestId(number)), rig.now)


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
    decoder = rig.dispatcher.instances["d1"]
    assert (decoder.decodes, decoder.decode_tokens, decoder.arriving_tokens) == (1, 5008, 0), "nothing to copy yet"
    ask(rig)  # it gave way and started again before it had heard
    assert not rig.take("d0") and not rig.take("d1") and not rig.take("p0")
    rig.dispatcher.instances["d1"].decode_tokens -= 5000
    rig.speak("p0", request, 0)
    assert decoder.arriving_tokens == 8
    rig.finish("p0", 1, MOVED, 1)
    rig.speak("d1", request, 1)
    assert decoder.arriving_tokens == 0, "its KV is there"
    rig.speak("d1", request, 2, 3)
    rig.finish("d1", 1, LENGTH, 4)
    rig.assert_done(1, 4)
    rig.assert_at_rest()


def test_a_first_token_may_come_before_the_decoder_is_known() -> None:
    """The decoder gets the same request as its source: the first token comes to it with the KV."""
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
    """A rig, and a request whose KV has waited for room at d0 and is to go to the idle d1."""
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


def test_the_router_is_not_asked_for_another_decoder_while_none_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, request = waiting()
    ask(rig)
    rig.speak("p0", request, 0)
    asked: list[str] = []
    choose = rig.dispatcher._router.decoder
    monkeypatch.setattr(rig.dispatcher._router, "decoder", lambda *of: asked.append(of[0]) or choose(*of))
    rig.dispatcher.instances["d1"].status = status(num_waiting=1)
    rig.wait(10 * PATIENCE_S)
    assert not asked and rig.dispatcher.requests[1].phase is Phase.MOVING
    rig.dispatcher.instances["d1"].status = status()
    rig.wait(PATIENCE_S)
    assert asked == ["p0"]


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
    """A request that the busy pd0 must hand over to the idle ed0."""
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
    rig.speak("pd0", request, *range(3, 4 + MAX_LATE_TOKENS))
    assert rig.aborted("ed0") == [1]
    assert attempt(rig).decoder == "pd0" and rig.dispatcher.requests[1].has_moved
    rig.wait(9.0)
    assert rig.take("ed0") == []
    rig.finish("ed0", request.id, ABORT)
    rig.finish("pd0", request.id, STOP, 4 + MAX_LATE_TOKENS)
    rig.assert_done(1, 4 + MAX_LATE_TOKENS)
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
