"""Argument checks of the wrappers; errors name the argument, with expected and actual.

They look at shapes, dtypes, strides and devices, never at contents, so they do not synchronise.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def described(tensor: Tensor) -> str:
    """Shape, dtype, strides and device, for an error message."""
    return f"{list(tensor.shape)} {tensor.dtype} with strides {list(tensor.stride())} on {tensor.device}"


def check_rows(name: str, x: Tensor, like: Tensor | None = None) -> None:
    """Raises ValueError unless x is [T, C] of a compute dtype with a dense last dimension, and has the shape, dtype and
    device of `like`, if given. `name`: of the argument."""
    good = x.dim() == 2 and x.dtype in FLOATS and _is_dense(x)
    if like is not None:
        good = good and x.shape == like.shape and x.dtype is like.dtype and x.device == like.device
    if not good:
        wanted = "[T, C] of a float type" if like is None else f"{list(like.shape)} {like.dtype} on {like.device}"
        raise ValueError(f"{name}: expected {wanted} with a dense last dimension, got {described(x)}")


def check_heads(name: str, x: Tensor, like: Tensor | None = None) -> None:
    """Raises ValueError unless x is [T, H, D] of a compute dtype with D > 0 and a dense last dimension, tokens and
    heads at any stride, and has the head dim, dtype and device of `like`, if given. `name`: of the argument."""
    good = x.dim() == 3 and x.dtype in FLOATS and _is_dense(x) and x.shape[2] > 0
    if like is not None:
        good = good and x.shape[2] == like.shape[-1] and x.dtype is like.dtype and x.device == like.device
    if not good:
        wanted = "D] of a float type" if like is None else f"{like.shape[-1]}] {like.dtype} on {like.device}"
        raise ValueError(f"{name}: expected [T, H, {wanted} with a dense last dimension, got {described(x)}")


def check_vector(name: str, x: Tensor, count: int | None, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError unless x is a contiguous [count] of `dtype` on `device`; a count of None allows any length.
    `name`: of the argument."""
    if (
        x.dim() != 1
        or (count is not None and x.shape[0] != count)
        or x.dtype is not dtype
        or not x.is_contiguous()
        or x.device != device
    ):
        wanted = "M" if count is None else count
        raise ValueError(f"{name}: expected contiguous [{wanted}] {dtype} on {device}, got {described(x)}")


def check_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    num_context: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
) -> int:
    """Checks the arguments of paged attention. Returns Hq / Hkv; raises ValueError for a wrong one.

    q: [T, Hq, D]; k_cache, v_cache: [N, S, Hkv, D] with equal strides, of q's dtype or, with `scales`, int8;
    block_tables: [B, max_blocks] int32 with dense rows; num_context: [B] int32; scales: of int8 caches, [N, Hkv, S]
    float32 with dense blocks. All on one device.
    """
    check_heads("q", q)
    wanted = q.dtype if scales is None else torch.int8
    if k_cache.dim() != 4 or k_cache.shape[3] != q.shape[2] or k_cache.dtype is not wanted or not _is_dense(k_cache):
        raise ValueError(
            f"k_cache: expected [N, S, Hkv, {q.shape[2]}] {wanted} with a dense last dimension, "
            f"got {described(k_cache)}"
        )
    if scales is not None:
        num_blocks, size, heads = k_cache.shape[:3]
        stride = scales[0].stride(0)
        for one in scales:
            good = one.shape == (num_blocks, heads, size) and one.dtype is torch.float32 and one.device == q.device
            if not good or one.stride() != (stride, size, 1):
                raise ValueError(f"scales: expected two of [{num_blocks}, {heads}, {size}], got {described(one)}")
    if v_cache.shape != k_cache.shape or v_cache.stride() != k_cache.stride() or v_cache.dtype is not k_cache.dtype:
        raise ValueError(f"v_cache: expected what k_cache is, {described(k_cache)}, got {described(v_cache)}")
    if q.shape[1] == 0 or k_cache.shape[2] == 0 or q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"q: expected a multiple of {k_cache.shape[2]} KV heads, got {q.shape[1]} heads")
    check_vector("num_context", num_context, None, torch.int32, q.device)
    batch = num_context.shape[0]
    if (
        block_tables.dim() != 2
        or block_tables.shape[0] != batch
        or block_tables.dtype is not torch.int32
        or not _is_dense(block_tables)
    ):
        raise ValueError(
            f"block_tables: expected [{batch}, max_blocks] torch.int32 with dense rows, got {described(block_tables)}"
        )
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache), ("block_tables", block_tables)):
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected a tensor on {q.device} like q, got {described(tensor)}")
    return q.shape[1] // k_cache.shape[2]


def output(out: Tensor | None, q: Tensor) -> Tensor:
    """The tensor for the result of attention of q [T, H, D]: `out`, or a new one if that is None. Raises ValueError
    unless `out` is contiguous, of q's shape and dtype and on its device."""
    if out is None:
        return q.new_empty(q.shape)
    if out.shape != q.shape or out.dtype is not q.dtype or out.device != q.device or not out.is_contiguous():
        raise ValueError(f"out: expected contiguous {list(q.shape)} {q.dtype} on {q.device}, got {described(out)}")
    return out


def check_scale(scale: float) -> None:
    """Raises ValueError unless the scale is positive, since kernels look for the maximum before they scale."""
    if not scale > 0:
        raise ValueError(f"scale: expected a positive number, got {scale}")


def _is_dense(x: Tensor) -> bool:
    return x.stride(-1) == 1 or x.shape[-1] <= 1
