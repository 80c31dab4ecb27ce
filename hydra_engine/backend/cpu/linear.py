"""Matrix products, norms, gates and rotations of the native extension: functions with the contracts of `Ops`.

Allocates outputs and packed weights (so memory is accounted here), checks shapes and dtypes, and passes addresses. Does
not know instruction sets, threads or layouts; those are in csrc/cpu.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend import checks
from hydra_engine.backend.base import Activation, PackedLinear
from hydra_engine.backend.quantized import QuantizedWeight

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
ACTIVATION_CODES: dict[str, int] = {"none": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "quick_gelu": 4}

_ALIGNMENT = 64  # a cache line

Form = tuple[Any, ...]  # arguments of the extension for a packed weight, without its addresses


class NativeLinear:
    """A `PackedLinear` of floats in the kernels' layout, about the size of the original.

    A weight is converted to the dtype of 16-bit x, but not widened for float32 x. `dtype`: of the x that it multiplies.
    `data`: the packed bytes, uint8. `form`: describes them to the extension. `bias`: float32, padded.
    """

    __slots__ = ("bias", "data", "dtype", "form", "handle", "num_in", "num_out")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        rows: torch.dtype | None = None,
        allocate: Callable[[int], Tensor] | None = None,
    ) -> None:
        """Packs the weight into memory of `allocate`, uint8 of that many bytes, aligned to 64."""
        checks.check_linear(weight, bias)
        checks.check_device(torch.device("cpu"), (("weight", weight),))
        weight = weight if weight.shape[1] <= 1 or weight.stride(1) == 1 else weight.contiguous()
        dtype = weight.dtype if rows is None else rows
        if dtype is not torch.float32:
            weight = weight.to(dtype)
        form = *weight.shape, DTYPE_CODES[weight.dtype], DTYPE_CODES[dtype]
        data = (allocate or _MEMORY.allocate)(_C.packed_bytes(*form[:3]))
        self._keep(form, data, _padded_bias(bias, form[0]))
        if weight.numel():
            self.handle.pack(weight.data_ptr(), weight.stride(0))

    @classmethod
    def from_packed(cls, form: Form, data: Tensor, bias: Tensor | None) -> NativeLinear:
        """Returns a weight over bytes that were packed before, without a copy.

        form, bias: as in the packed weight. data: uint8, which begins with its `data`. Raises ValueError if these
        are too few bytes or not aligned to 64.
        """
        result = cls.__new__(cls)
        result._keep(form, _part(data, _C.packed_bytes(*form[:3])), bias)
        return result

    def _keep(self, form: Form, data: Tensor, bias: Tensor | None) -> None:
        """Sets the fields, and `handle` to the extension's weight over the memory of data and bias."""
        self.form, self.data, self.bias = form, data, bias
        self.num_out, self.num_in, _, rows = form
        self.dtype = _DTYPES[rows]
        addresses = data.data_ptr(), _address(bias)
        self.handle = _C.PackedWeight(*addresses, *form)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)


class NativeQuantizedLinear:
    """A `PackedLinear` in 8, 6 or 4 bits in the kernels' layout; x may have any compute dtype. Fields as of
    `NativeLinear`, without `dtype`."""

    __slots__ = ("bias", "data", "form", "handle", "num_in", "num_out")

    def __init__(
        self, weight: QuantizedWeight, bias: Tensor | None = None, allocate: Callable[[int], Tensor] | None = None
    ) -> None:
        """Packs the weight into memory of `allocate`, as `NativeLinear`."""
        checks.check_bias(bias, weight.num_out)
        values, scales = weight.values.contiguous(), weight.scales.contiguous()
        offsets, tops = (None if x is None else x.contiguous() for x in (weight.offsets, weight.block_scales))
        checks.check_device(torch.device("cpu"), (("values", values), ("scales", scales)))
        scale_dtype = torch.float32 if tops is not None else scales.dtype
        form: Form = (*weight.shape, scales.shape[1], weight.num_bits, DTYPE_CODES[scale_dtype])
        form += offsets is not None, tops is not None
        data = (allocate or _MEMORY.allocate)(_C.quantized_bytes(*form))
        self._keep(form, data, _padded_bias(bias, weight.num_out))
        if self.data.numel():
            self.handle.pack(values.data_ptr(), scales.data_ptr(), _address(offsets), _address(tops))

    @classmethod
    def from_packed(cls, form: Form, data: Tensor, bias: Tensor | None) -> NativeQuantizedLinear:
        """Returns a weight over packed bytes; parameters and errors as of `NativeLinear.from_packed`."""
        result = cls.__new__(cls)
        result._keep(form, _part(data, _C.quantized_bytes(*form)), bias)
        return result

    def _keep(self, form: Form, data: Tensor, bias: Tensor | None) -> None:
        """Sets the fields, and `handle` to the extension's weight over the memory of data and bias."""
        self.form, self.data, self.bias = form, data, bias
        self.num_out, self.num_in = form[:2]
        addresses = data.data_ptr(), _address(bias)
        self.handle = _C.PackedQuantized(*addresses, *form)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.bias is None else self.bias.nbytes)


