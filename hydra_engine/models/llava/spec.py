"""LLaVA-1.5: a CLIP tower of one fixed picture size, a two-layer projector, a decoder of the Llama kind.

Knows config.json and the processor's configs in their old and new layouts. The number of placeholders follows from the
tower, because that is how many features there will be; `image_seq_length` of old files is not trusted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hydra_engine.core.prompting import AS_CONFIGURED, PixelBudget
from hydra_engine.errors import CheckpointError, InvalidImage
from hydra_engine.models.specs.assemble import ModelFiles, model_spec, nested_language
from hydra_engine.models.specs.base import ItemPlan, MediaPlan, ModelSpec, View
from hydra_engine.models.specs.decoder import activation
from hydra_engine.models.specs.fields import ELSEWHERE, MAX_LAYERS, Fields
from hydra_engine.models.specs.vision import (
    SquareTowerSpec,
    SquareVisionSpec,
    TowerSpec,
    check_patches,
    check_picture,
    normalisation,
    processor_settings,
    shortest_edge_size,
    tower_config,
    tower_shape,
)

MAX_PADDED_SIDE = 8192  # of a picture that becomes a square: 192 MiB in the process that decodes
CLIP_DEFAULTS = TowerSpec(  # CLIPVisionConfig's
    hidden_size=768, num_layers=12, num_heads=12, intermediate_size=3072, hidden_act="quick_gelu", norm_eps=1e-5
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaVisionSpec(SquareVisionSpec):
    """LLaVA-1.5's tower. `shortest_edge` 0: pictures are stretched to the tower's square; else their shorter side is
    resized to that many pixels and the centre is cropped. `padding`: colour that makes them squares first."""

    shortest_edge: int
    padding: tuple[int, int, int] | None = None

    @property
    def max_patches_per_image(self) -> int:
        return self.tower.num_patches

    @property
    def max_tokens_per_image(self) -> int:
        return self.tower.num_rows

    def plan_image(self, width: int, height: int, budget: PixelBudget = AS_CONFIGURED) -> MediaPlan:
        """Plans one picture of the tower's size; the budget has no effect."""
        check_picture(width, height)
        side = self.tower.image_size
        view = View.whole(side, side)._replace(padding=self.padding)
        if self.padding is not None and max(width, height) > MAX_PADDED_SIDE:
            raise InvalidImage(
                f"a picture of {width} x {height} pixels cannot be padded to a square; its longer side may have "
                f"{MAX_PADDED_SIDE} pixels"
            )
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
    files: ModelFiles, family: str, vision: Callable[[Fields, Fields, int], SquareVisionSpec]
) -> ModelSpec:
    """Builds the spec of a model with a CLIP tower. `vision` builds the family's vision spec from config.json, the
    image processor's settings and the decoder's width."""
    config = files.config
    text, language = nested_language(files, "llama")
    # Older files call the id of the token an index.
    name = "image_token_index" if "image_token_index" in config else "image_token_id"
    return model_spec(
        files,
        family,
        text,
        language,
        vision=vision(config, processor_settings(files.images), language.hidden_size),
        image_token_id=config.integer(name, 32000, at_least=0),
    )


def _vision(config: Fields, settings: Fields, feature_size: int) -> LlavaVisionSpec:
    tower = clip_tower(config)
    if settings.flag("do_pad", False):
        raise CheckpointError(f"do_pad in {settings.where} is not supported{ELSEWHERE}")
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


def clip_tower(config: Fields) -> SquareTowerSpec:
    tower = tower_config(config, "clip_vision_model")
    shape = tower_shape(tower, CLIP_DEFAULTS)
    image_size, patch_size = tower.integer("image_size", 224), tower.integer("patch_size", 32)
    check_patches(tower, image_size, patch_size)
    strategy = config.text("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise config.wrong_value("vision_feature_select_strategy", '"default" or "full"')
    return SquareTowerSpec(
        **shape,
        image_size=image_size,
        patch_size=patch_size,
        feature_layers=_feature_layers(config, shape["num_layers"]),
        keep_cls=strategy == "full",
        patch_bias=False,
        pre_norm=True,
    )


def _feature_layers(config: Fields, num_layers: int) -> tuple[int, ...]:
    value = config.get("vision_feature_layer")
    layers = value if isinstance(value, list) else [-2 if value is None else value]
    indices = []
    for layer in layers:
        index = layer + num_layers + 1 if isinstance(layer, int) and layer < 0 else layer
        if isinstance(layer, bool) or not isinstance(index, int) or not 0 <= index <= num_layers:
            raise config.wrong_value("vision_feature_layer", f"a layer of the tower's {num_layers} or a list of them")
        indices.append(index)
    if not 1 <= len(indices) <= MAX_LAYERS:
        raise config.wrong_value("vision_feature_layer", f"1 to {MAX_LAYERS} layers")
    return tuple(indices)


def picture_sizes(images: Fields, image_size: int) -> tuple[int, tuple[int, int]]:
    """Returns the processor's (shortest edge, or 0 to stretch; (height, width) of the result)."""
    crop = _size(images, "crop_size", image_size) if images.flag("do_center_crop", True) else None
    size = images.get("size")
    if isinstance(size, dict) and "shortest_edge" not in size:
        exact = _size(images, "size", image_size)
        if crop is not None and crop != exact:
            raise images.wrong_value("crop_size", "equal to size where size gives height and width")
        return 0, exact
    shortest = images.section("size") if isinstance(size, dict) else images
    edge = shortest.integer("shortest_edge" if isinstance(size, dict) else "size", image_size)
    if crop is None:
        raise CheckpointError(f"do_center_crop false needs a height and a width in size of {images.where}")
    return edge, crop


def _size(images: Fields, name: str, default: int) -> tuple[int, int]:
    if not isinstance(images.get(name), dict):
        side = images.integer(name, default)
        return side, side
    section = images.section(name)
    return section.integer("height"), section.integer("width")
