"""Models that an installed package computes: `--model-impl NAME` finds it by its entry point."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hydra_engine import entry_points
from hydra_engine.backend.select import create_backend
from hydra_engine.cli.commands import build_parser
from hydra_engine.config import EngineConfig
from hydra_engine.core.instances import EPD
from hydra_engine.core.options import SpecOptions
from hydra_engine.errors import CheckpointError, ConfigError
from hydra_engine.models.build import check_layers, load_model
from hydra_engine.models.specs.registry import load_spec
from tests.engine.conftest import EngineFactory, picture

SOURCE = """
from dataclasses import replace

class Barn:
    def build_spec(self, files):
        from hydra_engine.models.specs.registry import load_spec
        return load_spec(files.model_dir)

    def check_layers(self, model_dir, spec):
        from hydra_engine.errors import CheckpointError
        raise CheckpointError(f"no layers of {spec.family}")

    def load_model(self, model_dir, spec, backend, role, progress):
        from hydra_engine.models.build import load_model
        model = load_model(model_dir, replace(spec, family="llava"), backend, role, progress)
        model.notes = (*model.notes, f"computed in a barn: {spec.family}")
        return model

BARN = Barn()
"""
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
DECLARED = "[hydra_engine.model_implementations]\nbarn = barn_for_hydra:BARN\n"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of installed packages, with one that brings models; no source tree."""
    metadata = tmp_path / "barn_for_hydra-1.0.dist-info"
    metadata.mkdir()
    (tmp_path / "barn_for_hydra.py").write_text(SOURCE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: barn-for-hydra\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(DECLARED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(entry_points, "_PROJECT", tmp_path / "pyproject.toml")
    yield
    sys.modules.pop("barn_for_hydra", None)


def test_an_engine_serves_the_models_of_another_package(installed: None, make_engine: EngineFactory) -> None:
    own, engine = make_engine(), make_engine(model_impl="barn")
    answers = [each.generate("What is this?", picture(3), **GREEDY).token_ids for each in (own, engine)]
    assert answers[0] == answers[1] and len(answers[0]) == GREEDY["max_tokens"]
    assert engine.summary.family == "barn" and "computed in a barn: barn" in engine.summary.notes


def test_its_name_is_taken_where_the_listed_ones_are(installed: None) -> None:
    flags = build_parser(only="serve")[1]["serve"]
    assert flags.parse_args(["demo", "--model-impl", "barn"]).model_impl == "barn"
    assert EngineConfig(model="demo", model_impl="barn").spec_options.model_impl == "barn"
    for name in ("sheep", ["barn"]):
        with pytest.raises(ConfigError, match="model_impl must be auto, native or transformers"):
            EngineConfig(model="demo", model_impl=name)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no installed package has the model implementation 'sheep'"):
        load_spec(EngineConfig(model="demo").model_path, SpecOptions(model_impl="sheep"))


def test_it_has_no_random_and_no_packed_weights_and_checks_its_own_layers(installed: None, tiny_model: Path) -> None:
    spec = load_spec(tiny_model, SpecOptions(model_impl="barn"))
    backend = create_backend("cpu", torch.float32, threads=1)
    with pytest.raises(ConfigError, match="load_format random needs a native model"):
        load_model(tiny_model, spec, backend, EPD, random_weights=True)
    with pytest.raises(ConfigError, match="packed_cache is for"):
        load_model(tiny_model, spec, backend, EPD, packed_cache=tiny_model)
    with pytest.raises(CheckpointError, match="no layers of barn"):
        check_layers(tiny_model, spec, backend, EPD)
    check_layers(tiny_model, replace(spec, family="llava"), backend, EPD)
