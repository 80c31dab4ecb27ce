"""The specs of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 (dense): towers for pictures of any size and for videos.

Qwen2-VL and Qwen2.5-VL cut pictures and videos alike and differ in the tower's layers and in how time counts; Qwen3-VL
reads features of several of the tower's layers and writes the times of frames into the prompt. Qwen3.5 has Qwen3-VL's
tower, whose last layer alone it reads, before the hybrid decoder. Knows config.json, in its flat old and its nested new
layout, and the settings of the picture and video processors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from hydra_engine.core.prompting import AS_CONFIGURED, PixelBudget
from hydra_engine.errors import CheckpointError, InvalidImage
from hydra_engine.models.qwen_vl.geometry_spec import (
    PICTURES,
    FrameSampling,
    PatchGeometry,
    PixelLimits,
    TimedFrames,
    as_float32,
    budgeted_size,
    frame_sampling,
    max_image_tokens,
    patch_geometry,
    pixel_limits,
    smart_resize,
    timed_frames,
)
from hydra_engine.models.specs.assemble import ModelFiles, model_spec, nested_language, with_model_type
from hydra_engine.models.specs.base import (
    ItemPlan,
    LanguageSpec,
    MediaPlan,
    ModelSpec,
    PreprocessSpec,
    TowerAttention,
    VideoInfo,
    VideoPlan,
    View,
    VisionSpec,
)
from hydra_engine.models.specs.decoder import activation, build_language, decoder_type
from hydra_engine.models.specs.fields import MAX_LAYERS, Fields
from hydra_engine.models.specs.rope import rope_section
from hydra_engine.models.specs.vision import (
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    Colour,
    TowerSpec,
    normalisation,
    processor_settings,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenTower(TowerSpec):
    """Shape of a Qwen-VL tower. `window_tokens` is the side of a window in Qwen2.5-VL, in which all layers but
    `full_layers` attend; 0 in the other families."""

    norm_eps: float = 1e-6  # whatever a config says
    rope_theta: float
    window_tokens: int = 0
    full_layers: frozenset[int] = frozenset()

    @property
    def windowed(self) -> bool:
        return self.window_tokens > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GridVisionSpec(VisionSpec):
    """A tower for pictures of any size: a picture is one span."""

    tower: QwenTower
    geometry: PatchGeometry
    limits: PixelLimits

    @property
    def attention(self) -> TowerAttention:
        window = self.tower.window_tokens**2 * self.geometry.patches_per_token
        return TowerAttention(self.tower.num_heads, self.tower.head_dim, self.max_patches_per_image, window)

    @property
    def merged_size(self) -> int:
        """Channels of the concatenated patches of one token."""
        return self.tower.hidden_size * self.geometry.patches_per_token

    def num_parameters(self) -> int:
        tower = self.tower
        embeddings = self.geometry.patch_values * tower.hidden_size
        merger = (self.merged_size + 1) * (self.merged_size + self.feature_size)
        layers = tower.num_layers * tower.layer_parameters()
        return embeddings + layers + tower.norm_parameters + self.num_planes * merger

    def flops(self, num_patches: int) -> int:
        """FLOPs of one picture with `num_patches` patches; its windows count as full."""
        tower, merged = self.tower, self.geometry.patches_per_token
        seen = min(num_patches, tower.window_tokens**2 * merged) if tower.windowed else num_patches
        num_full = len(tower.full_layers) if tower.windowed else tower.num_layers
        layers = num_full * tower.layer_work(num_patches, num_patches)
        layers += (tower.num_layers - num_full) * tower.layer_work(num_patches, seen)
        embeddings = num_patches * self.geometry.patch_values * tower.hidden_size
        return 2 * (layers + embeddings + num_patches // merged * self.merger_weights)

    @property
    def merger_weights(self) -> int:
        """Weights of the matrices after the layers, each of which multiplies every token once."""
        return self.merged_size * (self.merged_size + self.feature_size) * self.num_planes

    @property
    def max_tokens_per_image(self) -> int:
        return max_image_tokens(self.geometry.factor, self.limits)

    def plan_image(self, width: int, height: int, budget: PixelBudget = AS_CONFIGURED) -> MediaPlan:
        size = budgeted_size(width, height, self.geometry.factor, self.limits, budget)
        return MediaPlan((View.whole(*size),), (self.geometry.item(size),))


def rope_theta(tower: Fields) -> float:
    rope = rope_section(tower)
    kind = rope.text("rope_type", rope.text("type", "axial"))
    if kind not in ("axial", "default"):
        raise rope.wrong_value("rope_type", '"axial"')
    return rope.number("rope_theta", tower.number("rope_theta", 10000.0))


class GridSettings(NamedTuple):
    """Settings shared by the tower's config and both processors."""

    geometry: PatchGeometry
    limits: PixelLimits  # of a picture
    preprocess: PreprocessSpec
    videos: Fields  # the image processor's if there is no video processor


