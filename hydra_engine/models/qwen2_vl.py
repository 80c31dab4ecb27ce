"""Qwen2-VL: a tower that attends within each picture, with rows and columns as rotary positions, and its merger."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from hydra_engine.backend.base import Activation, Segments
from hydra_engine.models.attention import PackedAttention, Rotary
from hydra_engine.models.family import Family, Renames
from hydra_engine.models.layers import LayerNorm, Linear
from hydra_engine.models.parameters import Scope
from hydra_engine.models.qwen_merger import PatchMerger
from hydra_engine.models.qwen_patches import GridVision, PatchEmbedding, PatchRotary
from hydra_engine.models.vision_layers import run_layer
from hydra_engine.models.vision_packing import TowerInput
from hydra_engine.models.vision_slices import Slices
from hydra_engine.specs.base import VisionSpec
from hydra_engine.specs.qwen2_vl import Qwen2VisionSpec, QwenTower

# Names as published and as of transformers 4 -> canonical ones; first those of transformers 5.
QWEN_RENAMES: Renames = (
    ("model.visual.", "visual."),
    ("model.language_model.", "language_model.model."),
    ("model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)
EPS = 1e-6  # of all norms of the towers, whatever a config says


class Qwen2Vision(GridVision):
    """Every span is a picture or a temporal patch of a video; what it attends to is itself."""

    def __init__(self, scope: Scope, spec: VisionSpec) -> None:
        assert isinstance(spec, Qwen2VisionSpec)
        tower, geometry, scope = spec.tower, spec.geometry, scope.at("visual")
        size = tower.hidden_size
        embed = PatchEmbedding(scope.at("patch_embed"), geometry, size, spec.preprocess, bias=False)
        super().__init__(geometry.merge_size, embed, PatchRotary(tower.head_dim, tower.rope_theta, scope.device))
        self._blocks = tuple(QwenBlock(scope.at(f"blocks.{i}"), tower) for i in range(tower.num_layers))
        merger = scope.at("merger")
        norm = LayerNorm(merger.at("ln_q"), size, EPS)
        self._merger = PatchMerger(merger, norm, size, geometry.patches_per_token, spec.feature_size)

    @property
    def num_slices(self) -> int:
        """Pieces of an encode: what comes before the layers, the layers, the merger."""
        return len(self._blocks) + 2

    def __call__(self, inputs: TowerInput) -> tuple[Tensor, ...]:
        slices, (cu_seqlens,), (rows, columns) = inputs.slices, inputs.segments, inputs.indices
        rotary = self._rotary(rows, columns, inputs.end)
        x = self._embed(inputs.patches, slices)  # [P, C]
        for block in slices.between(self._blocks):
            x = block(x, cu_seqlens, rotary, slices)
        return (slices.rows(self._merger, x, group=self.granule),)


class QwenBlock:
    def __init__(self, scope: Scope, tower: QwenTower) -> None:
        size = tower.hidden_size
        self._norm1 = LayerNorm(scope.at("norm1"), size, EPS)
        self._attention = PackedAttention(scope.at("attn"), size, tower.num_heads, qkv=("qkv",), out="proj")
        self._norm2 = LayerNorm(scope.at("norm2"), size, EPS)
        self._fc1 = Linear(scope, {"mlp.fc1": tower.intermediate_size}, size, bias=True)
        self._fc2 = Linear(scope, {"mlp.fc2": size}, tower.intermediate_size, bias=True)
        self._act = cast(Activation, tower.hidden_act)

    def __call__(self, x: Tensor, cu_seqlens: Segments, rotary: Rotary, slices: Slices) -> Tensor:
        return run_layer(x, self._norm1, self._attention, self._add_mlp, cu_seqlens, rotary, slices)

    def _add_mlp(self, x: Tensor) -> Tensor:
        return self._fc2(self._fc1(self._norm2(x), self._act), residual=x)


QWEN2_VL = Family(Qwen2Vision, vision_names=("visual.",), renames=QWEN_RENAMES)
