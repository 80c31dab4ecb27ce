"""Descriptions of the memory that instances share: the pools, and the layout of a block of each.

Two instances can exchange blocks of a pool only if the layouts agree in everything but the number of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PoolKind(StrEnum):
    FEATURES = "features"  # the image cache
    KV = "kv"


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """The layout of a pool, contiguous [num_blocks, *block_shape]. `block_shape` is [L, X, S, H, D]: layers, keys and
    values (X = 2) or features (X = 1), slots, heads, numbers per head. `block_bytes` includes the scales of a quantized
    block."""

    kind: PoolKind
    num_blocks: int
    block_shape: tuple[int, ...]
    dtype: str  # "float32", "bfloat16", "float16"; "int8" if quantized
    block_bytes: int

    def agrees_with(self, other: PoolLayout) -> bool:
        """True if blocks can be copied from one to the other: all but the numbers of blocks are equal."""
        ours = (self.kind, self.block_shape, self.dtype, self.block_bytes)
        return ours == (other.kind, other.block_shape, other.dtype, other.block_bytes)


@dataclass(frozen=True, slots=True)
class PoolExport:
    """A pool as its owner shares it. `transport`: "memfd", mapped by file descriptor number `descriptor` of those sent
    with the message, or "cuda-ipc", mapped by `handle`."""

    layout: PoolLayout
    transport: str
    num_bytes: int
    descriptor: int = -1
    handle: bytes = b""


@dataclass(frozen=True, slots=True)
class Exports:
    """Everything that an instance lets its peers read: its pools, and its control words, which say whether an offer is
    still valid ([num_words] uint64 in a memfd, file descriptor number `words` of those sent with the message).
    `staging`: smaller pools in host memory with the same block layout, into which the owner copies what a peer cannot
    read directly. `endpoint`: where peers on other nodes read the staging pools, and the other pools in host memory; ""
    if nowhere."""

    pools: tuple[PoolExport, ...]
    words: int
    num_words: int
    staging: tuple[PoolExport, ...] = ()
    endpoint: str = ""
