"""InternVL: the InternViT tower up to the hidden state that is read, squares of its patches side by side as one row, a
norm and two linear layers."""

from __future__ import annotations

from torch import Tensor

from hydra_engine.models.internvl.spec import InternVitSpec, InternVlVisionSpec
from hydra_engine.models.layers.basic import LayerNorm, Mlp
from hydra_engine.models.layers.vision import (
    LayerNames,
    LayerShape,
    PatchEmbeddings,
    PatchMerger,
    PatchNames,
    PatchShape,
    SquareTower,
    SquareVision,
    VisionLayer,
)
from hydra_engine.models.layers.vision_packing import TowerInput
from hydra_engine.models.llava.model import LLAVA_RENAMES
from hydra_engine.models.loading.parameters import Scope
from hydra_engine.models.specs.base import PreprocessSpec

_EPS = 1e-5  # of the projector's norm; no config names it
_PATCHES = PatchNames("patch_embeddings.projection", "cls_token", "position_embeddings", leading=(2, 1))
_LAYER = LayerNames(
    norms=("layernorm_before", "layernorm_after"),
    attention="attention",
    out="projection_layer",
    scales=("lambda_1", "lambda_2"),
)


class InternVlVision(SquareVision):
    """Every span is one tile."""

    weight_names = ("vision_tower.", "multi_modal_projector.")
    renames = LLAVA_RENAMES

    def __init__(self, scope: Scope, spec: InternVlVisionSpec) -> None:
        super().__init__(intern_vit(scope.at("vision_tower"), spec.tower, spec.preprocess), spec.num_tokens)
        self._merge, self._merged_side = spec.merge, spec.tower.grid_side // spec.merge
        projector, width, num_out = scope.at("multi_modal_projector"), spec.merged_size, spec.feature_size
        norm = LayerNorm(projector.at("layer_norm"), width, _EPS)
        mlp = Mlp(projector, ("linear_1", "linear_2"), width, num_out, num_out, spec.projector_act)
        self._project = PatchMerger(norm, mlp, width, norm_merged=True)

    def __call__(self, inputs: TowerInput) -> tuple[Tensor, ...]:
        return (inputs.slices.rows(self._project, self._merged(self._tower(inputs))),)

    def _merged(self, states: Tensor) -> Tensor:
        """[I, patches, C] -> [I * tokens, merge * merge * C]: the patches of a token row by row."""
        side, merge = self._merged_side, self._merge
        squares = states.view(-1, side, merge, side, merge, states.shape[2]).transpose(2, 3)
        return squares.reshape(-1, merge * merge * states.shape[2])


def intern_vit(scope: Scope, spec: InternVitSpec, preprocess: PreprocessSpec) -> SquareTower:
    """Layer scale is multiplied into the weights of the projections before it."""
    size = spec.hidden_size
    patches = PatchShape(spec.grid_side, spec.patch_size, size, bias=True)
    embed = PatchEmbeddings(scope.at("embeddings"), patches, preprocess, _PATCHES)
    shape = LayerShape(
        size,
        spec.num_heads,
        spec.intermediate_size,
        spec.hidden_act,
        spec.norm_eps,
        rms_norms=spec.rms_norms,
        qkv_bias=spec.qkv_bias,
        qk_norm=spec.qk_norm,
    )
    layers = [VisionLayer(scope.at(f"encoder.layer.{i}"), shape, _LAYER) for i in range(spec.num_active_layers)]
    norm = LayerNorm(scope.at("layernorm"), size, spec.norm_eps) if spec.final_norm else None
    unread = range(spec.num_active_layers, spec.num_layers)
    scope.skip("embeddings.mask_token", *(f"encoder.layer.{i}." for i in unread))
    if norm is None:
        scope.skip("layernorm.")
    return SquareTower(embed, layers, (None, norm), (spec.num_active_layers,))
