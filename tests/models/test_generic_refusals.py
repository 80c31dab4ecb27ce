"""Refusals of the generic adapter and their sentences. Nothing here computes a wrong answer in silence."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.utils import import_utils

from hydra_engine.backend.base import Backend
from hydra_engine.backend.select import create_backend
from hydra_engine.clock import MonotonicClock
from hydra_engine.config import MediaConfig
from hydra_engine.core.call import ImagePart
from hydra_engine.core.instances import EPD
from hydra_engine.core.options import SpecOptions
from hydra_engine.core.processes.preloaded import INHERITED
from hydra_engine.errors import CheckpointError, InvalidImage, InvalidRequest
from hydra_engine.models.build import load_model
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.preprocess.media.media import MediaLoader
from hydra_transformers import build_spec
from hydra_transformers.attention import MaskRule
from hydra_transformers.build_spec import describe_in_process
from hydra_transformers.describe import _no_images_because, describe, probe_picture
from hydra_transformers.model import GenericModel
from hydra_transformers.processor import PictureProcessor, load_processor
from hydra_transformers.spec import PROCESSOR_ERRORS, Answer, describe_error
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
    "deepseek_v3": ({}, "DeepseekV3ForCausalLM cannot run .*: it keeps latent keys and values"),
    "lfm2": (
        {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
        "Lfm2ForCausalLM cannot run .*: it has layers of type conv",
    ),
    "mllama": ({}, "MllamaForConditionalGeneration cannot run .*: its layers look at pictures by cross-attention"),
    "stablelm": ({}, "StableLmForCausalLM cannot run .*: its attention cannot be replaced"),
    "t5gemma2": ({}, "it is an encoder with a decoder"),
    "siglip": ({}, "model type 'siglip' is neither an image-text-to-text nor a causal language model"),
    "paligemma": ({}, "PaliGemmaForConditionalGeneration cannot run .*: all tokens of a prompt see each other"),
    "gemma4": (
        {},
        "Gemma4ForConditionalGeneration cannot run through transformers here: its layers differ in head_dim$",
    ),
    "cohere_compass": ({}, r"CohereCompassForConditionalGeneration cannot run .* several layers .* .DeepStack."),
    "instructblip": ({}, "config.json names no image_token_id"),
    "pi0": ({}, "config.json describes no decoder of text: hidden_size is missing"),
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
    with pytest.raises(CheckpointError, match=r"neither processor_config\.json nor preprocessor_config\.json$"):
        load_spec(copied, GENERIC)
    transformers.FastVlmConfig().save_pretrained(copied)  # of no processor that transformers could find by itself
    (copied / "preprocessor_config.json").write_text("{}")
    tokenizer = json.loads((copied / "tokenizer_config.json").read_text())
    del tokenizer["processor_class"]
    (copied / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="finds a TokenizersBackend in the model directory and no processor for"):
        load_spec(copied, GENERIC)


@pytest.mark.parametrize(
    ("version", "command"),
    [
        ("2.13.0+cpu", 'pip install "torch==2.13.0" torchvision --index-url https://download.pytorch.org/whl/cpu'),
        ("2.12.1", 'pip install "torch==2.12.1" torchvision'),
    ],
)
def test_a_processor_that_needs_torchvision(
    version: str, command: str, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ImportError("PixtralProcessor requires the Torchvision library but it was not found.")

    monkeypatch.setattr(transformers.AutoProcessor, "from_pretrained", refuse)
    monkeypatch.setattr(import_utils, "is_torchvision_available", lambda: False)
    monkeypatch.setattr(metadata, "version", lambda _name: version)
    with pytest.raises(CheckpointError) as caught:
        load_processor(copied, "gemma3", trust_remote_code=False)
    assert caught.value.message.endswith(f"it needs torchvision, which is not installed; run: {command}")


def test_a_processor_that_fails_on_every_picture_says_why(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("give me a question and an answer")

    monkeypatch.setattr(transformers.Gemma3Processor, "__call__", fail)
    with pytest.raises(CheckpointError, match="with pictures of 64 x 64 pixels: give me a question and an answer"):
        load_spec(copied, GENERIC)


def test_pictures_of_one_shape_that_a_processor_refuses_are_refused_alone(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = transformers.Gemma3Processor.__call__

    def refuse_thin(processor: Any, images: Any, **more: Any) -> Any:
        width, height = images[0][0].size if isinstance(images[0], list) else images[0].size
        if max(width, height) > 3 * min(width, height):
            raise ValueError("too thin")
        return call(processor, images=images, **more)

    monkeypatch.setattr(transformers.Gemma3Processor, "__call__", refuse_thin)
    spec = spec_of(copied)
    assert spec.processor is not None and spec.processor.inputs == ("pixel_values",)
    with pytest.raises(InvalidImage, match="cannot take a picture of 400 x 40 pixels"):
        PictureProcessor.from_spec(spec.processor).expand(probe_picture((400, 40)))


def test_a_model_whose_pictures_cannot_be_computed_is_not_called_text_alone(tmp_path: Path) -> None:
    transformers.IdeficsConfig().save_pretrained(tmp_path)
    spec = load_spec(tmp_path, GENERIC)
    why = "its class has no get_image_features, by which the engine computes pictures through transformers"
    assert spec.vision is None and spec.no_images_because == why
    loader = MediaLoader(spec, MediaConfig(), MonotonicClock())
    with pytest.raises(InvalidRequest, match=f"^this model takes no images here: {why}$"):
        loader.resolve_sources([ImagePart(probe_picture(), param="prompt")])
    loader.close()
    assert _no_images_because(transformers.LlamaConfig()) == ""


@pytest.mark.parametrize("use", [lambda mask: mask.ndim, lambda mask: mask[:, 0], lambda mask: 1 - mask, torch.sum])
def test_a_model_that_computes_with_its_mask(use: Callable[[Any], Any]) -> None:
    with pytest.raises(
        ValueError, match=r"^it computes with its attention mask, and the engine's attention has a rule"
    ):
        use(MaskRule(lambda batch, head, query, key: key <= query))


def test_errors_of_python_are_told_by_their_place() -> None:
    for fail in (lambda: None.shape, lambda: [][0], lambda: len(3), lambda: exec("a, b = 1, 2, 3")):
        with pytest.raises(PROCESSOR_ERRORS) as caught:
            fail()
        words = describe_error(caught.value)
        assert re.fullmatch(
            r"code of transformers or of the model does not work with these files \(.+, line \d+\)", words
        )
    with pytest.raises(KeyError) as caught:
        {}["short_factor"]
    assert "these files, in which there is no short_factor (test_generic_refusals.py, line " in describe_error(
        caught.value
    )
    with pytest.raises(AttributeError) as caught:
        transformers.LlamaConfig().image_token
    assert "in which there is no image_token (" in describe_error(caught.value)
    assert describe_error(OSError("no such\n  file")) == "no such file"
    assert describe_error(ValueError("One sentence. " + "Another one " * 40)) == "One sentence."
    assert describe_error(ValueError("word " * 100)).endswith("word ...")


def test_a_model_that_computes_something_else_in_our_stages_is_refused(gemma3: Path, reference: Backend) -> None:
    """The loader refuses a spec with which pictures would be computed without bidirectional attention."""
    spec = spec_of(gemma3)
    assert spec.vision is not None and spec.processor is not None and spec.processor.bidirectional
    wrong = replace(spec, vision=replace(spec.vision, processor=replace(spec.processor, bidirectional=False)))
    with pytest.raises(CheckpointError, match=r"its logits differ by [0-9.]+ of their spread from those of its own"):
        load_model(gemma3, wrong, reference, EPD)
    load_model(gemma3, spec, reference, EPD)


def test_memory_that_runs_out_is_not_the_models_fault(
    gemma3: Path, reference: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start then says what would make room, not that the model cannot run."""

    def without_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(GenericModel, "encode", without_memory)
    with pytest.raises(torch.OutOfMemoryError):
        load_model(gemma3, spec_of(gemma3), reference, EPD)


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


def test_a_description_is_inherited_until_a_file_changes(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks of one process have what another one of them has found."""
    spec = load_spec(copied, GENERIC)
    inherited = replace(spec, architecture="Inherited")
    name = build_spec._name(str(copied), False, build_spec._stamp(copied))
    monkeypatch.setitem(INHERITED, name, msgspec.json.encode(Answer.from_spec(inherited)))
    build_spec._describe.cache_clear()
    assert load_spec(copied, GENERIC) == inherited
    changed_json(copied / "config.json", architectures=["Changed"])
    assert load_spec(copied, GENERIC).architecture == spec.architecture


@pytest.mark.slow
def test_a_process_without_torch_hears_the_same(gemma3: Path, copied: Path) -> None:
    assert describe_in_process(str(gemma3), False) == describe(gemma3, trust_remote_code=False)
    changed_json(copied / "config.json", model_type="homemade")
    with pytest.raises(CheckpointError, match="does not know model type 'homemade'"):
        describe_in_process(str(copied), False)
