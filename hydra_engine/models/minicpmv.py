"""MiniCPM-V 4.6: its tower with the merger behind it, and the names of their weights."""

from __future__ import annotations

from torch import Tensor

from hydra_engine.models.family import Family, Renames
from hydra_engine.models.inputs import VisionInput
from hydra_engine.models.parameters import Scope
from hydra_engine.models.vision_minicpmv import Merger, MiniCpmTower
from hydra_engine.models.vision_slices import Slices
from hydra_engine.specs.base import VisionSpec
from hydra_engine.specs.minicpmv import MiniCpmVisionSpec

# Files have the names that transformers has in memory.
MINICPMV_RENAMES: Renames = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.vision_tower.", "vision_tower."),
    ("model.merger.", "merger."),
)


class MiniCpmVision:
    """Every span is one picture: the whole, or a slice."""

    def __init__(self, scope: Scope, spec: VisionSpec) -> None:
        assert isinstance(spec, MiniCpmVisionSpec)
        self._tower = MiniCpmTower(scope.at("vision_tower"), spec)
        self._merge = Merger(scope.at("merger"), spec)
        self._merged = 4**spec.num_rounds

    @property
    def num_slices(self) -> int:
        return self._tower.num_slices

    def __call__(self, batch: VisionInput) -> tuple[Tensor, ...]:
        slices = Slices(batch.checkpoint, batch.piece_rows)
        return (slices.rows(self._merge, self._tower(batch.pixels, slices), group=self._merged),)


MINICPMV = Family(MiniCpmVision, vision_names=("vision_tower.", "merger."), renames=MINICPMV_RENAMES)
