"""Linear layers on a CUDA device: cuBLAS through torch, and Triton kernels where it is slow or not batch-invariant.

`implementation` decides by the number of rows. Sums are float32 everywhere. cuBLAS adds a bias, or a residual if there
is no bias, before it rounds; an activation, or a residual beside a bias, acts on its rounded product. Quantised weights
take Triton kernels, which multiply unrounded x with the exact dequantised weight. Exception: weights of 8-bit floats
multiply more than 16 rows of bfloat16 on FP8 tensor cores (compute capability 8.9 and newer); x is rounded as in
`backend/quantized.py`, and bias, activation and residual act on the rounded product. Rows of 16-bit operands begin at
multiples of 16 bytes, zero-padded: all these kernels load 16 bytes, and cuBLAS is several times slower otherwise. Does
not know layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hydra_engine.backend import checks
from hydra_engine.backend.base import Activation, PackedLinear
from hydra_engine.backend.quantized import FLOAT8, FLOAT8_BLOCK, QuantizedWeight, float8_block_scales
from hydra_engine.backend.reference.ops import PlainLinear
from hydra_kernels._common import capability_of
from hydra_kernels.activation import ACTIVATIONS
from hydra_kernels.epilogue import finish
from hydra_kernels.float8_rows import round_rows
from hydra_kernels.linear import invariant_linear, small_linear
from hydra_kernels.quantized_linear import (
    MAX_SMALL_ROWS,
    invariant_quantized_linear,
    pack,
    small_quantized_linear,
)

Implementation = Literal["cublas", "small", "invariant", "scaled"]

WIDTH_STEP = 8  # numbers of 16 bits in 16 bytes
SMALL_ROWS = 16  # most rows of the small kernels, which are bound by reading the weight

QUANTIZED_STEPS = (1, MAX_SMALL_ROWS, MAX_SMALL_ROWS + 1)  # numbers of rows, one for each compiled kernel


class CudaLinear(PlainLinear):
    """A weight [num_out, num_in + padding]: `padding` zeros after the inputs of 16-bit weights.

    Rows of x are padded, that is copied, at each call; layers with large rows avoid that by `Ops.width_step`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(weight, bias, dtype)
        self.padding = -self.num_in % WIDTH_STEP if dtype.itemsize == 2 else 0
        if self.padding:
            self.weight = F.pad(self.weight, (0, self.padding))


class QuantizedCudaLinear:
    """A quantised `PackedLinear`, with 8 or 4 bits per number, in its kernel's layout, and with the bias in float32."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        checks.check_bias(bias, weight.num_out)
        self.num_out, self.num_in = weight.shape
        weight = weight.flatten_scales()
        self.weight = pack(weight.values, weight.scales, weight.offsets, weight.num_bits)
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.tensor_core_scales = _tensor_core_scales(weight)
        self.has_been_used = False

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors, each counted once."""
        blocks = self.tensor_core_scales if self.weight.group_size == FLOAT8_BLOCK else None  # else counted already
        parts = (self.weight.words, self.weight.scales, self.weight.offsets, self.bias, blocks)
        return sum(part.nbytes for part in parts if part is not None)


def _tensor_core_scales(weight: QuantizedWeight) -> Tensor | None:
    """Scales for `torch._scaled_mm` with the weight [K, num_out], or None if it cannot multiply the weight.

    [1, num_out], or for blocks [K / 128, ceil(num_out / 128)] with inputs contiguous (compute capability 9.0 only,
    where cuBLAS reads them four at a time).
    """
    capability = capability_of(weight.values.device)
    if not weight.is_float or capability < 89 or weight.num_out % 16:
        return None
    scales = weight.scales.float()
    if weight.group_size == weight.num_in:
        return scales.t().contiguous()
    if weight.group_size != FLOAT8_BLOCK or weight.num_in % (4 * FLOAT8_BLOCK) or capability != 90:
        return None
    blocks = float8_block_scales(scales)
    return None if blocks is None else blocks.t()


def implementation(
    rows: int, *, deterministic: bool, quantized: bool = False, rounds_rows: bool = False
) -> Implementation:
    """Chooses the kernel for x of `rows` rows: "cublas"; "small", bound by reading the weight; "invariant", with one
    order of sums for any number of rows; "scaled", on FP8 tensor cores.

    rounds_rows: "scaled", which rounds x, may multiply this quantised weight.
    """
    if deterministic:
        return "invariant"
    if quantized and rounds_rows and rows > SMALL_ROWS:
        return "scaled"
    if quantized:
        return "small" if rows <= MAX_SMALL_ROWS else "invariant"
    return "small" if rows <= SMALL_ROWS else "cublas"


def fused(x: Tensor, weights: Sequence[PackedLinear], *, deterministic: bool) -> CudaLinear | None:
    """The weight, if one launch can compute its product with x and the op that follows; else None.

    That needs 1 to SMALL_ROWS rows, one weight, neither quantised nor padded, and `deterministic` False.
    """
    (weight, *others), rows = weights, x.shape[0]
    small = implementation(rows, deterministic=deterministic) == "small"
    if not small or not rows or others or not isinstance(weight, CudaLinear) or weight.padding:
        return None
    return weight


def leaves_residual(rows: int, weight: PackedLinear, *, deterministic: bool) -> bool:
    """True if `linear` would add a residual to cuBLAS's rounded product by a second launch; the launch of a norm that
    follows can then add it instead, with the same bits."""
    if not isinstance(weight, CudaLinear) or weight.bias is None or not rows:
        return False
    return implementation(rows, deterministic=deterministic) == "cublas"


