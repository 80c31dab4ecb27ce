"""What instances tell each other about the memory they share: which pools there are, how a block of each is laid out.

Two instances can exchange blocks of a pool only if the layouts agree in everything but the number of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PoolKind(StrEnum):
    FEATURES = "features"  # of the image cache
    KV = "kv"


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """`block_shape` is [L, X, S, H, D] of `PagedCache`; a pool is [num_blocks, *block_shape] contiguous."""

    kind: PoolKind
    num_blocks: int
    block_shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16", "float16"
    block_bytes: int

    def agrees_with(self, other: PoolLayout) -> bool:
        """Blocks can be copied from one to the other."""
        ours = (self.kind, self.block_shape, self.dtype, self.block_bytes)
        return ours == (other.kind, other.block_shape, other.dtype, other.block_bytes)


@dataclass(frozen=True, slots=True)
class PoolExport:
    """One pool as its owner offers it. `transport` says how it is mapped: "memfd" with the descriptor that travels
    beside this (`descriptor` counts those of one message), "cuda-ipc" with `handle`."""

    layout: PoolLayout
    transport: str
    num_bytes: int
    descriptor: int = -1
    handle: bytes = b""


@dataclass(frozen=True, slots=True)
class Exports:
    """Everything that an instance lets its peers read: its pools and its control words ([num_words] uint64 in a memfd,
    descriptor `words`). `staging`: pools in host memory, of the same blocks but fewer, into which the owner copies what
    a peer cannot read where it is."""

    pools: tuple[PoolExport, ...]
    words: int
    num_words: int
    staging: tuple[PoolExport, ...] = ()
