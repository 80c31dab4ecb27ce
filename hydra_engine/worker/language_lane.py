"""A language plan -> logits -> sampled tokens -> a language result.

Runs in the language lane's thread. A row that makes the model raise, or whose logits are not finite, fails alone: KV
writes are idempotent and recurrent states are written to another place than they are read from, so a step that raised
is run again row by row. Does not decide when a request ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from hydra_engine.backend.base import Backend, PagedCache, StateCache
from hydra_engine.clock import Clock
from hydra_engine.core.plans import LanguagePlan, LanguageResult, LanguageRow, RowOutcome
from hydra_engine.errors import ErrorInfo
from hydra_engine.worker.batches import language_input
from hydra_engine.worker.boundary import attempt, not_finite
from hydra_engine.worker.faults import BEFORE_LANGUAGE_STEP, MID_LANGUAGE_STEP, FaultPoints
from hydra_engine.worker.ports import ServedModel, WorkerRequest
from hydra_engine.worker.positions import PromptPositions
from hydra_engine.worker.sampler import Logits, best_tokens, finite_rows, sample_row
from hydra_engine.worker.states import StateTable


class LanguageLane:
    def __init__(
        self,
        model: ServedModel,
        backend: Backend,
        kv_cache: PagedCache,
        image_cache: PagedCache | None,
        clock: Clock,
        faults: FaultPoints,
        states: StateCache | None = None,
    ) -> None:
        self._model = model
        self._ops = backend.ops
        self._device = backend.device.torch_device
        self._kv_cache = kv_cache
        self._image_cache = image_cache
        self._clock = clock
        self._faults = faults
        self._states = None if states is None else StateTable(states)

    def run(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> LanguageResult:
        """`records[i]` belongs to `plan.rows[i]`. Never raises because of a request's content."""
        started_s = self._clock.now()
        with torch.inference_mode():
            outcomes = self._outcomes(plan.rows, records)
        return LanguageResult(plan.step_id, started_s, self._clock.now(), outcomes)

    def _outcomes(self, rows: Sequence[LanguageRow], records: Sequence[WorkerRequest]) -> tuple[RowOutcome, ...]:
        if not rows:
            return ()
        outcomes = attempt(f"language step of {len(rows)}", partial(self._step, rows, records))
        if not isinstance(outcomes, ErrorInfo):
            return outcomes
        if len(rows) == 1:
            return (RowOutcome(rows[0].request_id, error=outcomes),)
        pairs = zip(rows, records, strict=True)
        return tuple(outcome for row, record in pairs for outcome in self._outcomes((row,), (record,)))

    def _step(self, rows: Sequence[LanguageRow], records: Sequence[WorkerRequest]) -> tuple[RowOutcome, ...]:
        requests = [record.request for record in records]
        poisoned = self._faults.hit(BEFORE_LANGUAGE_STEP, requests)
        for row, record in zip(rows, records, strict=True):
            if record.recipe.history is not None:
                record.recipe.history.record(row.start, row.token_ids)
        inputs = language_input(
            rows,
            self._ops,
            block_size=self._kv_cache.block_size,
            image_block_size=1 if self._image_cache is None else self._image_cache.block_size,
            device=self._device,
            rope=_rope(records),
            states=self._states,
        )
        logits = self._model.forward(inputs, self._kv_cache, self._image_cache)
        poisoned |= self._faults.hit(MID_LANGUAGE_STEP, requests)
        sampled = [i for i, row in enumerate(rows) if row.sample]
        host_logits = logits.cpu().numpy()
        for index, i in enumerate(sampled):
            if rows[i].request_id in poisoned:
                host_logits[index] = np.nan
        chosen = iter(_sample(host_logits, [rows[i] for i in sampled], [records[i] for i in sampled]))
        if self._states is not None:
            self._states.advance(rows)
        return tuple(next(chosen) if row.sample else RowOutcome(row.request_id) for row in rows)


def _rope(records: Sequence[WorkerRequest]) -> list[PromptPositions] | None:
    known = [record.rope for record in records if record.rope is not None]
    return known or None


def _sample(logits: Logits, rows: Sequence[LanguageRow], records: Sequence[WorkerRequest]) -> list[RowOutcome]:
    """Logits [len(rows), V] to one outcome per row."""
    if not rows:
        return []
    finite = finite_rows(logits)
    plain = [record.recipe.is_plain(row.num_generated) for row, record in zip(rows, records, strict=True)]
    best = best_tokens(logits) if any(plain) else []
    outcomes: list[RowOutcome] = []
    for i, row in enumerate(rows):
        if not finite[i]:
            outcomes.append(RowOutcome(row.request_id, error=not_finite("logits")))
        elif plain[i]:
            outcomes.append(RowOutcome(row.request_id, best[i]))
        else:
            draw = partial(sample_row, logits[i], records[i].recipe, row.num_generated)
            sample = attempt("sampling", draw)
            if isinstance(sample, ErrorInfo):
                outcomes.append(RowOutcome(row.request_id, error=sample))
            else:
                outcomes.append(RowOutcome(row.request_id, sample.token_id, sample.logprobs))
    return outcomes
