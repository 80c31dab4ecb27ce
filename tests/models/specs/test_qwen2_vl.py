"""Specs of Qwen2-VL and Qwen2.5-VL: published configs, every layout of settings, videos, refusals."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as processors_resize

from hydra_engine.core.options import SpecOptions
from hydra_engine.errors import CheckpointError, ConfigError, InvalidImage
from hydra_engine.models.qwen_vl.geometry_spec import FRAMES, PixelLimits
from hydra_engine.models.qwen_vl.spec import Qwen2VisionSpec
from hydra_engine.models.specs.base import ModelSpec, VideoInfo
from hydra_engine.models.specs.registry import load_spec
from tests.models.specs.model_dirs import changed

Json = dict[str, Any]


def flat(model_type: str, hidden: int, layers: int, heads: int, kv: int, inner: int, vocab: int, tied: bool) -> Json:
    """The config as models were published in transformers 4: the decoder's fields at the top."""
    vision = {"depth": 32, "in_chans": 3, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2}
    vision |= {"spatial_patch_size": 14, "temporal_patch_size": 2}
    if model_type == "qwen2_vl":
        architecture = "Qwen2VLForConditionalGeneration"
        vision |= {"embed_dim": 1280, "mlp_ratio": 4, "hidden_size": hidden}
    else:
        architecture = "Qwen2_5_VLForConditionalGeneration"
        vision |= {"hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": hidden}
        vision |= {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2}
    return {
        "architectures": [architecture],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "image_token_id": 151655,
        "initializer_range": 0.02,
        "intermediate_size": inner,
        "max_position_embeddings": 32768 if model_type == "qwen2_vl" else 128000,
        "max_window_layers": layers,
        "model_type": model_type,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "video_token_id": 151656,
        "vision_config": vision,
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
        "vision_token_id": 151654,
        "vocab_size": vocab,
    }


PUBLISHED: dict[str, Json] = {
    "Qwen2-VL-2B": flat("qwen2_vl", 1536, 28, 12, 2, 8960, 151936, tied=True),
    "Qwen2-VL-7B": flat("qwen2_vl", 3584, 28, 28, 4, 18944, 152064, tied=False),
    "Qwen2.5-VL-3B": flat("qwen2_5_vl", 2048, 36, 16, 2, 11008, 151936, tied=True),
    "Qwen2.5-VL-7B": flat("qwen2_5_vl", 3584, 28, 28, 4, 18944, 152064, tied=False),
}
CLIP_COLOURS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
PATCHES = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
IMAGES: Json = {"min_pixels": 3136, "max_pixels": 12845056, **PATCHES, **CLIP_COLOURS}
GENERATION: Json = {"bos_token_id": 151643, "eos_token_id": [151645, 151643], "pad_token_id": 151643}

