"""The running decodes as arrays with one entry per request, so that a step costs a few array operations instead of a
loop over rows.

Owns everything about a decode that changes with every token: the position of its next row, its last token, the number
of its tokens in flight (planned, and their results not read yet), its block table as plans see it, and the times of its
tokens. The tokens themselves are appended to `RequestState.generated`. Allocates no block; does not know queues,
budgets or preemption.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hydra_engine.cache.blocks import BlockTable
from hydra_engine.core.plans import BlockIds, DecodeRows, Int64s
from hydra_engine.core.state import Ending, RequestState
from hydra_engine.scheduler.timeline import Seconds, Timeline, is_late

Indices = slice | Int64s  # indices of decodes in the table; a slice for the first ones
Bools = npt.NDArray[np.bool_]
SPARE_COLUMNS = 16  # columns of a plan's block tables beyond the longest context
_ABSENT = -1
_NO_INDICES: Int64s = np.zeros(0, dtype=np.int64)


class ReadyDecodes(NamedTuple):
    """The decodes that may compute a row in the next step; entry i of `starts` belongs to the decode at `indices[i]`.
    Valid until a request joins or leaves the table."""

    indices: Indices
    starts: Int64s  # [B] position of the next row
    num_keys: int  # sum of keys that these rows read


class NewTokens(NamedTuple):
    """New tokens of a step's decodes, without deferred rows and rows of requests that had left the table; entry i of an
    [R] field is the i-th of these rows. Lists that go into messages are not changed afterwards."""

    live: Bools | None  # [B] mask of these rows among the plan's rows; None: all
    request_ids: list[int]  # [R]
    positions: list[int]  # [R] number of tokens generated before
    token_ids: list[int]  # [R]
    ended: list[tuple[RequestState, Ending]]  # requests that this token ends; the caller ends them
    filled: list[tuple[RequestState, int]]  # (request, full blocks) if the row filled a KV block
    late: list[tuple[RequestState, float]]  # (request, time of the token before) if the token came late


class RowsInFlight(NamedTuple):
    """The decode rows of a plan in flight. With an `id_list`, row i belongs to the decode at index i as long as none
    has left the table since (`num_left`)."""

    rows: DecodeRows
    id_list: list[int] | None  # request ids of the rows, if every decode of the table has one
    num_left: int  # decodes that had left the table when the rows were planned


class _Members(NamedTuple):
    """Slots and ids of all decodes in the table, by index. Plans share the arrays, so they are never changed."""

    seq_slots: Int64s
    request_ids: Int64s
    id_list: list[int]  # `request_ids` as a list


class DecodeTable:
    """The table of running decodes.

    Its members, called decodes, are the requests that decode, and those whose last chunk is in flight: the decode
    behind that can be planned. They are numbered without gaps: when one leaves, the last one gets its index.

    Invariants, for a decode: `_starts` is `num_tokens - 1` of its state plus its tokens in flight, one for each of its
    rows in flight and one if its last chunk is in flight. Its row of `_tables` has the blocks of positions before its
    `_num_visible`, and zeros behind. Entries that a plan may see are never changed, only appended behind; when a decode
    leaves there is a new array, so nothing is copied while the same requests decode.
    """

    def __init__(self, num_seq_slots: int, block_size: int) -> None:
        self.states: list[RequestState] = []  # by index, like all lists and arrays below
        self.times = DecodeTimes(num_seq_slots)
        self._generated: list[list[int]] = []  # `RequestState.generated` of each, the same list
        self._block_tables: list[BlockTable] = []
        self._seq_slots = _zeros(num_seq_slots)
        self._request_ids = _zeros(num_seq_slots)
        self._last_tokens = _zeros(num_seq_slots)
        self._starts = _zeros(num_seq_slots)  # position of the next row
        self._last_starts = _zeros(num_seq_slots)  # position of the last row that its max_new_tokens allow
        self._offsets = _zeros(num_seq_slots)  # start - offset: tokens generated before the row
        self._chunk_in_flight = _zeros(num_seq_slots)  # 1 while its last chunk is in flight
        self._deferred: Bools = np.zeros(num_seq_slots, dtype=np.bool_)  # a row was deferred, later ones are in flight
        self._num_visible = _zeros(num_seq_slots)  # positions with blocks in `tables`, a multiple of the block size
        self._tables: BlockIds = np.zeros((num_seq_slots, SPARE_COLUMNS), dtype=np.int32)
        self._tables_shared = False  # True: plans in flight may hold the array
        self._max_blocks = 0  # capacity of the longest block table so far
        self._block_size = block_size
        self._in_flight: deque[RowsInFlight] = deque()  # includes rows of requests that have left
        self._index_of = np.full(num_seq_slots, _ABSENT, dtype=np.int64)  # by slot
        self._members: _Members | None = None  # None: a decode has joined or left
        self._num_left = 0  # decodes that have left so far
        self._stop_ids: Counter[int] = Counter()  # token id -> number of decodes that it ends
        self._sum_starts = 0
        self._longest = 0  # upper bound of all starts

    def is_member(self, seq_slot: int) -> bool:
        """True if the request in this slot is in the table."""
        return bool(self._index_of[seq_slot] != _ABSENT)

    def index_of(self, seq_slot: int) -> int:
        """Index of the decode in this slot. Asserts that there is one."""
        assert self.is_member(seq_slot), f"no decode in slot {seq_slot}"
        return int(self._index_of[seq_slot])

    def num_in_flight(self, seq_slot: int) -> int:
        """Number of decode rows in flight with this slot, whichever request had it when they were planned."""
        return sum(int(np.count_nonzero(step.rows.seq_slots == seq_slot)) for step in self._in_flight)

    # ---- coming and going

    def join(self, state: RequestState, seq_slot: int, blocks: BlockTable, timeline: Timeline, *, unread: int) -> None:
        """Adds a decode in a slot without one. `unread`: 1 if its last chunk, which samples the token before its first
        row, is still in flight, else 0. Keeps the times of its tokens in place of `timeline` until it leaves."""
        assert self._index_of[seq_slot] == _ABSENT, "a decode joins twice"
        index, request = len(self.states), state.request
        self.times.join(state, timeline)
        self.states.append(state)
        self._generated.append(state.generated)
        self._block_tables.append(blocks)
        self._index_of[seq_slot], self._members = index, None
        self._seq_slots[index], self._request_ids[index] = seq_slot, request.id
        self._last_tokens[index] = _ABSENT if unread else state.generated[-1]
        self._starts[index] = start = state.num_tokens - 1 + unread
        self._last_starts[index] = request.max_total_tokens - 2
        self._offsets[index] = len(request.prompt_token_ids) - 1
        self._chunk_in_flight[index], self._deferred[index] = unread, False
        num_blocks = -(-start // self._block_size)
        self._num_visible[index] = num_blocks * self._block_size
        self._max_blocks = max(self._max_blocks, len(blocks.block_ids))
        self._reserve_columns(num_blocks)
        self._tables[index] = 0
        self._tables[index, :num_blocks] = blocks.block_ids[:num_blocks]
        self._sum_starts += start
        self._longest = max(self._longest, start)
        self._stop_ids.update(state.stop_ids)

    def leave(self, seq_slot: int) -> None:
        """Removes the decode in this slot, if any: no more rows are planned for it, its rows in flight are discarded on
        return, and its times are back in its timeline. The last decode gets its index."""
        index, last = int(self._index_of[seq_slot]), len(self.states) - 1
        if index == _ABSENT:
            return
        for token_id in self.states[index].stop_ids:
            self._stop_ids[token_id] -= 1
            if not self._stop_ids[token_id]:
                del self._stop_ids[token_id]
        self.times.leave(index)
        self._sum_starts -= int(self._starts[index])
        self._num_left += 1
        if self._tables_shared:
            self._tables, self._tables_shared = self._tables.copy(), False
        self._index_of[self._seq_slots[last]] = index
        self._index_of[seq_slot], self._members = _ABSENT, None
        numbers = self._seq_slots, self._request_ids, self._last_tokens, self._starts, self._last_starts, self._offsets
        for column in (*numbers, self._chunk_in_flight, self._deferred, self._num_visible, self._tables):
            column[index] = column[last]
        self.states[index], self._generated[index] = self.states[last], self._generated[last]
        self._block_tables[index] = self._block_tables[last]
        del self.states[last], self._generated[last], self._block_tables[last]

    # ---- blocks

    def without_next_block(self, ready: ReadyDecodes) -> Int64s:
        """Returns the indices of ready decodes that have no block for their next row. Makes blocks that are allocated
        already visible to plans first: a request that was preempted before got all its blocks at its start."""
        indices, starts = ready.indices, ready.starts
        at_end = starts >= self._num_visible[indices]
        if not np.count_nonzero(at_end):
            return _NO_INDICES
        missing = at_end.nonzero()[0] if isinstance(indices, slice) else indices[at_end]
        allocated: dict[int, int] = {}  # index -> block
        for index, start in zip(missing.tolist(), starts[at_end].tolist(), strict=True):
            table = self._block_tables[index]
            if table.num_blocks * self._block_size > start:
                allocated[index] = int(table.block_ids[self._num_visible[index] // self._block_size])
        if not allocated:
            return missing
        self.append_blocks(np.array(list(allocated)), list(allocated.values()))
        return missing[~np.isin(missing, list(allocated))]

    def append_blocks(self, indices: Int64s, blocks: Sequence[int]) -> None:
        """Makes one block more of each decode visible to plans: `blocks[i]`, in which the next row of the decode at
        `indices[i]` lies. The block is in its `BlockTable` already."""
        columns = self._num_visible[indices] // self._block_size
        self._reserve_columns(int(columns.max()) + 1)
        self._tables[indices, columns] = blocks
        self._num_visible[indices] += self._block_size

    def _reserve_columns(self, count: int) -> None:
        """Widens the tables to at least `count` columns, by copy; plans in flight keep the old array."""
        have = self._tables.shape[1]
        if count > have:
            wider = np.zeros((len(self._tables), self._width(count)), dtype=np.int32)
            wider[:, :have] = self._tables
            self._tables, self._tables_shared = wider, False

    def _width(self, count: int) -> int:
        """Number of columns for tables of `count` blocks: rounded up, at most what any decode so far can need."""
        return max(count, min(-(-count // SPARE_COLUMNS) * SPARE_COLUMNS, self._max_blocks))

    # ---- planning

    def ready(self) -> ReadyDecodes:
        """Returns the decodes that may compute a row: all but those planned up to the last token that `max_new_tokens`
        allows, and deferred ones whose later rows are still in flight."""
        everyone = slice(0, len(self.states))
        starts = self._starts[everyone].copy()
        may = (starts <= self._last_starts[everyone]) & ~self._deferred[everyone]
        if np.count_nonzero(may) == len(starts):
            return ReadyDecodes(everyone, starts, self._sum_starts + len(starts))
        return _ready(may.nonzero()[0], starts[may])

    def exclude(self, ready: ReadyDecodes, indices: Int64s) -> ReadyDecodes:
        """Returns `ready` without the decodes at these indices."""
        among = np.arange(len(self.states))[ready.indices]
        kept = ~np.isin(among, indices)
        return _ready(among[kept], ready.starts[kept])

    def take_rows(self, ready: ReadyDecodes, *, ahead: bool) -> DecodeRows:
        """Plans one row for each ready decode, advances its start and, if there are any, counts the rows as in flight.
        `ahead`: a step is in flight, so tokens that it samples are -1."""
        indices, starts = ready.indices, ready.starts
        token_ids = self._last_tokens[indices].copy()
        if ahead:
            token_ids[self._unread()[indices] > 0] = -1
        all_members = slice(0, len(self.states))
        if self._members is None:
            request_ids = self._request_ids[all_members].copy()
            self._longest = int(self._starts[all_members].max(initial=0))
            self._members = _Members(self._seq_slots[all_members].copy(), request_ids, request_ids.tolist())
        members, everyone = self._members, len(starts) == len(self.states)
        width = self._width(self._longest // self._block_size + 1)
        if width < self._tables.shape[1]:
            self._tables = self._tables[:, :width].copy()
        self._tables_shared = True
        rows = DecodeRows(
            request_ids=members.request_ids if everyone else members.request_ids[indices],
            seq_slots=members.seq_slots if everyone else members.seq_slots[indices],
            token_ids=token_ids,
            starts=starts,
            num_generated=starts - self._offsets[indices],
            block_tables=self._tables[indices],  # [B, W]
        )
        if len(starts):
            self._starts[indices] = starts + 1
            self._sum_starts += len(starts)
            self._longest += 1
            self._in_flight.append(RowsInFlight(rows, members.id_list if everyone else None, self._num_left))
        return rows

    def _unread(self) -> Int64s:
        """Number of tokens of each decode in the table that are planned and not read yet: int64 [M]."""
        counts: Int64s = self._chunk_in_flight[: len(self.states)].copy()
        for step in self._in_flight:
            indices = self._index_of[step.rows.seq_slots]
            counts[indices[indices != _ABSENT]] += 1
        return counts

    def pace(self, ready: ReadyDecodes) -> tuple[Seconds, Int64s, Int64s]:
        """Returns the seconds from the first to the latest token, the number of gaps between tokens and that of late
        ones of each ready decode, [B] each, by the tokens read so far; 0 seconds without a gap."""
        indices = ready.indices
        elapsed_s, late_gaps = self.times.elapsed(indices)
        num_gaps = np.maximum(ready.starts - self._offsets[indices] - self._unread()[indices] - 1, 0)
        return np.where(num_gaps > 0, elapsed_s, 0.0), num_gaps, late_gaps

    # ---- results

    def read_chunk(self, seq_slot: int, token_id: int, ended_s: float, gap_s: float) -> float | None:
        """Records the token that a decode's last chunk sampled, already in `generated`. Returns the time of the token
        before if this one is late. `gap_s`: `StepTimes.gap_s`, above which it is late without a limit."""
        index = self.index_of(seq_slot)
        self._chunk_in_flight[index] = 0
        self._last_tokens[index] = token_id
        return self.times.read_chunk(index, ended_s, gap_s)

    def defer_chunk(self, seq_slot: int) -> None:
        """Counts a decode's last chunk, of one token, as returned without a result: a later step plans its position
        again, as a decode row. Its rows in flight, planned behind the chunk, are not computed either."""
        index = self.index_of(seq_slot)
        self._chunk_in_flight[index] = 0
        self._last_tokens[index] = self._generated[index][-1]
        self._defer(np.array([index]))

    def _defer(self, indices: Int64s) -> None:
        """Sets these decodes back by one row. Their later rows in flight are not computed either, and must return
        before a new row is planned."""
        self._starts[indices] -= 1
        self._sum_starts -= len(indices)
        self._deferred[indices] = True
        self._end_deferrals()

    def _end_deferrals(self) -> None:
        """Clears the deferral of decodes without anything in flight, which can be planned again."""
        if np.count_nonzero(deferred := self._deferred[: len(self.states)]):
            deferred &= self._unread() > 0

    def on_results(
        self,
        rows: DecodeRows,
        token_ids: Int64s,
        *,
        ended_s: float,
        batch: int,
        gap_s: float,
        deferred: Sequence[int] = (),
    ) -> NewTokens:
        """Counts the rows of the oldest plan in flight as returned, appends their tokens to `RequestState.generated`
        and records their times. Discards rows of requests that have left; sets requests with deferred rows back.

        `batch`: number of all rows of the step. `gap_s`: `StepTimes.gap_s`. `deferred`: deferred rows, ascending. Ends
        no request; one whose row failed must have left before.
        """
        step = self._in_flight.popleft()
        assert step.rows is rows, "steps come back in another order"
        live, id_list = None, step.id_list
        starts, positions = rows.starts, rows.num_generated
        indices: Indices = slice(0, len(rows))
        if id_list is not None and step.num_left == self._num_left and not deferred:
            generated = self._generated if len(rows) == len(self.states) else self._generated[: len(rows)]
        else:
            among = self._index_of[rows.seq_slots]
            live = among != _ABSENT
            if deferred:
                uncomputed = among[list(deferred)]
                self._defer(uncomputed[uncomputed != _ABSENT])
                live[list(deferred)] = False
            indices = among = among[live]
            starts, positions, token_ids = starts[live], positions[live], token_ids[live]
            generated = [self._generated[index] for index in among.tolist()]
            id_list = rows.request_ids[live].tolist()
        self._end_deferrals()
        self._last_tokens[indices] = token_ids
        token_list: list[int] = token_ids.tolist()
        assert min(token_list, default=0) >= 0, "a row came back without a token"
        deque(map(list.append, generated, token_list), maxlen=0)  # half the time of a loop
        late = self.times.add_tokens(indices, ended_s, batch=batch, gap_s=gap_s)
        return NewTokens(
            live=live,
            request_ids=id_list,
            positions=positions.tolist(),
            token_ids=token_list,
            ended=self._ended(indices, starts, token_ids, token_list),
            filled=self._filled(indices, starts),
            late=[(self.states[index], since_s) for index, since_s in late],
        )

    def _filled(self, indices: Indices, starts: Int64s) -> list[tuple[RequestState, int]]:
        """Returns (request, number of its full blocks) of each row that filled a KV block."""
        full = (starts % self._block_size == self._block_size - 1).nonzero()[0]
        if not full.size:
            return []
        counts = (starts[full] // self._block_size + 1).tolist()
        return list(zip(self._states_at(indices, full), counts, strict=True))

    def _ended(
        self, indices: Indices, starts: Int64s, token_ids: Int64s, token_list: list[int]
    ) -> list[tuple[RequestState, Ending]]:
        """Returns the requests that end with their new token, and how. Checks only those at their last row, or with a
        token that ends some decode in the table."""
        ended = starts >= self._last_starts[indices]
        if not self._stop_ids.keys().isdisjoint(token_list):
            ended |= np.isin(token_ids, list(self._stop_ids))
        rows = ended.nonzero()[0]
        if not rows.size:
            return []
        at_end = zip(self._states_at(indices, rows), rows.tolist(), strict=True)
        endings = ((state, state.ending_with(token_list[row])) for state, row in at_end)
        return [(state, ending) for state, ending in endings if ending is not None]

    def _states_at(self, indices: Indices, rows: Int64s) -> list[RequestState]:
        """States of the requests in these rows; row i is the decode at `indices[i]`."""
        among = rows if isinstance(indices, slice) else indices[rows]
        return [self.states[index] for index in among.tolist()]


def _zeros(count: int) -> Int64s:
    return np.zeros(count, dtype=np.int64)


def _ready(indices: Int64s, starts: Int64s) -> ReadyDecodes:
    """Returns the decodes at these indices, whose next rows are at positions `starts`."""
    return ReadyDecodes(indices, starts, int(starts.sum()) + len(starts))


@dataclass(slots=True)
class _Watched:
    """A request in the table of decodes and its open decode span: the start, and the counters then."""

    state: RequestState
    timeline: Timeline
    since_s: float
    num_generated: int  # tokens of the request before the span
    num_steps: int  # steps with decodes, of the instance
    num_rows: int  # rows of these steps


class DecodeTimes:
    """Token times, limits and open decode spans of the requests in the table of decodes, by the same indices.
    `num_limited`: how many have a TPOT limit."""

    def __init__(self, num_seq_slots: int) -> None:
        self._watched: list[_Watched] = []
        self._floats = np.zeros((3, num_seq_slots))
        self._tpot_limits_s, self._first_s, self._last_s = self._floats  # times of tokens; 0.0: none yet
        self._late_gaps = np.zeros(num_seq_slots, dtype=np.int64)
        self.num_limited = 0
        self._num_steps = self._num_rows = 0  # totals of steps with decodes so far
        self._latest_batch = 0

    # ---- coming and going

    def join(self, state: RequestState, timeline: Timeline) -> None:
        """Appends a request at the next index, with the times of its timeline, and opens its decode span."""
        index = len(self._watched)
        counts = len(state.generated), self._num_steps, self._num_rows
        self._watched.append(_Watched(state, timeline, timeline.last_s, *counts))
        self._tpot_limits_s[index] = timeline.tpot_limit_s
        self.num_limited += timeline.tpot_limit_s < math.inf
        self._first_s[index], self._last_s[index] = timeline.first_token_s, timeline.last_token_s
        self._late_gaps[index] = timeline.late_gaps

    def leave(self, index: int) -> None:
        """Removes a request, whose timeline gets its times and its open span; the last one gets its index."""
        watched = self._watched[index]
        timeline = watched.timeline
        self.num_limited -= bool(self._tpot_limits_s[index] < math.inf)
        self._close(watched, float(self._last_s[index]))
        timeline.first_token_s, timeline.last_token_s = float(self._first_s[index]), float(self._last_s[index])
        timeline.last_s = max(timeline.last_s, timeline.last_token_s)
        timeline.late_gaps = int(self._late_gaps[index])
        mover = self._watched.pop()
        last = len(self._watched)
        if index != last:
            self._watched[index] = mover
            self._floats[:, index] = self._floats[:, last]
            self._late_gaps[index] = self._late_gaps[last]

    def _close(self, watched: _Watched, until_s: float, late: int = 0) -> None:
        """Adds the decode span to the timeline, if it has tokens. `late`: 1 if the latest token is late, and so is not
        part of it, else 0."""
        tokens = watched.state.num_generated - watched.num_generated - late
        if tokens > 0:
            batch = (self._num_rows - watched.num_rows) / max(1, self._num_steps - watched.num_steps)
            watched.timeline.add_decode(watched.since_s, until_s, tokens=tokens, batch=round(batch))

    # ---- results

    def read_chunk(self, index: int, ended_s: float, gap_s: float) -> float | None:
        """Records the token of a request's last chunk, with which its decode span begins. Returns the time of the token
        before if this one is late. `gap_s`: `StepTimes.gap_s`."""
        watched = self._watched[index]
        timeline = watched.timeline
        late_since_s = timeline.add_prefill_token(ended_s, gap_s)
        self._first_s[index], self._last_s[index] = timeline.first_token_s, ended_s
        self._late_gaps[index] = timeline.late_gaps
        watched.since_s, watched.num_generated = ended_s, len(watched.state.generated)
        watched.num_steps, watched.num_rows = self._num_steps, self._num_rows
        return late_since_s

    def add_tokens(self, indices: Indices, ended_s: float, *, batch: int, gap_s: float) -> list[tuple[int, float]]:
        """Records a token of each of these decodes, from a step of `batch` rows. Returns (index, time of the token
        before) of each late token, after closing the decode span before it; the caller must `resume` these. `gap_s`:
        `StepTimes.gap_s`."""
        before_s = self._last_s[indices]
        limits = self._tpot_limits_s[indices] if self.num_limited else None
        late = is_late(ended_s - before_s, limits, gap_s).nonzero()[0]
        found: list[tuple[int, float]] = []
        if late.size:
            among = late if isinstance(indices, slice) else indices[late]
            self._late_gaps[among] += 1
            found = list(zip(among.tolist(), before_s[late].tolist(), strict=True))
        self._last_s[indices] = ended_s
        for index, last_s in found:
            self._close(self._watched[index], last_s, late=1)
        self._num_steps += 1
        self._num_rows += batch
        self._latest_batch = batch
        return found

    def resume(self, index: int, resumed_s: float) -> None:
        """Starts a new decode span at `resumed_s`, the end of a gap; the late token is its first."""
        watched = self._watched[index]
        watched.since_s, watched.num_generated = resumed_s, watched.state.num_generated - 1
        watched.num_steps, watched.num_rows = self._num_steps - 1, self._num_rows - self._latest_batch

    # ---- questions

    def limits(self, indices: Indices) -> Seconds:
        """TPOT limits of these decodes in seconds, infinite without one: [B]. May be a view: valid until the next
        change, read only."""
        return self._tpot_limits_s[indices]

    def elapsed(self, indices: Indices) -> tuple[Seconds, Int64s]:
        """Returns the seconds from the first to the latest token and the number of late gaps of these decodes, [B]
        each, by the tokens read so far."""
        return self._last_s[indices] - self._first_s[indices], self._late_gaps[indices]
