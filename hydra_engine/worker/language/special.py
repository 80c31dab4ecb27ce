"""Sampling of rows that need more than filters and a draw on a device: biases, penalties, masks and log probabilities.

Parameters lie in arrays by sequence slot. A step sends those of its special rows after its forward: the mask of a
grammar needs the previous token on the host, and the device computes while the host waits for it. Tokens of penalised
requests are counted on the device, so counts include tokens that the host has not read. Order and meaning are those of
sampler.py. Does not know plans, graphs or lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_engine.backend.base import Adjustments, Ops, SamplingTensors
from hydra_engine.core.plans import Int64s, TokenLogprobs
from hydra_engine.core.sampling import MAX_LOGPROBS
from hydra_engine.errors import ErrorInfo
from hydra_engine.worker.boundary import run_guarded
from hydra_engine.worker.language.sampler import SamplingState, TokenHistory, allowed_tokens

MAX_BIASES = 1 << 14  # that a captured step has room for
WORDS = 6  # of 8 bytes, that a row has in `SpecialColumns`

_Words = npt.NDArray[np.int32]
_Column = TypeVar("_Column")
_NO_PENALTY = (1.0, 0.0, 0.0)
_SHORT = 6  # columns of int32


class SpecialColumns(NamedTuple, Generic[_Column]):
    """The columns of a step's sampling rows, [B] each, int32 except the first: see `Adjustments`. They share one array
    of WORDS * B words of 8 bytes."""

    penalties: _Column  # [B, 3] float64
    bias_begins: _Column
    bias_ends: _Column
    counted: _Column
    increments: _Column  # of the count of the row's new token
    masked: _Column
    num_top: _Column  # log probabilities beside the token's own, -1: none at all


def special_columns(packed: Any, size: int, int32: Any, float64: Any) -> SpecialColumns[Any]:
    """Views an int64 array or tensor, [WORDS * size], as columns. `int32` and `float64` are dtypes of its library."""
    first = (WORDS - _SHORT // 2) * size
    short = packed[first : WORDS * size].view(int32).reshape(_SHORT, size)
    return SpecialColumns(packed[:first].view(float64).reshape(size, 3), *short)


@lru_cache(maxsize=64)
def _blank(size: int) -> Int64s:
    """Columns of rows without special parameters. Shared by calls: read only."""
    packed = np.zeros(WORDS * size, dtype=np.int64)
    columns = special_columns(packed, size, np.int32, np.float64)
    columns.penalties[:] = _NO_PENALTY
    columns.counted[:] = columns.masked[:] = columns.num_top[:] = -1
    return packed


class SpecialArrays(NamedTuple):
    """Host arrays that a step sends for its special rows."""

    packed: Int64s  # of `SpecialColumns`
    bias_ids: _Words
    bias_values: npt.NDArray[np.float64]
    masks: _Words  # [M, ceil(V / 32)]
    num_top: _Words  # [B]
    failures: tuple[tuple[int, ErrorInfo], ...] = ()  # rows, of those that sample, that have no token to choose from

    @classmethod
    def blank(cls, size: int, vocabulary: int) -> SpecialArrays:
        masks = np.empty((0, -(-vocabulary // 32)), dtype=np.int32)
        none = np.full(size, -1, dtype=np.int32)
        return cls(_blank(size).copy(), np.empty(0, np.int32), np.empty(0, np.float64), masks, none)


class Recounts(NamedTuple):
    """New token counts of some slots."""

    seq_slots: Int64s  # [n]
    places: Int64s  # [m] slot * V + token
    counts: _Words  # [m]


class SlotSpecials:
    """The special parameters of requests (biases, penalties, masks, log probabilities) by sequence slot."""

    def __init__(self, num_seq_slots: int) -> None:
        self._penalties: npt.NDArray[np.float64] = np.ones((num_seq_slots, 3), dtype=np.float64)
        self._penalised: npt.NDArray[np.bool_] = np.zeros(num_seq_slots, dtype=np.bool_)
        self._num_top: _Words = np.full(num_seq_slots, -1, dtype=np.int32)
        self._num_biases: Int64s = np.zeros(num_seq_slots, dtype=np.int64)
        self._states: list[SamplingState | None] = [None] * num_seq_slots  # of biases, masks and histories
        # Of requests without a grammar, with what it depends on besides the request.
        self._masks: dict[int, tuple[tuple[bool, ...], _Words]] = {}

    def assign(self, seq_slot: int, state: SamplingState) -> None:
        params = state.params
        self._penalties[seq_slot] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._penalised[seq_slot] = params.penalises
        self._num_top[seq_slot] = -1 if params.logprobs is None else params.logprobs
        self._num_biases[seq_slot] = 0 if state.biases is None else len(state.biases[0])
        self._states[seq_slot] = state
        self._masks.pop(seq_slot, None)

    def num_biases(self, seq_slots: Int64s) -> int:
        return int(self._num_biases[seq_slots].sum())

    def history(self, seq_slot: int) -> TokenHistory | None:
        state = self._states[seq_slot]
        return None if state is None else state.history

    def arrays(
        self, rows: Int64s, seq_slots: Int64s, num_generated: Int64s, size: int, vocabulary: int
    ) -> SpecialArrays:
        """Builds the host arrays of a step with `size` sampling rows. `rows`: indices of the special ones, to which
        `seq_slots` and `num_generated` belong. Waits for the last token of requests with a grammar."""
        packed = _blank(size).copy()
        columns: SpecialColumns[Any] = special_columns(packed, size, np.int32, np.float64)
        penalised = self._penalised[seq_slots]
        columns.penalties[rows] = self._penalties[seq_slots]
        columns.counted[rows] = np.where(penalised, seq_slots, -1)
        columns.increments[rows] = 2 * penalised
        columns.num_top[rows] = np.minimum(self._num_top[seq_slots], vocabulary)
        bias_ids, bias_values = [np.empty(0, np.int32)], [np.empty(0, np.float64)]
        masks: list[_Words] = []
        failures: list[tuple[int, ErrorInfo]] = []
        end = 0
        for row, seq_slot, count in zip(rows.tolist(), seq_slots.tolist(), num_generated.tolist(), strict=True):
            state = self._states[seq_slot]
            assert state is not None
            if state.biases is not None:
                bias_ids.append(state.biases[0].astype(np.int32))
                bias_values.append(state.biases[1])
                columns.bias_begins[row], end = end, end + len(state.biases[0])
                columns.bias_ends[row] = end
            mask = run_guarded("sampling", partial(self._mask, seq_slot, state, count, vocabulary))
            if isinstance(mask, ErrorInfo):
                failures.append((row, mask))
            elif mask is not None:
                columns.masked[row] = len(masks)
                masks.append(mask)
        words = -(-vocabulary // 32)
        every = np.stack(masks) if masks else np.empty((0, words), dtype=np.int32)
        ids, values = np.concatenate(bias_ids), np.concatenate(bias_values)
        return SpecialArrays(packed, ids, values, every, columns.num_top.copy(), tuple(failures))

    def _mask(self, seq_slot: int, state: SamplingState, num_generated: int, vocabulary: int) -> _Words | None:
        """The mask of allowed tokens as bits, [ceil(V / 32)]; None: all are allowed, also if the request has failed."""
        if state.constraint is not None:
            assert state.history is not None
            state.history.resolve()
            if state.history.is_broken:
                return None
            mask = allowed_tokens(state, num_generated, vocabulary)
            return None if mask is None else _bits(mask)
        phase = num_generated < state.params.min_tokens, num_generated == 0, num_generated == state.num_last
        kept = self._masks.get(seq_slot)
        if kept is not None and kept[0] == phase:
            return kept[1]
        mask = allowed_tokens(state, num_generated, vocabulary)
        if mask is None:
            return None
        self._masks[seq_slot] = phase, _bits(mask)
        return self._masks[seq_slot][1]

    def recounts(self, seq_slots: Int64s, vocabulary: int) -> Recounts | None:
        """Counts all tokens so far of the slots whose requests have penalties; None if no slot has."""
        penalised = seq_slots[self._penalised[seq_slots]]
        if not penalised.size:
            return None
        places, counts = [], []
        for seq_slot in penalised.tolist():
            history = self.history(seq_slot)
            assert history is not None
            history.resolve()
            held = np.zeros(vocabulary, dtype=np.int32)
            held[history.prompt_ids[history.prompt_ids < vocabulary]] = 1  # image placeholders may lie beyond
            output = np.array([*history.output_counts.items()], dtype=np.int64).reshape(-1, 2)
            held[output[:, 0]] += 2 * output[:, 1].astype(np.int32)
            tokens = held.nonzero()[0]
            places.append(seq_slot * vocabulary + tokens)
            counts.append(held[tokens])
        return Recounts(penalised, np.concatenate(places), np.concatenate(counts))


def _bits(mask: npt.NDArray[np.bool_]) -> _Words:
    packed = np.zeros(-(-len(mask) // 32) * 4, dtype=np.uint8)
    bits = np.packbits(mask, bitorder="little")
    packed[: len(bits)] = bits
    return packed.view("<i4")


class SpecialTensors(NamedTuple):
    """`SpecialArrays` on the device."""

    columns: SpecialColumns[Tensor]
    bias_ids: Tensor
    bias_values: Tensor
    masks: Tensor

    @classmethod
    def from_packed(
        cls, packed: Tensor, size: int, bias_ids: Tensor, bias_values: Tensor, masks: Tensor
    ) -> SpecialTensors:
        return cls(special_columns(packed, size, torch.int32, torch.float64), bias_ids, bias_values, masks)


class SampledRows(NamedTuple):
    """The result of `sample_special`, on the device."""

    tokens: Tensor  # [B] int64
    finite: Tensor  # [B] bool
    numbers: Tensor  # [B, 3 + MAX_LOGPROBS] float32 and
    places: Tensor  # [B, 1 + MAX_LOGPROBS] int32, as `Ops.score_tokens` has them


def sample_special(
    ops: Ops, logits: Tensor, sampling: SamplingTensors, special: SpecialTensors, counts: Tensor
) -> SampledRows:
    """Samples and scores all rows of logits [B, V]. `counts` [slots, V] as in `Adjustments`, by sequence slot. Computes
    with the dtype of `sampling`."""
    columns, logits = special.columns, logits.to(sampling.temperatures.dtype)
    adjusted = ops.adjust_logits(
        logits,
        Adjustments(
            columns.bias_begins,
            columns.bias_ends,
            special.bias_ids,
            special.bias_values,
            columns.penalties,
            columns.counted,
            counts,
            columns.masked,
            special.masks,
        ),
    )
    tokens, finite = ops.sample(adjusted, sampling)
    return SampledRows(tokens, finite, *ops.score_tokens(logits, tokens, columns.num_top, MAX_LOGPROBS))


def logprobs_of(token: int, num_top: int, numbers: npt.NDArray[np.float32], places: _Words) -> TokenLogprobs:
    """Log probabilities of one row from `Ops.score_tokens`: numbers [3 + MAX_LOGPROBS], places [1 + MAX_LOGPROBS].
    `num_top` is at most the vocabulary."""
    chosen, largest, total, *best = numbers.tolist()
    log_total = largest + float(np.log(total))
    ranked: Sequence[tuple[int, float]] = [*zip(places[1:].tolist(), best, strict=True)][:num_top]
    top = tuple((token_id, value - log_total) for token_id, value in ranked)
    return TokenLogprobs(token, chosen - log_total, int(places[0]), top)
