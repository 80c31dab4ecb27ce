"""openPangu-VL-7B's spec: the published files, sizes and prompts as the published processors have them, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from hydra_engine.core.options import SpecOptions
from hydra_engine.errors import InvalidImage
from hydra_engine.models.openpangu.spec import OpenPanguVisionSpec, spread_axes
from hydra_engine.models.specs.base import MediaPlan, ModelSpec, VideoInfo
from hydra_engine.models.specs.registry import load_spec
from tests.models.specs.model_dirs import Json, ModelDir, Size, awkward_sizes, changed
from tools.miniatures.openpangu import OpenPanguVLForConditionalGeneration, axis_order

# FreedomIntelligence/openPangu-VL-7B as published.
CONFIG: Json = {
    "architectures": ["OpenPanguVLForConditionalGeneration"],
    "bias": True,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 45892,
    "vision_start_token_id": 45986,
    "vision_end_token_id": 46007,
    "image_token_id": 46005,
    "video_token_id": 144208,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "max_position_embeddings": 131072,
    "max_window_layers": 34,
    "model_type": "openpangu_vl",
    "num_attention_heads": 32,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 64000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vision_config": {
        "rms_norm_eps": 1e-06,
        "depth": 26,
        "hidden_act": "gelu",
        "hidden_size": 1536,
        "intermediate_size": 4608,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [5, 12, 19, 25],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {
        "rope_type": "default",
        "type": "default",
        "mrope_section": [10, 27, 27],
        "mrope_interleaved": True,
    },
    "vocab_size": 153376,
}
PROCESSOR: Json = {
    "min_pixels": 50176,
    "max_pixels": 3312400,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "OpenPanguVLImageProcessorFast",
    "processor_class": "OpenPanguVLProcessor",
    "any_res_dynamic_video_pixels": True,
    "any_res_max_video_total_pixels": 11239424,
    "any_res_min_video_total_pixels": 100352,
    "any_res_max_frame_pixels": 200704,
    "any_res_min_frame_pixels": 100352,
}
FILES: Json = {
    "config.json": CONFIG,
    "preprocessor_config.json": PROCESSOR,
    "generation_config.json": {"bos_token_id": 1, "pad_token_id": 2, "eos_token_id": [45892], "do_sample": True},
}


@pytest.fixture
def published(tmp_path: Path) -> ModelDir:
    return ModelDir(tmp_path, FILES)


def vision_of(spec: ModelSpec) -> OpenPanguVisionSpec:
    assert isinstance(spec.vision, OpenPanguVisionSpec)
    return spec.vision


def test_the_published_model(published: ModelDir) -> None:
    spec, vision = published.spec(), vision_of(published.spec())
    language = spec.language
    assert (language.num_layers, language.num_kv_heads, language.head_dim, language.rms_eps) == (34, 8, 128, 1e-5)
    assert language.attention_bias and language.output_bias and not language.tie_embeddings
    assert (language.rope_theta, language.rope_sections, spec.max_model_len) == (64e6, (10, 27, 27), 131072)
    assert (spec.bos_token_id, spec.pad_token_id, spec.eos_token_ids, spec.dtype) == (1, 2, (45892,), "bfloat16")
    assert (spec.image_token_id, spec.video_token_id) == (46005, 144208)
    assert (vision.read_layers, vision.merger_size, vision.feature_size) == ((23,), 3584, 4096)
    assert vision.tower.window_tokens == 4 and vision.tower.full_layers == {5, 12, 19, 25} and not vision.tower.gated


def test_as_many_parameters_as_the_published_modules_have(published: ModelDir) -> None:
    with torch.device("meta"):
        fields = changed(CONFIG, "vision_config.mm_unit_vision_select_layer", [-1, -3])
        config = transformers.AutoConfig.for_model("openpangu_vl", fields=fields)
        model = OpenPanguVLForConditionalGeneration(config)
    tower = sum(parameter.numel() for parameter in model.visual.parameters())
    spec = published.spec()
    assert vision_of(spec).num_parameters() == tower
    assert spec.language.num_parameters() == sum(p.numel() for p in model.parameters()) - tower


def test_axes_of_the_published_sections() -> None:
    axes = spread_axes((10, 27, 27))
    assert [axes.count(axis) for axis in range(3)] == [10, 27, 27]
    assert axes[:9] == (0, 1, 2, 1, 2, 1, 2, 0, 1) and axes[-1] == 0
    for sections in ((1, 3, 3), (4, 2, 2), (2, 0, 6), (7, 14, 11)):
        assert list(spread_axes(sections)) == axis_order(sections)


def test_sections_in_runs_and_a_nested_config_are_read(published: ModelDir) -> None:
    expected = published.spec()
    parts = ("vision_config", "image_token_id", "video_token_id", "architectures", "model_type", "torch_dtype")
    text = {name: value for name, value in CONFIG.items() if name not in parts}
    nested = {name: CONFIG[name] for name in parts} | {"text_config": {**text, "model_type": "openpangu_vl_text"}}
    published.write("config.json", nested)
    assert published.spec() == expected
    published.write("config.json", changed(CONFIG, "rope_scaling.mrope_interleaved", False))
    assert published.spec().language.rope_axes == (0,) * 10 + (1,) * 27 + (2,) * 27
    published.write("config.json", changed(CONFIG, "bias", False))
    assert not published.spec().language.attention_bias


def size_of(plan: MediaPlan) -> Size:
    return plan.items[0].width, plan.items[0].height


def published_size(width: int, height: int) -> Size:
    """(width, height), by the published processor's two steps."""
    if width <= 28 or height <= 28:
        if width >= height:
            width, height = int(56 * 1.0 / height * width), 56
        else:
            width, height = 56, int(56 * 1.0 / width * height)
    high, wide = smart_resize(height, width, 28, 50176, 3312400)
    return wide, high


