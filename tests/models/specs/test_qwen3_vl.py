"""Qwen3-VL's specs: sizes, frames and times against transformers' processors, published configs, refusals."""

from __future__ import annotations

import copy
import importlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.video_utils import VideoMetadata

from hydra_engine.core.options import SpecOptions
from hydra_engine.errors import CheckpointError, InvalidImage
from hydra_engine.models.qwen_vl.spec import Qwen3VlVisionSpec
from hydra_engine.models.specs.base import ItemPlan, VideoInfo
from hydra_engine.models.specs.registry import load_spec

# The modules themselves: their package offers stand-ins where torchvision is missing.
videos = importlib.import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
processing = importlib.import_module("transformers.models.qwen3_vl.processing_qwen3_vl")

Json = dict[str, Any]


def published(text: Json, vision: Json, *, tied: bool) -> Json:
    """The config as models were published in transformers 4: an old name for the tower, rope_scaling."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "bos_token_id": 151643,
            "dtype": "bfloat16",
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000,
            "vocab_size": 151936,
            **text,
        },
        "tie_word_embeddings": tied,
        "video_token_id": 151656,
        "vision_config": {
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "model_type": "qwen3_vl",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **vision,
        },
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
    }


SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
LARGE_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
MODELS: dict[str, Json] = {
    "2B": published(
        {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_hidden_layers": 28},
        SMALL_TOWER,
        tied=True,
    ),
    "4B": published(
        {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_hidden_layers": 36},
        SMALL_TOWER,
        tied=True,
    ),
    "8B": published(
        {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_hidden_layers": 36},
        LARGE_TOWER,
        tied=False,
    ),
}
SHAPE = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
IMAGES: Json = {
    **SHAPE,
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
VIDEOS: Json = {
    **SHAPE,
    "size": {"longest_edge": 25165824, "shortest_edge": 4096},
    "video_processor_type": "Qwen3VLVideoProcessor",
}


class Directory:
    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, content: Json) -> None:
        (self.path / name).write_text(json.dumps(content))

    def vision(self, options: SpecOptions | None = None) -> Qwen3VlVisionSpec:
        vision = load_spec(self.path, options).vision
        assert isinstance(vision, Qwen3VlVisionSpec)
        return vision

    def refusal(self) -> str:
        with pytest.raises(CheckpointError) as caught:
            load_spec(self.path)
        assert "\n" not in caught.value.message and len(caught.value.message) < 400
        return caught.value.message


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    found = Directory(tmp_path)
    found.write("config.json", MODELS["4B"])
    found.write("preprocessor_config.json", IMAGES)
    found.write("video_preprocessor_config.json", VIDEOS)
    return found


def sizes(seed: int, count: int, factor: int) -> list[tuple[int, int]]:
    """Widths and heights of all orders, many at the boundaries of rounding, some too long."""
    rng = random.Random(seed)

    def side() -> int:
        if rng.random() < 0.5:
            return max(1, int(factor * rng.randrange(1, 200) / rng.choice([1, 2, 4])) + rng.randrange(-1, 2))
        return int(10 ** rng.uniform(0, 4))

    special = [(1, 1), (1, 200), (1, 201), (200, 1), (201, 1), (1, 10000), (10000, 1), (10000, 10000), (factor, factor)]
    return special + [(side(), side()) for _ in range(count)]


@pytest.mark.parametrize("limits", [(65536, 16777216), (3136, 1003520), (40_000, 90_000), (1024, 1024)])
def test_sizes_of_pictures_are_those_of_the_processor(directory: Directory, limits: tuple[int, int]) -> None:
    size = {"shortest_edge": limits[0], "longest_edge": limits[1]}
    directory.write("preprocessor_config.json", {**IMAGES, "size": size})
    processor, vision = Qwen2VLImageProcessorPil(**{**SHAPE, "size": size}), directory.vision()
    num_refused = 0
    for width, height in sizes(1, 1500, 32):
        try:
            expected = processor.get_number_of_image_patches(height, width)
        except ValueError:
            num_refused += 1
            with pytest.raises(InvalidImage, match="too long"):
                vision.plan_image(width, height)
            continue
        plan = vision.plan_image(width, height)
        (item,) = plan.items
        assert (item.num_patches, item.num_tokens) == (expected, expected // 4), (width, height)
        assert item.grid[1] * item.grid[2] == item.num_patches and item.rows * item.columns == item.num_tokens
        assert plan.views[0].resize == (item.width, item.height) == (item.grid[2] * 16, item.grid[1] * 16)
        assert item.num_tokens <= vision.max_tokens_per_image and item.num_pictures == 1
    assert num_refused > 10
    with pytest.raises(InvalidImage, match="empty"):
        vision.plan_image(0, 5)


VIDEO_SETTINGS: dict[str, Json] = {
    "published": {},
    "class": {"size": None},
    "other rates": {"fps": 0.7, "min_frames": 6, "max_frames": 40},
    "small budget": {"size": {"shortest_edge": 30_000, "longest_edge": 150_000}},
    "capped": {"cap_pixels_per_frame": True, "max_video_tokens": 64},
    "capped below": {"cap_pixels_per_frame": True, "size": {"shortest_edge": 200_000, "longest_edge": 400_000}},
    "deep patches": {"temporal_patch_size": 3, "min_frames": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VIDEO_SETTINGS)
def test_frames_sizes_and_times_of_videos_are_those_of_the_processor(directory: Directory, name: str) -> None:
    settings = {**VIDEOS, **VIDEO_SETTINGS[name]}
    settings = {field: value for field, value in settings.items() if value is not None}
    depth = settings["temporal_patch_size"]
    config = copy.deepcopy(MODELS["4B"])
    config["vision_config"]["temporal_patch_size"] = depth
    directory.write("config.json", config)
    directory.write("preprocessor_config.json", {**IMAGES, "temporal_patch_size": depth})
    directory.write("video_preprocessor_config.json", settings)
    processor, vision = videos.Qwen3VLVideoProcessor(**settings), directory.vision()
    rng = random.Random(name)
    num_refused = 0
    for width, height in sizes(2, 400, 32):
        num_frames, fps = rng.choice([2, 3, 4, 5, 7, 30, rng.randrange(2, 5000)]), rng.choice([1.0, 24.0, 29.97, 0.3])
        metadata = VideoMetadata(total_num_frames=num_frames, fps=fps)
        chosen = processor.sample_frames(metadata)
        video = VideoInfo(width, height, num_frames, fps)
        try:
            high, wide = frame_size(processor, settings, len(chosen), height, width)
        except ValueError:
            num_refused += 1
            with pytest.raises(InvalidImage):
                vision.plan_video(video)
            continue
        plan = vision.plan_video(video)
        assert list(plan.frames) == chosen.tolist()
        assert {(item.height, item.width) for item in plan.media.items} == {(high, wide)}, (video, name)
        assert plan.media.num_patches == -(-len(chosen) // depth) * (high // 16) * (wide // 16)
        assert max(item.num_tokens for item in plan.media.items) <= vision.max_tokens_per_item
        metadata.frames_indices = chosen
        item = plan.media.items[0]
        assert spoken(plan.media.parts) == placeholder(depth, len(plan.media.items), item.num_tokens, metadata)
    assert num_refused > 5


def frame_size(processor: Any, settings: Json, num_frames: int, height: int, width: int) -> tuple[int, int]:
    """(height, width), by the processor's arithmetic; its cap is newer than the rest of it."""
    most = processor.size["longest_edge"]
    if settings.get("cap_pixels_per_frame"):
        of_one = min(settings.get("max_video_tokens", 768) * 32 * 32, most // num_frames)
        most = max(of_one, int(processor.size["shortest_edge"] * 1.05)) * num_frames
    size: tuple[int, int] = videos.smart_resize(
        num_frames=num_frames,
        height=height,
        width=width,
        temporal_factor=settings["temporal_patch_size"],
        factor=32,
        min_pixels=processor.size["shortest_edge"],
        max_pixels=most,
    )
    return size


def spoken(parts: tuple[str | ItemPlan, ...]) -> str:
    return "".join(part if isinstance(part, str) else "<|video_pad|>" * part.num_tokens for part in parts)


def placeholder(depth: int, count: int, num_tokens: int, metadata: VideoMetadata) -> str:
    """The text of transformers' processor for a video of `count` temporal patches."""
    owner = SimpleNamespace(
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=depth),
        video_token="<|video_pad|>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        _calculate_timestamps=lambda *args: processing.Qwen3VLProcessor._calculate_timestamps(None, *args),
    )
    inputs = {"video_grid_thw": torch.tensor([[count, 4, num_tokens]]), "video_metadata": [metadata]}
    text: str = processing.Qwen3VLProcessor.replace_video_token(owner, inputs, 0)
    return text


