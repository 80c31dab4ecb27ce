"""LLaVA-1.5: the CLIP tower up to the last hidden state that is read, the projector, and the names of their weights."""

from __future__ import annotations

from torch import Tensor

from hydra_engine.models.layers.basic import LayerNorm, Mlp
from hydra_engine.models.layers.vision import (
    LayerShape,
    PatchEmbeddings,
    PatchShape,
    SquareTower,
    SquareVision,
    VisionLayer,
)
from hydra_engine.models.layers.vision_packing import TowerInput
from hydra_engine.models.llava.clip_spec import ClipSpec
from hydra_engine.models.llava.spec import LlavaVisionSpec
from hydra_engine.models.llava_next.spec import LlavaNextVisionSpec
from hydra_engine.models.loading.parameters import Renames, Scope
from hydra_engine.models.specs.base import PreprocessSpec

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

    weight_names: tuple[str, ...] = ("vision_tower.", "multi_modal_projector.")
    renames: Renames = LLAVA_RENAMES

    def __init__(self, scope: Scope, spec: LlavaVisionSpec | LlavaNextVisionSpec) -> None:
        super().__init__(clip_tower(scope.at("vision_tower"), spec.tower, spec.preprocess), spec.tower.num_rows)
        self._project = Mlp(
            scope.at("multi_modal_projector"),
            ("linear_1", "linear_2"),
            spec.tower.feature_size,
            spec.feature_size,
            spec.feature_size,
            spec.projector_act,
            bias=spec.projector_bias,
        )

    def __call__(self, inputs: TowerInput) -> tuple[Tensor, ...]:
        return (inputs.slices.rows(self._project, self._tower(inputs).flatten(0, 1)),)


def clip_tower(scope: Scope, spec: ClipSpec, preprocess: PreprocessSpec) -> SquareTower:
    """Layers that nobody reads are neither loaded nor computed."""
    patches = PatchShape(spec.grid_side, spec.patch_size, spec.hidden_size, bias=False)
    embed = PatchEmbeddings(scope.at("embeddings"), patches, preprocess)
    # The misspelling is the checkpoints'.
    pre_norm = LayerNorm(scope.at("pre_layrnorm"), spec.hidden_size, spec.norm_eps)
    shape = LayerShape(spec.hidden_size, spec.num_heads, spec.intermediate_size, spec.hidden_act, spec.norm_eps)
    layers = [VisionLayer(scope.at(f"encoder.layers.{i}"), shape) for i in range(spec.num_active_layers)]
    unread = range(spec.num_active_layers, spec.num_layers)
    scope.skip("post_layernorm.", "embeddings.position_ids", *(f"encoder.layers.{i}." for i in unread))
    return SquareTower(embed, layers, (pre_norm, None), spec.feature_layers, keep_cls=spec.keep_cls)
