"""Several answers behind one handle, over played instances: when each begins, where, and how all of them end."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import PromptScores, Submit
from hydra_engine.core.outputs import FinishReason
from hydra_engine.core.request import Request
from hydra_engine.core.results import TokenLogprobs
from hydra_engine.errors import RequestAborted, RequestFailed, Unavailable
from hydra_engine.frontend.choices import Choices
from hydra_engine.frontend.handle import Handle
from hydra_engine.preprocess.preprocessor import Prepared
from tests.frontend.rig import Rig, make_request, token, tokenizer


class Asked:
    """A request for several answers on a rig."""

    def __init__(self, topology: str = "EPD", n: int = 3, **sampling: Any) -> None:
        self.rig = Rig(topology, recovery_s=10.0)
        ids = itertools.count(2)
        self.choices = Choices(
            self.rig.dispatcher, self.rig.config.scheduler, self.rig.clock, lambda: RequestId(next(ids))
        )
        self.handle = Handle("asked", lambda: None)
        request = make_request(1)
        request = replace(request, seed=(1 << 63) - 2, sampling=replace(request.sampling, n=n, **sampling))
        self.choices.submit(Prepared(request, (), ()), self.handle, tokenizer())

    def requests(self, name: str) -> list[Request]:
        messages = self.rig.take(name)
        assert all(isinstance(message, Submit) for message in messages)
        return [message.request for message in messages if isinstance(message, Submit)]

    def ends(self, name: str, request: Request, *positions: int) -> None:
        self.rig.speak(name, request, *positions)
        self.rig.finish(name, request.id, FinishReason.LENGTH, 4)

    def assert_at_rest(self) -> None:
        self.rig.assert_at_rest()
        assert self.choices.num_waiting == 0 and not self.choices._open


def test_the_others_begin_with_the_first_token_of_the_first() -> None:
    asked = Asked("2EPD")
    (first,) = asked.requests("epd0")
    assert (first.id, first.sampling.n, asked.choices.num_waiting) == (1, 1, 2)
    asked.rig.speak("epd0", first, 0)
    others = asked.requests("epd0")
    assert [other.id for other in others] == [2, 3] and asked.choices.num_waiting == 0
    assert asked.requests("epd1") == [], "they go where the prompt was computed, though the other one has nothing to do"
    assert [request.seed for request in (first, *others)] == [(1 << 63) - 2, (1 << 63) - 1, 0]
    asked.ends("epd0", others[1], 0, 1, 2, 3)
    asked.ends("epd0", first, 1, 2, 3)
    assert not asked.handle.done
    asked.ends("epd0", others[0], 0, 1, 2, 3)
    result = asked.handle.result(0)
    assert [answer.token_ids for answer in result.choices] == [
        tuple(token(arrival_index, position) for position in range(4)) for arrival_index in (1, 2, 3)
    ]
    pieces = list(asked.handle)
    assert [piece.index for piece in pieces if piece.result is not None] == [2, 0, 1]
    assert [arrival_index for arrival_index, _ in asked.rig.results] == [3, 1, 2]
    asked.assert_at_rest()


def test_an_instance_that_takes_nothing_new_is_not_followed() -> None:
    asked = Asked("2EPD")
    (first,) = asked.requests("epd0")
    asked.rig.dispatcher.instances.drain(["epd0"])
    asked.rig.speak("epd0", first, 0)
    assert len(asked.requests("epd1")) == 2


def test_a_death_before_the_first_token_delays_the_others() -> None:
    asked = Asked()
    asked.requests("epd0")
    asked.rig.down("epd0")
    asked.rig.up("epd0")
    (again,) = asked.requests("epd0")
    assert again.id != 1 and again.arrival_index == 1 and asked.choices.num_waiting == 2
    asked.rig.speak("epd0", again, 0)
    others = asked.requests("epd0")
    asked.ends("epd0", again, 1, 2, 3)
    for other in others:
        asked.ends("epd0", other, 0, 1, 2, 3)
    assert len(asked.handle.result(0).choices) == 3
    asked.assert_at_rest()


@pytest.mark.parametrize("begun", [False, True])
def test_an_instance_lost_for_good_fails_all_at_once(begun: bool) -> None:
    asked = Asked()
    (first,) = asked.requests("epd0")
    if begun:
        asked.rig.speak("epd0", first, 0)
    asked.rig.down("epd0", restarts=False)
    with pytest.raises(Unavailable):
        asked.handle.result(0)
    assert sorted(arrival_index for arrival_index, _ in asked.rig.results) == ([1, 2, 3] if begun else [1])
    asked.assert_at_rest()


def test_requests_that_all_kill_are_given_up_once_each() -> None:
    """The first one is poison: the others have ended by the time that they would be blamed."""
    asked = Asked()
    (first,) = asked.requests("epd0")
    asked.rig.speak("epd0", first, 0)
    for _ in range(3):
        asked.rig.down("epd0")
        asked.rig.up("epd0")
        asked.rig.wait(0.1)
    with pytest.raises(RequestFailed, match="not tried again"):
        asked.handle.result(0)
    asked.rig.wait(20.0)
    assert sorted(arrival_index for arrival_index, _ in asked.rig.results) == [1, 2, 3]
    asked.assert_at_rest()


@pytest.mark.parametrize("failing", [1, 3])
def test_a_refusal_of_one_aborts_the_others(failing: int) -> None:
    asked = Asked()
    (first,) = asked.requests("epd0")
    asked.rig.speak("epd0", first, 0)
    asked.requests("epd0")
    asked.rig.refuse("epd0", failing)
    with pytest.raises(Exception, match="told"):
        asked.handle.result(0)
    aborted = asked.rig.aborted("epd0")
    assert sorted(aborted) == [number for number in (1, 2, 3) if number != failing]
    for number in aborted:
        asked.rig.finish("epd0", RequestId(number), FinishReason.ABORT, 1)
    assert [type(asked.rig.error(number)) for number in aborted] == [RequestAborted] * 2
    asked.assert_at_rest()


def test_cancelled_before_the_others_have_begun() -> None:
    asked = Asked()
    asked.requests("epd0")
    assert asked.choices.cancel(RequestId(1)) and not asked.choices.cancel(RequestId(2))
    assert asked.rig.aborted("epd0") == [1]
    asked.rig.finish("epd0", RequestId(1), FinishReason.ABORT, 0)
    with pytest.raises(RequestAborted):
        asked.handle.result(0)
    asked.assert_at_rest()


@pytest.mark.parametrize("waiting", [False, True])
def test_everything_is_failed_when_the_engine_closes(waiting: bool) -> None:
    asked = Asked()
    (first,) = asked.requests("epd0")
    asked.rig.speak("epd0", first, 0)
    if waiting:
        asked.rig.down("epd0")
    error = RequestFailed("closed")
    for in_flight in list(asked.rig.dispatcher.requests.values()):
        asked.rig.dispatcher.fail(in_flight, error, asked.rig.now)
    with pytest.raises(RequestFailed, match="closed"):
        asked.handle.result(0)
    assert sorted(arrival_index for arrival_index, _ in asked.rig.results) == [1, 2, 3]
    asked.assert_at_rest()


# ---- scores of the prompt


def say_scores(asked: Asked, start: int, count: int) -> None:
    entries = tuple(TokenLogprobs(10 + place, -place / 8, 1) for place in range(start, start + count))
    asked.rig.dispatcher.on_message("epd0", PromptScores(RequestId(1), start, entries), asked.rig.now)


def test_scores_are_collected_by_position_and_asked_for_once() -> None:
    asked = Asked(n=2, prompt_logprobs=0)
    (first,) = asked.requests("epd0")
    assert first.sampling.prompt_logprobs == 0
    say_scores(asked, 1, 3)
    say_scores(asked, 1, 4)  # it gave way and begins anew
    say_scores(asked, 5, 3)
    asked.rig.speak("epd0", first, 0)
    (other,) = asked.requests("epd0")
    assert other.sampling.prompt_logprobs is None
    for request, begin in ((first, 1), (other, 0)):
        asked.ends("epd0", request, *range(begin, 4))
    result = asked.handle.result(0)
    expected = [None, *(-place / 8 for place in range(1, 8))]
    for answer in (result, *result.choices):
        assert answer.prompt_logprobs is not None
        assert [entry and entry.logprob for entry in answer.prompt_logprobs] == expected
    asked.assert_at_rest()


def test_a_token_before_the_scores_are_complete_ends_the_request() -> None:
    asked = Asked(n=2, prompt_logprobs=0)
    (first,) = asked.requests("epd0")
    say_scores(asked, 1, 3)
    asked.rig.speak("epd0", first, 0)
    with pytest.raises(RequestFailed, match="scores"):
        asked.handle.result(0)
    asked.assert_at_rest()


def test_scores_of_nobody_s_request_are_answered_with_an_abort() -> None:
    asked = Asked()
    asked.requests("epd0")
    asked.rig.dispatcher.on_message("epd0", PromptScores(RequestId(99), 1, ()), asked.rig.now)
    assert asked.rig.aborted("epd0") == [99]


def test_the_others_leave_together_and_hold_what_they_share_once() -> None:
    asked = Asked("2EPD", n=64, allowed_token_ids=range(600))
    sent: list[int] = []
    send = asked.rig.dispatcher.instances._send
    asked.rig.dispatcher.instances._send = lambda name, messages: (sent.append(len(messages)), send(name, messages))[1]
    (first,) = asked.requests("epd0")
    asked.rig.speak("epd0", first, 0)
    others = asked.requests("epd0")
    assert sent == [63] and len(others) == 63
    assert len({id(request.sampling) for request in others}) == 1
    assert first.sampling.allowed_token_ids is others[0].sampling.allowed_token_ids
    asked.handle.cancel()
