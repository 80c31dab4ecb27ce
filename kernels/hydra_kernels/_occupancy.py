"""Occupancy: programs of a kernel that an SM holds at once, by registers, shared memory and threads (CUDA programming
guide, technical specifications per compute capability)."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

_UNKNOWN = 4  # for tensors on the host, where nothing is compiled
_RESERVED = 1024  # bytes of shared memory that the system reserves per program, from capability 8.0 on
_REGISTERS_AT_ONCE = 256  # allocation unit of a warp's registers
_MAX_PROGRAMS = 32
_REGISTERS = 65536  # of an SM, up to capability 12.0


class Limits(NamedTuple):
    """Limits of an SM; shared memory in bytes."""

    shared: int
    threads: int


def resident_programs(shared: int, registers: int, warps: int, limits: Limits) -> int:
    """Programs that an SM holds at once, at least one. shared: bytes of shared memory per program. registers: per
    thread. warps: per program."""
    registers_per_warp = -(-registers * 32 // _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE
    limits_on_programs = (
        limits.shared // (shared + _RESERVED),
        _REGISTERS // (registers_per_warp * warps),
        limits.threads // (32 * warps),
        _MAX_PROGRAMS,
    )
    return max(1, min(limits_on_programs))


def resident_programs_of(
    kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], device: torch.device
) -> int:
    """Programs of the kernel that an SM holds at once, for these launch arguments. Compiles and loads the kernel if
    needed, and launches nothing. 4 on the host, where nothing is compiled."""
    if device.type != "cuda":
        return _UNKNOWN
    compiled = kernel.warmup(*arguments, grid=(1, 1, 1), **constants)
    compiled[(1, 1, 1)]  # loads it, which sets n_regs
    return resident_programs(compiled.metadata.shared, compiled.n_regs, compiled.metadata.num_warps, _limits_of(device))


@cache
def _limits_of(device: torch.device) -> Limits:
    properties = torch.cuda.get_device_properties(device)
    return Limits(
        properties.shared_memory_per_multiprocessor,
        properties.max_threads_per_multi_processor,
    )
