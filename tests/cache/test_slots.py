"""Sequence slots of running requests: one for each, the lowest first, none lost."""

from __future__ import annotations

import pytest

from hydra_engine.cache.slots import SlotPool
from hydra_engine.core.ids import RequestId


def test_slots_are_taken_and_given_back() -> None:
    pool = SlotPool(2)
    first, second = RequestId(1), RequestId(2)
    assert (pool.allocate(first), pool.allocate(second), pool.num_free) == (0, 1, 0)
    pool.check()
    with pytest.raises(AssertionError):
        pool.allocate(first)
    pool.free(first)
    pool.free(first)
    assert pool.num_free == 1 and pool.allocate(RequestId(3)) == 0
    assert {pool.of(RequestId(3)), pool.of(second)} == {0, 1}
    pool.check()
    pool.held[first] = pool.of(second)
    with pytest.raises(AssertionError, match="lost or held twice"):
        pool.check()


def test_the_lowest_free_slot_goes_first() -> None:
    pool = SlotPool(4)
    for number in range(4):
        pool.allocate(RequestId(number))
    for number in (3, 1, 2):
        pool.free(RequestId(number))
    assert [pool.allocate(RequestId(number)) for number in (5, 6, 7)] == [1, 2, 3]
