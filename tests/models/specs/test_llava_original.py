"""LLaVA as liuhaotian published it: configs, canvases against its preprocessing, padding, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hydra_engine.errors import InvalidImage
from hydra_engine.models.llava.spec import LlavaVisionSpec
from hydra_engine.models.llava_next.spec import LlavaNextVisionSpec
from hydra_engine.preprocess.media.images import render
from tests.models.families.base import picture
from tests.models.specs.model_dirs import Json, ModelDir, awkward_sizes, changed

# As liuhaotian/llava-v1.5-7b was published, without what transformers writes into every config.
CONFIG: Json = {
    "architectures": ["LlavaLlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "image_aspect_ratio": "pad",
    "image_grid_pinpoints": None,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "mm_hidden_size": 1024,
    "mm_projector_type": "mlp2x_gelu",
    "mm_resampler_type": None,
    "mm_use_im_patch_token": False,
    "mm_use_im_start_end": False,
    "mm_vision_select_feature": "patch",
    "mm_vision_select_layer": -2,
    "mm_vision_tower": "openai/clip-vit-large-patch14-336",
    "model_type": "llava",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_mm_proj": True,
    "vocab_size": 32000,
}
# Of llava-v1.6-vicuna-7b, where it differs: widths before heights.
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
ANYRES: Json = {
    "image_aspect_ratio": "anyres",
    "image_grid_pinpoints": PINPOINTS,
    "mm_patch_merge_type": "spatial_unpad",
    "model_type": "llava_llama",
}


@pytest.fixture
def published(tmp_path: Path) -> ModelDir:
    return ModelDir(tmp_path, {"config.json": CONFIG})


def test_published_checkpoints(published: ModelDir) -> None:
    spec = published.spec()
    assert (spec.family, spec.dtype, spec.max_model_len, spec.image_token_id) == ("llava_llama", "float16", 4096, 32000)
    assert isinstance(spec.vision, LlavaVisionSpec) and spec.vision.num_tokens == 576
    assert (spec.vision.tower.num_active_layers, spec.vision.padding) == (23, (122, 116, 104))
    assert (spec.bos_token_id, spec.eos_token_ids, spec.tower) == (1, (2,), "openai/clip-vit-large-patch14-336")
    assert spec.language.num_parameters() == 6_738_415_616
    published.write("config.json", CONFIG | ANYRES)
    spec = published.spec()
    assert spec.family == "llava_llama_anyres" and isinstance(spec.vision, LlavaNextVisionSpec)
    assert spec.vision.max_tokens_per_image == 2928


def test_canvases_are_those_of_the_published_preprocessing(published: ModelDir) -> None:
    """The first of several that are as good counts; the list has widths before heights."""
    published.write("config.json", CONFIG | ANYRES)
    vision = published.spec().vision
    assert isinstance(vision, LlavaNextVisionSpec)
    for width, height in awkward_sizes(336, 2000, seed=4):
        plan = vision.plan_image(width, height)
        expected = select_best_resolution(width, height)
        if len(plan.views) > 1:
            assert plan.views[1].canvas[0] == expected[0], f"{width} x {height}"


def select_best_resolution(width: int, height: int) -> tuple[int, int]:
    """Width and height, written after the function of this name in haotian-liu/LLaVA, llava/mm_utils.py."""
    best, most, min_waste = (0, 0), 0, float("inf")
    for columns, rows in PINPOINTS:
        scale = min(columns / width, rows / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        waste = columns * rows - kept
        if kept > most or (kept == most and waste < min_waste):
            best, most, min_waste = (columns, rows), kept, waste
    return best


@pytest.mark.parametrize("size", [(50, 31), (31, 50), (40, 40), (1, 1), (1, 90)])
def test_pictures_are_padded_before_they_are_resized(published: ModelDir, size: tuple[int, int]) -> None:
    """The pixels of `expand2square` in haotian-liu/LLaVA, llava/mm_utils.py, then of Pillow's resize."""
    vision, image, side = published.spec().vision, picture(size), max(size)
    assert vision is not None
    square = Image.new("RGB", (side, side), (122, 116, 104))
    square.paste(image, ((side - size[0]) // 2, (side - size[1]) // 2))
    expected = np.asarray(square.resize((336, 336), Image.Resampling.BICUBIC))
    actual = np.frombuffer(render([image], vision.plan_image(*size).views, "bicubic"), np.uint8)
    assert np.array_equal(actual.reshape(expected.shape), expected)
    with pytest.raises(InvalidImage, match="cannot be padded to a square"):
        vision.plan_image(3, 9000)


def test_a_tower_that_is_described(published: ModelDir) -> None:
    published.write("config.json", changed(CONFIG, "mm_vision_tower", "/data/towers/my-clip/"))
    assert "'my-clip' is not known; put its config.json into a folder of that name" in published.refusal()
    (published.path / "my-clip").mkdir()
    tower = {"hidden_size": 96, "num_attention_heads": 4, "num_hidden_layers": 5, "image_size": 28, "patch_size": 14}
    for described in (tower, {"model_type": "clip", "vision_config": tower}):
        published.write("my-clip/config.json", described)
        vision = published.spec().vision
        assert isinstance(vision, LlavaVisionSpec)
        assert (vision.tower.hidden_size, vision.tower.num_active_layers, vision.num_tokens) == (96, 4, 4)


def test_where_the_picture_token_is(published: ModelDir) -> None:
    published.write("tokenizer.json", {"added_tokens": [{"content": "<s>", "id": 1}]})
    assert "tokenizer.json has no token <image>" in published.refusal()
    published.write("tokenizer.json", {"added_tokens": [{"content": "<image>", "id": 32003}]})
    assert published.spec().image_token_id == 32003


REFUSED: dict[str, tuple[str, Any, str]] = {
    "another decoder": (
        "architectures",
        ["LlavaQwenForCausalLM"],
        "'LlavaQwenForCausalLM' has no native implementation",
    ),
    "projector": ("mm_projector_type", "linear", "mm_projector_type in config.json must be mlp2x_gelu"),
    "resampler": ("mm_resampler_type", "perceiver", "mm_resampler_type in config.json must be null"),
    "marks": ("mm_use_im_start_end", True, "mm_use_im_start_end in config.json must be false"),
    "feature": ("mm_vision_select_feature", "all", 'must be "patch" or "cls_patch"'),
    "shape": ("image_aspect_ratio", "anyres_max_9", 'image_aspect_ratio in config.json must be "square", "pad" or'),
    "merge": ("image_aspect_ratio", "anyres", "mm_patch_merge_type 'flat' or class tokens beside anyres"),
    "unknown tower": ("mm_vision_tower", "google/siglip", "the vision tower 'siglip' is not known"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configs_that_cannot_be_served_are_refused(published: ModelDir, case: str) -> None:
    path, value, words = REFUSED[case]
    published.write("config.json", changed(CONFIG, path, value))
    assert words in published.refusal()
