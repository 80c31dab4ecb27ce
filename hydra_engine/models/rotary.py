"""Rotary positions: cosines and sines by position, for the rope types `default`, `linear` and `llama3`.

A table, because a row's bits must not depend on its batch; it grows in pieces of one size, because they must not depend
on how it grew either. Does not rotate anything: that is the backend's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hydra_engine.specs.base import LanguageSpec

_PIECE = 4096


class RotaryTable:
    """One per decoder, used by one lane."""

    def __init__(self, spec: LanguageSpec, device: torch.device) -> None:
        self._frequencies = frequencies(spec)
        self._device = device
        self._table = self._piece(0)  # [multiple of _PIECE, D]: cosines, then sines

    def __call__(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """cos, sin, each [T, D/2] float32; `end` is more than the largest of the positions."""
        while end > self._table.shape[0]:
            self._table = torch.cat((self._table, self._piece(self._table.shape[0])))
        cos, sin = self._table.index_select(0, positions).chunk(2, dim=1)
        return cos, sin

    def _piece(self, begin: int) -> Tensor:
        angles = torch.arange(begin, begin + _PIECE, dtype=torch.float32)[:, None] * self._frequencies
        return torch.cat((angles.cos(), angles.sin()), dim=1).to(self._device)


def frequencies(spec: LanguageSpec) -> Tensor:
    """[D/2] float32, with the arithmetic of transformers."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    plain = 1.0 / (spec.rope_theta**exponents)
    numbers = {name: value for name, value in spec.rope_parameters.items() if isinstance(value, int | float)}
    match spec.rope_parameters.get("rope_type", "default"):
        case "default":
            return plain
        case "linear":
            return plain / numbers["factor"]
        case "llama3":
            low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
            turns = numbers["original_max_position_embeddings"] * plain / (2 * math.pi)
            # 0: less than `low` turns in the original context, slowed down by the factor; 1: more than `high`, kept.
            share = ((turns - low) / (high - low)).clamp(0, 1)
            return (1 - share) * plain / numbers["factor"] + share * plain
        case kind:
            raise ValueError(f"rope_type: expected default, linear or llama3, got {kind!r}")
