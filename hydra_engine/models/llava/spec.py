"""LLaVA-1.5: a CLIP tower of one fixed picture size, a two-layer projector, a decoder of the Llama kind.

Knows config.json and the processor's configs in their old and new layouts. The number of placeholders follows from the
tower, because that is how many features there will be; `image_seq_length` of old files is not trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hydra_engine.core.prompting import AS_CONFIGURED, PixelBudget
from hydra_engine.errors import CheckpointError
from hydra_engine.models.llava.clip_spec import ClipVisionSpec, clip_tower, picture_sizes
from hydra_engine.models.specs.assemble import ModelFiles, model_spec, nested_language
from hydra_engine.models.specs.base import ItemPlan, MediaPlan, ModelSpec, View
from hydra_engine.models.specs.decoder import activation
from hydra_engine.models.specs.fields import Fields
from hydra_engine.models.specs.geometry import check_picture, shortest_edge_size
from hydra_engine.models.specs.vision import normalisation, processor_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaVisionSpec(ClipVisionSpec):
    """`shortest_edge` 0: pictures are stretched to the tower's square; else their shorter side gets that many pixels
    and the middle is cut out."""

    shortest_edge: int

    @property
    def max_patches_per_image(self) -> int:
        return self.tower.num_patches

    @property
    def max_tokens_per_image(self) -> int:
        return self.tower.num_rows

    def plan_image(self, width: int, height: int, budget: PixelBudget = AS_CONFIGURED) -> MediaPlan:
        """One size fits all: a budget changes nothing."""
        check_picture(width, height)
        side = self.tower.image_size
        view = View.whole(side, side)
        if self.shortest_edge:
            resized = shortest_edge_size(width, height, self.shortest_edge)
            # Floor division, also of negative numbers: where the resized picture is too small, black goes around it.
            corner = (-((resized[0] - side) // 2), -((resized[1] - side) // 2))
            view = View(resized, (side, side), corner, (side, side))
        grid = (1, self.tower.grid_side, self.tower.grid_side)
        return MediaPlan((view,), (ItemPlan(side, side, 1, self.tower.num_patches, self.tower.num_rows, grid),))


def build_llava(files: ModelFiles) -> ModelSpec:
    return build_clip_model(files, "llava", _vision)


def build_clip_model(
    files: ModelFiles, family: str, vision: Callable[[Fields, Fields, int], ClipVisionSpec]
) -> ModelSpec:
    """`vision` makes of config.json, the image processor's settings and the decoder's width what a family sees."""
    config = files.config
    text, language = nested_language(files)
    # Older files call the id of the token an index.
    name = "image_token_index" if "image_token_index" in config else "image_token_id"
    return model_spec(
        files,
        family,
        text,
        language,
        vision=vision(config, processor_settings(files.images), language.hidden_size),
        image_token_id=config.integer(name, at_least=0),
    )


def _vision(config: Fields, settings: Fields, feature_size: int) -> LlavaVisionSpec:
    tower = clip_tower(config)
    if settings.flag("do_pad", False):
        raise CheckpointError(f"do_pad in {settings.where} is not supported")
    side = tower.image_size
    shortest_edge, (height, width) = picture_sizes(settings, side)
    if (height, width) != (side, side):
        raise CheckpointError(
            f"{settings.where} makes pictures of {width} x {height} pixels, the tower takes {side} x {side}"
        )
    return LlavaVisionSpec(
        tower=tower,
        projector_act=activation(config, "projector_hidden_act", "gelu"),
        projector_bias=config.flag("multimodal_projector_bias", True),
        feature_size=feature_size,
        shortest_edge=shortest_edge,
        preprocess=normalisation(settings, f"clip/{shortest_edge}/{width}x{height}"),
    )
