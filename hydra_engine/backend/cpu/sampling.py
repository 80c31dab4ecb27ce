"""Sampling on the native extension, multithreaded over rows (csrc/cpu/sampling).

Computed in float64, with the rules of worker/language/sampler.py. Logits are float32 or float64, and results that are
logits have their dtype: float64 logits are not rounded on the way, so tokens are those of the sampler.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend import checks
from hydra_engine.backend.base import Adjustments, SamplingTensors


def best_tokens(logits: Tensor) -> Tensor:
    """`Ops.best_tokens`."""
    rows, columns = checks.check_logits(logits)
    tokens = torch.empty(rows, dtype=torch.int64)
    _C.best_of_rows(logits.data_ptr(), logits.stride(0), rows, columns, tokens.data_ptr())
    return tokens


def sample(logits: Tensor, sampling: SamplingTensors) -> tuple[Tensor, Tensor]:
    """`Ops.sample`. The columns of numbers may be float64, as logits may be then."""
    rows, _ = checks.check_sample(logits, sampling)
    numbers = (sampling.temperatures, sampling.top_p, sampling.min_p, sampling.numbers)
    temperatures, top_p, min_p, drawn = (column.double().contiguous() for column in numbers)
    top_k = sampling.top_k.contiguous()
    tokens, finite = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
    columns = (temperatures, top_k, top_p, min_p, drawn, tokens, finite)
    _C.sample(*_described(logits), *(column.data_ptr() for column in columns))
    return tokens, finite


def adjust_logits(logits: Tensor, adjustments: Adjustments) -> Tensor:
    """`Ops.adjust_logits`."""
    checks.check_adjustments(logits, adjustments)
    begins, ends, ids, values, penalties, counted, counts, masked, masks = (part.contiguous() for part in adjustments)
    out = torch.empty(logits.shape, dtype=logits.dtype)
    _C.adjust_logits(
        *_described(logits),
        begins.data_ptr(),
        ends.data_ptr(),
        ids.data_ptr(),
        values.data_ptr(),
        len(ids),
        penalties.data_ptr(),
        counted.data_ptr(),
        counts.data_ptr(),
        len(counts),
        masked.data_ptr(),
        masks.data_ptr(),
        len(masks),
        out.data_ptr(),
    )
    return out


def score_tokens(logits: Tensor, tokens: Tensor, num_top: Tensor, max_top: int) -> tuple[Tensor, Tensor]:
    """`Ops.score_tokens`. `numbers` have the logits' dtype."""
    rows, _ = checks.check_scores(logits, tokens, num_top)
    tokens, num_top = tokens.contiguous(), num_top.contiguous()
    numbers = torch.full((rows, 3 + max_top), float("nan"), dtype=logits.dtype)
    places = torch.full((rows, 1 + max_top), -1, dtype=torch.int32)
    columns = (tokens.data_ptr(), num_top.data_ptr(), max_top, numbers.data_ptr(), places.data_ptr())
    _C.score_tokens(*_described(logits), *columns)
    return numbers, places


def _described(logits: Tensor) -> tuple[int, int, int, int, bool]:
    return logits.data_ptr(), logits.stride(0), *logits.shape, logits.dtype is torch.float64
