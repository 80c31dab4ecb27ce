"""Compiles what a wrapper would launch, for a GPU that is not there.

A wrapper is called with CPU tensors while its launches are recorded instead of run; each recorded launch is then
compiled with the types, constants and divisibility that Triton's own launcher would have found in those arguments.
Needs a process without the interpreter.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*u1",
}
_ALIGNMENT = 16  # what Triton's launcher looks for in addresses and integers
# Bytes per program, by compute capability (CUDA programming guide, technical specifications).
SHARED_LIMIT = {80: 166912, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


@dataclass(frozen=True)
class Launch:
    """A call of a kernel with every argument by its name."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)


@dataclass(frozen=True)
class Compiled:
    """registers per thread and shared memory per program, in bytes; `stack` is not 0 when registers were spilled."""

    ptx: str
    registers: int
    stack: int
    shared: int
    warps: int
    cubin: bytes

    def count(self, instruction: str) -> int:
        return len(re.findall(instruction, self.ptx))

    def machine_code(self) -> str:
        return _disassembled(self.cubin, "-sass")


def record(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> list[Launch]:
    """The launches that `call` makes."""
    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        names = self.arg_names
        options = {name: value for name, value in kwargs.items() if name not in names}
        arguments = dict(zip(names, args, strict=False)) | {n: v for n, v in kwargs.items() if n in names}
        assert set(arguments) == set(names)
        launches.append(Launch(self, arguments, options, grid))

    monkeypatch.setattr(JITFunction, "run", run)
    call()
    monkeypatch.undo()
    return launches


def specialised(launch: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], list[list[Any]]]]:
    """The key by which Triton compiles: types, constants and attributes. Launches with the same key share machine
    code."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        if (
            parameter.is_constexpr
            or value is None
            or (type(value) is int and value == 1 and not parameter.do_not_specialize)
        ):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name], number = _POINTERS[value.dtype], value.data_ptr()
        elif isinstance(value, int):
            signature[name], number = ("i32" if abs(value) < 2**31 else "i64"), value
        else:
            signature[name], number = "fp32", 1
        free = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        if number % _ALIGNMENT == 0 and not free:
            attributes[(index,)] = [["tt.divisibility", _ALIGNMENT]]
    return signature, constants, attributes


def compile_for(launch: Launch, capability: int) -> Compiled:
    signature, constants, attributes = specialised(launch)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    registers, stack = _resources(compiled.asm["cubin"])
    return Compiled(
        compiled.asm["ptx"],
        registers,
        stack,
        compiled.metadata.shared,
        int(compiled.metadata.num_warps),
        compiled.asm["cubin"],
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) per thread, as the disassembler reports them."""
    text = _disassembled(cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


def _disassembled(cubin: bytes, what: str) -> str:
    path = Path(triton.knobs.cache.dir) / f"resources-{hash(cubin) & 0xFFFFFFFF:08x}.cubin"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(cubin)
    try:
        command = [triton.knobs.nvidia.cuobjdump.path, what, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    finally:
        path.unlink()
