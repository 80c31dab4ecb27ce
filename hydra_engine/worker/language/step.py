"""A step of the language lane: a plan -> logits -> sampled tokens, log probabilities and failures of its rows.

The device samples, and the next step takes its tokens there: an asynchronous device can launch it before they have been
read, op by op or as a replay. On a synchronous device the samples are complete when the call returns.

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

from hydra_engine.backend.base import SamplingTensors, StateRows
from hydra_engine.backend.device import Device, Fetch
from hydra_engine.core.plans import Int64s, LanguagePlan
from hydra_engine.core.results import TokenLogprobs
from hydra_engine.core.sampling import MAX_LOGPROBS
from hydra_engine.errors import ErrorInfo
from hydra_engine.models.layers.decoder import LanguageInput, Scored
from hydra_engine.worker.boundary import not_finite, run_guarded
from hydra_engine.worker.language.batches import StepParts, StepRows, sent_input, step_rows
from hydra_engine.worker.language.graphs import SpecialGraph, StepGraphs
from hydra_engine.worker.language.sampler import (
    MAX_BIASES,
    Scores,
    SpecialArrays,
    SpecialColumns,
    SpecialTensors,
    adjust_special,
    finite_rows,
    logprobs_of,
    token_logprobs,
)
from hydra_engine.worker.language.slot_table import SamplingRows, SlotTable
from hydra_engine.worker.ports import PromptPositions, WorkerRequest

_NO_TOKEN: Int64s = np.array([-1])


@dataclass(slots=True)
class Samples:
    """The outcome of a plan's rows, with row numbers as in `LanguageResult`."""

    token_ids: Int64s  # [num_rows], -1: none
    logprobs: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    failures: list[tuple[int, ErrorInfo]] = field(default_factory=list)
    scores: list[tuple[int, tuple[TokenLogprobs, ...]]] = field(default_factory=list)

    @classmethod
    def none(cls, num_rows: int) -> Samples:
        """Samples in which no row has a token."""
        return cls(_NO_TOKEN.repeat(num_rows))

    def put(self, rows: Int64s, part: Samples) -> None:
        """Merges `part`, whose row i is row `rows[i]` here."""
        self.token_ids[rows] = part.token_ids
        self.logprobs += [(int(rows[i]), logprobs) for i, logprobs in part.logprobs]
        self.failures += [(int(rows[i]), error) for i, error in part.failures]
        self.scores += [(int(rows[i]), scores) for i, scores in part.scores]

    def drop(self, rows: Sequence[int]) -> None:
        """Discards tokens, log probabilities, failures and scores of these rows."""
        self.token_ids[rows] = -1
        self.logprobs = [(row, logprobs) for row, logprobs in self.logprobs if row not in rows]
        self.failures = [(row, error) for row, error in self.failures if row not in rows]
        self.scores = [(row, scores) for row, scores in self.scores if row not in rows]


class PromptScoring:
    """Log probabilities of the prompt tokens that follow the positions of a step's scored chunks, collected while the
    model runs. For one run: a step that is run again needs a new one."""

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

    def scored_rows(self, device: Device) -> Scored:
        """The rows whose logits the model must pass to this scoring, sent to `device`."""
        (rows,) = device.send((np.array(self._rows, dtype=np.int64),))
        return Scored(rows, self._take)

    def put(self, samples: Samples) -> None:
        """Adds the scores to `samples`, after the forward. A chunk with logits that are not finite fails, and its
        sampled token is discarded. Asserts that the model passed the logits of all rows."""
        assert self._num_taken == len(self._rows), "the model left out scored rows"
        for row, logprobs in self._found.items():
            if row in self._broken:
                samples.token_ids[row] = -1
                samples.failures.append((row, not_finite("logits")))
            else:
                samples.scores.append((row, tuple(logprobs)))

    def _take(self, part: Tensor) -> None:
        """Scores the next slice of logits [n, V]; slices come in the order of the rows. A row that is not finite marks
        its chunk as failed."""
        logits = part.cpu().numpy()
        targets = self._targets[self._num_taken : self._num_taken + len(logits)]
        self._num_taken += len(logits)
        for (row, token_id, num_top), raw, finite in zip(targets, logits, finite_rows(logits).tolist(), strict=True):
            if finite:
                self._found[row].append(_score(raw.astype(np.float64), token_id, num_top))
            else:
                self._broken.add(row)


