"""A step of an asynchronous device, whose tokens are sampled there and taken from there by the next step, so that it
can be launched before they have been read: op by op, or as a replay.

Does not know lanes, what becomes of rows that fail, or when a request ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_engine.backend.base import SamplingTensors
from hydra_engine.backend.device import Fetch
from hydra_engine.core.plans import DecodeRows, Int64s, LanguagePlan
from hydra_engine.errors import ErrorInfo
from hydra_engine.models.inputs import LanguageInput
from hydra_engine.worker.boundary import attempt
from hydra_engine.worker.language.batches import StepRows
from hydra_engine.worker.language.device_slot_table import DeviceSlotTable
from hydra_engine.worker.language.samples import Samples
from hydra_engine.worker.language.slot_table import SamplingRows
from hydra_engine.worker.language.special import (
    MAX_BIASES,
    SampledRows,
    SpecialArrays,
    SpecialTensors,
    logprobs_of,
    sample_special,
)
from hydra_engine.worker.language.special_graphs import SpecialGraph
from hydra_engine.worker.language.step import Begun, StepForm, StepParts, sampled
from hydra_engine.worker.language.step_graphs import StepGraphs
from hydra_engine.worker.ports import WorkerRequest


class Unread(NamedTuple):
    """A step whose tokens the device samples; the fetch brings (token ids, finite) of the rows that sample, or nothing
    where none does, and with log probabilities what they are made of."""

    num_rows: int
    rows: Int64s  # that sample
    fetch: Fetch
    num_top: npt.NDArray[np.int32] | None = None  # of these, as `SpecialColumns` has it
    failures: tuple[tuple[int, ErrorInfo], ...] = ()  # of these, whatever token they got

    def read(self) -> Samples:
        """Waits for the device and returns the step's samples. Raises BackendError if the device failed."""
        arrays = self.fetch.result()
        if not arrays:
            return Samples.none(self.num_rows)
        token_ids, finite, *scores = arrays
        samples = sampled(self.num_rows, self.rows, np.where(finite, token_ids, -1))
        for index, error in self.failures:
            row = int(self.rows[index])
            if samples.token_ids[row] >= 0:
                samples.token_ids[row] = -1
                samples.failures.append((row, error))
        if scores and self.num_top is not None:
            numbers, places = scores
            for index in np.flatnonzero(self.num_top >= 0).tolist():
                row = int(self.rows[index])
                token = int(samples.token_ids[row])
                if token >= 0:
                    num_top = int(self.num_top[index])
                    samples.logprobs.append((row, logprobs_of(token, num_top, numbers[index], places[index])))
        return samples

    def token(self, index: int) -> int:
        """Token of sampling row `index`; -1 if its logits are not finite. Waits and raises like `read`."""
        token_ids, finite, *_ = self.fetch.result()
        return int(token_ids[index]) if finite[index] else -1


class _Replay(NamedTuple):
    """A replay of a captured step. `launch` returns (tokens, finite) of the rows that sample."""

    launch: Callable[[], tuple[Tensor, Tensor]]
    special: SpecialGraph


