"""Fixtures of the cases that run the kernels of csrc/cuda on the host. They need a process that ../test_host_cuda.py
starts: with the sanitizer loaded before everything else and the module's path in HOST_CUDA_MODULE."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.base import PagedCache
from hydra_engine.backend.cuda import cache as cuda_cache
from tests.gpu.on_device import OnDevice

MODULE_VARIABLE = "HOST_CUDA_MODULE"
DEFAULT_STREAM = 0


class AsCuda:
    """A host tensor that says it lies on a device, to those who ask before they take its address."""

    is_cuda = True

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_device(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


@pytest.fixture(scope="session")
def host() -> Any:
    """The module: `CudaCacheDesc` and its neighbours as in hydra_engine._C, and what module.cpp adds."""
    spec = importlib.util.spec_from_file_location("host_cuda", os.environ[MODULE_VARIABLE])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def wrappers(host: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """hydra_engine.backend.cuda.cache on the host: its kernels, no torch stream. Launches are waited for, so that a
    call raises what its kernels met."""
    make_desc = cuda_cache.make_desc
    monkeypatch.setattr(cuda_cache, "_C", host)
    monkeypatch.setattr(cuda_cache, "_stream", lambda device: DEFAULT_STREAM)
    monkeypatch.setattr(
        cuda_cache, "make_desc", lambda cache, device=None: make_desc(PagedCache(AsCuda(cache.data)), device)
    )
    host.set_cuda_synchronous(True)
    host.take_launches()
    yield
    host.cuda_check_faults(0)


@pytest.fixture
def unchecked(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indices as if they lay on the device: nobody looks at them before a kernel does, and no call waits for it."""
    monkeypatch.setattr(cuda_cache, "step_indices", lambda name, indices, device, **bounds: indices)
    host.set_cuda_synchronous(False)


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cpu")


@pytest.fixture
def ops(cuda: torch.device) -> OnDevice:
    return OnDevice(cuda)


@pytest.fixture
def threads() -> int:
    return 1


class Launch(NamedTuple):
    kernel: str  # as the source spells it
    grid: tuple[int, int, int]
    threads: int
    device: int
    stream: int
    widest: int  # bytes of the widest read through the read-only path


@pytest.fixture
def launches(host: Any) -> Callable[[], list[Launch]]:
    """Launches since the last call, or since the test began."""
    return lambda: [Launch(name, tuple(grid), *rest) for name, grid, *rest in host.take_launches()]
