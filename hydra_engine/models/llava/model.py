"""LLaVA-1.5: the CLIP tower up to the last hidden state that is read, the projector, and the names of their weights."""

from __future__ import annotations

from torch import Tensor

from hydra_engine.models.layers.basic import Mlp
from hydra_engine.models.layers.vision import LayerNames, PatchNames, SquareVision, TowerInput, TowerNames
from hydra_engine.models.loading.parameters import Renames, Scope
from hydra_engine.models.specs.vision import SquareVisionSpec

# Names as of transformers 4 (in files and in memory) and 5 (in memory) -> as transformers 5 writes them.
LLAVA_RENAMES: Renames = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.vision_tower.vision_model.", "vision_tower."),
    ("model.vision_tower.", "vision_tower."),
    ("vision_tower.vision_model.", "vision_tower."),
)


CLIP = TowerNames(
    patches=PatchNames("patch_embedding", "class_embedding", "position_embedding.weight"),
    layers="encoder.layers",
    layer=LayerNames(),
    pre_norm="pre_layrnorm",  # the misspelling is the checkpoints'
    final_norm="post_layernorm",
    unread=("embeddings.position_ids",),
)


# Names as liuhaotian published them.
ORIGINAL_RENAMES: Renames = (
    ("model.mm_projector.0.", "multi_modal_projector.linear_1."),
    ("model.mm_projector.2.", "multi_modal_projector.linear_2."),
    ("model.vision_tower.vision_tower.vision_model.", "vision_tower."),
    ("model.image_newline", "image_newline"),
    ("model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
)


class LlavaVision(SquareVision):
    """LLaVA-1.5's tower and projector; every span is one picture of the tower's size."""

    weight_names: tuple[str, ...] = ("vision_tower.", "multi_modal_projector.")
    renames: Renames = LLAVA_RENAMES

    def __init__(self, scope: Scope, spec: SquareVisionSpec) -> None:
        super().__init__(scope, spec, CLIP)
        self._project = Mlp(
            scope.child("multi_modal_projector"),
            ("linear_1", "linear_2"),
            spec.tower.feature_size,
            spec.feature_size,
            spec.feature_size,
            spec.projector_act,
            bias=spec.projector_bias,
        )

    def __call__(self, inputs: TowerInput) -> tuple[Tensor, ...]:
        return (inputs.slices.rows(self._project, self._states(inputs).flatten(0, 1)),)


class LlavaOriginalVision(LlavaVision):
    """The same with liuhaotian's names."""

    renames = ORIGINAL_RENAMES
