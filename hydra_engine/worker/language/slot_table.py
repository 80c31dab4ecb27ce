"""The rows of a language plan as columns, and the state of running requests by sequence slot, so that decodes in a plan
carry no data.

Row numbers count decodes first, then chunks. A request takes its slot with its first chunk and keeps it until a chunk
of another request comes. Only the lane's thread uses the table, in the order of the plans, so a decode that was planned
ahead (token -1) finds its token here; `fail` and `failed` are also called by the thread that reads results. Does not
decide which slot a request gets, or when it ends: the next request overwrites what a slot holds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_engine.backend.base import PagedCache, StateCache, StateRows
from hydra_engine.core.plans import BlockIds, ChunkRow, DecodeRows, Int64s, LanguagePlan
from hydra_engine.core.request import Request
from hydra_engine.worker.language.sampler import NO_FAST_PATH, SamplingState, SlotSampling, SlotSpecials
from hydra_engine.worker.ports import WorkerRequest


def request_ids_of(plan: LanguagePlan) -> Int64s:
    """Request id of each row, [num_rows]."""
    return _column(plan.decodes.request_ids, [chunk.request_id for chunk in plan.chunks])


def seq_slots_of(plan: LanguagePlan) -> Int64s:
    """Sequence slot of each row, [num_rows]."""
    return _column(plan.decodes.seq_slots, [chunk.seq_slot for chunk in plan.chunks])


def starts_of(plan: LanguagePlan) -> Int64s:
    """Position of each row's first token, [num_rows]."""
    return _column(plan.decodes.starts, [chunk.start for chunk in plan.chunks])


def counts_of(plan: LanguagePlan) -> Int64s:
    """Number of tokens of each row, [num_rows]."""
    return _column(np.ones(len(plan.decodes), dtype=np.int64), [len(chunk.token_ids) for chunk in plan.chunks])


def _column(decodes: Int64s, chunks: Sequence[int]) -> Int64s:
    """Values of the decodes, then of the chunks; without chunks the plan's own array, not to be changed."""
    return np.concatenate((decodes, np.array(chunks, dtype=np.int64))) if chunks else decodes


def part_of(
    plan: LanguagePlan, records: Sequence[WorkerRequest], rows: Int64s
) -> tuple[LanguagePlan, list[WorkerRequest]]:
    """Returns a plan with only these rows, and the records of its chunks. `records[i]` belongs to `plan.chunks[i]`;
    `rows` ascend."""
    decodes, first = plan.decodes, len(plan.decodes)
    among = rows[rows < first]
    chunks = (rows[rows >= first] - first).tolist()
    fewer = DecodeRows(
        decodes.request_ids[among],
        decodes.seq_slots[among],
        decodes.token_ids[among],
        decodes.starts[among],
        decodes.num_generated[among],
        decodes.block_tables[among],
    )
    state_slots = None if plan.state_slots is None else plan.state_slots[among]
    part = replace(plan, decodes=fewer, chunks=tuple(plan.chunks[i] for i in chunks), state_slots=state_slots)
    return part, [records[i] for i in chunks]


def lacks_one_token(chunk: ChunkRow) -> bool:
    """True for a chunk that does the work of a decode: its only token is the latest generated one, and it samples."""
    return chunk.sample and len(chunk.token_ids) == 1 and chunk.num_generated > 0


_HOST = torch.device("cpu")
_NO_OWNER = -1
_NEVER = -1


class SlotOwners(NamedTuple):
    """Snapshot in step number `step`: the sequence slot of each row, and since when the row's request owns it,
    [num_rows] each."""

    step: int
    seq_slots: Int64s
    since: Int64s  # step in which the request got the slot or restarted; `step` + 1: another request owns it


class SamplingRows(NamedTuple):
    """The rows of a plan that sample, in order. Special rows have biases, penalties, masks or log probabilities."""

    rows: Int64s  # [B'] row of the plan
    seq_slots: Int64s  # [B']
    num_generated: Int64s  # [B']
    special: Int64s  # indices into these arrays, ascending: rows that have generated fewer tokens than `fast_path_from`


