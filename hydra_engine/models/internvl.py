"""InternVL: the InternViT tower, squares of its patches side by side as one row, a norm and two linear layers."""

from __future__ import annotations

from torch import Tensor

from hydra_engine.models.family import Family
from hydra_engine.models.layers import LayerNorm
from hydra_engine.models.llava import LLAVA_RENAMES
from hydra_engine.models.parameters import Scope
from hydra_engine.models.projector import LlavaProjector
from hydra_engine.models.vision_internvit import InternVit
from hydra_engine.models.vision_packing import SquareVision, TowerInput
from hydra_engine.specs.base import VisionSpec
from hydra_engine.specs.internvl import InternVlVisionSpec

_EPS = 1e-5  # of the projector's norm; no config names it


class InternVlVision(SquareVision):
    """Every span is one tile."""

    def __init__(self, scope: Scope, spec: VisionSpec) -> None:
        assert isinstance(spec, InternVlVisionSpec)
        self._merge = spec.merge
        self._merged_side = spec.tower.grid_side // spec.merge
        self._tower = InternVit(scope.at("vision_tower"), spec.tower, spec.preprocess)
        super().__init__(self._tower.squares._replace(num_features=self._merged_side**2), self._tower.cut)
        projector = scope.at("multi_modal_projector")
        self._norm = LayerNorm(projector.at("layer_norm"), spec.merged_size, _EPS)
        self._project = LlavaProjector(
            projector, spec.merged_size, spec.feature_size, act=spec.projector_act, bias=True
        )

    @property
    def num_slices(self) -> int:
        return self._tower.num_slices

    def __call__(self, inputs: TowerInput) -> tuple[Tensor, ...]:
        merged = self._merged(self._tower(inputs))
        return (inputs.slices.rows(lambda rows: self._project(self._norm(rows)), merged),)

    def _merged(self, states: Tensor) -> Tensor:
        """[I, patches, C] -> [I * tokens, merge * merge * C]: the patches of a token row by row."""
        side, merge = self._merged_side, self._merge
        squares = states.view(-1, side, merge, side, merge, states.shape[2]).transpose(2, 3)
        return squares.reshape(-1, merge * merge * states.shape[2])


INTERNVL = Family(InternVlVision, vision_names=("vision_tower.", "multi_modal_projector."), renames=LLAVA_RENAMES)
