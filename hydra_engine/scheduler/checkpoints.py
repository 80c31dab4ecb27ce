"""Chooses where the recurrent states of requests are kept as snapshots (`cache/snapshots.py`). Only models with such
states get here.

A chunk must end where its state is kept, so a snapshot within what one chunk could compute costs one step more. In a
prompt they are kept where another one is likely to continue: where cached KV ends that had no snapshot (two prompts
have this beginning already), at the end of the last picture, at the end of the last turn (a chat template may write the
answer's head differently once the answer is history), at the end of the prompt, and at the ends of chunks that are far
apart. All are aligned down to a block, and at least MIN_BLOCKS behind the one before: recomputing less than that costs
no more than a step. A decode keeps its state whenever it fills a block, for the turn that follows its answer.
"""

from __future__ import annotations

import numpy as np

from hydra_engine.cache.blocks import CacheManager
from hydra_engine.cache.snapshots import OWN, StateSnapshots
from hydra_engine.core.ids import RequestId
from hydra_engine.core.plans import DecodeRows, Int64s
from hydra_engine.core.request import Request
from hydra_engine.core.state import RequestState

MIN_BLOCKS = 2
FAR_BLOCKS = 128  # between snapshots at the ends of chunks, and
MAX_CHUNKS = 8  # at most so many of these in a prompt
MAX_HEAD = 64  # tokens that a chat template puts between the last turn and an answer


class Checkpoints:
    """The positions at which each running request keeps its state, and the state slots of its rows."""

    def __init__(self, kv: CacheManager[RequestId], snapshots: StateSnapshots) -> None:
        self.snapshots = snapshots
        self._kv = kv
        self._positions: dict[RequestId, list[int]] = {}

    def start(self, state: RequestState, num_found: int) -> None:
        """Called when a request starts behind `num_found` cached blocks, which it has adopted."""
        request_id, hashes, size = state.request.id, state.block_hashes, self._kv.block_size
        self.snapshots.start(request_id, hashes[:num_found])
        last = (state.num_tokens - 1) // size
        shared = len(self._kv.find(hashes[:last]))
        self._positions[request_id] = positions(state.request, num_found, shared, last, size)

    def free(self, state: RequestState) -> None:
        """Called before the blocks of a request are freed, after what it has published: frees its snapshots."""
        request_id = state.request.id
        self._positions.pop(request_id, None)
        self.snapshots.free(request_id, state.block_hashes[: state.num_published])

    def chunk_end(self, state: RequestState, start: int, end: int) -> int:
        """End of a chunk that may hold positions [start, end): the first one at which a state is to be kept."""
        if not self.snapshots.pool.num_free:
            return end
        for position in self._positions[state.request.id]:
            if start < position <= end:
                return position
        aligned = end - end % self._kv.block_size
        return aligned if start < aligned and end < state.num_tokens and self._is_far(state, aligned) else end

    def chunk_slots(self, state: RequestState, start: int, end: int) -> tuple[int, int]:
        """State slots that the chunk [start, end) reads and writes; OWN: one of the request's own."""
        request_id = state.request.id
        read = self.snapshots.slot_at(request_id, start) if start else OWN
        known = end in self._positions[request_id] or end == state.num_tokens
        if end % self._kv.block_size or not (known or self._is_far(state, end)):
            return read, OWN
        return read, self.snapshots.reserve(request_id, start, end, in_prompt=True)

    def decode_slots(self, decodes: DecodeRows) -> Int64s | None:
        """State slots that the rows of decodes write, OWN where it is one of the request's own; None if all are."""
        size, starts = self._kv.block_size, decodes.starts
        rows = (starts % size == size - 1).nonzero()[0]
        if not rows.size:
            return None
        slots = np.full(len(decodes), OWN, dtype=np.int64)
        for row, request_id, start in zip(
            rows.tolist(), decodes.request_ids[rows].tolist(), starts[rows].tolist(), strict=True
        ):
            slots[row] = self.snapshots.reserve(RequestId(request_id), start, start + 1, in_prompt=False)
        return slots

    def _is_far(self, state: RequestState, position: int) -> bool:
        """True if the state at the end of a chunk, which is no position of `positions`, is to be kept."""
        size = self._kv.block_size
        far = max(FAR_BLOCKS, self._kv.blocks_for(state.num_tokens) // MAX_CHUNKS)
        return position - self.snapshots.latest(state.request.id) >= far * size


def positions(request: Request, num_found: int, num_shared: int, last: int, block_size: int) -> list[int]:
    """Positions, ascending, at which the state of a request is kept that starts behind `num_found` blocks, with KV of
    `num_shared` blocks in the cache. `last`: its full blocks, without the one that has its last token."""
    wanted = {num_shared, last, turn_end(request) // block_size}
    if request.images:
        wanted.add(request.images[-1].end // block_size)
    chosen, latest = [], num_found
    for block in sorted(wanted):
        if latest + MIN_BLOCKS <= block <= last:
            chosen.append(block * block_size)
            latest = block
    return chosen


def turn_end(request: Request) -> int:
    """Number of prompt tokens up to the end of the last turn; 0 if no head of an answer follows it."""
    tokens, ends, size = request.prompt_token_ids, request.eos_token_ids, request.num_prompt
    return next((end for end in range(size, max(size - MAX_HEAD, 0), -1) if tokens[end - 1] in ends), 0)
