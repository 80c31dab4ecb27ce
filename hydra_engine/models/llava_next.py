"""LLaVA-NeXT: tower and projector of LLaVA-1.5 over a square and its tiles, laid out as rows that end with newlines."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from hydra_engine.models.family import Family, Renames
from hydra_engine.models.inputs import VisionInput
from hydra_engine.models.layers import Weight
from hydra_engine.models.llava import LLAVA_RENAMES
from hydra_engine.models.parameters import Scope
from hydra_engine.models.projector import LlavaProjector
from hydra_engine.models.vision_clip import ClipTower
from hydra_engine.models.vision_packing import Grid, Ints, Packing, SquareVision, TowerInput
from hydra_engine.specs.base import VisionSpec
from hydra_engine.specs.llava_next import LlavaNextVisionSpec, unpadded

RENAMES: Renames = (("model.image_newline", "image_newline"), *LLAVA_RENAMES)
_NEWLINE = -1  # instead of a row of the tower


class LlavaNextVision(SquareVision):
    """A span is a square and the tiles of its canvas. Its features: those of the square row by row, then those of the
    canvas without its borders, with a newline after each row."""

    def __init__(self, scope: Scope, spec: VisionSpec) -> None:
        assert isinstance(spec, LlavaNextVisionSpec)
        self._side = spec.tower.grid_side
        self._tower = ClipTower(scope.at("vision_tower"), spec.tower, spec.preprocess)
        super().__init__(self._tower.squares, self._tower.cut)
        self._project = LlavaProjector(
            scope.at("multi_modal_projector"),
            spec.tower.feature_size,
            spec.feature_size,
            act=spec.projector_act,
            bias=spec.projector_bias,
        )
        self._newline = Weight(scope, "image_newline", (spec.feature_size,))

    @property
    def num_slices(self) -> int:
        return self._tower.num_slices

    def pack(self, batch: VisionInput, room: int = 0) -> Packing | None:
        packing = super().pack(batch, room)
        if packing is None:
            return None
        side, found, begin = self._side, [], 0
        for pixels, source, grid in zip(batch.pixels, batch.sources, batch.grids, strict=True):
            rows = span_rows(grid, source, side)
            found.append(np.where(rows == _NEWLINE, _NEWLINE, rows + begin))
            begin += pixels.shape[0] * side**2
        if room:
            # Each of a tile's rows of features may end with a newline, so this is room for all of them.
            most = packing.num_patches // side * (side + 1)
            found.append(np.zeros(most - sum(map(len, found)), dtype=np.int64))
        rows = np.concatenate(found)
        return packing._replace(num_features=len(rows), indices=(rows,))

    def __call__(self, inputs: TowerInput) -> tuple[Tensor, ...]:
        (rows,) = inputs.indices
        states = self._tower(inputs)
        # What a newline's place takes from the tower does not matter; dropped rows are never projected.
        features = inputs.slices.rows(self._project, states.index_select(0, rows.clamp(min=0)))
        return (torch.where((rows == _NEWLINE)[:, None], self._newline.tensor, features),)


@lru_cache(maxsize=64)
def span_rows(grid: Grid, source: tuple[int, int], side: int) -> Ints:
    """[num_tokens]: which of the tower's rows of its span each feature is made of."""
    _, rows, columns = grid
    row, column = np.arange(rows)[:, None], np.arange(columns)
    tile = 1 + row // side * (columns // side) + column // side  # the square is picture 0
    canvas = tile * side**2 + row % side * side + column % side
    kept = unpadded(rows, columns, *source)
    part = canvas[kept.top : kept.top + kept.rows, kept.left : kept.left + kept.columns]
    tiles = np.pad(part, ((0, 0), (0, 1)), constant_values=_NEWLINE)
    return np.concatenate((np.arange(side**2), tiles.reshape(-1)))


LLAVA_NEXT = Family(
    LlavaNextVision, vision_names=("vision_tower.", "multi_modal_projector.", "image_newline"), renames=RENAMES
)
