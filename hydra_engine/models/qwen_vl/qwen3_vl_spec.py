"""Qwen3-VL (dense): a tower for pictures of any size, with features of several of its layers, and timed videos.

Knows config.json and the settings of the picture and video processors. What the tower computes is `qwen3_vl.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.errors import CheckpointError
from hydra_engine.models.qwen_vl.geometry_spec import PICTURES, PatchGeometry, patch_geometry, pixel_limits
from hydra_engine.models.qwen_vl.timed_frames_spec import TimedFrames, timed_frames
from hydra_engine.models.qwen_vl.tower_spec import GridVisionSpec, QwenTower, build_grid_model
from hydra_engine.models.specs.assemble import ModelFiles, nested_language
from hydra_engine.models.specs.base import ItemPlan, MediaPlan, ModelSpec, PreprocessSpec, VideoInfo, VideoPlan, View
from hydra_engine.models.specs.decoder import activation, decoder_type
from hydra_engine.models.specs.fields import Fields
from hydra_engine.models.specs.vision import HALF, normalisation, processor_settings

START, END = "<|vision_start|>", "<|vision_end|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VlVisionSpec(GridVisionSpec):
    """`deepstack_layers` are the layers, ascending, whose output becomes a plane of features of its own, behind that of
    the tower's last output; `deepstack_mergers` says which of the checkpoint's mergers each of them goes through."""

    num_positions: int  # rows of the table of learned positions
    position_side: int  # of the square that they cover
    deepstack_layers: tuple[int, ...]
    deepstack_mergers: tuple[int, ...]
    frames: TimedFrames

    @property
    def max_tokens_per_item(self) -> int:
        return max(self.max_tokens_per_image, self.frames.most_tokens(self.geometry.factor))

    @property
    def num_planes(self) -> int:
        return 1 + len(self.deepstack_layers)

    @property
    def max_patches_per_image(self) -> int:
        return self.max_tokens_per_image * self.geometry.patches_per_token

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
        return VideoPlan(frames, MediaPlan(tuple(views), (*parts, END)))

    def num_parameters(self) -> int:
        c, layers = self.tower.hidden_size, self.tower.num_layers * self.tower.layer_parameters()
        norms = 2 * c + 2 * self.merged_size * len(self.deepstack_layers)
        embeddings = c * (self.geometry.patch_values + 1 + self.num_positions)
        return embeddings + layers + self.num_planes * self.merger_parameters() + norms

    def flops(self, num_patches: int) -> int:
        """Of one picture with that many patches."""
        c, layers = self.tower.hidden_size, self.tower.num_layers * self.tower.layer_flops(num_patches)
        merger = self.merged_size * (self.merged_size + self.feature_size) * self.num_planes
        tokens = num_patches // self.geometry.patches_per_token
        pairs = self.tower.num_layers * num_patches**2
        return layers + 2 * (num_patches * self.geometry.patch_values * c + tokens * merger) + 4 * pairs * c


def build_qwen3_vl(files: ModelFiles) -> ModelSpec:
    config = files.config
    text = config.section("text_config")
    if decoder_type(text) != "qwen3_vl_text":
        raise text.wrong("model_type", "qwen3_vl_text")
    text, language = nested_language(files)
    vision = _vision(files, config.section("vision_config"), language.hidden_size)
    if len(vision.deepstack_layers) >= language.num_layers:
        raise CheckpointError(
            f"features of {len(vision.deepstack_layers)} tower layers need a decoder of more than {language.num_layers}"
        )
    return build_grid_model(files, "qwen3_vl", text, language, vision)


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
    return Qwen3VlVisionSpec(
        tower=QwenTower(
            hidden_size=hidden,
            num_layers=num_layers,
            num_heads=num_heads,
            intermediate_size=tower.integer("intermediate_size", 4304),
            hidden_act=activation(tower, "hidden_act", "gelu_pytorch_tanh"),
            rope_theta=_theta(tower),
        ),
        num_positions=num_positions,
        position_side=int(num_positions**0.5),
        deepstack_layers=tuple(sorted(deepstack)),
        deepstack_mergers=tuple(deepstack.index(layer) for layer in sorted(deepstack)),
        feature_size=feature_size,
        geometry=geometry,
        limits=pixel_limits(images, PICTURES, files.options),
        frames=timed_frames(videos, geometry.temporal_patch_size, geometry.factor, files.options),
        preprocess=_preprocess(images, videos, geometry),
    )


def _theta(tower: Fields) -> float:
    rope = tower.section_if_present("rope_parameters")
    return 10000.0 if rope is None else rope.number("rope_theta", 10000.0)


def _deepstack(tower: Fields, num_layers: int) -> list[int]:
    """In the checkpoint's order of mergers."""
    given = tower.get("deepstack_visual_indexes")
    layers = [8, 16, 24] if given is None else given
    if not isinstance(layers, list) or any(type(n) is not int or not 0 <= n < num_layers for n in layers):
        raise tower.wrong("deepstack_visual_indexes", f"a list of layers from 0 to {num_layers - 1}")
    if len(set(layers)) < len(layers):
        raise tower.wrong("deepstack_visual_indexes", "a list without repetition")
    return layers


def _preprocess(images: Fields, videos: Fields, geometry: PatchGeometry) -> PreprocessSpec:
    identity = f"qwen3_vl/{geometry.patch_size}/{geometry.merge_size}/{geometry.temporal_patch_size}"
    pictures = normalisation(images, identity)
    if (
        videos is not images and normalisation(videos, identity, mean=HALF, std=HALF) != pictures
    ):  # of the video processor's class
        raise CheckpointError(f"{videos.where} and {images.where} normalise pixels in different ways")
    return pictures
