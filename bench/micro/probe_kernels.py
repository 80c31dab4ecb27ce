"""Triton kernels that only measure: a streaming read, and a kernel so small that its launch is what it costs.

Imported on machines with a GPU alone. Does not know what the measurements are for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_BLOCK = 8192
_PROGRAMS_PER_SM = 8


@triton.jit
def stream_sum_kernel(words: tl.tensor, sums: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Program p adds up blocks p, p + programs, .. of `words` and writes one number."""
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    step = tl.num_programs(0) * BLOCK
    for begin in range(tl.program_id(0) * BLOCK, count, step):
        total += tl.load(words + begin + offsets.to(tl.int64), mask=begin + offsets < count, other=0.0)
    tl.store(sums + tl.program_id(0), tl.sum(total))


@triton.jit
def dependent_add_kernel(x: tl.tensor) -> None:
    """x += 1, waiting for the kernel before it as late as possible."""
    gdc_launch_dependents()
    gdc_wait()
    tl.store(x, tl.load(x) + 1.0)


def stream_sum(words: Tensor) -> Tensor:
    """[programs] float32, whose sum is that of `words`, float32 and contiguous, of fewer than 2^31 numbers."""
    programs = _PROGRAMS_PER_SM * torch.cuda.get_device_properties(words.device).multi_processor_count
    sums = torch.empty(programs, dtype=torch.float32, device=words.device)
    stream_sum_kernel[(programs,)](words, sums, words.numel(), BLOCK=_BLOCK, num_warps=8)
    return sums


def dependent_add(x: Tensor) -> None:
    """Launched so that it may start before its predecessor has ended (compute capability 9.0)."""
    dependent_add_kernel[(1,)](x, num_warps=1, launch_pdl=True)
