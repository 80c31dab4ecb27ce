"""A slot table whose last tokens lie on the device, where a step reads them before the host has, and what the device
samples with: numbers per slot, arrays per step.

A row that takes its token from the device has -1 in what is sent. Padded rows have a slot of their own, behind all
others. Rows that need more than filters and a draw are special (`SamplingState.device_path_from`, special.py).
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_engine.core.plans import DecodeRows, Int64s
from hydra_engine.worker.language.sampler import GOLDEN, MAX_NUMBER, SamplingState, seed_state
from hydra_engine.worker.language.slot_table import SlotTable
from hydra_engine.worker.language.special import SlotSpecials
from hydra_engine.worker.ports import WorkerRequest

_Floats = npt.NDArray[np.float32]
_Words = npt.NDArray[np.uint64]

_MAX_TOP_K = (1 << 31) - 1
_MIN_TEMPERATURE = float(np.finfo(np.float32).tiny)  # 0 would mean the largest logit


class SamplingArrays(NamedTuple):
    """`SamplingTensors` of backend/base.py in host memory, [B] each."""

    temperatures: _Floats
    top_k: npt.NDArray[np.int32]
    top_p: _Floats
    min_p: _Floats
    numbers: _Floats


class SlotSampling:
    """Sampling parameters by sequence slot. Rows of slots without a request get a token too, which is not used."""

    def __init__(self, num_seq_slots: int) -> None:
        self._temperatures: _Floats = np.zeros(num_seq_slots, dtype=np.float32)
        self._top_k: npt.NDArray[np.int32] = np.zeros(num_seq_slots, dtype=np.int32)
        self._top_p: _Floats = np.ones(num_seq_slots, dtype=np.float32)
        self._min_p: _Floats = np.zeros(num_seq_slots, dtype=np.float32)
        self._states: _Words = np.zeros(num_seq_slots, dtype=np.uint64)  # of the seeds' generators

    def assign(self, seq_slot: int, state: SamplingState) -> None:
        params = state.params
        self._temperatures[seq_slot] = 0.0 if params.greedy else max(params.temperature, _MIN_TEMPERATURE)
        self._top_k[seq_slot] = min(max(params.top_k, 0), _MAX_TOP_K)
        self._top_p[seq_slot] = params.top_p
        self._min_p[seq_slot] = params.min_p
        self._states[seq_slot] = seed_state(state.seed)

    def of(self, seq_slots: Int64s, num_generated: Int64s) -> SamplingArrays:
        temperatures = self._temperatures[seq_slots]
        if temperatures.any():
            numbers = draw_numbers(self._states[seq_slots], num_generated)
        else:
            numbers = np.zeros(len(seq_slots), dtype=np.float32)
        return SamplingArrays(
            temperatures, self._top_k[seq_slots], self._top_p[seq_slots], self._min_p[seq_slots], numbers
        )


def draw_numbers(states: _Words, counters: Int64s) -> _Floats:
    """Vectorised `sampler.draw_number`: one number per (seed state, counter) pair."""
    steps = (counters + 1).astype(np.uint64) * np.uint64(GOLDEN)  # modulo 2^64, as all of this
    bits = _mix64(states + steps) >> np.uint64(11)
    return np.minimum((bits * 2.0**-53).astype(np.float32), np.float32(MAX_NUMBER))


def _mix64(values: _Words) -> _Words:
    """Vectorised `sampler.mix64`."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


class DeviceSlotTable(SlotTable):
    """A slot table with the last tokens on the device. Rows on the fast path need only filters and a draw."""

    def __init__(self, num_seq_slots: int, device: torch.device) -> None:
        super().__init__(num_seq_slots)
        self.sampling = SlotSampling(num_seq_slots)
        self.specials = SlotSpecials(num_seq_slots)
        self.padding = num_seq_slots  # the slot of padded rows
        self._device = device
        self._counts: Tensor | None = None
        # By slot: a token of its present request is on the device.
        self._filled: npt.NDArray[np.bool_] = np.zeros(num_seq_slots, dtype=np.bool_)

    @cached_property
    def last_tokens(self) -> Tensor:
        """Last token of each slot, [num_seq_slots + 1] int64, at a fixed address. The lane creates it on first use, so
        that the allocation is ordered on the lane's stream."""
        return torch.zeros(self.padding + 1, dtype=torch.int64, device=self._device)

    def _assign(self, seq_slot: int, record: WorkerRequest) -> None:
        super()._assign(seq_slot, record)
        self.fast_path_from[seq_slot] = record.sampling_state.device_path_from
        self.sampling.assign(seq_slot, record.sampling_state)
        self.specials.assign(seq_slot, record.sampling_state)
        if self.since[seq_slot] == self.step:
            self._filled[seq_slot] = False

    def tokens(self, decodes: DecodeRows) -> Int64s:
        """Tokens of the rows, [B]; -1 where the token is on the device (`resolve`)."""
        self.check_owners(decodes)
        has_token = self._filled[decodes.seq_slots] | (decodes.token_ids >= 0)
        assert has_token.all(), "a decode goes on from a token that was not sampled"
        return decodes.token_ids

    def resolve(self, token_ids: Tensor, seq_slots: Tensor) -> Tensor:
        """Token ids [B] with -1 replaced by the slot's last token; all on the device."""
        return torch.where(token_ids < 0, self.last_tokens.index_select(0, seq_slots), token_ids)

    def write(self, seq_slots: Tensor, token_ids: Tensor) -> None:
        """Stores the slots' last tokens; both on the device."""
        self.last_tokens.index_copy_(0, seq_slots, token_ids)

    def written(self, seq_slots: Int64s) -> None:
        """Records that the device has a token of these slots' current requests."""
        self._filled[seq_slots] = True

    # ---- how often requests with penalties have had each token

    def counts(self, vocabulary: int) -> Tensor:
        """Token counts [num_seq_slots + 1, V] int32 as in `Adjustments`, at a fixed address. The lane creates them on
        first use. Rows of requests without penalties are meaningless."""
        if self._counts is None:
            self._counts = torch.zeros((self.padding + 1, vocabulary), dtype=torch.int32, device=self._device)
        return self._counts

    def recount(self, seq_slots: Tensor, places: Tensor, counts: Tensor, vocabulary: int) -> None:
        """Replaces the slots' counts, see `Recounts`; all on the device."""
        table = self.counts(vocabulary)
        table.index_fill_(0, seq_slots, 0)
        table.view(-1).index_copy_(0, places, counts)

    def count(self, seq_slots: Tensor, token_ids: Tensor, increments: Tensor, vocabulary: int) -> None:
        """Adds `increments` to the counts of the rows' tokens; all [B] on the device."""
        self.counts(vocabulary).view(-1).index_add_(0, seq_slots * vocabulary + token_ids, increments)
