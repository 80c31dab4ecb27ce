"""A language plan's rows as columns, a plan cut into smaller ones, and what their rows sampled put together again.

Rows are numbered through: decodes first, then chunks. Does not know models, slots' contents or sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hydra_engine.core.plans import DecodeRows, Ints, LanguagePlan, TokenLogprobs
from hydra_engine.errors import ErrorInfo
from hydra_engine.worker.ports import WorkerRequest


def request_ids_of(plan: LanguagePlan) -> Ints:
    """[num_rows]"""
    return _column(plan.decodes.request_ids, [chunk.request_id for chunk in plan.chunks])


def seq_slots_of(plan: LanguagePlan) -> Ints:
    """[num_rows]"""
    return _column(plan.decodes.seq_slots, [chunk.seq_slot for chunk in plan.chunks])


def starts_of(plan: LanguagePlan) -> Ints:
    """[num_rows] position of each row's first token."""
    return _column(plan.decodes.starts, [chunk.start for chunk in plan.chunks])


def counts_of(plan: LanguagePlan) -> Ints:
    """[num_rows] tokens of each row."""
    return _column(np.ones(len(plan.decodes), dtype=np.int64), [len(chunk.token_ids) for chunk in plan.chunks])


def _column(decodes: Ints, chunks: Sequence[int]) -> Ints:
    return np.concatenate((decodes, np.array(chunks, dtype=np.int64))) if chunks else decodes


def part_of(
    plan: LanguagePlan, records: Sequence[WorkerRequest], rows: Ints
) -> tuple[LanguagePlan, list[WorkerRequest]]:
    """A plan of some rows of another, and its chunks' records. `rows` ascend."""
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
    part = LanguagePlan(plan.step_id, fewer, tuple(plan.chunks[i] for i in chunks), plan.vision_s)
    return part, [records[i] for i in chunks]


@dataclass(slots=True)
class Samples:
    """What a `LanguageResult` says of a plan's rows."""

    token_ids: Ints  # [num_rows], -1: none
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    failures: list[tuple[int, ErrorInfo]] = field(default_factory=list)
    scores: list[tuple[int, tuple[TokenLogprobs, ...]]] = field(default_factory=list)

    @classmethod
    def none(cls, num_rows: int) -> Samples:
        return cls(np.full(num_rows, -1, dtype=np.int64))

    def put(self, rows: Ints, part: Samples) -> None:
        """Row i of `part` is row `rows[i]` here."""
        self.token_ids[rows] = part.token_ids
        self.logprobs += [(int(rows[i]), logprobs) for i, logprobs in part.logprobs]
        self.failures += [(int(rows[i]), error) for i, error in part.failures]
        self.scores += [(int(rows[i]), scores) for i, scores in part.scores]

    def drop(self, rows: Sequence[int]) -> None:
        """What these rows got is worth nothing."""
        self.token_ids[rows] = -1
        self.logprobs = [(row, logprobs) for row, logprobs in self.logprobs if row not in rows]
        self.failures = [(row, error) for row, error in self.failures if row not in rows]
        self.scores = [(row, scores) for row, scores in self.scores if row not in rows]
