"""What the language lane keeps of running requests: arrays with one entry per seat, so that a decode carries nothing.

A request takes its seat with its first chunk there and has it until a chunk of another request comes. The lane's thread
alone uses this, in the order of the plans; whoever planned a token ahead (-1) therefore finds it here. Only `fail` and
`failed` are for the thread that reads results too. Does not decide who sits where, nor when a request ends: what a seat
holds of an ended request is overwritten by its next one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hydra_engine.core.plans import DecodeRows, Ints, LanguagePlan
from hydra_engine.core.request import Request
from hydra_engine.worker.parts import request_ids_of, seats_of
from hydra_engine.worker.ports import WorkerRequest
from hydra_engine.worker.sampler import NEVER_PLAIN, Recipe

_NOBODY = -1
_NEVER = -1


class Tenancies(NamedTuple):
    """Whose rows a step has: one entry of each array for each of them."""

    step: int
    seats: Ints
    since: Ints  # the step that it began with; later than `step`: the seat is not the request's


class Asked(NamedTuple):
    """The rows of a plan that sample, in order: one entry of each array for each of them."""

    rows: Ints  # [B'] row of the plan
    seats: Ints  # [B']
    num_generated: Ints  # [B']
    plain: npt.NDArray[np.bool_]  # [B'] all of them are sampled at once, see `Seats.plain_from`


class Seats:
    """`num_seats` places; every array below has one entry per seat.

    A request's tenancy is its time in a seat; one that begins anew has a new one. Steps are numbered here, from 1 on.
    """

    def __init__(self, num_seats: int) -> None:
        self.step = 0  # the number of the step in hand
        self.owners: Ints = np.full(num_seats, _NOBODY, dtype=np.int64)  # request ids
        self.rope_deltas: Ints = np.zeros(num_seats, dtype=np.int64)
        self.plain_from: Ints = np.full(num_seats, NEVER_PLAIN, dtype=np.int64)  # see Recipe.plain_from
        self.since: Ints = np.zeros(num_seats, dtype=np.int64)  # the step that the tenancy began with
        self._last_tokens: Ints = np.full(num_seats, -1, dtype=np.int64)
        self._checked: Ints | None = None  # seats of decodes that were their requests' own; nobody has sat down since
        self._requests: list[Request | None] = [None] * num_seats
        self._recipes: list[Recipe | None] = [None] * num_seats
        self._lock = threading.Lock()  # for what follows
        self._any_failed = False
        self._failed_in: Ints = np.full(num_seats, _NEVER, dtype=np.int64)  # the first step in which a row failed

    # ---- who sits where

    def take(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> None:
        """A step begins: gives seats to the requests of its chunks; `records[i]` belongs to `plan.chunks[i]`."""
        self.step += 1
        for chunk, record in zip(plan.chunks, records, strict=True):
            seat = chunk.seat
            if self.owners[seat] != chunk.request_id:
                self.owners[seat] = chunk.request_id
                self._checked = None
                self._last_tokens[seat] = -1  # not another request's: no model takes it
                self.since[seat] = self.step
            elif chunk.start == 0:
                self.since[seat] = self.step  # it begins anew
            self._requests[seat] = record.request
            self._recipes[seat] = record.recipe
            self._sit(seat, record)

    def _sit(self, seat: int, record: WorkerRequest) -> None:
        """What steps need of the seat's request."""
        self.rope_deltas[seat] = record.request.rope_delta
        self.plain_from[seat] = record.recipe.plain_from

    # ---- rows that failed: rows of their requests that were planned ahead have nothing to go on from

    def tenancies(self, plan: LanguagePlan) -> Tenancies:
        """Those of the plan's rows, now."""
        seats = seats_of(plan)
        owned = self.owners[seats] == request_ids_of(plan)
        return Tenancies(self.step, seats, np.where(owned, self.since[seats], self.step + 1))

    def fail(self, tenancies: Tenancies, rows: Sequence[int]) -> None:
        """These rows failed. A row without a tenancy harms nobody."""
        step, seats, since = tenancies.step, tenancies.seats[rows], tenancies.since[rows]
        with self._lock:
            before = self._failed_in[seats]
            first = (since <= step) & ((before < since) | (before > step))
            self._failed_in[seats[first]] = step
            self._any_failed = True

    def barred(self, plan: LanguagePlan) -> list[int]:
        """As `failed` of the step in hand; `take` comes first."""
        return self.failed(self.tenancies(plan)) if self._any_failed else []

    def failed(self, tenancies: Tenancies) -> list[int]:
        """Rows, ascending, of tenancies in which a row failed before their step, as far as that is known."""
        if not self._any_failed:
            return []
        with self._lock:
            before = self._failed_in[tenancies.seats]
        rows: list[int] = np.flatnonzero((before >= tenancies.since) & (before < tenancies.step)).tolist()
        return rows

    def requests(self, plan: LanguagePlan) -> Iterator[Request]:
        """The requests of the plan's rows."""
        for seat in seats_of(plan).tolist():
            request = self._requests[seat]
            if request is not None:
                yield request

    def recipe(self, seat: int) -> Recipe:
        recipe = self._recipes[seat]
        assert recipe is not None, f"nobody sits in seat {seat}"
        return recipe

    # ---- tokens

    def tokens(self, decodes: DecodeRows) -> Ints:
        """[B]: the rows' tokens, where -1 is replaced by the token that was sampled last for the seat."""
        return self.known_tokens(decodes)

    def known_tokens(self, decodes: DecodeRows) -> Ints:
        """As `tokens`, right for rows that are not plain also where others' tokens are elsewhere."""
        self.check_owners(decodes)
        ids = decodes.token_ids
        unread = ids < 0
        return np.where(unread, self._last_tokens[decodes.seats], ids) if np.count_nonzero(unread) else ids

    def check_owners(self, decodes: DecodeRows) -> None:
        """Plans share the array of seats as long as the same requests decode: then there is nothing new to check."""
        if decodes.seats is not self._checked:
            owned = self.owners[decodes.seats] == decodes.request_ids
            assert owned.all(), "a decode names a seat that is not its request's"
            self._checked = decodes.seats

    def put(self, seats: Ints, token_ids: Ints) -> None:
        """What was sampled for `seats`; -1 for a row that failed, whose later rows are barred."""
        self._last_tokens[seats] = token_ids

    # ---- sampling

    def asked(self, plan: LanguagePlan) -> Asked:
        decodes, first = plan.decodes, len(plan.decodes)
        rows, seats, num_generated = np.arange(first), decodes.seats, decodes.num_generated
        sampling = [(first + i, chunk) for i, chunk in enumerate(plan.chunks) if chunk.sample]
        if sampling:
            more = np.array([(row, chunk.seat, chunk.num_generated) for row, chunk in sampling], dtype=np.int64)
            rows = np.concatenate((rows, more[:, 0]))
            seats = np.concatenate((seats, more[:, 1]))
            num_generated = np.concatenate((num_generated, more[:, 2]))
        return Asked(rows, seats, num_generated, num_generated >= self.plain_from[seats])
