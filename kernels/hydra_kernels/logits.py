"""Logits before and after a draw: biases, penalties and masks of the rows that have them, and log probabilities.

`adjust_logits` computes in float64 and rounds once; on a CPU adjusted logits stay float64. Two tokens compare
differently only if their adjusted logits are the same float32. A masked token gets the lowest finite number, whose
weight is 0 at every temperature, so that `sample` can tell masks from rows that are not finite. `score_tokens` divides
a row into parts: one launch lists the best logits of each, the next one merges them. Programs of rows that need nothing
return at once in both. Does not know requests, seeds or draws.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydra_kernels._checks import check_rows, check_vector, described
from hydra_kernels._sizes import cdiv, next_power_of_2

LOWEST_LOGIT = float(torch.finfo(torch.float32).min)  # of masked tokens

_COLUMNS = 2048  # per program of `adjust_logits`
_WARPS = 4
_PART_COLUMNS = 4096  # per part of `score_tokens`, up to _MAX_PARTS parts
_MAX_PARTS = 64
_MAX_WIDTH = 16384
_HIGHEST = tl.constexpr(-LOWEST_LOGIT)
_NO_ID = tl.constexpr((1 << 31) - 1)
# Columns of a captured step, at any multiple of 4 bytes.
_ANYWHERE = ["bias_begins", "bias_ends", "bias_ids", "bias_values", "penalties", "counted", "masked", "masks"]


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _adjust_kernel(
    logits: tl.tensor,
    adjusted: tl.tensor,
    bias_begins: tl.tensor,
    bias_ends: tl.tensor,
    bias_ids: tl.tensor,
    bias_values: tl.tensor,
    penalties: tl.tensor,
    counted: tl.tensor,
    counts: tl.tensor,
    masked: tl.tensor,
    masks: tl.tensor,
    stride_row: tl.tensor,
    VOCABULARY: tl.constexpr,
    WORDS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Stores `adjust_logits` of a tile of a row's columns. Grid (B, tiles of columns)."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS
    column = first + tl.arange(0, COLUMNS)
    inside = column < VOCABULARY
    raw = tl.load(logits + row * stride_row + column, mask=inside, other=0.0).to(tl.float32)
    begin, end = tl.load(bias_begins + row), tl.load(bias_ends + row)
    place, mask_row = tl.load(counted + row).to(tl.int64), tl.load(masked + row).to(tl.int64)
    result = raw
    if (begin < end) | (place >= 0) | (mask_row >= 0):
        score = raw.to(tl.float64)
        for entry in range(begin, end):
            token = tl.load(bias_ids + entry)
            if (token >= first) & (token < first + COLUMNS):
                score = tl.where(column == token, score + tl.load(bias_values + entry), score)
        if place >= 0:
            count = tl.load(counts + place * VOCABULARY + column, mask=inside, other=0)
            repetition = tl.load(penalties + row * 3)
            frequency, presence = tl.load(penalties + row * 3 + 1), tl.load(penalties + row * 3 + 2)
            score = tl.where(count != 0, tl.where(score > 0.0, score / repetition, score * repetition), score)
            times = count >> 1
            score = tl.where(times > 0, score - (frequency * times.to(tl.float64) + presence), score)
        bounded = tl.where(score > _HIGHEST, _HIGHEST, tl.where(score < -_HIGHEST, -_HIGHEST, score)).to(tl.float32)
        if mask_row >= 0:
            word = tl.load(masks + mask_row * WORDS + column // 32, mask=inside, other=0)
            bounded = tl.where(((word >> (column % 32)) & 1) != 0, bounded, -_HIGHEST)
        result = tl.where(tl.abs(raw) < float("inf"), bounded, raw)
    tl.store(adjusted + row * VOCABULARY + column, result, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["tokens", "num_top"])
def _score_part_kernel(
    logits: tl.tensor,
    tokens: tl.tensor,
    num_top: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    above: tl.tensor,
    best: tl.tensor,
    best_ids: tl.tensor,
    stride_row: tl.tensor,
    VOCABULARY: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    LISTED: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Scores one part of a row. Grid (B, PARTS).

    Writes its largest logit to `peaks`, the sum of exp(logit - largest) to `sums`, to `above` the number of tokens that
    precede the row's token (a larger logit, or an equal one and a lower id), and its first `num_top` logits and ids in
    that order to `best` and `best_ids`, [B, PARTS, LISTED]. Rows with a `num_top` of -1 are skipped; a logit that is
    not finite counts as minus infinity.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.load(num_top + row)
    if count < 0:
        return
    source = logits + row * stride_row
    offset = tl.arange(0, COLUMNS)
    column = part * WIDTH + offset
    inside = (offset < WIDTH) & (column < VOCABULARY)
    value = tl.load(source + column, mask=inside, other=float("-inf")).to(tl.float32)
    value = tl.where(tl.abs(value) < float("inf"), value, float("-inf"))
    token = tl.load(tokens + row)
    chosen = tl.load(source + token).to(tl.float32)
    peak = tl.maximum(tl.max(value, axis=0), -_HIGHEST)  # finite, for differences from it
    index = row * PARTS + part
    tl.store(peaks + index, peak)
    tl.store(sums + index, tl.sum(tl.where(inside, tl.exp(value - peak), 0.0), axis=0))
    before = inside & ((value > chosen) | ((value == chosen) & (column < token)))
    tl.store(above + index, tl.sum(before.to(tl.int32), axis=0))
    for place in range(0, count):
        highest = tl.max(value, axis=0)
        lowest_id = tl.min(tl.where(value == highest, column, _NO_ID), axis=0)
        tl.store(best + index * LISTED + place, highest)
        tl.store(best_ids + index * LISTED + place, lowest_id)
        value = tl.where(column == lowest_id, float("-inf"), value)


@triton.jit(do_not_specialize_on_alignment=["tokens", "num_top"])
def _score_kernel(
    logits: tl.tensor,
    tokens: tl.tensor,
    num_top: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    above: tl.tensor,
    best: tl.tensor,
    best_ids: tl.tensor,
    numbers: tl.tensor,
    places: tl.tensor,
    stride_row: tl.tensor,
    PARTS: tl.constexpr,
    LISTED: tl.constexpr,
    MOST: tl.constexpr,
) -> None:
    """Merges the parts of a row into `numbers` and `places`, the results of `score_tokens` with a `max_top` of MOST;
    skips rows with a `num_top` of -1. Grid (B,)."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(num_top + row)
    if count < 0:
        return
    part = row * PARTS + tl.arange(0, PARTS)
    peak = tl.load(peaks + part)
    highest = tl.max(peak, axis=0)
    total = tl.sum(tl.load(sums + part) * tl.exp(peak - highest), axis=0)
    target, ids = numbers + row * (3 + MOST), places + row * (1 + MOST)
    tl.store(target, tl.load(logits + row * stride_row + tl.load(tokens + row)).to(tl.float32))
    tl.store(target + 1, highest)
    tl.store(target + 2, total)
    tl.store(ids, 1 + tl.sum(tl.load(above + part), axis=0))
    entry = tl.arange(0, PARTS * LISTED)
    listed = entry % LISTED < count
    value = tl.load(best + row * PARTS * LISTED + entry, mask=listed, other=float("-inf"))
    token = tl.load(best_ids + row * PARTS * LISTED + entry, mask=listed, other=_NO_ID)
    for place in range(0, count):
        largest = tl.max(value, axis=0)
        lowest_id = tl.min(tl.where(value == largest, token, _NO_ID), axis=0)
        tl.store(target + 3 + place, largest)
        tl.store(ids + 1 + place, lowest_id)
        value = tl.where(token == lowest_id, float("-inf"), value)


