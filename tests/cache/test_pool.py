"""The block pool against a brute-force model: no block is handed out twice, nothing is lost, content is evicted LRU."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hydra_engine.cache.pool import BlockPool, OutOfBlocks
from hydra_engine.core.ids import BlockHash
from tests.examples import examples


def key(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "little"))


class PoolMachine(RuleBasedStateMachine):
    """The model: owners per block, content per block, and the order in which content became evictable."""

    @initialize(size=st.integers(0, 8))
    def start(self, size: int) -> None:
        self.size = size
        self.pool = BlockPool(size)
        self.owners: dict[int, int] = {}
        self.content: dict[int, BlockHash] = {}
        self.evictable: list[int] = []

    @property
    def num_free(self) -> int:
        return self.size - len(self.owners)

    @rule(count=st.integers(0, 9))
    def allocate_is_all_or_nothing_and_never_gives_a_held_block(self, count: int) -> None:
        if count > self.num_free:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            return
        plain = self.num_free - len(self.evictable)
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == len(blocks) == count
        assert not set(blocks) & self.owners.keys()
        evicted = [b for b in blocks if b in self.evictable]
        assert evicted == self.evictable[: max(0, count - plain)], "content is evicted late and least recent first"
        for block in blocks:
            self.owners[block] = 1
            self.content.pop(block, None)
        self.evictable = self.evictable[len(evicted) :]

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data) -> None:
        block = data.draw(st.sampled_from(sorted(self.owners)))
        self.pool.release([block])
        self.owners[block] -= 1
        if not self.owners[block]:
            del self.owners[block]
            if block in self.content:
                self.evictable.append(block)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), number=st.integers(0, 5))
    def name(self, data, number: int) -> None:
        block = data.draw(st.sampled_from(sorted(set(self.owners) - set(self.content)) or [None]))
        if block is None:
            return
        known = key(number) in self.content.values()
        assert self.pool.set_hash(block, key(number)) is not known
        if not known:
            self.content[block] = key(number)

    @rule(number=st.integers(0, 5))
    def acquire_finds_content_until_it_is_evicted(self, number: int) -> None:
        expected = next((b for b, k in self.content.items() if k == key(number)), None)
        assert self.pool.find(key(number)) == expected
        assert self.pool.acquire(key(number)) == expected
        if expected is not None:
            self.owners[expected] = self.owners.get(expected, 0) + 1
            if expected in self.evictable:
                self.evictable.remove(expected)

    @rule(number=st.integers(0, 5))
    def forget_takes_only_content_that_nobody_holds(self, number: int) -> None:
        block = next((b for b, k in self.content.items() if k == key(number)), None)
        if block is not None and block in self.owners:
            with pytest.raises(AssertionError, match="is held"):
                self.pool.forget(key(number))
            return
        assert self.pool.forget(key(number)) is (block is not None)
        if block is not None:
            del self.content[block]
            self.evictable.remove(block)

    @rule()
    def forget_evictable_leaves_what_is_held(self) -> None:
        assert self.pool.forget_evictable() == len(self.evictable)
        for block in self.evictable:
            del self.content[block]
        self.evictable.clear()

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert self.pool.num_free == self.num_free
        assert self.pool.num_held == len(self.owners)
        assert len(self.pool._evictable) == len(self.evictable)
        assert all(self.pool.refcount(block) == self.owners.get(block, 0) for block in range(self.size))
        assert all(self.pool.hash_of(block) == self.content.get(block) for block in range(self.size))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=examples(80), stateful_step_count=30, deadline=None)


def test_a_failed_allocation_takes_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 blocks wanted, 1 of 4 free"):
        pool.allocate(2)
    assert len(pool.allocate(1)) == 1
    pool.check()


def test_releasing_more_often_than_held_is_a_bug() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="more often than held"):
        pool.release(blocks)


def test_renaming_a_block_to_other_content_is_a_bug() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    assert pool.set_hash(block, key(1))
    assert pool.set_hash(block, key(1)), "saying it again changes nothing"
    with pytest.raises(AssertionError, match="other content"):
        pool.set_hash(block, key(2))


@pytest.mark.parametrize("damage", ["free twice", "lost", "two states", "wrong name"])
def test_check_notices(damage: str) -> None:
    pool = BlockPool(3)
    held = pool.allocate(1)
    pool.set_hash(held[0], key(1))
    if damage == "free twice":
        pool._free.append(pool._free[0])
    elif damage == "lost":
        pool._free.pop()
    elif damage == "two states":
        pool._free.append(held[0])
    else:
        pool._block_of[key(2)] = held[0]
    with pytest.raises(AssertionError):
        pool.check()
