"""Counts of layers in a config are bounded by what the files hold: more are refused before any is built for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hydra_engine import Engine
from hydra_engine.backend.base import Backend
from hydra_engine.backend.select import create_backend
from hydra_engine.config import EngineConfig
from hydra_engine.core.instances import EPD, Role
from hydra_engine.core.options import SpecOptions
from hydra_engine.errors import CheckpointError, ResourceError
from hydra_engine.models.build import build_model, check_layers, load_model
from hydra_engine.models.layers import decoder, vision
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.preprocess.model_files import find_model_files
from hydra_transformers import load as generic
from tests.models.conftest import CheckpointFactory
from tests.models.quantized.written import METHODS, write_checkpoint

MOST = 1024
GENERIC = SpecOptions(model_impl="transformers")


@pytest.fixture
def reference() -> Backend:
    return create_backend("cpu", torch.float32, backend="reference", threads=1)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Layers that are built, one name each."""
    found: list[str] = []
    for kind in (decoder.DecoderLayer, vision.VisionLayer):

        def record(self: Any, scope: Any, *rest: Any, _init: Any = kind.__init__, **named: Any) -> None:
            found.append(scope.full_name(""))
            _init(self, scope, *rest, **named)

        monkeypatch.setattr(kind, "__init__", record)
    return found


