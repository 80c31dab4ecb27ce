"""Seats whose last tokens lie on the device, where a step reads them before anyone else has.

A row that takes its token from there has -1 in what is sent; so have padded rows a seat of their own, behind all
others. Does not know models, nor how a token is chosen.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_engine.core.plans import DecodeRows, Ints
from hydra_engine.worker.device_sampling import SeatDraws
from hydra_engine.worker.ports import WorkerRequest
from hydra_engine.worker.seats import Seats


class DeviceSeats(Seats):
    """`plain` rows are those that the device samples. `put` is for the others, whose tokens the host knows first."""

    def __init__(self, num_seats: int, device: torch.device) -> None:
        super().__init__(num_seats)
        self.draws = SeatDraws(num_seats)
        self.padding = num_seats  # the seat of padded rows
        self._device = device
        self._filled: npt.NDArray[np.bool_] = np.zeros(num_seats, dtype=np.bool_)  # a token of this request is there

    @cached_property
    def last_tokens(self) -> Tensor:
        """[num_seats + 1] int64, at one address. Made by the lane, for what others launch has no order here."""
        return torch.zeros(self.padding + 1, dtype=torch.int64, device=self._device)

    def _sit(self, seat: int, record: WorkerRequest) -> None:
        super()._sit(seat, record)
        self.plain_from[seat] = record.recipe.drawn_from
        self.draws.take(seat, record.recipe)
        if self.since[seat] == self.step:
            self._filled[seat] = False

    def tokens(self, decodes: DecodeRows) -> Ints:
        """[B]: the rows' tokens, -1 where `resolve` finds them."""
        self.check_owners(decodes)
        known = self._filled[decodes.seats] | (decodes.token_ids >= 0)
        assert known.all(), "a decode goes on from a token that nobody has sampled"
        return decodes.token_ids

    def resolve(self, token_ids: Tensor, seats: Tensor) -> Tensor:
        """[B] token ids, -1 replaced by the seat's last token; both on the device."""
        return torch.where(token_ids < 0, self.last_tokens.index_select(0, seats), token_ids)

    def write(self, seats: Tensor, token_ids: Tensor) -> None:
        """The rows' last tokens from now on; both on the device."""
        self.last_tokens.index_copy_(0, seats, token_ids)

    def written(self, seats: Ints) -> None:
        """These seats have been written for their present requests."""
        self._filled[seats] = True
