"""What follows a captured step whose rows are special (special.py): a graph of its own draws them again, from the
logits that the step's graph has left, and counts their tokens. One behind each captured step; inputs lie at addresses
that all of them share. Does not know which steps are captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hydra_engine.backend.base import Ops, SamplingTensors
from hydra_engine.backend.device import Device, Graph
from hydra_engine.worker.language.device_slot_table import DeviceSlotTable
from hydra_engine.worker.language.special import (
    MAX_BIASES,
    WORDS,
    SampledRows,
    SpecialArrays,
    SpecialTensors,
    sample_special,
)


@dataclass(frozen=True, slots=True)
class SpecialGraph:
    """`size` rows, of which a step has the first few."""

    graph: Graph
    size: int
    vocabulary: int
    results: list[Tensor]  # as `SampledRows`, of the run that the graph repeats


class _Inputs(NamedTuple):
    """For the largest step."""

    packed: Tensor  # [WORDS * B] int64
    bias_ids: Tensor  # [MAX_BIASES] int32
    bias_values: Tensor  # [MAX_BIASES] float64
    masks: Tensor  # [B, ceil(V / 32)] int32


class SpecialGraphs:
    """Steps of at most `max_rows` that sample. For the lane's thread, in inference mode."""

    def __init__(self, ops: Ops, device: Device, slot_table: DeviceSlotTable, max_rows: int) -> None:
        self.num_bytes = 0  # of device memory that graphs took, and what they read
        self._ops = ops
        self._device = device
        self._slot_table = slot_table
        self._max_rows = max_rows
        self._inputs: _Inputs | None = None

    def capture(
        self, size: int, seq_slots: Tensor, sampling: SamplingTensors, step_results: list[Tensor]
    ) -> SpecialGraph:
        """Behind the capture of a step of `size` rows [B] that sample, whose launch leaves its logits at the end of
        `step_results`. They are taken out there: the memory is still the graphs', and whoever is captured next computes
        in it, but replays no earlier."""
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
        slot_table, logits = self._slot_table, step_results[-1]
        vocabulary = logits.shape[1]
        found = sample_special(self._ops, logits, sampling, special, slot_table.counts(vocabulary))
        results[:] = found
        slot_table.write(seq_slots, found.tokens)
        slot_table.count(seq_slots, found.tokens, special.columns.increments, vocabulary)

    def _tensors(self, size: int, vocabulary: int) -> SpecialTensors:
        """Whose rows ask for nothing."""
        if self._inputs is None:
            zeros = partial(torch.zeros, device=self._device.torch_device)
            self._inputs = inputs = _Inputs(
                zeros(WORDS * self._max_rows, dtype=torch.int64),
                zeros(MAX_BIASES, dtype=torch.int32),
                zeros(MAX_BIASES, dtype=torch.float64),
                zeros((self._max_rows, -(-vocabulary // 32)), dtype=torch.int32),
            )
            self.num_bytes += sum(tensor.nbytes for tensor in (*inputs, self._slot_table.counts(vocabulary)))
        packed, *lists = self._inputs
        packed[: WORDS * size].copy_(self._device.send((SpecialArrays.blank(size, vocabulary).packed,))[0])
        return SpecialTensors.of(packed[: WORDS * size], size, *lists)

    def replay(self, captured: SpecialGraph, special: SpecialArrays, count: int) -> SampledRows:
        """Behind the replay of its step, of which `count` rows sample; until the next one. `special` is of as many rows
        as the graph has, and names at most MAX_BIASES biases."""
        assert self._inputs is not None, "nothing was captured"
        given = special.packed, special.bias_ids, special.bias_values, special.masks
        for target, sent in zip(self._inputs, self._device.send(given), strict=True):
            if sent.shape[0]:
                target[: sent.shape[0]].copy_(sent)
        captured.graph.replay()
        return SampledRows(*(result[:count] for result in captured.results))