class SlotTable:
    """The state of running requests, in arrays with one entry per sequence slot, and their last tokens on `device`.

    A request owns its slot from step number `since` on; a restart of the request resets `since`. Steps are numbered
    from 1. `asynchronous`: decodes that take their token from the device keep token -1 on the host (`resolve`); padding
    rows have a slot of their own, after all others. Only for the lane's thread, except `fail` and `failed`.
    """

    def __init__(self, num_seq_slots: int, device: torch.device = _HOST, *, asynchronous: bool = False) -> None:
        self.asynchronous = asynchronous
        self.step = 0  # number of the current step
        self.owners: Int64s = np.full(num_seq_slots, _NO_OWNER, dtype=np.int64)  # request ids
        self.rope_deltas: Int64s = np.zeros(num_seq_slots, dtype=np.int64)
        self.fast_path_from: Int64s = np.full(num_seq_slots, NO_FAST_PATH, dtype=np.int64)  # as in SamplingState
        self.since: Int64s = np.zeros(num_seq_slots, dtype=np.int64)  # step in which the request got it or restarted
        self.sampling = SlotSampling(num_seq_slots, np.float64 if device.type == "cpu" else np.float32)
        self.specials = SlotSpecials(num_seq_slots)
        self.padding = num_seq_slots  # the slot of padded rows
        self._device = device
        self._counts: Tensor | None = None
        self._has_token: npt.NDArray[np.bool_] = np.zeros(num_seq_slots, dtype=np.bool_)  # of its present request
        self._checked: Int64s | None = None  # slots of decodes that their requests owned; no owner has changed since
        self._requests: list[Request | None] = [None] * num_seq_slots
        self._sampling_states: list[SamplingState | None] = [None] * num_seq_slots
        self._constrained: npt.NDArray[np.bool_] = np.zeros(num_seq_slots, dtype=np.bool_)  # has a grammar
        self._deferred_at: Int64s = np.full(num_seq_slots, _NEVER, dtype=np.int64)  # position of its deferred row
        self._lock = threading.Lock()  # for what follows
        self._any_failed = False
        self._failed_in: Int64s = np.full(num_seq_slots, _NEVER, dtype=np.int64)  # the first step in which a row failed

    # ---- owners

    def begin_step(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> None:
        """Begins the next step: gives the slots of the plan's chunks to their requests, with their sampling parameters,
        and ends deferrals of these requests. `records[i]` belongs to `plan.chunks[i]`. With a new owner, or a chunk at
        position 0, the slot has no token, and earlier failures no longer count."""
        self.step += 1
        for chunk, record in zip(plan.chunks, records, strict=True):
            seq_slot, state = chunk.seq_slot, record.sampling_state
            if self.owners[seq_slot] != chunk.request_id:
                self.owners[seq_slot] = chunk.request_id
                self._checked = None
                self.since[seq_slot] = self.step
            elif chunk.start == 0:
                self.since[seq_slot] = self.step  # the request restarts
            if self.since[seq_slot] == self.step:
                self._has_token[seq_slot] = False
            self._deferred_at[seq_slot] = _NEVER
            self._constrained[seq_slot] = state.constraint is not None
            self._requests[seq_slot] = record.request
            self._sampling_states[seq_slot] = state
            self.rope_deltas[seq_slot] = record.request.rope_delta
            self.fast_path_from[seq_slot] = state.fast_path_from
            self.sampling.assign(seq_slot, state)
            self.specials.assign(seq_slot, state)

    # ---- rows that failed: later rows of their requests, planned ahead, have no token to start from

    def slot_owners(self, plan: LanguagePlan) -> SlotOwners:
        """Snapshot of who owns the slots of the plan's rows in the current step."""
        seq_slots = seq_slots_of(plan)
        owned = self.owners[seq_slots] == request_ids_of(plan)
        return SlotOwners(self.step, seq_slots, np.where(owned, self.since[seq_slots], self.step + 1))

    def fail(self, slot_owners: SlotOwners, rows: Sequence[int]) -> None:
        """Records that these rows failed in step `slot_owners.step`; of a request, the earliest failed step is kept.
        Ignores rows whose request did not own the slot then. Thread-safe."""
        step, seq_slots, since = slot_owners.step, slot_owners.seq_slots[rows], slot_owners.since[rows]
        with self._lock:
            before = self._failed_in[seq_slots]
            first = (since <= step) & ((before < since) | (before > step))
            self._failed_in[seq_slots[first]] = step
            self._any_failed = True

    def failed_rows(self, plan: LanguagePlan) -> list[int]:
        """Rows of the current step's plan whose request failed in an earlier step, ascending. Call `begin_step`
        first."""
        return self.failed_rows_of(self.slot_owners(plan)) if self._any_failed else []

    def failed_rows_of(self, slot_owners: SlotOwners) -> list[int]:
        """Rows, ascending, whose request has a recorded failure in an earlier step, since it last started.
        Thread-safe."""
        if not self._any_failed:
            return []
        with self._lock:
            before = self._failed_in[slot_owners.seq_slots]
        rows: list[int] = np.flatnonzero((before >= slot_owners.since) & (before < slot_owners.step)).tolist()
        return rows

    # ---- rows that were deferred: later rows of their requests have no token to start from either

    def defer(self, plan: LanguagePlan, rows: Sequence[int]) -> None:
        """Records that `rows` of the plan are deferred to a later step, and ends the deferral of the plan's other rows
        that begin at their deferred position, since those are computed. No earlier row of the requests of `rows` may be
        in flight."""
        seq_slots, starts = seq_slots_of(plan), starts_of(plan)
        self._deferred_at[seq_slots[self._deferred_at[seq_slots] == starts]] = _NEVER
        self._deferred_at[seq_slots[rows]] = starts[rows]

    def after_deferred(self, plan: LanguagePlan) -> list[int]:
        """Decode rows, ascending, whose request has a deferred row at another position: they were planned after it, and
        their token is not known."""
        at = self._deferred_at[plan.decodes.seq_slots]
        rows: list[int] = np.flatnonzero((at != _NEVER) & (at != plan.decodes.starts)).tolist()
        return rows

    def deferrable(self, plan: LanguagePlan) -> list[int]:
        """Rows, ascending, of requests with a grammar that compute a single token: decodes, and chunks for which
        `lacks_one_token` holds."""
        if not np.count_nonzero(self._constrained):
            return []
        rows: list[int] = np.flatnonzero(self._constrained[seq_slots_of(plan)]).tolist()
        first = len(plan.decodes)
        return [row for row in rows if row < first or lacks_one_token(plan.chunks[row - first])]

    def requests(self, plan: LanguagePlan) -> Iterator[Request]:
        """Yields the request in the slot of each row; skips empty slots."""
        for seq_slot in seq_slots_of(plan).tolist():
            request = self._requests[seq_slot]
            if request is not None:
                yield request

    def request(self, seq_slot: int) -> Request:
        """The request that last began in the slot. Asserts that there is one."""
        request = self._requests[seq_slot]
        assert request is not None, f"slot {seq_slot} has no request"
        return request

    def sampling_state(self, seq_slot: int) -> SamplingState:
        """The sampling state of the request that last began in the slot. Asserts that there is one."""
        state = self._sampling_states[seq_slot]
        assert state is not None, f"slot {seq_slot} has no request"
        return state

    # ---- tokens

    def tokens(self, decodes: DecodeRows) -> Int64s:
        """Token ids of the rows, [B]: the plan's, with -1 replaced by the slot's last token; on an asynchronous device
        -1 stays. May be the plan's own array. Asserts that the requests own their slots, and that a token was sampled
        where the plan has -1."""
        # Plans share the array of slots while the same requests decode, so an array that was checked is skipped.
        if decodes.seq_slots is not self._checked:
            owned = self.owners[decodes.seq_slots] == decodes.request_ids
            assert owned.all(), "a decode names a slot that is not its request's"
            self._checked = decodes.seq_slots
        ids = decodes.token_ids
        unread = ids < 0
        if not np.count_nonzero(unread):
            return ids
        assert self._has_token[decodes.seq_slots[unread]].all(), "a decode goes on from a token that was not sampled"
        return ids if self.asynchronous else np.where(unread, self.last_tokens.numpy()[decodes.seq_slots], ids)

    @cached_property
    def last_tokens(self) -> Tensor:
        """Last token of each slot, then of padding rows, [num_seq_slots + 1] int64, at a fixed address. The lane
        creates it on first use, so that the allocation is ordered on the lane's stream."""
        return torch.zeros(self.padding + 1, dtype=torch.int64, device=self._device)

    def resolve(self, token_ids: Tensor, seq_slots: Tensor) -> Tensor:
        """Token ids [B] with -1 replaced by the slot's last token; all on the device."""
        return torch.where(token_ids < 0, self.last_tokens.index_select(0, seq_slots), token_ids)

    def write(self, seq_slots: Tensor, token_ids: Tensor) -> None:
        """Stores the slots' last tokens; both on the device."""
        self.last_tokens.index_copy_(0, seq_slots, token_ids)

    def mark_written(self, seq_slots: Int64s) -> None:
        """Records that the device has a token of these slots' current requests."""
        self._has_token[seq_slots] = True

    def put(self, seq_slots: Int64s, token_ids: Int64s) -> None:
        """Stores the slots' last tokens from host arrays and records them as `mark_written` does. Only for a
        synchronous device."""
        self.last_tokens.numpy()[seq_slots] = token_ids
        self._has_token[seq_slots] = True

    # ---- how often requests with penalties have had each token

    def counts(self, vocabulary: int) -> Tensor:
        """Token counts [num_seq_slots + 1, V] int32 at a fixed address: 2 * occurrences in the output, + 1 if the token
        is in the prompt (`Adjustments`). The lane creates them on first use. Rows of requests without penalties are
        meaningless."""
        if self._counts is None:
            shape = self.padding + 1, vocabulary
            if self._device.type == "cpu":  # np.zeros writes no pages: those that nothing is counted in take no memory
                self._counts = torch.from_numpy(np.zeros(shape, dtype=np.int32))
            else:
                self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._counts

    def recount(self, seq_slots: Tensor, places: Tensor, counts: Tensor, vocabulary: int) -> None:
        """Sets the counts of `seq_slots` to 0, then those at `places` to `counts`: a `Recounts`, on the device."""
        table = self.counts(vocabulary)
        table.index_fill_(0, seq_slots, 0)
        table.view(-1).index_copy_(0, places, counts)

    def count(self, seq_slots: Tensor, token_ids: Tensor, increments: Tensor, vocabulary: int) -> None:
        """Adds `increments` to the counts of the rows' tokens; all [B] on the device. No two rows have one slot, except
        padding rows on an asynchronous device."""
        counts = self.counts(vocabulary)
        if self.asynchronous:
            counts.view(-1).index_add_(0, seq_slots * vocabulary + token_ids, increments)
        else:  # by numpy in half of the time
            counts.numpy()[seq_slots.numpy(), token_ids.numpy()] += increments.numpy()

    # ---- sampling

    def sampling_rows(self, plan: LanguagePlan) -> SamplingRows:
        """The rows of the plan that sample: all decodes, and the chunks with `sample`."""
        decodes, first = plan.decodes, len(plan.decodes)
        rows, seq_slots, num_generated = np.arange(first), decodes.seq_slots, decodes.num_generated
        sampling = [(first + i, chunk) for i, chunk in enumerate(plan.chunks) if chunk.sample]
        if sampling:
            more = np.array([(row, chunk.seq_slot, chunk.num_generated) for row, chunk in sampling], dtype=np.int64)
            rows = np.concatenate((rows, more[:, 0]))
            seq_slots = np.concatenate((seq_slots, more[:, 1]))
            num_generated = np.concatenate((num_generated, more[:, 2]))
        special = (num_generated < self.fast_path_from[seq_slots]).nonzero()[0]
        return SamplingRows(rows, seq_slots, num_generated, special)

    def is_greedy(self, sampling: SamplingRows) -> bool:
        """True if every row takes its largest logit and none is special."""
        drawn = np.count_nonzero(self.sampling.temperatures[sampling.seq_slots])
        return not drawn and not sampling.special.size


class StateTable:
    """The recurrent states of running requests. Sequence slot s has the cache's state slots 2 s and 2 s + 1: a step
    reads one and writes the other. A plan may name other slots, behind these, from which a request begins or where it
    leaves its state. `advance` commits what a step has written."""

    def __init__(self, cache: StateCache, num_seq_slots: int) -> None:
        self.cache = cache
        self._current: Int64s = 2 * np.arange(num_seq_slots)  # the state slot that holds the state
        self._num_tokens: Int64s = np.zeros(cache.conv.shape[0], dtype=np.int64)  # that the state in each slot has seen

    def begin(self, plan: LanguagePlan, kv_cache: PagedCache) -> None:
        """Lets the requests of chunks continue from the state slots that the plan names, or from states in blocks of
        the KV cache. Call it once for each plan, before its rows are known: a row that is left for later will read the
        same slot."""
        for chunk in plan.chunks:
            if chunk.state_slots[0] >= 0:
                self._current[chunk.seq_slot] = chunk.state_slots[0]
            if chunk.imported_state is not None:
                self._current[chunk.seq_slot] = slot = 2 * chunk.seq_slot
                self._num_tokens[slot] = chunk.start
                for in_block, in_slot in self._pieces(slot, chunk.imported_state, kv_cache):
                    in_slot.copy_(in_block)

    def export(self, plan: LanguagePlan, kv_cache: PagedCache) -> None:
        """Copies the states that a step leaves into the blocks of the KV cache that its plan names, after the forward
        and before `advance`."""
        if all(chunk.exported_state is None for chunk in plan.chunks):
            return
        writes = self._written(plan, seq_slots_of(plan))[len(plan.decodes) :].tolist()
        for chunk, slot in zip(plan.chunks, writes, strict=True):
            if chunk.exported_state is not None:
                for in_block, in_slot in self._pieces(slot, chunk.exported_state, kv_cache):
                    in_block.copy_(in_slot)

    def _pieces(self, slot: int, blocks: BlockIds, kv_cache: PagedCache) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the bytes of a state, cut where they cross from one block to the next: views of equal size, uint8, in
        the KV cache and in the state slot."""
        views = iter([kv_cache.block_view(block) for block in blocks.tolist()])
        left = next(views)
        for part in (self.cache.conv[slot], self.cache.recurrent[slot]):
            raw = part.flatten().view(torch.uint8)
            while raw.shape[0]:
                left = left if left.shape[0] else next(views)
                count = min(left.shape[0], raw.shape[0])
                yield left[:count], raw[:count]
                left, raw = left[count:], raw[count:]

    def rows(self, plan: LanguagePlan) -> StateRows:
        """State slots that each row reads and writes, in host tensors. A row that begins at position 0 reads none: it
        names one of its own two, since the last owner's may be a snapshot that another row writes by now.
        Asserts that each state has seen exactly the tokens before its row."""
        seq_slots, starts = seq_slots_of(plan), starts_of(plan)
        writes = self._written(plan, seq_slots)
        reads = np.where(starts > 0, self._current[seq_slots], 2 * seq_slots + (writes == 2 * seq_slots))
        seen = np.where(starts > 0, self._num_tokens[reads], 0)
        wrong = np.flatnonzero(seen != starts)
        assert not wrong.size, f"state of {seen[wrong[0]]} tokens where a row begins at {starts[wrong[0]]}"
        cu_q = np.zeros(len(seq_slots) + 1, dtype=np.int64)
        np.cumsum(counts_of(plan), out=cu_q[1:])
        return StateRows(*(torch.from_numpy(values) for values in (cu_q, starts, reads, writes)))

    def advance(self, plan: LanguagePlan) -> None:
        """Commits the states of a step that succeeded: the slots that it wrote hold the states of its rows' requests,
        after their tokens."""
        seq_slots = seq_slots_of(plan)
        self._current[seq_slots] = writes = self._written(plan, seq_slots)
        self._num_tokens[writes] = starts_of(plan) + counts_of(plan)

    def _written(self, plan: LanguagePlan, seq_slots: Int64s) -> Int64s:
        """State slots that each row writes: that which the plan names, else the one of its own two that is not read."""
        own = 2 * seq_slots
        writes: Int64s = own + (self._current[seq_slots] == own)
        named: Int64s = np.full(len(seq_slots), -1, dtype=np.int64)
        if plan.state_slots is not None:
            named[: len(plan.decodes)] = plan.state_slots
        named[len(plan.decodes) :] = [chunk.state_slots[1] for chunk in plan.chunks]
        return np.where(named >= 0, named, writes)
