"""Qwen2-VL and Qwen2.5-VL: towers for pictures of any size and for videos, over a Qwen2 decoder with M-RoPE.

One spec for both: they cut pictures and videos alike, and differ in the tower's layers and in how time counts. Knows
config.json in its flat old and its nested new layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hydra_engine.errors import CheckpointError, InvalidImage
from hydra_engine.models.qwen_vl.frames_spec import FrameSampling, as_float32, frame_sampling
from hydra_engine.models.qwen_vl.geometry_spec import (
    PICTURES,
    PixelLimits,
    most_tokens,
    patch_geometry,
    pixel_limits,
    smart_resize,
)
from hydra_engine.models.qwen_vl.tower_spec import GridVisionSpec, QwenTower, build_grid_model
from hydra_engine.models.specs.assemble import ModelFiles
from hydra_engine.models.specs.base import LanguageSpec, MediaPlan, ModelSpec, VideoInfo, VideoPlan, View
from hydra_engine.models.specs.decoder import activation, build_language
from hydra_engine.models.specs.fields import Fields
from hydra_engine.models.specs.vision import normalisation, processor_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2VisionSpec(GridVisionSpec):
    """`tokens_per_second` 0: temporal patches of a video count 0, 1, 2, ... (Qwen2-VL); else by their time."""

    sampling: FrameSampling
    tokens_per_second: int
    max_time: int  # no temporal position of a video reaches this

    @property
    def max_tokens_per_item(self) -> int:
        """A temporal patch of a video may have more than any picture."""
        limits = self.sampling.limits
        most = max(limits.max_pixels, int(limits.min_pixels * 1.05))
        return max(self.max_tokens_per_image, most_tokens(self.geometry.factor, PixelLimits(limits.min_pixels, most)))

    @property
    def max_patches_per_image(self) -> int:
        return self.max_tokens_per_item * self.geometry.patches_per_token

    def plan_video(self, video: VideoInfo) -> VideoPlan:
        """One span per temporal patch; the last frame fills up the last of them."""
        frames = self.sampling.choose(video)
        depth, factor = self.geometry.temporal_patch_size, self.geometry.factor
        size = smart_resize(video.width, video.height, factor, self.sampling.frame_limits(len(frames), factor))
        times = self._times(video, len(frames))
        sources = (min(index, len(frames) - 1) for index in range(len(times) * depth))
        views = tuple(View.whole(*size, source=source) for source in sources)
        items = [self.geometry.item(size, depth, time=time, continues=index > 0) for index, time in enumerate(times)]
        return VideoPlan(frames, MediaPlan(views, tuple(items)))

    def num_parameters(self) -> int:
        tower = self.tower
        embeddings = self.geometry.patch_values * tower.hidden_size
        merger = tower.norm_parameters + self.merger_parameters()
        return embeddings + tower.num_layers * tower.layer_parameters() + merger

    def flops(self, num_patches: int) -> int:
        """Of one picture with that many patches, its windows taken as full."""
        tower, merged = self.tower, self.geometry.patches_per_token
        seen = min(num_patches, tower.window_tokens**2 * merged) if tower.windowed else num_patches
        num_full = len(tower.full_layers) if tower.windowed else tower.num_layers
        pairs = num_patches * (num_full * num_patches + (tower.num_layers - num_full) * seen)
        merger = num_patches // merged * self.merged_size * (self.merged_size + self.feature_size)
        linear = tower.num_layers * tower.layer_flops(num_patches)
        return (
            linear
            + 2 * (num_patches * self.geometry.patch_values * tower.hidden_size + merger)
            + 4 * pairs * tower.hidden_size
        )

    def _times(self, video: VideoInfo, num_frames: int) -> list[int]:
        """Temporal positions of the video's temporal patches, relative to its first.

        With `tokens_per_second` their distance is rounded to float32 before it is multiplied, and the product is
        rounded before it is cut off: that is what the families' processor and model do.
        """
        depth = self.geometry.temporal_patch_size
        count = math.ceil(num_frames / depth)
        if not self.tokens_per_second:
            return list(range(count))
        seconds = depth / (num_frames / video.num_frames * video.fps)
        if seconds * count * self.tokens_per_second >= self.max_time:
            raise InvalidImage(
                f"the video lasts {seconds * count:.0f} seconds, this model takes less than "
                f"{self.max_time // self.tokens_per_second}; cut it or give its frames at a higher rate"
            )
        distance = as_float32(self.tokens_per_second * as_float32(seconds))
        return [int(as_float32(index * distance)) for index in range(count)]


def build_qwen2_vl(files: ModelFiles) -> ModelSpec:
    vision = files.config.section("vision_config")
    hidden = vision.integer("embed_dim", 1280)
    tower = QwenTower(
        hidden_size=hidden,
        num_layers=vision.integer("depth", 32),
        num_heads=vision.integer("num_heads", 16),
        intermediate_size=int(hidden * vision.number("mlp_ratio", 4)),
        hidden_act=activation(vision, "hidden_act", "quick_gelu"),
        rope_theta=_rope_theta(vision),
    )
    return _build(files, "qwen2_vl", tower, width_field="hidden_size", tokens_per_second=0)


def build_qwen2_5_vl(files: ModelFiles) -> ModelSpec:
    vision = files.config.section("vision_config")
    side = vision.integer("spatial_merge_size", 2) * vision.integer("patch_size", 14)
    window = vision.integer("window_size", 112)
    if window < side:
        raise vision.wrong("window_size", f"at least {side} pixels, the width of one token")
    tower = QwenTower(
        hidden_size=vision.integer("hidden_size", 3584),
        num_layers=vision.integer("depth", 32),
        num_heads=vision.integer("num_heads", 16),
        intermediate_size=vision.integer("intermediate_size", 3420),
        hidden_act=activation(vision, "hidden_act", "silu"),
        rope_theta=_rope_theta(vision),
        window_tokens=window // side,
        full_layers=_full_layers(vision),
    )
    rate = vision.integer("tokens_per_second", 4)
    return _build(files, "qwen2_5_vl", tower, width_field="out_hidden_size", tokens_per_second=rate)


def _build(files: ModelFiles, family: str, tower: QwenTower, *, width_field: str, tokens_per_second: int) -> ModelSpec:
    """`width_field` of the tower's config says how wide its features are."""
    config, vision = files.config, files.config.section("vision_config")
    nested = config.section_if_present("text_config")
    text = config if nested is None else nested
    tie = config.flag("tie_word_embeddings", False) or text.flag("tie_word_embeddings", False)
    language = build_language(text, tie_embeddings=tie, nested=nested is not None)
    if vision.integer(width_field, 3584) != language.hidden_size:
        raise vision.wrong(width_field, f"{language.hidden_size}, the decoder's hidden size")
    if tower.hidden_size % (4 * tower.num_heads):
        raise CheckpointError(
            f"the vision tower's hidden size {tower.hidden_size} must be a multiple of 4 for each of its "
            f"{tower.num_heads} heads"
        )
    return build_grid_model(files, family, text, language, _vision(files, family, tower, tokens_per_second, language))


