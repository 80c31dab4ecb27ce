"""A fixed pool of cache blocks: reference counts, and the free blocks that still have reusable content.

Every block is in exactly one state: free, held by `refcount >= 1` owners, or evictable (without an owner, but with the
hash of its content, and kept until its space is needed). One class serves the KV cache and the image cache. Knows block
ids only: not the content of a block, its owners or its place in memory.
"""

from __future__ import annotations

from collections.abc import Iterable

from hydra_engine.core.ids import BlockHash


class OutOfBlocks(Exception):
    """Raised if the pool cannot allocate that many blocks now; nothing was allocated."""


class BlockPool:
    """The pool. Invariant: `num_free + num_held == num_blocks`, where evictable blocks count as free.

    Deterministic: the same calls give the same block ids. Free blocks without content are allocated first, then
    evictable ones, the least recently released first.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 0, "a pool has no negative size"
        self.num_blocks = num_blocks
        self._refcounts = [0] * num_blocks
        self._keys: list[BlockHash | None] = [None] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 is allocated first
        self._evictable: dict[int, None] = {}  # oldest first
        self._block_of: dict[BlockHash, int] = {}

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` can return, including those with reusable content."""
        return len(self._free) + len(self._evictable)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free

    def refcount(self, block: int) -> int:
        return self._refcounts[block]

    def allocate(self, count: int) -> list[int]:
        """Allocates `count` blocks (0 is allowed) with one owner each. Raises `OutOfBlocks`, and changes nothing, if
        too few are free."""
        assert count >= 0, "cannot allocate a negative number of blocks"
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_free} of {self.num_blocks} free")
        first = max(0, len(self._free) - count)
        blocks = self._free[first:][::-1]
        del self._free[first:]
        while len(blocks) < count:
            blocks.append(self._evict())
        for block in blocks:
            self._refcounts[block] = 1
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Removes one owner of each block. After the last one the block is free or, with content, evictable.

        Blocks are evicted in the order of release, so release the end of a chain before its beginning.
        """
        for block in blocks:
            assert self._refcounts[block] > 0, f"block {block} is released more often than held"
            self._refcounts[block] -= 1
            if self._refcounts[block] == 0:
                if self._keys[block] is None:
                    self._free.append(block)
                else:
                    self._evictable[block] = None

    def set_hash(self, block: int, key: BlockHash) -> bool:
        """Sets the content hash of a held block. False, and no change, if another block has this content already."""
        assert self._refcounts[block] > 0, f"block {block} is not held"
        if self._block_of.setdefault(key, block) != block:
            return False
        assert self._keys[block] in (None, key), f"block {block} already has other content"
        self._keys[block] = key
        return True

    def hash_of(self, block: int) -> BlockHash | None:
        return self._keys[block]

    def find(self, key: BlockHash) -> int | None:
        """The block with this content, held or evictable. Changes nothing."""
        return self._block_of.get(key)

    def acquire(self, key: BlockHash) -> int | None:
        """Adds an owner to the block with this content and returns it; None if there is none."""
        block = self._block_of.get(key)
        if block is not None:
            self._evictable.pop(block, None)
            self._refcounts[block] += 1
        return block

    def forget(self, key: BlockHash) -> bool:
        """Makes content without an owner impossible to find and frees its block. False if there is none. Asserts that
        the block is not held."""
        block = self._block_of.get(key)
        if block is None:
            return False
        assert self._refcounts[block] == 0, f"block {block} is held"
        del self._evictable[block]
        self._forget_hash(block)
        self._free.append(block)
        return True

    def forget_evictable(self) -> int:
        """Forgets all content without an owner; returns the number of its blocks."""
        count = len(self._evictable)
        self._free.extend([self._evict() for _ in range(count)])
        return count

    def _evict(self) -> int:
        block = next(iter(self._evictable))
        del self._evictable[block]
        self._forget_hash(block)
        return block

    def _forget_hash(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None, f"evictable block {block} has no content"
        del self._block_of[key]
        self._keys[block] = None

    def check(self) -> None:
        """Raises AssertionError unless every block is in exactly one state and every hash leads to its block."""
        free, evictable = set(self._free), set(self._evictable)
        held = {block for block, count in enumerate(self._refcounts) if count > 0}
        assert len(free) == len(self._free), "a block is on the free list twice"
        assert not free & evictable and not free & held and not evictable & held, "a block is in two states"
        assert free | evictable | held == set(range(self.num_blocks)), "a block is in no state"
        assert all(count >= 0 for count in self._refcounts), "negative reference count"
        hashed = {block for block, key in enumerate(self._keys) if key is not None}
        assert evictable <= hashed and not free & hashed, "evictable blocks have content, free ones have none"
        assert {block: key for key, block in self._block_of.items()} == {
            block: self._keys[block] for block in hashed
        }, "hashes and blocks disagree"
