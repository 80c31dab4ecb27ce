"""What the generic adapter does not run, and what it says then. Nothing here computes a wrong answer in silence."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hydra_engine.backend.base import Backend
from hydra_engine.backend.select import create_backend
from hydra_engine.core.options import SpecOptions
from hydra_engine.core.roles import EPD
from hydra_engine.errors import CheckpointError
from hydra_engine.models.build import load_model
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.models.transformers_adapter.build_spec import describe_elsewhere
from hydra_engine.models.transformers_adapter.describe_spec import describe
from tools.miniatures import make_tiny

GENERIC = SpecOptions(model_impl="transformers")


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gemma3")
    make_tiny("gemma3", directory, seed=1)
    return directory


@pytest.fixture
def copied(gemma3: Path, tmp_path: Path) -> Path:
    shutil.copytree(gemma3, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.fixture
def reference() -> Backend:
    return create_backend("cpu", torch.float32, backend="reference", threads=1)


def spec_of(directory: Path) -> ModelSpec:
    return load_spec(directory, GENERIC)


def changed_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({}, "MambaForCausalLM cannot run through transformers here: its layers keep a state besides"),
    "qwen2_vl": ({}, "Qwen2VLForConditionalGeneration cannot run .*: its positions have several axes .M-RoPE."),
    "deepseek_v3": ({}, "DeepseekV3ForCausalLM cannot run .*: it keeps latent keys and values"),
    "lfm2": (
        {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
        "Lfm2ForCausalLM cannot run .*: it has layers of type conv",
    ),
    "mllama": ({}, "MllamaForConditionalGeneration cannot run .*: its layers look at pictures by cross-attention"),
    "stablelm": ({}, "StableLmForCausalLM cannot run .*: its attention cannot be replaced"),
    "t5gemma2": ({}, "it is an encoder with a decoder"),
    "siglip": ({}, "model type 'siglip' is neither an image-text-to-text nor a causal language model"),
}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_models_that_do_not_fit_our_stages(model_type: str, tmp_path: Path) -> None:
    fields, words = CONFIGS[model_type]
    transformers.AutoConfig.for_model(model_type, **fields).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_spec(tmp_path, GENERIC)
    assert "\n" not in caught.value.message


def test_a_model_type_that_transformers_does_not_know(copied: Path) -> None:
    changed_json(copied / "config.json", model_type="homemade")
    with pytest.raises(CheckpointError, match="transformers does not know model type 'homemade'; a newer one may"):
        load_spec(copied, GENERIC)


def test_pictures_that_are_cut_and_see_themselves(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed_json(copied / "generation_config.json", top_k=1)  # another directory than any that was described
    call = transformers.Gemma3Processor.__call__
    monkeypatch.setattr(transformers.Gemma3Processor, "__call__", functools.partialmethod(call, do_pan_and_scan=True))
    with pytest.raises(CheckpointError, match="set do_pan_and_scan false"):
        load_spec(copied, GENERIC)


def test_a_processor_that_is_not_there(copied: Path) -> None:
    (copied / "processor_config.json").unlink()
    with pytest.raises(CheckpointError, match="transformers cannot load the model's processor"):
        load_spec(copied, GENERIC)


def test_a_model_that_computes_something_else_in_our_stages_is_refused(gemma3: Path, reference: Backend) -> None:
    """Here because it is told that pictures do not see themselves."""
    spec = spec_of(gemma3)
    assert spec.vision is not None and spec.processor is not None and spec.processor.whole
    wrong = replace(spec, vision=replace(spec.vision, processor=replace(spec.processor, whole=False)))
    with pytest.raises(CheckpointError, match=r"its logits differ by [0-9.]+ of their spread from those of its own"):
        load_model(gemma3, wrong, reference, EPD)
    load_model(gemma3, spec, reference, EPD)


def test_caches_of_another_shape_are_refused(gemma3: Path, reference: Backend) -> None:
    spec = spec_of(gemma3)
    wrong = replace(spec, language=replace(spec.language, head_dim=8))
    with pytest.raises(CheckpointError, match=r"cannot run through transformers here: rows\[0\]: expected"):
        load_model(gemma3, wrong, reference, EPD)
    wrong = replace(spec, language=replace(spec.language, num_layers=5))
    with pytest.raises(CheckpointError, match="attention of 4 of its 5 layers is where ours can stand"):
        load_model(gemma3, wrong, reference, EPD)


def test_weights_that_are_missing_or_not_finite(copied: Path, reference: Backend) -> None:
    spec, path = spec_of(copied), copied / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight"))
    save_file({other: tensor for other, tensor in tensors.items() if other != name}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing or of the wrong shape: .*layers.1.mlp.up_proj.weight"):
        load_model(copied, spec, reference, EPD)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.up_proj.weight holds values that are not finite"):
        load_model(copied, spec, reference, EPD)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        load_model(copied, spec, reference, EPD)
    path.rename(copied / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="the weights are pickle files"):
        load_model(copied, spec, reference, EPD)


@pytest.mark.slow
def test_a_process_without_torch_hears_the_same(gemma3: Path, copied: Path) -> None:
    assert describe_elsewhere(str(gemma3), False) == describe(gemma3, trust_remote_code=False)
    changed_json(copied / "config.json", model_type="homemade")
    with pytest.raises(CheckpointError, match="does not know model type 'homemade'"):
        describe_elsewhere(str(copied), False)
