"""Blame for the death of an instance, however it is noticed first, and the requests that are tried alone after it."""

from __future__ import annotations

import pytest

from hydra_engine.core.messages import Submit
from hydra_engine.core.outputs import Departure, FinishReason
from hydra_engine.core.request import Request
from tests.frontend.rig import Rig

WITHDRAWN, LENGTH = Departure.WITHDRAWN, FinishReason.LENGTH


def begun(rig: Rig, name: str) -> list[Request]:
    """The requests that the instance has got since the last call."""
    return [message.request for message in rig.take(name) if isinstance(message, Submit)]


def die_and_return(rig: Rig, name: str) -> list[Request]:
    rig.down(name)
    rig.up(name)
    return begun(rig, name)


@pytest.mark.parametrize("felt", ["pair", "withdrawn"])
def test_a_death_that_a_peer_feels_first_counts_as_one(felt: str) -> None:
    rig = Rig("P+D", max_attempts=2)
    rig.submit(1)
    for _ in range(2):
        assert rig.error(1) is None
        (request,) = begun(rig, "p0")
        if felt == "withdrawn":
            rig.finish("p0", request.id, WITHDRAWN)
        rig.dispatcher.on_pair("p0", "d0", False, rig.now)
        rig.take("p0")
        die_and_return(rig, "d0")
    error = rig.error(1)
    assert error is not None and error.code == "request_poisoned"
    assert not rig.dispatcher.requests


def test_a_death_long_after_it_had_left_is_none_of_its_business() -> None:
    rig = Rig("P+2D", max_attempts=2)
    rig.submit(1)
    (request,) = begun(rig, "p0")
    in_flight = rig.dispatcher.requests[request.id]
    before = in_flight.attempt.decoder
    rig.finish("p0", request.id, WITHDRAWN)
    assert in_flight.attempt.decoder != before
    rig.wait(5.0)
    die_and_return(rig, before)
    assert (in_flight.deaths, in_flight.replays) == (0, 1)


def test_the_death_of_an_encoder_is_counted_when_the_connection_ends_first() -> None:
    rig = Rig("E+P+D", max_attempts=2)
    rig.submit(1, images=[16])
    (request,) = begun(rig, "p0")
    rig.need("p0", request.id, 0)
    for _ in range(2):
        assert rig.error(1) is None
        rig.dispatcher.on_pair("e0", "p0", False, rig.now)
        rig.down("e0")
        rig.up("e0")
        rig.wait(0.1)
        for again in begun(rig, "p0"):
            rig.need("p0", again.id, 0)
    error = rig.error(1)
    assert error is not None and error.code == "request_poisoned"


def test_suspects_are_tried_one_at_a_time_and_the_guilty_takes_nobody_along() -> None:
    rig = Rig("EPD", max_attempts=3)
    for number in (1, 2, 3):
        rig.submit(number)
    assert [request.arrival_index for request in begun(rig, "epd0")] == [1, 2, 3]
    assert [request.arrival_index for request in die_and_return(rig, "epd0")] == [1, 2, 3]
    (first,) = die_and_return(rig, "epd0")
    assert first.arrival_index == 1
    rig.wait(1.0)
    assert begun(rig, "epd0") == [] and not rig.results
    rig.speak("epd0", first, 0)
    rig.wait(0.1)
    (second,) = begun(rig, "epd0")
    assert second.arrival_index == 2
    # This one kills. The first one was cleared, which makes it a suspect again and not poison.
    again = die_and_return(rig, "epd0")
    error = rig.error(2)
    assert error is not None and error.code == "request_poisoned"
    assert [request.arrival_index for request in again] == [1] and again[0].generated_token_ids != ()
    rig.speak("epd0", again[0], 1)
    rig.wait(0.1)
    assert begun(rig, "epd0") == [], "it was cleared before, so it is tried to its end"
    rig.speak("epd0", again[0], 2, 3)
    rig.finish("epd0", again[0].id, LENGTH, 4)
    rig.assert_done(1, 4)
    rig.wait(0.1)
    (third,) = begun(rig, "epd0")
    rig.speak("epd0", third, 0, 1, 2, 3)
    rig.finish("epd0", third.id, LENGTH, 4)
    rig.assert_done(3, 4)
    rig.assert_at_rest()


def test_nobody_stands_in_line_for_ever() -> None:
    rig = Rig("EPD", max_attempts=3)
    for number in (1, 2):
        rig.submit(number)
    die_and_return(rig, "epd0"), die_and_return(rig, "epd0")
    rig.wait(100.0)
    error = rig.error(2)
    assert error is not None and error.code == "instance_lost"
    assert rig.error(1) is None, "it is being tried"


def test_with_one_attempt_nobody_stands_in_line() -> None:
    rig = Rig("EPD", max_attempts=1)
    rig.submit(1)
    rig.submit(2)
    assert len(begun(rig, "epd0")) == 2
    rig.down("epd0")
    assert {number for number, _ in rig.results} == {1, 2}
    assert all(error is not None and error.code == "request_poisoned" for error in map(rig.error, (1, 2)))
