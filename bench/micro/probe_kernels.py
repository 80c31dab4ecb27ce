"""A Triton kernel that only measures: so small that its launch is what it costs.

Imported on machines with a GPU alone. Does not know what the measurement is for.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def dependent_add_kernel(x: tl.tensor) -> None:
    """x += 1, waiting for the kernel before it as late as possible."""
    gdc_launch_dependents()
    gdc_wait()
    tl.store(x, tl.load(x) + 1.0)


def dependent_add(x: Tensor) -> None:
    """Launched so that it may start before its predecessor has ended (compute capability 9.0)."""
    dependent_add_kernel[(1,)](x, num_warps=1, launch_pdl=True)
