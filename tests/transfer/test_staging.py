"""Pieces through a staging pool: every interleaving of copies, messages, offers that end and targets that die.

A row of memory says what it is, blocks are copied in halves, and what a source's blocks hold changes the moment its
offer is over. So a piece that is read too early, or from a block that has become another piece's, is seen.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from hydra_engine.core.ids import StepId
from hydra_engine.core.pools import PoolKind
from hydra_engine.transfer.messages import Stage, Staged, Taken
from hydra_engine.transfer.plans import PullJob, PullResult, StagingJob
from hydra_engine.transfer.staging import PIECES_AT_ONCE, StagedPulls, Staging
from tests.transfer.audit import check_staging

POOL = PoolKind.KV


def job(step: int, sequence: int, num_blocks: int) -> PullJob:
    blocks = np.arange(num_blocks, dtype=np.int32)
    return PullJob(StepId(step), "s", POOL, 10 * sequence + blocks, blocks, 0, 0, tuple(blocks.tolist()), sequence)


def result(piece: PullJob, *, valid: bool = True, problem: str | None = None) -> PullResult:
    return PullResult(piece.step_id, 1.0, 2.0, valid, len(piece.source_blocks), problem, piece.ticket)


# ---- each half


def test_a_pull_goes_in_pieces_of_which_a_few_are_under_way() -> None:
    pulls = StagedPulls()
    asked = pulls.begin(job(7, 3, 5), 1, 2, 0.5)
    assert asked == [Stage(1, 3, 1, (30, 31)), Stage(1, 3, 2, (32, 33))] and len(asked) == PIECES_AT_ONCE
    second = pulls.on_staged("s", Staged(1, 3, 2, (8, 9)))
    assert second is not None and second.ticket == 2 and second.checksums == (2, 3)
    assert second.source_blocks.tolist() == [8, 9] and second.target_blocks.tolist() == [2, 3]
    assert pulls.end_copy(result(second)) == ("s", [Taken(1, 3, 2), Stage(1, 3, 3, (34,))], None)
    for ticket, blocks in ((1, (4, 5)), (3, (0,))):
        piece = pulls.on_staged("s", Staged(1, 3, ticket, blocks))
        assert piece is not None
        peer, messages, ended = pulls.end_copy(result(piece))
        assert (peer, messages) == ("s", [Taken(1, 3, ticket)])
    assert ended == PullResult(StepId(7), 0.5, 2.0, True, 5) and not pulls._pulls


@pytest.mark.parametrize("wrong", [{"valid": False}, {"problem": "checksums differ"}])
def test_a_piece_that_does_not_count_ends_the_pull_with_its_copies(wrong: dict) -> None:
    pulls = StagedPulls()
    pulls.begin(job(7, 3, 6), 1, 2, 0.0)
    pieces = [pulls.on_staged("s", Staged(1, 3, ticket, (0, 1))) for ticket in (1, 2)]
    assert pieces[0] is not None and pieces[1] is not None
    assert pulls.end_copy(result(pieces[0], **wrong)) == ("s", [], None), "the other copy is in flight"
    _, messages, ended = pulls.end_copy(result(pieces[1]))
    assert not messages and ended is not None and not ended.valid and ended.problem == wrong.get("problem")


def test_an_offer_that_is_over_ends_pulls_that_wait_for_a_piece() -> None:
    pulls = StagedPulls()
    for step in (1, 2, 3):
        pulls.begin(job(step, step, 2), 1, 1, 0.0)
    copying = pulls.on_staged("s", Staged(1, 2, 3, (0,)))
    assert copying is not None
    ended = list(pulls.end_expired(lambda job: job.sequence < 3, 9.0))
    assert [(r.step_id, r.valid, r.ended_s) for r in ended] == [(1, False, 9.0)]
    assert not list(pulls.end_expired(lambda job: job.sequence < 3, 9.0))
    _, messages, last = pulls.end_copy(result(copying))
    assert not messages and last is not None and (last.step_id, last.valid) == (2, False)
    for late in (1, 4):
        assert pulls.on_staged("s", Staged(1, 1, late, (0,))) is None
    assert pulls.ignored == 2 and len(pulls._pulls) == 1


@pytest.mark.parametrize("staged", [Staged(1, 3, 9, (0,)), Staged(1, 3, 1, (0,))])
def test_what_was_not_asked_for_is_ignored(staged: Staged) -> None:
    pulls = StagedPulls()
    pulls.begin(job(7, 3, 2), 1, 2, 0.0)
    assert pulls.on_staged("s", staged) is None and pulls.on_staged("x", Staged(1, 3, 1, (0, 1))) is None
    assert pulls.ignored == 2


def test_pieces_wait_for_room_in_order() -> None:
    staging = Staging({POOL: 4})
    for ticket, count in ((1, 3), (2, 2), (3, 1)):
        assert staging.request("t", Stage(1, ticket, ticket, tuple(range(count))), POOL)
    (first,) = staging.start()
    assert first == StagingJob(1, POOL, (0, 1, 2), (0, 1, 2)) and not list(staging.start())
    assert staging.end_copy(1) == ("t", Staged(1, 1, 1, (0, 1, 2)))
    for stranger in (("x", Taken(1, 1, 1)), ("t", Taken(1, 1, 2)), ("t", Taken(1, 2, 2))):
        staging.on_taken(*stranger)
    assert staging.ignored == 3 and not list(staging.start())
    staging.on_taken("t", Taken(1, 1, 1))
    assert [job.blocks for job in staging.start()] == [(0, 1), (0,)]
    check_staging(staging)


def test_what_never_fits_is_said_at_once() -> None:
    staging = Staging({POOL: 4})
    for blocks, pool in ((tuple(range(5)), POOL), ((), POOL), ((0,), PoolKind.FEATURES)):
        assert not staging.request("t", Stage(1, 1, 1, blocks), pool)
    assert staging.num_live == 0


def test_pieces_of_an_offer_that_is_over_are_free() -> None:
    staging = Staging({POOL: 2})
    for sequence in (1, 2, 3):
        staging.request("t", Stage(1, sequence, sequence, (0, 1)), POOL)
    (first,) = staging.start()
    staging.free_ended(lambda sequence: sequence == 3)
    (third,) = staging.start()
    assert third.blocks == (0, 1) and staging.num_live == 1, "the first is being written, the second never will be"
    assert staging.end_copy(first.number) is None
    assert staging.end_copy(third.number) == ("t", Staged(1, 3, 3, third.staging_blocks))
    staging.free_ended(lambda sequence: False)
    assert staging.num_live == 0
    check_staging(staging)


# ---- both of them


@dataclass(eq=False)
class Copy:
    """A copy in flight: block i of it becomes what `rows` of the source hold when it is its turn, half by half."""

    source: np.ndarray
    target: np.ndarray
    pairs: list[tuple[int, int]]
    halves: Iterator[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.halves = iter([(i, half) for i in range(len(self.pairs)) for half in (0, 1)])

    def step(self) -> bool:
        """Returns True once the copy has ended."""
        at = next(self.halves, None)
        if at is not None:
            source, target = self.pairs[at[0]]
            self.target[target, at[1]] = self.source[source, at[1]]
        return at is None


class Side:
    """A target: the pulls of one life."""

    def __init__(self) -> None:
        self.pulls = StagedPulls()
        self.incoming: deque[Staged] = deque()
        self.outgoing: deque[Stage | Taken] = deque()
        self.copies: list[tuple[Copy, PullJob]] = []  # a lane: in order
        self.rows: dict[int, np.ndarray] = {}  # by sequence


class Walk:
    """A source whose pool has room for three pieces of two blocks, and two targets."""

    def __init__(self, seed: int, staging: type[Staging] = Staging) -> None:
        self.dice = random.Random(seed)
        self.staging = staging({POOL: 6})
        self.pool = np.zeros((6, 2), np.int64)
        self.memory = np.zeros((1000, 2), np.int64)
        self.offers: dict[int, str] = {}  # live, by sequence -> target
        self.filling: list[tuple[Copy, StagingJob]] = []  # a lane: in order
        self.sides = {name: Side() for name in ("t0", "t1")}
        self.last = 0
        self.ended = {"valid": 0, "late": 0}

    def begin(self) -> None:
        name, self.last = self.dice.choice(list(self.sides)), self.last + 1
        sequence, count = self.last, self.dice.randint(1, 7)
        pull = job(sequence, sequence, count)
        self.memory[pull.source_blocks] = (100 * sequence + np.arange(count))[:, None]
        self.offers[sequence] = name
        side = self.sides[name]
        side.rows[sequence] = np.zeros((count, 2), np.int64)
        side.outgoing += side.pulls.begin(pull, 1, 2, 0.0)

    def end_offer(self) -> None:
        """Ends a random offer; its blocks hold something else from now on, and the pool's may."""
        if self.offers:
            sequence = self.dice.choice(list(self.offers))
            del self.offers[sequence]
            self.memory[10 * sequence : 10 * sequence + 10] = -1

    def tend(self) -> None:
        self.staging.free_ended(self.offers.__contains__)
        for side in self.sides.values():
            for ended in side.pulls.end_expired(lambda pull: pull.sequence not in self.offers, 0.0):
                self.end(side, ended)

    def die(self) -> None:
        name = self.dice.choice(list(self.sides))
        self.offers = {sequence: target for sequence, target in self.offers.items() if target != name}
        self.sides[name] = Side()
        self.staging.free_ended(self.offers.__contains__)

    def ask(self) -> None:
        for name, side in self.sides.items():
            if side.outgoing and self.dice.random() < 0.5:
                message = side.outgoing.popleft()
                if isinstance(message, Taken):
                    self.staging.on_taken(name, message)
                elif message.sequence in self.offers:
                    assert self.staging.request(name, message, POOL)
        self.start()

    def start(self) -> None:
        for staging in self.staging.start():
            pairs = list(zip(staging.blocks, staging.staging_blocks, strict=True))
            self.filling.append((Copy(self.memory, self.pool, pairs), staging))

    def fill(self) -> None:
        if self.filling and self.filling[0][0].step():
            done = self.staging.end_copy(self.filling.pop(0)[1].number)
            if done is not None:
                self.sides[done[0]].incoming.append(done[1])
            self.start()

    def read(self) -> None:
        for side in self.sides.values():
            if side.incoming and self.dice.random() < 0.5:
                piece = side.pulls.on_staged("s", side.incoming.popleft())
                if piece is not None:
                    pairs = list(zip(piece.source_blocks.tolist(), piece.target_blocks.tolist(), strict=True))
                    side.copies.append((Copy(self.pool, side.rows[piece.sequence], pairs), piece))
            if side.copies and side.copies[0][0].step():
                _, piece = side.copies.pop(0)
                _, messages, ended = side.pulls.end_copy(result(piece, valid=piece.sequence in self.offers))
                side.outgoing += messages
                if ended is not None:
                    self.end(side, ended)

    def end(self, side: Side, ended: PullResult) -> None:
        sequence, rows = int(ended.step_id), side.rows.pop(int(ended.step_id))
        self.ended["valid" if ended.valid else "late"] += 1
        if ended.valid:
            assert (rows == (100 * sequence + np.arange(len(rows)))[:, None]).all(), f"TORN: {rows.tolist()}"
            del self.offers[sequence]

    def audit(self) -> None:
        if not isinstance(self.staging, FreesWhatIsStaged):  # its tables are wrong on purpose
            check_staging(self.staging)

    def go(self, num_moves: int) -> None:
        moves = {
            self.begin: 4,
            self.end_offer: 2,
            self.tend: 4,
            self.die: 1,
            self.ask: 30,
            self.fill: 60,
            self.read: 60,
        }
        for move in self.dice.choices(list(moves), list(moves.values()), k=num_moves):
            move()
            self.audit()
        for _ in range(3000):
            for move in (self.ask, self.fill, self.read):
                move()
        self.tend()
        assert not any(side.pulls._pulls for side in self.sides.values()), "STUCK"
        assert self.staging.num_live == 0, "LEAK"
        self.audit()


