"""Parts of MiniCPM-V 4.6: patches of pictures of any size, and mergers of 2 x 2 neighbours inside and behind the tower.

The patches of an item stand in merge order from the beginning: what will merge is neighbours on every level, so every
merge is a view. Does not know prompts, slices or caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend.base import PackedPlan, Segments
from hydra_engine.models.layers.attention import PackedAttention
from hydra_engine.models.layers.basic import LayerNorm, Mlp, Weight
from hydra_engine.models.layers.pixels import PatchProjection
from hydra_engine.models.layers.vision import PatchMerger
from hydra_engine.models.layers.vision_packing import Grid, Ints
from hydra_engine.models.layers.vision_slices import Slices
from hydra_engine.models.loading.parameters import Scope
from hydra_engine.models.minicpmv.spec import MiniCpmVisionSpec

MERGER_EPS = 1e-6  # of the norms behind the tower, whatever the config says of the tower's


class PackedPatches:
    """Projected patches, plus the learned positions nearest to their places."""

    def __init__(self, scope: Scope, spec: MiniCpmVisionSpec) -> None:
        size, patch = spec.hidden_size, spec.patch_size
        self._patch, self._rounds, self._side = patch, spec.all_rounds, spec.num_positions
        self._positions = Weight(scope, "position_embedding.weight", (spec.num_positions**2, size))
        self._project = PatchProjection(scope.at("patch_embedding"), size, (patch, patch), spec.preprocess)
        self.num_values = self._project.num_values

    def __call__(self, patches: Tensor, places: Tensor, slices: Slices) -> Tensor:
        """What `cut` gives, and `places` -> [P, C]"""
        return slices.rows(self._project, patches, self._positions.tensor.index_select(0, places))

    def places(self, grids: Sequence[Grid]) -> Ints:
        """[P]: rows of the table of positions."""
        none = np.zeros(0, dtype=np.int64)
        return np.concatenate([none, *(self._places(rows, columns).numpy() for _, rows, columns in grids)])

    def cut(self, pixels: Tensor) -> Tensor:
        """uint8 [1, height, width, 3] -> uint8 [patches, patch * patch * 3]"""
        patch = self._patch
        whole = pixels[0].unflatten(0, (-1, patch)).unflatten(2, (-1, patch)).transpose(1, 2)
        return in_merge_order(whole, self._rounds).view(-1, self.num_values)

    def _places(self, rows: int, columns: int) -> Tensor:
        """[patches] int64: rows of the table of positions."""
        row, column = nearest_positions(rows, self._side), nearest_positions(columns, self._side)
        return in_merge_order(row[:, None] * self._side + column, self._rounds)


def in_merge_order(grid: Tensor, rounds: int) -> Tensor:
    """[rows, columns, ...] -> [rows * columns, ...]: row by row of blocks of 2 ** rounds, and every block cut into
    four quarters, left before right and upper before lower, down to single patches."""
    twos = (2,) * rounds
    levels = grid.unflatten(1, (-1, *twos)).unflatten(0, (-1, *twos))
    pairs = [axis for level in range(rounds + 1) for axis in (level, rounds + 1 + level)]
    rest = range(2 * (rounds + 1), levels.dim())
    return levels.permute(*pairs, *rest).reshape(-1, *grid.shape[2:])


@lru_cache(maxsize=512)
def nearest_positions(length: int, num_positions: int) -> Tensor:
    """[length] int64: which of a side's positions each of `length` patches takes. Fractions of the side are compared
    in float32 as transformers does, because at ties the last bit decides."""
    bounds = torch.arange(1 / num_positions, 1.0, 1 / num_positions)
    return torch.bucketize(torch.arange(length) / length, bounds, right=True)


class WindowMerger:
    """Attention within windows of 2 x 2 rows, then every window becomes one: its mean and what an MLP makes of it."""

    def __init__(self, scope: Scope, spec: MiniCpmVisionSpec) -> None:
        size, inner = spec.hidden_size, 4 * spec.intermediate_size
        self._size = size
        self._norm1 = LayerNorm(scope.at("layer_norm1"), size, spec.layer_norm_eps)
        self._attention = PackedAttention(scope.at("self_attn"), size, spec.num_heads)
        self._norm2 = LayerNorm(scope.at("pre_norm"), 4 * size, spec.layer_norm_eps)
        self._mlp = Mlp(scope, ("linear_1", "linear_2"), 4 * size, inner, size, "gelu_tanh")

    def __call__(self, x: Tensor, windows: Segments) -> Tensor:
        """[P, C] -> [P / 4, C]; there may be more windows than the rows have, unless they are planned."""
        if not isinstance(windows, PackedPlan):
            windows = windows[: x.shape[0] // 4 + 1]
        x = self._attention(self._norm1(x), x, windows)
        one, two, three, four = x.view(-1, 4, self._size).float().unbind(1)
        mean = (((one + two) + three) + four).mul_(0.25).to(x.dtype)
        return self._mlp(self._norm2(x.view(-1, 4 * self._size)), residual=mean)


class Merger:
    """Four rows become one, as often as the checkpoint has MLPs; the last leads to the decoder's width."""

    def __init__(self, scope: Scope, spec: MiniCpmVisionSpec) -> None:
        widths = [spec.hidden_size] * (spec.num_rounds - 1) + [spec.feature_size]
        self._steps = tuple(
            _step(scope.at(f"mlp.{index}"), 4 * spec.hidden_size, width) for index, width in enumerate(widths)
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[M * 4 ** rounds, C] -> [M, C of the decoder]"""
        for step in self._steps:
            x = step(x)
        return x


def _step(scope: Scope, width: int, num_out: int) -> PatchMerger:
    norm = LayerNorm(scope.at("pre_norm"), width, MERGER_EPS)
    mlp = Mlp(scope, ("linear_1", "linear_2"), width, width, num_out, "gelu")
    return PatchMerger(norm, mlp, width, norm_merged=True)
