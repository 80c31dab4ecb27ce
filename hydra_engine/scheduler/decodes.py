"""The running decodes as arrays with one entry per seat, so that a step costs a few array operations, not rows.

Owner of everything about a decode that changes with every token: where its next row begins, its last token, how many of
its tokens nobody has read yet, the stretch of its timeline that is still open and the gaps between its tokens. The
tokens themselves are appended to `RequestState.generated`. When a request leaves, its timeline takes over what is to be
kept. Does not know queues, budgets or who gives way, and allocates no block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hydra_engine.cache.table import BlockTable
from hydra_engine.core.ids import RequestId
from hydra_engine.core.plans import DecodeRows, Ints
from hydra_engine.core.state import RequestState
from hydra_engine.scheduler.timeline import Timeline

Bools = npt.NDArray[np.bool_]
Seconds = npt.NDArray[np.float64]

MAX_STOP_COLUMNS = 8  # stop ids of a request that are compared for all rows at once
_NO_STOP = -2  # never a token, and not the -1 of a row without one
_FIRST_COLUMNS = 64  # of the block tables; doubled when a context needs more


class TakenBack(NamedTuple):
    """The rows of a step whose requests go on or have just ended with this token; entry i of what is [R] belongs to one
    row. What is meant to be told to others comes as lists."""

    live: Bools | None  # [B] which of the plan's rows these are; None: all
    seats: Ints  # [R]
    request_ids: list[int]  # [R]
    positions: list[int]  # [R] tokens generated before
    token_ids: list[int]  # [R]
    ended: list[tuple[int, int | None]]  # seats whose request ends: (seat, stop token or None for the length)
    filled: list[int]  # seats whose row filled a KV block
    late: list[tuple[int, float]]  # seats whose gap is to be shown, and when the token before came


class _Span(NamedTuple):
    """The open span of decode steps of a seat: its begin, and the counts at that time."""

    since_s: float
    num_generated: int
    num_steps: int
    num_rows: int


class DecodeTable:
    """A member is a request that decodes, or one whose last chunk is in flight: the decode behind it can be planned.

    Invariants, for a member: `starts` is `num_tokens - 1` of its state plus its unread tokens, one for each of its rows
    in flight and one if its last chunk is; its row of block tables shows the blocks of positions before `rooms`, zeros
    behind. `in_flight` counts decode rows in plans, also of a seat whose request has ended and is not forgotten yet.
    """

    def __init__(self, num_seats: int, block_size: int, tpot_s: float | None = None) -> None:
        """`tpot_s` is the limit of requests that bring none."""
        self._block_size = block_size
        self._tpot_s = math.inf if tpot_s is None else tpot_s
        self.states: list[RequestState | None] = [None] * num_seats
        self.in_flight = _zeros(num_seats)
        self._timelines: list[Timeline | None] = [None] * num_seats
        self._block_tables: list[BlockTable | None] = [None] * num_seats
        self._generated: list[list[int]] = [[] for _ in range(num_seats)]  # the states' own
        self._member = np.zeros(num_seats, dtype=np.bool_)
        self._num_members = 0
        self._request_ids = _zeros(num_seats)
        self._last_tokens = _zeros(num_seats)
        self._starts = _zeros(num_seats)  # position of the next row
        self._ends = _zeros(num_seats)  # no row begins here or behind
        self._offsets = _zeros(num_seats)  # start - offset: tokens generated before the row
        self._chunk_in_flight = _zeros(num_seats)  # 1 while the last chunk is
        self._granted = _zeros(num_seats)  # positions before this one have a block
        self._rooms = _zeros(num_seats)  # positions before this one have it in the row of tables too
        self._tables = np.zeros((num_seats, _FIRST_COLUMNS), dtype=np.int32)
        self._stops = [np.full(num_seats, _NO_STOP, dtype=np.int64) for _ in range(MAX_STOP_COLUMNS)]
        self._num_stops = 0  # columns in use, by anyone since the table was last empty
        self._many_stops: dict[int, frozenset[int]] = {}
        # Times and gaps.
        self._limits = np.full(num_seats, math.inf)
        self._num_limited = 0
        self._first_s = np.zeros(num_seats)
        self._last_s = np.zeros(num_seats)  # end of the latest step
        self._waited_s: dict[int, float] = {}  # from the latest token to that, where they are not the same
        self._late_gaps = _zeros(num_seats)
        self._num_steps = self._num_rows = 0  # of all steps with decodes so far
        self._latest_batch = 0
        self._spans: list[_Span] = [_Span(0.0, 0, 0, 0)] * num_seats  # the open one of each seat

    def __len__(self) -> int:
        return self._num_members

    def is_member(self, seat: int) -> bool:
        return bool(self._member[seat])

    # ---- coming and going

    def join(self, state: RequestState, seat: int, blocks: BlockTable, timeline: Timeline, *, unread: int) -> None:
        """`unread` 1: the chunk that gives the token before the first row is in flight."""
        if not self._member[seat]:
            self._member[seat] = True
            self._num_members += 1
            self._sit(state, seat, blocks, timeline)
        self._starts[seat] = state.num_tokens - 1 + unread
        self._chunk_in_flight[seat] = unread
        if not unread:
            self._last_tokens[seat] = state.generated[-1]
            self._waited_s[seat] = timeline.last_s - timeline.last_token_s
        shown = -(-int(self._starts[seat]) // self._block_size)
        self._granted[seat] = blocks.num_slots
        self._rooms[seat] = shown * self._block_size
        self._reserve(shown)
        self._tables[seat] = 0
        self._tables[seat, :shown] = blocks.block_ids[:shown]

    def _sit(self, state: RequestState, seat: int, blocks: BlockTable, timeline: Timeline) -> None:
        request = state.request
        self.states[seat], self._block_tables[seat], self._timelines[seat] = state, blocks, timeline
        self._generated[seat] = state.generated
        self._request_ids[seat] = request.id
        self._offsets[seat] = request.num_prompt - 1
        self._ends[seat] = request.num_prompt - 1 + request.max_new_tokens
        self._seat_stops(seat, state.stop_ids)
        self._limits[seat] = request.slo.tpot_s if request.slo.tpot_s is not None else self._tpot_s
        self._num_limited += bool(self._limits[seat] < math.inf)
        self._first_s[seat], self._last_s[seat] = timeline.first_token_s, timeline.last_s
        self._late_gaps[seat] = timeline.late_gaps
        self._open_span(seat, state, timeline.last_s)

    def _seat_stops(self, seat: int, stop_ids: frozenset[int]) -> None:
        few = sorted(stop_ids) if len(stop_ids) <= MAX_STOP_COLUMNS else []
        if len(few) < len(stop_ids):
            self._many_stops[seat] = stop_ids
        for index, column in enumerate(self._stops):
            column[seat] = few[index] if index < len(few) else _NO_STOP
        self._num_stops = max(self._num_stops, len(few))

    def leave(self, seat: int) -> None:
        """The request is planned no more; rows in flight are taken back all the same. Nothing happens if it is no
        member."""
        timeline, state = self._timelines[seat], self.states[seat]
        if timeline is None or state is None:
            return
        self._member[seat] = False
        self._num_members -= 1
        self._num_limited -= bool(self._limits[seat] < math.inf)
        self._many_stops.pop(seat, None)
        if not self._num_members:
            self._num_stops = 0
        self._close_span(seat, state, timeline, float(self._last_s[seat]))
        timeline.first_token_s, timeline.last_s = float(self._first_s[seat]), float(self._last_s[seat])
        if self._waited_s.pop(seat, None) is None and not self._chunk_in_flight[seat]:
            timeline.last_token_s = timeline.last_s
        timeline.late_gaps = int(self._late_gaps[seat])
        self.states[seat] = self._timelines[seat] = self._block_tables[seat] = None
        self._generated[seat] = []

    def _open_span(self, seat: int, state: RequestState, since_s: float) -> None:
        self._spans[seat] = _Span(since_s, state.num_generated, self._num_steps, self._num_rows)

    def _close_span(self, seat: int, state: RequestState, timeline: Timeline, until_s: float, late: int = 0) -> None:
        """`late` 1: the token that came last is not part of it."""
        span = self._spans[seat]
        tokens = state.num_generated - span.num_generated - late
        if tokens > 0:
            batch = (self._num_rows - span.num_rows) / max(1, self._num_steps - span.num_steps)
            timeline.decoded(span.since_s, until_s, tokens=tokens, batch=round(batch))

    # ---- planning

    def ready(self) -> Ints:
        """[B] seats of all members that may compute a row, in ascending order."""
        return (self._member & (self._starts < self._ends)).nonzero()[0]

    def lacking(self, seats: Ints) -> Ints:
        """Those of the seats whose requests have no block for their next row."""
        starts = self._starts[seats]
        lacks = starts >= self._rooms[seats]
        if not lacks.any():
            return seats[:0]
        lacking = seats[lacks]
        granted = starts[lacks] < self._granted[lacking]  # a request that has given way once has got all at once
        for seat in lacking[granted].tolist():
            blocks = self._block_tables[seat]
            assert blocks is not None
            self._show(np.array([seat]), [int(blocks.block_ids[self._rooms[seat] // self._block_size])])
        return lacking[~granted]

    def owners(self, seats: Ints) -> list[RequestId]:
        found: list[RequestId] = self._request_ids[seats].tolist()
        return found

    def grant(self, seats: Ints, blocks: Sequence[int]) -> None:
        """Each of these seats has got one more block for its next row."""
        self._granted[seats] += self._block_size
        self._show(seats, blocks)

    def _show(self, seats: Ints, blocks: Sequence[int]) -> None:
        columns = self._rooms[seats] // self._block_size
        self._reserve(int(columns.max()) + 1)
        self._tables[seats, columns] = blocks
        self._rooms[seats] += self._block_size

    def num_keys(self, seats: Ints) -> int:
        """Keys that rows of these seats read, all together."""
        return int(self._starts[seats].sum()) + len(seats)

    def take_rows(self, seats: Ints, *, ahead: bool) -> DecodeRows:
        """One row for each; their requests are a token further as far as plans are concerned. `ahead`: a step is in
        flight."""
        starts = self._starts[seats]
        token_ids = self._last_tokens[seats]
        in_flight = self.in_flight[seats]
        if ahead:
            token_ids[in_flight + self._chunk_in_flight[seats] > 0] = -1
        width = int(starts.max()) // self._block_size + 1 if len(seats) else 0
        self._starts[seats] = starts + 1
        self.in_flight[seats] = in_flight + 1
        return DecodeRows(
            request_ids=self._request_ids[seats],
            seats=seats,
            token_ids=token_ids,
            starts=starts,
            num_generated=starts - self._offsets[seats],
            block_tables=self._tables[:, :width][seats],
        )

    def _reserve(self, columns: int) -> None:
        have = self._tables.shape[1]
        if columns > have:
            wider = np.zeros((len(self.states), max(columns, 2 * have)), dtype=np.int32)
            wider[:, :have] = self._tables
            self._tables = wider

    # ---- results

    def read_chunk(self, seat: int, token_id: int, ended_s: float) -> None:
        """The token of a member's last chunk, which has been appended already."""
        self._chunk_in_flight[seat] = 0
        self._last_tokens[seat] = token_id
        state, timeline = self.states[seat], self._timelines[seat]
        assert state is not None and timeline is not None
        if not timeline.first_token_s:
            self._first_s[seat] = ended_s
        else:
            self._late_gaps[seat] += bool(ended_s - timeline.last_token_s > self._limits[seat])
        self._last_s[seat] = ended_s
        self._open_span(seat, state, ended_s)

    def take_back(self, rows: DecodeRows, token_ids: Ints, *, ended_s: float, batch: int, gap_s: float) -> TakenBack:
        """The rows are no longer in flight. Moves the members among them one token on; those that have left meanwhile
        are passed over.

        `batch`: rows of the step. `gap_s`: between two tokens of a request without a limit, from which on it is shown.
        """
        seats, request_ids, positions, ends = rows.seats, rows.request_ids, rows.num_generated, rows.starts + 1
        self.in_flight[seats] -= 1
        live: Bools | None = self._member[seats]
        if live is not None and not live.all():
            seats, request_ids, positions, ends = seats[live], request_ids[live], positions[live], ends[live]
            token_ids = token_ids[live]
        else:
            live = None
        assert not len(token_ids) or token_ids.min() >= 0, "a row came back without a token"
        self._last_tokens[seats] = token_ids
        token_list, generated = token_ids.tolist(), self._generated
        for seat, token_id in zip(seats.tolist(), token_list, strict=True):
            generated[seat].append(token_id)
        return TakenBack(
            live=live,
            seats=seats,
            request_ids=request_ids.tolist(),
            positions=positions.tolist(),
            token_ids=token_list,
            ended=self._ended(seats, token_ids, ends),
            filled=seats[ends % self._block_size == 0].tolist(),
            late=self._tick(seats, ended_s, batch, gap_s),
        )

    def _tick(self, seats: Ints, ended_s: float, batch: int, gap_s: float) -> list[tuple[int, float]]:
        """Time goes on for these seats; returns those that have had a long gap, and since when."""
        before_s = self._last_s[seats]
        gaps_s = ended_s - before_s
        self._last_s[seats] = ended_s
        shown_s: Seconds | float = gap_s
        waited_s = self._waits(seats)
        if self._num_limited:
            limits = self._limits[seats]
            self._late_gaps[seats] += gaps_s + waited_s > limits
            shown_s = np.where(limits < math.inf, limits, gap_s)
        late = (gaps_s > shown_s).nonzero()[0]
        found: list[tuple[int, float]] = list(zip(seats[late].tolist(), before_s[late].tolist(), strict=True))
        for seat, last_s in found:
            state, timeline = self.states[seat], self._timelines[seat]
            assert state is not None and timeline is not None
            self._close_span(seat, state, timeline, last_s, late=1)
        self._num_steps += 1
        self._num_rows += batch
        self._latest_batch = batch
        return found

    def _waits(self, seats: Ints) -> Seconds | float:
        """What belongs to the gaps and lies before the latest step: a request that had given way came back with all
        but its last token prefilled."""
        if not self._waited_s:
            return 0.0
        return np.array([self._waited_s.pop(seat, 0.0) for seat in seats.tolist()])

    def resume(self, seat: int, resumed_s: float) -> None:
        """The gap that `take_back` has named ends here; what follows, its token included, is decoding again."""
        state = self.states[seat]
        assert state is not None
        rows = self._num_rows - self._latest_batch
        self._spans[seat] = _Span(resumed_s, state.num_generated - 1, self._num_steps - 1, rows)

    def _ended(self, seats: Ints, token_ids: Ints, ends: Ints) -> list[tuple[int, int | None]]:
        ended = ends >= self._ends[seats]
        stops = self._stops_at(seats, token_ids)
        if stops is not None:
            ended |= stops
        return [
            (int(seats[row]), int(token_ids[row]) if stops is not None and stops[row] else None)
            for row in ended.nonzero()[0].tolist()
        ]

    def _stops_at(self, seats: Ints, token_ids: Ints) -> Bools | None:
        """Which tokens end their request; None if no member has a stop token."""
        stopped: Bools | None = None
        for column in self._stops[: self._num_stops]:
            hits = column[seats] == token_ids
            stopped = hits if stopped is None else stopped | hits
        if self._many_stops:
            many = self._many_stops
            pairs = zip(seats.tolist(), token_ids.tolist(), strict=True)
            more = np.array([token_id in many.get(seat, ()) for seat, token_id in pairs], dtype=np.bool_)
            stopped = more if stopped is None else stopped | more
        return stopped

    # ---- questions

    @property
    def has_limits(self) -> bool:
        return self._num_limited > 0

    def limits(self, seats: Ints) -> Seconds:
        return self._limits[seats]

    def pace(self, seats: Ints) -> tuple[Seconds, Ints, Ints]:
        """(seconds from the first to the latest token, gaps, late gaps) of each seat, as far as tokens have been
        read."""
        unread = self.in_flight[seats] + self._chunk_in_flight[seats]
        num_gaps = np.maximum(self._starts[seats] - self._offsets[seats] - unread - 1, 0)
        elapsed_s = np.where(num_gaps > 0, self._last_s[seats] - self._first_s[seats], 0.0)
        return elapsed_s, num_gaps, self._late_gaps[seats]

    # ---- checks

    def check(self, members: dict[int, tuple[RequestState, BlockTable, int]]) -> None:
        """Raises AssertionError unless the table agrees with `members`: seat -> (state, blocks, 1 if its last chunk is
        in flight)."""
        assert set(np.flatnonzero(self._member).tolist()) == members.keys(), "the wrong requests are decodes"
        assert self._num_members == len(members)
        assert (self.in_flight >= 0).all(), "a row came back twice"
        assert self._num_limited == sum(self._limits[seat] < math.inf for seat in members)
        for seat, (state, blocks, chunk) in members.items():
            where = f"request {state.request.id}"
            assert self.states[seat] is state and self._block_tables[seat] is blocks, f"{where} sits in a wrong seat"
            assert self._request_ids[seat] == state.request.id, f"{where} has another's id"
            assert self._chunk_in_flight[seat] == chunk, f"{where}: whether its last chunk is in flight"
            unread = int(self.in_flight[seat]) + chunk
            assert self._starts[seat] == state.num_tokens - 1 + unread, f"{where}: place of its next row"
            assert self._starts[seat] - self._offsets[seat] == state.num_generated + unread, f"{where}: count"
            assert self._starts[seat] <= self._ends[seat], f"{where} is planned beyond its end"
            assert self._generated[seat] is state.generated, f"{where}: tokens go elsewhere"
            if state.generated and not unread:
                assert self._last_tokens[seat] == state.generated[-1], f"{where}: last token"
            shown = int(self._rooms[seat]) // self._block_size
            assert self._granted[seat] == blocks.num_slots, f"{where}: blocks granted"
            assert self._rooms[seat] <= blocks.num_slots, f"{where} shows blocks that it does not have"
            row = self._tables[seat]
            assert row[:shown].tolist() == blocks.blocks()[:shown] and not row[shown:].any(), f"{where}: block table"


def _zeros(count: int) -> Ints:
    return np.zeros(count, dtype=np.int64)
