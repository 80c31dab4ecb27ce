"""One step of the language lane on an asynchronous device: tokens are sampled there, and the next step takes them from
there, so that it can be launched before they have been read.

Rows that need more than filters and a draw are sampled on the host all the same: their step waits for its logits, and
so for everything before it. A step of decodes alone replays a graph where there is one. Does not know lanes, nor what
becomes of rows that fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend.base import SamplingTensors
from hydra_engine.core.plans import DecodeRows, Ints, LanguagePlan
from hydra_engine.models.inputs import LanguageInput
from hydra_engine.worker.faults import MID_LANGUAGE_STEP
from hydra_engine.worker.language.batches import StepRows
from hydra_engine.worker.language.device_slot_table import DeviceSlotTable
from hydra_engine.worker.language.graphs import DecodeGraphs
from hydra_engine.worker.language.plan_rows import Samples
from hydra_engine.worker.language.sampler import Logits
from hydra_engine.worker.language.slot_table import SamplingRows
from hydra_engine.worker.language.step import Begun, StepForm, StepParts, Unread, sampled
from hydra_engine.worker.ports import WorkerRequest


class AsynchronousStep(StepForm):
    """Rows on the fast path are sampled on the device. The slot table is written last, so that a step that raised can
    be run again; a replay writes it itself, and does not raise."""

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
        return not plan.chunks and not disturbed and bool(begun.sampling.fast_path.all())

    def _replay(self, graphs: DecodeGraphs, plan: LanguagePlan, rows: StepRows, sampling: SamplingRows) -> Unread:
        arrays = self._slot_table.sampling.of(sampling.seq_slots, sampling.num_generated)
        states = None if self._parts.states is None else self._parts.states.rows(plan)
        sampled_rows = graphs.replay(rows, sampling.seq_slots, arrays, states)
        self._slot_table.written(sampling.seq_slots)
        return Unread(len(sampling.rows), sampling.rows, self._parts.device.fetch(sampled_rows))

    # ---- op by op

    def _eager(self, plan: LanguagePlan, rows: StepRows, begun: Begun) -> Samples | Unread:
        sampling, slot_table, parts = begun.sampling, self._slot_table, self._parts
        on_host = np.flatnonzero(~sampling.fast_path)
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
            outcome = sampled(plan.num_rows, sampling.rows, token_ids, is_finite)
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
