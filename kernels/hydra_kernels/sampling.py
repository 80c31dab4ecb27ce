"""Tokens from logits: greedy, and draws with top_k, top_p and min_p without a sort.

A row is divided into parts of equal width, 1 to 32 by the size of the vocabulary alone, so that many programs read a
step of one request and a row's token never depends on the batch. `_scan_kernel` reads the logits, `_narrow_kernel`
lists what a filtered row can keep, mostly a few hundred ids, and `_draw_kernel` finds the exact threshold on that list
by bisection over the order-preserving integers of float32.

Does not know penalties, masks, seeds or logprobs. Meaning and ties are as in
hydra_engine/backend/reference/sampling.py, which computes in float64; here weights and sums are float32, in an order
fixed by the vocabulary. Tokens differ only if `numbers`, top_p or min_p is within that rounding of the boundary between
two tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydra_kernels._checks import check_rows, check_vector
from hydra_kernels._draws import apply_filters, lower_bound, part_weights, scale_of, walk, weight_of
from hydra_kernels._sizes import cdiv, next_power_of_2

_COLUMNS = 8192  # per loop step over a row
_LISTED = 2048  # per loop step over a row's list
_WARPS = 16
_PART_COLUMNS = 2048  # per loop step over a part
_PART_WARPS = 4
_MAX_PARTS = 32
_MAX_WIDTH = 32752  # of a part: offsets in it are int16
_GROUPS = 64  # groups of a part's columns; their maxima bound the k-th largest logit from below
_BOUND_STEPS = 20  # bisection steps for that bound, which need not be exact
# One number per row. As columns of a captured step they are at any multiple of 4 bytes.
_ANYWHERE = ["temperatures", "top_k", "top_p", "min_p", "numbers"]


@triton.jit
def _greedy_kernel(
    logits: tl.tensor,
    tokens: tl.tensor,
    finite: tl.tensor,
    stride_row: tl.tensor,
    VOCABULARY: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Stores the results of `greedy` for one row. Grid (B,)."""
    row = tl.program_id(0).to(tl.int64)
    best, place, bad = _best(logits + row * stride_row, 0, VOCABULARY, VOCABULARY, COLUMNS)
    highest = tl.max(best, axis=0)
    tl.store(tokens + row, tl.min(tl.where(best == highest, place, VOCABULARY - 1), axis=0).to(tl.int64))
    tl.store(finite + row, tl.max(bad, axis=0) == 0)


