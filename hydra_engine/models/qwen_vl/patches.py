"""Pictures of any size as rows of patches, packed: cutting, embedding, positions and segments for Qwen-VL towers.

Patches of an item stand in merge order: block by block, row by row within a block, so that the patches of one token are
neighbours. Does not know blocks of layers, windows or what a token becomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend.base import Rotary
from hydra_engine.models.inputs import VisionInput
from hydra_engine.models.layers.pixels import PatchProjection
from hydra_engine.models.layers.rotary import GrowingTable
from hydra_engine.models.layers.vision import LayerNames, LayerShape, VisionLayer
from hydra_engine.models.layers.vision_packing import Grid, Ints, Packing, bounds_of, filled, spans_in
from hydra_engine.models.loading.parameters import Scope
from hydra_engine.models.qwen_vl.tower_spec import GridVisionSpec

_PIECE = 128
EPS = 1e-6  # of all norms of the towers, whatever a config says
LAYER = LayerNames(norms=("norm1", "norm2"), attention="attn", qkv=("qkv",), out="proj")


class PatchRotary:
    """Two-dimensional rotary positions: the first half of the pairs turns by the row, the second by the column."""

    def __init__(self, head_dim: int, theta: float, device: torch.device) -> None:
        half = head_dim // 2
        self._frequencies = 1.0 / (theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half))  # [D/4]
        self._device = device
        self._table = GrowingTable(self._piece)  # [multiple of _PIECE, D/2]: cosines, then sines

    def reserve(self, end: int) -> None:
        """As `GrowingTable.reserve`."""
        self._table.reserve(end)

    def __call__(self, rows: Tensor, columns: Tensor, end: int) -> Rotary:
        """cos, sin, each [P, D/2] float32; `rows` and `columns` [P], `end` is more than the largest of them."""
        cos, sin = self._table.up_to(end).chunk(2, dim=1)
        return torch.cat((cos[rows], cos[columns]), dim=1), torch.cat((sin[rows], sin[columns]), dim=1)

    def _piece(self, begin: int) -> Tensor:
        angles = torch.arange(begin, begin + _PIECE, dtype=torch.float32)[:, None] * self._frequencies
        return torch.cat((angles.cos(), angles.sin()), dim=1).to(self._device)


def patch_places(grids: Sequence[Grid], merge: int) -> Ints:
    """[2, P]: row and column of every patch in its picture, items one after another, in merge order."""
    none = np.zeros((2, 0), dtype=np.int64)
    return np.concatenate([none, *(_merge_order(rows, columns, merge) for _, rows, columns in grids)], axis=1)


@lru_cache(maxsize=64)
def _merge_order(rows: int, columns: int, merge: int) -> Ints:
    blocks = (rows // merge, columns // merge, merge, merge)
    row = np.broadcast_to(np.arange(rows).reshape(blocks[0], 1, merge, 1), blocks)
    column = np.broadcast_to(np.arange(columns).reshape(1, blocks[1], 1, merge), blocks)
    return np.stack((row.reshape(-1), column.reshape(-1)))


def sizes_of(grids: Sequence[Grid]) -> list[int]:
    """Patches of each item, which attends to nothing but itself."""
    return [rows * columns for _, rows, columns in grids]


class GridVision:
    """What these towers have in common: `Vision` of `vlm.py` but for the call."""

    weight_names = ("visual.",)

    def __init__(self, scope: Scope, spec: GridVisionSpec, *, names: LayerNames = LAYER, bias: bool = False) -> None:
        """`bias`: of the projection of patches."""
        tower, geometry, size = spec.tower, spec.geometry, spec.tower.hidden_size
        kernel = (geometry.temporal_patch_size, geometry.patch_size, geometry.patch_size)
        self._embed = PatchProjection(scope.at("patch_embed.proj"), size, kernel, spec.preprocess, bias=bias)
        self._geometry, self._merge = geometry, geometry.merge_size
        self._rotary = PatchRotary(tower.head_dim, tower.rope_theta, scope.device)
        self.granule, self.num_values = self._merge**2, self._embed.num_values
        shape = LayerShape(
            size,
            tower.num_heads,
            tower.intermediate_size,
            tower.hidden_act,
            EPS,
            rms_norms=tower.windowed,
            gated=tower.windowed,
        )
        self._blocks = tuple(VisionLayer(scope.at(f"blocks.{i}"), shape, names) for i in range(tower.num_layers))
        self.num_slices = len(self._blocks) + 2  # what comes before the layers, the layers, the merger

    def reserve(self, room: int) -> None:
        self._rotary.reserve(self._end(room))

    def pack(self, batch: VisionInput, room: int = 0) -> Packing | None:
        grids = filled(batch.grids, room, self._merge) if room else list(batch.grids)
        return None if grids is None else self._packed(grids, room)

    def cut(self, pixels: Sequence[Tensor]) -> list[Tensor]:
        return [self._cut(item) for item in pixels]

    def _cut(self, pixels: Tensor) -> Tensor:
        """uint8 [pictures, height, width, 3] of one item -> uint8 [P, temporal * patch * patch * 3]; a single picture
        stands in every temporal slot."""
        count, height, width, _ = pixels.shape
        patch, merge, depth = self._geometry.patch_size, self._geometry.merge_size, self._geometry.temporal_patch_size
        factor = self._geometry.factor
        blocks = pixels.view(count, height // factor, merge, patch, width // factor, merge, patch, 3)
        rows = blocks.permute(1, 4, 2, 5, 0, 3, 6, 7).reshape(-1, count, patch * patch * 3)
        return rows.expand(-1, depth, -1).reshape(-1, self.num_values)

    def _packed(self, grids: list[Grid], room: int) -> Packing | None:
        """With the places of patches as indices, and pictures as segments."""
        sizes = sizes_of(grids)
        bounds = bounds_of(sizes, spans_in(room, self.granule) if room else 0)
        if bounds is None:
            return None
        num_patches = sum(sizes)
        longest = num_patches if room else max(sizes)
        end = self._end(room) if room else max(max(grid) for grid in grids)
        places = tuple(patch_places(grids, self._merge))
        return Packing(num_patches, num_patches // self.granule, places, (bounds,), (longest,), end)

    def _end(self, room: int) -> int:
        """No side is longer than that of a picture of one row of tokens that fills the room."""
        return room // self._merge
