"""The outcome of a step for the rows of its plan: sampled tokens, log probabilities of prompt tokens, failures.

The row at a position scores the next prompt token. Logits for that come in slices while the model runs, and only the
requested entries of them are kept. Does not know models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from hydra_engine.backend.device import Device
from hydra_engine.core.plans import Int64s, LanguagePlan, TokenLogprobs
from hydra_engine.errors import ErrorInfo
from hydra_engine.models.inputs import Scored
from hydra_engine.worker.boundary import not_finite
from hydra_engine.worker.language.sampler import Scores, finite_rows, token_logprobs
from hydra_engine.worker.ports import WorkerRequest

_NO_TOKEN: Int64s = np.array([-1])


@dataclass(slots=True)
class Samples:
    """The outcome of a plan's rows, as in `LanguageResult`."""

    token_ids: Int64s  # [num_rows], -1: none
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    failures: list[tuple[int, ErrorInfo]] = field(default_factory=list)
    scores: list[tuple[int, tuple[TokenLogprobs, ...]]] = field(default_factory=list)

    @classmethod
    def none(cls, num_rows: int) -> Samples:
        return cls(_NO_TOKEN.repeat(num_rows))

    def put(self, rows: Int64s, part: Samples) -> None:
        """Merges `part`, whose row i is row `rows[i]` here."""
        self.token_ids[rows] = part.token_ids
        self.logprobs += [(int(rows[i]), logprobs) for i, logprobs in part.logprobs]
        self.failures += [(int(rows[i]), error) for i, error in part.failures]
        self.scores += [(int(rows[i]), scores) for i, scores in part.scores]

    def drop(self, rows: Sequence[int]) -> None:
        """Discards the outcome of these rows."""
        self.token_ids[rows] = -1
        self.logprobs = [(row, logprobs) for row, logprobs in self.logprobs if row not in rows]
        self.failures = [(row, error) for row, error in self.failures if row not in rows]
        self.scores = [(row, scores) for row, scores in self.scores if row not in rows]


class PromptScoring:
    """The scored chunks of one run of a step; a step that is run again needs a new one."""

    def __init__(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> None:
        self._rows: list[int] = []  # of the step's tokens
        self._targets: list[tuple[int, int, int]] = []  # for each of them: (row of the plan, token id, how many best)
        self._found: dict[int, list[TokenLogprobs]] = {}  # by row of the plan
        self._broken: set[int] = set()
        self._num_taken = 0
        begin = len(plan.decodes)
        for row, (chunk, record) in enumerate(zip(plan.chunks, records, strict=True), len(plan.decodes)):
            num_top = record.request.sampling.prompt_logprobs
            if chunk.scored and num_top is not None:
                first = chunk.start + 1
                targets = record.request.prompt_token_ids[first : first + len(chunk.token_ids)]
                self._rows += range(begin, begin + len(targets))
                self._targets += [(row, token_id, num_top) for token_id in targets]
                self._found[row] = []
            begin += len(chunk.token_ids)

    @classmethod
    def of(cls, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> PromptScoring | None:
        """Scoring of the plan; None if no chunk is scored."""
        return cls(plan, records) if any(chunk.scored for chunk in plan.chunks) else None

    def wanted(self, device: Device) -> Scored:
        (rows,) = device.send((np.array(self._rows, dtype=np.int64),))
        return Scored(rows, self._take)

    def put(self, samples: Samples) -> None:
        """Adds the scores to `samples`. A chunk with logits that are not finite fails, and its sampled token is
        discarded."""
        assert self._num_taken == len(self._rows), "the model left out scored rows"
        for row, logprobs in self._found.items():
            if row in self._broken:
                samples.token_ids[row] = -1
                samples.failures.append((row, not_finite("logits")))
            else:
                samples.scores.append((row, tuple(logprobs)))

    def _take(self, part: Tensor) -> None:
        logits = part.cpu().numpy()
        targets = self._targets[self._num_taken : self._num_taken + len(logits)]
        self._num_taken += len(logits)
        for (row, token_id, num_top), raw, finite in zip(targets, logits, finite_rows(logits).tolist(), strict=True):
            if finite:
                self._found[row].append(_score(raw.astype(np.float64), token_id, num_top))
            else:
                self._broken.add(row)


def _score(raw: Scores, token_id: int, num_top: int) -> TokenLogprobs:
    """Log probabilities of a prompt token. A placeholder without a logit has probability 0 and the last rank."""
    if token_id < raw.size:
        return token_logprobs(raw, token_id, num_top)
    top = token_logprobs(raw, 0, num_top).top
    return TokenLogprobs(token_id, -math.inf, raw.size + 1, top)
