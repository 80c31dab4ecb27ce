"""Slots of recurrent states: one for each request, none lost."""

from __future__ import annotations

import pytest

from hydra_engine.cache.slots import SlotPool
from hydra_engine.core.ids import RequestId


def test_slots_are_taken_and_given_back() -> None:
    pool = SlotPool(2)
    first, second = RequestId(1), RequestId(2)
    pool.take(first)
    pool.take(second)
    assert {pool.of(first), pool.of(second)} == {0, 1}
    pool.check()
    with pytest.raises(AssertionError):
        pool.take(first)
    pool.free(first)
    pool.free(first)
    pool.take(RequestId(3))
    assert {pool.of(RequestId(3)), pool.of(second)} == {0, 1}
    pool.check()
    pool.held[first] = pool.of(second)
    with pytest.raises(AssertionError, match="lost or held twice"):
        pool.check()


def test_without_slots_nobody_gets_one() -> None:
    pool = SlotPool(0)
    pool.take(RequestId(1))
    assert pool.of(RequestId(1)) == -1 and not pool.held
    pool.free(RequestId(1))
    pool.check()
