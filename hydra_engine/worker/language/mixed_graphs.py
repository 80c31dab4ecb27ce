"""Steps of decodes beside prompts, captured for some numbers of tokens and rows: up to about a thousand tokens of a
model of 7B they take less time to compute than to launch.

A bucket has room for so many tokens and so many rows of a token or more. Rows behind a step's last one have no tokens;
tokens behind them write no KV, and what they compute nobody reads. Of a number of tokens there are two or three numbers
of rows: with few, the contexts of few decodes get splits enough for the device, and few logits are computed. Attention
reads which tokens are whose from tensors (`Ops.plan_mixed`). Where there is an image cache, every token may take a
feature: those that take none have slot -1 there. Left to launches op by op: prompts that are scored, larger steps, and
models that keep recurrent states, whose tiles are planned from contents. Does not know requests.
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

from hydra_engine.backend.base import MixedRows, SamplingTensors
from hydra_engine.backend.device import Graph
from hydra_engine.core.plans import Int64s, LanguagePlan
from hydra_engine.models.inputs import LanguageInput
from hydra_engine.worker.language.batches import StepRows, image_merges
from hydra_engine.worker.language.device_slot_table import DeviceSlotTable, SamplingArrays
from hydra_engine.worker.language.special_graphs import SpecialGraph, SpecialGraphs
from hydra_engine.worker.language.step import StepParts

logger = logging.getLogger(__name__)

# Products are computed in tiles of so many tokens: padding inside of one costs nothing. A bucket for each number of
# tiles, rather than for 512, 1024, 1536 and 2048 tokens, because the last three are bound by arithmetic: on an H200 a
# tile of a model of 7B takes 2.6 ms, so 1025 tokens would take 33 ms as 1536, and 23 launch by launch, which the
# processor does in 20. Fifteen numbers of tokens instead of six cost some two seconds at start and little memory, for
# all of them compute in that of the largest.
_TILE = 128
MAX_TOKENS = 2048  # from about there on launches are hidden behind what they compute, for models of 3B as well
FEW_TOKENS = 2 * _TILE  # of an instance that only decodes, where a prompt is what a preemption has left
_TOKENS = (16, 32, 64, *range(_TILE, MAX_TOKENS + 1, _TILE))
_ROWS = (8, 32)  # besides as many as may run

# A prompt may have a tile of queries that is not full, and programs are launched for as many tiles, one for each head
# of keys and values. Those without a tile end within 2 us, on 264 places of an H200: for 32 prompts with 32 heads 7 us
# a layer, a hundredth of what 1024 tokens take. So steps of more than 32 rows, most of which decode, have fewer.
_FEWEST_CHUNKS, _TOKENS_PER_CHUNK = 16, 32

_Column = TypeVar("_Column")


class MixedSize(NamedTuple):
    tokens: int
    rows: int

    @property
    def chunks(self) -> int:
        """Prompts that a step may have."""
        if self.rows <= _ROWS[-1]:
            return self.rows
        return min(self.rows, max(_FEWEST_CHUNKS, self.tokens // _TOKENS_PER_CHUNK))


def mixed_sizes(token_budget: int, max_num_seqs: int, max_tokens: int = MAX_TOKENS) -> tuple[MixedSize, ...]:
    """Ascending, of at most `max_tokens`. The largest number of rows of each is that of steps of one token a row, or
    what may run at all."""
    sizes: list[MixedSize] = []
    for tokens in _TOKENS[: bisect_left(_TOKENS, token_budget) + 1]:
        if tokens <= max_tokens:
            counts = {min(rows, tokens, max_num_seqs) for rows in (*_ROWS, max_num_seqs)}
            sizes += [MixedSize(tokens, rows) for rows in sorted(counts)]
    return tuple(sizes)


class _Columns(NamedTuple, Generic[_Column]):
    """A step's inputs, which lie behind each other in one piece of words of 8 bytes."""

    token_ids: _Column  # [T] int64
    positions: _Column  # [axes * T]
    slots: _Column  # [T]
    image_slots: _Column  # [T], or [0] without an image cache
    seq_slots: _Column  # [B] of the rows that sample, as what follows
    logit_rows: _Column
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
        tensors: Any = (self.temperatures, self.top_k, self.top_p, self.min_p, self.numbers)
        return SamplingTensors(*tensors)


