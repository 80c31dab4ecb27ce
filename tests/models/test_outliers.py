"""Outlier channels of activations: quantised products stay near to those with the same weights dequantised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.accuracy import Subject
from bench.outliers import KINDS, DequantizedOps, Outliers, conversations, divergence, write_outliers
from hydra_engine.backend.select import create_backend
from hydra_engine.config import EngineConfig
from hydra_engine.preprocess.model_files import find_model_files
from tests.gguf_files import write_gguf

BOUND = 0.002  # nats; with a step for a whole row it is 0.016 at 2^5, 0.04 at 2^6 and 1.3 at 2^8


@pytest.fixture(scope="module")
def requests() -> list[Tensor]:
    return conversations()


@pytest.fixture(scope="module", params=[0, 3, 5, 6, 8], ids=lambda power: f"power-{power}")
def outliers(
    request: pytest.FixtureRequest, requests: list[Tensor], tmp_path_factory: pytest.TempPathFactory
) -> Outliers:
    return Outliers(tmp_path_factory.mktemp("outliers"), request.param, requests)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_outlier_channels_do_not_drown_the_others(outliers: Outliers, kind: str) -> None:
    """The rounding of the weights themselves is not counted."""
    found = outliers.divergences(kind)
    assert 0 < found["between"] < BOUND
    assert found["engine"] < 1.2 * found["dequantised"] + BOUND


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("power", [0, 6, 8])
def test_outlier_channels_do_not_drown_the_others_in_gguf_files(
    kind: str, power: int, requests: list[Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_outliers(tmp_path / "plain", power)
    model, mmproj = write_gguf(tmp_path / "plain", tmp_path, kind)
    where = find_model_files(EngineConfig(model=str(model), mmproj=str(mmproj))).model_path
    backend = create_backend("cpu", torch.float32, threads=1)
    engine, exact = (
        torch.cat([subject.logits(request) for request in requests])
        for subject in (Subject(where, backend), Subject(where, replace(backend, ops=DequantizedOps())))
    )
    assert 0 < divergence(exact, engine) < BOUND
