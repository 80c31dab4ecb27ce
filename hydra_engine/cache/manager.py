"""The bookkeeping of one cache: a block pool and the block tables of its holders.

A holder of the KV cache is a request (its id), one of the image cache a picture (its feature key). Growth is all or
nothing. Full blocks get the hash of their content; a new holder may begin with blocks that have the hashes it looks
for, and does not write to these. Knows ids only; the worker owns the tensors, and the scheduler decides what to do if
no block is free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Generic, TypeVar

from hydra_engine.cache.pool import BlockPool, OutOfBlocks
from hydra_engine.cache.table import BlockTable
from hydra_engine.core.ids import BlockHash

Holder = TypeVar("Holder", bound=Hashable)


class CacheManager(Generic[Holder]):
    """The block tables of all holders of one cache. Invariant: the reference count of a block is the number of tables
    that list it, and no table lists it twice."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert block_size > 0, "a block has at least one token"
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._tables: dict[Holder, BlockTable] = {}

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated, including those with reusable content."""
        return self._pool.num_free

    @property
    def num_held(self) -> int:
        return self._pool.num_held

    @property
    def tables(self) -> Mapping[Holder, BlockTable]:
        """Read-only view of the block table of each holder."""
        return MappingProxyType(self._tables)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ---- holding

    def grow(self, holder: Holder, num_tokens: int, *, capacity: int) -> bool:
        """Gives the holder blocks for token positions [0, num_tokens); False, and no change, if too few are free.

        The first call makes the table, with space for `capacity` tokens; later calls ignore `capacity`. Never shrinks.
        """
        table = self._tables.get(holder)
        missing = self.blocks_for(num_tokens) if table is None else table.missing(num_tokens)
        try:
            blocks = self._pool.allocate(missing)
        except OutOfBlocks:
            return False
        if table is None:
            table = self._tables[holder] = BlockTable(self.blocks_for(capacity), self.block_size)
        table.append(blocks)
        return True

    def extend(self, holders: Sequence[Holder]) -> list[int]:
        """Allocates one more block for each of these holders, which have tables, and returns the block ids. Empty, and
        no change, if too few are free."""
        try:
            blocks = self._pool.allocate(len(holders))
        except OutOfBlocks:
            return []
        for holder, block in zip(holders, blocks, strict=True):
            self._tables[holder].append_one(block)
        return blocks

    def free(self, holder: Holder) -> int:
        """Frees all blocks of a holder and returns their number; 0 if it holds none.

        The array of its table is not changed, so a late reader of a plan sees old ids, never wrong ones.
        """
        table = self._tables.pop(holder, None)
        if table is None:
            return 0
        self._pool.release(reversed(table.blocks()))
        return table.num_blocks

    # ---- reuse

    def find(self, hashes: Iterable[BlockHash]) -> list[int]:
        """The blocks that have the first, second, ... of these hashes, up to the first hash without a block. Changes
        nothing."""
        blocks = []
        for block_hash in hashes:
            block = self._pool.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_to_take(self, num_tokens: int, found: Sequence[int]) -> int:
        """Number of free blocks that a new holder of `num_tokens` takes if it begins with the blocks `found`: found
        blocks with holders cost nothing, found blocks without holders count as free and are taken."""
        return self.blocks_for(num_tokens) - sum(self._pool.refcount(block) > 0 for block in found)

    def adopt(self, holder: Holder, hashes: Sequence[BlockHash], *, capacity: int) -> None:
        """Makes the table of a new holder from the blocks with these hashes, which `find` must have just found."""
        assert holder not in self._tables, "a holder adopts blocks before it grows"
        blocks = []
        for block_hash in hashes:
            block = self._pool.acquire(block_hash)
            assert block is not None, "content that was found is gone"
            blocks.append(block)
        table = self._tables[holder] = BlockTable(self.blocks_for(capacity), self.block_size)
        table.append(blocks)

    def set_hashes(self, holder: Holder, first: int, hashes: Sequence[BlockHash]) -> None:
        """Sets the content hashes of the holder's blocks from `first` on. If another block has a hash already, that one
        keeps it."""
        blocks = self._tables[holder].block_ids[first : first + len(hashes)].tolist()
        for block, block_hash in zip(blocks, hashes, strict=True):
            self._pool.set_hash(block, block_hash)

    def forget(self, hashes: Iterable[BlockHash]) -> None:
        """Makes content without a holder impossible to find; ignores hashes without a block. Asserts that no block is
        held."""
        for block_hash in hashes:
            self._pool.forget(block_hash)

    def forget_unheld(self) -> int:
        """Makes all content without a holder impossible to find; returns the number of its blocks. Held blocks keep
        their hashes and can still be found."""
        return self._pool.forget_evictable()

    def hashes(self, holder: Holder) -> list[BlockHash | None]:
        """Content hashes of a holder's blocks, in order, None for a block without one; empty if it holds nothing."""
        table = self._tables.get(holder)
        return [] if table is None else [self._pool.hash_of(block) for block in table.blocks()]

    def check(self) -> None:
        """Raises AssertionError unless pool and tables agree."""
        self._pool.check()
        listed: Counter[int] = Counter()
        for table in self._tables.values():
            blocks = table.blocks()
            assert len(blocks) == len(set(blocks)), "a block is in one table twice"
            listed.update(blocks)
        assert len(listed) == self._pool.num_held, "the pool holds blocks that no table has"
        for block, count in listed.items():
            held = self._pool.refcount(block)
            assert held == count, f"block {block} is in {count} tables and held {held} times"
