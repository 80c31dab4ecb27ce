"""The towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: pictures of any size as rows of patches in merge order,
with rows and columns as rotary positions, and mergers after the layers.

Most layers of Qwen2.5-VL attend within square windows of a picture: tokens are permuted to the order of windows before
the first layer, and back after the merger. Qwen3-VL adds learned positions, interpolated over each picture's grid, and
returns features of several layers (DeepStack), whose planes the decoder adds; see `decoder.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend.base import Rotary
from hydra_engine.core.plans import Int64s
from hydra_engine.models.layers.basic import LayerNorm, Mlp, RmsNorm, Weight
from hydra_engine.models.layers.decoder import GrowingTable
from hydra_engine.models.layers.vision import (
    Grid,
    LayerNames,
    Packing,
    PatchMerger,
    PatchProjection,
    TowerInput,
    VisionInput,
    VisionLayer,
    cumulative_lengths,
    cut_in_merge_order,
    in_merge_order,
    link_norms,
    longest_side,
    pack_pictures,
    sizes_of,
)
from hydra_engine.models.loading.parameters import Renames, Scope
from hydra_engine.models.qwen_vl.spec import GridVisionSpec, Qwen2VisionSpec, Qwen3VlVisionSpec

_TABLE_ROWS = 128
LAYER = LayerNames(norms=("norm1", "norm2"), attention="attn", qkv=("qkv",), out="proj")


class PatchRotary(GrowingTable):
    """Two-dimensional rotary positions: the first half of the pairs rotates by the row, the second by the column."""

    def __init__(self, head_dim: int, theta: float, device: torch.device) -> None:
        half = head_dim // 2
        self._frequencies = 1.0 / (theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half))  # [D/4]
        self._device = device
        super().__init__()  # [multiple of _TABLE_ROWS, D/2]: cosines, then sines

    def __call__(self, rows: Tensor, columns: Tensor, end: int) -> Rotary:
        """Returns (cos, sin), each [P, D/2] float32. `rows` and `columns` are [P]; `end` is larger than any of them."""
        cos, sin = self.with_rows(end).chunk(2, dim=1)
        return torch.cat((cos[rows], cos[columns]), dim=1), torch.cat((sin[rows], sin[columns]), dim=1)

    def _rows_from(self, begin: int) -> Tensor:
        angles = torch.arange(begin, begin + _TABLE_ROWS, dtype=torch.float32)[:, None] * self._frequencies
        return torch.cat((angles.cos(), angles.sin()), dim=1).to(self._device)


@lru_cache(maxsize=64)
def patch_places(rows: int, columns: int, merge: int) -> Int64s:
    """Row and column of every patch of a picture in merge order, [2, P]."""
    places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=2)
    return in_merge_order(places, (merge,)).T.numpy()


class GridVision:
    """A tower for pictures of any size: implements `Vision` of `vlm.py`. Every span is a picture or a temporal patch of
    a video, and attends only to itself.

    Subclasses set the mergers: `_merger`, and `_deep_mergers` by layer, each of which makes a further plane of
    features."""

    weight_names = ("visual.",)
    _merger: PatchMerger
    _deep_mergers: Mapping[int, PatchMerger] = {}

    def __init__(self, scope: Scope, spec: GridVisionSpec, *, names: LayerNames = LAYER, bias: bool = False) -> None:
        """`bias`: the patch projection has a bias."""
        tower, geometry, size = spec.tower, spec.geometry, spec.tower.hidden_size
        kernel = (geometry.temporal_patch_size, geometry.patch_size, geometry.patch_size)
        self._embed = PatchProjection(scope, "patch_embed.proj", size, kernel, spec.preprocess, bias=bias)
        self._geometry, self._merge, self._full_layers = geometry, geometry.merge_size, tower.full_layers
        self._rotary = PatchRotary(size // tower.num_heads, tower.rope_theta, scope.device)
        self.granule, self.num_values = self._merge**2, self._embed.num_values
        places = scope.children("blocks", tower.num_layers, "depth")
        self._blocks = link_norms([VisionLayer(place, tower, names) for place in places])
        self.num_slices = len(self._blocks) + 2  # the work before the layers, the layers, the merger

    def reserve(self, capacity: int) -> None:
        self._rotary.reserve(longest_side(capacity, self._merge))

    def pack(self, batch: VisionInput, capacity: int = 0) -> Packing | None:
        packing = pack_pictures(batch.grids, capacity, self._merge)
        return None if packing is None else self._with_indices(*packing, capacity)

    def cut(self, pixels: Sequence[Tensor], patches: Tensor) -> None:
        geometry = self._geometry
        cut_in_merge_order(pixels, patches, geometry.patch_size, (self._merge,), geometry.temporal_patch_size)

    def __call__(self, inputs: TowerInput) -> tuple[Tensor, ...]:
        """Returns one tensor per plane. Full layers attend within pictures (the first segments), others within windows
        (the last), if the tower has windows."""
        slices, planes = inputs.slices, []
        rotary = self._rotary(inputs.indices[0], inputs.indices[1], inputs.end)
        x, normed = self._embedded(inputs), None  # [P, C]
        for index, block in enumerate(slices.with_checkpoints(self._blocks)):
            segments = inputs.segments[0 if index in self._full_layers else -1]
            x, normed = block(x, segments, slices, rotary, normed=normed)
            if index in self._deep_mergers:
                slices.checkpoint()
                planes.append(slices.rows(self._deep_mergers[index], x, group=self.granule))
        return (slices.rows(self._merger, x, group=self.granule), *planes)

    def _with_indices(self, grids: list[Grid], packing: Packing, capacity: int) -> Packing | None:
        """Adds row and column of every patch in its picture to `indices`."""
        places = [patch_places(rows, columns, self._merge) for _, rows, columns in grids]
        return packing._replace(indices=tuple(np.concatenate(places, axis=1)))

    def _embedded(self, inputs: TowerInput) -> Tensor:
        return inputs.slices.rows(self._embed, inputs.patches)


# Names as published and as of transformers 4 -> canonical ones; names of transformers 5 first.
QWEN_RENAMES: Renames = (
    ("model.visual.", "visual."),
    ("model.language_model.", "language_model.model."),
    ("model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)


class Qwen2Vision(GridVision):
    renames = QWEN_RENAMES

    def __init__(self, scope: Scope, spec: Qwen2VisionSpec) -> None:
        scope = scope.child("visual")
        super().__init__(scope, spec)
        self._merger = qwen2_merger(scope.child("merger"), spec, LayerNorm, spec.feature_size)


def qwen2_merger(
    scope: Scope, spec: GridVisionSpec, norm: type[LayerNorm | RmsNorm], num_out: int, before: RmsNorm | None = None
) -> PatchMerger:
    """Makes the merger of Qwen2-VL and of towers alike. `before` is a norm that precedes the merger's own."""
    own, width = norm(scope.child("ln_q"), spec.tower.hidden_size, spec.tower.norm_eps), spec.merged_size
    mlp = Mlp(scope, ("mlp.0", "mlp.2"), width, width, num_out, "gelu")
    return PatchMerger(own if before is None else lambda x: own(before(x)), mlp, width, norm_merged=False)


