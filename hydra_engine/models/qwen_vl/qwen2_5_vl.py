"""Qwen2.5-VL: most layers of the tower attend within square windows of a picture, a few within the whole of it.

Rows are put in the order of windows before the first layer, token by token, and back behind the merger.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hydra_engine.models.layers.vision_packing import Grid, Ints, Packing, TowerInput, bounds_of
from hydra_engine.models.loading.parameters import Scope
from hydra_engine.models.qwen_vl.qwen2_vl import Qwen2Vision
from hydra_engine.models.qwen_vl.qwen2_vl_spec import Qwen2VisionSpec

_EDGES = 64  # windows at the edges of the pictures in a room


class Windows(NamedTuple):
    order: Ints  # [tokens]: which token comes at each place, windows one after another
    sizes: Ints  # of the windows, in patches


class Qwen25Vision(Qwen2Vision):
    """Every span is a picture or a temporal patch of a video; nothing beyond it is attended to."""

    def __init__(self, scope: Scope, spec: Qwen2VisionSpec) -> None:
        super().__init__(scope, spec)
        self._tower = spec.tower
        self._window = self._tower.window_tokens**2 * self.granule  # patches of a whole one

    def _packed(self, grids: list[Grid], room: int) -> Packing | None:
        """Indices: rows and columns in the order of windows, and that order. Segments: pictures, windows."""
        packing, windows = super()._packed(grids, room), cut_windows(grids, self._merge, self._tower.window_tokens)
        bounds = bounds_of(windows.sizes, self._most_windows(room) if room else 0)
        if packing is None or bounds is None:
            return None
        places = (x.reshape(-1, self.granule)[windows.order].reshape(-1) for x in packing.indices)
        longest = (*packing.longest, min(self._window, packing.num_patches))
        return packing._replace(indices=(*places, windows.order), bounds=(*packing.bounds, bounds), longest=longest)

    def _most_windows(self, room: int) -> int:
        """Twice as many as large pictures are cut into, and some more for the edges of small ones; not more than
        tokens."""
        return min(room // self.granule, 2 * room // self._window + _EDGES)

    def __call__(self, inputs: TowerInput) -> tuple[Tensor, ...]:
        slices, merged = inputs.slices, self.granule
        rows, columns, order = inputs.indices
        whole, windows = inputs.segments
        rotary = self._rotary(rows, columns, inputs.end)
        embedded = slices.rows(self._embed, inputs.patches)  # [P, C]
        x = embedded.view(-1, merged, embedded.shape[1]).index_select(0, order).view(embedded.shape)
        for index, block in enumerate(slices.between(self._blocks)):
            x = block(x, whole if index in self._tower.full_layers else windows, slices, rotary)
        features = slices.rows(self._merger, x, group=merged)
        return (torch.empty_like(features).index_copy_(0, order, features),)


def cut_windows(grids: Sequence[Grid], merge: int, side: int) -> Windows:
    """Windows of `side` by `side` tokens from the upper left corner of every picture; those at its right and lower
    edges are smaller."""
    orders, sizes, begin = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)], 0
    for _, rows, columns in grids:
        order, own = _windows_of(rows // merge, columns // merge, side)
        orders.append(order + begin)
        sizes.append(own)
        begin += len(order)
    return Windows(np.concatenate(orders), np.concatenate(sizes) * merge**2)


@lru_cache(maxsize=64)
def _windows_of(rows: int, columns: int, side: int) -> tuple[Ints, Ints]:
    """Of one picture of so many tokens: its tokens in the order of windows, and the tokens of each window."""
    number = np.arange(rows)[:, None] // side * -(-columns // side) + np.arange(columns) // side
    return np.argsort(number.reshape(-1), kind="stable"), np.bincount(number.reshape(-1))