def test_temporal_patches_are_spans_of_their_own(directory: Directory) -> None:
    plan = directory.vision().plan_video(VideoInfo(320, 160, 7, 3.0))  # 4 frames: 0, 2, 4, 6
    assert plan.frames == (0, 2, 4, 6)
    first, second = plan.media.items
    assert (first.num_pictures, first.num_tokens, first.rows, first.columns) == (2, 50, 5, 10)
    assert not second.continues and second.time == 0
    assert [view.source for view in plan.media.views] == [0, 1, 2, 3]
    marks = [part for part in plan.media.parts if isinstance(part, str)]
    assert marks == ["<0.3 seconds><|vision_start|>", "<|vision_end|><1.7 seconds><|vision_start|>", "<|vision_end|>"]


def test_a_frame_without_partner_stands_for_both(directory: Directory) -> None:
    plan = directory.vision().plan_video(VideoInfo(320, 160, 5, 2.0))
    assert [item.num_pictures for item in plan.media.items] == [2, 2, 1]
    assert [view.source for view in plan.media.views] == [0, 1, 2, 3, 4]


def test_videos_that_are_too_short_are_refused(directory: Directory) -> None:
    vision = directory.vision()
    for num_frames, fps, words in ((1, 2.0, "needs at least 2"), (9, 0.0, "rate above 0"), (9, float("nan"), "rate")):
        with pytest.raises(InvalidImage, match=words):
            vision.plan_video(VideoInfo(64, 64, num_frames, fps))
    assert len(vision.plan_video(VideoInfo(64, 64, 9000, 1e-300)).frames) == 768


