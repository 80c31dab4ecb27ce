"""Text-only checkpoints of the decoder's kinds against transformers in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from hydra_engine.backend.base import Backend
from hydra_engine.backend.select import create_backend
from hydra_engine.models.layers.decoder import RotaryTable
from hydra_engine.models.specs.decoder import build_language
from hydra_engine.models.specs.fields import Fields
from hydra_engine.models.specs.registry import load_spec
from tests.models.conftest import BACKENDS, CheckpointFactory
from tests.models.driver import Driver
from tests.models.reference_hf import TransformersModel
from tests.support_table import record
from tools.miniatures import build_config

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"text": {"tie_word_embeddings": True, "num_key_value_heads": 1}}),
    "mistral": ("mistral", {"text": {"sliding_window": None}}),
    "mistral-window": ("mistral", {"text": {"sliding_window": 96}}),
    "llama-biases": ("llama", {"text": {"attention_bias": True}}),
    "qwen2": ("qwen2", {"text": {"tie_word_embeddings": True}}),
    "qwen3": ("qwen3", {"text": {"head_dim": 24}}),
    "qwen3-tied": ("qwen3", {"text": {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 4}}),
    "qwen3_moe": ("qwen3_moe", {"text": {"norm_topk_prob": True, "mlp_only_layers": [1]}}),
    "qwen3_moe-steps": ("qwen3_moe", {"text": {"num_hidden_layers": 4, "decoder_sparse_step": 2}}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {"text": {"num_hidden_layers": 4, "linear_value_head_dim": 64}}),
    "qwen3_5": (
        "qwen3_5_text",
        {
            "text": {
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 32,
                "num_hidden_layers": 4,
            }
        },
    ),
    "qwen3-yarn": (
        "qwen3",
        {"text": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}},
    ),
}


@pytest.fixture(autouse=True)
def row(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Records the test for the table of docs/models.md."""
    record(request.node.name, "text", record_property)


@pytest.mark.quick("native")
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_match(checkpoint: CheckpointFactory, backend: Backend, variant: str) -> None:
    family, overrides = VARIANTS[variant]
    directory = checkpoint(variant, family, **overrides)
    hf, driver = TransformersModel(directory), Driver(directory, backend)
    assert driver.spec.family == family and driver.spec.vision is None
    ids = [1, 90, 17, 201, 33, 33, 8, 150, 77]
    expected = hf.logits(ids)
    assert torch.allclose(driver.run(driver.request(ids), [4]), expected, rtol=0, atol=1e-4)
    generated = driver.generate(driver.request(ids), 64, [1, 1])
    # What is likeliest behind all that came before it is what transformers would generate.
    assert generated == hf.logits([*ids, *generated[:-1]])[len(ids) - 1 :].argmax(1).tolist()


@pytest.mark.quick("llama")
@pytest.mark.parametrize("variant", ["llama", "qwen3_5"])
def test_transformers_generates_the_same(checkpoint: CheckpointFactory, variant: str) -> None:
    """Step by step over its own cache, which is slow: one checkpoint with keys and values, one with states."""
    family, overrides = VARIANTS[variant]
    directory = checkpoint(variant, family, **overrides)
    driver = Driver(directory, create_backend("cpu", torch.float32, backend=BACKENDS[-1], threads=1))
    ids = [1, 90, 17, 201, 33]
    assert driver.generate(driver.request(ids), 16) == TransformersModel(directory).generate(ids, 16)