Load = Callable[..., ModelSpec]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Config and processor files -> spec."""

    def load(config: Json, *, options: SpecOptions | None = None, **files: Json | None) -> ModelSpec:
        contents = {"config": config, "generation_config": GENERATION, "preprocessor_config": IMAGES, **files}
        for name, content in contents.items():
            if content is not None:
                (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return load_spec(tmp_path, options)

    return load


def vision_of(spec: ModelSpec) -> Qwen2VisionSpec:
    assert isinstance(spec.vision, Qwen2VisionSpec)
    return spec.vision


# ---- published models


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str, load: Load) -> None:
    config = PUBLISHED[name]
    spec = load(config)
    vision = vision_of(spec)
    assert spec.family == config["model_type"]
    assert (spec.image_token_id, spec.video_token_id) == (151655, 151656)
    assert (spec.bos_token_id, spec.pad_token_id, spec.eos_token_ids) == (151643, 151643, (151645, 151643))
    assert spec.dtype == "bfloat16"
    assert spec.language.rope_sections == (16, 24, 24) and spec.language.rope_theta == 1e6
    assert spec.language.attention_bias and spec.language.head_dim == 128
    assert spec.max_model_len == config["max_position_embeddings"]
    plan = vision.plan_image(896, 896)
    assert (plan.num_tokens, plan.num_patches) == (1024, 4096)
    assert plan.items[0].grid == (1, 64, 64) and (plan.items[0].rows, plan.items[0].columns) == (32, 32)
    assert plan.views[0].resize == (896, 896) == plan.views[0].tile
    assert vision.max_tokens_per_image == vision.max_tokens_per_item == 16384
    assert vision.max_patches_per_image == 65536
    assert vision.num_planes == 1 and vision.feature_size == config["hidden_size"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_as_many_parameters_as_transformers_makes(name: str, load: Load) -> None:
    spec = load(PUBLISHED[name])
    config = transformers.AutoConfig.for_model(**copy.deepcopy(PUBLISHED[name]))
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    tower = sum(p.numel() for p in model.model.visual.parameters())
    assert vision_of(spec).num_parameters() == tower
    assert spec.language.num_parameters() == sum(p.numel() for p in model.parameters()) - tower
    assert {"Qwen2-VL-7B": 675_759_104, "Qwen2.5-VL-7B": 676_550_144}.get(name, tower) == tower


def test_windows_and_time_of_qwen2_5_vl(load: Load) -> None:
    vision = vision_of(load(PUBLISHED["Qwen2.5-VL-7B"]))
    assert vision.tower.window_tokens == 4 and vision.tower.full_layers == {7, 15, 23, 31}
    assert vision.tokens_per_second == 2
    older = vision_of(load(PUBLISHED["Qwen2-VL-7B"]))
    assert not older.tower.windowed and older.tokens_per_second == 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_transformers_5_writes_says_the_same(name: str, load: Load) -> None:
    """Nested, with fields that equal a default left out, and whatever else it adds."""
    expected = load(PUBLISHED[name])
    config = transformers.AutoConfig.for_model(**copy.deepcopy(PUBLISHED[name])).to_diff_dict()
    assert "text_config" in config and "hidden_size" not in config
    size = {"shortest_edge": 3136, "longest_edge": 12845056}
    nested = {"image_processor": {**PATCHES, **CLIP_COLOURS, "size": size}}
    assert load(config, processor_config=nested, preprocessor_config=None) == expected


def test_a_nested_config_with_defaults_left_out(load: Load) -> None:
    """Qwen2-VL-72B is what the classes have as defaults."""
    config = {"model_type": "qwen2_vl", "text_config": {}, "vision_config": {}}
    spec = load(changed(config, "vision_config.hidden_size", 8192))
    assert (spec.language.num_layers, spec.language.hidden_size, spec.language.num_kv_heads) == (80, 8192, 8)
    assert vision_of(spec).tower.intermediate_size == 5120 and vision_of(spec).tower.hidden_act == "quick_gelu"
    assert spec.image_token_id == 151655


# ---- the processors' settings


def test_pixel_limits_in_every_layout(load: Load) -> None:
    config = PUBLISHED["Qwen2-VL-2B"]
    old = {**IMAGES, "min_pixels": 4 * 784, "max_pixels": 100 * 784}
    new = {**PATCHES, **CLIP_COLOURS, "size": {"shortest_edge": 4 * 784, "longest_edge": 100 * 784}}
    assert vision_of(load(config, preprocessor_config=old)) == vision_of(load(config, preprocessor_config=new))
    both = {**old, "size": {"shortest_edge": 1, "longest_edge": 2}}  # transformers lets the old names win
    assert vision_of(load(config, preprocessor_config=both)).limits == PixelLimits(4 * 784, 100 * 784)
    assert vision_of(load(config, preprocessor_config={**PATCHES})).limits == PixelLimits(3136, 1280 * 784)
    chosen = vision_of(load(config, options=SpecOptions(min_pixels=784, max_pixels=9 * 784)))
    assert chosen.limits == chosen.sampling.limits == PixelLimits(784, 9 * 784)
    assert chosen.max_tokens_per_image == 42 and chosen.plan_image(2000, 2000).num_tokens == 9
    processor = Qwen2VLImageProcessorPil(**{**PATCHES, **CLIP_COLOURS, "min_pixels": 3136, "max_pixels": 78400})
    for width, height in ((640, 480), (1, 1), (90, 2000)):
        expected = processor.get_number_of_image_patches(height, width)
        assert vision_of(load(config, preprocessor_config=old)).plan_image(width, height).num_patches == expected


def test_limits_that_contradict_each_other(load: Load) -> None:
    with pytest.raises(CheckpointError, match="at least 900 and at most 800"):
        load(PUBLISHED["Qwen2-VL-2B"], preprocessor_config={**IMAGES, "min_pixels": 900, "max_pixels": 800})
    with pytest.raises(ConfigError, match="min_pixels 3136 and max_pixels 800"):
        load(PUBLISHED["Qwen2-VL-2B"], options=SpecOptions(max_pixels=800))


def test_pixels_that_differ_have_names_that_differ(load: Load) -> None:
    """The digest of features starts from `identity`."""
    specs = (
        load(PUBLISHED["Qwen2-VL-2B"]),
        load(PUBLISHED["Qwen2.5-VL-3B"]),
        load(PUBLISHED["Qwen2-VL-2B"], preprocessor_config={**IMAGES, "resample": 2}),
    )
    names = {vision_of(spec).preprocess.identity for spec in specs}
    assert len(names) == 3


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("vision_config.patch_size", 16, "patch_size in preprocessor_config.json must be 16"),
        ("vision_config.spatial_merge_size", 3, "merge_size in preprocessor_config.json must be 3"),
        ("vision_config.temporal_patch_size", 1, "temporal_patch_size in preprocessor_config.json must be 1"),
        ("vision_config.num_heads", 24, "multiple of 4 for each of its 24 heads"),
        ("vision_config.out_hidden_size", 2048, "out_hidden_size in vision_config of config.json must be 3584"),
        ("vision_config.window_size", 20, "window_size in vision_config of config.json must be at least 28"),
        ("vision_config.fullatt_block_indexes", 7, "fullatt_block_indexes in vision_config"),
        ("vision_config.fullatt_block_indexes", [-1], "fullatt_block_indexes in vision_config"),
        ("vision_config.hidden_act", "relu6", "hidden_act in vision_config"),
        ("vision_config.in_channels", 4, "in_channels in vision_config"),
        ("vision_config.rope_parameters", {"rope_type": "yarn"}, "rope_type in rope_parameters of vision_config"),
        ("vision_config", ..., "no field vision_config"),
        ("rope_scaling.mrope_section", [16, 24, 23], "mrope_section"),
        ("hidden_size", "wide", "hidden_size in config.json"),
    ],
)
def test_refused_configs(path: str, value: Any, complaint: str, load: Load) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(changed(PUBLISHED["Qwen2.5-VL-7B"], path, value))
    assert complaint in caught.value.message


def test_refused_processors(load: Load) -> None:
    config = PUBLISHED["Qwen2-VL-7B"]
    video = {**IMAGES, "fps": 2}
    for name, settings, complaint in (
        ("preprocessor_config", {**IMAGES, "do_resize": False}, "do_resize false"),
        ("video_preprocessor_config", {**video, "num_frames": 8}, "both fps and num_frames"),
        ("video_preprocessor_config", {**video, "max_frames": 3}, "max_frames"),
        ("video_preprocessor_config", {**video, "image_mean": [0.5, 0.5, 0.5]}, "normalise pixels in different ways"),
    ):
        with pytest.raises(CheckpointError) as caught:
            load(config, **{name: settings})
        assert complaint in caught.value.message


# ---- videos


def test_a_video_becomes_one_span_per_temporal_patch(load: Load) -> None:
    vision = vision_of(load(PUBLISHED["Qwen2-VL-7B"]))
    frames, plan = vision.plan_video(VideoInfo(280, 140, 5, 1.0))
    assert frames == (0, 1, 2, 3, 4)
    assert [view.source for view in plan.views] == [0, 1, 2, 3, 4, 4]
    assert {view.resize for view in plan.views} == {(280, 140)}
    assert [(item.time, item.continues, item.num_pictures) for item in plan.items] == [
        (0, False, 2),
        (1, True, 2),
        (2, True, 2),
    ]
    assert all((item.rows, item.columns, item.grid) == (5, 10, (1, 10, 20)) for item in plan.items)
    assert (plan.num_tokens, plan.num_patches) == (150, 600) and len(plan.parts) == 3


def test_frames_have_limits_of_their_own(load: Load) -> None:
    settings = {**PATCHES, **CLIP_COLOURS, "video_processor_type": "Qwen2VLVideoProcessor"}
    vision = vision_of(load(PUBLISHED["Qwen2-VL-7B"], video_preprocessor_config=settings))
    assert vision.sampling.limits == FRAMES
    assert vision.plan_image(140, 140).num_tokens == 25
    (item,) = vision.plan_video(VideoInfo(140, 140, 1, 1.0)).media.items
    assert item.width == item.height == processors_resize(140, 140, 28, *FRAMES)[0]
    small = {**settings, "size": {"shortest_edge": 784, "longest_edge": 10**8}}
    vision = vision_of(load(PUBLISHED["Qwen2-VL-7B"], video_preprocessor_config=small))
    assert vision.max_tokens_per_item == 10**8 // 784 > vision.max_tokens_per_image == 16384
    capped = {**small, "cap_pixels_per_frame": True, "max_video_tokens": 1000, "fps": 10}
    vision = vision_of(load(PUBLISHED["Qwen2-VL-7B"], video_preprocessor_config=capped))
    items = vision.plan_video(VideoInfo(2000, 2000, 100, 10.0)).media.items
    share = max(min(10**8, int(1000 * 784 * 0.9) * 2 // 100), int(784 * 1.05))
    assert (items[0].height, items[0].width) == processors_resize(2000, 2000, 28, 784, share)
    least = {**settings, "size": {"shortest_edge": 10**8, "longest_edge": 10**8}, "cap_pixels_per_frame": True}
    assert vision_of(load(PUBLISHED["Qwen2-VL-7B"], video_preprocessor_config=least)).max_tokens_per_item > 133000


@pytest.mark.parametrize("rate", [2, 25])
def test_times_are_those_of_transformers(rate: int, load: Load) -> None:
    """Fractional distances are rounded to float32 before the product is cut off: at 25 a second it shows."""
    vision = vision_of(load(changed(PUBLISHED["Qwen2.5-VL-7B"], "vision_config.tokens_per_second", rate)))
    rng = random.Random(5)
    for _ in range(400):
        total, fps = rng.randrange(1, 60), rng.choice([0.1, 0.3, 1.0, 1.7, 2.0, 24.0, 29.97, rng.uniform(0.2, 30)])
        frames, plan = vision.plan_video(VideoInfo(56, 56, total, fps))
        seconds = torch.tensor([2 / (len(frames) / total * fps)])
        places = Qwen2_5_VLModel.get_vision_position_ids(
            None,
            start_position=7,
            grid_thw=torch.tensor([len(plan.items), 4, 4]),
            spatial_merge_size=2,
            time_interval=rate * seconds[0],
        )
        assert [item.time for item in plan.items] == (places[0, ::4] - 7).tolist(), (total, fps)


def test_impossible_videos(load: Load) -> None:
    vision = vision_of(load(PUBLISHED["Qwen2.5-VL-7B"]))
    for video, complaint in (
        (VideoInfo(64, 64, 0, 2.0), "no frames"),
        (VideoInfo(64, 64, 4, 0.0), "frames a second"),
        (VideoInfo(64, 64, 4, math.nan), "frames a second"),
        (VideoInfo(64, 64, 4, math.inf), "frames a second"),
        (VideoInfo(64, 64, 400, 0.002), "lasts 200000 seconds, this model takes less than 64000"),
        (VideoInfo(0, 64, 4, 2.0), "empty"),
        (VideoInfo(3000, 10, 4, 2.0), "too long"),
    ):
        with pytest.raises(InvalidImage, match=complaint):
            vision.plan_video(video)