def test_pieces_arrive_whole_or_not_at_all() -> None:
    ended = {"valid": 0, "late": 0}
    for seed in range(30):
        walk = Walk(seed)
        walk.go(600)
        for how, count in walk.ended.items():
            ended[how] += count
    assert min(ended.values()) > 30


class FreesWhatIsStaged(Staging):
    def end_copy(self, number: int) -> tuple[str, Staged] | None:
        piece = self._copying[number]
        done = super().end_copy(number)
        if done is not None:
            self._free[piece.pool] += piece.blocks
        return done

    def on_taken(self, peer: str, taken: Taken) -> None:
        piece = self._pieces.pop((taken.sequence, taken.ticket), None)
        assert piece is None or piece.peer == peer


class KeepsWhatIsOver(Staging):
    def free_ended(self, is_live) -> None: ...  # type: ignore[no-untyped-def]


@pytest.mark.parametrize(("kind", "mutant"), [("TORN", FreesWhatIsStaged), ("LEAK", KeepsWhatIsOver)])
def test_every_mutant_is_found(kind: str, mutant: type[Staging]) -> None:
    for seed in range(100):
        try:
            Walk(seed, mutant).go(600)
        except AssertionError as error:
            if str(error).startswith(kind):
                return
    raise AssertionError("the mutant lives")


class ReadsTooEarly(Walk):
    """A target hears of a piece when its copy begins."""

    def start(self) -> None:
        known = len(self.filling)
        super().start()
        for _, staging in self.filling[known:]:
            piece = self.staging._copying[staging.number]
            stage = piece.stage
            told = Staged(stage.incarnation, stage.sequence, stage.ticket, staging.staging_blocks)
            self.sides[piece.peer].incoming.append(told)


def test_a_piece_that_is_read_too_early_is_torn() -> None:
    with pytest.raises(AssertionError, match="TORN"):
        for seed in range(50):
            ReadsTooEarly(seed).go(600)