def test_a_sliding_window_bounds_the_context(checkpoint: CheckpointFactory, backend: Backend) -> None:
    """The model attends to everything up to the window's length, so a context may be as long as the window."""
    family, overrides = VARIANTS["mistral-window"]
    driver = Driver(checkpoint("mistral-window", family, **overrides), backend)
    assert driver.spec.max_model_len == 96
    ids = [1, *(6 + 7 * i % 200 for i in range(95))]
    expected = TransformersModel(checkpoint("mistral-window", family, **overrides)).logits(ids)
    assert torch.allclose(driver.run(driver.request(ids), [50]), expected, rtol=0, atol=1e-4)


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 2250},
    "yarn-tuned": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 3.0,
        "original_max_position_embeddings": 3000,
        "attention_factor": 0.9,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "original_max_position_embeddings": 225,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e5, "factor": 2.0},
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_tables_match_and_do_not_depend_on_how_they_grew(kind: str, tmp_path: Path) -> None:
    config = build_config(
        "llama", text={"rope_parameters": ROPES[kind], "head_dim": 64, "max_position_embeddings": 9000}
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    spec = load_spec(tmp_path).language
    positions = torch.tensor([0, 1, 17, 4095, 4096, 8191, 8999])
    at_once, slowly = RotaryTable(spec, torch.device("cpu")), RotaryTable(spec, torch.device("cpu"))
    for end in (1, 4096, 4097, 6000):
        slowly(torch.tensor([end - 1]), end)
    cos, sin = at_once(positions, 9000)
    assert all(torch.equal(a, b) for a, b in zip((cos, sin), slowly(positions, 9000), strict=True))
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    for ours, theirs in zip((cos, sin), rotary(torch.zeros(1), positions[None]), strict=True):
        assert torch.allclose(ours, theirs[0, :, :32], rtol=0, atol=2e-6 if kind != "llama3" else 1e-3)


MULTIMODAL: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2_vl": (qwen2_vl.Qwen2VLTextConfig, qwen2_vl.Qwen2VLRotaryEmbedding, {"mrope_section": [8, 12, 12]}),
    "qwen2_5_vl": (
        qwen2_5_vl.Qwen2_5_VLTextConfig,
        qwen2_5_vl.Qwen2_5_VLRotaryEmbedding,
        {"mrope_section": [4, 8, 20]},
    ),
    "qwen3_vl": (qwen3_vl.Qwen3VLTextConfig, qwen3_vl.Qwen3VLTextRotaryEmbedding, {"mrope_section": [12, 10, 10]}),
    "qwen3_vl-uneven": (
        qwen3_vl.Qwen3VLTextConfig,
        qwen3_vl.Qwen3VLTextRotaryEmbedding,
        {"mrope_section": [7, 14, 11]},
    ),
    "qwen3_vl-yarn": (
        qwen3_vl.Qwen3VLTextConfig,
        qwen3_vl.Qwen3VLTextRotaryEmbedding,
        {"mrope_section": [12, 10, 10], "mrope_interleaved": True, "rope_type": "yarn", "factor": 3.0},
    ),
    "qwen3_5": (
        qwen3_5.Qwen3_5TextConfig,
        qwen3_5.Qwen3_5TextRotaryEmbedding,
        {"mrope_section": [3, 2, 3], "partial_rotary_factor": 0.25},
    ),
}


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_multimodal_rotary_positions_match(kind: str) -> None:
    make_config, make_rotary, rope = MULTIMODAL[kind]
    parameters = {"rope_type": "default", "rope_theta": 1e5, **rope}
    config = make_config(
        hidden_size=128, num_attention_heads=2, head_dim=64, num_key_value_heads=2, rope_parameters=parameters
    )
    spec = build_language(Fields(config.to_dict(), "text_config"), tie_embeddings=False, nested=True, mrope=True)
    turning = (spec.rotary_dim or spec.head_dim) // 2
    positions = torch.randint(0, 9000, (3, 50), generator=torch.Generator().manual_seed(1))
    expected = make_rotary(config)(torch.zeros(1), positions[:, None])
    cos, sin = RotaryTable(spec, torch.device("cpu"))(positions, 9000)
    for ours, theirs in zip((cos, sin), expected, strict=True):
        assert torch.allclose(ours[:, :turning], theirs[0, :, :turning], rtol=0, atol=2e-6)
    assert (cos[:, turning:] == 1).all() and not sin[:, turning:].any()
