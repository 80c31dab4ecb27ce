"""Pictures of any size as rows of patches, packed: cutting, embedding, positions and segments for Qwen-VL towers.

Patches of an item stand in merge order: block by block, row by row within a block, so that the patches of one token are
neighbours. Does not know blocks of layers, windows or what a token becomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend.base import PackedLinear
from hydra_engine.models.attention import Rotary
from hydra_engine.models.inputs import VisionInput
from hydra_engine.models.parameters import Scope
from hydra_engine.models.pixels import PixelNormaliser
from hydra_engine.models.rotary import GrowingTable
from hydra_engine.models.vision_packing import Grid, Ints, Packing, bounds_of, filled, spans_in
from hydra_engine.models.vision_slices import Slices
from hydra_engine.specs.base import PreprocessSpec
from hydra_engine.specs.qwen_geometry import PatchGeometry

_PIECE = 128


class PatchEmbedding:
    """Normalised patches through the matrix of a three-dimensional convolution whose steps are its kernel's size."""

    packed: PackedLinear

    def __init__(
        self, scope: Scope, geometry: PatchGeometry, num_channels: int, preprocess: PreprocessSpec, *, bias: bool
    ) -> None:
        self._ops, self._dtype = scope.ops, scope.dtype
        self._geometry = geometry
        self._normalise = PixelNormaliser(preprocess, scope.device)
        self._arrived: dict[str, Tensor] = {}
        kernel = (geometry.temporal_patch_size, geometry.patch_size, geometry.patch_size)
        self._slots = {"proj.weight": (num_channels, 3, *kernel)} | ({"proj.bias": (num_channels,)} if bias else {})
        for name, shape in self._slots.items():
            scope.want(name, shape, partial(self._fill, name))
        scope.hold(self)

    def __call__(self, patches: Tensor, slices: Slices) -> Tensor:
        """What `cut` gives -> [P, C]"""
        return slices.rows(self._project, patches)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    @property
    def num_values(self) -> int:
        """Bytes of a patch."""
        return 3 * self._geometry.temporal_patch_size * self._geometry.patch_size**2

    def cut(self, pixels: Tensor) -> Tensor:
        """uint8 [pictures, height, width, 3] of one item -> uint8 [P, temporal * patch * patch * 3]; a single picture
        stands in every temporal slot."""
        count, height, width, _ = pixels.shape
        patch, merge, depth = self._geometry.patch_size, self._geometry.merge_size, self._geometry.temporal_patch_size
        factor = self._geometry.factor
        blocks = pixels.view(count, height // factor, merge, patch, width // factor, merge, patch, 3)
        rows = blocks.permute(1, 4, 2, 5, 0, 3, 6, 7).reshape(-1, count, patch * patch * 3)
        return rows.expand(-1, depth, -1).reshape(-1, self.num_values)

    def _project(self, patches: Tensor) -> Tensor:
        return self._ops.linear(self._normalise.rows(patches, self._dtype), self.packed)

    def _fill(self, name: str, tensor: Tensor) -> None:
        """[C, 3, temporal, patch, patch] -> [C, temporal * patch * patch * 3], the order of pixels in memory."""
        self._arrived[name] = tensor
        if len(self._arrived) == len(self._slots):
            weight = self._arrived.pop("proj.weight").permute(0, 2, 3, 4, 1)
            self.packed = self._ops.pack_linear(
                weight.reshape(weight.shape[0], -1), self._arrived.pop("proj.bias", None)
            )


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

    def __init__(self, merge: int, embed: PatchEmbedding, rotary: PatchRotary) -> None:
        self.granule, self.num_values = merge**2, embed.num_values
        self._merge, self._embed, self._rotary = merge, embed, rotary

    def reserve(self, room: int) -> None:
        self._rotary.reserve(self._end(room))

    def pack(self, batch: VisionInput, room: int = 0) -> Packing | None:
        grids = filled(batch.grids, room, self._merge) if room else list(batch.grids)
        return None if grids is None else self._packed(grids, room)

    def cut(self, pixels: Sequence[Tensor]) -> list[Tensor]:
        return [self._embed.cut(one) for one in pixels]

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
