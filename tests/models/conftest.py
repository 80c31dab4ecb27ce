"""Miniature checkpoints, made once per run, and the backends that this machine has."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hydra_engine.backend.base import Backend
from hydra_engine.backend.select import create_backend
from tests.models.families.base import FamilyCase
from tools.miniatures import make_tiny

NATIVE = importlib.util.find_spec("hydra_engine._C") is not None
BACKENDS = ["reference", "native"] if NATIVE else ["reference"]

CheckpointFactory = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFactory:
    """checkpoint(name, family, **overrides) -> its directory; the same name gives the same directory."""
    made: dict[str, Path] = {}

    def make(name: str, family: str = "llava", **overrides: Any) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            make_tiny(family, made[name], seed=sum(name.encode()), **overrides)
        return made[name]

    return make


def pytest_itemcollected(item: pytest.Item) -> None:
    """The quick tests compute one variant of each family, the slow ones all."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    case, variant = params.get("case"), params.get("variant")
    is_further = isinstance(case, FamilyCase) and variant != next(iter(case.variants))
    is_further |= isinstance(case, FamilyCase) and not case.quick and not item.name.startswith("test_logits_and")
    # Models of transformers have names instead of cases.
    is_further |= params.get("name") in getattr(getattr(item, "module", None), "FURTHER", ())
    if is_further and ("backend" in params or "case" in params):
        item.add_marker(pytest.mark.slow)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return create_backend("cpu", torch.float32, backend=request.param, threads=1)
