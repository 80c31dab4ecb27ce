"""Specs of published models by way of transformers, in the numbers that the engine sizes its caches by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hydra_engine.errors import InvalidImage
from hydra_transformers.classes import load_config, model_class
from hydra_transformers.describe import _language, describe
from hydra_transformers.processor import PictureProcessor
from tools.miniatures import make_tiny

# As published, where most of what equals a class's defaults is left out.
GEMMA3_4B: Mapping[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
    },
}
SMOLVLM_2B: Mapping[str, Any] = {
    "architectures": ["SmolVLMForConditionalGeneration"],
    "image_token_id": 49190,
    "model_type": "smolvlm",
    "scale_factor": 3,
    "text_config": {
        "model_type": "llama",
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 8192,
        "num_attention_heads": 32,
        "num_hidden_layers": 24,
        "num_key_value_heads": 32,
        "rope_theta": 130000,
        "vocab_size": 49280,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vision_config": {
        "image_size": 384,
        "max_image_size": {"longest_edge": 384},
        "patch_size": 14,
        "num_hidden_layers": 27,
    },
}


@pytest.mark.parametrize(("said", "ends"), [(-1, ()), ([7, -1], (7,)), (7, (7,))])
def test_minus_one_is_no_token(said: Any, ends: tuple[int, ...], tmp_path: Path) -> None:
    make_tiny("llama", tmp_path, seed=3)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((tmp_path / name).read_text()) | {"pad_token_id": -1, "eos_token_id": said}
        (tmp_path / name).write_text(json.dumps(values))
    spec = describe(tmp_path, trust_remote_code=False)
    assert (spec.pad_token_id, spec.eos_token_ids) == (None, ends)


@pytest.mark.parametrize(
    ("published", "shape", "kv_bytes", "billions"),
    [
        (GEMMA3_4B, (34, 2560, 8, 4, 256, 262208, 131072), 34 * 2 * 4 * 256 * 2, 3.9),
        (SMOLVLM_2B, (24, 2048, 32, 32, 64, 49280, 8192), 24 * 2 * 32 * 64 * 2, 1.8),
    ],
    ids=["gemma-3-4b-it", "SmolVLM2-2.2B-Instruct"],
)
def test_published_configs_give_the_known_numbers(
    published: Mapping[str, Any], shape: tuple[int, ...], kv_bytes: int, billions: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published))
    config = load_config(tmp_path, trust_remote_code=False)
    assert model_class(config, tmp_path, trust_remote_code=False).__name__ == published["architectures"][0]
    language = _language(config.get_text_config(decoder=True), config, multimodal=False)
    names = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_position")
    assert tuple(getattr(language, name) for name in names) == shape
    assert language.kv_bytes_per_token(2) == kv_bytes
    assert language.num_parameters() / 1e9 == pytest.approx(billions, abs=0.1)


@pytest.mark.quick("size2", "size0")
@pytest.mark.parametrize(
    ("size", "tiles"), [((1536, 1152), 12), ((1024, 1024), 16), ((400, 300), 12), ((1, 1), 16), ((3000, 200), 4)]
)
def test_smolvlm_pictures_of_the_published_size(size: tuple[int, int], tiles: int, tmp_path: Path) -> None:
    """Tiles of 384 pixels with 81 tokens each, the whole picture behind them; marks and newlines in between."""
    make_tiny("smolvlm", tmp_path, seed=1)
    path = tmp_path / "processor_config.json"
    values = json.loads(path.read_text())
    images = values["image_processor"] | {"size": {"longest_edge": 1536}, "max_image_size": {"longest_edge": 384}}
    path.write_text(json.dumps(values | {"image_processor": images, "image_seq_len": 81}))
    inputs = ("pixel_values", "pixel_attention_mask")
    processor = PictureProcessor(
        tmp_path, "smolvlm", image_token_id=5, inputs=inputs, rope_index=None, trust_remote_code=False
    )
    found = processor.expand(Image.new("RGB", size, "teal"))
    assert found.token_ids.count(5) == 81 * (tiles + 1)
    assert found.arrays["pixel_values"].shape == (1, tiles + 1, 3, 384, 384)
    assert found.num_patches(14) == (tiles + 1) * 3 * 384**2 // (3 * 14**2)
    assert found.prefix == "<fake_token_around_image><row_1_col_1>" and found.suffix == "<fake_token_around_image>"
    assert found.token_ids[0] == found.token_ids[-1] == 5


def test_what_a_processor_raises_on_a_picture_is_told_of_the_picture(tmp_path: Path) -> None:
    make_tiny("smolvlm", tmp_path, seed=1)
    path = tmp_path / "processor_config.json"
    values = json.loads(path.read_text())
    path.write_text(
        json.dumps(values | {"image_processor": values["image_processor"] | {"size": {"shortest_edge": 9}}})
    )
    processor = PictureProcessor(
        tmp_path, "smolvlm", image_token_id=5, inputs=("pixel_values",), rope_index=None, trust_remote_code=False
    )
    with pytest.raises(InvalidImage, match="the model's processor cannot take a picture of 30 x 5 pixels"):
        processor.expand(Image.new("RGB", (30, 5)))
