"""A language plan -> logits -> sampled tokens -> a language result.

Runs in the language lane's thread. A row that makes the model raise, or whose logits are not finite, fails alone: KV
writes are idempotent, recurrent states are written to another place than they are read from, and seats learn a step's
tokens at its very end, so a step that raised is run again row by row. Does not decide when a request ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from hydra_engine.backend.base import Backend, PagedCache, StateCache
from hydra_engine.clock import Clock
from hydra_engine.core.ids import RequestId
from hydra_engine.core.plans import LanguagePlan, LanguageResult
from hydra_engine.errors import ErrorInfo, RequestFailed
from hydra_engine.models.inputs import LanguageInput
from hydra_engine.worker.batches import language_input
from hydra_engine.worker.boundary import attempt, not_finite
from hydra_engine.worker.faults import BEFORE_LANGUAGE_STEP, MID_LANGUAGE_STEP, FaultPoints
from hydra_engine.worker.gate import LaneGate
from hydra_engine.worker.parts import Samples, part_of, request_ids_of, seats_of
from hydra_engine.worker.ports import ServedModel, WorkerRequest
from hydra_engine.worker.positions import PromptPositions
from hydra_engine.worker.sampler import Logits, best_tokens, finite_rows, sample_row
from hydra_engine.worker.scores import PromptScoring
from hydra_engine.worker.seats import Asked, Seats
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
        *,
        num_seats: int,
        multimodal_rope: bool = False,
        gate: LaneGate | None = None,
    ) -> None:
        self._model = model
        self._ops = backend.ops
        self._device = backend.device.torch_device
        self._kv_cache = kv_cache
        self._image_cache = image_cache
        self._clock = clock
        self._faults = faults
        self._states = None if states is None else StateTable(states)
        self._seats = Seats(num_seats)
        self._multimodal_rope = multimodal_rope
        self._gate = gate
        self._vision_s = 0.0  # how long the vision lane ran beside the plan in hand

    def run(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> LanguageResult:
        """`records[i]` belongs to `plan.chunks[i]`. Never raises because of a request's content."""
        started_s = self._clock.now()
        self._vision_s = 0.0
        with torch.inference_mode():
            samples = self._samples(plan, records)
        return LanguageResult(
            plan.step_id,
            started_s,
            self._clock.now(),
            samples.token_ids,
            tuple(samples.logprobs),
            tuple(samples.failures),
            self._vision_s,
            tuple(samples.scores),
        )

    # ---- rows that fail alone

    def _samples(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> Samples:
        self._seats.take(plan, records)
        barred = self._seats.barred(plan)
        samples = self._without(barred, plan, records) if barred else self._attempt(plan, records)
        if samples.failures:
            seats, request_ids = seats_of(plan), request_ids_of(plan)
            for row, _ in samples.failures:
                self._seats.fail(int(seats[row]), RequestId(int(request_ids[row])))
        return samples

    def _without(self, barred: list[int], plan: LanguagePlan, records: Sequence[WorkerRequest]) -> Samples:
        """The step without rows whose request failed in a step before this one, which was planned ahead."""
        samples = Samples.none(plan.num_rows)
        rest = np.setdiff1d(np.arange(plan.num_rows), barred)
        samples.put(rest, self._attempt(*part_of(plan, records, rest)))
        error = RequestFailed("an earlier step of this request failed").info()
        samples.failures += [(row, error) for row in barred]
        return samples

    def _attempt(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> Samples:
        num_rows = plan.num_rows
        if not num_rows:
            return Samples.none(0)
        samples = attempt(f"language step of {num_rows}", partial(self._step, plan, records))
        if not isinstance(samples, ErrorInfo):
            return samples
        merged = Samples.none(num_rows)
        if num_rows == 1:
            merged.failures.append((0, samples))
            return merged
        for row in range(num_rows):
            alone = np.array([row], dtype=np.int64)
            merged.put(alone, self._attempt(*part_of(plan, records, alone)))
        return merged

    # ---- one step

    def _step(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> Samples:
        seats = self._seats
        poisoned = self._faults.hit(BEFORE_LANGUAGE_STEP, seats.requests(plan))
        asked = seats.asked(plan)
        self._record_histories(plan, records, asked)
        scoring = PromptScoring.of(plan, records)
        inputs = language_input(
            plan,
            seats,
            self._ops,
            block_size=self._kv_cache.block_size,
            image_block_size=1 if self._image_cache is None else self._image_cache.block_size,
            device=self._device,
            rope=self._rope(records),
            states=self._states,
            scored=None if scoring is None else scoring.wanted(self._device),
        )
        logits = self._forward(inputs, plan.vision_s)
        poisoned |= self._faults.hit(MID_LANGUAGE_STEP, seats.requests(plan))
        if poisoned:
            logits[np.isin(seats.owners[asked.seats], list(poisoned))] = np.nan
        samples = _sample(logits, plan.num_rows, asked, seats)
        if scoring is not None:
            scoring.put(samples)
        # Nothing below raises: from here on the step has been.
        if self._states is not None:
            self._states.advance(plan)
        seats.put(asked.seats, samples.token_ids[asked.rows])
        return samples

    def _record_histories(self, plan: LanguagePlan, records: Sequence[WorkerRequest], asked: Asked) -> None:
        """Tells the requests with penalties which tokens they have now. They are never plain."""
        for chunk, record in zip(plan.chunks, records, strict=True):
            if record.recipe.history is not None:
                record.recipe.history.record(chunk.start, chunk.token_ids)
        decodes = plan.decodes
        special = np.flatnonzero(~asked.plain[: len(decodes)])
        if not special.size:
            return
        token_ids = self._seats.tokens(decodes)
        for row in special.tolist():
            history = self._seats.recipe(int(decodes.seats[row])).history
            if history is not None:
                history.record(int(decodes.starts[row]), (int(token_ids[row]),))

    def _rope(self, records: Sequence[WorkerRequest]) -> list[PromptPositions] | None:
        if not self._multimodal_rope:
            return None
        return [record.rope for record in records if record.rope is not None]

    def _forward(self, inputs: LanguageInput, vision_s: float) -> Logits:
        """Logits [B', V] in host memory. Of the `vision_s` seconds that the vision lane has beside this plan, a step
        that is run again gets what is left."""
        gate = self._gate
        if gate is not None:
            gate.begin(max(vision_s - self._vision_s, 0.0))
        try:
            logits: Logits = self._model.forward(inputs, self._kv_cache, self._image_cache).cpu().numpy()
            return logits
        finally:
            if gate is not None:
                self._vision_s += gate.end()


def _sample(logits: Logits, num_rows: int, asked: Asked, seats: Seats) -> Samples:
    """Logits of the rows in `asked`, in their order, to what all rows of the plan get. All plain rows at once."""
    samples = Samples.none(num_rows)
    if not len(asked.rows):
        return samples
    finite = finite_rows(logits)
    plain = asked.plain & finite
    if plain.any():
        chosen = best_tokens(logits)
        samples.token_ids[asked.rows] = chosen if plain.all() else np.where(plain, chosen, -1)
    for index in np.flatnonzero(~plain).tolist():
        row = int(asked.rows[index])
        if not finite[index]:
            samples.failures.append((row, not_finite("logits")))
            continue
        recipe = seats.recipe(int(asked.seats[index]))
        draw = partial(sample_row, logits[index], recipe, int(asked.num_generated[index]))
        sample = attempt("sampling", draw)
        if isinstance(sample, ErrorInfo):
            samples.failures.append((row, sample))
            continue
        samples.token_ids[row] = sample.token_id
        if sample.logprobs is not None:
            samples.logprobs.append((row, sample.logprobs))
    return samples
