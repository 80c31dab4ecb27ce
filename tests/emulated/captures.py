"""What torch believes of captures on an emulated device, which it is not told when one fails."""

from __future__ import annotations


class Pool:
    """Memory of graphs."""

    def __init__(self) -> None:
        self.uses = 0


class Captures:
    """While one is under way the allocator releases no memory, and the random generator neither draws outside of it nor
    lets a graph be replayed. One that fails is under way for ever, unless somebody ends it."""

    def __init__(self) -> None:
        self.pools: list[Pool] = []
        self.draws = False

    def begin(self, pool: Pool) -> None:
        assert not self.pools, "torch allows one capture at a time"
        self.pools.append(pool)
        pool.uses += 1
        self.draws = True

    # ---- as torch._C

    def _cuda_endAllocateToPool(self, device: int, pool: Pool) -> None:
        if pool not in self.pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.pools.remove(pool)

    def _cuda_releasePool(self, device: int, pool: Pool) -> None:
        assert pool.uses > 0, "a pool is released more often than it was used"
        pool.uses -= 1
