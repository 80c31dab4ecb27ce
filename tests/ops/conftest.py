"""Fixtures for the ops: one run per implementation and instruction-set level of this machine, thread counts restored
afterwards."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hydra_engine import _C
from hydra_engine.backend.base import Ops
from hydra_engine.backend.cpu.ops import NativeOps
from hydra_engine.backend.reference.ops import ReferenceOps

LEVELS = ("scalar", "avx2", "avx512", "avx512bf16", "amx")
AVAILABLE = LEVELS[: LEVELS.index(_C.isa()) + 1]
# `make test` takes the best level, which HYDRA_MAX_CPU_ISA lowers; an emulation is there to run them all.
LOWER = () if "emulated" in Path(_C.__file__ or "").parts else AVAILABLE[:-1]


def per_level(name: str) -> list[Any]:
    return [
        pytest.param(name.format(level), marks=[pytest.mark.slow] * (level in LOWER), id=name.format(level))
        for level in AVAILABLE
    ]


@pytest.fixture(params=per_level("{}"))
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    best = _C.isa()
    _C.force_isa(request.param)
    yield request.param
    _C.force_isa(best)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    _C.set_num_threads(request.param)
    yield request.param
    _C.set_num_threads(1)


@pytest.fixture(params=["reference", *per_level("native-{}")])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    """Implementations of the ops, the native one at every level."""
    name, _, level = request.param.partition("-")
    best = _C.isa()
    if level:
        _C.force_isa(level)
    yield {"reference": ReferenceOps, "native": NativeOps}[name]()
    _C.force_isa(best)
