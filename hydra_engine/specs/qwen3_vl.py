"""Qwen3-VL (dense): a tower for pictures of any size, with features of several of its layers, and timed videos.

Knows config.json and the settings of the picture and video processors. What the tower computes is `models/qwen3_vl.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.core.prompting import AS_CONFIGURED, PixelBudget
from hydra_engine.errors import CheckpointError
from hydra_engine.specs.assemble import model_spec
from hydra_engine.specs.base import ItemPlan, MediaPlan, ModelSpec, PreprocessSpec, VideoInfo, VideoPlan, View
from hydra_engine.specs.clip import normalisation, processor_settings
from hydra_engine.specs.decoder import activation, build_language, decoder_type
from hydra_engine.specs.fields import Fields
from hydra_engine.specs.files import ModelFiles
from hydra_engine.specs.qwen3_frames import TimedFrames, timed_frames
from hydra_engine.specs.qwen_geometry import (
    PatchGeometry,
    PixelLimits,
    budgeted_size,
    most_tokens,
    patch_geometry,
    pixel_limits,
)

PICTURES = PixelLimits(56 * 56, 1280 * 28 * 28)  # the picture processor class's
HALF = (0.5, 0.5, 0.5)  # mean and deviation of the video processor's class
START, END = "<|vision_start|>", "<|vision_end|>"


@dataclass(frozen=True, slots=True)
class Qwen3VlVisionSpec:
    """`deepstack_layers` are the layers, ascending, whose output becomes a plane of features of its own, behind that of
    the tower's last output; `deepstack_mergers` says which of the checkpoint's mergers each of them goes through."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    hidden_act: str
    rope_theta: float
    num_positions: int  # rows of the table of learned positions
    position_side: int  # of the square that they cover
    deepstack_layers: tuple[int, ...]
    deepstack_mergers: tuple[int, ...]
    feature_size: int
    geometry: PatchGeometry
    limits: PixelLimits
    frames: TimedFrames
    preprocess: PreprocessSpec
    max_tokens_per_image: int
    max_tokens_per_item: int

    @property
    def num_planes(self) -> int:
        return 1 + len(self.deepstack_layers)

    @property
    def max_patches_per_image(self) -> int:
        return self.max_tokens_per_image * self.geometry.patches_per_token

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def merged_size(self) -> int:
        """Channels of the patches of one token side by side."""
        return self.hidden_size * self.geometry.patches_per_token

    def plan_image(self, width: int, height: int, budget: PixelBudget = AS_CONFIGURED) -> MediaPlan:
        size = budgeted_size(width, height, self.geometry.factor, self.limits, budget)
        return MediaPlan((View.whole(*size),), (self.geometry.item(size),))

    def plan_video(self, video: VideoInfo) -> VideoPlan:
        """Every temporal patch is a span of its own, between marks and behind its time."""
        frames = self.frames.choose(video)
        size = self.frames.size(video.width, video.height, len(frames), self.geometry.factor)
        views: list[View] = []
        parts: list[str | ItemPlan] = []
        for begin in range(0, len(frames), self.frames.depth):
            chosen = [min(begin + i, len(frames) - 1) for i in range(self.frames.depth)]  # the last one is repeated
            seconds = self.frames.seconds([frames[index] for index in chosen], video.fps)
            sources = chosen[:1] if chosen[0] == chosen[-1] else chosen
            views += [View.whole(*size, source=index) for index in sources]
            parts += [f"{END if parts else ''}<{seconds:.1f} seconds>{START}", self.geometry.item(size, len(sources))]
        return VideoPlan(frames, MediaPlan(tuple(views), (*parts, END), around=(START, END)))

    def num_parameters(self) -> int:
        c, f, merged, geometry = self.hidden_size, self.intermediate_size, self.merged_size, self.geometry
        patch = 3 * geometry.temporal_patch_size * geometry.patch_size**2
        layer = 4 * (c * c + c) + 2 * c * f + f + c + 4 * c
        merger = merged * merged + merged + merged * self.feature_size + self.feature_size
        norms = 2 * c + 2 * merged * len(self.deepstack_layers)
        return c * (patch + 1 + self.num_positions) + self.num_layers * layer + self.num_planes * merger + norms

    def flops(self, num_patches: int) -> int:
        """Of one picture with that many patches."""
        c, merged, geometry = self.hidden_size, self.merged_size, self.geometry
        patch = 3 * geometry.temporal_patch_size * geometry.patch_size**2
        layer = 4 * c * c + 2 * c * self.intermediate_size + 2 * num_patches * c
        merger = merged * (merged + self.feature_size) * self.num_planes
        return 2 * (num_patches * (patch * c + self.num_layers * layer) + num_patches // (merged // c) * merger)


def build_qwen3_vl(files: ModelFiles) -> ModelSpec:
    config = files.config
    text = config.section("text_config")
    if decoder_type(text) != "qwen3_vl_text":
        raise text.wrong("model_type", "qwen3_vl_text")
    tie = config.flag("tie_word_embeddings", False) or text.flag("tie_word_embeddings", False)
    language = build_language(text, tie_embeddings=tie, nested=True)
    vision = _vision(files, config.section("vision_config"), language.hidden_size)
    if len(vision.deepstack_layers) >= language.num_layers:
        raise CheckpointError(
            f"features of {len(vision.deepstack_layers)} tower layers need a decoder of more than {language.num_layers}"
        )
    return model_spec(
        files,
        "qwen3_vl",
        text,
        language,
        vision=vision,
        image_token_id=config.integer("image_token_id", 151655, at_least=0),
        video_token_id=config.integer("video_token_id", 151656, at_least=0),
    )


def _vision(files: ModelFiles, tower: Fields, feature_size: int) -> Qwen3VlVisionSpec:
    images = processor_settings(files.images)
    videos = images if files.videos is None else processor_settings(files.videos)
    geometry = patch_geometry(tower, images, patch_size=16)
    patch_geometry(tower, videos, patch_size=16)
    hidden, num_heads = tower.integer("hidden_size", 1152), tower.integer("num_heads", 16)
    if hidden % (4 * num_heads):
        raise CheckpointError(
            f"the vision tower's hidden size {hidden} is not a multiple of four times its {num_heads} heads"
        )
    if tower.integer("out_hidden_size", 3584) != feature_size:
        raise tower.wrong("out_hidden_size", f"{feature_size}, the decoder's hidden size")
    num_layers, num_positions = tower.integer("depth", 27), tower.integer("num_position_embeddings", 2304)
    deepstack = _deepstack(tower, num_layers)
    limits = pixel_limits(images, PICTURES, files.options)
    frames = timed_frames(videos, geometry.temporal_patch_size, geometry.factor, files.options)
    max_tokens = most_tokens(geometry.factor, limits)
    return Qwen3VlVisionSpec(
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        intermediate_size=tower.integer("intermediate_size", 4304),
        hidden_act=activation(tower, "hidden_act", "gelu_pytorch_tanh"),
        rope_theta=_theta(tower),
        num_positions=num_positions,
        position_side=int(num_positions**0.5),
        deepstack_layers=tuple(sorted(deepstack)),
        deepstack_mergers=tuple(deepstack.index(layer) for layer in sorted(deepstack)),
        feature_size=feature_size,
        geometry=geometry,
        limits=limits,
        frames=frames,
        preprocess=_preprocess(images, videos, geometry),
        max_tokens_per_image=max_tokens,
        max_tokens_per_item=max(max_tokens, frames.most_tokens(geometry.factor)),
    )


def _theta(tower: Fields) -> float:
    rope = tower.section_if_present("rope_parameters")
    return 10000.0 if rope is None else rope.number("rope_theta", 10000.0)


def _deepstack(tower: Fields, num_layers: int) -> list[int]:
    """In the checkpoint's order of mergers."""
    found = tower.get("deepstack_visual_indexes")
    layers = [8, 16, 24] if found is None else found
    if not isinstance(layers, list) or any(type(n) is not int or not 0 <= n < num_layers for n in layers):
        raise tower.wrong("deepstack_visual_indexes", f"a list of layers from 0 to {num_layers - 1}")
    if len(set(layers)) < len(layers):
        raise tower.wrong("deepstack_visual_indexes", "a list without repetition")
    return layers


def _preprocess(images: Fields, videos: Fields, geometry: PatchGeometry) -> PreprocessSpec:
    identity = f"qwen3_vl/{geometry.patch_size}/{geometry.merge_size}/{geometry.temporal_patch_size}"
    pictures = normalisation(images, identity)
    if videos is not images and normalisation(videos, identity, mean=HALF, std=HALF) != pictures:
        raise CheckpointError(f"{videos.where} and {images.where} normalise pixels in different ways")
    return pictures
