"""Published models by their sizes: what their JSON files say, how large they are, and that they run without weights.

Weights of the true widths are drawn for one layer, all layers with small widths; nobody here has memory for both.
"""

from __future__ import annotations

import gc
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bench.peers.convert import gguf
from hydra_engine import Engine
from hydra_engine.backend.base import PagedCache
from hydra_engine.backend.select import create_backend
from hydra_engine.config import SHAPES, EngineConfig
from hydra_engine.core.instances import Role
from hydra_engine.errors import CheckpointError, ResourceError
from hydra_engine.models.build import build_model
from hydra_engine.models.layers.decoder import LanguageInput
from hydra_engine.models.layers.vision import VisionInput
from hydra_engine.models.loading.random_weights import fill_random
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.preprocess.text.tokenizer import load_tokenizer
from tools.miniatures.shape import make_shape_checkpoint

SPECIAL = {  # ids as the published tokenizers have them
    "llava-1.5-7b": {"<s>": 1, "</s>": 2, "<image>": 32000, "<pad>": 32001},
    "qwen2-vl-7b": {"<|im_start|>": 151644, "<|im_end|>": 151645, "<|vision_start|>": 151652, "<|image_pad|>": 151655},
    "qwen2.5-vl-3b": {"<|endoftext|>": 151643, "<|image_pad|>": 151655, "</tool_call>": 151658},
    "qwen2.5-vl-7b": {"<|endoftext|>": 151643, "<|video_pad|>": 151656, "<tool_call>": 151657, "<|file_sep|>": 151664},
    "qwen3-vl-2b": {"<|im_end|>": 151645, "<|video_pad|>": 151656, "<think>": 151667, "</think>": 151668},
    "qwen3.5-0.8b": {"<|endoftext|>": 248044, "<|im_end|>": 248046, "<|image_pad|>": 248056, "</think>": 248069},
    "qwen3-vl-30b-a3b": {"<|im_end|>": 151645, "<|vision_end|>": 151653, "<|image_pad|>": 151655},
    "qwen3.5-35b-a3b": {"<|vision_start|>": 248053, "<|video_pad|>": 248057},
}
# Of the tower's last layer and the norm behind it, which nobody reads and we do not hold.
UNREAD = ("vision_tower.encoder.layers.23.", "vision_tower.post_layernorm.")


def folder(name: str) -> Path:
    return EngineConfig(model=name).model_path


def spec_of(name: str) -> ModelSpec:
    return load_spec(folder(name))


def test_the_names_are_those_of_the_folders() -> None:
    assert {path.name for path in folder(SHAPES[0]).parent.iterdir()} == set(SHAPES)
    assert EngineConfig(model=SHAPES[0]).model_name == SHAPES[0]


@pytest.mark.quick("llava", "qwen2", "2b", "0.8b")
@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_transformers_to_the_last_one(name: str) -> None:
    config = transformers.AutoConfig.from_pretrained(folder(name))
    with torch.device("meta"):
        theirs = transformers.AutoModelForImageTextToText.from_config(config)
    sizes = {key.removeprefix("model."): value.numel() for key, value in theirs.named_parameters()}
    read = sum(size for key, size in sizes.items() if not key.startswith(UNREAD))
    assert (read < sum(sizes.values())) == name.startswith("llava")
    spec = spec_of(name)
    assert spec.vision is not None
    assert spec.language.num_parameters() + spec.vision.num_parameters() == read
    meta = build_model(
        spec, create_backend("cpu", torch.bfloat16, threads=1).ops, torch.bfloat16, Role.E | Role.P | Role.D
    )
    assert sum(torch.Size(slot.shape).numel() for slot in meta.slots.values() if not slot.optional) == read


def test_sizes_as_published() -> None:
    llava, qwen2, small, qwen25, qwen3, hybrid, qwen3_moe, hybrid_moe = (spec_of(name) for name in SHAPES)
    assert (llava.dtype, llava.max_model_len, llava.eos_token_ids) == ("float16", 4096, (2,))
    assert (qwen2.dtype, qwen2.max_model_len, qwen25.max_model_len) == ("bfloat16", 32768, 128000)
    assert small.language.tie_embeddings and small.language.hidden_size == 2048
    for qwen in (qwen2, small, qwen25):
        assert qwen.language.rope_sections == (16, 24, 24) and qwen.eos_token_ids == (151645, 151643)
        assert qwen.vision is not None and qwen.vision.max_tokens_per_image == 16384
    assert (qwen3.max_model_len, qwen3.language.rope_sections, qwen3.eos_token_ids[0]) == (262144, (24, 20, 20), 151645)
    assert (hybrid.max_model_len, hybrid.language.rope_sections, hybrid.eos_token_ids[0]) == (
        262144,
        (11, 11, 10),
        248046,
    )
    assert hybrid.language.has_states and hybrid.language.num_kv_layers == 6
    for spec, billions, active in ((qwen3_moe, 31.1, 3.9), (hybrid_moe, 35.1, 3.9)):
        assert round(spec.num_parameters / 1e9, 1) == billions
        assert round((spec.num_parameters - spec.language.num_unread_parameters(1)) / 1e9, 1) == active
    for spec, tokens in ((llava, 576), (qwen2, 1024), (small, 1024), (qwen25, 1024), (qwen3, 784), (hybrid, 784)):
        assert spec.vision is not None
        assert sum(item.num_tokens for item in spec.vision.plan_image(896, 896).items) == tokens


