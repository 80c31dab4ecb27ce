"""A slot table whose last tokens lie on the device, where a step reads them before the host has.

A row that takes its token from there has -1 in what is sent. Padded rows have a slot of their own, behind all others.
Does not know models, nor how a token is chosen.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_engine.core.plans import DecodeRows, Ints
from hydra_engine.worker.language.device_sampling import SlotSampling
from hydra_engine.worker.language.slot_table import SlotTable
from hydra_engine.worker.ports import WorkerRequest


class DeviceSlotTable(SlotTable):
    """Rows on the fast path are those that the device samples. `put` is for the others, sampled on the host."""

    def __init__(self, num_seq_slots: int, device: torch.device) -> None:
        super().__init__(num_seq_slots)
        self.sampling = SlotSampling(num_seq_slots)
        self.padding = num_seq_slots  # the slot of padded rows
        self._device = device
        # By slot: a token of its present request is on the device.
        self._filled: npt.NDArray[np.bool_] = np.zeros(num_seq_slots, dtype=np.bool_)

    @cached_property
    def last_tokens(self) -> Tensor:
        """[num_seq_slots + 1] int64, at one address. Made by the lane, for what others launch has no order here."""
        return torch.zeros(self.padding + 1, dtype=torch.int64, device=self._device)

    def _assign(self, seq_slot: int, record: WorkerRequest) -> None:
        super()._assign(seq_slot, record)
        self.fast_path_from[seq_slot] = record.sampling_state.device_path_from
        self.sampling.take(seq_slot, record.sampling_state)
        if self.since[seq_slot] == self.step:
            self._filled[seq_slot] = False

    def tokens(self, decodes: DecodeRows) -> Ints:
        """[B]: the rows' tokens, -1 where `resolve` finds them."""
        self.check_owners(decodes)
        known = self._filled[decodes.seq_slots] | (decodes.token_ids >= 0)
        assert known.all(), "a decode goes on from a token that nobody has sampled"
        return decodes.token_ids

    def resolve(self, token_ids: Tensor, seq_slots: Tensor) -> Tensor:
        """[B] token ids, -1 replaced by the slot's last token; both on the device."""
        return torch.where(token_ids < 0, self.last_tokens.index_select(0, seq_slots), token_ids)

    def write(self, seq_slots: Tensor, token_ids: Tensor) -> None:
        """The rows' last tokens from now on; both on the device."""
        self.last_tokens.index_copy_(0, seq_slots, token_ids)

    def written(self, seq_slots: Ints) -> None:
        """These slots have been written for their present requests."""
        self._filled[seq_slots] = True
