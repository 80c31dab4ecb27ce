"""How many programs of a kernel a multiprocessor holds at once: what their registers, shared memory and threads leave
room for (CUDA programming guide, technical specifications per compute capability)."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

_UNKNOWN = 4  # where nothing was compiled: tensors on the host
_RESERVED = 1024  # bytes of shared memory that the system keeps for each program, from capability 8.0 on
_REGISTERS_AT_ONCE = 256  # that a warp is given
_MAX_PROGRAMS = 32
_REGISTERS = 65536  # of a multiprocessor, up to capability 12.0


class Limits(NamedTuple):
    """Of one multiprocessor; `shared` in bytes."""

    shared: int
    threads: int


def places(shared: int, registers: int, warps: int, limits: Limits) -> int:
    """Programs of `warps` warps with so many registers a thread and bytes of shared memory a program; at least one."""
    of_warp = -(-registers * 32 // _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE
    rooms = (
        limits.shared // (shared + _RESERVED),
        _REGISTERS // (of_warp * warps),
        limits.threads // (32 * warps),
        _MAX_PROGRAMS,
    )
    return max(1, min(rooms))


def places_of(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], device: torch.device) -> int:
    """Of `kernel` as it would be launched with these; compiles and loads it where that was not done before."""
    if device.type != "cuda":
        return _UNKNOWN
    compiled = kernel.warmup(*arguments, grid=(1, 1, 1), **constants)
    compiled[(1, 1, 1)]  # loads it, and so knows its registers
    return places(compiled.metadata.shared, compiled.n_regs, compiled.metadata.num_warps, _limits_of(device))


@cache
def _limits_of(device: torch.device) -> Limits:
    properties = torch.cuda.get_device_properties(device)
    return Limits(
        properties.shared_memory_per_multiprocessor,
        properties.max_threads_per_multi_processor,
    )