def grid_settings(
    files: ModelFiles, family: str, patch_size: int, *, video_mean: Colour = CLIP_MEAN, video_std: Colour = CLIP_STD
) -> GridSettings:
    """Reads the settings. `patch_size`, `video_mean` and `video_std` are the defaults of the processors' classes."""
    tower, images = files.config.section("vision_config"), processor_settings(files.images)
    videos = images if files.videos is None else processor_settings(files.videos)
    geometry = patch_geometry(tower, images, patch_size)
    patch_geometry(tower, videos, patch_size)
    identity = f"{family}/{geometry.patch_size}/{geometry.merge_size}/{geometry.temporal_patch_size}"
    preprocess = normalisation(images, identity)
    if videos is not images and normalisation(videos, identity, mean=video_mean, std=video_std) != preprocess:
        raise CheckpointError(f"{videos.where} and {images.where} normalise pixels in different ways")
    return GridSettings(geometry, pixel_limits(images, PICTURES, files.options), preprocess, videos)


def build_grid_model(
    files: ModelFiles,
    family: str,
    text: Fields,
    language: LanguageSpec,
    vision: GridVisionSpec,
    width_field: str | None = "out_hidden_size",
    token_ids: tuple[int, int] = (151655, 151656),
) -> ModelSpec:
    """Builds the spec of a model. `width_field` is the field of the tower's config with the width of its features
    (None: a projection follows it), `token_ids` the type's placeholders of pictures and videos, where a config has
    none."""
    tower, config = vision.tower, files.config.section("vision_config")
    if width_field is not None and config.integer(width_field, 3584) != language.hidden_size:
        raise config.wrong_value(width_field, f"{language.hidden_size}, the decoder's hidden size")
    if tower.hidden_size % (4 * tower.num_heads):
        raise CheckpointError(
            f"the vision tower's hidden size {tower.hidden_size} must be a multiple of 4 for each of its "
            f"{tower.num_heads} heads"
        )
    return model_spec(
        files,
        family,
        text,
        language,
        vision=vision,
        image_token_id=files.config.integer("image_token_id", token_ids[0], at_least=0),
        video_token_id=files.config.integer("video_token_id", token_ids[1], at_least=0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2VisionSpec(GridVisionSpec):
    """The towers of Qwen2-VL and Qwen2.5-VL. `tokens_per_second` 0: temporal patches of a video have positions 0, 1, 2,
    ... (Qwen2-VL); else positions follow their time."""

    sampling: FrameSampling
    tokens_per_second: int
    max_time: int  # no temporal position of a video reaches this

    @property
    def max_tokens_per_item(self) -> int:
        """Maximum number of tokens of a span; a temporal patch of a video may have more than any picture."""
        limits = self.sampling.limits
        most = max(limits.max_pixels, int(limits.min_pixels * 1.05))
        return max(
            self.max_tokens_per_image, max_image_tokens(self.geometry.factor, PixelLimits(limits.min_pixels, most))
        )

    @property
    def max_patches_per_image(self) -> int:
        return self.max_tokens_per_item * self.geometry.patches_per_token

    def plan_video(self, video: VideoInfo) -> VideoPlan:
        """Plans one span per temporal patch; the last one is filled up by repeating the last frame."""
        frames = self.sampling.choose_frames(video)
        depth, factor = self.geometry.temporal_patch_size, self.geometry.factor
        size = smart_resize(video.width, video.height, factor, self.sampling.frame_limits(len(frames), factor))
        times = self._times(video, len(frames))
        sources = (min(index, len(frames) - 1) for index in range(len(times) * depth))
        views = tuple(View.whole(*size, source=source) for source in sources)
        items = [self.geometry.item(size, depth, time=time, continues=index > 0) for index, time in enumerate(times)]
        return VideoPlan(frames, MediaPlan(views, tuple(items)))

    def _times(self, video: VideoInfo, num_frames: int) -> list[int]:
        """Temporal positions of the video's temporal patches, relative to its first.

        With `tokens_per_second` their distance is rounded to float32 before the multiplication, and the product is
        rounded before it is truncated, as in the families' processor and model."""
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
        num_layers=vision.integer("depth", 32, at_most=MAX_LAYERS),
        num_heads=vision.integer("num_heads", 16),
        intermediate_size=int(hidden * vision.number("mlp_ratio", 4)),
        hidden_act=activation(vision, "hidden_act", "quick_gelu"),
        rope_theta=rope_theta(vision),
    )
    return _build_qwen2(files, "qwen2_vl", tower, width_field="hidden_size", tokens_per_second=0)


def build_qwen2_5_vl(files: ModelFiles) -> ModelSpec:
    vision = files.config.section("vision_config")
    tower = QwenTower(
        hidden_size=vision.integer("hidden_size", 3584),
        num_layers=vision.integer("depth", 32, at_most=MAX_LAYERS),
        num_heads=vision.integer("num_heads", 16),
        intermediate_size=vision.integer("intermediate_size", 3420),
        hidden_act=activation(vision, "hidden_act", "silu"),
        rope_theta=rope_theta(vision),
        rms_norms=True,
        gated=True,
        window_tokens=window_tokens(vision),
        full_layers=full_layers(vision, [7, 15, 23, 31]),
    )
    rate = vision.integer("tokens_per_second", 4)
    return _build_qwen2(files, "qwen2_5_vl", tower, width_field="out_hidden_size", tokens_per_second=rate)


def _build_qwen2(
    files: ModelFiles, family: str, tower: QwenTower, *, width_field: str, tokens_per_second: int
) -> ModelSpec:
    config = files.config
    nested = config.section_if_present("text_config")
    text = config if nested is None else with_model_type(nested, f"{family}_text")
    tie = config.flag("tie_word_embeddings", False) or text.flag("tie_word_embeddings", False)
    language = build_language(text, tie_embeddings=tie, nested=nested is not None, mrope=True)
    geometry, limits, preprocess, videos = grid_settings(files, family, 14)
    vision = Qwen2VisionSpec(
        tower=tower,
        geometry=geometry,
        limits=limits,
        sampling=frame_sampling(videos, geometry.temporal_patch_size, files.options),
        tokens_per_second=tokens_per_second,
        max_time=language.max_position,
        feature_size=language.hidden_size,
        preprocess=preprocess,
    )
    return build_grid_model(files, family, text, language, vision, width_field)


def window_tokens(vision: Fields) -> int:
    """Reads the side of a window, in tokens."""
    side = vision.integer("spatial_merge_size", 2) * vision.integer("patch_size", 14)
    window = vision.integer("window_size", 112)
    if window < side:
        raise vision.wrong_value("window_size", f"at least {side} pixels, the width of one token")
    return window // side


def full_layers(vision: Fields, default: list[int]) -> frozenset[int]:
    """Returns the layers with full attention. Indices beyond the tower's layers are ignored: shortened towers keep the
    whole list."""
    depth = vision.integer("depth", 32, at_most=MAX_LAYERS)
    value = vision.get("fullatt_block_indexes")
    layers = default if value is None else value
    if not isinstance(layers, list) or any(type(index) is not int or index < 0 for index in layers):
        raise vision.wrong_value("fullatt_block_indexes", "a list of layers, counted from 0")
    return frozenset(index for index in layers if index < depth)


VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VlVisionSpec(GridVisionSpec):
    """The tower of Qwen3-VL and Qwen3.5. `deepstack_layers` are the layers, ascending, whose outputs make further
    planes of features after that of the last layer; `deepstack_mergers` are the indices of their mergers in the
    checkpoint."""

    num_positions: int  # rows of the table of learned positions
    position_side: int  # of the square that they cover
    deepstack_layers: tuple[int, ...]
    deepstack_mergers: tuple[int, ...]
    frames: TimedFrames

    @property
    def max_tokens_per_item(self) -> int:
        return max(self.max_tokens_per_image, self.frames.max_image_tokens(self.geometry.factor))

    @property
    def num_planes(self) -> int:
        return 1 + len(self.deepstack_layers)

    @property
    def max_patches_per_image(self) -> int:
        return self.max_tokens_per_image * self.geometry.patches_per_token

    def plan_video(self, video: VideoInfo) -> VideoPlan:
        """Plans one span per temporal patch, between marks and preceded by its time."""
        frames = self.frames.choose_frames(video)
        size = self.frames.size(video.width, video.height, len(frames), self.geometry.factor)
        views: list[View] = []
        parts: list[str | ItemPlan] = []
        for begin in range(0, len(frames), self.frames.depth):
            pair = [min(begin + i, len(frames) - 1) for i in range(self.frames.depth)]  # the last one is repeated
            seconds = self.frames.seconds([frames[index] for index in pair], video.fps)
            sources = pair[:1] if pair[0] == pair[-1] else pair
            views += [View.whole(*size, source=index) for index in sources]
            parts += [
                f"{VISION_END if parts else ''}<{seconds:.1f} seconds>{VISION_START}",
                self.geometry.item(size, len(sources)),
            ]
        return VideoPlan(frames, MediaPlan(tuple(views), (*parts, VISION_END)))

    def num_parameters(self) -> int:
        c, norms = self.tower.hidden_size, 2 * self.merged_size * len(self.deepstack_layers)
        return GridVisionSpec.num_parameters(self) + c * (1 + self.num_positions) + norms


def build_qwen3_vl(files: ModelFiles, family: str = "qwen3_vl") -> ModelSpec:
    text, language = _qwen3_language(files, f"{family}_text")
    vision = _qwen3_vision(files, family, language.hidden_size, [8, 16, 24])
    if len(vision.deepstack_layers) >= language.num_layers:
        raise CheckpointError(
            f"features of {len(vision.deepstack_layers)} tower layers need a decoder of more than {language.num_layers}"
        )
    return build_grid_model(files, family, text, language, vision)


def build_qwen3_5(files: ModelFiles, family: str = "qwen3_5") -> ModelSpec:
    text, language = _qwen3_language(files, f"{family}_text")
    vision = _qwen3_vision(files, family, language.hidden_size, [])
    if vision.deepstack_layers:
        tower = files.config.section("vision_config")
        raise tower.wrong_value("deepstack_visual_indexes", "empty or absent: Qwen3.5 reads the tower's last layer")
    return build_grid_model(files, family, text, language, vision, token_ids=(248056, 248057))


def _qwen3_language(files: ModelFiles, text_type: str) -> tuple[Fields, LanguageSpec]:
    """Returns the text part of config.json and the decoder's spec. Raises CheckpointError for another text type."""
    text = with_model_type(files.config.section("text_config"), text_type)
    if decoder_type(text) != text_type:
        raise text.wrong_value("model_type", text_type)
    text, language = nested_language(files, text_type, mrope=True)
    if language.mixture is None:
        return text, language
    # transformers 5 writes the default of a mixture's text part, true, beside a false that counts.
    return text, replace(language, tie_embeddings=files.config.flag("tie_word_embeddings", language.tie_embeddings))


def _qwen3_vision(files: ModelFiles, family: str, feature_size: int, deepstack_layers: list[int]) -> Qwen3VlVisionSpec:
    """Builds the tower's spec. `deepstack_layers` are the type's, where a config has none."""
    tower = files.config.section("vision_config")
    # The other means and deviations are those of the video processor's class.
    geometry, limits, preprocess, videos = grid_settings(files, family, 16, video_mean=HALF, video_std=HALF)
    num_layers, num_positions = (
        tower.integer("depth", 27, at_most=MAX_LAYERS),
        tower.integer("num_position_embeddings", 2304),
    )
    deepstack = _deepstack(tower, num_layers, deepstack_layers)
    return Qwen3VlVisionSpec(
        tower=QwenTower(
            hidden_size=tower.integer("hidden_size", 1152),
            num_layers=num_layers,
            num_heads=tower.integer("num_heads", 16),
            intermediate_size=tower.integer("intermediate_size", 4304),
            hidden_act=activation(tower, "hidden_act", "gelu_pytorch_tanh"),
            rope_theta=rope_theta(tower),
        ),
        num_positions=num_positions,
        position_side=int(num_positions**0.5),
        deepstack_layers=tuple(sorted(deepstack)),
        deepstack_mergers=tuple(deepstack.index(layer) for layer in sorted(deepstack)),
        feature_size=feature_size,
        geometry=geometry,
        limits=limits,
        frames=timed_frames(videos, geometry.temporal_patch_size, geometry.factor, files.options),
        preprocess=preprocess,
    )


def _deepstack(tower: Fields, num_layers: int, default: list[int]) -> list[int]:
    """Returns the DeepStack layers in the checkpoint's order of mergers."""
    indices = tower.get("deepstack_visual_indexes")
    layers = default if indices is None else indices
    if not isinstance(layers, list) or any(type(n) is not int or not 0 <= n < num_layers for n in layers):
        raise tower.wrong_value("deepstack_visual_indexes", f"a list of layers from 0 to {num_layers - 1}")
    if len(set(layers)) < len(layers):
        raise tower.wrong_value("deepstack_visual_indexes", "a list without repetition")
    return layers
