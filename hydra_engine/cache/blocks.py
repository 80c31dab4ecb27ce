"""The blocks of a cache: a pool with reference counts, the block table of each holder, and sequence slots.

Every block is in exactly one state: free, held by `refcount >= 1` owners, or evictable (without an owner, but with the
hash of its content, and kept until its space is needed). One class serves the KV cache and the image cache. A holder of
the KV cache is a request (its id), one of the image cache a picture (its feature key).

Knows ids only: the worker owns the tensors, and the scheduler decides what to do if no block is free.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

import numpy as np

from hydra_engine.core.ids import BlockHash, RequestId
from hydra_engine.core.plans import BlockIds

Holder = TypeVar("Holder", bound=Hashable)


class OutOfBlocks(Exception):
    """Raised if fewer blocks are free than an allocation needs; nothing was allocated."""


class BlockPool:
    """A pool of blocks with reference counts. Invariant: `num_free + num_held == num_blocks`, where evictable blocks
    count as free.

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
        self.on_forget: Callable[[BlockHash], None] | None = None  # called with each hash that is not found any more

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
        """Allocates `count` blocks (0 is allowed) with one owner each; evicts content without an owner if needed.
        Raises `OutOfBlocks`, and changes nothing, if too few are free."""
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

    def find(self, key: BlockHash) -> int | None:
        """Returns the block with this content, held or evictable; None if there is none. Changes nothing."""
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
        """Makes all content without an owner impossible to find; returns the number of its blocks. Held content can
        still be found."""
        count = len(self._evictable)
        self._free.extend([self._evict() for _ in range(count)])
        return count

    def _evict(self) -> int:
        """Forgets the content of the least recently released evictable block and returns the block, which the caller
        must allocate or free."""
        block = next(iter(self._evictable))
        del self._evictable[block]
        self._forget_hash(block)
        return block

    def _forget_hash(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None, f"evictable block {block} has no content"
        del self._block_of[key]
        self._keys[block] = None
        if self.on_forget is not None:
            self.on_forget(key)


@dataclass(slots=True, eq=False)
class BlockTable:
    """The block of each token position of one holder. `block_ids[: num_blocks]` is valid; slots are defined in
    `core/plans.py`.

    The array is allocated once with the holder's maximum size and only appended to: written entries never change, so a
    plan may keep a reference to it.
    """

    block_ids: BlockIds
    num_blocks: int = 0

    def append(self, blocks: Sequence[int]) -> None:
        end = self.num_blocks + len(blocks)
        assert end <= len(self.block_ids), "a block table grows beyond the maximum it was made for"
        self.block_ids[self.num_blocks : end] = blocks
        self.num_blocks = end

    def append_one(self, block: int) -> None:
        assert self.num_blocks < len(self.block_ids), "a block table grows beyond the maximum it was made for"
        self.block_ids[self.num_blocks] = block
        self.num_blocks += 1

    def blocks(self) -> list[int]:
        """Copies the block ids, in token order."""
        blocks: list[int] = self.block_ids[: self.num_blocks].tolist()
        return blocks


class CacheManager(Generic[Holder]):
    """A block pool and the block tables of its holders. Invariant: the reference count of a block is the number of
    tables that list it, and no table lists it twice.

    Growth is all or nothing. Full blocks get the hash of their content; a new holder may begin with blocks that have
    the hashes it looks for, and does not write to these.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert block_size > 0, "a block has at least one token"
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._tables: dict[Holder, BlockTable] = {}
        self.tables: Mapping[Holder, BlockTable] = MappingProxyType(self._tables)  # read only

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that `num_tokens` tokens need, the last one possibly not full."""
        return -(-num_tokens // self.block_size)

    # ---- holding

    def grow(self, holder: Holder, num_tokens: int, *, capacity: int, extra_blocks: int = 0) -> bool:
        """Gives the holder blocks for token positions [0, num_tokens), and `extra_blocks`; False, and no change, if too
        few are free.

        The first call makes the table, with space for `capacity` tokens and `extra_blocks`; later calls ignore
        `capacity`. Never shrinks.
        """
        table = self._tables.get(holder)
        missing = self.blocks_for(num_tokens) + extra_blocks - (0 if table is None else table.num_blocks)
        try:
            blocks = self.pool.allocate(max(0, missing))
        except OutOfBlocks:
            return False
        if table is None:
            table = self._tables[holder] = BlockTable(np.zeros(self.blocks_for(capacity) + extra_blocks, np.int32))
        table.append(blocks)
        return True

    def extend(self, holders: Sequence[Holder]) -> list[int]:
        """Allocates one more block for each of these holders, which must have tables with space, and returns the block
        ids. Empty, and no change, if too few are free."""
        try:
            blocks = self.pool.allocate(len(holders))
        except OutOfBlocks:
            return []
        for holder, block in zip(holders, blocks, strict=True):
            self._tables[holder].append_one(block)
        return blocks

    def free(self, holder: Holder) -> int:
        """Removes a holder as owner of its blocks and returns their number; 0 if it has none.

        The array of its table is not changed, so a late reader of a plan sees old ids, never wrong ones.
        """
        table = self._tables.pop(holder, None)
        if table is None:
            return 0
        self.pool.release(reversed(table.blocks()))
        return table.num_blocks

    # ---- reuse

    def find(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Returns the blocks with the first, second, ... of these hashes, up to the first hash without a block. Changes
        nothing."""
        blocks = []
        for block_hash in hashes:
            block = self.pool.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def adopt(self, holder: Holder, hashes: Sequence[BlockHash], *, capacity: int, extra_blocks: int = 0) -> None:
        """Adds a new holder as owner of the blocks with these hashes, which `find` must have just found: its table
        begins with them and has space for `capacity` tokens and `extra_blocks`."""
        assert holder not in self._tables, "a holder adopts blocks before it grows"
        blocks = []
        for block_hash in hashes:
            block = self.pool.acquire(block_hash)
            assert block is not None, "content that was found is gone"
            blocks.append(block)
        table = self._tables[holder] = BlockTable(np.zeros(self.blocks_for(capacity) + extra_blocks, np.int32))
        table.append(blocks)

    def set_hashes(self, holder: Holder, first: int, hashes: Sequence[BlockHash]) -> None:
        """Sets the content hashes of the holder's blocks from its `first`th on, so that `find` returns them. A hash
        that another block has stays with that block."""
        blocks = self._tables[holder].block_ids[first : first + len(hashes)].tolist()
        for block, block_hash in zip(blocks, hashes, strict=True):
            self.pool.set_hash(block, block_hash)

    def forget(self, hashes: Iterable[BlockHash]) -> None:
        """Makes the content with these hashes impossible to find and frees its blocks, which must have no holder;
        ignores hashes without a block."""
        for block_hash in hashes:
            self.pool.forget(block_hash)


class SlotPool:
    """The sequence slots of running requests: row numbers of tables with `num_seq_slots` entries. The lowest free slot
    is allocated first, so that few requests use the first rows of every table.

    A request has one slot from its start until it is preempted or forgotten. The slot is the index of its last token
    and sampling state in the worker's tables, and of its recurrent state if the model keeps one.
    """

    def __init__(self, num_seq_slots: int) -> None:
        assert num_seq_slots > 0, "no request could run"
        self.num_seq_slots = num_seq_slots
        self.slot_of: dict[RequestId, int] = {}
        self._free = list(range(num_seq_slots))  # a heap

    def allocate(self, request_id: RequestId) -> int:
        """Allocates and returns the lowest free slot. The request must have none, and one must be free."""
        assert request_id not in self.slot_of, f"request {request_id} takes a second slot"
        seq_slot = self.slot_of[request_id] = heapq.heappop(self._free)
        return seq_slot

    def free(self, request_id: RequestId) -> None:
        """Frees the request's slot, if it has one."""
        seq_slot = self.slot_of.pop(request_id, None)
        if seq_slot is not None:
            heapq.heappush(self._free, seq_slot)
