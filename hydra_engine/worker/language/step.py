"""One step of the language lane: a plan -> logits -> sampled tokens. What both forms of a step share; the one that is
over when the call returns, whose tokens are sampled on the host; and the one of an asynchronous device, whose tokens
are sampled there and taken from there by the next step, so that it can be launched before they have been read.

A step that raises leaves nothing behind that matters: KV writes are idempotent, recurrent states are written to
another state slot than they are read from, and the slot table gets a step's tokens at its very end. So it can be run
again, row by row. Does not know lanes, what becomes of rows that fail, or when a request ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_engine.backend.base import Ops, PagedCache, SamplingTensors
from hydra_engine.backend.device import Device, Fetch
from hydra_engine.core.ids import RequestId
from hydra_engine.core.plans import DecodeRows, Ints, LanguagePlan
from hydra_engine.errors import ErrorInfo
from hydra_engine.models.inputs import LanguageInput
from hydra_engine.worker.boundary import attempt, not_finite
from hydra_engine.worker.faults import BEFORE_LANGUAGE_STEP, MID_LANGUAGE_STEP, FaultPoints
from hydra_engine.worker.language.batches import StepRows, sent_input, step_rows
from hydra_engine.worker.language.device_slot_table import DeviceSlotTable
from hydra_engine.worker.language.sampler import Logits, sample_row
from hydra_engine.worker.language.samples import PromptScoring, Samples
from hydra_engine.worker.language.slot_table import SamplingRows, SlotTable, StateTable
from hydra_engine.worker.ports import NO_GATE, Gate, PromptPositions, ServedModel, WorkerRequest

if TYPE_CHECKING:
    from hydra_engine.worker.language.graphs import DecodeGraphs


_NO_ROWS: Ints = np.empty(0, dtype=np.int64)


class Unread(NamedTuple):
    """A step whose tokens the device samples; the fetch brings (token ids, finite) of the rows that sample, or nothing
    where none does."""

    num_rows: int
    rows: Ints  # that sample
    fetch: Fetch

    def read(self) -> Samples:
        """Waits for the device. Raises BackendError where it failed."""
        arrays = self.fetch.result()
        if not arrays:
            return Samples.none(self.num_rows)
        token_ids, finite = arrays
        return sampled(self.num_rows, self.rows, np.where(finite, token_ids, -1))


def sampled(num_rows: int, rows: Ints, token_ids: Ints) -> Samples:
    """Of the rows that sample; those with -1 are not finite and have failed."""
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
    """What a step is made with."""

    model: ServedModel
    ops: Ops
    device: Device
    kv_cache: PagedCache
    image_cache: PagedCache | None
    faults: FaultPoints
    states: StateTable | None
    multimodal_rope: bool


class Begun(NamedTuple):
    """What is known of a step before its rows are built."""

    sampling: SamplingRows
    scoring: PromptScoring | None
    poisoned: frozenset[RequestId]  # whose logits a test wants to be no numbers


class StepForm:
    """What both forms do. `vision_s` is how long the vision lane ran beside the runs since it was set to 0, as far as
    the step knows."""

    def __init__(self, parts: StepParts, slot_table: SlotTable) -> None:
        self._parts = parts
        self._slot_table = slot_table
        self.vision_s = 0.0

    def _begin(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> Begun:
        poisoned = self._parts.faults.hit(BEFORE_LANGUAGE_STEP, self._slot_table.requests(plan))
        sampling = self._slot_table.sampling_rows(plan)
        self._record_histories(plan, records, sampling)
        return Begun(sampling, PromptScoring.of(plan, records), poisoned)

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
        """[B', V] float32"""
        return self._parts.model.forward(inputs, self._parts.kv_cache, self._parts.image_cache)

    def _poisoned(self, plan: LanguagePlan, begun: Begun) -> Ints:
        """Which of the rows that sample get logits that are no numbers, now that KV is written."""
        poisoned = begun.poisoned | self._parts.faults.hit(MID_LANGUAGE_STEP, self._slot_table.requests(plan))
        if not poisoned:
            return _NO_ROWS
        return np.flatnonzero(np.isin(self._slot_table.owners[begun.sampling.seq_slots], list(poisoned)))

    def _record_histories(self, plan: LanguagePlan, records: Sequence[WorkerRequest], sampling: SamplingRows) -> None:
        """Tells the requests with penalties which tokens they have now. They are never on the fast path."""
        for chunk, record in zip(plan.chunks, records, strict=True):
            if record.sampling_state.history is not None:
                record.sampling_state.history.record(chunk.start, chunk.token_ids)
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
        """Samples one of the rows that sample, whose logits [V] are finite, by its own sampling state."""
        row, state = int(sampling.rows[index]), self._slot_table.sampling_state(int(sampling.seq_slots[index]))
        sample = attempt("sampling", partial(sample_row, logits, state, int(sampling.num_generated[index])))
        if isinstance(sample, ErrorInfo):
            samples.token_ids[row] = -1
            samples.failures.append((row, sample))
            return
        samples.token_ids[row] = sample.token_id
        if sample.logprobs is not None:
            samples.logprobs.append((row, sample.logprobs))


class SynchronousStep(StepForm):
    """Logits come to host memory; rows on the fast path are sampled at once, the others one by one."""

    def __init__(self, parts: StepParts, slot_table: SlotTable, gate: Gate = NO_GATE) -> None:
        super().__init__(parts, slot_table)
        self._gate = gate

    def run(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> Samples:
        begun = self._begin(plan, records)
        inputs, _ = self._sent(plan, self._rows(plan, records), begun.scoring)
        logits = self._logits(inputs, plan.vision_s)
        poisoned = self._poisoned(plan, begun)
        if poisoned.size:
            logits.numpy()[poisoned] = np.nan
        samples = self._sample(logits, plan.num_rows, begun.sampling)
        if begun.scoring is not None:
            begun.scoring.put(samples)
        # Nothing below raises: from here on the step has been.
        if self._parts.states is not None:
            self._parts.states.advance(plan)
        self._slot_table.put(begun.sampling.seq_slots, samples.token_ids[begun.sampling.rows])
        return samples

    def _logits(self, inputs: LanguageInput, vision_s: float) -> Tensor:
        """Of the `vision_s` seconds that the vision lane has beside this plan, a step that is run again gets what is
        left."""
        self._gate.begin(max(vision_s - self.vision_s, 0.0))
        try:
            return self._forward(inputs).cpu()
        finally:
            self.vision_s += self._gate.end()

    def _sample(self, logits: Tensor, num_rows: int, sampling: SamplingRows) -> Samples:
        """Logits of the rows in `sampling`, in their order, to what all rows of the plan get."""
        if not len(sampling.rows):
            return Samples.none(num_rows)
        token_ids: Ints = self._parts.ops.best_tokens(logits).numpy()
        special = sampling.special
        samples = sampled(num_rows, sampling.rows, token_ids)
        for index in special[token_ids[special] >= 0].tolist() if special.size else ():
            self._draw(samples, sampling, index, logits[index].numpy())
        return samples


class AsynchronousStep(StepForm):
    """Rows on the fast path are sampled on the device. Those that need more than filters and a draw are sampled on the
    host: their step waits for its logits, and so for everything before it. A step of decodes alone replays a graph
    where there is one. The slot table is written last, so that a step that raised can be run again; a replay writes it
    itself, and does not raise."""

    _slot_table: DeviceSlotTable

    def __init__(self, parts: StepParts, slot_table: DeviceSlotTable, graphs: DecodeGraphs | None = None) -> None:
        super().__init__(parts, slot_table)
        self._graphs = graphs

    def run(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> Samples | Unread:
        begun = self._begin(plan, records)
        rows = self._rows(plan, records)
        outcome: Samples | Unread
        if self._graphs is not None and self._can_replay(plan, begun) and self._graphs.fits(rows):
            outcome = self._replay(self._graphs, plan, rows, begun.sampling)
        else:
            outcome = self._eager(plan, rows, begun)
        if self._parts.states is not None:
            self._parts.states.advance(plan)
        return outcome

    # ---- graphs

    def _can_replay(self, plan: LanguagePlan, begun: Begun) -> bool:
        """Faults in the middle of a step need a middle."""
        disturbed = begun.poisoned or self._parts.faults.is_armed(MID_LANGUAGE_STEP)
        return not plan.chunks and not disturbed and not begun.sampling.special.size

    def _replay(self, graphs: DecodeGraphs, plan: LanguagePlan, rows: StepRows, sampling: SamplingRows) -> Unread:
        arrays = self._slot_table.sampling.of(sampling.seq_slots, sampling.num_generated)
        states = None if self._parts.states is None else self._parts.states.rows(plan)
        sampled_rows = graphs.replay(rows, sampling.seq_slots, arrays, states)
        self._slot_table.written(sampling.seq_slots)
        return Unread(len(sampling.rows), sampling.rows, self._parts.device.fetch(sampled_rows))

    # ---- op by op

    def _eager(self, plan: LanguagePlan, rows: StepRows, begun: Begun) -> Samples | Unread:
        sampling, slot_table, parts = begun.sampling, self._slot_table, self._parts
        on_host = sampling.special
        arrays = slot_table.sampling.of(sampling.seq_slots, sampling.num_generated)
        beside = (sampling.seq_slots, on_host, *arrays)
        inputs, (device_slots, host_rows, *columns) = self._sent(plan, rows, begun.scoring, beside)
        logits = self._forward(self._resolved(inputs, plan.decodes, device_slots))
        self._poison(logits, self._poisoned(plan, begun))
        if not len(sampling.rows):
            return self._without_tokens(plan, begun)
        tokens, finite = parts.ops.sample(logits, SamplingTensors(*columns))
        outcome: Samples | Unread
        if on_host.size or begun.scoring is not None:
            picked = parts.device.fetch((tokens, finite, logits.index_select(0, host_rows)))
            token_ids, is_finite, host_logits = picked.result()
            outcome = sampled(plan.num_rows, sampling.rows, np.where(is_finite, token_ids, -1))
            tokens = self._sample_on_host(
                outcome, sampling, on_host, host_logits.astype(np.float32, copy=False), tokens
            )
            if begun.scoring is not None:
                begun.scoring.put(outcome)
        else:
            outcome = Unread(plan.num_rows, sampling.rows, parts.device.fetch((tokens, finite)))
        slot_table.write(device_slots, tokens)
        slot_table.written(sampling.seq_slots)
        return outcome

    def _resolved(self, inputs: LanguageInput, decodes: DecodeRows, seq_slots: Tensor) -> LanguageInput:
        """With the tokens of decodes that are on the device only. `seq_slots` begin with those of the decodes."""
        count = len(decodes)
        if not (decodes.token_ids < 0).any():
            return inputs
        head, rest = inputs.token_ids[:count], inputs.token_ids[count:]
        # What was sent may be the plan's own memory: nothing is written there.
        token_ids = self._slot_table.resolve(head, seq_slots[:count])
        return replace(inputs, token_ids=torch.cat((token_ids, rest)) if rest.shape[0] else token_ids)

    def _poison(self, logits: Tensor, rows: Ints) -> None:
        if rows.size:
            logits.index_fill_(0, self._parts.device.send((rows,))[0], float("nan"))

    def _without_tokens(self, plan: LanguagePlan, begun: Begun) -> Samples | Unread:
        """No row samples; the fetch says when the step has ended."""
        fetch = self._parts.device.fetch(())
        if begun.scoring is None:
            return Unread(plan.num_rows, begun.sampling.rows, fetch)
        fetch.result()
        samples = Samples.none(plan.num_rows)
        begun.scoring.put(samples)
        return samples

    def _sample_on_host(
        self, samples: Samples, sampling: SamplingRows, rows: Ints, logits: Logits, tokens: Tensor
    ) -> Tensor:
        """Tokens of those `rows` that are finite, by their sampling states; returns all rows' tokens on the device."""
        for index, row_logits in zip(rows.tolist(), logits, strict=True):
            if samples.token_ids[sampling.rows[index]] >= 0:
                self._draw(samples, sampling, index, row_logits)
        chosen = samples.token_ids[sampling.rows]
        self._slot_table.put(sampling.seq_slots[rows], chosen[rows])
        # The next step's input of a row that failed does not matter, but it must be a token.
        drawn = rows[chosen[rows] >= 0]
        if not drawn.size:
            return tokens
        return tokens.index_copy(0, *self._parts.device.send((drawn, chosen[drawn])))