@triton.jit
def _best(
    logits: tl.tensor, first: tl.tensor, end: tl.tensor, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns three tensors [COLUMNS]: the largest value, the first column with it, and 1 if a value is not finite,
    else 0. Entry i is of columns first + i, first + i + COLUMNS, .. of [first, end), which has at most WIDTH."""
    best = tl.full([COLUMNS], float("-inf"), tl.float32)
    place = tl.zeros([COLUMNS], tl.int32)
    bad = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, WIDTH, COLUMNS):
        column = first + start + tl.arange(0, COLUMNS)
        inside = column < end
        value = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
        bad = tl.where(tl.abs(value) < float("inf"), bad, 1)
        better = inside & (value > best)
        best = tl.where(better, value, best)
        place = tl.where(better, column, place)
    return best, place, bad


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _scan_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    peaks: tl.tensor,
    places: tl.tensor,
    sums: tl.tensor,
    stride_row: tl.tensor,
    VOCABULARY: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Scans one part of a row. Grid (B, PARTS).

    Writes peaks: [B, PARTS, GROUPS], the largest logits of groups of columns; places: [B, PARTS], the lowest id with
    the part's largest logit, -1 if a logit is not finite; sums: [B, PARTS], the sum of weights relative to the part's
    largest, of finite parts of rows with a temperature above 0.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = logits + row * stride_row
    first = part * WIDTH
    end = tl.minimum(first + WIDTH, VOCABULARY)
    best, place, bad = _best(source, first, end, WIDTH, COLUMNS)
    highest = tl.max(best, axis=0)
    index = row * PARTS + part
    groups = tl.max(tl.reshape(best, [GROUPS, COLUMNS // GROUPS]), axis=1)
    tl.store(peaks + index * GROUPS + tl.arange(0, GROUPS), groups)
    found = tl.min(tl.where(best == highest, place, VOCABULARY - 1), axis=0)
    good = tl.max(bad, axis=0) == 0
    tl.store(places + index, tl.where(good, found, -1))
    temperature = tl.load(temperatures + row)
    if good & (temperature > 0.0):
        scale = scale_of(temperature)
        total = tl.zeros([COLUMNS], tl.float32)
        for start in range(0, WIDTH, COLUMNS):
            column = first + start + tl.arange(0, COLUMNS)
            value = tl.load(source + column, mask=column < end, other=float("-inf")).to(tl.float32)
            total += tl.where(column < end, weight_of(value, highest, scale), 0.0)
        tl.store(sums + index, tl.sum(total, axis=0))


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _narrow_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    peaks: tl.tensor,
    places: tl.tensor,
    sums: tl.tensor,
    lowests: tl.tensor,
    offsets: tl.tensor,
    counts: tl.tensor,
    stride_row: tl.tensor,
    VOCABULARY: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
) -> None:
    """Lists the logits of one part that filters may keep. Grid (B, PARTS).

    Writes lowests: [B], a lower bound of kept logits; offsets: [B, PARTS, WIDTH], positions in the part of logits that
    reach it, ascending; counts: [B, PARTS], their number, -1 for rows that are greedy, not finite or without a filter.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    k, p, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    by_k = (k > 0) & (k < VOCABULARY)
    finite = tl.min(tl.load(places + row * PARTS + tl.arange(0, PARTS)), axis=0) >= 0
    count = tl.full([], -1, tl.int32)
    if finite & (temperature > 0.0) & (by_k | (p < 1.0) | (least > 0.0)):
        all_peaks = tl.load(peaks + row * (PARTS * GROUPS) + tl.arange(0, PARTS * GROUPS))
        scale = scale_of(temperature)
        lowest = lower_bound(all_peaks, sums + row * PARTS, k, p, least, scale, VOCABULARY, PARTS, GROUPS, STEPS)
        tl.store(lowests + row, lowest, mask=part == 0)
        source = logits + row * stride_row + part * WIDTH
        target = offsets + (row * PARTS + part) * WIDTH
        width = tl.minimum(VOCABULARY - part * WIDTH, WIDTH)
        count = tl.full([], 0, tl.int32)
        for start in range(0, WIDTH, COLUMNS):
            offset = start + tl.arange(0, COLUMNS)
            value = tl.load(source + offset, mask=offset < width, other=float("-inf")).to(tl.float32)
            kept = ((offset < width) & (value >= lowest)).to(tl.int32)
            place = count + tl.cumsum(kept, axis=0) - kept
            tl.store(target + place, offset.to(tl.int16), mask=kept != 0)
            count += tl.sum(kept, axis=0)
    tl.store(counts + row * PARTS + part, count)


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def _draw_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    numbers: tl.tensor,
    peaks: tl.tensor,
    places: tl.tensor,
    sums: tl.tensor,
    lowests: tl.tensor,
    offsets: tl.tensor,
    counts: tl.tensor,
    tokens: tl.tensor,
    finite: tl.tensor,
    stride_row: tl.tensor,
    VOCABULARY: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART_COLUMNS: tl.constexpr,
) -> None:
    """Merges the parts of a row: stores `finite` and its token, the best one if it is greedy, an arbitrary one if it is
    not finite, else one drawn from a part that is drawn first. Grid (B,)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    place = tl.load(places + row * PARTS + part)
    group = (row * PARTS + part[:, None]) * GROUPS + tl.arange(0, GROUPS)[None, :]
    part_peaks = tl.max(tl.load(peaks + group), axis=1)
    highest = tl.max(part_peaks, axis=0)
    good = tl.min(place, axis=0) >= 0
    token = tl.maximum(tl.min(tl.where(part_peaks == highest, place, VOCABULARY - 1), axis=0), 0)
    temperature = tl.load(temperatures + row)
    if good & (temperature > 0.0):
        source = logits + row * stride_row
        listing = offsets + row * (PARTS * WIDTH)
        scale = scale_of(temperature)
        weights = part_weights(sums + row * PARTS, part_peaks, highest, scale, PARTS)
        count = tl.load(counts + row * PARTS + part)
        listed = tl.min(count, axis=0) >= 0
        bound = tl.full([], float("-inf"), tl.float32)
        ties = tl.zeros([PARTS], tl.float32)
        least = tl.full([], 0.0, tl.float32)
        if listed:
            total = tl.sum(weights, axis=0)
            least = tl.minimum(tl.load(min_p + row), 1.0)
            k, p, lowest = tl.load(top_k + row), tl.load(top_p + row), tl.load(lowests + row)
            bound, ties, weights = apply_filters(
                source, listing, count, lowest, total, k, p, least, highest, scale, VOCABULARY, WIDTH, PARTS, COLUMNS
            )
        else:
            count = tl.minimum(VOCABULARY - part * WIDTH, WIDTH)
        # Monotonic, and constant across parts of weight 0.
        up_to = tl.sum(tl.where(part[:, None] >= part[None, :], weights[None, :], 0.0), axis=1)
        mark = tl.load(numbers + row) * tl.max(up_to, axis=0)
        heavy = tl.max(tl.where(weights > 0.0, part, 0), axis=0)
        chosen = tl.minimum(tl.sum((up_to <= mark).to(tl.int32), axis=0), heavy)
        mark -= tl.max(tl.where(part < chosen, up_to, 0.0), axis=0)
        spare = tl.sum(tl.where(part == chosen, ties, 0.0), axis=0)
        size = tl.sum(tl.where(part == chosen, count, 0), axis=0)
        first = chosen * WIDTH
        token = first + walk(
            source + first,
            listing + first,
            size,
            listed,
            mark,
            bound,
            spare,
            least,
            highest,
            scale,
            WIDTH,
            PART_COLUMNS,
        )
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(finite + row, good)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (tokens [B] int64, finite [B] bool) of logits [B, V] of a float type, rows at any stride.

    A token is the lowest id with the row's highest logit. finite: True if all logits of the row are finite. A row that
    is not finite gets an arbitrary valid token.
    """
    batch, vocabulary = _checked(logits)
    tokens = torch.empty(batch, dtype=torch.int64, device=logits.device)
    finite = torch.empty(batch, dtype=torch.bool, device=logits.device)
    if batch:
        _greedy_kernel[(batch,)](
            logits, tokens, finite, logits.stride(0), VOCABULARY=vocabulary, COLUMNS=_COLUMNS, num_warps=_WARPS
        )
    return tokens, finite


