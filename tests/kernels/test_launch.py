"""Launches that are found again are those that Triton finds: with a driver of no device, and nothing compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from hydra_kernels._launch import Launch

GRID = (3, 2, 1)


@triton.jit(do_not_specialize=["count"])
def first_kernel(
    x: tl.tensor, y: tl.tensor, bias: tl.tensor, count: tl.tensor, stride: tl.tensor, eps: tl.tensor, N: tl.constexpr
) -> None:
    pass


@triton.jit(do_not_specialize=["count"])
def second_kernel(
    x: tl.tensor, y: tl.tensor, bias: tl.tensor, count: tl.tensor, stride: tl.tensor, eps: tl.tensor, N: tl.constexpr
) -> None:
    pass


class Compiled:
    """Stands in for Triton's compiled kernel; `launches` are those that bypass Triton's launcher."""

    function, packed_metadata = 7, (4, 1, 0)

    def __init__(self, launched: list[tuple[Any, ...]]) -> None:
        self._launched = launched

    def run(self, *arguments: Any) -> None:
        self._launched.append((self, *arguments))

    def launch_metadata(self, *_: Any) -> None: ...


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """(what was compiled, all that it was launched with)"""
    found: list[tuple[Any, ...]] = []
    active = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 5,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )

    def compile_nothing(self: Any, key: Any, *_: Any) -> Compiled:
        compiled = self.device_caches[0][0][key] = Compiled(found)
        return compiled

    monkeypatch.setattr(type(driver), "active", active)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 0)
    monkeypatch.setattr(JITFunction, "_do_compile", compile_nothing)
    for kernel in (first_kernel, second_kernel):
        kernel.device_caches.clear()
    yield found
    for kernel in (first_kernel, second_kernel):
        kernel.device_caches.clear()


def _arguments() -> list[tuple[Any, ...]]:
    memory = torch.zeros(256, dtype=torch.uint8)
    skew = -memory.data_ptr() % 16
    floats = [memory[skew + at : skew + at + 64].view(dtype) for at, dtype in ((0, torch.float32), (4, torch.float32))]
    halves = [memory[skew : skew + 64].view(torch.bfloat16), memory[skew + 2 : skew + 66].view(torch.bfloat16)]
    biases = (None, floats[0], halves[0])
    strides = (0, 1, 2, 16, 1 << 31, (1 << 31) + 1, 1 << 40)
    return [
        (x, floats[0], bias, count, stride, eps)
        for x, bias, count, stride, eps in product((*floats, *halves), biases, (1, 3, 32, 1 << 33), strides, (0.0, 1.0))
    ]


def test_the_same_compiled_kernel_as_with_triton(launched: list[tuple[Any, ...]]) -> None:
    launches, cases = Launch(N=4, num_warps=2), _arguments()
    for kernel, arguments in product((first_kernel, second_kernel), cases):
        kernel[GRID](*arguments, N=4, num_warps=2)
        expected = launched.pop()
        for _ in range(2):  # through Triton at the latest here, and then without it
            launches(kernel, GRID, *arguments)
        for got in launched:
            assert got[0] is expected[0]
            assert got[1:7] == (*GRID, 5, 7, (4, 1, 0))
            assert _addresses(got[10:]) == _addresses(expected[10:])
        launched.clear()


def _addresses(values: tuple[Any, ...]) -> list[Any]:
    return [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values]


def test_triton_is_asked_once(launched: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    launches, (arguments, *_) = Launch(N=4, num_warps=2), _arguments()
    asked: list[int] = []
    run: Callable[..., Any] = JITFunction.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(1)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "run", counted)
    for _ in range(3):
        launches(first_kernel, GRID, *arguments)
    assert len(asked) == 1
    assert len(launched) == 3


def test_what_is_no_kernel_of_triton_is_launched_as_it_is() -> None:
    given: list[Any] = []

    class Interpreted:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **kwargs: given.append((grid, args, kwargs))

    x = torch.zeros(1)
    Launch(N=4, num_warps=2)(Interpreted(), GRID, x, 3)
    assert given == [(GRID, (x, 3), {"N": 4, "num_warps": 2})]
