"""Tests that run kernels: skipped, with the reason, where CUDA cannot be used. With HYDRA_REQUIRE_CUDA=1, which
`make gpu-check` sets, they fail instead: skipped tests say nothing."""

import os
from collections.abc import Iterator

import pytest
import torch

from hydra_engine import _C
from hydra_engine.backend import devices
from tests.gpu.on_device import OnDevice


def missing() -> str:
    found = devices.probe()
    if found.status != "ok":
        return found.problem
    return "" if torch.cuda.is_available() else "torch was built without CUDA"


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    reason = missing()
    if reason and os.environ.get("HYDRA_REQUIRE_CUDA") == "1":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    return torch.device("cuda", 0)


@pytest.fixture
def synchronous(cuda: torch.device) -> Iterator[None]:
    """Waits after every launch, so that an error in a kernel is raised by its own call."""
    before = _C.cuda_synchronous()
    _C.set_cuda_synchronous(True)
    yield
    _C.set_cuda_synchronous(before)


@pytest.fixture
def ops(cuda: torch.device, synchronous: None) -> OnDevice:
    return OnDevice(cuda)


@pytest.fixture
def threads() -> int:
    """The cases cut large calls over processor threads; a device has its own way."""
    return 1
