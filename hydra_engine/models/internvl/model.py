"""InternVL: the InternViT tower up to the hidden state that is read, and a projector of a norm and two linear layers
over concatenated squares of patches.
"""

from __future__ import annotations

from torch import Tensor

from hydra_engine.models.internvl.spec import InternVlVisionSpec
from hydra_engine.models.layers.basic import LayerNorm, Mlp
from hydra_engine.models.layers.vision import LayerNames, PatchMerger, PatchNames, SquareVision, TowerInput, TowerNames
from hydra_engine.models.llava.model import LLAVA_RENAMES
from hydra_engine.models.loading.parameters import Renames, Scope

_EPS = 1e-5  # of the projector's norm; no config names it
NAMES = TowerNames(
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
CHAT_NAMES = TowerNames(
    patches=PatchNames("patch_embedding", "class_embedding", "position_embedding", leading=(2, 1)),
    layers="encoder.layers",
    layer=LayerNames(("norm1", "norm2"), "attn", qkv=("qkv",), out="proj", scales=("ls1", "ls2")),
    pre_norm="",
    final_norm="",
    unread=(),
)
CHAT_RENAMES: Renames = (
    ("vision_model.", "vision_tower."),
    ("mlp1.0.", "multi_modal_projector.layer_norm."),
    ("mlp1.1.", "multi_modal_projector.linear_1."),
    ("mlp1.3.", "multi_modal_projector.linear_2."),
    # InternLM2's decoder
    ("language_model.model.tok_embeddings.", "language_model.model.embed_tokens."),
    ("language_model.output.", "language_model.lm_head."),
    (".attention_norm.", ".input_layernorm."),
    (".attention.wqkv.", ".self_attn.wqkv."),
    (".attention.wo.", ".self_attn.o_proj."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".feed_forward.w1.", ".mlp.gate_proj."),
    (".feed_forward.w3.", ".mlp.up_proj."),
    (".feed_forward.w2.", ".mlp.down_proj."),
)


class InternVlVision(SquareVision):
    """InternVL's tower and projector; every span is one tile."""

    weight_names = ("vision_tower.", "multi_modal_projector.")
    renames = LLAVA_RENAMES
    names = NAMES

    def __init__(self, scope: Scope, spec: InternVlVisionSpec) -> None:
        super().__init__(scope, spec, self.names)
        self._axes = (0, 3, 1, 2, 4, 5) if spec.by_columns else (0, 1, 3, 2, 4, 5)
        projector, width, num_out = scope.child("multi_modal_projector"), spec.merged_size, spec.feature_size
        norm = LayerNorm(projector.child("layer_norm"), width, _EPS)
        mlp = Mlp(projector, ("linear_1", "linear_2"), width, num_out, num_out, spec.projector_act)
        self._project = PatchMerger(norm, mlp, width, norm_merged=True)

    def __call__(self, inputs: TowerInput) -> tuple[Tensor, ...]:
        return (inputs.slices.rows(self._project, self._merged(self._states(inputs))),)

    def _merged(self, states: Tensor) -> Tensor:
        """Concatenates the patches of each token row by row: [I, patches, C] -> [I * tokens, merge * merge * C]. The
        tokens of a tile are in the order of the spec."""
        merge = self._spec.merge
        side = self._spec.tower.grid_side // merge
        squares = states.view(-1, side, merge, side, merge, states.shape[2]).permute(self._axes)
        return squares.reshape(-1, merge * merge * states.shape[2])


class InternVlChatVision(InternVlVision):
    """The same with the names of OpenGVLab's own layout."""

    renames = CHAT_RENAMES
    names = CHAT_NAMES
