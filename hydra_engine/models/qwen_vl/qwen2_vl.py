"""Qwen2-VL: a tower that attends within each picture, with rows and columns as rotary positions, and its merger."""

from __future__ import annotations

from torch import Tensor

from hydra_engine.models.layers.basic import LayerNorm, Mlp, RmsNorm
from hydra_engine.models.layers.vision import PatchMerger
from hydra_engine.models.layers.vision_packing import TowerInput
from hydra_engine.models.loading.parameters import Renames, Scope
from hydra_engine.models.qwen_vl.patches import EPS, GridVision
from hydra_engine.models.qwen_vl.qwen2_vl_spec import Qwen2VisionSpec

# Names as published and as of transformers 4 -> canonical ones; first those of transformers 5.
QWEN_RENAMES: Renames = (
    ("model.visual.", "visual."),
    ("model.language_model.", "language_model.model."),
    ("model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)


class Qwen2Vision(GridVision):
    """Every span is a picture or a temporal patch of a video; what it attends to is itself."""

    renames = QWEN_RENAMES

    def __init__(self, scope: Scope, spec: Qwen2VisionSpec) -> None:
        scope = scope.at("visual")
        super().__init__(scope, spec)
        merger, width = scope.at("merger"), spec.merged_size
        norm = (RmsNorm if spec.tower.windowed else LayerNorm)(merger.at("ln_q"), spec.tower.hidden_size, EPS)
        mlp = Mlp(merger, ("mlp.0", "mlp.2"), width, width, spec.feature_size, "gelu")
        self._merger = PatchMerger(norm, mlp, width, norm_merged=False)

    def __call__(self, inputs: TowerInput) -> tuple[Tensor, ...]:
        slices, (cu_seqlens,), (rows, columns) = inputs.slices, inputs.segments, inputs.indices
        rotary = self._rotary(rows, columns, inputs.end)
        x = slices.rows(self._embed, inputs.patches)  # [P, C]
        for block in slices.between(self._blocks):
            x = block(x, cu_seqlens, slices, rotary)
        return (slices.rows(self._merger, x, group=self.granule),)
