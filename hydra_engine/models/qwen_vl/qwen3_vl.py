"""Qwen3-VL's tower: learned positions stretched over each picture's grid, rotary positions on top, features of several
layers (DeepStack). The decoder adds the further planes; see `decoder.py`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hydra_engine.models.layers.basic import LayerNorm, Mlp, Weight
from hydra_engine.models.layers.vision import PatchMerger
from hydra_engine.models.layers.vision_packing import Grid, Packing, TowerInput
from hydra_engine.models.loading.parameters import Scope
from hydra_engine.models.qwen_vl.patches import EPS, LAYER, GridVision, sizes_of
from hydra_engine.models.qwen_vl.qwen3_vl_spec import Qwen3VlVisionSpec

_LAYER = LAYER._replace(mlp=("mlp.linear_fc1", "mlp.linear_fc2"))


class Qwen3VlVision(GridVision):
    """Every span is a picture or a temporal patch of a video; what it attends to is itself."""

    renames = (
        ("model.visual.", "visual."),
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
    )

    def __init__(self, scope: Scope, spec: Qwen3VlVisionSpec) -> None:
        scope = scope.at("visual")
        super().__init__(scope, spec, names=_LAYER, bias=True)
        self._positions = StretchedPositions(scope, spec)
        self._merger = _merger(scope.at("merger"), spec, norm_merged=False)
        chosen = zip(spec.deepstack_layers, spec.deepstack_mergers, strict=True)
        self._deep = {
            layer: _merger(scope.at(f"deepstack_merger_list.{index}"), spec, norm_merged=True)
            for layer, index in chosen
        }
        self.num_slices += len(self._deep)

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
        x = slices.rows(self._embed, inputs.patches)  # [P, C]
        x += self._positions(rows, columns, heights, widths)
        planes = []
        for index, block in enumerate(slices.between(self._blocks)):
            x = block(x, cu_seqlens, slices, rotary)
            if index in self._deep:
                slices.checkpoint()
                planes.append(slices.rows(self._deep[index], x, group=self.granule))
        return (slices.rows(self._merger, x, group=self.granule), *planes)


class StretchedPositions:
    """A square table of positions, its corners laid on a grid's corners and read between its rows and columns.

    The arithmetic is float32, rounded once. Element by element, so that a patch's bits follow from its grid alone.
    """

    def __init__(self, scope: Scope, spec: Qwen3VlVisionSpec) -> None:
        self._table = Weight(scope, "pos_embed.weight", (spec.num_positions, spec.tower.hidden_size))
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


def _merger(scope: Scope, spec: Qwen3VlVisionSpec, *, norm_merged: bool) -> PatchMerger:
    width = spec.merged_size
    norm = LayerNorm(scope.at("norm"), width if norm_merged else spec.tower.hidden_size, EPS)
    mlp = Mlp(scope, ("linear_fc1", "linear_fc2"), width, width, spec.feature_size, "gelu")
    return PatchMerger(norm, mlp, width, norm_merged=norm_merged)
