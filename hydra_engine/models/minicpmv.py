"""MiniCPM-V 4.6: its tower with the merger behind it, and the names of their weights."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hydra_engine.models.family import Family, Renames
from hydra_engine.models.inputs import VisionInput
from hydra_engine.models.parameters import Scope
from hydra_engine.models.vision_minicpmv import Merger, MiniCpmTower
from hydra_engine.models.vision_packing import Packing, TowerInput, filled, spans_in
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
        self._side = 2**spec.all_rounds  # patches that both sides of a picture are multiples of
        self.granule, self.num_values = self._side**2, self._tower.num_values

    @property
    def num_slices(self) -> int:
        return self._tower.num_slices

    def reserve(self, room: int) -> None:
        """Nothing that it reads depends on a room."""

    def pack(self, batch: VisionInput, room: int = 0) -> Packing | None:
        grids = filled(batch.grids, room, self._side) if room else list(batch.grids)
        return None if grids is None else self._tower.pack(grids, spans_in(room, self.granule) if room else 0)

    def cut(self, pixels: Sequence[Tensor]) -> list[Tensor]:
        return [self._tower.cut(one) for one in pixels]

    def __call__(self, inputs: TowerInput) -> tuple[Tensor, ...]:
        return (inputs.slices.rows(self._merge, self._tower(inputs), group=self._merged),)


MINICPMV = Family(MiniCpmVision, vision_names=("vision_tower.", "merger."), renames=MINICPMV_RENAMES)
