"""torch's `_scaled_mm` as a GPU of compute capability 9.0 has it, on a processor, which lacks scales of blocks: what
aten/src/ATen/native/cuda/ScaledBlas.cpp asks of shapes, strides and types, and cuBLAS of scales of blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from hydra_engine.backend.quantized import FLOAT8

BLOCK = 128


def scaled_mm(
    rows: Tensor,
    weight: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    (num_rows, num_in), num_out = rows.shape, weight.shape[1]
    assert rows.dtype is weight.dtype is FLOAT8 and out_dtype is torch.bfloat16
    assert rows.is_contiguous() and weight.t().is_contiguous(), "row-major and column-major alone"
    assert weight.shape[0] == num_in and num_in % 16 == 0 and num_out % 16 == 0
    assert scale_a.dtype is scale_b.dtype is torch.float32 and bias is scale_result is None and not use_fast_accum
    wide, wide_weight = rows.float(), weight.float()
    if scale_a.shape == (num_rows, 1):
        assert scale_b.shape == (1, num_out) and scale_a.is_contiguous() and scale_b.is_contiguous()
        return (wide @ wide_weight * scale_a * scale_b).to(out_dtype)
    groups = -(-num_in // BLOCK)
    assert scale_a.shape == (num_rows, groups) and scale_a.stride() == (1, num_rows) and num_rows % 4 == 0
    assert scale_b.shape == (groups, -(-num_out // BLOCK)) and groups % 4 == 0
    assert scale_b.stride(0) == 1 and (num_out <= BLOCK or scale_b.stride(1) == groups)
    tall = scale_b.repeat_interleave(BLOCK, dim=1)[:, :num_out]
    parts = (wide.unflatten(1, (groups, -1)), wide_weight.unflatten(0, (groups, -1)))
    return torch.einsum("tgk,gkn,tg,gn->tn", *parts, scale_a, tall).to(out_dtype).contiguous()