def _vision(
    files: ModelFiles, family: str, tower: QwenTower, tokens_per_second: int, language: LanguageSpec
) -> Qwen2VisionSpec:
    vision = files.config.section("vision_config")
    images = processor_settings(files.images)
    videos = images if files.videos is None else processor_settings(files.videos)
    geometry = patch_geometry(vision, images, patch_size=14)
    patch_geometry(vision, videos, patch_size=14)
    identity = f"{family}/{geometry.patch_size}/{geometry.merge_size}/{geometry.temporal_patch_size}"
    preprocess = normalisation(images, identity)
    if normalisation(videos, identity) != preprocess:
        raise CheckpointError(f"{videos.where} and {images.where} normalise pixels in different ways")
    return Qwen2VisionSpec(
        tower=tower,
        geometry=geometry,
        limits=pixel_limits(images, PICTURES, files.options),
        sampling=frame_sampling(videos, geometry.temporal_patch_size, files.options),
        tokens_per_second=tokens_per_second,
        max_time=language.max_position,
        feature_size=language.hidden_size,
        preprocess=preprocess,
    )


def _rope_theta(vision: Fields) -> float:
    rope = vision.section_if_present("rope_parameters")
    if rope is None:
        return 10000.0
    kind = rope.text("rope_type", "axial")
    if kind not in ("axial", "default"):
        raise rope.wrong("rope_type", '"axial"')
    return rope.number("rope_theta", 10000.0)


def _full_layers(vision: Fields) -> frozenset[int]:
    """Indices beyond the tower's layers say nothing: towers cut short keep the list of the whole one."""
    depth = vision.integer("depth", 32)
    value = vision.get("fullatt_block_indexes")
    layers = [7, 15, 23, 31] if value is None else value
    if not isinstance(layers, list) or any(type(index) is not int or index < 0 for index in layers):
        raise vision.wrong("fullatt_block_indexes", "a list of layers, counted from 0")
    return frozenset(index for index in layers if index < depth)
