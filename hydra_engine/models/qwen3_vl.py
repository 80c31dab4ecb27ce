"""Qwen3-VL's tower: learned positions stretched over each picture's grid, rotary positions on top, features of several
layers (DeepStack). The decoder adds the further planes; see `decoder.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from hydra_engine.backend.base import Activation
from hydra_engine.models.attention import PackedAttention, Rotary
from hydra_engine.models.family import Family, Renames
from hydra_engine.models.inputs import VisionInput
from hydra_engine.models.layers import LayerNorm, Linear, Weight
from hydra_engine.models.parameters import Scope
from hydra_engine.models.qwen_patches import Grid, PatchEmbedding, PatchRotary, patch_places, segments
from hydra_engine.models.vision_layers import run_layer
from hydra_engine.models.vision_slices import Slices
from hydra_engine.specs.base import VisionSpec
from hydra_engine.specs.qwen3_vl import Qwen3VlVisionSpec

RENAMES: Renames = (
    ("model.visual.", "visual."),
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)
EPS = 1e-6  # of all norms of the tower, whatever a config says


class Qwen3VlVision:
    """Every span is a picture or a temporal patch of a video; what it attends to is itself."""

    def __init__(self, scope: Scope, spec: VisionSpec) -> None:
        assert isinstance(spec, Qwen3VlVisionSpec)
        scope = scope.at("visual")
        self._merge, self._device = spec.geometry.merge_size, scope.device
        self._embed = PatchEmbedding(
            scope.at("patch_embed"), spec.geometry, spec.hidden_size, spec.preprocess, bias=True
        )
        self._positions = StretchedPositions(scope, spec)
        self._rotary = PatchRotary(spec.head_dim, spec.rope_theta, scope.device)
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

    def __call__(self, batch: VisionInput) -> tuple[Tensor, ...]:
        slices = Slices(batch.checkpoint, batch.piece_rows)
        places = patch_places(batch.grids, self._merge, self._device)
        rotary = self._rotary(places, max(max(grid) for grid in batch.grids))
        cu_seqlens = segments(batch.grids)
        x = self._embed(batch.pixels, slices)  # [P, C]
        x += self._positions(batch.grids)
        planes = []
        for index, block in enumerate(slices.between(self._blocks)):
            x = block(x, cu_seqlens, rotary, slices)
            if index in self._deep:
                slices.checkpoint()
                planes.append(slices.rows(self._deep[index], x, group=self._merge**2))
        return (slices.rows(self._merger, x, group=self._merge**2), *planes)


class StretchedPositions:
    """A square table of positions, its corners laid on a grid's corners and read between its rows and columns.

    The arithmetic is float32, rounded once. Element by element, so that a patch's bits follow from its grid alone.
    """

    def __init__(self, scope: Scope, spec: Qwen3VlVisionSpec) -> None:
        self._table = Weight(scope, "pos_embed.weight", (spec.num_positions, spec.hidden_size))
        self._side, self._merge = spec.position_side, spec.geometry.merge_size

    def __call__(self, grids: Sequence[Grid]) -> Tensor:
        """[P, C], items one after another, in merge order"""
        known = {grid: self._stretched(grid) for grid in dict.fromkeys(grids)}
        return torch.cat([known[grid] for grid in grids])

    def _stretched(self, grid: Grid) -> Tensor:
        _, rows, columns = grid
        table = self._table.tensor[: self._side**2].view(self._side, self._side, -1)
        first, second, share = self._taps(rows, table.device)
        share = share[:, None, None]
        tall = table[first].float() * (1 - share) + table[second].float() * share  # [rows, side, C]
        first, second, share = self._taps(columns, table.device)
        share = share[:, None]
        full = (tall[:, first].mul_(1 - share)).add_(tall[:, second].mul_(share))  # [rows, columns, C], large
        blocks = full.unflatten(1, (-1, self._merge)).unflatten(0, (-1, self._merge)).transpose(1, 2)
        return blocks.reshape(rows * columns, -1).to(table.dtype)

    def _taps(self, count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """For each of `count` places on one axis: its two neighbours in the table and the share of the second."""
        places = torch.arange(count, dtype=torch.float32, device=device) * (self._side - 1) / max(count - 1, 1)
        first = places.floor()
        share = places - first
        index = first.to(torch.int64)
        return index, (index + 1).clamp(max=self._side - 1), share


class Block:
    def __init__(self, scope: Scope, spec: Qwen3VlVisionSpec) -> None:
        size = spec.hidden_size
        self._norm1 = LayerNorm(scope.at("norm1"), size, EPS)
        self._attention = PackedAttention(scope.at("attn"), size, spec.num_heads, qkv=("qkv",), out="proj")
        self._norm2 = LayerNorm(scope.at("norm2"), size, EPS)
        self._fc1 = Linear(scope, {"mlp.linear_fc1": spec.intermediate_size}, size, bias=True)
        self._fc2 = Linear(scope, {"mlp.linear_fc2": size}, spec.intermediate_size, bias=True)
        self._act = cast(Activation, spec.hidden_act)

    def __call__(self, x: Tensor, cu_seqlens: Sequence[int], rotary: Rotary, slices: Slices) -> Tensor:
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
