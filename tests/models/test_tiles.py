"""LLaVA-NeXT and InternVL beyond the shared parity tests: weights of published sizes, their names, cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from hydra_engine.backend.select import create_backend
from hydra_engine.core.instances import EPD
from hydra_engine.models.build import build_model
from hydra_engine.models.internvl.model import InternVlVision
from hydra_engine.models.llava_next.model import LlavaNextVision
from hydra_engine.models.loading.parameters import Renames
from hydra_engine.models.loading.safetensors_checkpoint import canonical_name
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.preprocess.media.images import render
from hydra_engine.preprocess.media.opening import content_of_image, payloads_of
from tests.models.conftest import CheckpointFactory
from tests.models.families.base import picture
from tests.models.families.cases import CASES
from tests.models.specs import test_internvl as internvl
from tests.models.specs import test_llava_next as llava_next
from tests.models.specs.model_dirs import Json, ModelDir

PUBLISHED: dict[str, tuple[Json, Json, Renames, tuple[str, ...]]] = {  # with what of the checkpoint nobody reads
    "llava-v1.6-mistral-7b": (
        llava_next.CONFIG,
        llava_next.IMAGES,
        LlavaNextVision.renames,
        ("vision_tower.encoder.layers.23.", "vision_tower.post_layernorm."),
    ),
    "InternVL3-8B": (internvl.CONFIG, internvl.IMAGES, InternVlVision.renames, ()),
    "InternVL3-8B with the larger tower": (
        {**internvl.CONFIG, "vision_config": internvl.TOWER_6B},
        internvl.IMAGES,
        InternVlVision.renames,
        (),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_weights_that_transformers_has(name: str, tmp_path: Path) -> None:
    config, images, renames, unread = PUBLISHED[name]
    ModelDir(tmp_path, {"config.json": config, "preprocessor_config.json": images})
    spec = load_spec(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    parameters = model.named_parameters(remove_duplicate=False)  # InternVL's config class ties by default
    theirs = {canonical_name(name, renames): tuple(p.shape) for name, p in parameters}
    wanted = {name: shape for name, shape in theirs.items() if not name.startswith(unread)}
    ops = create_backend("cpu", torch.float32, backend="reference", threads=1).ops
    ours = build_model(spec, ops, torch.bfloat16, EPD)
    assert {name: slot.shape for name, slot in ours.slots.items() if not slot.optional} == wanted
    assert all(name.startswith(ours.unneeded) for name in theirs.keys() - wanted.keys())
    assert spec.vision is not None
    num_vision = sum(
        torch.Size(shape).numel() for name, shape in wanted.items() if not name.startswith("language_model.")
    )
    assert spec.vision.num_parameters() == num_vision


NAMES: dict[str, tuple[Renames, dict[str, str]]] = {
    "llava_next": (
        LlavaNextVision.renames,
        {
            "image_newline": "image_newline",
            "model.image_newline": "image_newline",
            "vision_tower.vision_model.encoder.layers.0.mlp.fc1.bias": "vision_tower.encoder.layers.0.mlp.fc1.bias",
            "model.vision_tower.vision_model.pre_layrnorm.bias": "vision_tower.pre_layrnorm.bias",
            "language_model.lm_head.weight": "language_model.lm_head.weight",
            "lm_head.weight": "language_model.lm_head.weight",
        },
    ),
    "internvl": (
        InternVlVision.renames,
        {
            "vision_tower.embeddings.cls_token": "vision_tower.embeddings.cls_token",
            "model.vision_tower.encoder.layer.3.lambda_1": "vision_tower.encoder.layer.3.lambda_1",
            "model.multi_modal_projector.layer_norm.bias": "multi_modal_projector.layer_norm.bias",
            "model.language_model.norm.weight": "language_model.model.norm.weight",
            "language_model.model.norm.weight": "language_model.model.norm.weight",
            "lm_head.weight": "language_model.lm_head.weight",
        },
    ),
}


@pytest.mark.parametrize("family", NAMES)
def test_names_of_all_generations(family: str) -> None:
    renames, names = NAMES[family]
    assert {name: canonical_name(name, renames) for name in names} == names


@pytest.mark.parametrize("family", NAMES)
def test_flops_are_those_that_torch_counts(family: str, checkpoint: CheckpointFactory) -> None:
    directory = checkpoint(f"{family}-last", family, vision_feature_layer=-1)  # transformers computes all layers
    spec = load_spec(directory)
    assert spec.vision is not None
    config = transformers.AutoConfig.from_pretrained(directory, attn_implementation="eager")
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    values: dict[str, Any] = CASES[family].inputs(directory, [picture((80, 60))])
    counter = FlopCounterMode(display=False)
    with torch.inference_mode(), counter:
        model.get_image_features(values.pop("pixel_values").to("meta"), **values)
    assert spec.vision.flops(spec.vision.plan_image(80, 60).num_patches) == counter.get_total_flops()


def test_tiles_have_names_of_their_own(checkpoint: CheckpointFactory) -> None:
    """Equal tiles of equal pictures are encoded once, others are never confused."""
    spec = load_spec(checkpoint("internvl-tiles", "internvl")).vision
    assert spec is not None

    def digests(seed: int) -> list[bytes]:
        image = picture((80, 60), seed)
        plan = spec.plan_image(*image.size)
        pixels = render([image], plan.views, spec.preprocess.resample)
        return [bytes(one.digest) for one in payloads_of(pixels, content_of_image(image), plan, spec.preprocess)]

    assert digests(1) == digests(1)
    assert len(set(digests(1) + digests(2))) == 2 * len(digests(1)) > 10
