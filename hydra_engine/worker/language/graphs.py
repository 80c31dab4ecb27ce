"""Steps of decodes alone, captured for some batch sizes and replayed: from each sequence slot's last token to its next.

A replay takes its inputs at fixed addresses: one send and two copies bring a step's there. A step of fewer rows than
its graph is padded with rows that leave nothing behind: KV slot -1, a context of 1, a sequence slot of their own, and a
recurrent state that begins and is not kept. Special rows are drawn once more by a graph of their own behind the step's,
from the same logits. Does not know which steps may be replayed, nor requests.
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

from hydra_engine.backend.base import Refresh, SamplingTensors, StateRows, States
from hydra_engine.backend.device import Graph
from hydra_engine.core.plans import BlockIds, Int64s
from hydra_engine.models.inputs import LanguageInput
from hydra_engine.worker.language.batches import StepRows
from hydra_engine.worker.language.device_slot_table import DeviceSlotTable, SamplingArrays
from hydra_engine.worker.language.special_graphs import SpecialGraph, SpecialGraphs
from hydra_engine.worker.language.step import StepParts

logger = logging.getLogger(__name__)

_SMALL = (1, 2, 4)
_STEP = 8

_Column = TypeVar("_Column")


def default_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Ascending: 8 apart, and from 128 on an eighth of a power of two, so that a step is padded by few rows. Up to 180
    rows or so those cost nothing, as products wait for their weights; a graph costs its part of a start, and memory."""
    sizes, size = [*_SMALL], _STEP
    while size < max_num_seqs:
        sizes.append(size)
        size += max(_STEP, (1 << size.bit_length() - 1) // 8)
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


class _Columns(NamedTuple, Generic[_Column]):
    """A step's inputs, [B] each. All of them lie in one piece of `_WORDS` times B words of 8 bytes."""

    token_ids: _Column  # int64
    seq_slots: _Column
    positions: _Column
    slots: _Column
    state_starts: _Column  # these three as those of `StateRows`
    state_reads: _Column
    state_writes: _Column
    num_context: _Column  # int32
    top_k: _Column
    temperatures: _Column  # float32
    top_p: _Column
    min_p: _Column
    numbers: _Column


_LONG, _SHORT = 7, 6  # columns of 8 and of 4 bytes
_WORDS = _LONG + _SHORT // 2
_NO_TABLES = np.zeros((0, 1), dtype=np.int32)


def _columns(packed: Any, size: int, int32: Any, float32: Any) -> _Columns[Any]:
    """Of an array or a tensor of int64, [_WORDS * size], which takes its own library's dtypes."""
    long, short = packed[: _LONG * size].reshape(_LONG, size), packed[_LONG * size :].view(int32).reshape(_SHORT, size)
    return _Columns(*long, *short[:2], *short[2:].view(float32))


def _sampling(columns: _Columns[Tensor]) -> SamplingTensors:
    return SamplingTensors(columns.temperatures, columns.top_k, columns.top_p, columns.min_p, columns.numbers)


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Graph
    results: list[Tensor]  # (tokens, finite) of the run that the graph repeats
    refresh: Refresh | None  # of its attention's plan
    special: SpecialGraph


class DecodeGraphs:
    """`sizes` ascend. `capture` and `replay` belong to the lane's thread, which is in inference mode."""

    def __init__(
        self,
        parts: StepParts,
        slot_table: DeviceSlotTable,
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
        self._captured: dict[tuple[int, int], _Captured] = {}  # by partition and size
        self._blanks: dict[int, Int64s] = {}
        self._refused = False  # a plan could not be made for what was captured

    # ---- capture

    def prepare(self) -> None:
        """Before the first capture: makes what graphs read and write, and finds out whether the ops plan without
        contents."""
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
        return len(self._captured)

    @property
    def captured_sizes(self) -> tuple[int, ...]:
        return tuple(sorted({size for _, size in self._captured}))

    def capture(self, partition: int, size: int) -> None:
        """When no step is in flight."""
        parts = self._parts
        with torch.inference_mode(), parts.device.partitions.at(partition):
            packed, blank = self._packed[: _WORDS * size], self._blank(size)
            packed.copy_(parts.device.send((blank,))[0])
            columns, inputs = self._inputs(packed, size)
            refresh = inputs.attention.refresh
            if refresh is not None:
                refresh(_columns(blank, size, np.int32, np.float32).num_context, _NO_TABLES)
            results: list[Tensor] = []
            graph = parts.device.capture(partial(self._launch, inputs, columns, results))
            special = self._special.capture(size, columns.seq_slots, _sampling(columns), results)
        self.num_bytes += graph.num_bytes
        self._captured[partition, size] = _Captured(graph, results, refresh, special)

    def _inputs(self, packed: Tensor, size: int) -> tuple[_Columns[Tensor], LanguageInput]:
        columns: _Columns[Tensor] = _columns(packed, size, torch.int32, torch.float32)
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

    def _launch(self, inputs: LanguageInput, columns: _Columns[Tensor], results: list[Tensor]) -> None:
        slot_table, parts = self._slot_table, self._parts
        token_ids = slot_table.resolve(columns.token_ids, columns.seq_slots)
        logits = parts.model.forward(replace(inputs, token_ids=token_ids), parts.kv_cache, None)
        results[:] = *parts.ops.sample(logits, _sampling(columns)), logits
        slot_table.write(columns.seq_slots, results[0])

    @cached_property
    def _packed(self) -> Tensor:
        return torch.zeros(_WORDS * self.sizes[-1], dtype=torch.int64, device=self._parts.device.torch_device)

    @cached_property
    def _tables(self) -> Tensor:
        """Of block 0 where nothing was copied yet: padded rows read it."""
        shape = (self.sizes[-1], self._width)
        return torch.zeros(shape, dtype=torch.int32, device=self._parts.device.torch_device)

    def _blank(self, size: int) -> Int64s:
        """Padded rows alone."""
        if size not in self._blanks:
            packed = np.zeros(_WORDS * size, dtype=np.int64)
            columns = _columns(packed, size, np.int32, np.float32)
            columns.seq_slots[:], columns.slots[:], columns.num_context[:] = self._slot_table.padding, -1, 1
            columns.state_writes[:] = -1
            self._blanks[size] = packed
        return self._blanks[size].copy()

    # ---- replay

    def fits(self, rows: StepRows) -> bool:
        """Whether there is a graph for this step of decodes."""
        count = len(rows.block_tables)
        if self._refused or not self._captured or count > self.sizes[-1]:
            return False
        partition = self._parts.device.partitions.current()
        return rows.position_end <= self._max_model_len and (partition, self._size(count)) in self._captured

    def replay(
        self, rows: StepRows, seq_slots: Int64s, sampling: SamplingArrays, states: StateRows | None = None
    ) -> tuple[Tensor, Tensor]:
        """(tokens, finite) of a step that fits, until the next replay. The slots have been written, and the `states`
        of a model that keeps some. What raises has launched nothing that matters; after a ValueError no step fits any
        more."""
        # Columns behind that are of contexts longer than any row's.
        given_tables = rows.block_tables[:, : self._width]
        count, width = given_tables.shape
        device, size = self._parts.device, self._size(count)
        packed = self._blank(size)
        columns = _columns(packed, size, np.int32, np.float32)
        positions = rows.positions if rows.positions.ndim == 1 else rows.positions[0]  # alike on all axes
        state_columns: tuple[Any, ...] = (0, 0, -1)
        if states is not None:
            state_columns = states.starts.numpy(), states.reads.numpy(), states.writes.numpy()
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
        """Of a step that fits."""
        return self._captured[self._parts.device.partitions.current(), self._size(len(rows.block_tables))].special

    def _refresh(self, refresh: Refresh, num_context: BlockIds, tables: BlockIds) -> None:
        try:
            refresh(num_context, tables)
        except ValueError:
            # Steps in flight may still replay what was captured, so it is kept.
            self._refused = True
            raise

    def _size(self, count: int) -> int:
        return self.sizes[bisect_left(self.sizes, count)]