def _score(raw: Scores, token_id: int, num_top: int) -> TokenLogprobs:
    """Log probabilities of a prompt token by raw logits [V]. An id beyond the vocabulary, of an image placeholder, has
    probability 0 and rank V + 1."""
    if token_id < raw.size:
        return token_logprobs(raw, token_id, num_top)
    top = token_logprobs(raw, 0, num_top).top
    return TokenLogprobs(token_id, -math.inf, raw.size + 1, top)


def make_samples(num_rows: int, rows: Int64s, token_ids: Int64s) -> Samples:
    """Returns the samples of a step of `num_rows` rows, of which `rows` got `token_ids`; token -1 marks a row that
    failed because its logits are not finite."""
    if len(rows) == num_rows:
        samples = Samples(token_ids)
    else:
        samples = Samples.none(num_rows)
        samples.token_ids[rows] = token_ids
    if -1 in token_ids.tolist():
        samples.failures += [(int(row), not_finite("logits")) for row in rows[token_ids < 0]]
    return samples


def _host_rows(logits: Tensor, index: Int64s, *, wide: bool) -> Tensor:
    """Rows `index` of logits in host memory, as float64 if `wide`; may share memory with `logits` otherwise. By numpy:
    torch would divide the copy among threads and wait for those whose core is in use."""
    rows = logits.numpy() if len(index) == len(logits) else logits.numpy()[index]
    return torch.from_numpy(rows.astype(np.float64) if wide else rows)


class StepContext(NamedTuple):
    """The rows of a step that sample, and the scoring of its prompts; None if no chunk is scored."""

    sampling: SamplingRows
    scoring: PromptScoring | None


class PendingSamples(NamedTuple):
    """Samples of a step that the device computes. The fetch brings (token ids, finite) of the rows that sample,
    followed by (numbers, places) of `Ops.score_tokens` if any of them has log probabilities; nothing if no row
    samples."""

    num_rows: int
    rows: Int64s  # that sample
    fetch: Fetch
    scored: tuple[tuple[int, int, int], ...] = ()  # (index in `rows`, row of numbers and places, top log probabilities)
    failures: tuple[tuple[int, ErrorInfo], ...] = ()  # (index in `rows`, error), whatever token was drawn

    def read(self) -> Samples:
        """Waits for the device and returns the step's samples. A row whose logits are not finite fails for that, any
        other row in `failures` with its error there. Raises BackendError if the device failed."""
        arrays = self.fetch.result()
        if not arrays:
            return Samples.none(self.num_rows)
        token_ids, finite, *scores = arrays
        samples = make_samples(self.num_rows, self.rows, np.where(finite, token_ids, -1))
        for index, error in self.failures:
            row = int(self.rows[index])
            if samples.token_ids[row] >= 0:
                samples.token_ids[row] = -1
                samples.failures.append((row, error))
        for index, place, num_top in self.scored:
            row = int(self.rows[index])
            token = int(samples.token_ids[row])
            if token >= 0:
                numbers, places = scores
                samples.logprobs.append((row, logprobs_of(token, num_top, numbers[place], places[place])))
        return samples

    def token(self, index: int) -> int:
        """Token of sampling row `index`, an index in `rows`; -1 if its logits are not finite. Waits and raises like
        `read`."""
        token_ids, finite, *_ = self.fetch.result()
        return int(token_ids[index]) if finite[index] else -1


