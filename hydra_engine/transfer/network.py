"""The interface of a network that reads blocks of instances on other nodes. The engine has none of its own: it is
handed to an instance when it starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hydra_engine.core.plans import BlockIds
from hydra_engine.core.pools import PoolKind

Rows = npt.NDArray[np.uint8]  # [num_blocks, block_bytes]: a pool in host memory, contiguous


class RemoteBlocks(Protocol):
    """The pools of one peer on another node. One thread at a time calls `read`; any thread may call `close`."""

    def read(
        self, kind: PoolKind, blocks: BlockIds, target: Rows, target_blocks: BlockIds, slot: int, word: int
    ) -> bool:
        """Copies `blocks` of the peer's pool to `target_blocks` of `target`, in order, and writes nothing else. Returns
        True if control word `slot` of the peer still held `word` after the last byte had been read; if not, the content
        of the copies is undefined, as after an error. No blocks: only the word is compared.

        Connects at first use, and again after an error. Raises TransferError, with a sentence, if the peer cannot be
        reached, is silent, refuses, or sends what is not authentic; ValueError for blocks outside of `target`.
        """
        ...

    def close(self) -> None:
        """Ends the connection. A `read` in progress, and every later one, raises TransferError. Idempotent."""
        ...


class BlockNetwork(Protocol):
    """A network that moves the blocks of one instance between nodes. The exchange that it is handed to closes it."""

    registers_pools: bool  # with a device, which takes none that this process may not write

    def serve(self, pools: Mapping[PoolKind, Rows], load_word: Callable[[int], int], num_words: int) -> str:
        """Lets peers read these pools from now on. `load_word` loads one of the `num_words` control words after all
        earlier reads of the calling thread; it and the pools are read from any thread until `close`. Returns the
        endpoint that peers `open`. Called at most once. Raises ResourceError if it cannot listen."""
        ...

    def open(self, peer: str, endpoint: str) -> RemoteBlocks:
        """Returns the pools of the instance named `peer`, which the caller closes. Does not connect yet. Raises
        TransferError for an endpoint of another kind of network."""
        ...

    def close(self) -> None:
        """Stops serving: returns when no pool is read any more. Idempotent."""
        ...
