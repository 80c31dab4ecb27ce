"""InternVL: the InternViT tower up to the hidden state that is read, and a projector of a norm and two linear layers
over concatenated squares of patches.
"""

from __future__ import annotations

from torch import Tensor

from hydra_engine.models.internvl.spec import InternVlVisionSpec
from hydra_engine.models.layers.basic import LayerNorm, Mlp
from hydra_engine.models.layers.vision import LayerNames, PatchMerger, PatchNames, SquareVision, TowerInput, TowerNames
from hydra_engine.models.llava.model import LLAVA_RENAMES
from hydra_engine.models.loading.parameters import Scope

_EPS = 1e-5  # of the projector's norm; no config names it
_NAMES = TowerNames(
    patches=PatchNames("patch_embeddings.projection", "cls_token", "position_embeddings", leading=(2, 1)),
    layers="encoder.layer",
    layer=LayerNames(
        norms=("layernorm_before", "layernorm_after"),
        attention="attention",
        out="projection_layer",
        scales=("lambda_1", "lambda_2"),  # multiplied into the weights of the projections before them
    ),
    pre_norm="",
    final_norm="layernorm",
    unread=("embeddings.mask_token",),
)


class InternVlVision(SquareVision):
    """InternVL's tower and projector; every span is one tile."""

    weight_names = ("vision_tower.", "multi_modal_projector.")
    renames = LLAVA_RENAMES

    def __init__(self, scope: Scope, spec: InternVlVisionSpec) -> None:
        super().__init__(scope, spec, _NAMES)
        projector, width, num_out = scope.child("multi_modal_projector"), spec.merged_size, spec.feature_size
        norm = LayerNorm(projector.child("layer_norm"), width, _EPS)
        mlp = Mlp(projector, ("linear_1", "linear_2"), width, num_out, num_out, spec.projector_act)
        self._project = PatchMerger(norm, mlp, width, norm_merged=True)

    def __call__(self, inputs: TowerInput) -> tuple[Tensor, ...]:
        return (inputs.slices.rows(self._project, self._merged(self._states(inputs))),)

    def _merged(self, states: Tensor) -> Tensor:
        """Concatenates the patches of each token row by row: [I, patches, C] -> [I * tokens, merge * merge * C]."""
        merge = self._spec.merge
        side = self._spec.tower.grid_side // merge
        squares = states.view(-1, side, merge, side, merge, states.shape[2]).transpose(2, 3)
        return squares.reshape(-1, merge * merge * states.shape[2])