class _Replay(NamedTuple):
    """A replay of a captured step, and the graph that samples its special rows. `launch` returns (tokens, finite) of
    the rows that sample."""

    launch: Callable[[], tuple[Tensor, Tensor]]
    special: SpecialGraph


class _SentSpecial(NamedTuple):
    """The special rows of a step op by op, and the device's tensors of them."""

    arrays: SpecialArrays
    seq_slots: Tensor
    tensors: SpecialTensors
    draws: SamplingTensors
    is_drawn: bool  # any row has a temperature


class LanguageStep:
    """Runs the steps of a language lane, as a replay if a graph fits. The device samples. An asynchronous device is
    waited for if prompts are scored, and where tokens of requests with penalties or a grammar must be read: before a
    chunk of theirs or a recount, and after the forward for a mask. The slot table is written last, so that a step that
    raised can be run again; a replay writes it itself, and an error after a replay fails all rows that sample."""

    def __init__(self, parts: StepParts, slot_table: SlotTable, graphs: StepGraphs | None = None) -> None:
        self._parts = parts
        self._slot_table = slot_table
        self._graphs = graphs
        self._special: _SentSpecial | None = None  # of the latest step op by op that had special rows

    def run(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> Samples | PendingSamples:
        """Launches the step, then advances the recurrent states. `records[i]` belongs to `plan.chunks[i]`. On an
        asynchronous device its samples are pending, unless a prompt is scored or the sampling after a replay failed.
        Raises what the model, the ops and the device raise; unless the device failed, the step can then be run
        again."""
        context = self._begin(plan, records)
        rope: list[PromptPositions] | None = None
        if self._parts.multimodal_rope:
            rope = [record.rope for record in records if record.rope is not None]
        rows = step_rows(plan, self._slot_table, self._parts.kv_cache.block_size, rope)
        replay = self._replay_of(plan, rows, context)
        outcome = self._eager(plan, rows, context) if replay is None else self._replayed(replay, plan, rows, context)
        if self._parts.states is not None:
            self._parts.states.advance(plan)
        return outcome

    def _begin(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> StepContext:
        """Records the chunks' tokens in the histories of requests with penalties or a grammar, which waits for tokens
        of theirs that were not read. Returns the rows that sample and the scoring."""
        for chunk, record in zip(plan.chunks, records, strict=True):
            history = record.sampling_state.history
            if history is not None:
                history.resolve()
                history.record(chunk.start, chunk.token_ids)
        return StepContext(self._slot_table.sampling_rows(plan), PromptScoring.from_plan(plan, records))

    def _forward(self, plan: LanguagePlan, inputs: LanguageInput) -> Tensor:
        """Runs the model, and copies states for other instances. Returns logits [B', V] float32 of the rows that
        sample."""
        parts = self._parts
        logits = parts.model.forward(inputs, parts.kv_cache, parts.image_cache)
        if parts.states is not None:
            parts.states.export(plan, parts.kv_cache)
        return logits

    # ---- graphs

    def _replay_of(self, plan: LanguagePlan, rows: StepRows, context: StepContext) -> _Replay | None:
        """The replay of the step; None: it is launched op by op, because there are no graphs or none fits, a prompt is
        scored (the host reads logits), or a step with special rows has more than MAX_BIASES biases."""
        graphs, sampling = self._graphs, context.sampling
        if graphs is None or context.scoring is not None:
            return None
        if sampling.special.size and self._slot_table.specials.num_biases(sampling.seq_slots) > MAX_BIASES:
            return None
        seq_slots = sampling.seq_slots
        arrays = partial(self._slot_table.sampling.arrays, seq_slots, sampling.num_generated)
        mixed, decodes = graphs.mixed, graphs.decodes
        if plan.chunks:
            size = mixed.size_of(plan, rows)
            if size is None:
                return None
            return _Replay(
                lambda: mixed.replay(size, plan, rows, seq_slots, arrays(), self._state_rows(plan)),
                mixed.special_graph(size),
            )
        if not decodes.fits(rows):
            return None
        return _Replay(
            lambda: decodes.replay(rows, seq_slots, arrays(), self._state_rows(plan)), decodes.special_graph(rows)
        )

    def _state_rows(self, plan: LanguagePlan) -> StateRows | None:
        """The state slots of the step's rows; None if the model keeps no states."""
        return None if self._parts.states is None else self._parts.states.rows(plan)

    def _replayed(
        self, replay: _Replay, plan: LanguagePlan, rows: StepRows, context: StepContext
    ) -> Samples | PendingSamples:
        """Launches the replay, copies states for other instances, and samples special rows. If that sampling raises,
        all rows that sample fail, since the step cannot be run again; a BackendError is raised."""
        sampling, fetch = context.sampling, self._parts.device.fetch
        sampled_rows = replay.launch()
        if self._parts.states is not None:
            self._parts.states.export(plan, self._parts.kv_cache)
        self._slot_table.mark_written(sampling.seq_slots)
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
        """Samples all rows of a replayed step once more, from the same logits, with the biases, penalties and masks of
        special rows, and scores those that have log probabilities."""
        assert self._graphs is not None
        self._recount(plan, sampling, captured.vocabulary)
        index = sampling.special
        given = sampling.seq_slots[index], sampling.num_generated[index]
        special = self._slot_table.specials.arrays(index, *given, captured.size, captured.vocabulary)
        found = self._graphs.special.replay(captured, special, len(sampling.rows))
        return self._pending_samples(plan.num_rows, rows, sampling, special, index, found)

    # ---- op by op

    def _sent(
        self,
        plan: LanguagePlan,
        rows: StepRows,
        scoring: PromptScoring | None,
        beside: Sequence[npt.NDArray[np.generic]] = (),
    ) -> tuple[LanguageInput, tuple[Tensor, ...]]:
        """Sends the inputs of a step that is launched op by op; `beside` and the result as in `sent_input`."""
        parts = self._parts
        return sent_input(
            plan,
            rows,
            parts.ops,
            parts.device,
            image_block_size=1 if parts.image_cache is None else parts.image_cache.block_size,
            states=parts.states,
            scored=None if scoring is None else scoring.scored_rows(parts.device),
            beside=beside,
        )

    def _greedy(self, plan: LanguagePlan, rows: StepRows, context: StepContext) -> Samples:
        """Runs a step of rows that take their largest logit, on a synchronous device: sends nothing for sampling."""
        sampling = context.sampling
        inputs, _ = self._sent(plan, rows, context.scoring)
        logits = self._forward(plan, inputs)
        if len(sampling.rows):
            token_ids: Int64s = self._parts.ops.best_tokens(logits).numpy()
            samples = make_samples(plan.num_rows, sampling.rows, token_ids)
        else:
            samples = Samples.none(plan.num_rows)
        if context.scoring is not None:
            context.scoring.put(samples)
        self._slot_table.put(sampling.seq_slots, samples.token_ids[sampling.rows])
        return samples

    def _eager(self, plan: LanguagePlan, rows: StepRows, context: StepContext) -> Samples | PendingSamples:
        """Launches the step op by op. Waits for its samples on a synchronous device, or if a prompt is scored."""
        sampling, slot_table, parts = context.sampling, self._slot_table, self._parts
        if not slot_table.asynchronous and slot_table.is_greedy(sampling):
            return self._greedy(plan, rows, context)
        beside: tuple[npt.NDArray[np.generic], ...] = (sampling.seq_slots,)
        if len(sampling.special) < len(sampling.rows):
            arrays = slot_table.sampling.arrays(sampling.seq_slots, sampling.num_generated)
            arrays.temperatures[sampling.special] = 0.0  # drawn later, when their adjustments are known
            beside = sampling.seq_slots, *arrays, sampling.special
        inputs, (device_slots, *more) = self._sent(plan, rows, context.scoring, beside)
        if slot_table.asynchronous:
            inputs = self._resolved(inputs, rows.token_ids[: len(plan.decodes)], device_slots)
        logits = self._forward(plan, inputs)
        if not len(sampling.rows):
            outcome = PendingSamples(plan.num_rows, sampling.rows, parts.device.fetch(()))  # only marks the step's end
        else:
            found = (*parts.ops.sample(logits, SamplingTensors(*more[:-1])), more[-1]) if more else None
            if found is None or sampling.special.size:
                tokens, outcome = self._eager_special(plan, rows, sampling, logits, found)
            else:
                tokens, outcome = found[0], PendingSamples(plan.num_rows, sampling.rows, parts.device.fetch(found[:2]))
            if slot_table.asynchronous:
                slot_table.write(device_slots, tokens)
                slot_table.mark_written(sampling.seq_slots)
            else:
                slot_table.put(sampling.seq_slots, tokens.numpy())
        if slot_table.asynchronous and context.scoring is None:
            return outcome
        samples = outcome.read()
        if context.scoring is not None:
            context.scoring.put(samples)
        return samples

    def _eager_special(
        self,
        plan: LanguagePlan,
        rows: StepRows,
        sampling: SamplingRows,
        logits: Tensor,
        found: tuple[Tensor, Tensor, Tensor] | None,
    ) -> tuple[Tensor, PendingSamples]:
        """Samples and scores the special rows. Adds their tokens to the penalty counts of the slot table last: if it
        raises before, it can be run again. `found`, on the device: (tokens, finite) of all rows that sample, and the
        indices of special rows, whose tokens, greedy so far, are replaced in place; None if all rows are special.
        Returns the tokens of all rows that sample, and the step's samples."""
        ops, slot_table = self._parts.ops, self._slot_table
        index, vocabulary = sampling.special, logits.shape[1]
        seq_slots, count, places = sampling.seq_slots[index], len(index), np.arange(len(index))
        self._recount(plan, sampling, vocabulary)
        num_generated = sampling.num_generated[index]
        special = slot_table.specials.arrays(places, seq_slots, num_generated, count, vocabulary)
        sent = self._sent_special(special, seq_slots, num_generated)
        if not slot_table.asynchronous:
            chosen = _host_rows(logits, index, wide=special.computes)
        else:
            chosen = logits if found is None else logits.index_select(0, found[2])
            chosen = chosen.to(sent.draws.temperatures.dtype)
        if found is None or special.adjusts or sent.is_drawn:
            adjusted = logits if found is None else chosen  # the largest of float32 are found faster
            if special.adjusts:
                adjusted = adjust_special(ops, chosen, sent.tensors, slot_table.counts(vocabulary))
            tokens, finite = ops.sample(adjusted, sent.draws)
            if found is not None:
                found[0].index_copy_(0, found[2], tokens)
        else:
            tokens = found[0].index_select(0, found[2])
        scores: tuple[Tensor, ...] = ()
        if special.scores:
            scores = ops.score_tokens(chosen, tokens, sent.tensors.columns.num_top, MAX_LOGPROBS)
        if special.penalises:  # last, since a step that ran out of memory is run again and would count twice
            slot_table.count(sent.seq_slots, tokens, sent.tensors.columns.increments, vocabulary)
        every = (tokens, finite) if found is None else found[:2]
        return every[0], self._pending_samples(plan.num_rows, rows, sampling, special, places, (*every, *scores))

    def _sent_special(self, special: SpecialArrays, seq_slots: Int64s, num_generated: Int64s) -> _SentSpecial:
        """Sends what draws of these special rows need, in one copy, since a device has buffers for a few copies a step.
        If the latest call sent the same `special`, only sampling parameters are sent again, and nothing if no row has a
        temperature."""
        sent = self._special
        if sent is not None and sent.arrays is special:
            if sent.is_drawn:
                draws = self._slot_table.sampling.arrays(seq_slots, num_generated)
                self._special = sent = sent._replace(draws=SamplingTensors(*self._parts.device.send(draws)))
            return sent
        draws = self._slot_table.sampling.arrays(seq_slots, num_generated)
        lists = seq_slots, special.bias_ids, special.bias_values, special.masks
        device_slots, ids, values, masks, *columns = self._parts.device.send((*lists, *special.columns, *draws))
        num_columns = len(special.columns)
        self._special = sent = _SentSpecial(
            special,
            device_slots,
            SpecialTensors(SpecialColumns(*columns[:num_columns]), ids, values, masks),
            SamplingTensors(*columns[num_columns:]),
            is_drawn=bool(np.count_nonzero(draws.temperatures)),
        )
        return sent

    def _recount(self, plan: LanguagePlan, sampling: SamplingRows, vocabulary: int) -> None:
        """Recounts the tokens of requests with penalties whose prompt or recomputation ends in this step, or ended in
        one that sampled nothing, since the latest token of a request that is prefilled again may be planned as a
        decode. Waits for tokens that were not read. Does nothing in a step of decodes if all slots are counted."""
        specials, special = self._slot_table.specials, sampling.special
        if not plan.chunks and np.count_nonzero(specials.counted) == len(specials.counted):
            return
        seq_slots = sampling.seq_slots[special]
        ended = seq_slots[(special >= len(plan.decodes)) | ~specials.counted[seq_slots]]
        recounts = specials.recounts(ended, vocabulary)
        if recounts is not None:
            device_slots, places, counts = self._parts.device.send(recounts)
            self._slot_table.recount(device_slots, places, counts, vocabulary)
            specials.counted[recounts.seq_slots] = True

    def _resolved(self, inputs: LanguageInput, decoded: Int64s, seq_slots: Tensor) -> LanguageInput:
        """Returns `inputs` with the decode tokens that only the device has, -1 in `decoded`, filled in. `seq_slots`
        begin with the slots of the decodes."""
        count = len(decoded)
        if not np.count_nonzero(decoded < 0):
            return inputs
        head, rest = inputs.token_ids[:count], inputs.token_ids[count:]
        # What was sent may be the plan's own memory: nothing is written there.
        token_ids = self._slot_table.resolve(head, seq_slots[:count])
        return replace(inputs, token_ids=torch.cat((token_ids, rest)) if rest.shape[0] else token_ids)

    # ---- special rows

    def _pending_samples(
        self,
        num_rows: int,
        rows: StepRows,
        sampling: SamplingRows,
        special: SpecialArrays,
        places: Int64s,
        found: tuple[Tensor, ...],
    ) -> PendingSamples:
        """The pending result of a step with special rows. `places`: the special rows' indices in `special` and in the
        scores. `found`: (tokens, finite) of all rows that sample, then (numbers, places) of `Ops.score_tokens` if any
        row is scored. The requests' histories will read their tokens from the result."""
        index_of = dict(zip(places.tolist(), sampling.special.tolist(), strict=True))
        scored: tuple[tuple[int, int, int], ...] = ()
        if special.scores:
            num_top = special.num_top.tolist()
            scored = tuple((index, place, num_top[place]) for place, index in index_of.items() if num_top[place] >= 0)
        failures = tuple((index_of[place], error) for place, error in special.failures)
        fetch = self._parts.device.fetch(found if scored else found[:2])
        pending = PendingSamples(num_rows, sampling.rows, fetch, scored, failures)
        failed = {index for index, _ in failures}
        for index, seq_slot in zip(index_of.values(), sampling.seq_slots[sampling.special].tolist(), strict=True):
            history = self._slot_table.specials.history(seq_slot)
            if history is not None and index not in failed:
                history.expect(int(rows.num_context[sampling.rows[index]]), partial(pending.token, index))
        return pending
