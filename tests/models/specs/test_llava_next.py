"""LLaVA-NeXT's spec: published configs, geometry against transformers over thousands of sizes, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlavaNextProcessor, PreTrainedTokenizerFast
from transformers.image_processing_utils import get_patch_output_size, select_best_resolution
from transformers.image_utils import ChannelDimension
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches, unpad_image

from hydra_engine.errors import InvalidImage, InvalidRequest
from hydra_engine.models.llava_next.spec import LlavaNextVisionSpec, best_resolution, size_within, unpadded
from hydra_engine.models.specs.base import VideoInfo
from tests.models.specs.model_dirs import Json, ModelDir, awkward_sizes, changed
from tools.miniatures import make_tiny

# As llava-v1.6-mistral-7b-hf was published.
CONFIG: Json = {
    "architectures": ["LlavaNextForConditionalGeneration"],
    "ignore_index": -100,
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    "image_token_index": 32000,
    "model_type": "llava_next",
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2",
        "architectures": ["MistralForCausalLM"],
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "vocab_size": 32064,
    },
    "torch_dtype": "float16",
    "use_image_newline_parameter": True,
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "vocab_size": 32064,
}
IMAGES: Json = {
    "aspect_ratio_setting": "anyres",
    "crop_size": {"height": 336, "width": 336},
    "do_center_crop": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_grid_pinpoints": CONFIG["image_grid_pinpoints"],
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "LlavaNextImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"shortest_edge": 336},
}
SIZES = awkward_sizes(336, 4000, seed=1)
# Canvases in an unusual order, with one square larger than it is useful, and one that is a single tile.
ODD = [[336, 336], [672, 1344], [1344, 672], [336, 1680], [2016, 336], [1008, 1008]]


@pytest.fixture
def published(tmp_path: Path) -> ModelDir:
    generation = {"bos_token_id": 1, "eos_token_id": 2}
    files = {"config.json": CONFIG, "preprocessor_config.json": IMAGES, "generation_config.json": generation}
    return ModelDir(tmp_path, files)


def vision(directory: ModelDir) -> LlavaNextVisionSpec:
    found = directory.spec().vision
    assert isinstance(found, LlavaNextVisionSpec)
    return found


def with_pinpoints(directory: ModelDir, pinpoints: list[list[int]]) -> LlavaNextVisionSpec:
    directory.write("config.json", {**CONFIG, "image_grid_pinpoints": pinpoints})
    directory.write("preprocessor_config.json", {**IMAGES, "image_grid_pinpoints": pinpoints})
    return vision(directory)


def test_a_published_checkpoint(published: ModelDir) -> None:
    spec, tower = published.spec(), vision(published)
    assert (spec.family, spec.dtype, spec.max_model_len, spec.image_token_id) == ("llava_next", "float16", 32768, 32000)
    assert (spec.language.num_kv_heads, spec.language.rope_theta, spec.eos_token_ids) == (8, 1e6, (2,))
    # 7,566,747,648 without the tower's last layer and the norm behind it, which nobody reads.
    layer = 12 * 1024**2 + 13 * 1024
    assert spec.language.num_parameters() + tower.num_parameters() == 7_566_747_648 - layer - 2 * 1024
    assert (tower.max_tokens_per_image, tower.max_tokens_per_item, tower.max_patches_per_image) == (2928, 24 * 73, 2880)
    assert tower.plan_image(1000, 1000).num_tokens == 576 + 48 * 49
    assert tower.plan_image(640, 480).num_tokens == 576 + 36 * 49
    square, *tiles = tower.plan_image(336, 1008).items
    assert (square.num_pictures, square.num_tokens, square.grid) == (1, 576, (0, 24, 24))
    assert [(item.num_pictures, item.num_patches, item.grid) for item in tiles] == [
        (1, 576, (number, 72, 24)) for number in (1, 2, 3)
    ]
    wide = tower.plan_image(1000, 1000).items
    assert [(item.num_pictures, item.num_tokens) for item in wide] == [(1, 576), (2, 24 * 49), (2, 24 * 49)]
    assert tower.flops(2 * 576) == 2 * tower.flops(576) > 2e11


def test_a_vicuna_checkpoint(published: ModelDir) -> None:
    text = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "vocab_size": 32064}
    published.write("config.json", {**CONFIG, "text_config": text})
    language = published.spec().language
    assert language.num_parameters() == 6_738_415_616 + 2 * 64 * 4096
    assert (language.num_kv_heads, language.rope_theta, published.spec().max_model_len) == (32, 10000.0, 4096)


def test_what_files_leave_out(published: ModelDir) -> None:
    expected = vision(published)
    published.write("config.json", changed(CONFIG, "image_grid_pinpoints", ...))
    published.write("preprocessor_config.json", changed(IMAGES, "image_grid_pinpoints", ...))
    assert vision(published) == expected
    (published.path / "preprocessor_config.json").unlink()
    published.write("processor_config.json", {"processor_class": "LlavaNextProcessor", "image_processor": IMAGES})
    assert vision(published) == expected


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tiny("llava_next", directory, seed=1)
    return PreTrainedTokenizerFast.from_pretrained(directory)


@pytest.mark.parametrize("pinpoints", [CONFIG["image_grid_pinpoints"], ODD], ids=["published", "odd"])
def test_geometry_is_that_of_transformers(published: ModelDir, tokenizer: Any, pinpoints: list[list[int]]) -> None:
    spec = with_pinpoints(published, pinpoints)
    theirs = LlavaNextProcessor(
        LlavaNextImageProcessorPil(image_grid_pinpoints=pinpoints),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    for width, height in SIZES:
        plan = spec.plan_image(width, height)
        (_, *rows), (square, *canvases) = plan.items, plan.views
        size = f"{width} x {height}"
        best = select_best_resolution((height, width), pinpoints)
        num_pictures = sum(item.num_pictures for item in plan.items)
        assert num_pictures == sum(view.num_tiles for view in plan.views) and square.num_tiles == 1
        assert plan.num_tokens == theirs._get_number_of_features(height, width, 336, 336) - 1, size
        assert all(0 < item.num_tokens <= spec.max_tokens_per_item for item in plan.items), size
        assert plan.num_tokens <= spec.max_tokens_per_image and plan.num_patches <= spec.max_patches_per_image
        assert len(canvases) == bool(rows), size
        for tiles in canvases:
            left_out = [number for number in range(1, best[0] // 336 + 1) if number not in {r.grid[0] for r in rows}]
            above = sum(number < rows[0].grid[0] for number in left_out) * 336
            assert tiles.canvas == (best[1], best[0] - len(left_out) * 336), size
            wanted = image_size_to_num_patches((height, width), pinpoints, 336)
            assert num_pictures == wanted - len(left_out) * best[1] // 336, size
            resized = get_patch_output_size(_Shape(height, width), best, ChannelDimension.FIRST)
            assert tiles.resize == resized[::-1], size
            assert tiles.corner == ((best[1] - resized[1]) // 2, (best[0] - resized[0]) // 2 - above), size


class _Shape:
    """A picture that has a size and no pixels."""

    def __init__(self, height: int, width: int) -> None:
        self.shape = (3, height, width)


def test_what_is_dropped_is_what_transformers_drops(published: ModelDir) -> None:
    spec = vision(published)
    for width, height in SIZES[:1500]:
        canvas = best_resolution(width, height, spec.resolutions)
        rows, columns = canvas[1] // 14, canvas[0] // 14
        grid = torch.arange(rows * columns).view(1, rows, columns)
        kept = unpadded(rows, columns, width, height)
        ours = grid[:, kept.top : kept.top + kept.rows, kept.left : kept.left + kept.columns]
        assert torch.equal(ours, unpad_image(grid, (height, width))), f"{width} x {height}"


def test_rows_of_tiles_that_are_all_border_are_not_encoded(published: ModelDir) -> None:
    """Transformers encodes them and drops what comes out; the pixels of the others stay what they were."""
    spec = with_pinpoints(published, [[1680, 1680]])
    square, *rows = (plan := spec.plan_image(1000, 100)).items
    assert [(item.grid[0], item.num_tokens) for item in rows] == [(3, 12 * 121)]
    whole, tiles = plan.views
    assert (tiles.resize, tiles.canvas, tiles.corner) == ((1680, 168), (1680, 336), (0, 756 - 2 * 336))
    assert spec.plan_image(10000, 1).views == (whole,) and spec.plan_image(10000, 1).items == (square,)


def test_rounding_follows_double_precision() -> None:
    """The tests above have sizes where exact arithmetic would say something else."""
    assert sum(size_within(*size, (672, 672)) != _exact_size(*size) for size in SIZES) > 3


def _exact_size(width: int, height: int) -> tuple[int, int]:
    if width > height:
        return 672, -(-height * 672 // width)
    return -(-width * 672 // height), 672


def test_a_thin_picture_may_have_nothing_but_newlines(published: ModelDir) -> None:
    _, newlines = vision(published).plan_image(1, 10000).items
    assert newlines.num_tokens == 24
    with pytest.raises(InvalidImage):
        vision(published).plan_image(0, 5)
    with pytest.raises(InvalidRequest, match="takes no videos"):
        vision(published).plan_video(VideoInfo(10, 10, 4, 1.0))


REFUSED: dict[str, tuple[str, Any, str]] = {
    "class tokens": ("vision_feature_select_strategy", "full", "class tokens have no place in a grid"),
    "no list": ("image_grid_pinpoints", 336, "image_grid_pinpoints in config.json must be a list"),
    "empty": ("image_grid_pinpoints", [], "image_grid_pinpoints in config.json must be a list"),
    "not a pair": ("image_grid_pinpoints", [[336]], "must be pairs of multiples of the tower's 336"),
    "not a multiple": ("image_grid_pinpoints", [[336, 500]], "must be pairs of multiples of the tower's 336"),
    "too large": ("image_grid_pinpoints", [[336, 336 * 300]], "must be pairs of multiples"),
    "others than the processor's": ("image_grid_pinpoints", [[672, 672]], "preprocessor_config.json differ"),
    "tower": ("vision_config.model_type", "siglip_vision_model", "supported is clip_vision_model"),
    "no text": ("text_config", ..., "has no field text_config"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configs_that_cannot_be_served_are_refused(published: ModelDir, case: str) -> None:
    path, value, words = REFUSED[case]
    published.write("config.json", changed(CONFIG, path, value))
    assert words in published.refusal()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"crop_size": {"height": 224, "width": 224}}, "must be 336, as the tower's image_size"),
        ({"size": {"shortest_edge": 400}}, "must be 336, as the tower's image_size"),
        ({"do_center_crop": False}, "do_center_crop false"),
        ({"do_resize": False}, "do_resize false"),
        ({"resample": 7}, "resample"),
    ],
)
def test_processors_that_cannot_be_followed_are_refused(published: ModelDir, change: Json, words: str) -> None:
    published.write("preprocessor_config.json", {**IMAGES, **change})
    assert words in published.refusal()
    (published.path / "preprocessor_config.json").unlink()
    assert "neither processor_config.json nor preprocessor_config.json" in published.refusal()
