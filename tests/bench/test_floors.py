"""The floors of the micro-benchmarks: bytes and FLOP of the three models of 7 billion against figures that were worked
out by hand from the published sizes, and the seconds that they come to at 790 TFLOP/s and 4.3 TB/s."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.micro import floors
from bench.micro.floors import Rates
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.models.specs.registry import load_spec

RATES = Rates(790e12, 4.3e12, 4.3e12)
SQUARE = (896, 896)
QWEN_TEXT: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llava": {
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": 32000,
        "text_config": {
            "model_type": "llama",
            "vocab_size": 32064,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 4096,
        },
        "vision_config": {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "image_size": 336,
            "patch_size": 14,
        },
    },
    "qwen2": {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        **QWEN_TEXT,
        "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16, "mlp_ratio": 4},
    },
    "qwen2.5": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        **QWEN_TEXT,
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "out_hidden_size": 3584,
            "num_heads": 16,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    },
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "llava": {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    "qwen2": {"min_pixels": 3136, "max_pixels": 12845056},
    "qwen2.5": {"min_pixels": 3136, "max_pixels": 12845056},
}


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSpec]:
    found = {}
    for name, config in CONFIGS.items():
        directory: Path = tmp_path_factory.mktemp(name)
        (directory / "config.json").write_text(json.dumps(config))
        (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[name]))
        found[name] = load_spec(directory)
    return found


@pytest.mark.parametrize(
    ("name", "layer_parameters", "step_bytes", "kv_bytes"),
    [("llava", 6.476e9, 13.21e9, 524_288), ("qwen2", 6.525e9, 14.14e9, 57_344), ("qwen2.5", 6.525e9, 14.14e9, 57_344)],
)
def test_sizes(
    specs: dict[str, ModelSpec], name: str, layer_parameters: float, step_bytes: float, kv_bytes: int
) -> None:
    language = specs[name].language
    assert language.num_layers * floors.layer_parameters(language) == pytest.approx(layer_parameters, rel=1e-3)
    assert language.kv_bytes_per_token(2) == kv_bytes
    weights = sum(part.read_bytes for part in floors.decode_work(language, 1, 0, 2))
    assert weights == pytest.approx(step_bytes, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "gflops", "tokens", "milliseconds"),
    [("llava", 390, 576, 0.494), ("qwen2", 8006, 1024, 10.13), ("qwen2.5", 5645, 1024, 7.15)],
)
def test_an_encode(specs: dict[str, ModelSpec], name: str, gflops: float, tokens: int, milliseconds: float) -> None:
    image = floors.image_work(specs[name], SQUARE, 2)
    assert image.work.flops / 1e9 == pytest.approx(gflops, abs=1) and image.tokens == tokens
    for count in (1, 8):
        seconds = floors.serial_s(floors.encode_work(image, count), RATES)
        assert seconds * 1e3 == pytest.approx(count * milliseconds, rel=2e-3)
    slow = floors.encode_work(image, 1)
    assert floors.serial_s(slow, RATES._replace(flops_per_s=1e30)) == pytest.approx(image.weight_bytes / 4.3e12)


@pytest.mark.parametrize(
    ("name", "milliseconds"),
    [
        ("llava", {256: 4.18, 676: 11.04, 1024: 16.81, 2048: 34.24}),
        ("qwen2", {256: 4.37, 1024: 16.89, 1124: 18.54, 2048: 34.06}),
    ],
)
def test_a_prefill(specs: dict[str, ModelSpec], name: str, milliseconds: dict[int, float]) -> None:
    for tokens, expected in milliseconds.items():
        seconds = floors.serial_s(floors.prefill_work(specs[name].language, 1, tokens, 2), RATES)
        assert seconds * 1e3 == pytest.approx(expected, rel=3e-3)


def test_behind_the_last_attention_a_prompt_is_one_row(specs: dict[str, ModelSpec]) -> None:
    """31 layers of 1024 tokens, then Q, K and V of them, then O and the MLP of one: 2.35 % less than 32 layers."""
    language = specs["llava"].language
    layers, *_ = floors.prefill_work(language, 1, 1024, 2)
    rest = 4096 * 4096 + 3 * 4096 * 11008
    by_hand = 31 * 2 * 1024 * (3 * 4096 * 4096 + rest) + 2 * 1024 * 3 * 4096 * 4096 + 2 * rest
    assert layers.flops == by_hand == pytest.approx(12.95e12, rel=1e-3)
    assert layers.read_bytes == 2 * 32 * floors.layer_parameters(language), "weights are read all the same"
    (one, *_), (two, *_) = (floors.prefill_work(language, rows, 1, 2) for rows in (1, 2))
    assert two.flops == 2 * one.flops == 4.0 * 32 * floors.layer_parameters(language), "one token is computed whole"


@pytest.mark.parametrize(
    ("name", "rows", "serial", "overlap"),
    [
        ("llava", 1, 3.20, 3.20),
        ("llava", 64, 11.06, 11.06),
        ("llava", 128, 19.05, 19.05),
        ("llava", 192, 27.2, 27.1),
        ("qwen2", 8, 3.40, 3.40),
        ("qwen2", 128, 5.04, 5.04),
        ("qwen2", 256, 8.08, 6.78),
        ("qwen2", 512, 16.2, 10.28),
    ],
)
def test_a_decode_step(specs: dict[str, ModelSpec], name: str, rows: int, serial: float, overlap: float) -> None:
    work = floors.decode_work(specs[name].language, rows, 1024, 2)
    assert floors.serial_s(work, RATES) * 1e3 == pytest.approx(serial, rel=3e-3)
    assert floors.overlap_s(work, RATES) * 1e3 == pytest.approx(overlap, rel=3e-3)


def test_cache_writes(specs: dict[str, ModelSpec]) -> None:
    llava, qwen = specs["llava"].language, specs["qwen2"].language
    for language, microseconds in ((llava, 7.8), (qwen, 0.98)):
        work = floors.rope_write_work(0, language.num_kv_heads, language.head_dim, 1024, 2)  # keys and values alone
        assert work.moved_bytes == 8 * language.num_kv_heads * language.head_dim * 1024
        assert floors.serial_s([work], RATES) * 1e6 == pytest.approx(microseconds, rel=1e-2)
    image = floors.image_write_work(4096, 576, 2)
    assert image.moved_bytes / 2 == pytest.approx(4.72e6, rel=1e-3)
    assert floors.serial_s([image], RATES) * 1e6 == pytest.approx(2.2, rel=1e-2)
    fused = floors.rope_write_work(llava.num_heads, llava.num_kv_heads, llava.head_dim, 1024, 2)
    assert fused.moved_bytes == 1.5 * floors.rope_write_work(0, llava.num_kv_heads, llava.head_dim, 1024, 2).moved_bytes


@pytest.mark.parametrize(
    ("name", "images", "rows", "gain"),
    [("llava", 8, 8, 1.90), ("llava", 16, 32, 1.77), ("qwen2", 1, 64, 1.26), ("qwen2.5", 1, 8, 1.45)],
)
def test_the_bound_of_a_pair(specs: dict[str, ModelSpec], name: str, images: int, rows: int, gain: float) -> None:
    spec = specs[name]
    encode = floors.encode_work(floors.image_work(spec, SQUARE, 2), images)
    both = [*encode, *floors.decode_work(spec.language, rows, 1024, 2)]
    assert floors.serial_s(both, RATES) / floors.overlap_s(both, RATES) == pytest.approx(gain, abs=0.01)


@pytest.mark.parametrize(
    ("first", "second", "gain"),
    [
        (floors.Work("a", 1.0, 0.0), floors.Work("b", 0.0, 1.0), 2.0),  # nothing in common
        (floors.Work("a", 1.0, 0.2), floors.Work("b", 0.2, 1.0), 2 / 1.2),
        (floors.Work("a", 4.0, 0.8), floors.Work("b", 0.2, 1.0), 2 / 1.2),  # of longer pieces there are fewer
        (floors.Work("a", 1.0, 0.2), floors.Work("b", 1.0, 0.5), 1.0),  # both are bound by arithmetic
    ],
)
def test_the_most_that_two_kinds_of_work_gain_beside_each_other(
    first: floors.Work, second: floors.Work, gain: float
) -> None:
    assert floors.best_gain([first], [second], Rates(1.0, 1.0, 1.0)) == pytest.approx(gain)
    assert floors.best_gain([second], [first], Rates(1.0, 1.0, 1.0)) == pytest.approx(gain)


def test_no_mix_gains_more_than_the_best(specs: dict[str, ModelSpec]) -> None:
    spec = specs["llava"]
    encode = floors.encode_work(floors.image_work(spec, SQUARE, 2), 4)
    decode = floors.decode_work(spec.language, 64, 1024, 2)
    best = floors.best_gain(encode, decode, RATES)
    mixes = []
    for share in range(1, 100):
        mix = [part.times(share) for part in encode] + [part.times(100 - share) for part in decode]
        alone = share * floors.serial_s(encode, RATES) + (100 - share) * floors.serial_s(decode, RATES)
        mixes.append(alone / floors.overlap_s(mix, RATES))
    assert max(mixes) <= best + 1e-9 and max(mixes) == pytest.approx(best, rel=0.02)


def test_the_share_of_a_gain() -> None:
    assert (
        floors.gain_share(10, 10, 6) == 0 and floors.gain_share(10, 6, 6) == 1 and floors.gain_share(10, 7, 6) == 0.75
    )
    assert floors.gain_share(10, 10, 10) is None
