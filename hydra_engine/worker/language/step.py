"""A step of the language lane: a plan -> logits -> sampled tokens, log probabilities and failures of its rows.

A synchronous step is complete when the call returns and samples on the host. An asynchronous one samples on the device,
where the next step takes its tokens, so that it can be launched before they have been read: op by op, or as a replay.

A step that raises has no lasting effect: KV writes are idempotent, recurrent states are written to another state slot
than they are read from, and the slot table receives a step's tokens last. So it can be run again, row by row. The row
at a position scores the next prompt token; logits for that come in slices while the model runs, and only the requested
entries of them are kept. Does not know lanes, how failed rows are handled, or when a request ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_engine.backend.base import SamplingTensors
from hydra_engine.backend.device import Device, Fetch
from hydra_engine.core.plans import DecodeRows, Int64s, LanguagePlan, TokenLogprobs
from hydra_engine.errors import ErrorInfo
from hydra_engine.models.layers.decoder import LanguageInput, Scored
from hydra_engine.worker.boundary import not_finite, run_guarded
from hydra_engine.worker.language.batches import StepParts, StepRows, sent_input, step_rows
from hydra_engine.worker.language.graphs import SpecialGraph, StepGraphs
from hydra_engine.worker.language.sampler import Logits, Scores, finite_rows, sample_row, token_logprobs
from hydra_engine.worker.language.slot_table import DeviceSlotTable, SamplingRows, SlotTable
from hydra_engine.worker.language.special import (
    MAX_BIASES,
    SampledRows,
    SpecialArrays,
    SpecialTensors,
    logprobs_of,
    sample_special,
)
from hydra_engine.worker.ports import NO_GATE, Gate, PromptPositions, WorkerRequest

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
    def from_plan(cls, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> PromptScoring | None:
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


class StepContext(NamedTuple):
    """The state of a step before its rows are built."""

    sampling: SamplingRows
    scoring: PromptScoring | None


class LanguageStep:
    """The base class of both kinds of step. `vision_s`: seconds that the vision lane ran beside the runs since it was
    set to 0; stays 0 if the gate covers whole steps."""

    def __init__(self, parts: StepParts, slot_table: SlotTable) -> None:
        self._parts = parts
        self._slot_table = slot_table
        self.vision_s = 0.0

    def _begin(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> StepContext:
        sampling = self._slot_table.sampling_rows(plan)
        self._record_histories(plan, records, sampling)
        return StepContext(sampling, PromptScoring.from_plan(plan, records))

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
                history.resolve()
                history.record(chunk.start, chunk.token_ids)


class SynchronousStep(LanguageStep):
    """The step of a synchronous device. Logits come to host memory; rows on the fast path are sampled together, the
    others one by one."""

    def __init__(self, parts: StepParts, slot_table: SlotTable, gate: Gate = NO_GATE) -> None:
        super().__init__(parts, slot_table)
        self._gate = gate

    def run(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> Samples:
        context = self._begin(plan, records)
        inputs, _ = self._sent(plan, self._rows(plan, records), context.scoring)
        logits = self._logits(inputs, plan.vision_s)
        samples = self._sample(logits, plan.num_rows, context.sampling)
        if context.scoring is not None:
            context.scoring.put(samples)
        # Nothing below raises: the step has succeeded.
        if self._parts.states is not None:
            self._parts.states.advance(plan)
        self._slot_table.put(context.sampling.seq_slots, samples.token_ids[context.sampling.rows])
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
        sample = run_guarded("sampling", partial(sample_row, logits, state, int(sampling.num_generated[index])))
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


class PendingSamples(NamedTuple):
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


class AsynchronousStep(LanguageStep):
    """The step of an asynchronous device, which samples. The host waits for no token but the last one of requests with
    a grammar, after the forward. Replays a graph if one fits. The slot table is written last, so that a step that
    raised can be run again; a replay writes it itself, and an error after a replay fails its rows."""

    _slot_table: DeviceSlotTable

    def __init__(self, parts: StepParts, slot_table: DeviceSlotTable, graphs: StepGraphs | None = None) -> None:
        super().__init__(parts, slot_table)
        self._graphs = graphs

    def run(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> Samples | PendingSamples:
        context = self._begin(plan, records)
        rows = self._rows(plan, records)
        replay = self._replay_of(plan, rows, context)
        outcome = self._eager(plan, rows, context) if replay is None else self._replayed(replay, plan, rows, context)
        if self._parts.states is not None:
            self._parts.states.advance(plan)
        return outcome

    # ---- graphs

    def _replay_of(self, plan: LanguagePlan, rows: StepRows, context: StepContext) -> _Replay | None:
        """The replay of the step; None: it is launched op by op. Reasons are scored prompts (the host reads
        their logits), more than MAX_BIASES biases, or no graph that fits."""
        graphs, sampling = self._graphs, context.sampling
        if graphs is None or context.scoring is not None:
            return None
        if sampling.special.size and self._slot_table.specials.num_biases(sampling.seq_slots) > MAX_BIASES:
            return None
        seq_slots = sampling.seq_slots
        arrays = partial(self._slot_table.sampling.arrays, seq_slots, sampling.num_generated)
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

    def _replayed(
        self, replay: _Replay, plan: LanguagePlan, rows: StepRows, context: StepContext
    ) -> Samples | PendingSamples:
        sampling, fetch = context.sampling, self._parts.device.fetch
        sampled_rows = replay.launch()
        self._slot_table.written(sampling.seq_slots)
        if not sampling.special.size:
            return PendingSamples(plan.num_rows, sampling.rows, fetch(sampled_rows if len(sampling.rows) else ()))
        # The replay has overwritten the rows' last tokens, so the step cannot be run again.
        outcome = run_guarded("sampling", partial(self._replay_special, replay.special, plan, rows, sampling))
        if isinstance(outcome, ErrorInfo):
            failed = Samples.none(plan.num_rows)
            failed.failures += [(int(row), outcome) for row in sampling.rows]
            return failed
        return outcome

    def _replay_special(
        self, captured: SpecialGraph, plan: LanguagePlan, rows: StepRows, sampling: SamplingRows
    ) -> PendingSamples:
        assert self._graphs is not None
        self._recount(plan, sampling, captured.vocabulary)
        special = self._special(sampling, captured.size, captured.vocabulary)
        found = self._graphs.special.replay(captured, special, len(sampling.rows))
        return self._pending_samples(plan.num_rows, rows, sampling, special, found)

    # ---- special rows

    def _special(self, sampling: SamplingRows, size: int, vocabulary: int) -> SpecialArrays:
        index = sampling.special
        given = sampling.seq_slots[index], sampling.num_generated[index]
        return self._slot_table.specials.arrays(index, *given, size, vocabulary)

    def _pending_samples(
        self, num_rows: int, rows: StepRows, sampling: SamplingRows, special: SpecialArrays, found: SampledRows
    ) -> PendingSamples:
        """The pending result of a step with special rows. Their requests' histories read its tokens when needed."""
        num_top = special.num_top[: len(sampling.rows)]
        tensors = found if (num_top >= 0).any() else found[:2]
        pending = PendingSamples(num_rows, sampling.rows, self._parts.device.fetch(tensors), num_top, special.failures)
        failed = {index for index, _ in special.failures}
        for index in sampling.special.tolist():
            history = self._slot_table.specials.history(int(sampling.seq_slots[index]))
            if history is not None and index not in failed:
                history.expect(int(rows.num_context[sampling.rows[index]]), partial(pending.token, index))
        return pending

    # ---- op by op

    def _eager(self, plan: LanguagePlan, rows: StepRows, context: StepContext) -> Samples | PendingSamples:
        sampling, slot_table, parts = context.sampling, self._slot_table, self._parts
        arrays = slot_table.sampling.arrays(sampling.seq_slots, sampling.num_generated)
        inputs, (device_slots, *columns) = self._sent(plan, rows, context.scoring, (sampling.seq_slots, *arrays))
        logits = self._forward(self._resolved(inputs, plan.decodes, device_slots))
        if not len(sampling.rows):
            return self._without_tokens(plan, context)
        sampling_tensors = SamplingTensors(*columns)
        if sampling.special.size:
            outcome = self._eager_special(plan, rows, sampling, logits, sampling_tensors, device_slots)
        else:
            tokens, finite = parts.ops.sample(logits, sampling_tensors)
            outcome = PendingSamples(plan.num_rows, sampling.rows, parts.device.fetch((tokens, finite)))
            slot_table.write(device_slots, tokens)
        slot_table.written(sampling.seq_slots)
        if context.scoring is None:
            return outcome
        samples = outcome.read()
        context.scoring.put(samples)
        return samples

    def _eager_special(
        self,
        plan: LanguagePlan,
        rows: StepRows,
        sampling: SamplingRows,
        logits: Tensor,
        sampling_tensors: SamplingTensors,
        device_slots: Tensor,
    ) -> PendingSamples:
        parts, slot_table, (size, vocabulary) = self._parts, self._slot_table, logits.shape
        self._recount(plan, sampling, vocabulary)
        special = self._special(sampling, size, vocabulary)
        packed, *lists = parts.device.send((special.packed, special.bias_ids, special.bias_values, special.masks))
        tensors = SpecialTensors.from_packed(packed, size, *lists)
        found = sample_special(parts.ops, logits, sampling_tensors, tensors, slot_table.counts(vocabulary))
        slot_table.write(device_slots, found.tokens)
        slot_table.count(device_slots, found.tokens, tensors.columns.increments, vocabulary)
        return self._pending_samples(plan.num_rows, rows, sampling, special, found)

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

    def _without_tokens(self, plan: LanguagePlan, context: StepContext) -> Samples | PendingSamples:
        """The result of a step in which no row samples; the fetch only marks its end."""
        fetch = self._parts.device.fetch(())
        if context.scoring is None:
            return PendingSamples(plan.num_rows, context.sampling.rows, fetch)
        fetch.result()
        samples = Samples.none(plan.num_rows)
        context.scoring.put(samples)
        return samples
