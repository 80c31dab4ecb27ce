"""Models without weights on disk: what is drawn is complete, finite, seeded and the same in every instance."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hydra_engine import Engine
from hydra_engine.backend.select import create_backend
from hydra_engine.core.instances import EPD, Role
from hydra_engine.errors import CheckpointError
from hydra_engine.models.build import build_model, load_model
from hydra_engine.models.loading.random_weights import fill_random
from hydra_engine.models.specs.registry import load_spec
from tools.miniatures import make_tiny


@pytest.fixture(scope="module", params=("llava", "qwen2_5_vl"))
def bare(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A miniature's directory without its weights."""
    directory = tmp_path_factory.mktemp("bare") / request.param
    make_tiny(request.param, directory, seed=1)
    (directory / "model.safetensors").unlink()
    return directory


def drawn(directory: Path, role: Role, seed: int = 0) -> dict[str, torch.Tensor]:
    spec = load_spec(directory)
    backend = create_backend("cpu", torch.float32, threads=1)
    model = build_model(spec, backend.ops, backend.dtype, role)
    seen: dict[str, torch.Tensor] = {}
    for name, slot in model.slots.items():
        model.slots[name] = slot._replace(fill=lambda tensor, name=name: seen.__setitem__(name, tensor.clone()))
    fill_random(model, dtype=backend.dtype, device=torch.device("cpu"), seed=seed)
    return seen


def test_parts_of_a_model_agree_and_seeds_differ(bare: Path) -> None:
    whole = drawn(bare, EPD)
    for role in (Role.E, Role.P | Role.D):
        part = drawn(bare, role)
        assert part and all(torch.equal(tensor, whole[name]) for name, tensor in part.items())
    other = drawn(bare, EPD, seed=1)
    assert not any(torch.equal(tensor, whole[name]) for name, tensor in other.items())
    assert all(torch.isfinite(tensor).all() for tensor in whole.values())


def test_matrices_are_drawn_in_the_dtype_of_a_checkpoint(bare: Path) -> None:
    backend, spec = create_backend("cpu", torch.float32, threads=1), load_spec(bare)
    wide, narrow = (
        load_model(bare, replace(spec, dtype=dtype), backend, EPD, random_weights=True).weights_bytes
        for dtype in ("float32", "bfloat16")
    )
    assert narrow < 0.7 * wide


def test_the_engine_serves_them(bare: Path) -> None:
    with Engine(bare, load_format="random", dtype="float32") as engine:
        first = engine.generate("two words", max_tokens=8, temperature=0, ignore_eos=True)
        again = engine.generate("two words", max_tokens=8, temperature=0, ignore_eos=True)
        assert len(first.token_ids) == 8 and first.token_ids == again.token_ids
    with pytest.raises(CheckpointError, match=r"neither .*load_format=.random"):
        Engine(bare)


def test_progress_ends_at_the_whole(bare: Path) -> None:
    told: list[tuple[int, int]] = []
    backend = create_backend("cpu", torch.float32, threads=1)
    load_model(bare, load_spec(bare), backend, EPD, lambda done, total: told.append((done, total)), random_weights=True)
    assert told[-1][0] == told[-1][1] > 0 and [done for done, _ in told] == sorted(done for done, _ in told)
