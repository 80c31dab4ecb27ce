"""Transfers staged through host memory, used where a target cannot map the memory of a source.

The source has a small pool of host memory that its peers map, the staging pool. A target that is about to copy asks for
a piece of the offer (`Stage`); the source copies the piece into free blocks of the pool and names them (`Staged`); the
target copies it from there and frees the blocks (`Taken`). So a piece is read only after all of it is written, a block
of the pool belongs to one piece at a time, and a staged piece waits for one copy only. Several pieces of a pull are in
flight at once: one is written while another is read.

A piece lives as long as its offer. When the offer ends, for whatever reason, its control word is invalidated first, and
then the blocks of its pieces are free again: a target that reads too late learns it from the control word, as it does
when it reads the source's own memory. `Staging` is the source's half, `StagedPulls` the target's. Messages arrive once
and in order, as on one connection, and end with it. Neither half sends or copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from hydra_engine.core.ids import StepId
from hydra_engine.core.pools import PoolKind
from hydra_engine.transfer.messages import Stage, Staged, Taken
from hydra_engine.transfer.plans import PullJob, PullResult, StagingJob

PIECES_AT_ONCE = 2  # of one pull


@dataclass(slots=True)
class _Piece:
    """A piece of an offer that `peer` has asked for."""

    peer: str
    stage: Stage
    pool: PoolKind
    blocks: list[int] = field(default_factory=list)  # of the staging pool; none: it waits for free blocks
    staged: bool = False  # all of it is in the staging pool


class Staging:
    """The source's staging pools. `num_blocks`: blocks of the staging pool of each kind of cache. Copies run in the
    order in which they start, so blocks of a piece that is over are free at once, even while they are being written:
    their next piece is written later."""

    def __init__(self, num_blocks: Mapping[PoolKind, int]) -> None:
        self.ignored = 0  # messages
        self._num_blocks = dict(num_blocks)
        self._free = {pool: list(range(count - 1, -1, -1)) for pool, count in num_blocks.items()}
        self._pieces: dict[tuple[int, int], _Piece] = {}  # by sequence of the offer and ticket, in the order they came
        self._waiting: dict[PoolKind, deque[_Piece]] = {pool: deque() for pool in num_blocks}
        self._copying: dict[int, _Piece] = {}  # by number of the job; some are over
        self._next_number = 1

    def request(self, peer: str, stage: Stage, pool: PoolKind) -> bool:
        """Queues a piece of a live offer; ignores one that is known already. Returns False if it is empty or larger
        than the pool: it can never be staged."""
        if not 0 < len(stage.blocks) <= self._num_blocks.get(pool, 0):
            return False
        key = stage.sequence, stage.ticket
        if key in self._pieces:
            self.ignored += 1
            return True
        piece = self._pieces[key] = _Piece(peer, stage, pool)
        self._waiting[pool].append(piece)
        return True

    def start(self) -> Iterator[StagingJob]:
        """Yields the copies for which blocks are free, in the order of the requests for them within a pool. `end_copy`
        must follow each."""
        for pool, waiting in self._waiting.items():
            free = self._free[pool]
            while waiting and len(waiting[0].stage.blocks) <= len(free):
                piece = waiting.popleft()
                piece.blocks = [free.pop() for _ in piece.stage.blocks]
                number, self._next_number = self._next_number, self._next_number + 1
                self._copying[number] = piece
                yield StagingJob(number, pool, piece.stage.blocks, tuple(piece.blocks))

    def end_copy(self, number: int) -> tuple[str, Staged] | None:
        """Marks the piece of a copy as staged. Returns (peer, message) to send; None if its offer is over."""
        piece = self._copying.pop(number)
        if not piece.blocks:
            return None
        piece.staged = True
        stage = piece.stage
        return piece.peer, Staged(stage.incarnation, stage.sequence, stage.ticket, tuple(piece.blocks))

    def on_taken(self, peer: str, taken: Taken) -> None:
        """Frees the blocks of a piece that its target has copied; ignores one that is not staged for `peer`."""
        piece = self._pieces.get((taken.sequence, taken.ticket))
        if piece is None or piece.peer != peer or not piece.staged:
            self.ignored += 1
            return
        self._end(piece)

    def free_ended(self, is_live: Callable[[int], bool]) -> None:
        """Frees the pieces of offers that are over. `is_live` takes the sequence number of an offer."""
        for piece in [piece for piece in self._pieces.values() if not is_live(piece.stage.sequence)]:
            self._end(piece)

    @property
    def num_live(self) -> int:
        """Number of pieces that wait, are copied, or are held for a target."""
        return len(self._pieces)

    def _end(self, piece: _Piece) -> None:
        """Forgets a piece and frees its blocks, even while it waits or is copied."""
        del self._pieces[piece.stage.sequence, piece.stage.ticket]
        if not piece.blocks:
            self._waiting[piece.pool].remove(piece)
        self._free[piece.pool] += piece.blocks
        piece.blocks = []


@dataclass(slots=True)
class _Pull:
    """A pull in pieces of at most `piece_blocks` blocks. `tickets`: pieces that were requested and are not copied yet,
    as ranges [begin, end) of the job's blocks."""

    job: PullJob
    incarnation: int
    piece_blocks: int
    started_s: float
    num_requested: int = 0  # blocks requested so far
    tickets: dict[int, tuple[int, int]] = field(default_factory=dict)
    copying: int = 0  # number of pieces whose copy is in flight
    num_bytes: int = 0  # copied so far
    valid: bool = True  # no copy has failed, and the offer is not known to be over
    problem: str | None = None

    @property
    def has_ended(self) -> bool:
        """True if no copy is in flight and none follows: all pieces were copied, or the pull is not `valid`."""
        return not self.copying and (
            not self.valid or (not self.tickets and self.num_requested == len(self.job.source_blocks))
        )