def test_pictures_have_the_published_sizes(published: ModelDir) -> None:
    vision = vision_of(published.spec())
    sizes = [*awkward_sizes(28, 600, seed=5), (28, 28), (28, 29), (29, 28), (1, 1), (28, 5600), (27, 3000)]
    for width, height in sizes:
        try:
            expected = published_size(width, height)
        except ValueError:
            with pytest.raises(InvalidImage):
                vision.plan_image(width, height)
            continue
        plan = vision.plan_image(width, height)
        assert size_of(plan) == expected and plan.num_tokens <= vision.max_tokens_per_image, (width, height)
        assert (plan.views[0].before is None) == (min(width, height) > 28)


def expanded(count: int, tokens: int) -> str:
    """The text that replaces a video's placeholder in the published processor."""
    text = ("[unused18]" + "[unused32]" * tokens + "[unused20]") * count
    return text.removeprefix("[unused18]").removesuffix("[unused20]")


def test_frames_stand_between_marks_and_share_their_pixels(published: ModelDir) -> None:
    vision = vision_of(published.spec())
    for frames in (1, 2, 5, 60, 200):
        video = VideoInfo(1280, 720, frames, 2.0)
        chosen, plan = vision.plan_video(video)
        assert chosen == tuple(range(frames)) and [view.source for view in plan.views] == list(chosen)
        least = max(min(100352 // frames, 200704), 100352)
        most = max(min(11239424 // frames, 200704), 100352)
        high, wide = smart_resize(720, 1280, 28, least, most)
        assert {view.resize for view in plan.views} == {(wide, high)}
        parts = (part if isinstance(part, str) else "[unused32]" * part.num_tokens for part in plan.parts)
        assert "".join(parts) == expanded(frames, wide * high // 784)
        assert not any(item.continues or item.time for item in plan.items)
        assert max(item.num_tokens for item in plan.items) <= vision.max_tokens_per_item


def test_frames_of_one_size_and_the_users_limit(published: ModelDir) -> None:
    published.write("preprocessor_config.json", {**PROCESSOR, "any_res_dynamic_video_pixels": False})
    frames = 200
    fixed = vision_of(published.spec()).plan_video(VideoInfo(1280, 720, frames, 2.0)).media
    assert size_of(fixed) == smart_resize(720, 1280, 28, 100352, 200704)[::-1]
    chosen = vision_of(load_spec(published.path, SpecOptions(min_pixels=784, max_pixels=9 * 784)))
    assert chosen.plan_image(2000, 2000).num_tokens == 9
    assert chosen.plan_video(VideoInfo(1280, 720, 4, 2.0)).media.items[0].num_tokens <= 9


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("model_type", "qwen2_5_vl", "with model_type 'qwen2_5_vl', another model than openpangu_vl"),
        ("vision_config.use_gatedmerger", True, "use_gatedmerger in vision_config of config.json is of a later"),
        ("vision_config.num_key_value_heads", 4, "num_key_value_heads in vision_config of config.json is of a later"),
        ("n_routed_experts", 64, "n_routed_experts in config.json is of a later openPangu model"),
        ("param_sink_number", 128, "param_sink_number in config.json is of a later openPangu model"),
        ("architectures", ["PanguEmbeddedForCausalLM"], "'PanguEmbeddedForCausalLM' has no native implementation"),
        ("architectures", ["OpenPanguV2VLForConditionalGeneration"], "has no native implementation"),
        ("rope_scaling.mrope_section", ..., "has no field mrope_section"),
        (
            "rope_scaling.mrope_section",
            [32, 32],
            "mrope_section in rope_scaling of config.json must be a list of three",
        ),
        ("mlp_bias", True, "these biases"),
        ("vision_config.mm_unit_vision_select_layer", [-3], "must be a list without repetition that has -1"),
        ("vision_config.mm_unit_vision_select_layer", [-1, 3], "must be a list of layers from -26 to -1"),
        ("vision_config.window_size", 20, "window_size in vision_config of config.json must be at least 28"),
        ("vision_config.num_heads", 20, "multiple of 4 for each of its 20 heads"),
        ("vision_config", ..., "no field vision_config"),
    ],
)
def test_refusals(path: str, value: Any, complaint: str, published: ModelDir) -> None:
    published.write("config.json", changed(CONFIG, path, value))
    assert complaint in published.refusal()


def test_refused_processors(published: ModelDir) -> None:
    for settings, complaint in (
        ({"any_res_min_frame_pixels": 300000}, "any_res_min_frame_pixels in preprocessor_config.json must be at most"),
        ({"merge_size": 4}, "merge_size in preprocessor_config.json must be 2"),
        ({"do_resize": False}, "do_resize false"),
    ):
        published.write("preprocessor_config.json", {**PROCESSOR, **settings})
        assert complaint in published.refusal()