def linear(
    x: Tensor,
    weight: PackedLinear,
    *,
    act: Activation = "none",
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    deterministic: bool,
) -> Tensor:
    """Implements `Ops.linear`. deterministic: a row's result does not depend on the number of rows."""
    assert isinstance(weight, (CudaLinear, QuantizedCudaLinear))  # `A | B` would build a union at every call
    dtype = out_dtype or x.dtype
    _check(x, weight, act, residual, dtype)
    if x.shape[0] == 0:
        return torch.empty((0, weight.num_out), dtype=dtype, device=x.device)
    if isinstance(weight, QuantizedCudaLinear):
        return _quantized(x, weight, act, residual, dtype, deterministic=deterministic)
    if weight.padding:
        x = F.pad(x, (0, weight.padding))
    chosen = implementation(x.shape[0], deterministic=deterministic)
    if chosen == "cublas":
        return _cublas(x, weight, act, residual, dtype)
    own = small_linear if chosen == "small" else invariant_linear
    result: Tensor = own(x, weight.weight, weight.bias, residual=residual, act=act, out_dtype=dtype)
    return result


def _quantized(
    x: Tensor,
    weight: QuantizedCudaLinear,
    act: Activation,
    residual: Tensor | None,
    dtype: torch.dtype,
    *,
    deterministic: bool,
) -> Tensor:
    """Multiplies by a quantised weight. The weight's first product, unless deterministic, also launches the kernels for
    all other numbers of rows, on zeros, so that a warm-up compiles them."""
    if not weight.has_been_used and not deterministic:
        weight.has_been_used = True
        for rows in (*QUANTIZED_STEPS, SMALL_ROWS + 1):
            added = None if residual is None else residual.new_zeros(rows, weight.num_out)
            _quantized(x.new_zeros(rows, weight.num_in), weight, act, added, dtype, deterministic=deterministic)
    rounds_rows = weight.tensor_core_scales is not None and x.dtype is dtype is torch.bfloat16
    chosen = implementation(x.shape[0], deterministic=deterministic, quantized=True, rounds_rows=rounds_rows)
    if chosen == "scaled" and weight.tensor_core_scales is not None:
        return _scaled(x, weight, weight.tensor_core_scales, act, residual)
    own = small_quantized_linear if chosen == "small" else invariant_quantized_linear
    result: Tensor = own(x, weight.weight, weight.bias, residual=residual, act=act, out_dtype=dtype)
    return result


def _scaled(x: Tensor, weight: QuantizedCudaLinear, scales: Tensor, act: Activation, residual: Tensor | None) -> Tensor:
    """Multiplies bfloat16 rows, which it rounds to 8-bit floats, on FP8 tensor cores, with float32 sums (no fast
    accumulation); rounds before bias, activation and residual. scales: from `_tensor_core_scales`."""
    numbers, group_size = weight.weight.words.view(FLOAT8), weight.weight.group_size
    rows, steps = round_rows(x, weight.weight.words.shape[1], group_size)
    product = torch._scaled_mm(rows, numbers.t(), scale_a=steps, scale_b=scales, out_dtype=x.dtype)[: x.shape[0]]
    if act == "none" and residual is None and weight.bias is None:
        return product
    return finish(product, weight.bias, residual, act, x.dtype)


def _cublas(x: Tensor, weight: CudaLinear, act: Activation, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiplies by cuBLAS. A result of another dtype than x's is computed from the float32 sums; otherwise an
    activation, or a residual beside a bias, acts on the rounded product."""
    if dtype is not x.dtype:
        # cuBLAS gives the sums of 16-bit operands too, before any rounding.
        wide = x.dtype is torch.float32
        sums = F.linear(x, weight.weight) if wide else torch.mm(x, weight.weight.t(), out_dtype=torch.float32)
        if dtype is torch.float32 and act == "none" and weight.bias is None and residual is None:
            return sums
        return finish(sums, weight.bias, residual, act, dtype)
    if act == "none" and residual is not None and weight.bias is None:
        return torch.addmm(residual, x, weight.weight.t())
    product = F.linear(x, weight.weight, weight.bias)
    return product if act == "none" and residual is None else finish(product, None, residual, act, dtype)


def _check(
    x: Tensor,
    weight: CudaLinear | QuantizedCudaLinear,
    act: Activation,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> None:
    """Raises ValueError unless x, `act` and the residual fit the weight. dtype: of the result."""
    if isinstance(weight, QuantizedCudaLinear):
        device, wanted_dtype = weight.weight.words.device, x.dtype
    else:
        device, wanted_dtype = weight.weight.device, weight.weight.dtype
    rows, _ = checks.check_rows("x", x, weight.num_in, wanted_dtype, on_host=False)
    if x.device != device:
        checks.check_device(device, (("x", x),))
    if act != "none" and act not in ACTIVATIONS:
        raise ValueError(f"act: expected none, {', '.join(ACTIVATIONS)}, got {act!r}")
    if residual is not None:
        if residual.shape != (rows, weight.num_out) or residual.dtype is not dtype:
            wanted = f"[{rows}, {weight.num_out}] {dtype}"
            raise ValueError(f"residual: expected {wanted}, got {checks.described(residual)}")
        checks.check_device(device, (("residual", residual),))