class StagedPulls:
    """The target's staged pulls. A pull ends with exactly one result, from `end_copy` or `end_expired`."""

    def __init__(self) -> None:
        self.ignored = 0  # messages
        self._pulls: dict[StepId, _Pull] = {}
        self._of_ticket: dict[int, _Pull] = {}
        self._next_ticket = 1

    def begin(self, job: PullJob, incarnation: int, piece_blocks: int, now: float) -> list[Stage]:
        """Starts a pull of a job with at least one block, in pieces of at most `piece_blocks`. Returns the messages to
        the job's peer, whose incarnation is `incarnation`."""
        pull = self._pulls[job.step_id] = _Pull(job, incarnation, piece_blocks, now)
        return self._ask(pull)

    def on_staged(self, peer: str, staged: Staged) -> PullJob | None:
        """Returns the copy job of a piece, with its ticket; `end_copy` must follow. None, counted as ignored, if no
        pull from this peer waits for a piece of that ticket and size."""
        pull = self._of_ticket.get(staged.ticket)
        begin, end = (0, 0) if pull is None else pull.tickets[staged.ticket]
        if pull is None or pull.job.peer != peer or len(staged.blocks) != end - begin:
            self.ignored += 1
            return None
        del self._of_ticket[staged.ticket]
        pull.copying += 1
        job = pull.job
        return replace(
            job,
            source_blocks=np.array(staged.blocks, np.int32),
            target_blocks=job.target_blocks[begin:end],
            checksums=job.checksums[begin:end],
            ticket=staged.ticket,
        )

    def end_copy(self, result: PullResult) -> tuple[str, list[Taken | Stage], PullResult | None]:
        """Records the end of the copy of a piece, successful or failed. Returns (peer, messages to send, the result of
        the pull if it has ended)."""
        pull = self._pulls[result.step_id]
        del pull.tickets[result.ticket]
        pull.copying -= 1
        pull.num_bytes += result.num_bytes
        pull.valid &= result.valid and result.problem is None
        pull.problem = pull.problem or result.problem
        messages: list[Taken | Stage] = []
        if pull.valid:
            messages = [Taken(pull.incarnation, pull.job.sequence, result.ticket), *self._ask(pull)]
        ended = self._end(pull, result.ended_s) if pull.has_ended else None
        return pull.job.peer, messages, ended

    def end_expired(self, is_over: Callable[[PullJob], bool], now: float) -> Iterator[PullResult]:
        """Yields results, not valid, of pulls whose offer is over and which have no copy in flight: their next piece
        never comes. Pulls with a copy in flight end with it. `is_over` takes the job of a pull."""
        for pull in list(self._pulls.values()):
            if pull.valid and is_over(pull.job):
                pull.valid = False
                if pull.has_ended:
                    yield self._end(pull, now)

    def _ask(self, pull: _Pull) -> list[Stage]:
        """Requests the next pieces of a pull, so that at most `PIECES_AT_ONCE` are under way. Returns the messages."""
        messages = []
        while pull.num_requested < len(pull.job.source_blocks) and len(pull.tickets) < PIECES_AT_ONCE:
            ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
            begin, end = pull.num_requested, min(pull.num_requested + pull.piece_blocks, len(pull.job.source_blocks))
            pull.tickets[ticket], pull.num_requested = (begin, end), end
            self._of_ticket[ticket] = pull
            blocks = tuple(pull.job.source_blocks[begin:end].tolist())
            messages.append(Stage(pull.incarnation, pull.job.sequence, ticket, blocks))
        return messages

    def _end(self, pull: _Pull, ended_s: float) -> PullResult:
        """Forgets the pull and its tickets. Returns its result."""
        del self._pulls[pull.job.step_id]
        for ticket in pull.tickets:
            self._of_ticket.pop(ticket, None)
        return PullResult(pull.job.step_id, pull.started_s, ended_s, pull.valid, pull.num_bytes, pull.problem)
