"""The captured steps of a language lane and their replays: decode steps, small steps of decodes and prompts, and the
sampling of special rows after both.

Inputs of a replay lie at fixed addresses: one send and two copies bring a step's there. Rows, or tokens, beyond a
step's own are padding that leaves nothing behind: KV slot -1, a context of at most 1, a sequence slot of their own,
and a recurrent state that begins and is not kept. Special rows (sampler.py) are drawn once more, by a graph of their
own after the step's, from the same logits.

Up to about a thousand tokens of a model of 7B, steps with prompts take less time to compute than to launch. A bucket
has room for so many tokens and rows. Of a number of tokens there are two or three numbers of rows: with few, the
contexts of few decodes are split enough for the device, and few logits are computed. Attention reads from tensors which
tokens belong to which row (`Ops.plan_mixed`). With an image cache every token may take a feature; tokens that take none
have slot -1 there. Launched op by op: scored prompts and larger steps. Does not know requests, or which steps of a lane
may be replayed.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend.base import MixedRows, Ops, Refresh, SamplingTensors, StateRows, States
from hydra_engine.backend.device import Device, Graph
from hydra_engine.core.plans import BlockIds, Int64s, LanguagePlan
from hydra_engine.models.layers.decoder import LanguageInput
from hydra_engine.worker.language.batches import StepParts, StepRows, image_merges
from hydra_engine.worker.language.sampler import (
    MAX_BIASES,
    WORDS,
    SampledRows,
    SamplingArrays,
    SpecialArrays,
    SpecialTensors,
    sample_special,
)
from hydra_engine.worker.language.slot_table import SlotTable


@dataclass(frozen=True, slots=True)
class SpecialGraph:
    """The captured sampling of special rows, for up to `size` rows."""

    graph: Graph
    size: int
    vocabulary: int
    results: list[Tensor]  # the tensors of `SampledRows`, written by each replay


class _SpecialInputs(NamedTuple):
    """Input tensors of the largest step's special rows; smaller steps use their first rows."""

    packed: Tensor  # [WORDS * B] int64
    bias_ids: Tensor  # [MAX_BIASES] int32
    bias_values: Tensor  # [MAX_BIASES] float64
    masks: Tensor  # [B, ceil(V / 32)] int32


