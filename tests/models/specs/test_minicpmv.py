"""MiniCPM-V 4.6's spec: slices, marks and frames against transformers' processors, published files, refusals."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.minicpmv4_6.configuration_minicpmv4_6 import MiniCPMV4_6Config
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor
from transformers.models.minicpmv4_6.video_processing_minicpmv4_6 import MiniCPMV4_6VideoProcessor
from transformers.video_utils import VideoMetadata

from hydra_engine.errors import CheckpointError, InvalidImage, InvalidRequest
from hydra_engine.models.minicpmv.slicing_spec import MAX_ASPECT, Slicing
from hydra_engine.models.minicpmv.spec import MiniCpmVisionSpec, one_frame_a_second
from hydra_engine.models.specs.base import DeltaShape, ItemPlan, MediaPlan, VideoInfo
from hydra_engine.preprocess.media.images import render
from tests.models.specs.model_dirs import Json, ModelDir, Size, awkward_sizes, changed

# openbmb/MiniCPM-V-4.6 as published.
HYBRID: Json = {
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_text",
    "num_attention_heads": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
    "tie_word_embeddings": True,
    "vocab_size": 248094,
}
# The same tower over Qwen3-0.6B.
TEXT: Json = {
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "vocab_size": 151936,
}
CONFIG: Json = {
    "architectures": ["MiniCPMV4_6ForConditionalGeneration"],
    "bos_token_id": None,
    "drop_vision_last_layer": False,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "image_size": 1120,
    "image_token_id": 248056,
    "insert_layer_id": 6,
    "merge_kernel_size": [2, 2],
    "merger_times": 1,
    "model_type": "minicpmv4_6",
    "pad_token_id": None,
    "patch_size": 14,
    "text_config": TEXT,
    "tie_word_embeddings": True,
    "transformers_version": "5.7.0",
    "video_token_id": 248057,
    "vision_config": {
        "attention_dropout": 0.0,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "image_size": 980,
        "intermediate_size": 4304,
        "layer_norm_eps": 1e-06,
        "model_type": "minicpmv4_6_vision",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "window_kernel_size": [2, 2],
    },
}
IMAGES: Json = {
    "image_processor_type": "MiniCPMV4_6ImageProcessor",
    "processor_class": "MiniCPMV4_6Processor",
    "max_slice_nums": 9,
    "scale_resolution": 448,
    "patch_size": 14,
    "use_image_id": True,
    "slice_mode": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
MARKS: Json = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
GENERATION: Json = {"bos_token_id": 248045, "eos_token_id": [248044, 248046]}
FILES: Json = {
    "config.json": CONFIG,
    "generation_config.json": GENERATION,
    "preprocessor_config.json": IMAGES,
    "tokenizer_config.json": {"extra_special_tokens": MARKS, "image_token": "<|image_pad|>"},
}
SLICINGS = (Slicing(448, 56, 9), Slicing(448, 28, 9), Slicing(1120, 56, 36), Slicing(48, 16, 4), Slicing(30, 16, 2))


@pytest.fixture
def published(tmp_path: Path) -> ModelDir:
    return ModelDir(tmp_path, FILES)


def vision(directory: ModelDir) -> MiniCpmVisionSpec:
    found = directory.spec().vision
    assert isinstance(found, MiniCpmVisionSpec)
    return found


def taken(sizes: list[Size]) -> list[Size]:
    return [(width, height) for width, height in sizes if max(width, height) <= MAX_ASPECT * min(width, height)]


# ---- published files


def test_a_published_checkpoint(published: ModelDir) -> None:
    spec, tower = published.spec(), vision(published)
    assert (spec.family, spec.dtype, spec.max_model_len) == ("minicpmv4_6", "bfloat16", 40960)
    assert (spec.image_token_id, spec.video_token_id, spec.eos_token_ids) == (248056, 248057, (248044, 248046))
    assert spec.language.tie_embeddings and spec.language.qk_norm and not spec.language.attention_bias
    assert (tower.insert_layer, tower.num_rounds, tower.num_positions, tower.feature_size) == (6, 1, 70, 1024)
    assert (tower.preprocess.mean, tower.preprocess.std, tower.preprocess.resample) == (
        (0.5,) * 3,
        (0.5,) * 3,
        "bicubic",
    )
    assert tower.tower.hidden_act == "gelu_tanh" and tower.max_frames == 128
    square = tower.plan_image(448, 448)
    assert [item.grid for item in square.items] == [(1, 32, 32)] and square.num_tokens == 64
    large = tower.plan_image(1344, 1344)
    assert len(large.items) == 10 and large.num_tokens == 640
    assert tower.plan_image(1920, 1080).num_tokens == 11 * 6 + 2 * 4 * 64 and tower.plan_image(1, 1).num_tokens == 64


def test_the_released_decoder(published: ModelDir) -> None:
    """Three delta nets to an attention layer; a quarter of each head turns."""
    published.write("config.json", {**CONFIG, "text_config": HYBRID})
    spec = published.spec().language
    assert spec.layer_kinds == ("delta", "delta", "delta", "attention") * 6
    assert spec.delta == DeltaShape(16, 16, 128, 128, 4) and spec.delta.num_channels == 6144
    assert (spec.rotary_dim, spec.rope_theta, spec.rope_sections, spec.max_position) == (64, 1e7, None, 262144)
    assert spec.kv_bytes_per_token(2) == 6 * 2 * 2 * 256 * 2
    assert spec.state_bytes(2) == 18 * (16 * 128 * 128 * 4 + 3 * 6144 * 2)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(
            MiniCPMV4_6Config(**{**CONFIG, "text_config": HYBRID})
        ).model.language_model
    assert spec.num_parameters() == sum(tensor.numel() for tensor in model.parameters())
    delta, attention = model.layers[0], model.layers[3]
    matrices = [18 * tensor.numel() for tensor in delta.parameters() if tensor.dim() > 1]
    matrices += [6 * tensor.numel() for tensor in attention.parameters() if tensor.dim() > 1]
    assert spec.flops_per_token(100) == 2 * (sum(matrices) + 6 * 2 * 100 * 8 * 256 + 18 * 3 * 16 * 128 * 128)


def test_a_decoder_without_a_type_is_the_released_one(published: ModelDir) -> None:
    published.write("config.json", changed(CONFIG, "text_config", {**HYBRID, "model_type": None}))
    assert published.spec().language.num_state_layers == 18
    published.write("config.json", changed(CONFIG, "text_config", ...))
    spec = published.spec().language
    assert (spec.num_layers, spec.hidden_size, spec.num_state_layers, spec.rotary_dim) == (32, 4096, 24, 64)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("layer_types", ["linear_attention"] * 24, "at least one full_attention"),
        ("layer_types", ["full_attention"] * 23, "a list of 24 times"),
        ("layer_types", ["sliding_attention"] * 24, "a list of 24 times"),
        ("linear_num_value_heads", 24, "24 value heads of linear attention cannot share 16 key heads"),
        ("linear_conv_kernel_dim", 1, "linear_conv_kernel_dim"),
        ("attn_output_gate", False, "attn_output_gate"),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.1}, "partial_rotary_factor 0.1"),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5"),
    ],
)
def test_hybrid_decoders_that_are_refused(published: ModelDir, name: str, value: object, words: str) -> None:
    published.write("config.json", {**CONFIG, "text_config": {**HYBRID, name: value}})
    assert words in published.refusal()


@pytest.mark.parametrize("mode", [{}, {"downsample_mode": "4x"}, {"downsample_mode": "4x", "merger_times": 2}])
def test_parameters_are_those_of_the_model(published: ModelDir, mode: Json) -> None:
    config = {**CONFIG, **mode}
    published.write("config.json", config)
    published.write("preprocessor_config.json", {**IMAGES, "downsample_mode": "4x" if len(mode) == 1 else "16x"})
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(MiniCPMV4_6Config(**config)).model
    parts = [*model.vision_tower.named_parameters(), *model.merger.named_parameters()]
    held = [tensor for name, tensor in parts if not (mode and name.startswith("vit_merger"))]
    assert vision(published).num_parameters() == sum(tensor.numel() for tensor in held)
    language = published.spec().language
    assert language.num_parameters() == sum(tensor.numel() for tensor in model.language_model.parameters())


def test_the_cost_of_a_picture_is_what_its_matrices_multiply(published: ModelDir) -> None:
    """Rows times weights of every matrix, and attention over whole pictures."""
    c, f, rows = 1152, 4304, 1024
    layer = 4 * c * c + 2 * c * f
    full = 7 * (rows * layer + 2 * rows * rows * c)
    windows = rows * 4 * c * c + 2 * rows * 4 * c + 256 * (4 * c * 4 * f + 4 * f * c)
    small = 20 * (256 * layer + 2 * 256 * 256 * c)
    merger = 64 * (4 * c * 4 * c + 4 * c * 1024)
    tower = vision(published)
    assert tower.flops(rows) == 2 * (rows * 3 * 14 * 14 * c + full + windows + small + merger)
    assert tower.flops(10 * rows) == 10 * tower.flops(rows)


def test_settings_in_one_file_and_in_two(published: ModelDir) -> None:
    """transformers nests both processors in processor_config.json now, and older files serve both of them."""
    expected = vision(published)
    (published.path / "preprocessor_config.json").unlink()
    videos = {**IMAGES, "max_num_frames": 128, "video_processor_type": "MiniCPMV4_6VideoProcessor", "stack_frames": 1}
    published.write("processor_config.json", {"image_processor": IMAGES, "video_processor": videos})
    assert vision(published) == expected
    published.write(
        "processor_config.json", {"image_processor": IMAGES, "video_processor": {**videos, "max_slice_nums": 1}}
    )
    assert vision(published).videos == Slicing(448, 56, 1) and vision(published).images == expected.images
    published.write("processor_config.json", {"image_processor": {"image_processor_type": "MiniCPMV4_6ImageProcessor"}})
    assert vision(published) == expected


def test_marks_are_found_wherever_tokenizers_name_them(published: ModelDir) -> None:
    expected = vision(published).marks
    assert expected.slice == ("<slice>", "</slice>") and expected.number == ("<image_id>", "</image_id>")
    objects = {name: {"content": token, "special": True} for name, token in MARKS.items()}
    for content in ({"model_specific_special_tokens": MARKS}, MARKS, {"extra_special_tokens": objects}):
        published.write("tokenizer_config.json", content)
        assert vision(published).marks == expected
    published.write("preprocessor_config.json", {**IMAGES, "use_image_id": False})
    assert vision(published).marks.number is None
    published.write("processor_config.json", {"use_image_id": True})
    assert vision(published).marks.number == expected.number


# ---- slices


def processor(slicing: Slicing, patch_size: int = 14) -> Any:
    mode = {1: "4x", 2: "16x"}[int(math.log2(slicing.cell // patch_size))]
    return MiniCPMV4_6ImageProcessorPil(
        max_slice_nums=slicing.max_slices, scale_resolution=slicing.scale, patch_size=patch_size, downsample_mode=mode
    )


@pytest.mark.parametrize("slicing", SLICINGS, ids=str)
def test_sizes_are_the_processors(slicing: Slicing) -> None:
    patch_size = slicing.cell // 4 if slicing.cell != 28 else 14
    theirs = processor(slicing, patch_size)
    settings = {"scale_resolution": slicing.scale, "patch_size": patch_size, "downsample_mode": theirs.downsample_mode}
    sizes = taken(awkward_sizes(slicing.scale, 4000, seed=slicing.scale))
    assert len(sizes) > 2500
    for width, height in sizes:
        picture = (height, width)
        grid = theirs.get_sliced_grid(picture, slicing.max_slices, slicing.scale)
        assert slicing.grid(width, height) == (None if grid is None else tuple(grid)), picture
        whole = theirs.find_best_resize(picture, allow_upscale=grid is None, **settings)
        assert slicing.fit_size(width, height) == whole[::-1], picture
        if grid is not None:
            canvas = theirs.get_refine_size(picture, grid, allow_upscale=True, **settings)
            tile = slicing.slice_size(width, height, tuple(grid))
            assert (tile[1] * grid[0], tile[0] * grid[1]) == canvas, picture


@pytest.mark.parametrize("slicing", SLICINGS, ids=str)
def test_no_picture_has_more_cells_than_is_said(slicing: Slicing) -> None:
    most = slicing.max_cells() * slicing.cell**2
    seen = 0
    for width, height in taken(awkward_sizes(slicing.scale, 4000, seed=1)) + [(1, n) for n in range(1, MAX_ASPECT + 1)]:
        sizes = [slicing.fit_size(width, height)]
        if (grid := slicing.grid(width, height)) is not None:
            sizes.append(slicing.slice_size(width, height, grid))
        seen = max(seen, *(columns * rows for columns, rows in sizes))
    assert 0.7 * most < seen <= most


def test_pictures_that_are_too_long_are_refused(published: ModelDir) -> None:
    tower = vision(published)
    assert len(tower.plan_image(1, 200).items) == 1 and tower.plan_image(200, 1).num_tokens <= tower.max_tokens_per_item
    for size in ((1, 201), (10000, 1), (20200, 100)):
        with pytest.raises(InvalidImage, match="too long for this model; it takes up to 200 to 1") as caught:
            tower.plan_image(*size)
        assert caught.value.code == "image_aspect_ratio"
    with pytest.raises(InvalidImage, match="empty"):
        tower.plan_image(0, 5)


def tower_pictures(plan: MediaPlan, image: Image.Image) -> Iterator[npt.NDArray[np.uint8]]:
    data = np.frombuffer(render([image], plan.views, "bicubic"), np.uint8)
    for item in plan.items:
        size = item.width * item.height * 3
        yield data[:size].reshape(item.height, item.width, 3)
        data = data[size:]
    assert not data.size


@pytest.mark.parametrize("slicing", [Slicing(48, 16, 4), Slicing(48, 8, 3), Slicing(32, 16, 9)], ids=str)
def test_pixels_are_the_processors(published: ModelDir, slicing: Slicing) -> None:
    """Whole pictures through the processor, pixel for pixel: what is cut, in which order, and how it is resampled."""
    theirs = processor(slicing, 4)
    settings = {"scale_resolution": slicing.scale, "max_slice_nums": slicing.max_slices, "patch_size": 4}
    published.write("preprocessor_config.json", {**IMAGES, **settings, "downsample_mode": theirs.downsample_mode})
    rounds = {"downsample_mode": theirs.downsample_mode}
    published.write("config.json", changed({**CONFIG, **rounds}, "vision_config.patch_size", 4))
    tower = vision(published)
    rng = np.random.default_rng(5)
    for _ in range(60):
        width, height = (int(2 ** rng.uniform(0, 7.5)) for _ in range(2))
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        values = theirs(image, return_tensors="np")
        plan = tower.plan_image(width, height)
        assert [list(item.grid[1:]) for item in plan.items] == values["target_sizes"].tolist(), image.size
        begin = 0
        for item, ours in zip(plan.items, tower_pictures(plan, image), strict=True):
            _, rows, columns = item.grid
            packed = values["pixel_values"][0, :, :, begin : begin + item.num_patches * 4]
            begin += item.num_patches * 4
            whole = packed.reshape(3, 4, rows, columns, 4).transpose(2, 1, 3, 4, 0).reshape(item.height, item.width, 3)
            assert np.array_equal(np.rint((whole * 0.5 + 0.5) * 255), ours), image.size


# ---- what stands in the prompt


def their_text(values: dict[str, Any], divisor: int) -> str:
    names = {name.removesuffix("_id"): token for name, token in MARKS.items()}
    stub = SimpleNamespace(slice_mode=True, video_slice_mode=True, **names)
    return str(MiniCPMV4_6Processor.replace_image_token(stub, values, 0, image_token_divisor=divisor))


def our_text(parts: tuple[str | ItemPlan, ...], token: str = "<|image_pad|>") -> str:
    return "".join(part if isinstance(part, str) else token * part.num_tokens for part in parts)


def test_marks_stand_where_the_processor_puts_them(published: ModelDir) -> None:
    tower = vision(published)
    seen = set()
    for width, height in taken(awkward_sizes(448, 300, seed=9)):
        plan = tower.plan_image(width, height)
        grids = [item.grid[1:] for item in plan.items]
        grid = tower.images.grid(width, height)
        values = {
            "grids": [grid or (0, 0)],
            "num_patches_per_image": [len(grids)],
            "target_sizes": np.array(grids),
        }
        assert our_text(plan.parts) == their_text(values, 16), (width, height)
        assert our_text(plan.numbered_parts(3)) == "<image_id>3</image_id>" + our_text(plan.parts)
        seen.add(grid)
    assert len(seen) > 12


def test_a_video_is_frames_marked_like_pictures(published: ModelDir) -> None:
    tower = vision(published)
    plan = tower.plan_video(VideoInfo(900, 700, 75, 30.0))
    frame = tower.plan_image(900, 700)
    assert plan.frames == (0, 30, 60)
    assert [view.source for view in plan.media.views] == [0, 0, 1, 1, 2, 2]
    assert our_text(plan.media.parts) == 3 * our_text(frame.parts)
    assert [view._replace(source=0) for view in plan.media.views] == 3 * list(frame.views)
    assert our_text(plan.media.numbered_parts(0)).count("<image_id>") == 1


@pytest.mark.slow
def test_frames_are_the_processors() -> None:
    theirs = MiniCPMV4_6VideoProcessor()
    rng = random.Random(2)
    cases = [(1, 30.0, 4), (4, 1.0, 4), (5, 1.0, 4), (10, 1.0, 1), (128 * 25, 25.0, 128), (128 * 25 + 1, 25.0, 128)]
    cases += [
        (rng.randint(1, 900), rng.choice([0.5, 1.0, 23.976, 24.0, 25.0, 29.97, 30.0, 60.0]), rng.choice([1, 2, 7, 64]))
        for _ in range(800)
    ]
    for count, fps, most in cases:
        seen = VideoMetadata(total_num_frames=count, fps=fps, duration=count / fps)
        expected = theirs.sample_frames(seen, max_num_frames=most)
        assert list(one_frame_a_second(count, fps, most)) == expected, (count, fps, most)


def test_videos_that_cannot_be_are_refused(published: ModelDir) -> None:
    tower = vision(published)
    for video in (
        VideoInfo(9, 9, 0, 1.0),
        VideoInfo(9, 9, 5, 0.0),
        VideoInfo(9, 9, 5, math.nan),
        VideoInfo(0, 9, 5, 1),
    ):
        with pytest.raises(InvalidImage):
            tower.plan_video(video)
    published.write("config.json", changed(CONFIG, "video_token_id", ...))
    assert published.spec().video_token_id is None
    with pytest.raises(InvalidRequest, match="takes no videos"):
        vision(published).plan_video(VideoInfo(9, 9, 5, 1.0))


# ---- refusals

REFUSED: dict[str, tuple[str, Any, str]] = {
    "text type": ("text_config.model_type", "gemma", "'gemma' is not supported"),
    "tower type": ("vision_config.model_type", "siglip", "supported is minicpmv4_6_vision"),
    "no tower": ("vision_config", ..., "config.json has no field vision_config"),
    "no image token": ("image_token_id", None, "config.json has no field image_token_id"),
    "mode": ("downsample_mode", "8x", "downsample_mode in config.json must be 4x or 16x"),
    "mode of one side": ("downsample_mode", "4x", "must be the one whose tokens have 4 patches"),
    "rounds": ("merger_times", 2, "must be the one whose tokens have 64 patches"),
    "layer": ("insert_layer_id", 27, "below the tower's number of layers, 27"),
    "no layer": ("insert_layer_id", -1, "insert_layer_id in config.json must be"),
    "kernel": ("merge_kernel_size", [4, 1], "merge_kernel_size in config.json must be [2, 2]"),
    "window": ("vision_config.window_kernel_size", [3, 3], "window_kernel_size in vision_config of config.json"),
    "heads": ("vision_config.num_attention_heads", 7, "not a multiple of its 7 heads"),
    "colours": ("vision_config.num_channels", 1, "RGB"),
    "patch": ("vision_config.patch_size", 16, "patch_size in preprocessor_config.json must be the vision tower's, 16"),
    "sides": ("vision_config.image_size", [980, 980], "image_size in vision_config of config.json must be"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused_in_a_sentence(published: ModelDir, case: str) -> None:
    path, value, words = REFUSED[case]
    published.write("config.json", changed(CONFIG, path, value))
    assert words in published.refusal()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stack_frames": 3}, "stack_frames in preprocessor_config.json must be 1"),
        ({"do_sample_frames": False}, "do_sample_frames"),
        ({"do_resize": False}, "do_resize"),
        ({"downsample_mode": "4x"}, "downsample_mode in preprocessor_config.json must be the one whose tokens have 16"),
        ({"max_slice_nums": 0}, "max_slice_nums"),
    ],
)
def test_processors_that_cannot_be_followed_are_refused(published: ModelDir, change: Json, words: str) -> None:
    published.write("preprocessor_config.json", {**IMAGES, **change})
    assert words in published.refusal()


def test_frames_must_be_normalised_like_pictures(published: ModelDir) -> None:
    published.write("video_preprocessor_config.json", {**IMAGES, "image_mean": [0, 0, 0]})
    assert "must resample and normalise frames as the picture processor does" in published.refusal()


def test_missing_marks_are_named(published: ModelDir) -> None:
    for name in MARKS:
        known = {other: token for other, token in MARKS.items() if other != name}
        published.write("tokenizer_config.json", {"extra_special_tokens": known})
        if name.startswith(("image_token", "video_token")):
            published.spec()
        else:
            assert published.refusal() == f"tokenizer_config.json has no field {name}"
    (published.path / "tokenizer_config.json").unlink()
    assert published.refusal() == "the model directory has no tokenizer_config.json"


def leaves(config: Json, prefix: str = "") -> Iterator[str]:
    for name, value in config.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")


ODD_VALUES = (None, ..., True, -1, 0, 1, 1.5, 10**400, float("nan"), "", "x", [], [[]], {}, {"a": None})


@pytest.mark.quick("preprocessor", "tokenizer")
@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json", "tokenizer_config.json"])
def test_no_value_anywhere_leads_to_another_exception(published: ModelDir, file: str) -> None:
    content: Json = json.loads((published.path / file).read_text())
    for path, value in itertools.product(leaves(content), ODD_VALUES):
        published.write(file, changed(content, path, value))
        try:
            published.spec()
        except CheckpointError as error:
            assert "\n" not in error.message
    published.write(file, content)
    published.spec()
