"""MiniCPM-V 2.6's spec: slices, pixels and marks against the published processor, published files, refusals."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hydra_engine.errors import CheckpointError, InvalidRequest
from hydra_engine.models.layers.vision import normalise_pixels
from hydra_engine.models.minicpmv.model import nearest_positions
from hydra_engine.models.minicpmv.resampler_model import fractional_positions
from hydra_engine.models.minicpmv.resampler_spec import ResampledVisionSpec
from hydra_engine.models.minicpmv.slicing_spec import Slicing
from hydra_engine.models.specs.base import VideoInfo
from hydra_engine.preprocess.media.images import render
from tests.models.families.minicpmv2_6 import Processor, positions
from tests.models.specs.model_dirs import Json, ModelDir, awkward_sizes, changed
from tests.models.specs.test_minicpmv import ODD_VALUES, leaves, taken
from tools.miniatures.minicpmv2_6 import PublishedConfig, PublishedModel

# openbmb/MiniCPM-V-2_6 as published.
CONFIG: Json = {
    "architectures": ["MiniCPMV"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_minicpm.MiniCPMVConfig"},
    "batch_vision_input": True,
    "bos_token_id": 151643,
    "drop_vision_last_layer": False,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "image_size": 448,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "minicpmv",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "patch_size": 14,
    "query_num": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "slice_config": {"max_slice_nums": 9, "model_type": "minicpmv", "patch_size": 14},
    "slice_mode": True,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_image_id": True,
    "use_sliding_window": False,
    "version": 2.6,
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 980,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
    },
    "vocab_size": 151666,
}
IMAGES: Json = {
    "auto_map": {"AutoImageProcessor": "image_processing_minicpmv.MiniCPMVImageProcessor"},
    "im_end": "</image>",
    "im_id_end": "</image_id>",
    "im_id_start": "<image_id>",
    "im_start": "<image>",
    "image_feature_size": 64,
    "image_processor_type": "MiniCPMVImageProcessor",
    "max_slice_nums": 9,
    "norm_mean": [0.5, 0.5, 0.5],
    "norm_std": [0.5, 0.5, 0.5],
    "patch_size": 14,
    "processor_class": "MiniCPMVProcessor",
    "scale_resolution": 448,
    "slice_end": "</slice>",
    "slice_mode": True,
    "slice_start": "<slice>",
    "unk": "<unk>",
    "use_image_id": True,
    "version": 2.6,
}
TOKENS = [
    {"content": "<unk>", "id": 128244},
    {"content": "<|endoftext|>", "id": 151643},
    {"content": "<|im_end|>", "id": 151645},
    {"content": "<image>", "id": 151646},
]
FILES: Json = {
    "config.json": CONFIG,
    "preprocessor_config.json": IMAGES,
    "tokenizer.json": {"added_tokens": TOKENS},
}
PUBLISHED = Processor(9, 448, 14, 64, use_image_id=True)


@pytest.fixture
def published(tmp_path: Path) -> ModelDir:
    return ModelDir(tmp_path, FILES)


def vision(directory: ModelDir) -> ResampledVisionSpec:
    found = directory.spec().vision
    assert isinstance(found, ResampledVisionSpec)
    return found


def test_a_published_checkpoint(published: ModelDir) -> None:
    spec, tower = published.spec(), vision(published)
    assert (spec.family, spec.dtype, spec.max_model_len) == ("minicpmv", "bfloat16", 32768)
    assert (spec.image_token_id, spec.video_token_id, spec.eos_token_ids) == (128244, None, (151645, 151643))
    assert spec.language.attention_bias and not spec.language.qk_norm and spec.language.rope_theta == 1e6
    assert (tower.num_queries, tower.num_heads, tower.num_positions, tower.feature_size) == (64, 28, 70, 3584)
    assert tower.images == Slicing(448, 14, 9) and tower.tower.num_layers == 27
    plan = tower.plan_image(1344, 1344)
    assert len(plan.items) == 10 and plan.num_tokens == 640 and plan.items[0].grid == (1, 32, 32)
    assert tower.max_tokens_per_image == 640 and tower.plan_image(1, 1).num_tokens == 64


def test_parameters_are_those_of_the_model(published: ModelDir) -> None:
    with torch.device("meta"):
        model = PublishedModel(PublishedConfig(**CONFIG))
    parts = [*model.vpm.parameters(), *model.resampler.parameters()]
    assert vision(published).num_parameters() == sum(tensor.numel() for tensor in parts)
    assert published.spec().language.num_parameters() == sum(tensor.numel() for tensor in model.llm.parameters())


def test_the_cost_of_a_picture_is_what_its_matrices_multiply(published: ModelDir) -> None:
    c, f, rows, width = 1152, 4304, 1024, 3584
    layers = 27 * (rows * (4 * c * c + 2 * c * f) + 2 * rows * rows * c)
    resampler = rows * (c * width + 2 * width * width) + 64 * (3 * width * width + 2 * rows * width)
    tower = vision(published)
    assert tower.flops(rows) == 2 * (rows * 3 * 14 * 14 * c + layers + resampler)
    assert tower.flops(10 * rows) == 10 * tower.flops(rows)


def test_slices_and_marks_are_the_published_processors(published: ModelDir) -> None:
    rng = random.Random(3)
    for _ in range(4):
        patch = rng.choice((4, 14))
        theirs = Processor(rng.choice((2, 4, 9, 20)), patch * rng.randint(10, 40), patch, 7, use_image_id=True)
        names = ("max_slice_nums", "scale_resolution", "patch_size", "image_feature_size", "use_image_id")
        published.write("preprocessor_config.json", {**IMAGES, **dict(zip(names, theirs, strict=True))})
        tower = {**CONFIG["vision_config"], "patch_size": patch}
        published.write("config.json", {**CONFIG, "query_num": 7, "vision_config": tower})
        ours, seen = vision(published), set()
        for size in taken(awkward_sizes(theirs.scale, 700, seed=theirs.scale)):
            plan, grid = ours.plan_image(*size), theirs.grid(size)
            text = "".join(part if isinstance(part, str) else "<unk>" * 7 for part in plan.numbered_parts(5))
            assert text == theirs.text(size, 5), size
            assert (plan.items[0].width, plan.items[0].height) == theirs.best_size(size, upscales=grid is None), size
            assert max(max(item.grid) for item in plan.items) <= ours.images.max_side, size
            assert max(item.num_patches for item in plan.items) <= ours.max_slice_patches, size
            seen.add(grid)
        assert len(seen) > theirs.max_slices // 2


def test_pixels_are_the_published_processors(published: ModelDir) -> None:
    theirs = Processor(5, 60, 14, 64, use_image_id=True)
    published.write("preprocessor_config.json", {**IMAGES, "max_slice_nums": 5, "scale_resolution": 60})
    ours, rng = vision(published), np.random.default_rng(5)
    for _ in range(60):
        width, height = (int(2 ** rng.uniform(0, 7.5)) for _ in range(2))
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        plan = ours.plan_image(width, height)
        data = np.frombuffer(render([image], plan.views, ours.preprocess.resample), np.uint8)
        for item, expected in zip(plan.items, theirs.slices(image), strict=True):
            pixels, data = np.split(data, [item.width * item.height * 3])
            own = normalise_pixels(torch.tensor(pixels).view(item.height, item.width, 3), ours.preprocess)
            assert torch.equal(own.permute(2, 0, 1), theirs.pixels(expected)), image.size
        assert data.size == 0


def test_positions_of_patches_are_the_published_ones() -> None:
    """Ties between two positions are decided by the last bit of float32."""
    lengths = range(1, 460)
    assert all(np.array_equal(fractional_positions(n, 70), positions(n, 70).numpy()) for n in lengths)
    assert any(not torch.equal(nearest_positions(n, 70), positions(n, 70)) for n in lengths), "as divisions do not"


def test_pictures_without_numbers_and_with_other_marks(published: ModelDir) -> None:
    others = {"im_start": "<a>", "im_end": "</a>", "slice_start": "<b>", "slice_end": "</b>", "unk": "<image>"}
    published.write("preprocessor_config.json", {**IMAGES, **others, "use_image_id": False})
    plan = vision(published).plan_image(900, 400)
    texts = [part for part in plan.numbered_parts(0) if isinstance(part, str)]
    assert texts == ["<a>", "</a><b>", "</b><b>", "</b>"] and published.spec().image_token_id == 151646


def test_videos_are_refused(published: ModelDir) -> None:
    with pytest.raises(InvalidRequest, match="takes no videos; send pictures"):
        vision(published).plan_video(VideoInfo(9, 9, 5, 1.0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("version", 2.5), "config.json has version '2.5', which is another architecture; supported are MiniCPM-V 2.6"),
        (("version", 4.5), "version '4.5'"),
        (("version", ...), "no version, as MiniCPM-V 2.0 and 2.5 have"),
        (("hidden_size", 3600), "hidden_size in config.json must be a multiple of 128"),
        (("query_num", 96), "image_feature_size in preprocessor_config.json must be query_num of config.json, 96"),
        (("vision_config.model_type", "clip"), "vision model type 'clip' is not supported"),
        (("vision_config.patch_size", 16), "must be the vision tower's, 16"),
        (("vision_config", ...), "config.json has no field vision_config"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_sentence(
    published: ModelDir, change: tuple[str, object], words: str
) -> None:
    published.write("config.json", changed(CONFIG, *change))
    assert words in published.refusal()


def test_minicpm_o_is_refused_by_name(published: ModelDir) -> None:
    published.write("config.json", changed(CONFIG, "architectures", ["MiniCPMO"]))
    with pytest.raises(CheckpointError, match="architecture 'MiniCPMO' has no native implementation"):
        published.spec()


def test_processors_and_tokenizers_that_cannot_be_followed_are_refused(published: ModelDir) -> None:
    published.write("tokenizer.json", {"added_tokens": TOKENS[1:]})
    assert published.refusal() == "tokenizer.json has no added token '<unk>', which stands for pictures in prompts"
    published.write("preprocessor_config.json", {**IMAGES, "slice_mode": False})
    assert "slice_mode in preprocessor_config.json must be true" in published.refusal()
    (published.path / "preprocessor_config.json").unlink()
    assert "neither processor_config.json nor preprocessor_config.json" in published.refusal()


def test_a_dropped_layer_is_not_in_the_checkpoint(published: ModelDir) -> None:
    published.write("config.json", changed(CONFIG, "drop_vision_last_layer", ...))
    assert vision(published).tower.num_layers == 26


@pytest.mark.quick("tokenizer")
@pytest.mark.parametrize("file", FILES)
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
