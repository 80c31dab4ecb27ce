"""The running decodes as arrays with one entry per member, so that a step costs a few array operations, not rows.

Owner of everything about a decode that changes with every token: where its next row begins, its last token, how many of
its tokens nobody has read yet; when they came is in `decode_times.py`, its blocks are in `decode_blocks.py`. The tokens
themselves are appended to `RequestState.generated`. Does not know queues, budgets or who gives way.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hydra_engine.cache.table import BlockTable
from hydra_engine.core.ids import RequestId
from hydra_engine.core.plans import DecodeRows, Ints
from hydra_engine.core.state import Ending, RequestState
from hydra_engine.scheduler.decode_blocks import DecodeBlocks
from hydra_engine.scheduler.decode_times import DecodeTimes, Places, Seconds
from hydra_engine.scheduler.timeline import Timeline

Bools = npt.NDArray[np.bool_]

_NOWHERE = -1


class Ready(NamedTuple):
    """Members that may compute a row; entry i of `starts` belongs to one. Holds until somebody joins or leaves."""

    places: Places
    starts: Ints  # [B] position of its row
    num_keys: int  # that these rows read, all together

    @property
    def num_rows(self) -> int:
        return len(self.starts)


class TakenBack(NamedTuple):
    """The rows of a step whose requests go on or have just ended with this token; entry i of what is [R] belongs to one
    row. What is meant to be told to others comes as lists, which nobody changes."""

    live: Bools | None  # [B] which of the plan's rows these are; None: all
    request_ids: list[int]  # [R]
    positions: list[int]  # [R] tokens generated before
    token_ids: list[int]  # [R]
    ended: list[tuple[RequestState, Ending]]
    filled: list[tuple[RequestState, int]]  # whose row filled a KV block: (.., full blocks)
    late: list[tuple[RequestState, float]]  # to whom it came late: (.., when the token before came)


class _Roll(NamedTuple):
    """All members in the order of their places. Plans share the arrays, so they are never changed."""

    seq_slots: Ints
    request_ids: Ints
    names: list[int]  # the same as a list


class _Flight(NamedTuple):
    """The rows of a plan in flight. Row i belongs to place i if there are `names` and still as many have left."""

    rows: DecodeRows
    names: list[int] | None  # whose rows these are, if everybody has one
    num_left: int


class DecodeTable:
    """A member is a request that decodes, or one whose last chunk is in flight: the decode behind it can be planned.
    Members have places without gaps: when one leaves, the last one takes its place.

    Invariants, for a member: `starts` is `num_tokens - 1` of its state plus its unread tokens, one for each of its rows
    in flight and one if its last chunk is.
    """

    def __init__(self, num_seq_slots: int, block_size: int) -> None:
        self.states: list[RequestState] = []  # by place, as all that follows
        self.times = DecodeTimes(num_seq_slots)
        self.blocks = DecodeBlocks(num_seq_slots, block_size)
        self._generated: list[list[int]] = []  # the states' own
        self._in_flight: deque[_Flight] = deque()  # all rows, also those of requests that have left
        self._block_size = block_size
        self._place_of = np.full(num_seq_slots, _NOWHERE, dtype=np.int64)  # of each slot
        self._roll: _Roll | None = None  # None: somebody has joined or left
        self._num_left = 0  # members that have left so far
        self._seq_slots = _zeros(num_seq_slots)
        self._request_ids = _zeros(num_seq_slots)
        self._last_tokens = _zeros(num_seq_slots)
        self._starts = _zeros(num_seq_slots)  # position of the next row
        self._lasts = _zeros(num_seq_slots)  # position of the last row that it may have
        self._offsets = _zeros(num_seq_slots)  # start - offset: tokens generated before the row
        self._chunk_in_flight = _zeros(num_seq_slots)  # 1 while the last chunk is
        self._stop_ids: Counter[int] = Counter()  # how many members end with a token
        self._sum_starts = 0
        self._longest = 0  # no start is larger

    def __len__(self) -> int:
        return len(self.states)

    def is_member(self, seq_slot: int) -> bool:
        return bool(self._place_of[seq_slot] != _NOWHERE)

    def num_in_flight(self, seq_slot: int) -> int:
        """Rows of a slot, whoever it was when they were planned, that have not come back."""
        return sum(int(np.count_nonzero(flight.rows.seq_slots == seq_slot)) for flight in self._in_flight)

    # ---- coming and going

    def join(self, state: RequestState, seq_slot: int, blocks: BlockTable, timeline: Timeline, *, unread: int) -> None:
        """`unread` 1: the chunk that gives the token before the first row is in flight."""
        assert not self.is_member(seq_slot), "a decode joins twice"
        place, request = len(self.states), state.request
        self.times.join(state, timeline)
        self.states.append(state)
        self._last_tokens[place] = _NOWHERE if unread else state.generated[-1]
        self._generated.append(state.generated)
        self._place_of[seq_slot], self._roll = place, None
        self._seq_slots[place], self._request_ids[place] = seq_slot, request.id
        self._starts[place] = start = state.num_tokens - 1 + unread
        self._lasts[place] = request.max_total_tokens - 2
        self._offsets[place] = request.num_prompt - 1
        self._chunk_in_flight[place] = unread
        self.blocks.join(blocks, start)
        self._sum_starts += start
        self._longest = max(self._longest, start)
        self._stop_ids.update(state.stop_ids)

    def leave(self, seq_slot: int) -> None:
        """The request is planned no more; rows in flight are taken back all the same. Nothing happens if it is no
        member."""
        place = int(self._place_of[seq_slot])
        if place == _NOWHERE:
            return
        state = self.states[place]
        self.times.leave(place)
        self._sum_starts -= int(self._starts[place])
        self._forget_stops(state.stop_ids)
        self._place_of[seq_slot], self._roll = _NOWHERE, None
        self._num_left += 1
        self.blocks.leave(place)
        self._move(len(self.states) - 1, place)

    def _forget_stops(self, stop_ids: frozenset[int]) -> None:
        for token_id in stop_ids:
            self._stop_ids[token_id] -= 1
            if not self._stop_ids[token_id]:
                del self._stop_ids[token_id]

    def _move(self, last: int, place: int) -> None:
        """The last member goes to another place."""
        self.states[place], self._generated[place] = self.states[last], self._generated[last]
        del self.states[last], self._generated[last]
        if place == last:
            return
        self._place_of[self._seq_slots[last]] = place
        numbers = self._seq_slots, self._request_ids, self._last_tokens, self._starts, self._lasts, self._offsets
        for column in (*numbers, self._chunk_in_flight):
            column[place] = column[last]

    # ---- planning

    def ready(self) -> Ready:
        """All members that may compute a row."""
        everybody = slice(0, len(self.states))
        starts = self._starts[everybody].copy()
        may = starts <= self._lasts[everybody]
        if np.count_nonzero(may) == len(starts):
            return Ready(everybody, starts, self._sum_starts + len(starts))
        return _some(may.nonzero()[0], starts[may])

    def without(self, ready: Ready, places: Ints) -> Ready:
        """Those that are not at these places."""
        everybody = np.arange(len(self.states))[ready.places]
        kept = ~np.isin(everybody, places)
        return _some(everybody[kept], ready.starts[kept])

    def owners(self, places: Places) -> list[RequestId]:
        found: list[RequestId] = self._request_ids[places].tolist()
        return found

    def place(self, seq_slot: int) -> int:
        """Of a member."""
        assert self.is_member(seq_slot), f"no decode in slot {seq_slot}"
        return int(self._place_of[seq_slot])

    def take_rows(self, ready: Ready, *, ahead: bool) -> DecodeRows:
        """One row for each; their requests are a token further as far as plans are concerned. `ahead`: a step is in
        flight."""
        places, starts = ready.places, ready.starts
        token_ids = self._last_tokens[places].copy()
        if ahead:
            token_ids[self._unread()[places] > 0] = -1
        roll = self._called()
        everybody = len(starts) == len(self.states)
        rows = DecodeRows(
            request_ids=roll.request_ids if everybody else roll.request_ids[places],
            seq_slots=roll.seq_slots if everybody else roll.seq_slots[places],
            token_ids=token_ids,
            starts=starts,
            num_generated=starts - self._offsets[places],
            block_tables=self.blocks.tables(places, self._longest),
        )
        if len(starts):
            self._starts[places] = starts + 1
            self._sum_starts += len(starts)
            self._longest += 1
            self._in_flight.append(_Flight(rows, roll.names if everybody else None, self._num_left))
        return rows

    def _called(self) -> _Roll:
        if self._roll is None:
            everybody = slice(0, len(self.states))
            request_ids = self._request_ids[everybody].copy()
            self._longest = int(self._starts[everybody].max(initial=0))
            self._roll = _Roll(self._seq_slots[everybody].copy(), request_ids, request_ids.tolist())
        return self._roll

    def _unread(self) -> Ints:
        """[M] tokens of each member that are planned and nobody has read."""
        counts: Ints = self._chunk_in_flight[: len(self.states)].copy()
        for flight in self._in_flight:
            places = self._place_of[flight.rows.seq_slots]
            counts[places[places != _NOWHERE]] += 1
        return counts

    # ---- results

    def read_chunk(self, seq_slot: int, token_id: int, ended_s: float, gap_s: float) -> float | None:
        """The token of a member's last chunk, which has been appended already. If it is late: when the one before
        came."""
        place = self.place(seq_slot)
        self._chunk_in_flight[place] = 0
        self._last_tokens[place] = token_id
        return self.times.read_chunk(place, ended_s, gap_s)

    def take_back(self, rows: DecodeRows, token_ids: Ints, *, ended_s: float, batch: int, gap_s: float) -> TakenBack:
        """The rows are no longer in flight. Moves the members among them one token on; those that have left meanwhile
        are passed over.

        `batch`: rows of the step. `gap_s`: `StepTimes.gap_s`.
        """
        flight = self._in_flight.popleft()
        assert flight.rows is rows, "steps come back in another order"
        live, names = None, flight.names
        starts, positions = rows.starts, rows.num_generated
        places: Places = slice(0, len(rows))
        if names is not None and flight.num_left == self._num_left:
            generated = self._generated if len(rows) == len(self.states) else self._generated[: len(rows)]
        else:
            among = self._place_of[rows.seq_slots]
            live = among != _NOWHERE
            places = among = among[live]
            starts, positions, token_ids = starts[live], positions[live], token_ids[live]
            generated = [self._generated[place] for place in among.tolist()]
            names = rows.request_ids[live].tolist()
        assert not np.count_nonzero(token_ids < 0), "a row came back without a token"
        self._last_tokens[places] = token_ids
        token_list: list[int] = token_ids.tolist()
        deque(map(list.append, generated, token_list), maxlen=0)  # half the time of a loop
        late = self.times.tick(places, ended_s, batch=batch, gap_s=gap_s)
        return TakenBack(
            live=live,
            request_ids=names,
            positions=positions.tolist(),
            token_ids=token_list,
            ended=self._ended(places, starts, token_ids, token_list),
            filled=self._filled(places, starts),
            late=[(self.states[place], since_s) for place, since_s in late],
        )

    def _filled(self, places: Places, starts: Ints) -> list[tuple[RequestState, int]]:
        full = (starts % self._block_size == self._block_size - 1).nonzero()[0]
        if not full.size:
            return []
        counts = (starts[full] // self._block_size + 1).tolist()
        return list(zip(self._states_at(places, full), counts, strict=True))

    def _ended(
        self, places: Places, starts: Ints, token_ids: Ints, token_list: list[int]
    ) -> list[tuple[RequestState, Ending]]:
        """Looks at those that are at their last row, and at those with a token that ends some request."""
        ended = starts >= self._lasts[places]
        if not self._stop_ids.keys().isdisjoint(token_list):
            ended |= np.isin(token_ids, list(self._stop_ids))
        rows = ended.nonzero()[0]
        if not rows.size:
            return []
        at_end = zip(self._states_at(places, rows), rows.tolist(), strict=True)
        endings = ((state, state.ending_with(token_list[row])) for state, row in at_end)
        return [(state, ending) for state, ending in endings if ending is not None]

    def _states_at(self, places: Places, rows: Ints) -> list[RequestState]:
        """Of some rows of those that have these places."""
        among = rows if isinstance(places, slice) else places[rows]
        return [self.states[place] for place in among.tolist()]

    def resume(self, seq_slot: int, resumed_s: float) -> None:
        """The gap that `take_back` has named ends here; what follows, its token included, is decoding again."""
        self.times.resume(self.place(seq_slot), resumed_s)

    # ---- questions

    def pace(self, ready: Ready) -> tuple[Seconds, Ints, Ints]:
        """(seconds from the first to the latest token, gaps, late gaps) of each, as far as tokens have been read."""
        places = ready.places
        elapsed_s, late_gaps = self.times.elapsed(places)
        num_gaps = np.maximum(ready.starts - self._offsets[places] - self._unread()[places] - 1, 0)
        return np.where(num_gaps > 0, elapsed_s, 0.0), num_gaps, late_gaps

    # ---- checks

    def check_in_flight(self, rows: list[DecodeRows]) -> None:
        """Raises AssertionError unless these are the rows in flight, in the order of their plans."""
        assert [flight.rows for flight in self._in_flight] == rows, "decodes in flight"

    def check(self, members: dict[int, tuple[RequestState, BlockTable, int]]) -> None:
        """Raises AssertionError unless the table agrees with `members`: slot -> (state, blocks, 1 if its last chunk is
        in flight)."""
        num_members, unread = len(self.states), self._unread()
        seq_slots = self._seq_slots[:num_members].tolist()
        assert set(seq_slots) == members.keys() and len(seq_slots) == len(members), "the wrong requests are decodes"
        assert set(np.flatnonzero(self._place_of != _NOWHERE).tolist()) == members.keys(), "places are lost"
        self.times.check(self.states)
        starts = self._starts[:num_members]
        assert self._sum_starts == int(starts.sum()) and self._longest >= int(starts.max(initial=0))
        assert self._stop_ids == Counter(chain.from_iterable(state.stop_ids for state in self.states)), "stop tokens"
        for place, seq_slot in enumerate(seq_slots):
            state, blocks, chunk = members[seq_slot]
            where = f"request {state.request.id}"
            assert self._place_of[seq_slot] == place, f"{where} has another's place"
            assert self.states[place] is state, f"{where} has a wrong slot"
            assert self._request_ids[place] == state.request.id, f"{where} has another's id"
            assert self._generated[place] is state.generated, f"{where}: tokens go elsewhere"
            assert self._chunk_in_flight[place] == chunk, f"{where}: whether its last chunk is in flight"
            start = int(self._starts[place])
            assert start == state.num_tokens - 1 + unread[place], f"{where}: place of its next row"
            assert start - self._offsets[place] == state.num_generated + unread[place], f"{where}: count"
            assert start <= self._lasts[place] + 1, f"{where} is planned beyond its end"
            if state.generated and not unread[place]:
                assert self._last_tokens[place] == state.generated[-1], f"{where}: last token"
            self.blocks.check(place, blocks, where)


def _some(places: Ints, starts: Ints) -> Ready:
    return Ready(places, starts, int(starts.sum()) + len(starts))


def _zeros(count: int) -> Ints:
    return np.zeros(count, dtype=np.int64)
