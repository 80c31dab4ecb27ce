"""Images whose rows see each other: no chunk and no prefix found in the cache ends inside one."""

from __future__ import annotations

import pytest

from hydra_engine.core.outputs import FinishReason
from tests.scheduler.sim import Img
from tests.scheduler.stepper import Stepper

W = Img(10, name="w", whole=True)


@pytest.mark.parametrize(
    ("budget", "chunks"),
    [(4, [3, 10, 4]), (8, [3, 10, 4]), (12, [3, 12, 2]), (13, [13, 4]), (15, [15, 2]), (17, [17])],
)
def test_a_chunk_ends_before_or_behind_a_whole_image(budget: int, chunks: list[int]) -> None:
    s = Stepper(token_budget=budget)
    s.add(1, 3, W, 4, max_new=1)
    s.vision()
    assert [rows[0][1] for rows in iter(s.language, [])] == chunks
    assert s.finished[1].reason is FinishReason.LENGTH


def test_a_step_beyond_its_budget_holds_nothing_more() -> None:
    s = Stepper(token_budget=8)
    s.add(1, W, 1, max_new=1)
    s.add(2, 4, max_new=1)
    s.vision()
    assert s.language() == [(1, 10)]
    assert s.language() == [(1, 1), (2, 4)]
    s.finish_all()


@pytest.mark.parametrize(
    ("before", "found"), [(0, 0), (1, 0), (2, 12), (3, 0), (4, 4), (5, 4), (6, 16), (7, 4), (8, 8)]
)
def test_what_is_found_never_ends_inside_a_whole_image(before: int, found: int) -> None:
    """Ten rows and one token behind them: mostly the last full block ends among the rows."""
    s = Stepper(token_budget=64)
    for number in (1, 2):
        s.run(number, before, W, 1, max_new=1)
    assert s.hit(2) == (found, 1)


def test_whole_images_one_behind_the_other_are_all_left_out() -> None:
    s = Stepper(token_budget=64)
    s.run(1, 2, Img(5, name="v", whole=True), W, 1, max_new=1)  # spans [2, 7) and [7, 17)
    s.add(2, 2, Img(5, name="v", whole=True), W, 1, source=0, max_new=1)
    assert s.language() == [(2, 18)] and s.encodes == [(1, 0), (1, 1)]
    assert s.hit(2) == (0, 2)
