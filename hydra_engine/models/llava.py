"""LLaVA-1.5: the CLIP tower with its projector, and the names of its weights."""

from __future__ import annotations

from torch import Tensor

from hydra_engine.models.family import Family, Renames
from hydra_engine.models.parameters import Scope
from hydra_engine.models.projector import LlavaProjector
from hydra_engine.models.vision_clip import ClipTower
from hydra_engine.models.vision_packing import SquareVision, TowerInput
from hydra_engine.specs.base import VisionSpec
from hydra_engine.specs.llava import LlavaVisionSpec

# Names as of transformers 4 (in files and in memory) and 5 (in memory) -> as transformers 5 writes them.
LLAVA_RENAMES: Renames = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.vision_tower.vision_model.", "vision_tower."),
    ("model.vision_tower.", "vision_tower."),
    ("vision_tower.vision_model.", "vision_tower."),
)


class LlavaVision(SquareVision):
    """Every span is one picture of the tower's size."""

    def __init__(self, scope: Scope, spec: VisionSpec) -> None:
        assert isinstance(spec, LlavaVisionSpec)
        self._tower = ClipTower(scope.at("vision_tower"), spec.tower, spec.preprocess)
        super().__init__(self._tower.squares, self._tower.cut)
        self._project = LlavaProjector(
            scope.at("multi_modal_projector"),
            spec.tower.feature_size,
            spec.feature_size,
            act=spec.projector_act,
            bias=spec.projector_bias,
        )

    @property
    def num_slices(self) -> int:
        return self._tower.num_slices

    def __call__(self, inputs: TowerInput) -> tuple[Tensor, ...]:
        return (inputs.slices.rows(self._project, self._tower(inputs)),)


LLAVA = Family(LlavaVision, vision_names=("vision_tower.", "multi_modal_projector."), renames=LLAVA_RENAMES)
