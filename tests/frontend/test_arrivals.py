"""The requests that come while others decode, by which the router knows how many prompts a decode will meet."""

from __future__ import annotations

from itertools import count

import pytest

from hydra_engine.core.request import Request
from hydra_engine.frontend.routing.arrivals import Arrivals
from tests.frontend.rig import Rig
from tests.frontend.several import ABORT, LENGTH


class Answers:
    """A rig with an arrival for each `come` and answers of four tokens."""

    def __init__(self) -> None:
        self.rig = Rig("EPD")
        self.arrivals: Arrivals = self.rig.dispatcher._router.arrivals
        self._numbers = count(1)

    def come(self, num_requests: int = 1) -> Request:
        """Returns the first of them."""
        numbers = [next(self._numbers) for _ in range(num_requests)]
        for number in numbers:
            self.rig.submit(number)
        return self.rig.dispatcher.requests[numbers[0]].request

    def begin(self, request: Request) -> None:
        self.rig.speak("epd0", request, 0)

    def end(self, request: Request) -> None:
        self.rig.speak("epd0", request, 1, 2, 3)
        self.rig.finish("epd0", request.id, LENGTH, 4)


def test_those_count_that_come_between_the_first_token_of_another_and_its_last() -> None:
    answers = Answers()
    first, second = answers.come(), answers.come()
    answers.come(5)
    answers.begin(first)
    answers.come(6)
    assert answers.arrivals.per_token == 0.0
    answers.begin(second)
    answers.end(first)
    assert answers.arrivals.per_token == 6 / 3
    answers.end(second)
    assert answers.arrivals.per_token == pytest.approx(6 / 6, rel=0.05), "none came during the second one"


def test_requests_that_come_all_at_once_leave_none_to_come() -> None:
    answers = Answers()
    requests = [answers.come() for _ in range(8)]
    for request in requests:
        answers.begin(request)
        answers.end(request)
    assert answers.arrivals.per_token == 0.0 and not answers.rig.dispatcher.requests


def test_a_load_that_ends_is_forgotten() -> None:
    answers = Answers()
    for come in [4] * 8 + [0] * 100:
        request = answers.come()
        answers.begin(request)
        if come:
            answers.come(come)
        answers.end(request)
    assert 0 < answers.arrivals.per_token < 0.02


@pytest.mark.parametrize("tokens", [0, 1])
def test_answers_that_end_before_a_second_token_say_nothing(tokens: int) -> None:
    answers = Answers()
    request = answers.come()
    if tokens:
        answers.begin(request)
    answers.come(3)
    answers.rig.handles[request.id].cancel()
    answers.rig.finish("epd0", request.id, ABORT, tokens)
    assert answers.arrivals.per_token == 0.0 and request.id not in answers.rig.dispatcher.requests
