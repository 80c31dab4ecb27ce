"""The books over the caches of an instance: who holds how many blocks, and whether that is as it should be.

Reads the cache managers, changes nothing. Does not know what a request does; it is told which ones are alive.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hydra_engine.cache.features import FeatureCache
from hydra_engine.cache.manager import CacheManager
from hydra_engine.cache.slots import SeatPool
from hydra_engine.core.ids import RequestId

MAX_LINES = 200


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """What is held right now; at rest every count but the totals is zero and there are no problems. Blocks that nobody
    holds are free, also while their content can still be reused."""

    num_requests: int
    kv_blocks_held: int
    kv_blocks_total: int
    image_blocks_held: int
    image_blocks_total: int
    holders: tuple[str, ...]  # at most MAX_LINES
    problems: tuple[str, ...]
    state_slots_held: int = 0
    state_slots_total: int = 0


class Ledger:
    """`has_states`: a seat is the place of a recurrent state too, and is counted as such."""

    def __init__(
        self, kv: CacheManager[RequestId], features: FeatureCache, seats: SeatPool, *, has_states: bool = False
    ) -> None:
        self._kv = kv
        self._features = features
        self._seats = seats
        self._has_states = has_states

    def problems(self, live: Collection[RequestId]) -> tuple[str, ...]:
        """Blocks without a living owner, and broken books; empty when all is well."""
        found = [f"request {r} is gone and holds KV blocks" for r in self._kv.tables if r not in live]
        for key, _, _ in self._features.held():
            users = self._features.users(key)
            found += [f"request {r} is gone and holds image {i}" for r, i in users if r not in live]
        found += [f"request {r} is gone and holds a seat" for r in self._seats.held if r not in live]
        if self._seats.held.keys() != self._kv.tables.keys():
            found.append("seats and KV blocks are not held by the same requests")
        books: tuple[tuple[str, CacheManager[RequestId] | FeatureCache | SeatPool], ...]
        books = (("KV cache", self._kv), ("image cache", self._features), ("seats", self._seats))
        for name, book in books:
            try:
                book.check()
            except AssertionError as error:
                found.append(f"{name}: {error}")
        return tuple(found)

    def check(self, live: Collection[RequestId]) -> None:
        """Raises AssertionError listing the problems, if there are any."""
        problems = self.problems(live)
        assert not problems, "; ".join(problems)

    def snapshot(self, live: Collection[RequestId]) -> LedgerSnapshot:
        lines = [f"request {r}: {table.num_blocks} KV blocks" for r, table in self._kv.tables.items()]
        for key, _, num_blocks in self._features.held():
            users = self._features.users(key)
            lines += [f"request {r} image {i}: {num_blocks} blocks" for r, i in users]
            if not users:
                lines.append(f"an encode that nobody waits for any more: {num_blocks} blocks")
        if len(lines) > MAX_LINES:
            lines[MAX_LINES - 1 :] = [f"and {len(lines) - MAX_LINES + 1} more"]
        return LedgerSnapshot(
            num_requests=len(live),
            kv_blocks_held=self._kv.num_held,
            kv_blocks_total=self._kv.num_blocks,
            image_blocks_held=self._features.num_held,
            image_blocks_total=self._features.num_blocks,
            holders=tuple(lines),
            problems=self.problems(live),
            state_slots_held=len(self._seats.held) if self._has_states else 0,
            state_slots_total=self._seats.num_seats if self._has_states else 0,
        )