class SpecialGraphs:
    """The graphs that sample special rows, for steps in which at most `max_rows` rows sample. For the lane's thread, in
    inference mode."""

    def __init__(self, ops: Ops, device: Device, slot_table: SlotTable, max_rows: int) -> None:
        self.num_bytes = 0  # of device memory: of the graphs and their inputs
        self._ops = ops
        self._device = device
        self._slot_table = slot_table
        self._max_rows = max_rows
        self._inputs: _SpecialInputs | None = None

    def capture(
        self, size: int, seq_slots: Tensor, sampling: SamplingTensors, step_results: list[Tensor]
    ) -> SpecialGraph:
        """Captures the graph of special rows right after that of their step, in which `size` rows sample and whose
        tensors the arguments are; `step_results`: (tokens, finite, logits). Removes the logits there: later captures
        may compute in their memory, since no other graph is replayed between a step's and that of its special rows."""
        vocabulary = step_results[-1].shape[1]
        special = self._tensors(size, vocabulary)
        results: list[Tensor] = []
        graph = self._device.capture(partial(self._launch, seq_slots, sampling, special, step_results, results))
        del step_results[2:]
        self.num_bytes += graph.num_bytes
        return SpecialGraph(graph, size, vocabulary, results)

    def _launch(
        self,
        seq_slots: Tensor,
        sampling: SamplingTensors,
        special: SpecialTensors,
        step_results: list[Tensor],
        results: list[Tensor],
    ) -> None:
        """Launches what the graph repeats: samples all rows, and writes their tokens and counts to the slot table.
        `results` become the tensors of `SampledRows`."""
        slot_table, logits = self._slot_table, step_results[-1]
        vocabulary = logits.shape[1]
        found = sample_special(self._ops, logits, sampling, special, slot_table.counts(vocabulary))
        results[:] = found
        slot_table.write(seq_slots, found.tokens)
        slot_table.count(seq_slots, found.tokens, special.columns.increments, vocabulary)

    def _tensors(self, size: int, vocabulary: int) -> SpecialTensors:
        """Input tensors of `size` rows, none of them special yet. The first call allocates those of the largest
        step."""
        if self._inputs is None:
            zeros = partial(torch.zeros, device=self._device.torch_device)
            self._inputs = inputs = _SpecialInputs(
                zeros(WORDS * self._max_rows, dtype=torch.int64),
                zeros(MAX_BIASES, dtype=torch.int32),
                zeros(MAX_BIASES, dtype=torch.float64),
                zeros((self._max_rows, -(-vocabulary // 32)), dtype=torch.int32),
            )
            self.num_bytes += sum(tensor.nbytes for tensor in (*inputs, self._slot_table.counts(vocabulary)))
        packed, *lists = self._inputs
        packed[: WORDS * size].copy_(self._device.send((SpecialArrays.blank(size, vocabulary).packed,))[0])
        return SpecialTensors.from_packed(packed[: WORDS * size], size, *lists)

    def replay(self, captured: SpecialGraph, special: SpecialArrays, count: int) -> SampledRows:
        """Replays the graph after that of its step, of which `count` rows sample, and writes the slot table. The result
        is valid until the next replay. `special` has as many rows as the graph, and at most MAX_BIASES biases."""
        assert self._inputs is not None, "nothing was captured"
        given = special.packed, special.bias_ids, special.bias_values, special.masks
        for target, sent in zip(self._inputs, self._device.send(given), strict=True):
            if sent.shape[0]:
                target[: sent.shape[0]].copy_(sent)
        captured.graph.replay()
        return SampledRows(*(result[:count] for result in captured.results))


logger = logging.getLogger(__name__)

_SMALL = (1, 2, 4)
_STEP = 8

_Column = TypeVar("_Column")


def default_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Default sizes of decode steps, ascending: 1, 2, 4, then 8 apart, from 128 on an eighth of the power of two below,
    so that few rows are padding; the last is `max_num_seqs`. Up to about 180 rows padding costs nothing, since products
    wait for their weights; each graph costs time at start, and memory."""
    sizes, size = [*_SMALL], _STEP
    while size < max_num_seqs:
        sizes.append(size)
        size += max(_STEP, (1 << size.bit_length() - 1) // 8)
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


class _DecodeColumns(NamedTuple, Generic[_Column]):
    """The inputs of a decode step, [B] each, in one array of `_DECODE_WORDS` * B words of 8 bytes."""

    token_ids: _Column  # int64
    seq_slots: _Column
    positions: _Column
    slots: _Column
    state_starts: _Column  # these three as in `StateRows`
    state_reads: _Column
    state_writes: _Column
    num_context: _Column  # int32
    top_k: _Column
    temperatures: _Column  # float32
    top_p: _Column
    min_p: _Column
    numbers: _Column


_DECODE_LONG, _DECODE_SHORT = 7, 6  # columns of 8 and of 4 bytes
_DECODE_WORDS = _DECODE_LONG + _DECODE_SHORT // 2
_NO_TABLES = np.zeros((0, 1), dtype=np.int32)


def _decode_columns(packed: Any, size: int, int32: Any, float32: Any) -> _DecodeColumns[Any]:
    """Splits `packed`, an int64 array or tensor [_DECODE_WORDS * size], into columns. `int32` and `float32` are dtypes
    of its library."""
    long, short = (
        packed[: _DECODE_LONG * size].reshape(_DECODE_LONG, size),
        packed[_DECODE_LONG * size :].view(int32).reshape(_DECODE_SHORT, size),
    )
    return _DecodeColumns(*long, *short[:2], *short[2:].view(float32))


def _decode_sampling(columns: _DecodeColumns[Tensor]) -> SamplingTensors:
    """The columns that `Ops.sample` reads."""
    return SamplingTensors(columns.temperatures, columns.top_k, columns.top_p, columns.min_p, columns.numbers)


@dataclass(frozen=True, slots=True)
class _CapturedDecode:
    """A captured decode step, and the graph of its special rows."""

    graph: Graph
    results: list[Tensor]  # (tokens, finite), written by each replay
    refresh: Refresh | None  # renews the attention plan before each replay
    special: SpecialGraph


class DecodeGraphs:
    """The graphs of decode steps, one per partition and size; `sizes` ascend. For the lane's thread, in inference
    mode."""

    def __init__(
        self,
        parts: StepParts,
        slot_table: SlotTable,
        special: SpecialGraphs,
        sizes: Sequence[int],
        max_model_len: int,
    ) -> None:
        self.sizes = tuple(sizes)
        self.num_bytes = 0  # of device memory that graphs took
        self._parts = parts
        self._slot_table = slot_table
        self._special = special
        self._max_model_len = max_model_len
        self._width = -(-max_model_len // parts.kv_cache.block_size)
        self._captured: dict[tuple[int, int], _CapturedDecode] = {}  # by partition and size
        self._blanks: dict[int, Int64s] = {}
        self._refused = False  # an attention plan could not be renewed

    # ---- capture

    def prepare(self) -> None:
        """Allocates the buffers of the graphs, before the first capture. If the ops cannot plan without reading the
        contents of inputs, nothing is captured: `sizes` becomes empty."""
        with torch.inference_mode():
            fixed = self._packed, self._tables[:1], self._slot_table.last_tokens
            try:
                self._parts.ops.plan_decode(fixed[0].view(torch.int32)[:1], fixed[1])
                if self._parts.states is not None:
                    self._parts.ops.plan_decode_states(*(fixed[0][:1],) * 3)
            except ValueError as error:
                logger.info("decode steps are not captured: %s", error)
                self.sizes = ()
            else:
                self._parts.model.reserve_positions(self._max_model_len)

    @property
    def num_captured(self) -> int:
        """Number of captured steps, over all partitions."""
        return len(self._captured)

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """Sizes captured on any partition, ascending."""
        return tuple(sorted({size for _, size in self._captured}))

    def capture(self, partition: int, size: int) -> None:
        """Captures the step of this size on a partition, and the graph of its special rows. No step may be in
        flight."""
        parts = self._parts
        with torch.inference_mode(), parts.device.partitions.use(partition):
            packed, blank = self._packed[: _DECODE_WORDS * size], self._blank(size)
            packed.copy_(parts.device.send((blank,))[0])
            columns, inputs = self._inputs(packed, size)
            refresh = inputs.attention.refresh
            if refresh is not None:
                refresh(_decode_columns(blank, size, np.int32, np.float32).num_context, _NO_TABLES)
            results: list[Tensor] = []
            graph = parts.device.capture(partial(self._launch, inputs, columns, results))
            special = self._special.capture(size, columns.seq_slots, _decode_sampling(columns), results)
        self.num_bytes += graph.num_bytes
        self._captured[partition, size] = _CapturedDecode(graph, results, refresh, special)

    def _inputs(self, packed: Tensor, size: int) -> tuple[_DecodeColumns[Tensor], LanguageInput]:
        """The columns of `packed`, and the model's input that reads them at each replay."""
        columns: _DecodeColumns[Tensor] = _decode_columns(packed, size, torch.int32, torch.float32)
        positions, table = columns.positions, self._parts.states
        rows = None
        if table is not None:
            given = columns.state_starts, columns.state_reads, columns.state_writes
            rows = self._parts.ops.plan_decode_states(*given)
        return columns, LanguageInput(
            token_ids=columns.token_ids,
            positions=positions.expand(3, -1) if self._parts.multimodal_rope else positions,
            slots=columns.slots,
            attention=self._parts.ops.plan_decode(columns.num_context, self._tables[:size]),
            logit_rows=torch.arange(size, device=packed.device),
            position_end=self._max_model_len,
            states=None if table is None or rows is None else States(table.cache, rows),
        )

    def _launch(self, inputs: LanguageInput, columns: _DecodeColumns[Tensor], results: list[Tensor]) -> None:
        """Launches what the graph repeats: forward, sampling, tokens into the slot table. `results` become (tokens,
        finite, logits)."""
        slot_table, parts = self._slot_table, self._parts
        token_ids = slot_table.resolve(columns.token_ids, columns.seq_slots)
        logits = parts.model.forward(replace(inputs, token_ids=token_ids), parts.kv_cache, None)
        results[:] = *parts.ops.sample(logits, _decode_sampling(columns)), logits
        slot_table.write(columns.seq_slots, results[0])

    @cached_property
    def _packed(self) -> Tensor:
        """Input buffer of the largest step."""
        return torch.zeros(_DECODE_WORDS * self.sizes[-1], dtype=torch.int64, device=self._parts.device.torch_device)

    @cached_property
    def _tables(self) -> Tensor:
        """Block tables of the largest step. Padded rows keep those of earlier steps, at first zeros: what they read is
        not used."""
        shape = (self.sizes[-1], self._width)
        return torch.zeros(shape, dtype=torch.int32, device=self._parts.device.torch_device)

    def _blank(self, size: int) -> Int64s:
        """A new array of packed inputs in which every row is padding."""
        if size not in self._blanks:
            packed = np.zeros(_DECODE_WORDS * size, dtype=np.int64)
            columns = _decode_columns(packed, size, np.int32, np.float32)
            columns.seq_slots[:], columns.slots[:], columns.num_context[:] = self._slot_table.padding, -1, 1
            columns.state_writes[:] = -1
            self._blanks[size] = packed
        return self._blanks[size].copy()

    # ---- replay

    def fits(self, rows: StepRows) -> bool:
        """True if the smallest size that holds the rows of this step of decodes is captured on the current partition,
        and no position is beyond the longest request. False for all steps once a replay has raised ValueError."""
        count = len(rows.block_tables)
        if self._refused or not self._captured or count > self.sizes[-1]:
            return False
        partition = self._parts.device.partitions.current()
        return rows.position_end <= self._max_model_len and (partition, self._size(count)) in self._captured

    def replay(
        self, rows: StepRows, seq_slots: Int64s, sampling: SamplingArrays, states: StateRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """Replays a step that fits; returns (tokens, finite), valid until the next replay. Writes the slot table, and
        the recurrent states in `states`. `seq_slots` and `sampling` belong to the rows. An error leaves no lasting
        effect; after a ValueError no step fits any more."""
        # Further columns are of contexts longer than any row's.
        given_tables = rows.block_tables[:, : self._width]
        count, width = given_tables.shape
        device, size = self._parts.device, self._size(count)
        packed = self._blank(size)
        columns = _decode_columns(packed, size, np.int32, np.float32)
        positions = rows.positions if rows.positions.ndim == 1 else rows.positions[0]  # alike on all axes
        state_columns: tuple[Any, ...] = (0, 0, -1)
        if states is not None:
            state_columns = states.starts.numpy(), states.read_slots.numpy(), states.write_slots.numpy()
        given = (rows.token_ids, seq_slots, positions, rows.slots, *state_columns, rows.num_context)
        for column, values in zip(columns, (*given, sampling.top_k, sampling.temperatures, *sampling[2:]), strict=True):
            column[:count] = values
        sent, tables = device.send((packed, given_tables))
        self._packed[: len(packed)].copy_(sent)
        self._tables[:count, :width].copy_(tables)
        captured = self._captured[device.partitions.current(), size]
        if captured.refresh is not None:
            self._refresh(captured.refresh, columns.num_context, given_tables)
        captured.graph.replay()
        tokens, finite, *_ = captured.results
        return tokens[:count], finite[:count]

    def special_graph(self, rows: StepRows) -> SpecialGraph:
        """The graph of the special rows of a step that fits."""
        return self._captured[self._parts.device.partitions.current(), self._size(len(rows.block_tables))].special

    def _refresh(self, refresh: Refresh, num_context: BlockIds, tables: BlockIds) -> None:
        """Renews the attention plan of a captured step. A ValueError is raised again, and no step fits any more."""
        try:
            refresh(num_context, tables)
        except ValueError:
            # Steps in flight may still replay what was captured, so it is kept.
            self._refused = True
            raise

    def _size(self, count: int) -> int:
        """The smallest size with at least `count` rows; `count` must not exceed the largest."""
        return self.sizes[bisect_left(self.sizes, count)]


logger = logging.getLogger(__name__)

# Products are computed in tiles of so many tokens: padding inside of one costs nothing. A bucket for each number of
# tiles, rather than for 512, 1024, 1536 and 2048 tokens, because the last three are bound by arithmetic: on an H200 a
# tile of a model of 7B takes 2.6 ms, so 1025 tokens would take 33 ms as 1536, and 23 launch by launch, which the
# processor does in 20. Fifteen numbers of tokens instead of six cost some two seconds at start and little memory, for
# all of them compute in that of the largest.
_TILE = 128
MAX_TOKENS = 2048  # from about there on launches are hidden behind what they compute, for models of 3B as well
FEW_TOKENS = 2 * _TILE  # for an instance that only decodes, whose prompts are recomputed after a preemption
_TOKENS = (16, 32, 64, *range(_TILE, MAX_TOKENS + 1, _TILE))
_ROWS = (8, 32)  # and max_num_seqs
_MAX_ROWS = 1024  # rows that a program can search for its tile

# A prompt may have a tile of queries that is not full, and programs are launched for as many tiles, one for each head
# of keys and values. Those without a tile end within 2 us, and an H200 runs 264 at once: for 32 prompts with 32 heads
# 7 us a layer, a hundredth of what 1024 tokens take. So steps of more than 32 rows, most of which decode, have fewer.
_FEWEST_CHUNKS, _TOKENS_PER_CHUNK = 16, 32


class MixedSize(NamedTuple):
    """Capacity of a captured step with prompts: all tokens, and all rows, decodes included."""

    tokens: int
    rows: int

    @property
    def chunks(self) -> int:
        """Maximum number of prompt chunks in a step."""
        if self.rows <= _ROWS[-1]:
            return self.rows
        return min(self.rows, max(_FEWEST_CHUNKS, self.tokens // _TOKENS_PER_CHUNK))


def mixed_sizes(token_budget: int, max_num_seqs: int, max_tokens: int = MAX_TOKENS) -> tuple[MixedSize, ...]:
    """Default sizes of steps with prompts, ascending. Tokens: up to the first default that holds `token_budget`, at
    most `max_tokens`. Rows for each number of tokens: 8, 32 and `max_num_seqs`, never more than that, than 1024, nor
    than one per token."""
    sizes: list[MixedSize] = []
    max_rows = min(max_num_seqs, _MAX_ROWS)
    for tokens in _TOKENS[: bisect_left(_TOKENS, token_budget) + 1]:
        if tokens <= max_tokens:
            counts = {min(rows, tokens, max_rows) for rows in (*_ROWS, max_rows)}
            sizes += [MixedSize(tokens, rows) for rows in sorted(counts)]
    return tuple(sizes)


class _MixedColumns(NamedTuple, Generic[_Column]):
    """The inputs of a step with prompts, consecutive in one buffer of 8-byte words."""

    token_ids: _Column  # [T] int64
    positions: _Column  # [axes * T]
    slots: _Column  # [T]
    image_slots: _Column  # [T], or [0] without an image cache
    seq_slots: _Column  # [B] of the rows that sample, as what follows
    logit_rows: _Column
    state_cu_q: _Column  # [B + 1], as the three that follow in `StateRows`; [0] each if the model keeps no states
    state_starts: _Column  # [B]
    state_reads: _Column
    state_writes: _Column
    cu_q: _Column  # [B + 1] int32, of all rows, as the three that follow: see `MixedRows`
    rest_cu_q: _Column
    num_context: _Column
    decode_context: _Column
    top_k: _Column  # [B] int32
    temperatures: _Column  # [B] float32
    top_p: _Column
    min_p: _Column
    numbers: _Column

    @property
    def sampling(self) -> SamplingTensors:
        """The columns that `Ops.sample` reads."""
        tensors: Any = (self.temperatures, self.top_k, self.top_p, self.min_p, self.numbers)
        return SamplingTensors(*tensors)


class _Layout(NamedTuple):
    """Numbers of columns per token and per row that depend on the model."""

    axes: int  # of positions: 3 with multimodal rotary positions, else 1
    features: int  # 1 if a token may take an image feature, else 0
    states: int  # 1 if a row has a recurrent state, else 0

    def counts(self, size: MixedSize) -> tuple[list[int], list[int], list[int]]:
        """Lengths of the int64, int32 and float32 columns."""
        tokens, rows = size
        long = [tokens, self.axes * tokens, tokens, self.features * tokens, rows, rows]
        long += [self.states * (rows + 1), *(self.states * rows,) * 3]
        return long, [rows + 1, rows + 1, rows, rows, rows], [rows] * 4

    def num_words(self, size: MixedSize) -> int:
        """Words of 8 bytes that all columns take."""
        long, *short = self.counts(size)
        return sum(long) + sum(-(-count // 2) for counts in short for count in counts)


def _mixed_columns(packed: Any, size: MixedSize, layout: _Layout, types: tuple[Any, Any, Any]) -> _MixedColumns[Any]:
    """Splits `packed`, an int64 array or tensor of at least `layout.num_words(size)`, into columns. `types`: int64,
    int32, float32 of its library."""
    columns, begin = [], 0
    for dtype, width, counts in zip(types, (1, 2, 2), layout.counts(size), strict=True):
        for count in counts:
            end = begin + -(-count // width)
            columns.append(packed[begin:end].view(dtype)[:count])
            begin = end
    return _MixedColumns(*columns)


_ARRAYS, _TENSORS = (np.int64, np.int32, np.float32), (torch.int64, torch.int32, torch.float32)


@dataclass(frozen=True, slots=True)
class _CapturedMixed:
    """A captured step with prompts, and the graph of its special rows."""

    graph: Graph
    results: list[Tensor]  # (tokens, finite), written by each replay
    special: SpecialGraph


class MixedGraphs:
    """The graphs of steps with prompts, one per partition and size; `sizes` ascend. For the lane's thread, in inference
    mode."""

    def __init__(
        self,
        parts: StepParts,
        slot_table: SlotTable,
        special: SpecialGraphs,
        sizes: Sequence[MixedSize],
        max_model_len: int,
    ) -> None:
        self.sizes = tuple(sizes)
        self.num_bytes = 0  # of device memory that graphs took
        self.note = ""  # why nothing is captured
        self._parts = parts
        self._slot_table = slot_table
        self._special = special
        self._max_model_len = max_model_len
        features, states = parts.image_cache is not None, parts.states is not None
        self._layout = _Layout(3 if parts.multimodal_rope else 1, int(features), int(states))
        self._width = -(-max_model_len // parts.kv_cache.block_size)
        self._captured: dict[tuple[int, MixedSize], _CapturedMixed] = {}  # by partition

    # ---- capture

    def prepare(self) -> None:
        """Allocates the inputs, before the first capture. If the ops cannot plan without reading their contents,
        nothing is captured: `sizes` becomes empty, and `note` says why."""
        if not self.sizes:
            return
        with torch.inference_mode():
            try:
                self._inputs(self._columns(self.sizes[0]), self.sizes[0])
            except ValueError as error:
                self.note = f"steps with prompts and decodes are launched op by op: {error}"
                logger.info("%s", self.note)
                self.sizes = ()

    def capture(self, partition: int, size: MixedSize) -> None:
        """Captures the step of this size on a partition, and the graph of its special rows. No step may be in
        flight."""
        parts = self._parts
        with torch.inference_mode(), parts.device.partitions.use(partition):
            blank = self._blank(size)
            self._packed[: len(blank)].copy_(parts.device.send((blank,))[0])
            columns = self._columns(size)
            results: list[Tensor] = []
            graph = parts.device.capture(partial(self._launch, self._inputs(columns, size), columns, results))
            special = self._special.capture(size.rows, columns.seq_slots, columns.sampling, results)
        self.num_bytes += graph.num_bytes
        self._captured[partition, size] = _CapturedMixed(graph, results, special)

    def _inputs(self, columns: _MixedColumns[Tensor], size: MixedSize) -> LanguageInput:
        """The model's input that reads the columns at each replay. With an image cache every token may take a
        feature."""
        positions, table = columns.positions, self._parts.states
        states = None
        if table is not None:
            rows = StateRows(columns.state_cu_q, columns.state_starts, columns.state_reads, columns.state_writes)
            states = States(table.cache, self._parts.ops.plan_mixed_states(rows, size.tokens))
        return LanguageInput(
            token_ids=columns.token_ids,
            positions=positions.view(3, -1) if self._layout.axes == 3 else positions,
            slots=columns.slots,
            attention=self._parts.ops.plan_mixed(self._rows(columns, size), size.tokens, size.chunks),
            logit_rows=columns.logit_rows,
            position_end=self._max_model_len,
            image_rows=self._every_token[: size.tokens] if self._layout.features else None,
            image_slots=columns.image_slots if self._layout.features else None,
            states=states,
        )

    def _launch(self, inputs: LanguageInput, columns: _MixedColumns[Tensor], results: list[Tensor]) -> None:
        """Launches what the graph repeats: forward, sampling, tokens into the slot table. `results` become (tokens,
        finite, logits). Decodes come first among tokens and among sampling rows, so `seq_slots` begin with theirs;
        tokens of prompts are never -1, so resolving some of them has no effect."""
        slot_table, parts, num_rows = self._slot_table, self._parts, len(columns.seq_slots)
        head, rest = columns.token_ids[:num_rows], columns.token_ids[num_rows:]
        token_ids = torch.cat((slot_table.resolve(head, columns.seq_slots), rest))
        logits = parts.model.forward(replace(inputs, token_ids=token_ids), parts.kv_cache, parts.image_cache)
        results[:] = *parts.ops.sample(logits, columns.sampling), logits
        slot_table.write(columns.seq_slots, results[0])

    def _rows(self, columns: _MixedColumns[Tensor], size: MixedSize) -> MixedRows:
        """The rows of a step of this size, for `Ops.plan_mixed`."""
        tables = self._tables[: size.rows]
        return MixedRows(columns.cu_q, columns.rest_cu_q, columns.num_context, columns.decode_context, tables)

    def _columns(self, size: MixedSize) -> _MixedColumns[Tensor]:
        """The columns of a step of this size, at the beginning of the input buffer."""
        columns: _MixedColumns[Tensor] = _mixed_columns(self._packed, size, self._layout, _TENSORS)
        return columns

    @cached_property
    def _packed(self) -> Tensor:
        """Input buffer of the largest step."""
        words = self._layout.num_words(self.sizes[-1])
        return torch.zeros(words, dtype=torch.int64, device=self._parts.device.torch_device)

    @cached_property
    def _tables(self) -> Tensor:
        """Block tables of the largest step. Padded rows keep those of earlier steps, at first zeros, and read
        nothing."""
        shape = (self.sizes[-1].rows, self._width)
        return torch.zeros(shape, dtype=torch.int32, device=self._parts.device.torch_device)

    @cached_property
    def _every_token(self) -> Tensor:
        """Indices of all tokens of the largest step."""
        return torch.arange(self.sizes[-1].tokens, device=self._parts.device.torch_device)

    def _blank(self, size: MixedSize) -> Int64s:
        """A new array of packed inputs in which every token and row is padding."""
        packed = np.zeros(self._layout.num_words(size), dtype=np.int64)
        columns = _mixed_columns(packed, size, self._layout, _ARRAYS)
        columns.slots[:], columns.image_slots[:], columns.seq_slots[:] = -1, -1, self._slot_table.padding
        columns.state_writes[:] = -1
        return packed

    @property
    def num_captured(self) -> int:
        """Number of captured steps, over all partitions."""
        return len(self._captured)

    @property
    def captured_tokens(self) -> int:
        """Tokens of the largest captured step; 0 if there is none."""
        return max((size.tokens for _, size in self._captured), default=0)

    # ---- replay

    def size_of(self, plan: LanguagePlan, rows: StepRows) -> MixedSize | None:
        """The size of the current partition's graph for this step: the first that has its tokens, rows and prompts.
        None if none does with less than two tiles of padding (256 tokens), or a position is beyond the longest
        request."""
        if rows.position_end > self._max_model_len:
            return None
        num_tokens, num_rows, num_chunks = len(rows.token_ids), plan.num_rows, len(plan.chunks)
        partition = self._parts.device.partitions.current()
        for size in self.sizes[bisect_left(self.sizes, (num_tokens, num_rows)) :]:
            if size.tokens >= num_tokens + 2 * _TILE:
                break
            if size.rows >= num_rows and size.chunks >= num_chunks and (partition, size) in self._captured:
                return size
        return None

    def replay(
        self,
        size: MixedSize,
        plan: LanguagePlan,
        rows: StepRows,
        seq_slots: Int64s,
        sampling: SamplingArrays,
        states: StateRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Replays a step; returns (tokens, finite) of the rows that sample, valid until the next replay. `size`: from
        `size_of`. `seq_slots` and `sampling` belong to the rows that sample. Writes the slot table, and the recurrent
        states in `states`. An error leaves no lasting effect."""
        device, num_decodes, num_rows = self._parts.device, len(plan.decodes), plan.num_rows
        num_tokens, num_sampled = len(rows.token_ids), len(seq_slots)
        packed = self._blank(size)
        columns = _mixed_columns(packed, size, self._layout, _ARRAYS)
        columns.token_ids[:num_tokens], columns.slots[:num_tokens] = rows.token_ids, rows.slots
        columns.positions.reshape(self._layout.axes, -1)[:, :num_tokens] = rows.positions
        if self._parts.image_cache is not None:
            for targets, sources in image_merges(plan, rows.cu_q, self._parts.image_cache.block_size):
                columns.image_slots[targets] = sources
        columns.seq_slots[:num_sampled], columns.logit_rows[:num_sampled] = seq_slots, rows.logit_rows
        columns.cu_q[: num_rows + 1], columns.cu_q[num_rows + 1 :] = rows.cu_q, num_tokens
        if states is not None:
            columns.state_cu_q[:] = columns.cu_q
            columns.state_starts[:num_rows] = states.starts.numpy()
            columns.state_reads[:num_rows] = states.read_slots.numpy()
            columns.state_writes[:num_rows] = states.write_slots.numpy()
        columns.rest_cu_q[:] = np.maximum(columns.cu_q, num_decodes)
        columns.num_context[:num_rows] = rows.num_context
        columns.decode_context[:num_decodes] = rows.num_context[:num_decodes]
        given = sampling.top_k, sampling.temperatures, *sampling[2:]
        for column, values in zip(columns[-5:], given, strict=True):
            column[:num_sampled] = values
        tables = rows.block_tables[:, : self._width]
        sent, sent_tables = device.send((packed, tables))
        self._packed[: len(packed)].copy_(sent)
        self._tables[:num_rows, : tables.shape[1]].copy_(sent_tables)
        captured = self._captured[device.partitions.current(), size]
        captured.graph.replay()
        tokens, finite, *_ = captured.results
        return tokens[:num_sampled], finite[:num_sampled]

    def special_graph(self, size: MixedSize) -> SpecialGraph:
        """The current partition's graph of the special rows of a step of this size."""
        return self._captured[self._parts.device.partitions.current(), size].special


class StepGraphs:
    """The graphs of all captured language steps: decodes, steps with prompts, and the special rows of both. Sizes
    ascend. For the lane's thread only."""

    def __init__(
        self,
        parts: StepParts,
        slot_table: SlotTable,
        decode_sizes: tuple[int, ...],
        mixed_sizes: tuple[MixedSize, ...],
        max_model_len: int,
    ) -> None:
        self._device = parts.device
        max_rows = max(decode_sizes[-1], *(size.rows for size in mixed_sizes), 0)
        self.special = SpecialGraphs(parts.ops, parts.device, slot_table, max_rows)
        self.decodes = DecodeGraphs(parts, slot_table, self.special, decode_sizes, max_model_len)
        self.mixed = MixedGraphs(parts, slot_table, self.special, mixed_sizes, max_model_len)

    def prepare(self) -> None:
        """Allocates the inputs of the steps' graphs (those of special rows: at the first capture) and drops sizes that
        cannot be captured. Call it before `capture_order` and the first capture."""
        self.decodes.prepare()
        self.mixed.prepare()

    @property
    def _order(self) -> list[int | MixedSize]:
        """Sizes in capture order: steps with prompts, then decodes, each from the largest down."""
        return [*reversed(self.mixed.sizes), *reversed(self.decodes.sizes)]

    @property
    def capture_order(self) -> list[tuple[int, int]]:
        """(partition, number of the step there) of all steps to capture, in capture order: per partition steps with
        prompts first, and the largest first, whose memory the smaller ones reuse."""
        partitions = range(self._device.partitions.count)
        return [(partition, number) for partition in partitions for number in range(len(self._order))]

    def capture(self, partition: int, number: int) -> None:
        """Captures a step of `capture_order`, with the graph of its special rows. No step may be in flight."""
        size = self._order[number]
        if isinstance(size, MixedSize):
            self.mixed.capture(partition, size)
        else:
            self.decodes.capture(partition, size)

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory that the graphs, and the inputs of special rows, take."""
        return self.decodes.num_bytes + self.mixed.num_bytes + self.special.num_bytes

    @property
    def num_graphs(self) -> int:
        """Number of graphs, two per captured step: the second samples special rows (biases, penalties, masks, log
        probabilities)."""
        return 2 * (self.decodes.num_captured + self.mixed.num_captured)

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        """Rows of the decode steps captured on any partition, ascending."""
        return self.decodes.captured_sizes

    @property
    def captured_tokens(self) -> int:
        """Tokens of the largest captured step with prompts; 0: there is none."""
        return self.mixed.captured_tokens