class _Layout(NamedTuple):
    """What a token has."""

    axes: int  # of positions
    features: int  # 1 where it may take a picture's, else 0

    def counts(self, size: MixedSize) -> tuple[list[int], list[int], list[int]]:
        """Lengths of the columns of int64, int32 and float32."""
        tokens, rows = size
        long = [tokens, self.axes * tokens, tokens, self.features * tokens, rows, rows]
        return long, [rows + 1, rows + 1, rows, rows, rows], [rows] * 4

    def num_words(self, size: MixedSize) -> int:
        long, *short = self.counts(size)
        return sum(long) + sum(-(-count // 2) for counts in short for count in counts)


def _columns(packed: Any, size: MixedSize, layout: _Layout, types: tuple[Any, Any, Any]) -> _Columns[Any]:
    """Of an array or a tensor of int64, which takes its own library's `types` (int64, int32, float32)."""
    columns, begin = [], 0
    for dtype, width, counts in zip(types, (1, 2, 2), layout.counts(size), strict=True):
        for count in counts:
            end = begin + -(-count // width)
            columns.append(packed[begin:end].view(dtype)[:count])
            begin = end
    return _Columns(*columns)


_ARRAYS, _TENSORS = (np.int64, np.int32, np.float32), (torch.int64, torch.int32, torch.float32)


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Graph
    results: list[Tensor]  # (tokens, finite) of the run that the graph repeats
    special: SpecialGraph


class MixedGraphs:
    """`sizes` ascend. `capture` and `replay` belong to the lane's thread, which is in inference mode."""

    def __init__(
        self,
        parts: StepParts,
        slot_table: DeviceSlotTable,
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
        self._layout = _Layout(3 if parts.multimodal_rope else 1, 0 if parts.image_cache is None else 1)
        self._width = -(-max_model_len // parts.kv_cache.block_size)
        self._captured: dict[tuple[int, MixedSize], _Captured] = {}  # by partition

    # ---- capture

    def prepare(self) -> None:
        """Before the first capture: makes what graphs read, and finds out whether the ops plan without contents."""
        if not self.sizes:
            return
        reason = "recurrent states are planned from contents" if self._parts.states is not None else ""
        with torch.inference_mode():
            try:
                least = self.sizes[0]
                self._parts.ops.plan_mixed(self._rows(self._of(least), least), least.tokens, least.chunks)
            except ValueError as error:
                reason = str(error)
        if reason:
            self.note = f"steps with prompts and decodes are launched op by op: {reason}"
            logger.info("%s", self.note)
            self.sizes = ()

    def capture(self, partition: int, size: MixedSize) -> None:
        """When no step is in flight."""
        parts = self._parts
        with torch.inference_mode(), parts.device.partitions.at(partition):
            blank = self._blank(size)
            self._packed[: len(blank)].copy_(parts.device.send((blank,))[0])
            columns = self._of(size)
            results: list[Tensor] = []
            graph = parts.device.capture(partial(self._launch, self._inputs(columns, size), columns, results))
            special = self._special.capture(size.rows, columns.seq_slots, columns.sampling, results)
        self.num_bytes += graph.num_bytes
        self._captured[partition, size] = _Captured(graph, results, special)

    def _inputs(self, columns: _Columns[Tensor], size: MixedSize) -> LanguageInput:
        positions = columns.positions.view(3, -1) if self._layout.axes == 3 else columns.positions
        return LanguageInput(
            token_ids=columns.token_ids,
            positions=positions,
            slots=columns.slots,
            attention=self._parts.ops.plan_mixed(self._rows(columns, size), size.tokens, size.chunks),
            logit_rows=columns.logit_rows,
            position_end=self._max_model_len,
            image_rows=self._every_token[: size.tokens] if self._layout.features else None,
            image_slots=columns.image_slots if self._layout.features else None,
        )

    def _launch(self, inputs: LanguageInput, columns: _Columns[Tensor], results: list[Tensor]) -> None:
        """Decodes come first, in rows, in rows that sample and in tokens: the first tokens' slots are theirs."""
        slot_table, parts, num_rows = self._slot_table, self._parts, len(columns.seq_slots)
        head, rest = columns.token_ids[:num_rows], columns.token_ids[num_rows:]
        token_ids = torch.cat((slot_table.resolve(head, columns.seq_slots), rest))
        logits = parts.model.forward(replace(inputs, token_ids=token_ids), parts.kv_cache, parts.image_cache)
        results[:] = *parts.ops.sample(logits, columns.sampling), logits
        slot_table.write(columns.seq_slots, results[0])

    def _rows(self, columns: _Columns[Tensor], size: MixedSize) -> MixedRows:
        tables = self._tables[: size.rows]
        return MixedRows(columns.cu_q, columns.rest_cu_q, columns.num_context, columns.decode_context, tables)

    def _of(self, size: MixedSize) -> _Columns[Tensor]:
        columns: _Columns[Tensor] = _columns(self._packed, size, self._layout, _TENSORS)
        return columns

    @cached_property
    def _packed(self) -> Tensor:
        words = self._layout.num_words(self.sizes[-1])
        return torch.zeros(words, dtype=torch.int64, device=self._parts.device.torch_device)

    @cached_property
    def _tables(self) -> Tensor:
        shape = (self.sizes[-1].rows, self._width)
        return torch.zeros(shape, dtype=torch.int32, device=self._parts.device.torch_device)

    @cached_property
    def _every_token(self) -> Tensor:
        return torch.arange(self.sizes[-1].tokens, device=self._parts.device.torch_device)

    def _blank(self, size: MixedSize) -> Int64s:
        """Without a row that has tokens."""
        packed = np.zeros(self._layout.num_words(size), dtype=np.int64)
        columns = _columns(packed, size, self._layout, _ARRAYS)
        columns.slots[:], columns.image_slots[:], columns.seq_slots[:] = -1, -1, self._slot_table.padding
        return packed

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    @property
    def captured_tokens(self) -> int:
        """Tokens of the largest; 0: there is none."""
        return max((size.tokens for _, size in self._captured), default=0)

    # ---- replay

    def size_of(self, plan: LanguagePlan, rows: StepRows) -> MixedSize | None:
        """The size of this step's graph; None: no graph takes the step, or only with more than a tile of padding."""
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
        self, size: MixedSize, plan: LanguagePlan, rows: StepRows, seq_slots: Int64s, sampling: SamplingArrays
    ) -> tuple[Tensor, Tensor]:
        """(tokens, finite) of the rows that sample, whose slots and arrays are given, until the next replay. The slots
        have been written. What raises has launched nothing that matters."""
        device, num_decodes, num_rows = self._parts.device, len(plan.decodes), plan.num_rows
        num_tokens, num_sampled = len(rows.token_ids), len(seq_slots)
        packed = self._blank(size)
        columns = _columns(packed, size, self._layout, _ARRAYS)
        columns.token_ids[:num_tokens], columns.slots[:num_tokens] = rows.token_ids, rows.slots
        columns.positions.reshape(self._layout.axes, -1)[:, :num_tokens] = rows.positions
        if self._parts.image_cache is not None:
            for targets, sources in image_merges(plan, rows.cu_q, self._parts.image_cache.block_size):
                columns.image_slots[targets] = sources
        columns.seq_slots[:num_sampled], columns.logit_rows[:num_sampled] = seq_slots, rows.logit_rows
        columns.cu_q[: num_rows + 1], columns.cu_q[num_rows + 1 :] = rows.cu_q, num_tokens
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
        return self._captured[self._parts.device.partitions.current(), size].special
