"""Pictures of any size as rows of patches, packed: cutting, embedding, positions and segments for Qwen-VL towers.

Patches of an item stand in merge order: block by block, row by row within a block, so that the patches of one token are
neighbours. Does not know blocks of layers, windows or what a token becomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from hydra_engine.backend.base import PackedLinear
from hydra_engine.models.attention import Rotary
from hydra_engine.models.parameters import Scope
from hydra_engine.models.pixels import PixelNormaliser
from hydra_engine.models.vision_slices import Slices
from hydra_engine.specs.base import PreprocessSpec
from hydra_engine.specs.qwen_geometry import PatchGeometry

Grid = tuple[int, int, int]  # (time, rows, columns) in patches; time is 1 for every item
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

    def __call__(self, pixels: Sequence[Tensor], slices: Slices) -> Tensor:
        """uint8 [pictures, height, width, 3] per item -> [P, C]"""
        project = partial(self._ops.linear, weight=self.packed)
        return slices.rows(project, torch.cat([self._cut(one) for one in pixels]))

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def _cut(self, pixels: Tensor) -> Tensor:
        """[P, temporal * patch * patch * 3] of one item; a single picture stands in every temporal slot."""
        count, height, width, _ = pixels.shape
        patch, merge, depth = self._geometry.patch_size, self._geometry.merge_size, self._geometry.temporal_patch_size
        factor = self._geometry.factor
        blocks = pixels.view(count, height // factor, merge, patch, width // factor, merge, patch, 3)
        flat = blocks.permute(1, 4, 2, 5, 0, 3, 6, 7).reshape(-1, count, patch * patch, 3)
        rows = self._normalise(flat).to(self._dtype)
        return rows.expand(-1, depth, -1, -1).reshape(-1, depth * patch * patch * 3)

    def _fill(self, name: str, tensor: Tensor) -> None:
        """[C, 3, temporal, patch, patch] -> [C, temporal * patch * patch * 3], the order of pixels in memory."""
        self._arrived[name] = tensor
        if len(self._arrived) == len(self._slots):
            weight = self._arrived.pop("proj.weight").permute(0, 2, 3, 4, 1)
            self.packed = self._ops.pack_linear(
                weight.reshape(weight.shape[0], -1), self._arrived.pop("proj.bias", None)
            )


class PatchRotary:
    """Two-dimensional rotary positions: the first half of the pairs turns by the row, the second by the column.

    A table that grows in pieces of one size: a row's bits must not depend on its batch.
    """

    def __init__(self, head_dim: int, theta: float, device: torch.device) -> None:
        half = head_dim // 2
        self._frequencies = 1.0 / (theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half))  # [D/4]
        self._device = device
        self._table = self._piece(0)  # [multiple of _PIECE, D/2]: cosines, then sines

    def __call__(self, places: Tensor, end: int) -> Rotary:
        """cos, sin, each [P, D/2] float32; `places` [2, P] rows and columns, `end` is more than the largest of them."""
        while end > self._table.shape[0]:
            self._table = torch.cat((self._table, self._piece(self._table.shape[0])))
        cos, sin = self._table.chunk(2, dim=1)
        rows, columns = places.unbind(0)
        return torch.cat((cos[rows], cos[columns]), dim=1), torch.cat((sin[rows], sin[columns]), dim=1)

    def _piece(self, begin: int) -> Tensor:
        angles = torch.arange(begin, begin + _PIECE, dtype=torch.float32)[:, None] * self._frequencies
        return torch.cat((angles.cos(), angles.sin()), dim=1).to(self._device)


def patch_places(grids: Sequence[Grid], merge: int, device: torch.device) -> Tensor:
    """[2, P] int64: row and column of every patch in its picture, items one after another, in merge order."""
    return torch.cat([_merge_order(rows, columns, merge, device) for _, rows, columns in grids], dim=1)


def _merge_order(rows: int, columns: int, merge: int, device: torch.device) -> Tensor:
    blocks = (rows // merge, columns // merge, merge, merge)
    row = torch.arange(rows, device=device).view(blocks[0], 1, merge, 1).expand(blocks)
    column = torch.arange(columns, device=device).view(1, blocks[1], 1, merge).expand(blocks)
    return torch.stack((row.reshape(-1), column.reshape(-1)))


def segments(grids: Sequence[Grid]) -> list[int]:
    """cu_seqlens of attention within every temporal patch: [items + 1]"""
    return list(accumulate((rows * columns for _, rows, columns in grids), initial=0))
