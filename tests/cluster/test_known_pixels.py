"""Pixels travel once while both ends of a channel keep them, and arrive whole with every request."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_engine.cluster.channel import FrameReader, WireError, encode_to_instance, messages_to_instance
from hydra_engine.cluster.known_pixels import KnownPixels
from hydra_engine.core.ids import ImageDigest, RequestId
from hydra_engine.core.messages import Abort, Encode, PixelPayload, ResetCaches, Submit, ToInstance
from hydra_engine.core.request import Request
from hydra_engine.core.sampling import SamplingParams

LIMIT = 10_000
SIZES = (1000, 3000, 4000, 6000, 10_000, 10_001)  # of picture 0, 1, ..


def payload(number: int) -> PixelPayload:
    return PixelPayload(ImageDigest(bytes([number]) * 32), 1, 1, bytes([number]) * SIZES[number])


def submit(pictures: tuple[int, ...], salt: str = "", number: int = 1) -> Submit:
    request = Request(RequestId(number), (1, 2), SamplingParams(), 3, seed=0, arrival_s=1.0, cache_salt=salt)
    return Submit(request, tuple(map(payload, pictures)))


def encode(message: Submit) -> Encode:
    return Encode(message.request, message.pixels, "PD0", RequestId(7), tuple(range(len(message.pixels))))


class Wire:
    """A channel; `sent` are bytes of the last messages."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.near, self.far = KnownPixels(limit), KnownPixels(limit)
        self.sent = 0

    def __call__(self, *messages: ToInstance) -> list[ToInstance]:
        frames = encode_to_instance(messages, self.near)
        self.sent = len(frames)
        arrived = messages_to_instance(FrameReader().read_frames(frames), self.far)
        assert self.near.num_bytes == self.far.num_bytes <= LIMIT
        return arrived


PICTURES = st.lists(st.integers(0, len(SIZES) - 1), max_size=5).map(tuple)
SUBMITS = st.builds(submit, PICTURES, st.sampled_from(["", "bob"]))
RESETS = st.builds(ResetCaches, st.booleans(), st.booleans())
MESSAGES = st.one_of(SUBMITS, SUBMITS.map(encode), RESETS, st.just(Abort(RequestId(3))))


@given(st.lists(st.lists(MESSAGES, min_size=1, max_size=3), max_size=12))
def test_every_message_arrives_as_it_was(batches: list[list[ToInstance]]) -> None:
    wire = Wire()
    for batch in batches:
        assert wire(*batch) == batch


def test_each_turn_brings_its_own_picture() -> None:
    wire, sizes = Wire(), []
    for turn in range(1, 4):
        wire(submit(tuple(range(turn))))
        sizes.append(wire.sent - SIZES[turn - 1])
    assert max(sizes) < 1000, "beside the new picture there is only the request"
    wire(encode(submit((0, 1))))
    assert wire.sent < 1000, "whichever message brings them"


def test_answers_to_one_prompt_share_pixels_that_travelled() -> None:
    wire = Wire()
    first = submit((2,))
    answers = [msgspec.structs.replace(first, request=replace(first.request, id=RequestId(n))) for n in (1, 2, 3)]
    assert wire(first) == [first] and wire(*answers) == answers
    assert wire.sent < SIZES[2]


def test_what_another_client_sent_travels_again() -> None:
    wire = Wire()
    wire(submit((3,), "bob"))
    wire(submit((3,), "alice"))
    assert wire.sent > SIZES[3]


@pytest.mark.parametrize(("limit", "picture"), [(0, 0), (LIMIT, 5)])
def test_what_nobody_keeps_travels_each_time(limit: int, picture: int) -> None:
    wire = Wire(limit)
    for _ in range(2):
        assert wire(submit((picture,))) == [submit((picture,))]
        assert wire.sent > SIZES[picture]


def test_a_reset_of_pictures_forgets_them_and_one_of_blocks_does_not() -> None:
    wire = Wire()
    wire(submit((0, 1)))
    wire(ResetCaches(kv=True, images=False))
    assert wire.near.num_bytes == 4000
    wire(ResetCaches(kv=False, images=True))
    assert wire.near.num_bytes == wire.far.num_bytes == 0


def test_pixels_that_the_other_end_lacks_are_an_unreadable_frame() -> None:
    wire = Wire()
    wire(submit((0,)))
    wire.far.clear()
    with pytest.raises(WireError, match="without pixels that were not sent"):
        wire(submit((0,)))
