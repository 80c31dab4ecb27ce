"""Fixtures for the native ops: one run per instruction-set level of this machine, thread counts restored afterwards."""

from collections.abc import Iterator

import pytest

from hydra_engine import _C

LEVELS = ("scalar", "avx2", "avx512bf16", "amx")
AVAILABLE = LEVELS[: LEVELS.index(_C.isa()) + 1]


@pytest.fixture(params=AVAILABLE)
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
