"""The block tables of running decodes as rows of one array, which plans share.

Row i belongs to place i of the table of decodes (`decodes.py`), which says who joins, leaves and moves to another
place. A row shows the blocks of positions before the member's `room`, zeros behind. What a plan may see is only ever
appended to; whoever leaves makes a new array, so nothing is copied while the same requests decode. Allocates no block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hydra_engine.cache.table import BlockTable
from hydra_engine.core.plans import BlockIds, Ints
from hydra_engine.scheduler.decode_times import Indices

SPARE_COLUMNS = 16  # that the block tables of a plan may have behind the longest context


class DecodeBlocks:
    def __init__(self, num_slots: int, block_size: int) -> None:
        self._block_size = block_size
        self._own: list[BlockTable] = []
        self._rooms: Ints = np.zeros(num_slots, dtype=np.int64)
        self._tables: BlockIds = np.zeros((num_slots, SPARE_COLUMNS), dtype=np.int32)
        self._most = 0  # blocks that a member can have, of all so far
        self._is_shared = False  # a plan may see the array

    def join(self, blocks: BlockTable, start: int) -> None:
        """At the place behind all others; its next row begins at `start`."""
        index, shown = len(self._own), -(-start // self._block_size)
        self._own.append(blocks)
        self._rooms[index] = shown * self._block_size
        self._most = max(self._most, len(blocks.block_ids))
        self._reserve(shown)
        self._tables[index] = 0
        self._tables[index, :shown] = blocks.block_ids[:shown]

    def leave(self, index: int) -> None:
        """The last member takes the place."""
        last = len(self._own) - 1
        self._own[index] = self._own[last]
        del self._own[last]
        if self._is_shared:
            self._tables, self._is_shared = self._tables.copy(), False
        self._rooms[index], self._tables[index] = self._rooms[last], self._tables[last]

    def lacking(self, indices: Indices, starts: Ints) -> Ints:
        """The places of those whose requests have no block for their next row."""
        lacks = starts >= self._rooms[indices]
        if not np.count_nonzero(lacks):
            return _NO_INDICES
        lacking = lacks.nonzero()[0] if isinstance(indices, slice) else indices[lacks]
        wanted = starts[lacks].tolist()
        have = [self._own[index].num_slots > start for index, start in zip(lacking.tolist(), wanted, strict=True)]
        if not any(have):
            return lacking
        granted = lacking[have]  # a request that has given way once has got all at once
        columns = (self._rooms[granted] // self._block_size).tolist()
        found = [int(self._own[p].block_ids[column]) for p, column in zip(granted.tolist(), columns, strict=True)]
        self.show(granted, found)
        return lacking[np.logical_not(have)]

    def show(self, indices: Ints, blocks: Sequence[int]) -> None:
        """The blocks in which the next rows of these members begin."""
        rooms = self._rooms[indices]
        columns = rooms // self._block_size
        self._reserve(int(columns.max()) + 1)
        self._tables[indices, columns] = blocks
        self._rooms[indices] = rooms + self._block_size

    def _reserve(self, columns: int) -> None:
        """Plans keep the array that they have."""
        have = self._tables.shape[1]
        if columns > have:
            wider = np.zeros((len(self._tables), self._width(columns)), dtype=np.int32)
            wider[:, :have] = self._tables
            self._tables, self._is_shared = wider, False

    def _width(self, columns: int) -> int:
        """Of tables that show so many: some to spare, for they grow, but no more than anybody can need."""
        return max(columns, min(-(-columns // SPARE_COLUMNS) * SPARE_COLUMNS, self._most))

    def tables(self, indices: Indices, longest: int) -> BlockIds:
        """For a plan. No start of a member is larger than `longest`."""
        width = self._width(longest // self._block_size + 1)
        if width < self._tables.shape[1]:
            self._tables = self._tables[:, :width].copy()
        self._is_shared = True
        return self._tables[indices]

    def check(self, index: int, blocks: BlockTable, where: str) -> None:
        """Raises AssertionError unless the member at this place has these blocks."""
        shown = int(self._rooms[index]) // self._block_size
        assert self._own[index] is blocks, f"{where} has another's blocks"
        assert self._rooms[index] <= blocks.num_slots, f"{where} shows blocks that it does not have"
        row = self._tables[index]
        assert row[:shown].tolist() == blocks.blocks()[:shown] and not row[shown:].any(), f"{where}: block table"


_NO_INDICES: Ints = np.zeros(0, dtype=np.int64)
