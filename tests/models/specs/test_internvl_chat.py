"""OpenGVLab's own layout of InternVL: published configs, tiles against its preprocessing over thousands of sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hydra_engine.backend.select import create_backend
from hydra_engine.core.instances import EPD
from hydra_engine.models.build import build_model
from hydra_engine.models.internvl.model import InternVlChatVision, InternVlVision
from hydra_engine.models.internvl.spec import InternVlVisionSpec
from hydra_engine.models.loading.parameters import Demands, Scope
from hydra_engine.models.loading.safetensors_checkpoint import canonical_name
from tests.models.specs.model_dirs import Json, ModelDir, awkward_sizes, changed

# As InternVL2-8B was published, without what transformers writes into every config.
CONFIG: Json = {
    "architectures": ["InternVLChatModel"],
    "auto_map": {"AutoModel": "modeling_internvl_chat.InternVLChatModel"},
    "downsample_ratio": 0.5,
    "dynamic_image_size": True,
    "force_image_size": 448,
    "llm_config": {
        "architectures": ["InternLM2ForCausalLM"],
        "attn_implementation": "flash_attention_2",
        "bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "internlm2",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pad_token_id": 2,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 2.0, "type": "dynamic"},
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 92553,
    },
    "max_dynamic_patch": 12,
    "min_dynamic_patch": 1,
    "model_type": "internvl_chat",
    "ps_version": "v2",
    "select_layer": -1,
    "template": "internlm2-chat",
    "torch_dtype": "bfloat16",
    "use_backbone_lora": 0,
    "use_llm_lora": 0,
    "use_thumbnail": True,
    "vision_config": {
        "architectures": ["InternVisionModel"],
        "hidden_act": "gelu",
        "hidden_size": 1024,
        "image_size": 448,
        "intermediate_size": 4096,
        "layer_norm_eps": 1e-06,
        "model_type": "intern_vit_6b",
        "norm_type": "layer_norm",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "qk_normalization": False,
        "qkv_bias": True,
        "use_flash_attn": True,
    },
}
# Of InternVL2-26B, where it differs.
LARGER: Json = {
    "llm_config": {"hidden_size": 6144, "intermediate_size": 16384, "num_attention_heads": 48, "num_hidden_layers": 48},
    "vision_config": {
        "hidden_size": 3200,
        "intermediate_size": 12800,
        "norm_type": "rms_norm",
        "num_attention_heads": 25,
        "num_hidden_layers": 45,
        "qk_normalization": True,
        "qkv_bias": False,
    },
}
TOKENIZER: Json = {
    "added_tokens_decoder": {
        "92542": {"content": "<|im_end|>", "special": True},
        "92543": {"content": "<|im_start|>", "special": True},
        "92546": {"content": "<IMG_CONTEXT>", "special": True},
    },
    "auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]},
    "tokenizer_class": "InternLM2Tokenizer",
}
SIZES = awkward_sizes(448, 3000, seed=3)


@pytest.fixture
def published(tmp_path: Path) -> ModelDir:
    return ModelDir(tmp_path, {"config.json": CONFIG, "tokenizer_config.json": TOKENIZER})


def vision(directory: ModelDir) -> InternVlVisionSpec:
    found = directory.spec().vision
    assert isinstance(found, InternVlVisionSpec)
    return found


def test_published_checkpoints(published: ModelDir) -> None:
    """The numbers of weights are those that the hub states: 8.08 and 25.5 billion."""
    spec, tower = published.spec(), vision(published)
    assert (spec.family, spec.dtype, spec.max_model_len) == ("internvl_chat", "bfloat16", 32768)
    assert (spec.image_token_id, spec.bos_token_id, spec.eos_token_ids) == (92546, 1, (2, 92542))
    assert spec.language.num_parameters() + tower.num_parameters() == 8_075_365_376
    assert (tower.num_tokens, tower.max_tokens_per_image, tower.frame) == (256, 13 * 256, ("<img>", "</img>"))
    published.write("config.json", CONFIG | {name: CONFIG[name] | part for name, part in LARGER.items()})
    spec, tower = published.spec(), vision(published)
    assert spec.language.num_parameters() + tower.num_parameters() == 25_514_186_112
    ops = create_backend("cpu", torch.float32, backend="reference", threads=1).ops
    slots = build_model(spec, ops, torch.bfloat16, EPD).slots
    shapes = {
        "vision_model.encoder.layers.44.attn.q_norm.weight": (3200,),
        "vision_model.encoder.layers.0.attn.qkv.weight": (9600, 3200),
        "vision_model.encoder.layers.0.ls2": (3200,),
        "vision_model.embeddings.position_embedding": (1, 1025, 3200),
        "mlp1.0.bias": (12800,),
        "mlp1.3.weight": (6144, 6144),
        "language_model.model.tok_embeddings.weight": (92553, 6144),
        "language_model.output.weight": (92553, 6144),
        "language_model.model.layers.47.attention.wqkv.weight": (8192, 6144),
        "language_model.model.layers.0.attention.wo.weight": (6144, 6144),
        "language_model.model.layers.0.feed_forward.w2.weight": (6144, 16384),
        "language_model.model.layers.0.ffn_norm.weight": (6144,),
    }
    assert {name: slots[canonical_name(name, InternVlChatVision.renames)].shape for name in shapes} == shapes


@pytest.mark.parametrize(("least", "most", "thumbnail"), [(1, 12, True), (2, 6, False)])
def test_tiles_are_those_of_the_published_preprocessing(
    published: ModelDir, least: int, most: int, thumbnail: bool
) -> None:
    settings = {"min_dynamic_patch": least, "max_dynamic_patch": most, "use_thumbnail": thumbnail}
    published.write("config.json", CONFIG | settings)
    spec = vision(published)
    for width, height in SIZES:
        plan = spec.plan_image(width, height)
        columns, rows = plan.views[0].canvas[0] // 448, plan.views[0].canvas[1] // 448
        assert (columns, rows) == dynamic_preprocess(width, height, least, most, 448), f"{width} x {height}"
        assert len(plan.items) == columns * rows + (thumbnail and columns * rows > 1) <= spec.max_tokens_per_image / 256


def dynamic_preprocess(width: int, height: int, least: int, most: int, side: int) -> tuple[int, int]:
    """Columns and rows, written after `dynamic_preprocess` of OpenGVLab/InternVL, internvl/train/dataset.py, with the
    order in which a set of Python lists its members."""
    pairs = {
        (i, j)
        for n in range(least, most + 1)
        for i in range(1, n + 1)
        for j in range(1, n + 1)
        if least <= i * j <= most
    }
    best, best_difference = (1, 1), float("inf")
    for columns, rows in sorted(pairs, key=lambda pair: pair[0] * pair[1]):
        difference = abs(width / height - columns / rows)
        large = width * height > 0.5 * side * side * columns * rows
        if difference < best_difference or (difference == best_difference and large):
            best, best_difference = (columns, rows), difference
    return best


def test_one_tile_without_dynamic_sizes(published: ModelDir) -> None:
    published.write("config.json", changed(CONFIG, "dynamic_image_size", False))
    assert len(vision(published).plan_image(2000, 700).items) == 1


def test_the_first_pixel_shuffle_turns_a_tile(published: ModelDir) -> None:
    """Version v1 leaves rows and columns of tokens exchanged; see `pixel_shuffle` of modeling_internvl_chat.py."""
    ops = create_backend("cpu", torch.float32, backend="reference", threads=1).ops

    def merged(version: str) -> torch.Tensor:
        published.write("config.json", changed(CONFIG, "ps_version", version))
        tower = InternVlVision(Scope(ops, torch.float32, torch.device("cpu"), Demands()), vision(published))
        return tower._merged(states).view(2, 16, 16, -1)

    states = torch.randn(2, 1024, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(merged("v1"), merged("v2").transpose(1, 2))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("added_tokens.json", {"<IMG_CONTEXT>": 151648, "<|im_end|>": 151645}),
        ("tokenizer.json", {"added_tokens": [{"content": "<IMG_CONTEXT>", "id": 151648}]}),
    ],
)
def test_where_the_picture_token_is_named(published: ModelDir, name: str, content: Json) -> None:
    published.write("tokenizer_config.json", {})
    assert "no token <IMG_CONTEXT>" in published.refusal()
    published.write(name, content)
    assert published.spec().image_token_id == 151648


REFUSED: dict[str, tuple[str, Any, str]] = {
    "decoder": (
        "llm_config.model_type",
        "phi3",
        "must be one of internlm2, llama, qwen2, qwen3, qwen3_moe, not 'phi3'",
    ),
    "tower": ("vision_config.model_type", "siglip_vision_model", "supported is intern_vit_6b"),
    "size": ("force_image_size", 224, "force_image_size in config.json must be 448"),
    "norm": ("vision_config.norm_type", "batch_norm", "norm_type in vision_config of config.json must be"),
    "shuffle": ("ps_version", "v3", 'must be "v1" or "v2"'),
    "layer": ("select_layer", 25, "select_layer in config.json must be a layer of the tower's 24"),
    "tiles": ("max_dynamic_patch", 5000, "max_dynamic_patch in config.json must be from min_dynamic_patch to"),
    "ratio": ("downsample_ratio", 0.3, "downsample_ratio in config.json must be"),
    "eps": (
        "vision_config",
        CONFIG["vision_config"] | {"qk_normalization": True, "layer_norm_eps": 1e-5},
        "must be 1e-06",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configs_that_cannot_be_served_are_refused(published: ModelDir, case: str) -> None:
    path, value, words = REFUSED[case]
    published.write("config.json", changed(CONFIG, path, value))
    assert words in published.refusal()
