"""Multimodal rotary positions: the rule against its definition token by token, and what the worker makes of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hydra_engine.core.ids import ImageDigest, RequestId
from hydra_engine.core.request import ImageItem, Request, RopeSpan
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.models.specs.base import ItemPlan
from hydra_engine.models.specs.rope import place_spans
from hydra_engine.worker.ports import PromptPositions


def span(rows: int, columns: int, time: int = 0, *, continues: bool = False) -> ItemPlan:
    return ItemPlan(1, 1, 1, 1, rows * columns, (1, rows, columns), rows, columns, time, continues)


# Text lengths and spans in turns; a span may go on with the video before it only right behind it.
PIECES = st.lists(
    st.one_of(
        st.integers(0, 9),
        st.builds(span, st.integers(1, 5), st.integers(1, 5)),
        st.builds(
            lambda rows, columns, times: [
                span(rows, columns, time, continues=index > 0) for index, time in enumerate(sorted(times))
            ],
            st.integers(1, 4),
            st.integers(1, 4),
            st.lists(st.integers(0, 30), min_size=1, max_size=4),
        ),
    ),
    max_size=7,
)


def by_definition(pieces: list[int | ItemPlan | list[ItemPlan]]) -> tuple[list[list[int]], list[tuple[int, ItemPlan]]]:
    """Counting one token after the other, as the paper describes it."""
    positions: list[list[int]] = []
    spans: list[tuple[int, ItemPlan]] = []
    following = 0
    for piece in pieces:
        if isinstance(piece, int):
            positions += [[following + i] * 3 for i in range(piece)]
            following += piece
            continue
        video = piece if isinstance(piece, list) else [piece]
        for item in video:
            spans.append((len(positions), item))
            for row in range(item.rows):
                for column in range(item.columns):
                    positions.append([following + item.time, following + row, following + column])
        following = max(max(axes) for axes in positions) + 1
    return positions, spans


@given(PIECES)
def test_every_token_sits_where_the_definition_says(pieces: list[int | ItemPlan | list[ItemPlan]]) -> None:
    expected, spans = by_definition(pieces)
    num_prompt = len(expected)
    ropes, delta = place_spans(spans)
    request = make_request(num_prompt, spans, ropes, delta)
    known = PromptPositions.from_request(request)
    assert known.prompt.T.tolist() == expected
    highest = max((max(axes) for axes in expected), default=-1)
    behind = known.slice(num_prompt, 8)
    assert behind.tolist() == [list(range(highest + 1, highest + 9))] * 3
    whole = np.concatenate((known.prompt, behind), axis=1)
    for start in range(0, num_prompt, 3):
        assert known.slice(start, 5).tolist() == whole[:, start : start + 5].tolist()


def test_text_alone_counts_from_zero() -> None:
    assert place_spans(()) == ((), 0)
    known = PromptPositions.from_request(make_request(4, [], (), 0))
    assert known.slice(2, 4).tolist() == [[2, 3, 4, 5]] * 3


def make_request(
    num_prompt: int, spans: list[tuple[int, ItemPlan]], ropes: tuple[RopeSpan, ...], delta: int
) -> Request:
    images = tuple(
        ImageItem(ImageDigest(b"x" * 32), 1, 1, 1, item.num_tokens, start, item.grid, rope)
        for (start, item), rope in zip(spans, ropes, strict=True)
    )
    request = Request(RequestId(1), (3,) * num_prompt, SamplingParams(), 4, 0, 0.0, images)
    return replace(request, rope_delta=delta)
