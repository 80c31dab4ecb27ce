"""Rotary positions: cosines and sines by position, for the rope types `default`, `linear`, `llama3` and `yarn`.

They are read from a table, so that a row's bits do not depend on its batch. Rotates nothing: the backend does.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from hydra_engine.models.specs.base import LanguageSpec

_TABLE_ROWS = 4096


class GrowingTable(ABC):
    """A table with one row per position that grows on demand. Not thread-safe: for one lane. Subclasses call `__init__`
    last, since it makes the first rows."""

    def __init__(self) -> None:
        self._rows = self._rows_from(0)
        # The first table is kept: it was made outside the lane that reads it, so a device could reuse its memory while
        # the lane still reads.
        self._reserved = [self._rows]

    @abstractmethod
    def _rows_from(self, begin: int) -> Tensor:
        """Makes a fixed number of rows from position `begin` on, so that their bits do not depend on how the table
        grew."""

    def with_rows(self, end: int) -> Tensor:
        """Returns the table with at least `end` rows. If it must grow, it is copied to a new address."""
        while end > self._rows.shape[0]:
            self._rows = torch.cat((self._rows, self._rows_from(self._rows.shape[0])))
        return self._rows

    def reserve(self, end: int) -> None:
        """Grows the table to at least `end` rows and keeps it alive when it grows again later: graphs captured with its
        address stay valid."""
        rows = self.with_rows(end)
        if not any(kept is rows for kept in self._reserved):
            self._reserved.append(rows)


class RotaryTable(GrowingTable):
    """The cosine and sine table of one decoder: [multiple of _TABLE_ROWS, D] float32, cosines in the first half of the
    columns, both multiplied by the config's `attention_factor` if there is one. Pairs beyond `rotary_dim` have angle
    0."""

    def __init__(self, spec: LanguageSpec, device: torch.device) -> None:
        self._frequencies = frequencies(spec)
        self._factor = _number(spec, "attention_factor") if "attention_factor" in spec.rope_parameters else 1.0
        self._device = device
        self._axes = None if spec.rope_sections is None else _axes(spec).to(device)  # [D/2]: axis of each pair
        self._still = (spec.head_dim - (spec.rotary_dim or spec.head_dim)) // 2  # pairs that are not rotated
        super().__init__()

    def __call__(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Returns (cos, sin), each [T, D/2] float32. `positions` is [T] int64, or [3, T] if the model has multimodal
        axes; `end` is larger than any of them."""
        table = self.with_rows(end)
        if self._axes is None:
            return angles_at(table, positions)
        rows = positions.index_select(0, self._axes).t()  # [T, D/2]
        cos_table, sin_table = table.chunk(2, dim=1)
        return cos_table.gather(0, rows), sin_table.gather(0, rows)

    def _rows_from(self, begin: int) -> Tensor:
        angles = torch.arange(begin, begin + _TABLE_ROWS, dtype=torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        still = cos.new_zeros(_TABLE_ROWS, self._still)
        return torch.cat((cos, still + 1, sin, still), dim=1).to(self._device)


def angles_at(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (cos, sin), each [T, D/2], from a table as `RotaryTable` has it, for positions [T] that are the same on
    all axes."""
    cos, sin = table.index_select(0, positions).chunk(2, dim=1)
    return cos, sin


def _axes(spec: LanguageSpec) -> Tensor:
    """Axis of `positions` that rotates each pair, [D/2] int64: 0 time, 1 row, 2 column. Sections are contiguous
    (Qwen2-VL), or interleaved, with time in the pairs that rows and columns leave (Qwen3-VL)."""
    assert spec.rope_sections is not None
    if not spec.rope_interleaved:
        return torch.repeat_interleave(torch.arange(3), torch.tensor(spec.rope_sections))
    axes = torch.zeros(sum(spec.rope_sections), dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * spec.rope_sections[axis] : 3] = axis
    return axes


def frequencies(spec: LanguageSpec) -> Tensor:
    """Inverse frequencies of the rotated pairs, [rotary_dim / 2] float32, scaled as the config's `rope_type` says, with
    the arithmetic of transformers. Raises ValueError for an unknown type."""
    dim = spec.rotary_dim or spec.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    plain = 1.0 / (spec.rope_theta**exponents)
    match spec.rope_parameters.get("rope_type", "default"):
        case "default":
            return plain
        case "linear":
            return plain / _number(spec, "factor")
        case "llama3":
            low, high = _number(spec, "low_freq_factor"), _number(spec, "high_freq_factor")
            turns = _number(spec, "original_max_position_embeddings") * plain / (2 * math.pi)
            # 0: less than `low` turns in the original context, slowed down by the factor; 1: more than `high`, kept.
            share = ((turns - low) / (high - low)).clamp(0, 1)
            return (1 - share) * plain / _number(spec, "factor") + share * plain
        case "yarn":
            kept = 1 - _yarn_ramp(spec)
            slowed = 1.0 / (_number(spec, "factor") * spec.rope_theta**exponents)
            return slowed * (1 - kept) + plain * kept
        case kind:
            raise ValueError(f"rope_type: expected default, linear, llama3 or yarn, got {kind!r}")


def _yarn_ramp(spec: LanguageSpec) -> Tensor:
    """YaRN's ramp over the pairs, [rotary_dim / 2] float32: 0 for pairs that turn more than beta_fast times in the
    original context, 1 for pairs that turn less than beta_slow times, linear in between. With `truncate` these limits
    are whole pairs."""
    length, base = _number(spec, "original_max_position_embeddings"), spec.rope_theta
    dim = spec.rotary_dim or spec.head_dim

    def pair(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair(_number(spec, "beta_fast")), pair(_number(spec, "beta_slow"))
    if spec.rope_parameters["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001
    return ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)


def _number(spec: LanguageSpec, name: str) -> float:
    """The number rope_parameters[name]. Raises KeyError if it is missing."""
    value = spec.rope_parameters[name]
    assert isinstance(value, int | float), name
    return value
