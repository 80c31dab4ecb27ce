"""Qwen3-VL and Qwen3.5 beyond the shared parity tests: sizes of published models, cost, what features depend on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.utils.flop_counter import FlopCounterMode

from hydra_engine.backend.base import Backend
from hydra_engine.backend.select import create_backend
from hydra_engine.core.instances import Role
from hydra_engine.models.build import build_model
from hydra_engine.models.loading.safetensors_checkpoint import canonical_name
from hydra_engine.models.qwen_vl.model import Qwen3VlVision
from hydra_engine.models.specs.registry import load_spec
from tests.models.conftest import CheckpointFactory
from tests.models.driver import Driver
from tests.models.families.base import Pair, clip, picture
from tests.models.families.qwen3_vl import QWEN3_VL
from tests.models.specs import test_qwen3_5, test_qwen3_vl
from tests.models.specs.test_qwen3_5 import model_dir

MODELS = {
    **{f"Qwen3-VL-{name}": config for name, config in test_qwen3_vl.MODELS.items()},
    **{f"Qwen3.5-{name}": config for name, config in test_qwen3_5.MODELS.items()},
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_published_models(name: str, tmp_path: Path) -> None:
    """Counts equal those that transformers builds; and our model asks a file for the same tensors."""
    spec = model_dir(tmp_path, MODELS[name]).spec()
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        model = transformers.AutoModelForImageTextToText.from_config(config)
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert spec.vision is not None
    vision = sum(torch.Size(shape).numel() for name, shape in theirs.items() if name.startswith("model.visual."))
    assert spec.vision.num_parameters() == vision
    assert spec.language.num_parameters() == sum(torch.Size(shape).numel() for shape in theirs.values()) - vision
    ops = create_backend("cpu", torch.float32, backend="reference", threads=1).ops
    slots = build_model(spec, ops, torch.bfloat16, Role.parse("EPD")).slots
    assert {slot: wanted.shape for slot, wanted in slots.items() if not wanted.optional} == {
        canonical_name(name, Qwen3VlVision.renames): shape for name, shape in theirs.items()
    }


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_flops_are_those_that_torch_counts(family: str, checkpoint: CheckpointFactory) -> None:
    directory = checkpoint(f"{family}-flops", family)
    spec = load_spec(directory)
    config = transformers.AutoConfig.from_pretrained(directory, attn_implementation="eager")
    assert spec.vision is not None
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    (item,) = spec.vision.plan_image(40, 32).items
    values, grid = torch.zeros(item.num_patches, 3 * 2 * 4 * 4), torch.tensor([item.grid])
    model = model.to_empty(device="cpu")
    with FlopCounterMode(display=False) as counted, torch.inference_mode():
        model.get_image_features(values, grid)
    assert spec.vision.flops(item.num_patches) == counted.get_total_flops()


def test_features_do_not_depend_on_what_else_is_encoded(checkpoint: CheckpointFactory, backend: Backend) -> None:
    pair = Pair(QWEN3_VL, "plain", checkpoint("qwen3-vl-batch", "qwen3_vl"), backend, num_blocks=768)
    media = [picture((40, 32)), clip((30, 50), 5, 2.0), picture((70, 50)), picture((40, 32), 1), picture((400, 2))]
    spans = pair.spans(media)
    together = pair.driver.encode(spans)
    for span, slots in zip(spans, together, strict=True):
        (alone,) = pair.driver.encode([span])
        for plane in range(pair.vision.num_planes):
            assert torch.equal(pair.driver.features(slots, plane), pair.driver.features(alone, plane))


def test_a_model_that_is_only_asked_about_text_needs_no_image_cache(
    checkpoint: CheckpointFactory, backend: Backend
) -> None:
    pair = Pair(QWEN3_VL, "plain", checkpoint("qwen3-vl-batch", "qwen3_vl"), backend, num_blocks=64)
    ids = [1, 90, 17, 201, 33]
    with_cache = pair.driver.run(pair.driver.request(ids), [])
    pair.driver.image_cache = None  # type: ignore[assignment]
    assert torch.equal(pair.driver.run(pair.driver.request(ids), []), with_cache)


def test_layers_that_guess_further_tokens_are_not_read(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    """Names as published: tower and decoder below `model.`, the head and the guessing layers beside it."""
    source = checkpoint("qwen3_5-flops", "qwen3_5")
    directory = Path(shutil.copytree(source, tmp_path / "model"))
    tensors = load_file(directory / "model.safetensors")
    assert {name.split(".")[0] for name in tensors} == {"model", "lm_head"}
    assert {name.split(".")[1] for name in tensors if name.startswith("model")} == {"language_model", "visual"}
    tensors |= {"mtp.fc.weight": torch.ones(64, 128), "mtp.layers.0.mlp.up_proj.weight": torch.ones(96, 64)}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    backend = create_backend("cpu", torch.float32, backend="reference", threads=1)
    plain, more = Driver(source, backend), Driver(directory, backend)
    prompt = [1, 90, 17]
    assert torch.equal(more.run(more.request(prompt), []), plain.run(plain.request(prompt), []))