def adjust_logits(
    logits: Tensor,
    bias_begins: Tensor,
    bias_ends: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    penalties: Tensor,
    counted: Tensor,
    counts: Tensor,
    masked: Tensor,
    masks: Tensor,
) -> Tensor:
    """Returns adjusted logits, [B, V] float32, contiguous, of logits [B, V] of a float type, rows at any stride.

    In this order, in float64, rounded once: row b gets bias_values[i] added to token bias_ids[i] for i in
    [bias_begins[b], bias_ends[b]); if counted[b] is not -1, penalties[b] = (repetition, frequency, presence) act by the
    counts of tokens, counts[counted[b]]: a token of prompt or output is divided by repetition if its logit is positive,
    else multiplied, and one that is n > 0 times in the output loses frequency * n + presence; if masked[b] is not -1,
    tokens whose bit is 0 in masks[masked[b]] get LOWEST_LOGIT. Results beyond float32 become its largest or lowest
    finite number. A logit that is not finite is kept.

    bias_begins, bias_ends, counted, masked: [B] int32; bias_ids: [N] int32; bias_values: [N] and penalties: [B, 3]
    float64; masks: [M, ceil(V / 32)] int32, token t is bit t % 32 of word t // 32; counts: [S, V] int32, 2 *
    occurrences in the request's output, + 1 if the token is in its prompt. All contiguous. Entries that a row refers to
    must be valid.
    """
    check_rows("logits", logits)
    batch, vocabulary = logits.shape
    device = logits.device
    for name, vector in (
        *(("bias_begins", bias_begins), ("bias_ends", bias_ends)),
        *(("counted", counted), ("masked", masked)),
    ):
        check_vector(name, vector, batch, torch.int32, device)
    check_vector("bias_ids", bias_ids, None, torch.int32, device)
    check_vector("bias_values", bias_values, bias_ids.shape[0], torch.float64, device)
    words = cdiv(vocabulary, 32)
    _check_table("penalties", penalties, (batch, 3), torch.float64, device)
    _check_table("counts", counts, (None, vocabulary), torch.int32, device)
    _check_table("masks", masks, (None, words), torch.int32, device)
    adjusted = torch.empty((batch, vocabulary), dtype=torch.float32, device=device)
    if batch and vocabulary:
        columns = min(_COLUMNS, next_power_of_2(vocabulary))
        _adjust_kernel[(batch, cdiv(vocabulary, columns))](
            *(logits, adjusted, bias_begins, bias_ends, bias_ids, bias_values),
            *(penalties, counted, counts, masked, masks, logits.stride(0)),
            VOCABULARY=vocabulary,
            WORDS=words,
            COLUMNS=columns,
            num_warps=_WARPS,
        )
    return adjusted


