"""Linear layers on a CUDA device: cuBLAS through torch, and Triton kernels where it is slow or not batch-invariant.

Which of them computes a call is decided in one place, `implementation`, from the number of rows. Sums are float32
everywhere. cuBLAS adds a bias, or a residual where there is no bias, to the sums before it rounds; an activation, or a
residual beside a bias, acts on its rounded product. Does not know layers.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hydra_engine.backend import checks
from hydra_engine.backend.base import Activation, PackedLinear
from hydra_engine.backend.reference.ops import PlainLinear
from hydra_kernels.activation import ACTIVATIONS
from hydra_kernels.epilogue import finish
from hydra_kernels.linear import invariant_linear, small_linear

Implementation = Literal["cublas", "small", "invariant"]

SMALL_ROWS = 16  # up to so many rows a product reads its weight at the speed of memory, if all of the device reads


def implementation(rows: int, *, deterministic: bool) -> Implementation:
    if deterministic:
        return "invariant"
    return "small" if rows <= SMALL_ROWS else "cublas"


def linear(
    x: Tensor,
    weight: PackedLinear,
    *,
    act: Activation = "none",
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    deterministic: bool,
) -> Tensor:
    assert isinstance(weight, PlainLinear)
    dtype = out_dtype or x.dtype
    _check(x, weight, act, residual, dtype)
    if x.shape[0] == 0:
        return torch.empty((0, weight.num_out), dtype=dtype, device=x.device)
    chosen = implementation(x.shape[0], deterministic=deterministic)
    if chosen == "cublas":
        return _cublas(x, weight, act, residual, dtype)
    own = small_linear if chosen == "small" else invariant_linear
    result: Tensor = own(x, weight.weight, weight.bias, residual=residual, act=act, out_dtype=dtype)
    return result


def _cublas(x: Tensor, weight: PlainLinear, act: Activation, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
    if dtype is not x.dtype:
        # cuBLAS gives the sums of 16-bit operands too, before any rounding.
        wide = x.dtype is torch.float32
        sums = F.linear(x, weight.weight) if wide else torch.mm(x, weight.weight.t(), out_dtype=torch.float32)
        return finish(sums, weight.bias, residual, act, dtype)
    if act == "none" and residual is not None and weight.bias is None:
        return torch.addmm(residual, x, weight.weight.t())
    product = F.linear(x, weight.weight, weight.bias)
    return product if act == "none" and residual is None else finish(product, None, residual, act, dtype)


def _check(x: Tensor, weight: PlainLinear, act: Activation, residual: Tensor | None, dtype: torch.dtype) -> None:
    device = weight.weight.device
    rows, _ = checks.check_rows("x", x, weight.num_in, weight.weight.dtype, on_host=False)
    checks.check_device(device, (("x", x),))
    if act != "none" and act not in ACTIVATIONS:
        raise ValueError(f"act: expected none, {', '.join(ACTIVATIONS)}, got {act!r}")
    if residual is not None:
        if residual.shape != (rows, weight.num_out) or residual.dtype is not dtype:
            wanted = f"[{rows}, {weight.num_out}] {dtype}"
            raise ValueError(f"residual: expected {wanted}, got {checks.described(residual)}")
        checks.check_device(device, (("residual", residual),))