def edit(directory: Path, section: str, **values: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    part = config if not section else config.setdefault(section, {})
    part.update(values)
    path.write_text(json.dumps(config))


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def copy(directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(directory, tmp_path / "copy"))


def refusal(directory: Path, backend: Backend, role: Role = EPD, options: SpecOptions | None = None) -> str:
    spec = load_spec(directory, options)
    with pytest.raises(CheckpointError) as caught:
        load_model(directory, spec, backend, role)
    message = caught.value.message
    assert "\n" not in message and len(message) < 300
    return message


TEXT, DECODER = ("text_config", "num_hidden_layers"), "language_model.model.layers"
TOWER = ("vision_config", "num_hidden_layers")
# family: the field and the list that it counts
CASES: dict[str, tuple[str, tuple[str, str], str]] = {
    "llama": ("llama", ("", "num_hidden_layers"), "model.layers"),
    "qwen3_5": ("qwen3_5_text", ("", "num_hidden_layers"), "model.layers"),
    "llava-text": ("llava", TEXT, DECODER),
    "llava-tower": ("llava", TOWER, "vision_tower.encoder.layers"),
    "llava_next-tower": ("llava_next", TOWER, "vision_tower.encoder.layers"),
    "internvl-tower": ("internvl", TOWER, "vision_tower.encoder.layer"),
    "minicpmv2_6-tower": ("minicpmv", TOWER, "vision_tower.encoder.layers"),
    "minicpmv-tower": ("minicpmv4_6", TOWER, "vision_tower.encoder.layers"),
    "qwen2_vl-tower": ("qwen2_vl", ("vision_config", "depth"), "visual.blocks"),
    "qwen2_5_vl-tower": ("qwen2_5_vl", ("vision_config", "depth"), "visual.blocks"),
    "qwen3_vl-tower": ("qwen3_vl", ("vision_config", "depth"), "visual.blocks"),
    "qwen3_vl-text": ("qwen3_vl", TEXT, DECODER),
    "qwen3_5-text": ("qwen3_5", TEXT, DECODER),
}


@pytest.mark.quick("llama-1", "llava-tower-1024", "[qwen2_vl-tower-1024", "[1024-llama")
@pytest.mark.parametrize("more", [1, MOST])
@pytest.mark.parametrize("name", CASES)
def test_more_layers_than_the_weights_hold_are_refused(
    name: str, more: int, checkpoint: CheckpointFactory, reference: Backend, built: list[str], tmp_path: Path
) -> None:
    family, (section, field), stack = CASES[name]
    whole = checkpoint(f"counted-{family}", family, **({"text": {"num_hidden_layers": 4}} if "3_5" in family else {}))
    load_model(whole, load_spec(whole), reference, EPD)
    held = sum(place.startswith(f"{stack}.") for place in built)
    config = json.loads((whole / "config.json").read_text())
    held = (config[section] if section else config)[field]
    built.clear()
    directory = copy(whole, tmp_path)
    edit(directory, section, **{field: min(held + more, MOST)})
    if family.startswith("qwen3_5"):
        edit(directory, section, layer_types=None)
    message = refusal(directory, reference)
    assert message.startswith(f"config.json names {min(held + more, MOST)} layers ({field}), the weights hold {held} (")
    assert f"({stack}.0 to {held - 1}); use the config.json that came with the weights" in message
    assert not any(place.startswith(f"{stack}.") for place in built)


def test_layers_that_no_feature_is_read_from_count_too(
    checkpoint: CheckpointFactory, reference: Backend, built: list[str], tmp_path: Path
) -> None:
    directory = copy(checkpoint("counted-llava"), tmp_path)
    edit(directory, "", vision_feature_layer=1)
    load_model(directory, load_spec(directory), reference, EPD)  # fewer than there are
    assert [place for place in built if "encoder" in place] == ["vision_tower.encoder.layers.0."]
    edit(directory, "vision_config", num_hidden_layers=MOST)
    assert "names 1024 layers" in refusal(directory, reference)
    load_model(directory, load_spec(directory), reference, Role.P | Role.D)  # has no tower


def test_a_name_does_not_stand_for_those_before_it(
    checkpoint: CheckpointFactory, reference: Backend, built: list[str], tmp_path: Path
) -> None:
    directory = copy(checkpoint("counted-llama", "llama"), tmp_path)
    rewrite(directory, lambda tensors: tensors.update({"model.layers.1023.input_layernorm.weight": torch.ones(1)}))
    edit(directory, "", num_hidden_layers=MOST)
    assert "the weights hold 4 (model.layers.0 to 2, 1023);" in refusal(directory, reference)
    assert not built


def test_lists_of_mergers_are_counted(checkpoint: CheckpointFactory, reference: Backend, tmp_path: Path) -> None:
    directory = copy(checkpoint("counted-qwen3_vl", "qwen3_vl", text={"num_hidden_layers": 5}), tmp_path)
    rewrite(directory, lambda tensors: [tensors.pop(n) for n in list(tensors) if "deepstack_merger_list.1" in n])
    assert "names 2 layers (deepstack_visual_indexes), the weights hold 1 (visual.deepstack" in refusal(
        directory, reference
    )


@pytest.mark.quick("gptq-4-zeros")
@pytest.mark.parametrize("name", ["w4-32", "gptq-4-zeros", "awq", "fp8"])
def test_quantised_layers_are_counted(
    name: str, checkpoint: CheckpointFactory, reference: Backend, built: list[str], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    directory = tmp_path / name
    write_checkpoint(checkpoint("counted-sizes", "llama", text=sizes), directory, METHODS[name])
    load_model(directory, load_spec(directory), reference, EPD)
    assert len(built) == 2
    edit(directory, "", num_hidden_layers=3)
    assert "names 3 layers (num_hidden_layers), the weights hold 2 (model.layers.0 to 1);" in refusal(
        directory, reference
    )
    assert len(built) == 2


def test_files_of_gguf_are_counted(
    checkpoint: CheckpointFactory, reference: Backend, built: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may hold the last layer without those before it."""
    pytest.importorskip("gguf", reason="writes the file")
    from tests import gguf_files

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = copy(checkpoint("counted-llama", "llama"), tmp_path)
    edit(directory, "", num_hidden_layers=MOST)
    rewrite(directory, lambda tensors: tensors.update({"model.layers.1023.input_layernorm.weight": torch.ones(64)}))
    file, _ = gguf_files.write_gguf(directory, tmp_path / "gguf")
    found = find_model_files(EngineConfig(model=str(file))).model_path
    assert "the weights hold 4 (model.layers.0 to 2, 1023);" in refusal(found, reference)
    assert not built


def test_memory_for_layers_that_are_not_there_is_not_asked_for(checkpoint: CheckpointFactory, tmp_path: Path) -> None:
    """The refusal names the layers, and memory only where the layers exist."""
    directory = copy(checkpoint("counted-llama", "llama"), tmp_path)
    with pytest.raises(ResourceError, match="kv_cache_gib="):
        Engine(str(directory), device="cpu", kv_cache_gib=1e-6, progress=False)
    edit(directory, "", num_hidden_layers=MOST, hidden_size=1 << 14, intermediate_size=1 << 20)
    with pytest.raises(CheckpointError, match="names 1024 layers"):
        Engine(str(directory), device="cpu", progress=False)
    (directory / "model.safetensors").unlink()
    missing = "> .*; besides, the model directory has neither model.safetensors nor .*; load_format=.random. draws"
    with pytest.raises(ResourceError, match=missing):
        Engine(str(directory), device="cpu", progress=False)


def test_drawn_weights_have_as_many_layers_as_the_config(checkpoint: CheckpointFactory, reference: Backend) -> None:
    directory = checkpoint("counted-llama", "llama")
    spec = load_spec(directory)
    more = replace(spec, language=replace(spec.language, num_layers=7))
    model = load_model(directory, more, reference, EPD, random_weights=True)
    assert model.weights_bytes > load_model(directory, spec, reference, EPD).weights_bytes
    assert (
        "model.layers.1023.mlp.up_proj.weight"
        in build_model(
            replace(spec, language=replace(spec.language, num_layers=MOST)), reference.ops, torch.float32, EPD
        ).slots
    )


@pytest.mark.quick("decoder")
@pytest.mark.parametrize("section", ["", "vision_config"], ids=["decoder", "tower"])
def test_models_of_transformers_are_counted(
    section: str, checkpoint: CheckpointFactory, reference: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = "llava" if section else "llama"
    directory = copy(checkpoint(f"counted-{family}", family), tmp_path)
    spec = load_spec(directory, GENERIC)
    check_layers(directory, spec, reference, EPD)
    edit(directory, section, num_hidden_layers=MOST)

    def refuse(*_: object) -> None:
        raise AssertionError("it is built")

    monkeypatch.setattr(torch.nn.ModuleList, "__init__", refuse)
    assert "names 1024 layers (num_hidden_layers), the weights hold 3 (" in refusal(
        directory, reference, options=GENERIC
    )
    with pytest.raises(CheckpointError, match="names 1024 layers"):
        check_layers(directory, spec, reference, EPD)


def test_modules_of_transformers_are_counted_while_they_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound holds for any field that a config multiplies."""
    monkeypatch.setattr(generic, "_FREE", 20)
    built: list[Any] = []

    def parts() -> Any:
        while len(built) < 1000:
            built.append(torch.nn.Identity())
            yield built[-1]

    message = "more than 100 modules, and the weights hold 10 tensors"
    with pytest.raises(CheckpointError, match=message), generic.bounded_modules(10):
        torch.nn.ModuleList(parts())
    assert len(built) == 101
    torch.nn.ModuleList([torch.nn.Identity()] * 200)  # not within it
