"""The short way of tokens that are like most others comes to what the long way comes to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.core.messages import Tokens
from hydra_engine.core.outputs import FinishReason, Piece
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.frontend.handle import Handle
from hydra_engine.frontend.request import ActiveRequest, RequestInFlight
from hydra_engine.frontend.transitions import Dispatcher, Event
from hydra_engine.preprocess.text.tokenizer import IncrementalDetokenizer
from tests.examples import examples
from tests.frontend.rig import EOS, Rig, make_request, tokenizer

NAME = "epd0"
NUM_REQUESTS = 3

samplings = st.fixed_dictionaries(
    {},
    optional={
        "stop": st.sampled_from([("a",), ("ab", "c"), ("<|",), ("qq",)]),
        "stop_token_ids": st.sampled_from([(45,), (7, 50)]),
        "min_tokens": st.integers(0, 4),
        "ignore_eos": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
    },
)
# Special ones, single bytes (parts of characters among them), and pieces of words.
token_ids = st.one_of(st.integers(0, 6), st.just(EOS), st.integers(7, 262), st.integers(263, 640))


def play(
    columns: list[list[int]], sampling: dict[str, Any], joined: bool
) -> tuple[list[list[Piece]], list[tuple[Any, ...]]]:
    """Several requests at a time, a message a step or, with `joined`, one message for two steps of all."""
    rig, handles = Rig("EPD"), []
    for number in range(1, NUM_REQUESTS + 1):
        request = replace(
            make_request(number, max_new=len(columns[0])), sampling=SamplingParams(temperature=0, **sampling)
        )
        handles.append(Handle(f"r{number}", lambda: None))
        detokenizer = IncrementalDetokenizer(tokenizer(), request.sampling)
        rig.dispatcher.submit(ActiveRequest(request, handles[-1], tokenizer(), detokenizer, ()), (), rig.now)
    steps = [list(step) for step in zip(*columns, strict=True)]
    numbers = list(range(1, NUM_REQUESTS + 1))
    width = 2 if joined else 1
    for first in range(0, len(steps), width):
        message = Tokens([], [], [], rig.now)
        for position, step in enumerate(steps[first : first + width], first):
            message.request_ids.extend(numbers)
            message.positions.extend([position] * NUM_REQUESTS)
            message.token_ids.extend(step)
        rig.dispatcher.on_message(NAME, message, rig.now)
    for number in numbers:
        rig.finish(NAME, number, FinishReason.LENGTH, len(steps))
    rig.assert_at_rest()
    ends = sorted((r.request_id, r.text, r.token_ids, r.finish_reason, r.stop_reason) for _, r in rig.results)
    return [list(handle) for handle in handles], ends


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data(), sampling=samplings, joined=st.booleans())
def test_both_ways_show_the_same(data: st.DataObject, sampling: dict[str, Any], joined: bool) -> None:
    length = data.draw(st.integers(1, 12))
    columns = [data.draw(st.lists(token_ids, min_size=length, max_size=length)) for _ in range(NUM_REQUESTS)]
    short = play(columns, sampling, joined)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestInFlight, "is_plain_next_token", lambda *_: False)
        long = play(columns, sampling, joined)
    assert short == long


def test_the_short_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    fired = []
    fire = Dispatcher._fire

    def noted(dispatcher: Dispatcher, event: Event, in_flight: RequestInFlight, now: float, *facts: object) -> None:
        fired.append(event)
        fire(dispatcher, event, in_flight, now, *facts)

    monkeypatch.setattr(Dispatcher, "_fire", noted)
    rig = Rig("EPD")
    handle = rig.submit(1, max_new=4)
    rig.say(NAME, 1, 0, 40, 41, 42)
    rig.say(NAME, 1, 3, 43)
    assert [piece.token_ids for piece in handle._pieces] == [(40,), (41,), (42,), (43,)]
    assert fired == [Event.SUBMITTED, Event.TOKENS], "the first one ends the prefill"


def test_a_token_at_a_wrong_place_takes_the_long_way() -> None:
    rig = Rig("2EPD")
    handle = rig.submit(1, max_new=8)
    rig.say(NAME, 1, 0, 40, 41)
    rig.say(NAME, 1, 1, 41)  # once more
    rig.say(NAME, 1, 2, 42)
    assert [piece.token_ids for piece in handle._pieces] == [(40,), (41,), (42,)]
    rig.say("epd1", 1, 3, 43)
    rig.say(NAME, 7, 0, 43)
    assert len(handle._pieces) == 3
    rig.say(NAME, 1, 2, 50)  # another one than before
    assert handle.done
