"""LLaVA-NeXT: tower and projector of LLaVA-1.5 over a square and its tiles, laid out as rows that end with newlines."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from hydra_engine.core.plans import Int64s
from hydra_engine.models.layers.basic import Weight
from hydra_engine.models.layers.vision import Grid, Packing, TowerInput, VisionInput
from hydra_engine.models.llava.model import LLAVA_RENAMES, ORIGINAL_RENAMES, LlavaVision
from hydra_engine.models.llava_next.spec import LlavaNextVisionSpec, unpadded
from hydra_engine.models.loading.parameters import Scope

_NEWLINE = -1  # instead of a row of the tower


class LlavaNextVision(LlavaVision):
    """LLaVA-NeXT's tower and projector. A span is a square, with the features of its patches row by row, or a row of
    tiles of a canvas: the feature rows across these tiles, without the canvas's borders, with a newline after each."""

    weight_names = ("vision_tower.", "multi_modal_projector.", "image_newline")
    renames = (("model.image_newline", "image_newline"), *LLAVA_RENAMES)

    def __init__(self, scope: Scope, spec: LlavaNextVisionSpec) -> None:
        super().__init__(scope, spec)
        self._side = spec.tower.grid_side
        self._newline = Weight(scope, "image_newline", (spec.feature_size,))

    def pack(self, batch: VisionInput, capacity: int = 0) -> Packing | None:
        packing = super().pack(batch, capacity)
        if packing is None:
            return None
        side, spans, begin = self._side, [], 0
        for pixels, source, grid in zip(batch.pixels, batch.sources, batch.grids, strict=True):
            rows = span_rows(grid, source, side)
            spans.append(np.where(rows == _NEWLINE, _NEWLINE, rows + begin))
            begin += pixels.shape[0] * side**2
        if capacity:
            # Each of a tile's rows of features may end with a newline, so this is room for all of them.
            most = packing.num_patches // side * (side + 1)
            spans.append(np.zeros(most - sum(map(len, spans)), dtype=np.int64))
        rows = np.concatenate(spans)
        return packing._replace(num_features=len(rows), indices=(rows,))

    def __call__(self, inputs: TowerInput) -> tuple[Tensor, ...]:
        (rows,) = inputs.indices
        states = self._states(inputs).flatten(0, 1)
        # A newline's place may take any row of the tower; dropped rows are never projected.
        features = inputs.slices.rows(self._project, states.index_select(0, rows.clamp(min=0)))
        return (torch.where((rows == _NEWLINE)[:, None], self._newline.tensor, features),)


class LlavaNextOriginalVision(LlavaNextVision):
    """The same with liuhaotian's names."""

    renames = ORIGINAL_RENAMES


@lru_cache(maxsize=64)
def span_rows(grid: Grid, source: tuple[int, int], side: int) -> Int64s:
    """Index in the span's tower rows of each feature, [num_tokens]; _NEWLINE for newlines."""
    number, rows, columns = grid
    if number == 0:
        return np.arange(side**2)
    kept = unpadded(rows, columns, *source)
    row = np.arange(*kept.rows_of(number, side))[:, None] % side
    column = np.arange(kept.left, kept.left + kept.columns)
    tiles = column // side * side**2 + row * side + column % side
    return np.pad(tiles, ((0, 0), (0, 1)), constant_values=_NEWLINE).reshape(-1)
