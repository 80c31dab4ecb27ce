"""Qwen3-VL's tower: learned positions stretched over each picture's grid, rotary positions on top, features of several
layers (DeepStack). The decoder adds the further planes; see `decoder.py`.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend.base import Activation, Segments
from hydra_engine.models.attention import PackedAttention, Rotary
from hydra_engine.models.family import Family, Renames
from hydra_engine.models.layers import LayerNorm, Linear, Weight
from hydra_engine.models.parameters import Scope
from hydra_engine.models.qwen_patches import GridVision, PatchEmbedding, PatchRotary, sizes_of
from hydra_engine.models.vision_layers import run_layer
from hydra_engine.models.vision_packing import Grid, Packing, TowerInput
from hydra_engine.models.vision_slices import Slices
from hydra_engine.specs.base import VisionSpec
from hydra_engine.specs.qwen3_vl import Qwen3VlVisionSpec

RENAMES: Renames = (
    ("model.visual.", "visual."),
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)
EPS = 1e-6  # of all norms of the tower, whatever a config says


class Qwen3VlVision(GridVision):
    """Every span is a picture or a temporal patch of a video; what it attends to is itself."""

    def __init__(self, scope: Scope, spec: VisionSpec) -> None:
        assert isinstance(spec, Qwen3VlVisionSpec)
        scope = scope.at("visual")
        embed = PatchEmbedding(scope.at("patch_embed"), spec.geometry, spec.hidden_size, spec.preprocess, bias=True)
        super().__init__(spec.geometry.merge_size, embed, PatchRotary(spec.head_dim, spec.rope_theta, scope.device))
        self._positions = StretchedPositions(scope, spec)
        self._blocks = tuple(Block(scope.at(f"blocks.{i}"), spec) for i in range(spec.num_layers))
        self._merger = Merger(scope.at("merger"), spec, norm_merged=False)
        chosen = zip(spec.deepstack_layers, spec.deepstack_mergers, strict=True)
        self._deep = {
            layer: Merger(scope.at(f"deepstack_merger_list.{index}"), spec, norm_merged=True) for layer, index in chosen
        }

    @property
    def num_slices(self) -> int:
        """Pieces of an encode: what comes before the layers, the layers, the mergers."""
        return len(self._blocks) + len(self._deep) + 2

    def _packed(self, grids: list[Grid], room: int) -> Packing | None:
        """Indices: row and column of every patch, rows and columns of its picture."""
        packing = super()._packed(grids, room)
        if packing is None:
            return None
        sides = np.array(grids, dtype=np.int64)[:, 1:].repeat(sizes_of(grids), axis=0)
        return packing._replace(indices=(*packing.indices, *sides.T))

    def __call__(self, inputs: TowerInput) -> tuple[Tensor, ...]:
        slices, (cu_seqlens,) = inputs.slices, inputs.segments
        rows, columns, heights, widths = inputs.indices
        rotary = self._rotary(rows, columns, inputs.end)
        x = self._embed(inputs.patches, slices)  # [P, C]
        x += self._positions(rows, columns, heights, widths)
        planes = []
        for index, block in enumerate(slices.between(self._blocks)):
            x = block(x, cu_seqlens, rotary, slices)
            if index in self._deep:
                slices.checkpoint()
                planes.append(slices.rows(self._deep[index], x, group=self.granule))
        return (slices.rows(self._merger, x, group=self.granule), *planes)


class StretchedPositions:
    """A square table of positions, its corners laid on a grid's corners and read between its rows and columns.

    The arithmetic is float32, rounded once. Element by element, so that a patch's bits follow from its grid alone.
    """

    def __init__(self, scope: Scope, spec: Qwen3VlVisionSpec) -> None:
        self._table = Weight(scope, "pos_embed.weight", (spec.num_positions, spec.hidden_size))
        self._side = spec.position_side

    def __call__(self, rows: Tensor, columns: Tensor, heights: Tensor, widths: Tensor) -> Tensor:
        """[P, C]; each [P]: the place of a patch in its picture, and how many rows and columns that has."""
        above, below, down = self._taps(rows, heights)
        left, right, across = self._taps(columns, widths)
        above, below = above * self._side, below * self._side
        at_left = self._between(above + left, below + left, down)
        at_right = self._between(above + right, below + right, down)
        return at_left.mul_(1 - across).add_(at_right.mul_(across)).to(self._table.tensor.dtype)

    def _between(self, first: Tensor, second: Tensor, share: Tensor) -> Tensor:
        """[P, C] float32: of two entries of the table each, given the share of the second."""
        table = self._table.tensor
        return table[first].float().mul_(1 - share).add_(table[second].float().mul_(share))

    def _taps(self, places: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For places on an axis of so many: the two neighbours in the table and, [P, 1], the share of the second."""
        spots = places.to(torch.float32) * (self._side - 1) / (counts - 1).clamp(min=1)
        first = spots.floor()
        index = first.to(torch.int64)
        return index, (index + 1).clamp(max=self._side - 1), (spots - first)[:, None]


class Block:
    def __init__(self, scope: Scope, spec: Qwen3VlVisionSpec) -> None:
        size = spec.hidden_size
        self._norm1 = LayerNorm(scope.at("norm1"), size, EPS)
        self._attention = PackedAttention(scope.at("attn"), size, spec.num_heads, qkv=("qkv",), out="proj")
        self._norm2 = LayerNorm(scope.at("norm2"), size, EPS)
        self._fc1 = Linear(scope, {"mlp.linear_fc1": spec.intermediate_size}, size, bias=True)
        self._fc2 = Linear(scope, {"mlp.linear_fc2": size}, spec.intermediate_size, bias=True)
        self._act = cast(Activation, spec.hidden_act)

    def __call__(self, x: Tensor, cu_seqlens: Segments, rotary: Rotary, slices: Slices) -> Tensor:
        return run_layer(x, self._norm1, self._attention, self._add_mlp, cu_seqlens, rotary, slices)

    def _add_mlp(self, x: Tensor) -> Tensor:
        return self._fc2(self._fc1(self._norm2(x), self._act), residual=x)


class Merger:
    """The patches of one token, side by side, through two layers; the norm is of each patch, or of all of them."""

    def __init__(self, scope: Scope, spec: Qwen3VlVisionSpec, *, norm_merged: bool) -> None:
        self._width = spec.merged_size
        self._norm_merged = norm_merged
        self._norm = LayerNorm(scope.at("norm"), self._width if norm_merged else spec.hidden_size, EPS)
        self._first = Linear(scope, {"linear_fc1": self._width}, self._width, bias=True)
        self._second = Linear(scope, {"linear_fc2": spec.feature_size}, self._width, bias=True)

    def __call__(self, x: Tensor) -> Tensor:
        """[P, C], the patches of a token behind one another -> [P / merged, C of the decoder]"""
        merged = self._norm(x.view(-1, self._width)) if self._norm_merged else self._norm(x).view(-1, self._width)
        return self._second(self._first(merged, "gelu"))


QWEN3_VL = Family(Qwen3VlVision, vision_names=("visual.",), renames=RENAMES)