class AsynchronousStep(StepForm):
    """Tokens are sampled on the device, and the host waits for none but the last one of requests with a grammar, behind
    the forward. A step replays a graph where there is one. The slot table is written last, so that a
    step that raised can be run again; a replay writes it itself, and what raises behind one fails its rows."""

    _slot_table: DeviceSlotTable

    def __init__(self, parts: StepParts, slot_table: DeviceSlotTable, graphs: StepGraphs | None = None) -> None:
        super().__init__(parts, slot_table)
        self._graphs = graphs

    def run(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> Samples | Unread:
        begun = self._begin(plan, records)
        rows = self._rows(plan, records)
        replay = self._replay_of(plan, rows, begun)
        outcome = self._eager(plan, rows, begun) if replay is None else self._replayed(replay, plan, rows, begun)
        if self._parts.states is not None:
            self._parts.states.advance(plan)
        return outcome

    # ---- graphs

    def _replay_of(self, plan: LanguagePlan, rows: StepRows, begun: Begun) -> _Replay | None:
        """The replay of the step; None: it is launched op by op. Reasons are scored prompts (the host reads
        their logits), more than MAX_BIASES biases, or no graph that fits."""
        graphs, sampling = self._graphs, begun.sampling
        if graphs is None or begun.scoring is not None:
            return None
        if sampling.special.size and self._slot_table.specials.num_biases(sampling.seq_slots) > MAX_BIASES:
            return None
        seq_slots = sampling.seq_slots
        arrays = partial(self._slot_table.sampling.of, seq_slots, sampling.num_generated)
        if plan.chunks:
            size = graphs.mixed.size_of(plan, rows)
            if size is None:
                return None
            replay_mixed = graphs.mixed.replay
            return _Replay(
                lambda: replay_mixed(size, plan, rows, seq_slots, arrays()), graphs.mixed.special_graph(size)
            )
        decodes, states = graphs.decodes, self._parts.states
        if not decodes.fits(rows):
            return None
        state_rows = None if states is None else states.rows(plan)
        return _Replay(lambda: decodes.replay(rows, seq_slots, arrays(), state_rows), decodes.special_graph(rows))

    def _replayed(self, replay: _Replay, plan: LanguagePlan, rows: StepRows, begun: Begun) -> Samples | Unread:
        sampling, fetch = begun.sampling, self._parts.device.fetch
        sampled_rows = replay.launch()
        self._slot_table.written(sampling.seq_slots)
        if not sampling.special.size:
            return Unread(plan.num_rows, sampling.rows, fetch(sampled_rows if len(sampling.rows) else ()))
        # The replay has overwritten the rows' last tokens, so the step cannot be run again.
        outcome = attempt("sampling", partial(self._replay_special, replay.special, plan, rows, sampling))
        if isinstance(outcome, ErrorInfo):
            failed = Samples.none(plan.num_rows)
            failed.failures += [(int(row), outcome) for row in sampling.rows]
            return failed
        return outcome

    def _replay_special(
        self, captured: SpecialGraph, plan: LanguagePlan, rows: StepRows, sampling: SamplingRows
    ) -> Unread:
        assert self._graphs is not None
        self._recount(plan, sampling, captured.vocabulary)
        special = self._special(sampling, captured.size, captured.vocabulary)
        found = self._graphs.special.replay(captured, special, len(sampling.rows))
        return self._unread(plan.num_rows, rows, sampling, special, found)

    # ---- special rows

    def _special(self, sampling: SamplingRows, size: int, vocabulary: int) -> SpecialArrays:
        index = sampling.special
        given = sampling.seq_slots[index], sampling.num_generated[index]
        return self._slot_table.specials.of(index, *given, size, vocabulary)

    def _unread(
        self, num_rows: int, rows: StepRows, sampling: SamplingRows, special: SpecialArrays, found: SampledRows
    ) -> Unread:
        """The pending result of a step with special rows. Their requests' histories read its tokens when needed."""
        num_top = special.num_top[: len(sampling.rows)]
        tensors = found if (num_top >= 0).any() else found[:2]
        unread = Unread(num_rows, sampling.rows, self._parts.device.fetch(tensors), num_top, special.failures)
        failed = {index for index, _ in special.failures}
        for index in sampling.special.tolist():
            history = self._slot_table.specials.history(int(sampling.seq_slots[index]))
            if history is not None and index not in failed:
                history.expect(int(rows.num_context[sampling.rows[index]]), partial(unread.token, index))
        return unread

    # ---- op by op

    def _eager(self, plan: LanguagePlan, rows: StepRows, begun: Begun) -> Samples | Unread:
        sampling, slot_table, parts = begun.sampling, self._slot_table, self._parts
        arrays = slot_table.sampling.of(sampling.seq_slots, sampling.num_generated)
        inputs, (device_slots, *columns) = self._sent(plan, rows, begun.scoring, (sampling.seq_slots, *arrays))
        logits = self._forward(self._resolved(inputs, plan.decodes, device_slots))
        if not len(sampling.rows):
            return self._without_tokens(plan, begun)
        sampling_tensors = SamplingTensors(*columns)
        if sampling.special.size:
            outcome = self._eager_special(plan, rows, sampling, logits, sampling_tensors, device_slots)
        else:
            tokens, finite = parts.ops.sample(logits, sampling_tensors)
            outcome = Unread(plan.num_rows, sampling.rows, parts.device.fetch((tokens, finite)))
            slot_table.write(device_slots, tokens)
        slot_table.written(sampling.seq_slots)
        if begun.scoring is None:
            return outcome
        samples = outcome.read()
        begun.scoring.put(samples)
        return samples

    def _eager_special(
        self,
        plan: LanguagePlan,
        rows: StepRows,
        sampling: SamplingRows,
        logits: Tensor,
        sampling_tensors: SamplingTensors,
        device_slots: Tensor,
    ) -> Unread:
        parts, slot_table, (size, vocabulary) = self._parts, self._slot_table, logits.shape
        self._recount(plan, sampling, vocabulary)
        special = self._special(sampling, size, vocabulary)
        packed, *lists = parts.device.send((special.packed, special.bias_ids, special.bias_values, special.masks))
        tensors = SpecialTensors.of(packed, size, *lists)
        found = sample_special(parts.ops, logits, sampling_tensors, tensors, slot_table.counts(vocabulary))
        slot_table.write(device_slots, found.tokens)
        slot_table.count(device_slots, found.tokens, tensors.columns.increments, vocabulary)
        return self._unread(plan.num_rows, rows, sampling, special, found)

    def _recount(self, plan: LanguagePlan, sampling: SamplingRows, vocabulary: int) -> None:
        """Recounts the tokens of penalised requests whose prompt, or recomputation after a preemption, ends here."""
        prompts = sampling.special[sampling.special >= len(plan.decodes)]
        recounts = self._slot_table.specials.recounts(sampling.seq_slots[prompts], vocabulary)
        if recounts is not None:
            seq_slots, places, counts = self._parts.device.send(recounts)
            self._slot_table.recount(seq_slots, places, counts, vocabulary)

    def _resolved(self, inputs: LanguageInput, decodes: DecodeRows, seq_slots: Tensor) -> LanguageInput:
        """Fills in the decode tokens that only the device has. `seq_slots` begin with the slots of the decodes."""
        count = len(decodes)
        if not (decodes.token_ids < 0).any():
            return inputs
        head, rest = inputs.token_ids[:count], inputs.token_ids[count:]
        # What was sent may be the plan's own memory: nothing is written there.
        token_ids = self._slot_table.resolve(head, seq_slots[:count])
        return replace(inputs, token_ids=torch.cat((token_ids, rest)) if rest.shape[0] else token_ids)

    def _without_tokens(self, plan: LanguagePlan, begun: Begun) -> Samples | Unread:
        """The result of a step in which no row samples; the fetch only marks its end."""
        fetch = self._parts.device.fetch(())
        if begun.scoring is None:
            return Unread(plan.num_rows, begun.sampling.rows, fetch)
        fetch.result()
        samples = Samples.none(plan.num_rows)
        begun.scoring.put(samples)
        return samples
