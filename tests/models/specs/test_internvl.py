"""InternVL's spec: published configs, tiles against transformers over thousands of sizes, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import InternVLVisionConfig
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,
    get_all_supported_aspect_ratios,
    get_optimal_tiled_canvas,
)
from transformers.models.internvl.modeling_internvl import InternVLVisionModel

from hydra_engine.errors import InvalidImage, InvalidRequest
from hydra_engine.models.internvl.spec import InternVlVisionSpec, arrangements_of, best_arrangement
from hydra_engine.models.specs.base import VideoInfo
from tests.models.specs.model_dirs import Json, ModelDir, awkward_sizes, changed

# As InternVL3-8B-hf was published.
CONFIG: Json = {
    "architectures": ["InternVLForConditionalGeneration"],
    "downsample_ratio": 0.5,
    "image_seq_length": 256,
    "image_token_id": 151667,
    "model_type": "internvl",
    "projector_hidden_act": "gelu",
    "text_config": {
        "architectures": ["Qwen2ForCausalLM"],
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "max_window_layers": 70,
        "model_type": "qwen2",
        "moe_config": None,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151674,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "architectures": ["InternVisionModel"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "dropout": 0.0,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "hidden_size": 1024,
        "image_size": [448, 448],
        "initializer_factor": 0.1,
        "initializer_range": 1e-10,
        "intermediate_size": 4096,
        "layer_norm_eps": 1e-06,
        "layer_scale_init_value": 0.1,
        "model_type": "internvl_vision",
        "norm_type": "layer_norm",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": [14, 14],
        "projection_dropout": 0.0,
        "torch_dtype": "bfloat16",
        "use_absolute_position_embeddings": True,
        "use_mask_token": False,
        "use_mean_pooling": True,
        "use_qk_norm": False,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}
TOWER_6B: Json = {
    **CONFIG["vision_config"],
    "attention_bias": False,
    "hidden_size": 3200,
    "intermediate_size": 12800,
    "norm_type": "rms_norm",
    "num_attention_heads": 25,
    "num_hidden_layers": 45,
    "use_qk_norm": True,
}
IMAGES: Json = {
    "crop_to_patches": False,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_processor_type": "GotOcr2ImageProcessorFast",
    "image_std": [0.229, 0.224, 0.225],
    "max_patches": 12,
    "min_patches": 1,
    "processor_class": "InternVLProcessor",
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 448, "width": 448},
}
TOKENIZER: Json = {
    "context_image_token": "<IMG_CONTEXT>",
    "end_image_token": "</img>",
    "start_image_token": "<img>",
    "tokenizer_class": "Qwen2Tokenizer",
}
SIZES = awkward_sizes(448, 3000, seed=2)


@pytest.fixture
def published(tmp_path: Path) -> ModelDir:
    files = {"config.json": CONFIG, "preprocessor_config.json": IMAGES, "tokenizer_config.json": TOKENIZER}
    return ModelDir(tmp_path, files)


def vision(directory: ModelDir) -> InternVlVisionSpec:
    found = directory.spec().vision
    assert isinstance(found, InternVlVisionSpec)
    return found


def test_a_published_checkpoint(published: ModelDir) -> None:
    spec, tower = published.spec(), vision(published)
    assert (spec.family, spec.dtype, spec.max_model_len) == ("internvl", "bfloat16", 32768)
    assert (spec.image_token_id, spec.bos_token_id, spec.eos_token_ids) == (151667, 151643, (151645,))
    assert not spec.language.tie_embeddings and spec.language.attention_bias
    assert spec.language.num_parameters() + tower.num_parameters() == 7_944_373_760
    assert (tower.num_tokens, tower.max_tokens_per_item) == (256, 256)
    assert (tower.max_tokens_per_image, tower.max_patches_per_image) == (13 * 256, 13 * 1024)
    assert tower.flops(3 * 1024) == 3 * tower.flops(1024) > 1e12


def test_every_tile_is_a_span(published: ModelDir) -> None:
    plan = vision(published).plan_image(1344, 896)
    tiles, whole = plan.views
    assert (tiles.resize, tiles.canvas, tiles.tile, tiles.num_tiles) == ((1344, 896), (1344, 896), (448, 448), 6)
    assert (whole.resize, whole.num_tiles) == ((448, 448), 1)
    assert plan.parts[0] == "<img>" and plan.parts[-1] == "</img>" and len(plan.parts) == 9
    assert {(item.num_pictures, item.num_patches, item.num_tokens, item.grid) for item in plan.items} == {
        (1, 1024, 256, (1, 32, 32))
    }
    small = vision(published).plan_image(300, 300)
    assert (len(small.views), len(small.items), small.num_tokens) == (1, 1, 256)


@pytest.mark.quick("1-2]")
@pytest.mark.parametrize(("least", "most"), [(1, 12), (3, 7), (1, 2), (1, 1), (4, 4), (1, 40)])
def test_tiles_are_those_of_transformers(published: ModelDir, least: int, most: int) -> None:
    published.write("preprocessor_config.json", {**IMAGES, "min_patches": least, "max_patches": most})
    spec = vision(published)
    assert spec.arrangements == tuple(get_all_supported_aspect_ratios(least, most))
    theirs = GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, min_patches=least, max_patches=most)
    asked = {"crop_to_patches": True}
    for width, height in SIZES:
        plan = spec.plan_image(width, height)
        columns, rows = plan.views[0].canvas[0] // 448, plan.views[0].canvas[1] // 448
        if most > 1:
            assert (columns, rows) == get_optimal_tiled_canvas((height, width), (448, 448), least, most)
        assert len(plan.items) == theirs.get_number_of_image_patches(height, width, asked), f"{width} x {height}"
        assert plan.num_tokens <= spec.max_tokens_per_image and plan.num_patches <= spec.max_patches_per_image
        assert sum(view.num_tiles for view in plan.views) == len(plan.items)


def test_distances_are_compared_as_transformers_does() -> None:
    """The sizes above hold pictures between two arrangements, and pictures whose arrangement comes in several sizes."""
    found = arrangements_of(1, 12)
    chosen = {best_arrangement(width, height, 448, found) for width, height in SIZES}
    assert {(1, 1), (2, 2), (3, 3), (1, 2), (2, 4), (1, 12), (12, 1), (3, 4), (5, 2)} <= chosen
    assert best_arrangement(300, 200, 448, found) == (3, 2)
    assert best_arrangement(1, 2, 448, found) == (1, 2) != best_arrangement(1000, 2000, 448, found)


@pytest.mark.parametrize("tower", [CONFIG["vision_config"], TOWER_6B], ids=["300M", "6B"])
def test_towers_have_as_many_weights_as_in_transformers(published: ModelDir, tower: Json) -> None:
    published.write("config.json", {**CONFIG, "vision_config": tower})
    with torch.device("meta"):
        theirs = InternVLVisionModel(InternVLVisionConfig(**tower))
    assert vision(published).tower.num_parameters() == sum(p.numel() for p in theirs.parameters())


def test_what_files_leave_out(published: ModelDir) -> None:
    expected = vision(published)
    config = changed(CONFIG, "vision_config", {"attention_bias": True})
    for name in ("downsample_ratio", "image_token_id", "projector_hidden_act", "vision_feature_layer"):
        config = changed(config, name, ...)
    published.write("config.json", config)
    assert vision(published) == expected and published.spec().image_token_id == 151667
    published.write("config.json", changed(CONFIG, "vision_config.image_size", 448))
    assert vision(published) == expected
    published.write("preprocessor_config.json", {"size": IMAGES["size"]})
    assert vision(published).arrangements == expected.arrangements
    (published.path / "preprocessor_config.json").unlink()
    published.write("processor_config.json", {"image_processor": IMAGES})
    assert vision(published) == expected
    (published.path / "tokenizer_config.json").unlink()
    assert vision(published) == expected


def test_names_of_the_frame(published: ModelDir) -> None:
    named = {"start_image_token": "<begin>", "end_image_token": {"content": "<end>", "special": True}}
    published.write("tokenizer_config.json", {**TOKENIZER, **named})
    assert vision(published).frame == ("<begin>", "<end>")


@pytest.mark.parametrize(
    ("top", "nested", "tied"), [(None, None, False), (None, True, True), (False, True, False), (True, None, True)]
)
def test_who_says_that_embeddings_are_tied(published: ModelDir, top: Any, nested: Any, tied: bool) -> None:
    config = changed(changed(CONFIG, "tie_word_embeddings", top), "text_config.tie_word_embeddings", nested)
    published.write("config.json", config)
    assert published.spec().language.tie_embeddings is tied


@pytest.mark.parametrize(
    ("layer", "pooled", "expected"),
    [(-1, True, (24, False)), (-1, False, (24, True)), (24, False, (24, False)), (-2, False, (23, False))],
)
def test_the_layer_that_is_read(published: ModelDir, layer: int, pooled: bool, expected: tuple[int, bool]) -> None:
    config = changed(CONFIG, "vision_config.use_mean_pooling", pooled)
    published.write("config.json", {**config, "vision_feature_layer": layer})
    tower = vision(published).tower
    assert (tower.num_active_layers, tower.final_norm) == expected


def test_what_has_no_tiles(published: ModelDir) -> None:
    with pytest.raises(InvalidImage):
        vision(published).plan_image(0, 5)
    with pytest.raises(InvalidRequest, match="takes no videos"):
        vision(published).plan_video(VideoInfo(10, 10, 4, 1.0))


REFUSED: dict[str, tuple[str, Any, str]] = {
    "tower": ("vision_config.model_type", "siglip_vision_model", "supported is internvl_vision"),
    "heads": ("vision_config.num_attention_heads", 7, "not a multiple of its 7 heads"),
    "not square": ("vision_config.image_size", [448, 224], "image_size in vision_config of config.json must be"),
    "patches": ("vision_config.patch_size", [500, 500], "at least one patch"),
    "norm": ("vision_config.norm_type", "batch_norm", "norm_type in vision_config of config.json must be"),
    "no positions": ("vision_config.use_absolute_position_embeddings", False, "use_absolute_position_embeddings"),
    "class tokens": ("vision_feature_select_strategy", "full", "class tokens have no place in a grid"),
    "layer": ("vision_feature_layer", 25, "vision_feature_layer in config.json must be a layer of the tower's 24"),
    "layers": ("vision_feature_layer", [-1, -2], "vision_feature_layer in config.json must be a layer"),
    "ratio": ("downsample_ratio", 0.3, "downsample_ratio in config.json must be"),
    "ratio that does not divide": ("downsample_ratio", 1 / 3, "downsample_ratio in config.json must be"),
    "ratio above one": ("downsample_ratio", 5, "downsample_ratio in config.json must be"),
    "size": ("vision_config.image_size", 336, "makes tiles of 448 x 448 pixels, the tower takes 336 x 336"),
    "text": ("text_config.model_type", "internlm2", "'internlm2' is not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configs_that_cannot_be_served_are_refused(published: ModelDir, case: str) -> None:
    path, value, words = REFUSED[case]
    published.write("config.json", changed(CONFIG, path, value))
    assert words in published.refusal()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"min_patches": 13}, "max_patches in preprocessor_config.json must be from min_patches to"),
        ({"max_patches": 5000}, "max_patches in preprocessor_config.json must be from min_patches to"),
        ({"size": {"shortest_edge": 448}}, "has no field height"),
        ({"do_resize": False}, "do_resize false"),
    ],
)
def test_processors_that_cannot_be_followed_are_refused(published: ModelDir, change: Json, words: str) -> None:
    published.write("preprocessor_config.json", {**IMAGES, **change})
    assert words in published.refusal()
