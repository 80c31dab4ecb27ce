"""What the language lane keeps of running requests: arrays with one entry per seat, so that a decode carries nothing.

A request takes its seat with its first chunk there and has it until a chunk of another request comes. The lane's thread
alone uses this, in the order of the plans; whoever planned a token ahead (-1) therefore finds it here. Does not decide
who sits where, nor when a request ends: what a seat holds of an ended request is overwritten by its next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hydra_engine.core.ids import RequestId
from hydra_engine.core.plans import DecodeRows, Ints, LanguagePlan
from hydra_engine.core.request import Request
from hydra_engine.worker.parts import request_ids_of, seats_of
from hydra_engine.worker.ports import WorkerRequest
from hydra_engine.worker.sampler import NEVER_PLAIN, Recipe

_NOBODY = -1


class Asked(NamedTuple):
    """The rows of a plan that sample, in order: one entry of each array for each of them."""

    rows: Ints  # [B'] row of the plan
    seats: Ints  # [B']
    num_generated: Ints  # [B']
    plain: npt.NDArray[np.bool_]  # [B'] nothing but the largest logit decides


class Seats:
    """`num_seats` places; every array below has one entry per seat.

    `tokens` and `put` are the only ways to the last sampled tokens: a device that keeps these in its own memory needs
    another form of these two.
    """

    def __init__(self, num_seats: int) -> None:
        self.owners: Ints = np.full(num_seats, _NOBODY, dtype=np.int64)  # request ids
        self.rope_deltas: Ints = np.zeros(num_seats, dtype=np.int64)
        self.plain_from: Ints = np.full(num_seats, NEVER_PLAIN, dtype=np.int64)  # see Recipe.plain_from
        self._last_tokens: Ints = np.full(num_seats, -1, dtype=np.int64)
        self._requests: list[Request | None] = [None] * num_seats
        self._recipes: list[Recipe | None] = [None] * num_seats
        self._failed: set[int] = set()  # seats whose request failed and is still the owner

    # ---- who sits where

    def take(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> None:
        """Gives seats to the requests of the plan's chunks; `records[i]` belongs to `plan.chunks[i]`."""
        for chunk, record in zip(plan.chunks, records, strict=True):
            seat = chunk.seat
            if self.owners[seat] != chunk.request_id:
                self.owners[seat] = chunk.request_id
                self._last_tokens[seat] = -1  # not another request's: no model takes it
                self._failed.discard(seat)
            elif chunk.start == 0:
                self._failed.discard(seat)  # it begins anew
            self.rope_deltas[seat] = record.request.rope_delta
            self.plain_from[seat] = record.recipe.plain_from
            self._requests[seat] = record.request
            self._recipes[seat] = record.recipe

    def fail(self, seat: int, request_id: RequestId) -> None:
        """A row failed. Rows of its request that were planned ahead have nothing to go on from."""
        if self.owners[seat] == request_id:
            self._failed.add(seat)

    def barred(self, plan: LanguagePlan) -> list[int]:
        """Rows of requests that failed before, in ascending order; `take` comes first."""
        if not self._failed:
            return []
        seats = seats_of(plan)
        failed = np.isin(seats, list(self._failed)) & (self.owners[seats] == request_ids_of(plan))
        rows: list[int] = np.flatnonzero(failed).tolist()
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
        owned = self.owners[decodes.seats] == decodes.request_ids
        assert owned.all(), "a decode names a seat that is not its request's"
        ids = decodes.token_ids
        return np.where(ids < 0, self._last_tokens[decodes.seats], ids)

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
