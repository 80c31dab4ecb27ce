"""csrc/cuda/split.cpp on a driver that knows which multiprocessors each part has: parts of any counts nest, and what
the driver refuses is said."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest

DEVICES = [(9, 132), (9, 114), (8, 108), (9, 64), (8, 40), (10, 148)]
FORMS = pytest.mark.parametrize("spread", [False, True], ids=["together", "spread"])


class Part(NamedTuple):
    language: frozenset[int]
    vision: frozenset[int]
    priorities: tuple[int, int]


def group_of(major: int) -> int:
    return 8 if major >= 9 else 4


def divided(
    host: Any,
    counts: list[int],
    *,
    major: int = 9,
    num_sms: int = 132,
    lost: int = 0,
    rest_joins: bool = True,
    groups_join: bool = True,
    **options: Any,
) -> list[Part]:
    host.divide_device(major, num_sms, lost, rest_joins, groups_join)
    host.take_green_streams(), host.take_splits()
    found = host.cuda_split_streams(0, counts, -1, 0, **options)
    streams = {handle: (priority, frozenset(sms)) for handle, priority, sms in host.take_green_streams()}
    assert len(streams) == 2 * len(counts) and host.take_splits() == 1, "all parts are of one split"
    parts = []
    for language, vision, language_sms, vision_sms in found:
        part = Part(streams[language][1], streams[vision][1], (streams[language][0], streams[vision][0]))
        assert (len(part.language), len(part.vision)) == (language_sms, vision_sms)
        parts.append(part)
    return parts


@FORMS
@pytest.mark.parametrize(("major", "num_sms"), DEVICES)
def test_parts_of_any_counts_nest(host: Any, major: int, num_sms: int, spread: bool) -> None:
    """A lane on one part therefore shares nothing with the other lane on another one, if that one's count is no
    smaller."""
    group = group_of(major)
    most = num_sms // group * group - group
    counts = [*range(1, most + 1, 3), most]
    parts = divided(host, counts, major=major, num_sms=num_sms, spread=spread)
    for count, part in zip(counts, parts, strict=True):
        assert count <= len(part.language) < count + group, "rounded up to whole groups"
        assert not part.language & part.vision
        assert len(part.language | part.vision) == num_sms, "what is left over is the vision lane's"
        assert part.priorities == (-1, 0)
    for fewer, more in itertools.combinations_with_replacement(parts, 2):
        assert fewer.language <= more.language and fewer.vision >= more.vision
        assert not fewer.language & more.vision


def test_a_part_lies_together_or_takes_every_second_group(host: Any) -> None:
    (together,) = divided(host, [64])
    assert together.language == set(range(64))
    (spread,) = divided(host, [64], spread=True)
    assert spread.language == {sm for sm in range(128) if sm // 8 % 2 == 0}
    (half,) = divided(host, [32], spread=True)
    assert {sm // 8 for sm in half.language} == {0, 2, 4, 6}
    (most,) = divided(host, [80], spread=True)
    assert {sm // 8 for sm in most.language} == {*range(0, 16, 2), 1, 3}


def test_counts_keep_their_order_and_may_be_equal(host: Any) -> None:
    sizes = [len(part.language) for part in divided(host, [96, 30, 32])]
    assert sizes == [96, 32, 32]


def test_what_the_driver_does_not_take_together_with_groups_is_left_out(host: Any) -> None:
    (part,) = divided(host, [64], rest_joins=False)
    assert (len(part.language), len(part.vision)) == (64, 64) and not part.language & part.vision


def test_fewer_groups_than_would_fit_are_all_that_there_are(host: Any) -> None:
    (part,) = divided(host, [64], lost=3)
    assert (len(part.language), len(part.vision)) == (64, 132 - 64), "what is left over is the vision lane's"
    with pytest.raises(ValueError, match="counts: of the device's 13 groups of 8 multiprocessors 100 leave none"):
        divided(host, [100], lost=3)


@pytest.mark.parametrize(
    ("counts", "options", "said"),
    [
        ([0], {}, "counts: expected 1 to 131 of the device's 132 multiprocessors, got 0"),
        ([32, 132], {}, "counts: expected 1 to 131 of the device's 132 multiprocessors, got 132"),
        ([121], {}, "counts: of the device's 16 groups of 8 multiprocessors 121 leave none"),
        ([16], {"groups_join": False}, "counts: the driver makes no part of 2 groups of 8 multiprocessors"),
        ([4], {"num_sms": 12}, "counts: each lane needs a group of 8 multiprocessors, and the device's 12 make 1"),
        ([2], {"num_sms": 6}, "counts: the device's 6 multiprocessors cannot be divided into groups of 8"),
        ([4], {"lost": 16}, "counts: each lane needs a group of 8 multiprocessors, and the device's 132 make 0"),
    ],
)
def test_what_cannot_be_divided_is_said(host: Any, counts: list[int], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        divided(host, counts, **options)