@pytest.mark.parametrize(
    ("name", "vision_parameters", "language_parameters", "planes"),
    [
        ("2B", 406_957_056, 1_720_574_976, 4),
        ("4B", 415_347_712, 4_022_468_096, 4),
        ("8B", 576_388_336, 8_190_735_360, 4),
    ],
)
def test_published_models(
    directory: Directory, name: str, vision_parameters: int, language_parameters: int, planes: int
) -> None:
    directory.write("config.json", MODELS[name])
    spec, vision = load_spec(directory.path), directory.vision()
    assert (spec.family, spec.dtype, spec.max_model_len) == ("qwen3_vl", "bfloat16", 262144)
    assert (spec.image_token_id, spec.video_token_id, spec.eos_token_ids) == (151655, 151656, (151645,))
    assert (spec.language.rope_sections, spec.language.rope_axes[:3]) == ((24, 20, 20), (0, 1, 2))
    assert (vision.num_parameters(), spec.language.num_parameters()) == (vision_parameters, language_parameters)
    assert (vision.num_planes, vision.max_tokens_per_image, vision.max_tokens_per_item) == (planes, 16384, 16384)
    assert vision.plan_image(1920, 1080).num_tokens == 60 * 34
    assert vision.plan_image(640, 480).num_tokens == 20 * 15
    assert vision.plan_image(100, 100).num_tokens == 64  # enlarged to 65536 pixels
    minute = vision.plan_video(VideoInfo(1280, 720, 1800, 30.0))
    assert (len(minute.frames), len(minute.media.items)) == (120, 60)
    assert minute.media.num_tokens == 60 * 190  # frames of 608 x 320 pixels


def test_the_newest_layout_is_the_same_model(directory: Directory) -> None:
    expected = load_spec(directory.path)
    config = copy.deepcopy(MODELS["4B"])
    text = config["text_config"]
    text["rope_parameters"] = {**text.pop("rope_scaling"), "rope_theta": text.pop("rope_theta")}
    config["vision_config"] |= {"model_type": "qwen3_vl_vision", "rope_parameters": {"rope_type": "axial"}}
    directory.write("config.json", config)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (directory.path / name).unlink()
    directory.write("processor_config.json", {"image_processor": IMAGES, "video_processor": VIDEOS})
    assert load_spec(directory.path) == expected


