"""Snapshots of recurrent states: the state slots beyond those of running requests, and the prefix that each belongs to.

A state cannot be cut like KV: a request continues behind a cached prefix only from the state at the very end of it. A
step may leave its state in any slot, so keeping one costs no copy. A snapshot belongs to a KV block: it is the state
behind the block's last token, has the block's hash, and is forgotten with the block. A running request keeps at most
one beyond its prompt, that of its latest full block; when the request ends it can be found, as those of its prompt can
once a token was sampled behind them. Knows ids only; where states are kept is decided in `scheduler/checkpoints.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hydra_engine.cache.blocks import BlockPool, CacheManager
from hydra_engine.core.ids import BlockHash, RequestId

OWN = -1  # in place of a state slot: one of the two that belong to the request's sequence slot


@dataclass(frozen=True, slots=True)
class HeldSnapshot:
    """A snapshot that a running request holds. `in_prompt`: others may find it while the request runs."""

    position: int  # number of tokens that the state has seen, a multiple of the block size
    snapshot: int
    in_prompt: bool


class StateSnapshots:
    """The snapshots of an instance and their holders. The reference count of a snapshot in `pool` is the number of
    requests that hold it; one without a holder is evicted in the order of release.

    A request holds the snapshot that it started from, or its latest one, as long as a row of its that failed to be
    computed may have to be planned again: rows read their states from these.
    """

    def __init__(self, kv: CacheManager[RequestId], num_snapshots: int, first_slot: int) -> None:
        """`kv`: the KV cache; its pool's hook is set. `first_slot`: the state slot of snapshot 0."""
        self.pool = BlockPool(num_snapshots)
        self._block_size = kv.block_size
        self._first_slot = first_slot
        self._holdings: dict[RequestId, list[HeldSnapshot]] = {}
        # Read only, by ascending positions.
        self.holdings: Mapping[RequestId, Sequence[HeldSnapshot]] = MappingProxyType(self._holdings)
        kv.pool.on_forget = self._forget

    def num_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """Number of leading blocks, of those with these hashes, up to the last one with a snapshot; 0 if none has."""
        return next((n for n in range(len(hashes), 0, -1) if self.pool.find(hashes[n - 1]) is not None), 0)

    # ---- running requests

    def start(self, request_id: RequestId, prefix: Sequence[BlockHash]) -> None:
        """Lets a request begin behind the blocks with these hashes, as many as `num_blocks` has just returned; none: at
        the start of its prompt."""
        assert request_id not in self._holdings, f"request {request_id} starts twice"
        self._holdings[request_id] = held = []
        if prefix:
            snapshot = self.pool.acquire(prefix[-1])
            assert snapshot is not None, "a snapshot that was found is gone"
            held.append(HeldSnapshot(len(prefix) * self._block_size, snapshot, in_prompt=True))

    def slot_at(self, request_id: RequestId, position: int) -> int:
        """State slot of the request's snapshot at this position; OWN if it has none there."""
        slots = (self._first_slot + one.snapshot for one in self._holdings[request_id] if one.position == position)
        return next(slots, OWN)

    def latest(self, request_id: RequestId) -> int:
        """Position of the request's latest snapshot; 0 if it has none."""
        held = self._holdings[request_id]
        return held[-1].position if held else 0

    def reserve(self, request_id: RequestId, start: int, end: int, *, in_prompt: bool) -> int:
        """Returns the state slot for a row at positions [start, end), `end` behind a full block, to leave its state in:
        a snapshot that the request holds from now on. OWN if every snapshot is held.

        A snapshot behind `start` is of an earlier row at these positions that was not computed; it is freed first.
        """
        held = self._holdings[request_id]
        while held and held[-1].position > start:
            self.pool.release([held.pop().snapshot])
        if not self.pool.num_free:
            return OWN
        (snapshot,) = self.pool.allocate(1)
        held.append(HeldSnapshot(end, snapshot, in_prompt))
        return self._first_slot + snapshot

    def publish(self, request_id: RequestId, hashes: Sequence[BlockHash]) -> None:
        """Makes snapshots of the prompt findable. `hashes`: of the request's leading blocks behind which a token was
        sampled. Frees all of these snapshots but the last one, which the request goes on to hold."""
        held = self._holdings[request_id]
        proven = [one for one in held if one.position <= len(hashes) * self._block_size]
        for one in proven:
            if one.in_prompt:
                self.pool.set_hash(one.snapshot, hashes[one.position // self._block_size - 1])
        earlier = proven[:-1]
        self.pool.release(one.snapshot for one in earlier)
        del held[: len(earlier)]

    def free(self, request_id: RequestId, hashes: Sequence[BlockHash]) -> None:
        """Removes the request as holder of its snapshots, after making those in blocks with these hashes, its published
        ones, findable. Does nothing if it does not run."""
        for one in self._holdings.pop(request_id, ()):
            if one.position <= len(hashes) * self._block_size:
                self.pool.set_hash(one.snapshot, hashes[one.position // self._block_size - 1])
            self.pool.release([one.snapshot])

    def _forget(self, block_hash: BlockHash) -> None:
        """Frees the snapshot of a KV block that is evicted, unless a request holds it."""
        snapshot = self.pool.find(block_hash)
        if snapshot is not None and not self.pool.refcount(snapshot):
            self.pool.forget(block_hash)
