"""LLaVA-1.5: a CLIP tower of one fixed picture size, a two-layer projector, a decoder of the Llama kind.

Knows config.json and the processor's configs in their old and new layouts. The number of placeholders follows from the
tower, because that is how many features there will be; `image_seq_length` of old files is not trusted.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.core.prompting import AS_CONFIGURED, PixelBudget
from hydra_engine.errors import CheckpointError
from hydra_engine.specs.assemble import model_spec, nested_language
from hydra_engine.specs.base import ItemPlan, MediaPlan, ModelSpec, PreprocessSpec, VideoInfo, VideoPlan, View
from hydra_engine.specs.clip import (
    ClipSpec,
    clip_tower,
    normalisation,
    picture_sizes,
    processor_settings,
    projector_parameters,
)
from hydra_engine.specs.decoder import activation
from hydra_engine.specs.fields import Fields
from hydra_engine.specs.files import ModelFiles
from hydra_engine.specs.geometry import check_picture, no_videos, shortest_edge_size


@dataclass(frozen=True, slots=True)
class LlavaVisionSpec:
    """A CLIP tower with the LLaVA projector on top. `shortest_edge` 0: pictures are stretched to the tower's square;
    else their shorter side gets that many pixels and the middle is cut out."""

    tower: ClipSpec
    projector_act: str
    projector_bias: bool
    feature_size: int
    shortest_edge: int
    preprocess: PreprocessSpec
    num_planes: int = 1

    @property
    def max_patches_per_image(self) -> int:
        return self.tower.num_patches

    @property
    def max_tokens_per_image(self) -> int:
        return self.tower.num_rows

    @property
    def max_tokens_per_item(self) -> int:
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

    def plan_video(self, video: VideoInfo) -> VideoPlan:
        raise no_videos()

    def num_parameters(self) -> int:
        """Of what is held: the tower up to its last active layer, and the projector."""
        projector = projector_parameters(self.tower.feature_size, self.feature_size, bias=self.projector_bias)
        return self.tower.num_parameters() + projector

    def flops(self, num_patches: int) -> int:
        """Of whole pictures with that many patches together."""
        projector = 2 * self.tower.num_rows * self.feature_size * (self.tower.feature_size + self.feature_size)
        return (self.tower.flops() + projector) * num_patches // self.tower.num_patches


def build_llava(files: ModelFiles) -> ModelSpec:
    config = files.config
    text, language = nested_language(files)
    return model_spec(
        files,
        "llava",
        text,
        language,
        vision=_vision(config, files.images, language.hidden_size),
        image_token_id=image_token_id(config),
    )


def image_token_id(config: Fields) -> int:
    """Older files call it an index."""
    return config.integer("image_token_index" if "image_token_index" in config else "image_token_id", at_least=0)


def _vision(config: Fields, images: Fields | None, feature_size: int) -> LlavaVisionSpec:
    tower = clip_tower(config)
    settings = processor_settings(images)
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
