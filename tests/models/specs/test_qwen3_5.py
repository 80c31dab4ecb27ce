"""Qwen3.5's specs: published configs, what they leave out, refusals. Sizes and frames are Qwen3-VL's."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest

from hydra_engine.errors import CheckpointError, InvalidImage
from hydra_engine.models.qwen_vl.spec import Qwen3VlVisionSpec
from hydra_engine.models.specs.base import DeltaShape, VideoInfo
from tests.models.specs.model_dirs import Json, ModelDir, changed
from tests.models.specs.test_minicpmv import ODD_VALUES, leaves
from tests.models.specs.test_qwen3_vl import IMAGES, VIDEOS


def published(text: Json, vision: Json, *, tied: bool) -> Json:
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5",
        "text_config": {
            "attention_bias": False,
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "eos_token_id": 248044,
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_act": "silu",
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144,
            "mlp_only_layers": [],
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "tie_word_embeddings": tied,
            "vocab_size": 248320,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
            * (text["num_hidden_layers"] // 4),
            **text,
        },
        "tie_word_embeddings": tied,
        "video_token_id": 248057,
        "vision_config": {
            "deepstack_visual_indexes": [],
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "model_type": "qwen3_5",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **vision,
        },
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    }


MODELS: dict[str, Json] = {
    "2B": published(
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "num_hidden_layers": 24,
            "linear_num_value_heads": 16,
        },
        {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096},
        tied=True,
    ),
    "27B": published(
        {
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "num_hidden_layers": 64,
            "linear_num_value_heads": 48,
        },
        {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304},
        tied=False,
    ),
}


def model_dir(directory: Path, config: Json) -> ModelDir:
    files = {"preprocessor_config.json": IMAGES, "video_preprocessor_config.json": VIDEOS}
    return ModelDir(directory, {"config.json": config, **files})


def test_the_published_2b(tmp_path: Path) -> None:
    spec = model_dir(tmp_path, MODELS["2B"]).spec()
    language, vision = spec.language, spec.vision
    assert (spec.family, spec.dtype, spec.max_model_len) == ("qwen3_5", "bfloat16", 262144)
    assert (spec.image_token_id, spec.video_token_id, spec.eos_token_ids) == (248056, 248057, (248044,))
    assert (language.rope_sections, language.rope_axes[:3], language.rotary_dim) == ((11, 11, 10), (0, 1, 2), 64)
    assert language.layer_kinds == ("delta", "delta", "delta", "attention") * 6 and language.tie_embeddings
    assert language.delta == DeltaShape(16, 16, 128, 128, 4)
    assert isinstance(vision, Qwen3VlVisionSpec) and vision.num_planes == 1
    assert vision.plan_image(1920, 1080).num_tokens == 60 * 34
    minute = vision.plan_video(VideoInfo(1280, 720, 1800, 30.0))
    assert (len(minute.frames), len(minute.media.items), minute.media.num_tokens) == (120, 60, 60 * 190)


def test_what_configs_leave_out_is_what_transformers_assumes(tmp_path: Path) -> None:
    """The class's own config in transformers, stripped of every field that equals a default."""
    explicit = copy.deepcopy(MODELS["27B"])
    text, tower = explicit["text_config"], explicit["vision_config"]
    text |= {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 16, "linear_num_value_heads": 32}
    text |= {"num_hidden_layers": 32, "layer_types": text["layer_types"][:32], "eos_token_id": None}
    text |= {"max_position_embeddings": 32768, "rope_parameters": {**text["rope_parameters"], "rope_theta": 10000.0}}
    tower["out_hidden_size"] = 4096
    bare = {
        "architectures": explicit["architectures"],
        "text_config": {"dtype": "bfloat16"},
        "vision_config": {"out_hidden_size": 4096},
    }
    assert model_dir(tmp_path, bare).spec() == model_dir(tmp_path, explicit).spec()


REFUSED: dict[str, tuple[str, Any, str]] = {
    "text type": (
        "text_config.model_type",
        "qwen3_vl_text",
        "model_type in text_config of config.json must be",
    ),
    "text type of experts": (
        "text_config.model_type",
        "qwen3_5_moe_text",
        "must be qwen3_5_text, not 'qwen3_5_moe_text'",
    ),
    "experts": ("text_config.num_experts", 256, "must be absent: qwen3_5_text is a dense text model type, not '256'"),
    "width": ("vision_config.out_hidden_size", 99, "must be 2048, the decoder's hidden size"),
    "planes": ("vision_config.deepstack_visual_indexes", [5], "Qwen3.5 reads the tower's last layer, not '[5]'"),
    "gate": ("text_config.attn_output_gate", False, "attn_output_gate in text_config of config.json must be true"),
    "kinds": ("text_config.layer_types", ["sliding_attention"] * 24, "24 times linear_attention or full_attention"),
    "sections": ("text_config.rope_parameters.mrope_section", [24, 20, 20], "64 pairs, but a head turns 32"),
    "runs": ("text_config.rope_parameters.mrope_interleaved", False, "must be true for this text model type"),
    "share": ("text_config.rope_parameters.partial_rotary_factor", 0.5, "32 pairs, but a head turns 64"),
    "heads": ("vision_config.num_heads", 3, "multiple of 4 for each of its 3 heads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused_in_a_sentence(tmp_path: Path, case: str) -> None:
    path, value, words = REFUSED[case]
    assert words in model_dir(tmp_path, changed(MODELS["2B"], path, value)).refusal()


@pytest.mark.slow
def test_no_value_anywhere_leads_to_another_exception(tmp_path: Path) -> None:
    directory = model_dir(tmp_path, MODELS["2B"])
    for path, value in itertools.product(leaves(MODELS["2B"]), ODD_VALUES):
        directory.write("config.json", changed(MODELS["2B"], path, value))
        try:
            vision = directory.spec().vision
            if vision is not None:
                vision.plan_image(64, 64)
                vision.plan_video(VideoInfo(64, 64, 9, 2.0))
        except (CheckpointError, InvalidImage) as error:
            assert "\n" not in error.message, path
