"""torch's view of captures on an emulated device, which is not notified when one fails."""

from __future__ import annotations

from collections.abc import Callable


class Pool:
    """Memory of graphs: as much as the one of them that computes in most takes."""

    def __init__(self) -> None:
        self.uses = 0
        self.num_bytes = 0
        self.give_back: Callable[[int], None] = lambda num_bytes: None

    def __del__(self) -> None:
        self.give_back(self.num_bytes)


class Captures:
    """Captures under way. During one the allocator releases no memory, and the random generator neither draws
    outside of it nor lets a graph be replayed. A failed capture is under way for ever, unless somebody ends it.
    Nobody can end it for the allocator of pinned memory, which refuses a second capture into its pool."""

    def __init__(self) -> None:
        self.pools: list[Pool] = []
        self.pinned: list[Pool] = []
        self.draws = False

    def begin(self, pool: Pool) -> None:
        assert not self.pools, "torch allows one capture at a time"
        if pool in self.pinned:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.pools.append(pool)
        self.pinned.append(pool)
        pool.uses += 1
        self.draws = True

    def end(self, pool: Pool) -> None:
        """Ends a capture that succeeded."""
        self._cuda_endAllocateToPool(0, pool)
        self.pinned.remove(pool)
        self.draws = False

    # ---- as torch._C

    def _cuda_endAllocateToPool(self, device: int, pool: Pool) -> None:
        if pool not in self.pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.pools.remove(pool)

    def _cuda_releasePool(self, device: int, pool: Pool) -> None:
        assert pool.uses > 0, "a pool is released more often than it was used"
        pool.uses -= 1