@pytest.mark.parametrize("name", SHAPES)
def test_every_token_has_its_id_and_is_seen(name: str) -> None:
    tokenizer, size = load_tokenizer(folder(name)), spec_of(name).language.vocab_size
    for token, token_id in SPECIAL[name].items():
        assert tokenizer.encode(f"a{token}", add_special_tokens=False)[1:] == [token_id]
    text = "Größe: 12 €\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    unnamed = [id for id in range(size) if tokenizer.token(id) is None]
    assert len(unnamed) > 30_000 and {tokenizer.token_bytes(id) for id in unnamed} == {b" ?"}
    assert tokenizer.vocab_size <= size


# ---- random weights


class Watched:
    """Ops that keep how far the rows of the decoder spread behind each half of its layers."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.spreads: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear_add_rms_norm(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = self._ops.linear_add_rms_norm(*given)
        self.spreads.append(float(total.std()))
        return normed, total

    def add_rms_norm(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps the spread behind a mixture of experts, whose products are not fused with the sum."""
        normed, total = self._ops.add_rms_norm(*given)
        self.spreads.append(float(total.std()))
        return normed, total


def run(spec: ModelSpec) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """Features of a picture of noise, logits of a prompt with it, and the spreads on the way."""
    dtype, language, vision = torch.float32, spec.language, spec.vision
    assert vision is not None
    watched = Watched(create_backend("cpu", dtype, threads=1).ops)
    ops: Any = watched
    model = build_model(spec, ops, dtype, Role.E | Role.P | Role.D)
    fill_random(model, dtype=dtype, device=torch.device("cpu"))
    item = vision.plan_image(112, 112).items[0]
    images = PagedCache(torch.zeros(1, vision.num_planes, 1, item.num_tokens, 1, language.hidden_size))
    pixels = torch.randint(0, 256, (1, item.height, item.width, 3), dtype=torch.uint8)
    model.encode(VisionInput((pixels,), ((112, 112),), (item.grid,), torch.arange(item.num_tokens)), images)
    count = 32
    kv = PagedCache(torch.zeros(2, language.num_layers, 2, 16, language.num_kv_heads, language.head_dim))
    places = torch.arange(count)
    int32 = torch.int32
    attention = ops.plan_attention(
        torch.tensor([0, count], dtype=int32), torch.tensor([count], dtype=int32), torch.tensor([[0, 1]], dtype=int32)
    )
    inputs = LanguageInput(
        token_ids=torch.randint(0, language.vocab_size, (count,)),
        positions=places if language.rope_sections is None else places.expand(3, -1),
        slots=places,
        attention=attention,
        logit_rows=places[-1:],
        position_end=count,
        image_rows=places[:8],
        image_slots=places[:8],
    )
    return images.data, model.forward(inputs, kv, images), watched.spreads


def check(spec: ModelSpec) -> None:
    with torch.inference_mode():
        features, logits, spreads = run(spec)
    assert len(spreads) == 2 * spec.language.num_layers
    assert all(0.3 < spread < 8 for spread in spreads), spreads
    assert 0.3 < float(features.std()) < 3 and features.isfinite().all()
    # Rows of 0.5 meet rows of a head, of which each component is small, or those of the embedding, of 0.5 each.
    language = spec.language
    expected = 0.25 * language.hidden_size**0.5 if language.tie_embeddings else 1.0
    assert 0.5 < float(logits.std()) / expected < 2 and float(logits.abs().max()) / expected < 10


@pytest.mark.slow
def test_one_layer_of_the_true_width_keeps_rows_of_order_one() -> None:
    spec = spec_of("qwen2.5-vl-7b")
    vision: Any = spec.vision
    language = replace(spec.language, num_layers=1, vocab_size=512)
    check(replace(spec, language=language, vision=replace(vision, tower=replace(vision.tower, num_layers=1))))


@pytest.mark.parametrize("name", [name for name in SHAPES if not spec_of(name).language.has_states])
@pytest.mark.slow
def test_as_many_layers_as_there_are_keep_rows_of_order_one(name: str) -> None:
    spec = spec_of(name)
    vision: Any = spec.vision
    tower = replace(vision.tower, hidden_size=192, intermediate_size=480)
    sizes = {"hidden_size": 256, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 640, "vocab_size": 512}
    language = replace(spec.language, **sizes)
    if language.mixture is not None:
        language = replace(language, mixture=language.mixture._replace(num_experts=16, num_inner=160))
    check(replace(spec, language=language, vision=replace(vision, tower=tower, feature_size=256)))