def sample(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, numbers: Tensor
) -> tuple[Tensor, Tensor]:
    """Draws a token for each row. Returns (tokens [B] int64, finite [B] bool) of logits [B, V] of a float type, rows at
    any stride.

    Contiguous [B] each: temperatures float32, 0 for `greedy`, whatever the other fields say; top_k int32, 0 for no
    limit, ties with the k-th stay; top_p float32, 1 for no limit; min_p float32, 0 for no limit; numbers float32 in [0,
    1), the point of the cumulative distribution, in vocabulary order, that is drawn. V at most 1048064. finite: as in
    `greedy`. Needs about 2 bytes of device memory per logit.
    """
    batch, vocabulary = _checked(logits)
    device = logits.device
    for name, field in (("temperatures", temperatures), ("top_p", top_p), ("min_p", min_p), ("numbers", numbers)):
        check_vector(name, field, batch, torch.float32, device)
    check_vector("top_k", top_k, batch, torch.int32, device)
    parts = min(_MAX_PARTS, next_power_of_2(cdiv(vocabulary, _PART_COLUMNS)))
    width = cdiv(vocabulary, 16 * parts) * 16
    if width > _MAX_WIDTH:
        raise ValueError(f"logits: expected at most {_MAX_PARTS * _MAX_WIDTH} columns, got {vocabulary}")
    tokens = torch.empty(batch, dtype=torch.int64, device=device)
    finite = torch.empty(batch, dtype=torch.bool, device=device)
    if batch == 0:
        return tokens, finite
    peaks = torch.empty((batch, parts, _GROUPS), dtype=torch.float32, device=device)
    sums = torch.empty((batch, parts), dtype=torch.float32, device=device)
    lowests = torch.empty(batch, dtype=torch.float32, device=device)
    places = torch.empty((batch, parts), dtype=torch.int32, device=device)
    counts = torch.empty((batch, parts), dtype=torch.int32, device=device)
    offsets = torch.empty((batch, parts, width), dtype=torch.int16, device=device)
    shape = {"VOCABULARY": vocabulary, "WIDTH": width, "PARTS": parts, "GROUPS": _GROUPS}
    columns = min(_PART_COLUMNS, max(_GROUPS, next_power_of_2(width)))
    filters, scratch = (top_k, top_p, min_p), (peaks, places, sums, lowests, offsets, counts)
    stride = logits.stride(0)
    _scan_kernel[(batch, parts)](
        logits, temperatures, peaks, places, sums, stride, **shape, COLUMNS=columns, num_warps=_PART_WARPS
    )
    _narrow_kernel[(batch, parts)](
        *(logits, temperatures, *filters, *scratch, stride),
        **shape,
        COLUMNS=columns,
        STEPS=_BOUND_STEPS,
        num_warps=_PART_WARPS,
    )
    _draw_kernel[(batch,)](
        *(logits, temperatures, *filters, numbers, *scratch, tokens, finite, stride),
        **shape,
        COLUMNS=min(columns, _LISTED // parts),
        PART_COLUMNS=columns,
        num_warps=_WARPS,
    )
    return tokens, finite


def _checked(logits: Tensor) -> tuple[int, int]:
    """Returns (B, V). Raises ValueError unless logits are [B, V] of a float type with V > 0."""
    check_rows("logits", logits)
    batch, vocabulary = logits.shape
    if vocabulary == 0:
        raise ValueError("logits: expected [B, V] with V > 0, got V = 0")
    return batch, vocabulary