def test_pixel_limits_of_the_user(directory: Directory) -> None:
    vision = directory.vision(SpecOptions(min_pixels=1024, max_pixels=64 * 1024))
    assert vision.plan_image(1920, 1080).num_tokens == 60
    assert vision.plan_image(10, 10).num_tokens == 1
    assert vision.max_tokens_per_item < 200
    assert max(item.num_tokens for item in vision.plan_video(VideoInfo(1280, 720, 10, 1.0)).media.items) == 60


def test_a_directory_without_video_settings_takes_those_of_pictures(directory: Directory) -> None:
    (directory.path / "video_preprocessor_config.json").unlink()
    assert directory.vision().frames.limits == (65536, 16777216)


Change = Callable[[Json, Json, Json], object]
REFUSED: dict[str, tuple[Change, str]] = {
    "text type": (lambda c, i, v: c["text_config"].update(model_type="qwen3"), "must be qwen3_vl_text"),
    "heads": (lambda c, i, v: c["vision_config"].update(num_heads=3), "multiple of 4 for each of its 3 heads"),
    "width": (lambda c, i, v: c["vision_config"].update(out_hidden_size=99), "decoder's hidden size"),
    "layers": (lambda c, i, v: c["vision_config"].update(deepstack_visual_indexes=[24]), "from 0 to 23"),
    "layers twice": (lambda c, i, v: c["vision_config"].update(deepstack_visual_indexes=[3, 3]), "repetition"),
    "layers of another kind": (lambda c, i, v: c["vision_config"].update(deepstack_visual_indexes=8), "a list of"),
    "few decoder layers": (lambda c, i, v: c["text_config"].update(num_hidden_layers=3), "more than 3"),
    "patches": (lambda c, i, v: i.update(patch_size=14), "as the vision tower has it"),
    "patches of videos": (lambda c, i, v: v.update(patch_size=14), "as the vision tower has it"),
    "mean of videos": (lambda c, i, v: v.update(image_mean=[0, 0, 0]), "normalise pixels in different ways"),
    "all frames": (lambda c, i, v: v.update(do_sample_frames=False), "must sample frames"),
    "number of frames": (lambda c, i, v: v.update(num_frames=8), "must sample frames"),
    "bounds of frames": (lambda c, i, v: v.update(max_frames=2), "max_frames"),
    "no resizing": (lambda c, i, v: v.update(do_resize=False), "do_resize"),
    "colours": (lambda c, i, v: c["vision_config"].update(in_channels=4), "in_channels"),
    "sections": (
        lambda c, i, v: c["text_config"]["rope_scaling"].update(mrope_section=[1, 1, 1]),
        "3 pairs, but a head turns 64",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused_in_a_sentence(directory: Directory, case: str) -> None:
    change, words = REFUSED[case]
    files = copy.deepcopy(MODELS["4B"]), dict(IMAGES), dict(VIDEOS)
    change(*files)
    for name, content in zip(
        ("config.json", "preprocessor_config.json", "video_preprocessor_config.json"), files, strict=True
    ):
        directory.write(name, content)
    assert words in directory.refusal()


ODD_VALUES = (None, True, -1, 0, 1, 1.5, 10**400, float("nan"), "", "x", [], [[]], {}, {"a": None})


@pytest.mark.quick("preprocessor")
@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json", "video_preprocessor_config.json"])
def test_no_value_anywhere_leads_to_another_exception(directory: Directory, file: str) -> None:
    config: Json = json.loads((directory.path / file).read_text())
    places = [(config, name) for name in config]
    places += [(section, name) for section in config.values() if isinstance(section, dict) for name in section]
    for place, name in places:
        kept = place[name]
        for value in ODD_VALUES:
            place[name] = value
            directory.write(file, config)
            try:
                vision = load_spec(directory.path).vision
                if vision is not None:
                    vision.plan_image(64, 64)
                    vision.plan_video(VideoInfo(64, 64, 9, 2.0))
            except (CheckpointError, InvalidImage) as error:
                assert "\n" not in error.message
        place[name] = kept
