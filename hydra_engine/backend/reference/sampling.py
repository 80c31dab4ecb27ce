"""Sampling in plain torch and float64, row by row: the oracle of the devices' own sampling.

The rules are defined in backend/base.py (`SamplingTensors`, `Adjustments`). Does not know requests or where random
numbers come from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hydra_engine.backend import checks
from hydra_engine.backend.base import LOWEST_LOGIT, Adjustments, SamplingTensors


def best_tokens(logits: Tensor) -> Tensor:
    """`Ops.best_tokens`."""
    checks.check_logits(logits)
    return torch.where(logits.isfinite().all(dim=1), logits.argmax(dim=1), -1)


def sample(logits: Tensor, sampling: SamplingTensors) -> tuple[Tensor, Tensor]:
    """`Ops.sample`. Columns of `sampling` may be float64 instead of float32, and then logits too."""
    checks.check_sample(logits, sampling)
    finite = logits.isfinite().all(dim=1)
    tokens = logits.argmax(dim=1)  # the first of equals; an arbitrary token for a row that is not finite
    for row in (finite & (sampling.temperatures > 0)).nonzero().flatten().tolist():
        temperature, top_k, top_p, min_p, number = (column[row].item() for column in sampling)
        kept, weights = _filtered(logits[row].double(), temperature, int(top_k), top_p, min_p)
        tokens[row] = kept[_drawn(weights, number)]
    return tokens, finite


def adjust_logits(logits: Tensor, adjustments: Adjustments) -> Tensor:
    """`Ops.adjust_logits`. Float64 logits, which stay float64, are not rounded. Bias ids of V or more are skipped."""
    checks.check_adjustments(logits, adjustments)
    adjusted = logits.clone()
    rows = (adjustments.bias_begins, adjustments.bias_ends, adjustments.counted, adjustments.masked)
    for row, (begin, end, counted, masked) in enumerate(zip(*(column.tolist() for column in rows), strict=True)):
        scores = logits[row].to(torch.float64, copy=True)
        if begin < end:
            ids, values = adjustments.bias_ids[begin:end].long(), adjustments.bias_values[begin:end]
            inside = ids < scores.shape[0]
            scores.index_add_(0, ids[inside], values[inside])
        if counted >= 0:
            repetition, frequency, presence = adjustments.penalties[row].tolist()
            counts = adjustments.counts[counted]
            seen = torch.where(scores > 0, scores / repetition, scores * repetition)
            scores = torch.where(counts != 0, seen, scores)
            times = counts >> 1
            scores = torch.where(times > 0, scores - (frequency * times.double() + presence), scores)
        changed = scores.clamp(LOWEST_LOGIT, -LOWEST_LOGIT).to(logits.dtype)
        if masked >= 0:
            bits = adjustments.masks[masked][:, None] >> torch.arange(32, dtype=torch.int32)
            changed = torch.where((bits & 1).flatten()[: len(scores)] != 0, changed, LOWEST_LOGIT)
        adjusted[row] = torch.where(logits[row].isfinite(), changed, logits[row])
    return adjusted


def score_tokens(logits: Tensor, tokens: Tensor, num_top: Tensor, max_top: int) -> tuple[Tensor, Tensor]:
    """`Ops.score_tokens`. Entries after num_top, and rows with num_top -1, are NaN in numbers and -1 in places."""
    batch, vocabulary = checks.check_scores(logits, tokens, num_top)
    numbers = torch.full((batch, 3 + max_top), float("nan"), dtype=logits.dtype)
    places = torch.full((batch, 1 + max_top), -1, dtype=torch.int32)
    ids = torch.arange(vocabulary)
    for row, (token, count) in enumerate(zip(tokens.tolist(), num_top.tolist(), strict=True)):
        if count < 0:
            continue
        raw = logits[row]
        chosen, largest = raw[token], raw.max()
        numbers[row, :3] = torch.stack((chosen, largest, (raw.double() - largest).exp().sum().to(raw.dtype)))
        places[row, 0] = 1 + int(((raw > chosen) | ((raw == chosen) & (ids < token))).sum())
        best, order = raw.sort(descending=True, stable=True)
        listed = min(count, vocabulary)
        numbers[row, 3 : 3 + listed], places[row, 1 : 1 + listed] = best[:listed], order[:listed].int()
    return numbers, places


def _filtered(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, Tensor]:
    """Applies temperature, top_k, top_p and min_p to logits [V] of one row. Returns (ids of the tokens that are left,
    ascending, their weights: probabilities scaled so that the largest is 1)."""
    scaled = (logits - logits.max()) / temperature
    kept = torch.arange(scaled.shape[0])
    if 0 < top_k < scaled.shape[0]:
        kept = (scaled >= scaled.topk(top_k).values[-1]).nonzero().flatten()  # ties with the k-th best stay
    weights = scaled[kept].exp()
    if top_p < 1.0:
        inside = _nucleus(weights, top_p)
        kept, weights = kept[inside], weights[inside]
    if min_p > 0.0:
        inside = weights >= min_p
        kept, weights = kept[inside], weights[inside]
    return kept, weights


def _nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Indices, ascending, of the fewest largest weights whose sum reaches `top_p` of the total, at least one; of equal
    weights those with the lowest indices."""
    ordered, order = weights.sort(descending=True, stable=True)
    before = torch.cat((ordered.new_zeros(1), ordered.cumsum(0)[:-1]))
    num_kept = max(1, int((before < top_p * weights.sum()).sum()))
    return order[:num_kept].sort().values


def _drawn(weights: Tensor, number: float) -> int:
    """The first index whose cumulative weight exceeds `number`, in [0, 1), times the total."""
    cumulative = weights.cumsum(0)
    total = cumulative[-1]
    # Rounding must not lift the mark to the total, which no index exceeds.
    mark = torch.minimum(number * total, torch.nextafter(total, torch.zeros_like(total)))
    return int(torch.searchsorted(cumulative, mark, right=True))
