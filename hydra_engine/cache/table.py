"""The block table of one holder: the block of each of its token positions.

The array is allocated once with the holder's maximum size and only appended to, so a plan may keep a reference to it.
Does not allocate blocks; `manager.py` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hydra_engine.core.plans import BlockIds


class BlockTable:
    """A block table. `block_ids[: num_blocks]` is valid; written entries never change. Slots are defined in
    `core/plans.py`."""

    __slots__ = ("block_ids", "block_size", "num_blocks", "num_slots")

    def __init__(self, capacity: int, block_size: int) -> None:
        self.block_ids: BlockIds = np.zeros(capacity, dtype=np.int32)
        self.block_size = block_size
        self.num_blocks = 0
        self.num_slots = 0  # token positions [0, num_slots) have a block

    def missing(self, num_tokens: int) -> int:
        """Number of further blocks that positions [0, num_tokens) need."""
        return max(0, -(-num_tokens // self.block_size) - self.num_blocks)

    def append(self, blocks: Sequence[int]) -> None:
        end = self.num_blocks + len(blocks)
        assert end <= len(self.block_ids), "a block table grows beyond the maximum it was made for"
        self.block_ids[self.num_blocks : end] = blocks
        self.num_blocks = end
        self.num_slots = end * self.block_size

    def append_one(self, block: int) -> None:
        assert self.num_blocks < len(self.block_ids), "a block table grows beyond the maximum it was made for"
        self.block_ids[self.num_blocks] = block
        self.num_blocks += 1
        self.num_slots += self.block_size

    def blocks(self) -> list[int]:
        """The blocks held, in token order."""
        blocks: list[int] = self.block_ids[: self.num_blocks].tolist()
        return blocks
