"""Packing of a batch's pictures for a tower: integers computed on the host, sized for the batch or for a
given capacity, so that a tower's launches can be captured once and replayed for other pictures.

A batch is filled up to the capacity with padding pictures at its end: they attend only to themselves, and their
features are not read.
Does not know layers, pixel values or caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend.base import Segments
from hydra_engine.core.plans import Int64s
from hydra_engine.models.inputs import VisionInput
from hydra_engine.models.layers.vision_slices import Slices

Grid = tuple[int, int, int]  # (time, rows, columns) in patches; time is 1 for every item

_MAX_SPANS = 64  # of pictures in a padded batch, padding not counted
_FILLERS = 2  # pictures of padding at most


class Packing(NamedTuple):
    """The layout of a batch, exact or padded to a capacity. All batches of one capacity have arrays of the same
    lengths."""

    num_patches: int
    num_features: int  # rows of the tower's output, padding last
    indices: tuple[Int64s, ...]  # in the tower's own order
    bounds: tuple[Int64s, ...]  # cu_seqlens of each kind of attention; padded with empty segments up to the capacity
    longest: tuple[int, ...]  # upper bound of a segment's length, by kind
    end: int = 0  # more than the largest row or column of a patch in its picture


@dataclass(frozen=True, slots=True)
class TowerInput:
    """The inputs of a tower. Everything that depends on the pictures is in the tensors."""

    patches: Tensor  # [P, values] uint8
    indices: tuple[Tensor, ...]  # int64, as `Packing.indices`
    segments: tuple[Segments, ...]
    end: int
    slices: Slices


def tower_input(
    packing: Packing, batch: VisionInput, cut: Callable[[Sequence[Tensor], Tensor], None], num_values: int
) -> TowerInput:
    """Builds the input of a batch that is computed eagerly: segments stay on the host. `cut` and `num_values` are the
    tower's."""
    if batch.send is not None:
        indices = batch.send(packing.indices)
    else:
        indices = tuple(torch.from_numpy(index).to(batch.slots.device) for index in packing.indices)
    patches = torch.empty((packing.num_patches, num_values), dtype=torch.uint8, device=batch.slots.device)
    cut(batch.pixels, patches)
    return TowerInput(
        patches,
        indices,
        tuple(bounds.tolist() for bounds in packing.bounds),
        packing.end,
        Slices(batch.checkpoint, batch.piece_rows),
    )


def spans_in(capacity: int, granule: int) -> int:
    """Number of segments, padding included, of `capacity` patches in pictures of at least `granule` patches."""
    return min(capacity // granule, _MAX_SPANS) + _FILLERS


def pad_with_grids(grids: Sequence[Grid], capacity: int, merge: int) -> list[Grid] | None:
    """Appends at most two padding grids, about square, so that all have `capacity` patches together. `capacity` is a
    multiple of merge * merge, as is every grid's number of patches. None if the grids do not fit."""
    left = capacity - sum(rows * columns for _, rows, columns in grids)
    if left < 0 or len(grids) > min(capacity // merge**2, _MAX_SPANS):
        return None
    height = 4 * merge
    wide = left // (height * merge) * merge
    rest = left - height * wide
    fillers: list[Grid] = [(1, height, wide), (1, merge, rest // merge)]
    return [*grids, *(filler for filler in fillers if filler[2])]


def cumulative_lengths(lengths: Sequence[int] | Int64s, capacity: int = 0) -> Int64s | None:
    """Returns cu_seqlens of segments of these lengths, padded with empty segments to `capacity` of them (0: no
    padding). None if there are more."""
    count = len(lengths)
    if capacity and count > capacity:
        return None
    bounds = np.zeros(max(count, capacity) + 1, dtype=np.int64)
    np.cumsum(lengths, out=bounds[1 : count + 1])
    bounds[count + 1 :] = bounds[count]
    return bounds


def pack_pictures(grids: Sequence[Grid], capacity: int, merge: int) -> tuple[list[Grid], Packing] | None:
    """Packs pictures of any size, one segment each, padded to `capacity` patches (0: no padding); `indices` are left
    empty. Sides are multiples of `merge` patches, and merge * merge patches make a feature. None if the pictures do
    not fit."""
    fitted = pad_with_grids(grids, capacity, merge) if capacity else list(grids)
    if fitted is None:
        return None
    sizes = sizes_of(fitted)
    bounds = cumulative_lengths(sizes, spans_in(capacity, merge**2) if capacity else 0)
    if bounds is None:
        return None
    num_patches = sum(sizes)
    longest = num_patches if capacity else max(sizes)
    end = longest_side(capacity, merge) if capacity else max(max(grid) for grid in fitted)
    return fitted, Packing(num_patches, num_patches // merge**2, (), (bounds,), (longest,), end)


def sizes_of(grids: Sequence[Grid]) -> list[int]:
    """Number of patches of each picture."""
    return [rows * columns for _, rows, columns in grids]


def longest_side(capacity: int, merge: int) -> int:
    """Longest side, in patches, of a picture that fills the capacity: one row of tokens."""
    return capacity // merge


def in_merge_order(grid: Tensor, merges: Sequence[int]) -> Tensor:
    """Reorders [rows, columns, ...] to [rows * columns, ...] so that the patches that merge are contiguous at every
    level, and every merge is a view. `merges`: the factor of each merge along a side, last merge first."""
    return _in_levels(grid, merges).reshape(-1, *grid.shape[2:])


def _in_levels(grid: Tensor, merges: Sequence[int]) -> Tensor:
    """Returns `in_merge_order` as a view, with two dimensions for each level of merging."""
    count = len(merges)
    levels = grid.unflatten(1, (-1, *merges)).unflatten(0, (-1, *merges))
    pairs = [axis for level in range(count + 1) for axis in (level, count + 1 + level)]
    rest = range(2 * (count + 1), levels.dim())
    return levels.permute(*pairs, *rest)


def cut_in_merge_order(
    pixels: Sequence[Tensor], patches: Tensor, patch_size: int, merges: Sequence[int], depth: int = 1
) -> None:
    """Cuts uint8 [pictures, height, width, 3] of each span into `patches`, uint8 [P, depth * patch * patch * 3]
    contiguous, with one copy per span. A single picture is repeated in all `depth` temporal positions."""
    begin = 0
    for pictures in pixels:
        cut = pictures.unflatten(2, (-1, patch_size)).unflatten(1, (-1, patch_size))
        levels = _in_levels(cut.permute(1, 3, 0, 2, 4, 5), merges)  # [.., pictures, patch, patch, 3]
        end = begin + cut.shape[1] * cut.shape[3]
        patches[begin:end].view(*levels.shape[:-4], depth, *levels.shape[-3:]).copy_(levels)
        begin = end
    assert begin == patches.shape[0], "as many patches as the plan says"