# ---- an engine


def thin(name: str, directory: Path) -> None:
    """The shipped folder with two thin layers in each half; the vocabulary and the pictures stay as they are."""
    shutil.copytree(folder(name), directory, dirs_exist_ok=True)
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    text, vision = config.get("text_config", config), config["vision_config"]
    text |= {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 160}
    text |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    text |= {"num_experts": 4, "num_experts_per_tok": 2} if "num_experts" in text else {}
    for size in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        text |= {size: 64} if size in text else {}
    if "layer_types" in text:
        text |= {"layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2}
        text |= {"linear_num_key_heads": 1, "linear_num_value_heads": 1}
    if name.startswith("llava"):
        vision |= {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
    elif name.startswith("qwen3"):
        vision |= {"depth": 2, "num_heads": 2, "hidden_size": 64, "intermediate_size": 96, "out_hidden_size": 128}
        vision |= {"deepstack_visual_indexes": [0]} if name.startswith("qwen3-") else {}
    else:
        vision |= {"depth": 2, "num_heads": 2, "embed_dim": 64, "intermediate_size": 96, "fullatt_block_indexes": [1]}
        vision |= {"hidden_size": 128} if name.startswith("qwen2-") else {"hidden_size": 64, "out_hidden_size": 128}
    path.write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.quick("qwen3-vl-2b")
@pytest.mark.parametrize("name", SHAPES)
def test_it_chats_about_a_picture(name: str, tmp_path: Path) -> None:
    thin(name, tmp_path)
    picture = np.random.default_rng(0).integers(0, 256, (112, 168, 3), dtype=np.uint8)
    options: dict[str, Any] = {"load_format": "random", "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 2}
    with Engine(tmp_path, **options) as engine:
        result = engine.generate("What?", images=[picture], max_tokens=6, temperature=0, ignore_eos=True)
    if name.startswith("llava"):
        num_features, text = 576, "USER: \nWhat? ASSISTANT:"
    elif name.startswith("qwen3"):
        num_features, text = 10 * 7, "user\nWhat?assistant\n"  # at least 65,536 pixels
    else:
        num_features, text = 4 * 6, "system\nYou are a helpful assistant."
    assert num_features + len(text) < result.usage.prompt_tokens < num_features + 120
    assert len(result.token_ids) == 6 and len(result.text) >= 6


@pytest.mark.drawn
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2.5-vl-3b", "qwen3-vl-2b", "qwen3.5-0.8b"])
def test_it_becomes_a_checkpoint_and_files_for_llama_cpp_that_answer_alike(name: str, tmp_path: Path) -> None:
    thin(name, tmp_path / "thin")
    make_shape_checkpoint(tmp_path / "thin", tmp_path / "model", seed=1)
    quantize = tmp_path / "llama.cpp/bin/llama-quantize"  # `make peers` builds the real one
    quantize.parent.mkdir(parents=True)
    quantize.write_text('#!/bin/sh\ncp "$1" "$2"\n')
    quantize.chmod(0o755)
    (tmp_path / "gguf").mkdir()
    gguf(tmp_path / "model", tmp_path / "gguf", tmp_path)
    files = {path.name: path for path in (tmp_path / "gguf").iterdir()}
    assert set(files) == {"BF16.gguf", "Q8_0.gguf", "Q4_0.gguf", "mmproj.gguf"}
    picture = np.random.default_rng(0).integers(0, 256, (112, 168, 3), dtype=np.uint8)
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 2, "threads": 1}
    answers = []
    for model, mmproj in ((tmp_path / "model", None), (files["BF16.gguf"], files["mmproj.gguf"])):
        with Engine(model, mmproj=mmproj and str(mmproj), **options) as engine:
            result = engine.generate("What?", images=[picture], max_tokens=6, temperature=0, ignore_eos=True)
            answers.append((result.token_ids, result.usage.prompt_tokens))
    assert answers[0] == answers[1]


def test_without_the_flag_it_says_what_is_missing() -> None:
    with pytest.raises(CheckpointError, match=r"has neither .*load_format=.random. draws weights from a seed"):
        Engine("qwen2.5-vl-7b", kv_cache_gib=0.25, image_cache_gib=0.5, max_model_len=1024)


@pytest.mark.slow
def test_a_start_that_fails_at_once_awaits_what_loads_beside_it(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ResourceError, match=r"give at least kv_cache_gib=0\."):
        Engine("qwen2.5-vl-7b", kv_cache_gib=0.01, image_cache_gib=0.01, max_model_len=1024)
    gc.collect()
    assert "never retrieved" not in caplog.text
