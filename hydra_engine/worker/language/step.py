"""One step of the language lane: a plan -> logits -> sampled tokens. The base class of both kinds of step, and the
synchronous one, which is complete when the call returns and samples on the host.

A step that raises has no lasting effect: KV writes are idempotent, recurrent states are written to another state slot
than they are read from, and the slot table receives a step's tokens last. So it can be run again, row by row. Does not
know lanes, how failed rows are handled, or when a request ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hydra_engine.backend.base import Ops, PagedCache
from hydra_engine.backend.device import Device
from hydra_engine.core.plans import Int64s, LanguagePlan
from hydra_engine.errors import ErrorInfo
from hydra_engine.models.inputs import LanguageInput
from hydra_engine.worker.boundary import attempt, not_finite
from hydra_engine.worker.language.batches import StepRows, sent_input, step_rows
from hydra_engine.worker.language.sampler import Logits, sample_row
from hydra_engine.worker.language.samples import PromptScoring, Samples
from hydra_engine.worker.language.slot_table import SamplingRows, SlotTable, StateTable
from hydra_engine.worker.ports import NO_GATE, Gate, PromptPositions, ServedModel, WorkerRequest


def sampled(num_rows: int, rows: Int64s, token_ids: Int64s) -> Samples:
    """Returns the samples of a step of `num_rows` rows, of which `rows` sample; token -1 marks a row that failed
    because its logits are not finite."""
    if len(rows) == num_rows:
        samples = Samples(token_ids)
    else:
        samples = Samples.none(num_rows)
        samples.token_ids[rows] = token_ids
    if -1 in token_ids.tolist():
        samples.failures += [(int(row), not_finite("logits")) for row in rows[token_ids < 0]]
    return samples


@dataclass(frozen=True, slots=True)
class StepParts:
    """The parts that all steps of a lane share."""

    model: ServedModel
    ops: Ops
    device: Device
    kv_cache: PagedCache
    image_cache: PagedCache | None
    states: StateTable | None
    multimodal_rope: bool


class Begun(NamedTuple):
    """The state of a step before its rows are built."""

    sampling: SamplingRows
    scoring: PromptScoring | None


class StepForm:
    """The base class of both kinds of step. `vision_s`: seconds that the vision lane ran beside the runs since it was
    set to 0; stays 0 if the gate covers whole steps."""

    def __init__(self, parts: StepParts, slot_table: SlotTable) -> None:
        self._parts = parts
        self._slot_table = slot_table
        self.vision_s = 0.0

    def _begin(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> Begun:
        sampling = self._slot_table.sampling_rows(plan)
        self._record_histories(plan, records, sampling)
        return Begun(sampling, PromptScoring.of(plan, records))

    def _rows(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> StepRows:
        rope: list[PromptPositions] | None = None
        if self._parts.multimodal_rope:
            rope = [record.rope for record in records if record.rope is not None]
        return step_rows(plan, self._slot_table, self._parts.kv_cache.block_size, rope)

    def _sent(
        self,
        plan: LanguagePlan,
        rows: StepRows,
        scoring: PromptScoring | None,
        beside: Sequence[npt.NDArray[np.generic]] = (),
    ) -> tuple[LanguageInput, tuple[Tensor, ...]]:
        parts = self._parts
        return sent_input(
            plan,
            rows,
            parts.ops,
            parts.device,
            image_block_size=1 if parts.image_cache is None else parts.image_cache.block_size,
            states=parts.states,
            scored=None if scoring is None else scoring.wanted(parts.device),
            beside=beside,
        )

    def _forward(self, inputs: LanguageInput) -> Tensor:
        """Logits [B', V] float32."""
        return self._parts.model.forward(inputs, self._parts.kv_cache, self._parts.image_cache)

    def _record_histories(self, plan: LanguagePlan, records: Sequence[WorkerRequest], sampling: SamplingRows) -> None:
        """Records the chunks' tokens in the histories of requests with penalties or a grammar."""
        for chunk, record in zip(plan.chunks, records, strict=True):
            history = record.sampling_state.history
            if history is not None:
                history.settle()
                history.record(chunk.start, chunk.token_ids)


class SynchronousStep(StepForm):
    """The step of a synchronous device. Logits come to host memory; rows on the fast path are sampled together, the
    others one by one."""

    def __init__(self, parts: StepParts, slot_table: SlotTable, gate: Gate = NO_GATE) -> None:
        super().__init__(parts, slot_table)
        self._gate = gate

    def run(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> Samples:
        begun = self._begin(plan, records)
        inputs, _ = self._sent(plan, self._rows(plan, records), begun.scoring)
        logits = self._logits(inputs, plan.vision_s)
        samples = self._sample(logits, plan.num_rows, begun.sampling)
        if begun.scoring is not None:
            begun.scoring.put(samples)
        # Nothing below raises: the step has succeeded.
        if self._parts.states is not None:
            self._parts.states.advance(plan)
        self._slot_table.put(begun.sampling.seq_slots, samples.token_ids[begun.sampling.rows])
        return samples

    def _logits(self, inputs: LanguageInput, vision_s: float) -> Tensor:
        """Runs the forward inside the gate. `vision_s`: allowance of the plan; a retried step gets the rest."""
        self._gate.begin(max(vision_s - self.vision_s, 0.0))
        try:
            return self._forward(inputs).cpu()
        finally:
            self.vision_s += self._gate.end()

    def _record_histories(self, plan: LanguagePlan, records: Sequence[WorkerRequest], sampling: SamplingRows) -> None:
        """Records decodes too: requests with a history are never on the fast path."""
        super()._record_histories(plan, records, sampling)
        if not sampling.special.size:
            return
        decodes = plan.decodes
        special = sampling.special[sampling.special < len(decodes)]
        token_ids = self._slot_table.known_tokens(decodes)
        for row in special.tolist():
            history = self._slot_table.sampling_state(int(decodes.seq_slots[row])).history
            if history is not None:
                history.record(int(decodes.starts[row]), (int(token_ids[row]),))

    def _draw(self, samples: Samples, sampling: SamplingRows, index: int, logits: Logits) -> None:
        """Samples row `index` of `sampling` with its request's sampling state. `logits` [V] are finite."""
        row, state = int(sampling.rows[index]), self._slot_table.sampling_state(int(sampling.seq_slots[index]))
        sample = attempt("sampling", partial(sample_row, logits, state, int(sampling.num_generated[index])))
        if isinstance(sample, ErrorInfo):
            samples.token_ids[row] = -1
            samples.failures.append((row, sample))
            return
        samples.token_ids[row] = sample.token_id
        if sample.logprobs is not None:
            samples.logprobs.append((row, sample.logprobs))

    def _sample(self, logits: Tensor, num_rows: int, sampling: SamplingRows) -> Samples:
        """Samples all rows of the plan. `logits` [B', V] belong to the rows in `sampling`, in order."""
        if not len(sampling.rows):
            return Samples.none(num_rows)
        token_ids: Int64s = self._parts.ops.best_tokens(logits).numpy()
        special = sampling.special
        samples = sampled(num_rows, sampling.rows, token_ids)
        for index in special[token_ids[special] >= 0].tolist() if special.size else ():
            self._draw(samples, sampling, index, logits[index].numpy())
        return samples
