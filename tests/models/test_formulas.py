"""Figures that specs give without torch, against what transformers builds: placeholders, parameters, FLOPs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from hydra_engine.backend.select import create_backend
from hydra_engine.config import EngineConfig
from hydra_engine.core.instances import Role
from hydra_engine.models.build import build_model
from hydra_engine.models.llava.spec import LlavaVisionSpec
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.preprocess.model_files import find_model_files
from tests.models.conftest import CheckpointFactory
from tests.models.driver import Driver
from tests.models.families.llava import VARIANTS
from tools.miniatures import llava as tiny
from tools.miniatures.base import BOS_ID, EOS_ID, IMAGE_ID


def vision_of(directory: Path) -> LlavaVisionSpec:
    vision = load_spec(directory).vision
    assert isinstance(vision, LlavaVisionSpec)
    return vision


@pytest.mark.parametrize("variant", VARIANTS)
def test_token_counts_are_those_of_the_processor_and_of_the_model(checkpoint: CheckpointFactory, variant: str) -> None:
    directory = checkpoint(variant, **VARIANTS[variant])
    processor = transformers.AutoProcessor.from_pretrained(directory)
    vision = vision_of(directory)
    sizes = [(40, 30), (1, 500), (28, 28)]
    expected = processor._get_num_multimodal_tokens([(height, width) for width, height in sizes])["num_image_tokens"]
    assert [vision.plan_image(width, height).num_tokens for width, height in sizes] == expected
    assert max(expected) == vision.max_tokens_per_image == vision.max_tokens_per_item


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameter_counts(checkpoint: CheckpointFactory, variant: str) -> None:
    """Counts the whole model of transformers, less the layers that nobody reads; and what our model asks a file for."""
    directory = checkpoint(variant, **VARIANTS[variant])
    spec, vision = load_spec(directory), vision_of(directory)
    unread = [f"encoder.layers.{i}." for i in range(vision.tower.num_active_layers, vision.tower.num_layers)]
    with torch.device("meta"):
        model = transformers.LlavaForConditionalGeneration(transformers.AutoConfig.from_pretrained(directory))
    sizes = {name: p.numel() for name, p in model.named_parameters() if "post_layernorm" not in name}
    sizes = {name: size for name, size in sizes.items() if not any(part in name for part in unread)}
    in_vision = {name for name in sizes if "vision_tower" in name or "multi_modal_projector" in name}
    assert vision.num_parameters() == sum(sizes[name] for name in in_vision)
    assert spec.language.num_parameters() == sum(sizes.values()) - vision.num_parameters()
    ops = create_backend("cpu", torch.float32, backend="reference", threads=1).ops
    for role, expected in (("E", vision.num_parameters()), ("D", spec.language.num_parameters())):
        slots = build_model(spec, ops, torch.float32, Role.parse(role)).slots
        assert sum(torch.Size(slot.shape).numel() for slot in slots.values() if not slot.optional) == expected


@pytest.mark.quick("gqa")
@pytest.mark.parametrize("variant", VARIANTS)
def test_flops_are_those_that_torch_counts(checkpoint: CheckpointFactory, variant: str) -> None:
    directory = checkpoint(variant, **VARIANTS[variant])
    spec, vision = load_spec(directory), vision_of(directory)
    config = transformers.AutoConfig.from_pretrained(directory, attn_implementation="eager")
    config.vision_config.num_hidden_layers = vision.tower.num_active_layers
    config.vision_feature_layer = VARIANTS[variant].get("vision_feature_layer", -1)
    if not isinstance(config.vision_feature_layer, list):
        config.vision_feature_layer = -1
    with torch.device("meta"):
        model = transformers.LlavaForConditionalGeneration(config)
        side = vision.tower.image_size
        with FlopCounterMode(display=False) as counted:
            model.get_image_features(torch.zeros(2, 3, side, side))
        assert vision.flops(2 * vision.max_patches_per_image) == counted.get_total_flops()
        with FlopCounterMode(display=False) as counted:
            model.model.language_model(input_ids=torch.zeros(1, 9, dtype=torch.long))
        assert 9 * spec.language.flops_per_token(9) == counted.get_total_flops()


@pytest.mark.slow
def test_the_benchmark_recipe_writes_a_checkpoint_that_both_sides_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small: dict[str, Any] = {**tiny._BENCH_TEXT, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    small |= {"vocab_size": 400, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    monkeypatch.setattr(tiny, "_BENCH_TEXT", small)
    monkeypatch.setattr(tiny, "_BENCH_VISION", tiny.VISION)
    num_parameters = tiny.make_bench_checkpoint(tmp_path / "a", seed=3)
    assert (tmp_path / "a" / "model.safetensors").stat().st_size == pytest.approx(2 * num_parameters, rel=0.1)
    tiny.make_bench_checkpoint(tmp_path / "b", seed=3)
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    driver = Driver(tmp_path / "a", create_backend("cpu", torch.float32, backend="reference", threads=1))
    assert driver.spec.dtype == "bfloat16"
    ids = [1, 7, 300, 399, 20]
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "a", dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids])).logits[0]
    assert torch.allclose(driver.run(driver.request(ids), []), expected, rtol=0, atol=1e-4)


def test_tiny_checkpoints_come_with_a_processor_that_transformers_finds(checkpoint: CheckpointFactory) -> None:
    processor = transformers.AutoProcessor.from_pretrained(checkpoint("gqa"))
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi?"}]}
    text = processor.apply_chat_template([message], add_generation_prompt=True)
    assert text == "<s><|user|><image>Hi?<|end|><|assistant|>"
    ids = processor.tokenizer.encode(text, add_special_tokens=False)
    assert ids[:3] == [BOS_ID, 3, IMAGE_ID] and ids[-2:] == [EOS_ID, 4]
    assert processor.tokenizer.decode(ids[3:6]) == "Hi?"


@pytest.mark.slow
@pytest.mark.parametrize("form", [tiny.GPTQ, tiny.Q4_K])
def test_the_benchmark_recipe_writes_quantised_forms_that_load(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are not whole blocks of Q4_K, like those of 50m, are among them."""
    small: dict[str, Any] = {**tiny._BENCH_TEXT, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2}
    small |= {"vocab_size": 400, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setitem(tiny._BENCH_SIZES, "50m", (small, tiny.VISION))
    tiny.make_bench_checkpoint(tmp_path / form, size="50m", form=form)
    path = find_model_files(EngineConfig(model=str(tmp_path / form))).model_path
    driver = Driver(path, create_backend("cpu", torch.float32, backend="reference", threads=1))
    assert driver.spec.quantized_as
    logits = driver.run(driver.request([1, 7, 300, 399, 20]), [])
    assert logits.isfinite().all() and logits.std() > 0.01
