"""The content hashes that the blocks of a holder have."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

from hydra_engine.cache.blocks import CacheManager
from hydra_engine.core.ids import BlockHash

Holder = TypeVar("Holder", bound=Hashable)


def hashes_of(manager: CacheManager[Holder], holder: Holder) -> list[BlockHash | None]:
    """Hashes in the order of the holder's blocks, None for a block without one; empty if it holds nothing."""
    table = manager.tables.get(holder)
    return [] if table is None else [manager.pool._keys[block] for block in table.blocks()]
