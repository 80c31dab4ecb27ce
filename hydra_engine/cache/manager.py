"""One token cache's bookkeeping: a block pool and the block tables of those who hold blocks in it.

The KV cache has one holder per request (its id), the image cache one per image: (request id, image index). Growth is
all or nothing. Ids only; the tensors belong to the worker, and what to do when nothing is free to the scheduler.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

from hydra_engine.cache.pool import BlockPool, OutOfBlocks
from hydra_engine.cache.table import BlockTable

Holder = TypeVar("Holder", bound=Hashable)


class CacheManager(Generic[Holder]):
    """Invariant: the blocks held in the pool are exactly those in the tables, each in one table."""

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
        return self._pool.num_free

    @property
    def num_held(self) -> int:
        return self._pool.num_held

    @property
    def tables(self) -> Mapping[Holder, BlockTable]:
        """Read-only view: who holds what."""
        return MappingProxyType(self._tables)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def grow(self, holder: Holder, num_tokens: int, *, max_tokens: int) -> bool:
        """Gives the holder room for token positions [0, num_tokens), or changes nothing and returns False.

        The first call makes the table, with capacity for `max_tokens`; later calls ignore that argument. Never shrinks.
        """
        table = self._tables.get(holder)
        missing = self.blocks_for(num_tokens) if table is None else table.missing(num_tokens)
        try:
            blocks = self._pool.allocate(missing)
        except OutOfBlocks:
            return False
        if table is None:
            table = self._tables[holder] = BlockTable(self.blocks_for(max_tokens), self.block_size)
        table.append(blocks)
        return True

    def free(self, holder: Holder) -> int:
        """Takes everything back from a holder and says how many blocks; zero if it holds nothing.

        Its table's array stays as it was, so a late reader of a plan sees old ids, never wrong ones.
        """
        table = self._tables.pop(holder, None)
        if table is None:
            return 0
        self._pool.release(reversed(table.blocks()))
        return table.num_blocks

    def check(self) -> None:
        """Raises AssertionError unless pool and tables agree."""
        self._pool.check()
        blocks = [block for table in self._tables.values() for block in table.blocks()]
        assert len(blocks) == len(set(blocks)), "a block is in two tables"
        assert len(blocks) == self._pool.num_held, "the pool holds blocks that no table has"
        assert all(self._pool.refcount(block) == 1 for block in blocks), "a block in a table is not held once"