_EDGES = 64  # windows at the edges of the pictures of a padded batch


class Windows(NamedTuple):
    order: Int64s  # [tokens]: which token comes at each place, windows one after another
    sizes: Int64s  # of the windows, in patches


class WindowVision(GridVision):
    """A tower most of whose layers attend within windows."""

    def __init__(self, scope: Scope, spec: GridVisionSpec, *, names: LayerNames = LAYER) -> None:
        super().__init__(scope, spec, names=names)
        self._tower = spec.tower
        self._window = self._tower.window_tokens**2 * self.granule  # patches of a whole one

    def _with_indices(self, grids: list[Grid], packing: Packing, capacity: int) -> Packing | None:
        """Adds rows and columns in window order, the permutation to that order and its inverse (both by token) to
        `indices`, and the windows to `bounds`. None if the capacity has too few windows."""
        side = self._tower.window_tokens
        windows = cut_windows(grids, self._merge, side)
        bounds = cumulative_lengths(windows.sizes, self._max_windows(capacity) if capacity else 0)
        if bounds is None:
            return None
        places = [_places_in_windows(rows, columns, self._merge, side) for _, rows, columns in grids]
        back = np.empty_like(windows.order)
        back[windows.order] = np.arange(len(back))
        return packing._replace(
            indices=(*np.concatenate(places, axis=1), windows.order, back),
            bounds=(*packing.bounds, bounds),
            longest=(*packing.longest, min(self._window, packing.num_patches)),
        )

    def _max_windows(self, capacity: int) -> int:
        """Number of windows of a padded batch: twice the full windows that fill it, plus a constant for the edges of
        small pictures, at most one per token."""
        return min(capacity // self.granule, 2 * capacity // self._window + _EDGES)

    def __call__(self, inputs: TowerInput) -> tuple[Tensor, ...]:
        return tuple(plane.index_select(0, inputs.indices[3]) for plane in super().__call__(inputs))

    def _embedded(self, inputs: TowerInput) -> Tensor:
        rows = super()._embedded(inputs)
        return rows.view(-1, self.granule, rows.shape[1]).index_select(0, inputs.indices[2]).view(rows.shape)


class Qwen25Vision(WindowVision):
    renames = QWEN_RENAMES

    def __init__(self, scope: Scope, spec: Qwen2VisionSpec) -> None:
        scope = scope.child("visual")
        super().__init__(scope, spec)
        self._merger = qwen2_merger(scope.child("merger"), spec, RmsNorm, spec.feature_size)


def cut_windows(grids: Sequence[Grid], merge: int, side: int) -> Windows:
    """Cuts every picture into windows of `side` by `side` tokens from its upper left corner; windows at the right and
    lower edges are smaller."""
    orders, sizes, begin = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)], 0
    for _, rows, columns in grids:
        order, own = _windows_of(rows // merge, columns // merge, side)
        orders.append(order + begin)
        sizes.append(own)
        begin += len(order)
    return Windows(np.concatenate(orders), np.concatenate(sizes) * merge**2)


@lru_cache(maxsize=64)
def _windows_of(rows: int, columns: int, side: int) -> tuple[Int64s, Int64s]:
    """Returns the tokens of one picture in window order, and the number of tokens of each window. Sizes are in
    tokens."""
    number = np.arange(rows)[:, None] // side * -(-columns // side) + np.arange(columns) // side
    return np.argsort(number.reshape(-1), kind="stable"), np.bincount(number.reshape(-1))


@lru_cache(maxsize=64)
def _places_in_windows(rows: int, columns: int, merge: int, side: int) -> Int64s:
    """Returns `patch_places`, [2, P], in window order."""
    order, _ = _windows_of(rows // merge, columns // merge, side)
    return patch_places(rows, columns, merge).reshape(2, -1, merge**2)[:, order].reshape(2, -1)


QWEN3_LAYER = LAYER._replace(mlp=("mlp.linear_fc1", "mlp.linear_fc2"))


class Qwen3VlVision(GridVision):
    renames = (
        ("model.visual.", "visual."),
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
    )

    def __init__(self, scope: Scope, spec: Qwen3VlVisionSpec) -> None:
        scope = scope.child("visual")
        super().__init__(scope, spec, names=QWEN3_LAYER, bias=True)
        self._positions = StretchedPositions(scope, spec)
        self._merger = _qwen3_merger(scope.child("merger"), spec, norm_merged=False)
        places = scope.children("deepstack_merger_list", len(spec.deepstack_layers), "deepstack_visual_indexes")
        self._deep_mergers = {
            layer: _qwen3_merger(places[index], spec, norm_merged=True)
            for layer, index in zip(spec.deepstack_layers, spec.deepstack_mergers, strict=True)
        }
        self.num_slices += len(self._deep_mergers)

    def _with_indices(self, grids: list[Grid], packing: Packing, capacity: int) -> Packing | None:
        """Adds row and column of every patch, and rows and columns of its picture, to `indices`."""
        places = super()._with_indices(grids, packing, capacity)
        sides = np.array(grids, dtype=np.int64)[:, 1:].repeat(sizes_of(grids), axis=0)
        return None if places is None else places._replace(indices=(*places.indices, *sides.T))

    def _embedded(self, inputs: TowerInput) -> Tensor:
        rows = super()._embedded(inputs)
        return rows.add_(self._positions(*inputs.indices))


class StretchedPositions:
    """A square table of positions, interpolated bilinearly over a picture's grid with corners aligned.

    The arithmetic is element-wise float32, rounded once, so that a patch's bits depend only on its grid."""

    def __init__(self, scope: Scope, spec: Qwen3VlVisionSpec) -> None:
        self._table = Weight(scope, "pos_embed.weight", (spec.num_positions, spec.tower.hidden_size))
        self._side = spec.position_side

    def __call__(self, rows: Tensor, columns: Tensor, heights: Tensor, widths: Tensor) -> Tensor:
        """Returns positions [P, C]. `rows` and `columns` are a patch's place in its picture, `heights` and `widths` the
        picture's size in patches, each [P]."""
        above, below, down = self._taps(rows, heights)
        left, right, across = self._taps(columns, widths)
        above, below = above * self._side, below * self._side
        at_left = self._between(above + left, below + left, down)
        at_right = self._between(above + right, below + right, down)
        return at_left.mul_(1 - across).add_(at_right.mul_(across)).to(self._table.tensor.dtype)

    def _between(self, first: Tensor, second: Tensor, share: Tensor) -> Tensor:
        """Interpolates two table entries per patch, [P, C] float32; `share` is the weight of the second."""
        table = self._table.tensor
        return table[first].float().mul_(1 - share).add_(table[second].float().mul_(share))

    def _taps(self, places: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the two neighbouring table indices, [P], and the weight of the second, [P, 1], for places on an axis
        of `counts` patches."""
        points = places.to(torch.float32) * (self._side - 1) / (counts - 1).clamp(min=1)
        first = points.floor()
        index = first.to(torch.int64)
        return index, (index + 1).clamp(max=self._side - 1), (points - first)[:, None]


def _qwen3_merger(scope: Scope, spec: Qwen3VlVisionSpec, *, norm_merged: bool) -> PatchMerger:
    width = spec.merged_size
    norm = LayerNorm(scope.child("norm"), width if norm_merged else spec.tower.hidden_size, spec.tower.norm_eps)
    mlp = Mlp(scope, ("linear_fc1", "linear_fc2"), width, width, spec.feature_size, "gelu")
    return PatchMerger(norm, mlp, width, norm_merged=norm_merged)
