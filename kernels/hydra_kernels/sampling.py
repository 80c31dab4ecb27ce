"""Greedy choice and the check for finite logits in one pass over them. Bound by memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydra_kernels._checks import check_rows

_COLUMNS = 8192  # per step
_WARPS = 16


@triton.jit
def _greedy_kernel(
    logits: tl.tensor,
    tokens: tl.tensor,
    finite: tl.tensor,
    stride_row: tl.tensor,
    VOCABULARY: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Every lane keeps its best value and where it first saw it; lanes are joined once at the end."""
    row = tl.program_id(0).to(tl.int64)
    best = tl.full([COLUMNS], float("-inf"), tl.float32)
    place = tl.zeros([COLUMNS], tl.int32)
    bad = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, VOCABULARY, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < VOCABULARY
        value = tl.load(logits + row * stride_row + column, mask=inside, other=0.0).to(tl.float32)
        bad = tl.where(tl.abs(value) < float("inf"), bad, 1)
        better = inside & (value > best)
        best = tl.where(better, value, best)
        place = tl.where(better, column, place)
    highest = tl.max(best, axis=0)
    tl.store(tokens + row, tl.min(tl.where(best == highest, place, VOCABULARY - 1), axis=0).to(tl.int64))
    tl.store(finite + row, tl.max(bad, axis=0) == 0)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [B, V] of a float type, rows at any stride -> (tokens [B] int64, finite [B] bool).

    A token is the lowest id with the row's highest logit; `finite` says that every logit of the row is a number. The
    token of a row that is not finite is some valid id.
    """
    check_rows("logits", logits)
    batch, vocabulary = logits.shape
    if vocabulary == 0:
        raise ValueError("logits: expected [B, V] with V > 0, got V = 0")
    tokens = torch.empty(batch, dtype=torch.int64, device=logits.device)
    finite = torch.empty(batch, dtype=torch.bool, device=logits.device)
    if batch:
        _greedy_kernel[(batch,)](
            logits, tokens, finite, logits.stride(0), VOCABULARY=vocabulary, COLUMNS=_COLUMNS, num_warps=_WARPS
        )
    return tokens, finite
