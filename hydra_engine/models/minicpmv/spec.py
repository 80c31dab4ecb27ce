"""MiniCPM-V 4.6: a tower for pictures of any shape, merging 2 x 2 neighbours twice, and pictures cut into slices.

Knows config.json, the settings of the picture and video processors, and the marks around pictures, which are named in
the tokenizer's config.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hydra_engine.errors import CheckpointError
from hydra_engine.models.minicpmv.slicing_spec import (
    MAX_SCALE,
    MAX_SLICES,
    Marks,
    Pair,
    SlicedVisionSpec,
    Slicing,
)
from hydra_engine.models.specs.assemble import ModelFiles, model_spec, with_model_type
from hydra_engine.models.specs.base import (
    MediaPlan,
    ModelSpec,
    PreprocessSpec,
    TowerAttention,
    VideoInfo,
    VideoPlan,
    no_videos,
)
from hydra_engine.models.specs.decoder import build_language
from hydra_engine.models.specs.fields import Fields, read_json
from hydra_engine.models.specs.vision import (
    HALF,
    TowerSpec,
    check_frames,
    check_patches,
    check_picture,
    normalisation,
    processor_settings,
    tower_config,
    tower_shape,
)


def one_frame_a_second(num_frames: int, fps: float, most: int) -> tuple[int, ...]:
    """Returns the source frames at every whole second; for a video of more than `most` seconds `most` frames, evenly
    spread over every tenth of a second. Raises InvalidImage for a video without frames or with an impossible frame
    rate."""
    check_frames(num_frames, fps)
    duration_s = num_frames / fps
    if duration_s <= most:
        times_s: list[float] = list(range(math.ceil(duration_s)))
    else:
        times_s = [round(tenth * 0.1, 1) for tenth in _spread(int(duration_s / 0.1), most)]
    return tuple(min(int(time_s * fps), num_frames - 1) for time_s in times_s)


def _spread(count: int, most: int) -> list[int]:
    """Selects at most `most` of the numbers 0 to `count` - 1, the first and, unless `most` is 1, the last included."""
    if count <= most:
        return list(range(count))
    step = (count - 1) / max(most - 1, 1)
    return [int(index * step) for index in range(most - 1)] + [count - 1 if most > 1 else 0]


HYBRID = "qwen3_5_text"  # the released checkpoints' decoder, and transformers' default
MAX_ROUNDS = 8  # beyond any checkpoint's
MODES = {"4x": 1, "16x": 2}  # rounds of merging 2 x 2 neighbours, counted with the one inside the tower
TOWER_DEFAULTS = TowerSpec(  # MiniCPMV4_6VisionConfig's
    hidden_size=768, num_layers=12, num_heads=12, intermediate_size=3072, hidden_act="gelu_pytorch_tanh", norm_eps=1e-6
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniCpmVisionSpec(SlicedVisionSpec):
    """MiniCPM-V's tower and slicing. The tower merges 2 x 2 patches after layer `insert_layer` (None: nowhere), then
    `num_rounds` more times after its last layer; the results are the tokens. `max_frames` limits a video."""

    insert_layer: int | None
    num_rounds: int
    videos: Slicing | None
    max_frames: int
    max_slice_tokens: int  # of a picture of the whole too

    @property
    def all_rounds(self) -> int:
        """Number of mergers: 4 ** all_rounds patches make one token."""
        return self.num_rounds + (self.insert_layer is not None)

    def num_tokens(self, num_patches: int) -> int:
        return num_patches // 4**self.all_rounds

    @property
    def attention(self) -> TowerAttention:
        rows = self.max_slice_tokens * 4**self.all_rounds
        return TowerAttention(self.tower.num_heads, self.tower.head_dim, rows)

    @property
    def max_tokens_per_item(self) -> int:
        return self.max_slice_tokens

    @property
    def max_tokens_per_image(self) -> int:
        return (1 + self.images.max_slices) * self.max_slice_tokens

    @property
    def max_patches_per_image(self) -> int:
        return self.max_tokens_per_image * 4**self.all_rounds

    def plan_video(self, video: VideoInfo) -> VideoPlan:
        """Plans every frame as a picture, cut and marked; the video has one number."""
        if self.videos is None:
            raise no_videos()
        check_picture(video.width, video.height)
        frames = one_frame_a_second(video.num_frames, video.fps, self.max_frames)
        cut = self._cut(self.videos, video.width, video.height)
        views = tuple(view._replace(source=index) for index in range(len(frames)) for view in cut.views)
        return VideoPlan(frames, MediaPlan(views, self._marked(cut, len(frames)), number=self.marks.number))

    def num_parameters(self) -> int:
        c, f = self.tower.hidden_size, self.tower.intermediate_size
        embeddings = c * (3 * self.patch_size**2 + 1 + self.num_positions**2)
        inner = 4 * (c * c + c) + 2 * c + 8 * c + 16 * c * f + 4 * f + 4 * f * c + c
        rounds = self.num_rounds * (8 * c + 16 * c * c + 4 * c)
        last = 4 * c * self.feature_size + self.feature_size
        between = (self.num_rounds - 1) * (4 * c * c + c)
        tower = (
            embeddings
            + self.tower.num_layers * self.tower.layer_parameters()
            + 2 * c
            + (inner if self.insert_layer is not None else 0)
        )
        return tower + rounds + between + last

    def flops(self, num_patches: int) -> int:
        """FLOPs of slices of the usual size with `num_patches` patches in total."""
        c, f, num_layers = self.tower.hidden_size, self.tower.intermediate_size, self.tower.num_layers
        segment = (self.images.scale // self.patch_size) ** 2
        full = num_layers if self.insert_layer is None else self.insert_layer + 1
        work = num_patches * 3 * self.patch_size**2 * c + full * self.tower.layer_work(num_patches, segment)
        rows = num_patches
        if self.insert_layer is not None:
            rows //= 4
            work += num_patches * (4 * c * c + 2 * 4 * c) + rows * (16 * c * f + 4 * f * c)
            work += (num_layers - full) * self.tower.layer_work(rows, segment // 4)
        for index in range(self.num_rounds):
            rows //= 4
            width = self.feature_size if index == self.num_rounds - 1 else c
            work += rows * (16 * c * c + 4 * c * width)
        return 2 * work


def build_minicpmv(files: ModelFiles) -> ModelSpec:
    config = files.config
    text = with_model_type(config.section_if_present("text_config") or Fields({}, "text_config of config.json"), HYBRID)
    language = build_language(text, tie_embeddings=config.flag("tie_word_embeddings", False), nested=True)
    has_videos = "video_token_id" in config
    return model_spec(
        files,
        "minicpmv4_6",
        text,
        language,
        vision=_vision(files, language.hidden_size, has_videos=has_videos),
        image_token_id=config.integer("image_token_id", at_least=0),
        video_token_id=config.integer("video_token_id", at_least=0) if has_videos else None,
    )


def _vision(files: ModelFiles, feature_size: int, *, has_videos: bool) -> MiniCpmVisionSpec:
    config, settings = files.config, processor_settings(files.images)
    tower = tower_config(config, "minicpmv4_6_vision")
    layers = TowerSpec(**tower_shape(tower, TOWER_DEFAULTS))
    image_size, patch_size = tower.integer("image_size", 224), tower.integer("patch_size", 16)
    check_patches(tower, image_size, patch_size)
    insert_layer, num_rounds = _merging(config, tower, layers.num_layers)
    rounds = num_rounds + (insert_layer is not None)
    images = _slicing(settings, patch_size, rounds)
    preprocess = normalisation(settings, "minicpmv4_6", mean=HALF, std=HALF)
    videos, max_frames = None, 0
    if has_videos:
        frames = files.videos or settings  # older directories have one file for both
        videos, max_frames = _slicing(frames, patch_size, rounds), _frames(frames, preprocess)
    return MiniCpmVisionSpec(
        tower=layers,
        patch_size=patch_size,
        num_positions=image_size // patch_size,
        insert_layer=insert_layer,
        num_rounds=num_rounds,
        feature_size=feature_size,
        marks=_marks(files, settings),
        images=images,
        videos=videos,
        max_frames=max_frames,
        preprocess=preprocess,
        max_slice_tokens=max(cuts.max_cells() for cuts in (images, videos) if cuts is not None),
    )


def _merging(config: Fields, tower: Fields, num_layers: int) -> tuple[int | None, int]:
    """Returns (layer after which the tower merges, rounds of merging after the tower)."""
    for section, name in ((tower, "window_kernel_size"), (config, "merge_kernel_size")):
        if section.numbers(name, (2, 2)) != (2, 2):
            raise section.wrong_value(name, "[2, 2]")
    num_rounds = config.integer("merger_times", 1, at_most=MAX_ROUNDS)
    if config.text("downsample_mode", "16x") not in MODES:
        raise config.wrong_value("downsample_mode", " or ".join(MODES))
    if config.text("downsample_mode", "16x") == "4x":
        return None, num_rounds
    layer = config.integer("insert_layer_id", 6, at_least=0)
    if layer >= num_layers:
        raise config.wrong_value("insert_layer_id", f"below the tower's number of layers, {num_layers}")
    return layer, num_rounds


def _slicing(settings: Fields, patch_size: int, rounds: int) -> Slicing:
    """Reads the settings of a picture or video processor. Raises CheckpointError if they do not fit the model's
    mergers."""
    if settings.integer("patch_size", 14) != patch_size:
        raise settings.wrong_value("patch_size", f"the vision tower's, {patch_size}")
    mode = settings.text("downsample_mode", "16x")
    if MODES.get(mode) != rounds:
        raise settings.wrong_value(
            "downsample_mode", f"the one whose tokens have {4**rounds} patches, as config.json says"
        )
    max_slices = settings.integer("max_slice_nums", 9, at_most=MAX_SLICES) if settings.flag("slice_mode", True) else 1
    return Slicing(settings.integer("scale_resolution", 448, at_most=MAX_SCALE), patch_size * 2**rounds, max_slices)


def _frames(settings: Fields, pictures: PreprocessSpec) -> int:
    """Reads the maximum number of frames of a video."""
    processor_settings(settings)
    if settings.integer("stack_frames", 1) != 1:
        raise settings.wrong_value("stack_frames", "1: pictures composed of several frames are not supported")
    if not settings.flag("do_sample_frames", True):
        raise settings.wrong_value("do_sample_frames", "true: one frame a second is taken")
    if normalisation(settings, "minicpmv4_6", mean=HALF, std=HALF) != pictures:
        raise CheckpointError(f"{settings.where} must resample and normalise frames as the picture processor does")
    return settings.integer("max_num_frames", 128)


def _marks(files: ModelFiles, images: Fields) -> Marks:
    tokenizer = read_json(files.model_dir, "tokenizer_config.json")
    values = dict(tokenizer.values)
    for name in ("model_specific_special_tokens", "extra_special_tokens"):
        section = tokenizer.get(name)
        values |= section if isinstance(section, dict) else {}
    tokens = Fields(values, tokenizer.where)
    numbered = images.flag("use_image_id", True)
    if files.processor is not None:
        numbered = files.processor.flag("use_image_id", numbered)
    return Marks(
        picture=_marks_around(tokens, "image"),
        slice=_marks_around(tokens, "slice"),
        number=_marks_around(tokens, "image_id") if numbered else None,
    )


def _marks_around(tokens: Fields, name: str) -> Pair:
    return tokens.token_text(f"{name}_start_token"), tokens.token_text(f"{name}_end_token")