def score_tokens(logits: Tensor, tokens: Tensor, num_top: Tensor, max_top: int) -> tuple[Tensor, Tensor]:
    """Returns what log probabilities of a token are computed from: (numbers [B, 3 + max_top] float32, places [B, 1 +
    max_top] int32) of logits [B, V] of a float type.

    logits: rows at any stride, V from 1 to 1048576; tokens: [B] int64, below V; num_top: [B] int32, at most `max_top`,
    -1 skips the row. numbers: logit of the token, largest logit, sum of exp(logit - largest), then the num_top largest,
    descending. places: rank of the token, from 1, then the ids of the largest. Equal logits are ordered by id.
    Undefined: other entries, skipped rows, rows that are not finite, and entries beyond the V-th.
    """
    check_rows("logits", logits)
    batch, vocabulary = logits.shape
    device = logits.device
    check_vector("tokens", tokens, batch, torch.int64, device)
    check_vector("num_top", num_top, batch, torch.int32, device)
    parts = min(_MAX_PARTS, next_power_of_2(max(1, cdiv(vocabulary, _PART_COLUMNS))))
    width = cdiv(vocabulary, 16 * parts) * 16
    if not 0 < width <= _MAX_WIDTH:
        raise ValueError(f"logits: expected 1 to {_MAX_PARTS * _MAX_WIDTH} columns, got {vocabulary}")
    numbers = torch.empty((batch, 3 + max_top), dtype=torch.float32, device=device)
    places = torch.empty((batch, 1 + max_top), dtype=torch.int32, device=device)
    if batch == 0:
        return numbers, places
    listed = next_power_of_2(max(max_top, 1))
    peaks, sums = torch.empty((2, batch, parts), dtype=torch.float32, device=device)
    above = torch.empty((batch, parts), dtype=torch.int32, device=device)
    best = torch.empty((batch, parts, listed), dtype=torch.float32, device=device)
    best_ids = torch.empty((batch, parts, listed), dtype=torch.int32, device=device)
    scratch, stride = (peaks, sums, above, best, best_ids), logits.stride(0)
    columns = next_power_of_2(width)
    _score_part_kernel[(batch, parts)](
        *(logits, tokens, num_top, *scratch, stride),
        VOCABULARY=vocabulary,
        WIDTH=width,
        PARTS=parts,
        LISTED=listed,
        COLUMNS=columns,
        num_warps=_WARPS if columns <= _PART_COLUMNS else 2 * _WARPS,
    )
    _score_kernel[(batch,)](
        *(logits, tokens, num_top, *scratch, numbers, places, stride),
        PARTS=parts,
        LISTED=listed,
        MOST=max_top,
        num_warps=_WARPS,
    )
    return numbers, places


def _check_table(
    name: str, table: Tensor, shape: tuple[int | None, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Raises ValueError unless the table is contiguous, of `shape` (rows of None: any), `dtype` and `device`."""
    rows, columns = shape
    good = table.dim() == 2 and table.shape[1] == columns and rows in (None, table.shape[0])
    if not good or table.dtype is not dtype or not table.is_contiguous() or table.device != device:
        wanted = f"[{'M' if rows is None else rows}, {columns}] {dtype} on {device}"
        raise ValueError(f"{name}: expected contiguous {wanted}, got {described(table)}")
