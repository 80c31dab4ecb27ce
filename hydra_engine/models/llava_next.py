"""LLaVA-NeXT: tower and projector of LLaVA-1.5 over a square and its tiles, laid out as rows that end with newlines."""

from __future__ import annotations

import torch
from torch import Tensor

from hydra_engine.models.family import Family, Renames
from hydra_engine.models.inputs import VisionInput
from hydra_engine.models.layers import Weight
from hydra_engine.models.llava import LLAVA_RENAMES
from hydra_engine.models.parameters import Scope
from hydra_engine.models.projector import LlavaProjector
from hydra_engine.models.vision_clip import ClipTower
from hydra_engine.models.vision_slices import Slices
from hydra_engine.specs.base import VisionSpec
from hydra_engine.specs.llava_next import LlavaNextVisionSpec, unpadded

RENAMES: Renames = (("model.image_newline", "image_newline"), *LLAVA_RENAMES)
_NEWLINE = -1  # instead of a row of the tower


class LlavaNextVision:
    """A span is a square and the tiles of its canvas. Its features: those of the square row by row, then those of the
    canvas without its borders, with a newline after each row."""

    def __init__(self, scope: Scope, spec: VisionSpec) -> None:
        assert isinstance(spec, LlavaNextVisionSpec)
        self._side = spec.tower.grid_side
        self._tower = ClipTower(scope.at("vision_tower"), spec.tower, spec.preprocess)
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

    def __call__(self, batch: VisionInput) -> tuple[Tensor, ...]:
        slices = Slices(batch.checkpoint, batch.piece_rows)
        rows = self._rows(batch)
        states = self._tower(torch.cat(batch.pixels), slices)
        # What a newline's place takes from the tower does not matter; dropped rows are never projected.
        features = slices.rows(self._project, states.index_select(0, rows.clamp(min=0)))
        features[rows == _NEWLINE] = self._newline.tensor
        return (features,)

    def _rows(self, batch: VisionInput) -> Tensor:
        """[M] int64: which of the tower's rows each feature is made of."""
        device = batch.slots.device
        found, begin = [], 0
        for pixels, source, (_, rows, columns) in zip(batch.pixels, batch.sources, batch.grids, strict=True):
            square = torch.arange(self._side**2, device=device)
            tiles = _with_newlines(self._tiles(rows, columns, device), source)
            found += [begin + square, torch.where(tiles == _NEWLINE, _NEWLINE, begin + tiles).view(-1)]
            begin += pixels.shape[0] * self._side**2
        return torch.cat(found)

    def _tiles(self, rows: int, columns: int, device: torch.device) -> Tensor:
        """[rows, columns] int64: where in its span the tower puts each feature of a canvas."""
        side = self._side
        row = torch.arange(rows, device=device)[:, None]
        column = torch.arange(columns, device=device)
        tile = 1 + row // side * (columns // side) + column // side  # the square is picture 0
        return tile * side**2 + row % side * side + column % side


def _with_newlines(grid: Tensor, source: tuple[int, int]) -> Tensor:
    """The part of a grid that the source covers, with one more column."""
    rows, columns = grid.shape
    kept = unpadded(rows, columns, *source)
    part = grid[kept.top : kept.top + kept.rows, kept.left : kept.left + kept.columns]
    return torch.nn.functional.pad(part, (0, 1), value=_NEWLINE)


LLAVA_NEXT = Family(
    LlavaNextVision, vision_names=("vision_tower.", "multi_modal_projector.", "image_newline"), renames=RENAMES
)