def pack_linear(
    weight: Tensor | QuantizedWeight, bias: Tensor | None = None, rows: torch.dtype | None = None
) -> PackedLinear:
    """`Ops.pack_linear`."""
    if isinstance(weight, QuantizedWeight):
        return NativeQuantizedLinear(weight, bias)
    return NativeLinear(weight, bias, rows)


def linear(
    x: Tensor,
    weight: PackedLinear,
    *,
    act: Activation = "none",
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`Ops.linear`."""
    assert isinstance(weight, NativeLinear | NativeQuantizedLinear)
    dtype = weight.dtype if isinstance(weight, NativeLinear) else x.dtype
    rows, stride = checks.check_rows("x", x, weight.num_in, dtype)
    if out_dtype is None:
        out_dtype = x.dtype
    elif out_dtype is not torch.float32 and out_dtype is not x.dtype:
        raise ValueError(f"out_dtype: expected {x.dtype} or torch.float32, got {out_dtype}")
    address, residual_stride = 0, 0
    if residual is not None:
        _, residual_stride = checks.check_rows("residual", residual, weight.num_out, out_dtype, rows)
        address = residual.data_ptr()
    out = torch.empty((rows, weight.num_out), dtype=out_dtype)
    shared = x.data_ptr(), stride, rows, out.data_ptr(), activation_code(act)
    if isinstance(weight, NativeLinear):
        _C.linear(weight.handle, *shared, DTYPE_CODES[out_dtype], address, residual_stride)
    else:
        _C.linear_quantized(
            weight.handle, *shared, DTYPE_CODES[dtype], DTYPE_CODES[out_dtype], address, residual_stride
        )
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`Ops.rms_norm`."""
    if x.dim() == 3:
        stride, head_stride = checks.check_strided_heads("x", x, weight.shape[-1])
        tokens, heads, columns = x.shape
        shape: tuple[int, ...] = (tokens, heads, columns)
    else:
        tokens, stride = checks.check_rows("x", x, weight.shape[-1], x.dtype)
        heads, head_stride, columns = 1, 0, x.shape[1]
        shape = (tokens, columns)
    wide = checks.check_norm_weight(weight, x)
    out = torch.empty(shape, dtype=x.dtype)
    addresses = x.data_ptr(), stride, weight.data_ptr(), out.data_ptr()
    _C.rms_norm(*addresses, tokens, columns, eps, DTYPE_CODES[x.dtype], heads, head_stride, wide)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`Ops.add_rms_norm`. Overwrites `residual` with the sum, and returns it, if it is contiguous."""
    columns = x.shape[-1]
    rows, stride = checks.check_rows("x", x, weight.shape[-1], x.dtype)
    _, residual_stride = checks.check_rows("residual", residual, columns, x.dtype, rows)
    wide = checks.check_norm_weight(weight, x)
    out = torch.empty((rows, columns), dtype=x.dtype)
    total = residual if residual.is_contiguous() else torch.empty((rows, columns), dtype=x.dtype)
    inputs = x.data_ptr(), stride, residual.data_ptr(), residual_stride, weight.data_ptr()
    _C.add_rms_norm(*inputs, out.data_ptr(), total.data_ptr(), rows, columns, eps, DTYPE_CODES[x.dtype], wide)
    return out, total


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`Ops.layer_norm`."""
    columns = x.shape[-1]
    rows, stride = checks.check_rows("x", x, weight.shape[-1], x.dtype)
    checks.check_norm_weight(weight, x, wide=False)
    checks.check_norm_weight(bias, x, wide=False, name="bias")
    out = torch.empty((rows, columns), dtype=x.dtype)
    addresses = x.data_ptr(), stride, weight.data_ptr(), bias.data_ptr(), out.data_ptr()
    _C.layer_norm(*addresses, rows, columns, eps, DTYPE_CODES[x.dtype])
    return out


def act_and_mul(gate_up: Tensor, act: Activation) -> Tensor:
    """`Ops.act_and_mul`."""
    both = gate_up.shape[-1]
    rows, stride = checks.check_rows("gate_up", gate_up, both, gate_up.dtype)
    if both % 2 or both == 0:
        raise ValueError(f"gate_up: expected [T, 2 * F], got {checks.described(gate_up)}")
    width, dtype = both // 2, gate_up.dtype
    out = torch.empty((rows, width), dtype=dtype)
    _C.act_and_mul(gate_up.data_ptr(), stride, out.data_ptr(), rows, width, activation_code(act), DTYPE_CODES[dtype])
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`Ops.rotate`."""
    stride, head_stride, cos_stride, sin_stride = checks.check_rotate(x, cos, sin)
    tokens, heads, dim = x.shape
    out = torch.empty((tokens, heads, dim), dtype=x.dtype)
    angles = cos.data_ptr(), cos_stride, sin.data_ptr(), sin_stride
    _C.rotate(x.data_ptr(), stride, heads, head_stride, *angles, out.data_ptr(), tokens, dim, DTYPE_CODES[x.dtype])
    return out


def activation_code(act: str) -> int:
    """The extension's number of an activation. Raises ValueError for an unknown one."""
    code = ACTIVATION_CODES.get(act)
    if code is None:
        raise ValueError(f"act: expected one of {', '.join(ACTIVATION_CODES)}, got {act!r}")
    return code


def aligned(num_bytes: int) -> Tensor:
    """Allocates uninitialised uint8 [num_bytes], aligned to a cache line (64 bytes)."""
    # numpy asks for huge pages from 4 MiB on, which are read faster; torch does not.
    memory = torch.from_numpy(np.empty(num_bytes + _ALIGNMENT, dtype=np.uint8))
    offset = -memory.data_ptr() % _ALIGNMENT
    return memory[offset : offset + num_bytes]


class _Memory:
    """An allocator for packed weights. Those below 4 MiB share pieces of 32 MiB, so that they lie in huge pages too,
    from which a step reads weights a quarter faster. A piece is freed with the last of its weights. Thread-safe."""

    _PIECE = 32 << 20
    _LARGE = 4 << 20

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()

    def allocate(self, num_bytes: int) -> Tensor:
        """Returns uninitialised uint8 [num_bytes], aligned to a cache line."""
        if num_bytes >= self._LARGE:
            return aligned(num_bytes)
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            if size > len(self._left):
                self._left = aligned(self._PIECE)
            taken, self._left = self._left[:num_bytes], self._left[size:]
        return taken


_MEMORY = _Memory()


def _padded_bias(bias: Tensor | None, num_out: int) -> Tensor | None:
    """Copies the bias to float32, zero-padded to a multiple of 32 outputs (whole panels of the kernels); None for
    None."""
    if bias is None:
        return None
    padded = torch.zeros(-(-num_out // 32) * 32, dtype=torch.float32)
    padded[:num_out] = bias
    return padded


def _part(data: Tensor, num_bytes: int) -> Tensor:
    """The first `num_bytes` of data. Raises ValueError if there are fewer, or they are not aligned to a cache line."""
    if data.nbytes < num_bytes or data.data_ptr() % _ALIGNMENT:
        raise ValueError(f"data: expected {num_bytes} bytes aligned to {_ALIGNMENT}, got {data.nbytes}")
    return data[:num_bytes]


def _address(tensor: Tensor | None) -> int:
    """The tensor's address, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
