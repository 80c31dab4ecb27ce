"""Parts of the sampling kernels: weights, filter bounds and thresholds, and the search for the drawn token.

A row is divided into PARTS parts of WIDTH columns. A filter's threshold is found by bisection over the order-preserving
integers of float32, in at most 32 passes over the row's listed logits, which are those that may be kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hydra_kernels._common import LOG2_E

_LOG2_E = tl.constexpr(LOG2_E)
LOWEST_KEY = tl.constexpr(-2139095040)  # `key_of` of minus infinity


# ---- float32 numbers and integers of the same order


@triton.jit
def key_of(value: tl.tensor) -> tl.tensor:
    """An int32 with the order of `value`, a float32 that is not NaN; 0 for both zeros."""
    bits = tl.abs(value).to(tl.int32, bitcast=True)
    return tl.where(value < 0.0, -bits, bits)


@triton.jit
def value_from_key(key: tl.tensor) -> tl.tensor:
    """The inverse of `key_of`."""
    size = tl.abs(key).to(tl.float32, bitcast=True)
    return tl.where(key < 0, -size, size)


@triton.jit
def midpoint(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """floor((low + high) / 2) without overflow; `low` if high - low <= 1."""
    return (low & high) + ((low ^ high) >> 1)


# ---- weights: probabilities scaled so that the row's largest logit has 1


@triton.jit
def weight_of(value: tl.tensor, highest: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """exp((value - highest) / temperature), with scale = scale_of(temperature)."""
    return tl.exp2((value - highest) * scale)


@triton.jit
def scale_of(temperature: tl.tensor) -> tl.tensor:
    """log2(e) / temperature, at most 3e38: finite for every temperature above 0, so that 0 times it is 0."""
    return tl.minimum(_LOG2_E / temperature, 3.0e38)


@triton.jit
def part_weights(
    sums: tl.tensor, part_peaks: tl.tensor, highest: tl.tensor, scale: tl.tensor, PARTS: tl.constexpr
) -> tl.tensor:
    """The total weight of each part, [PARTS], in weights relative to the row's largest logit `highest`. sums: pointer
    to the parts' sums of weights, each relative to the part's largest, `part_peaks`."""
    return tl.load(sums + tl.arange(0, PARTS)) * weight_of(part_peaks, highest, scale)


# ---- filters


@triton.jit
def lower_bound(
    peaks: tl.tensor,
    sums: tl.tensor,
    k: tl.tensor,
    p: tl.tensor,
    least: tl.tensor,
    scale: tl.tensor,
    VOCABULARY: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    STEPS: tl.constexpr,
) -> tl.tensor:
    """A lower bound of the logits of a row that filters keep: by top_k `k` if that limits, else by top_p `p` if that is
    below 1, else by min_p `least`.

    peaks: [PARTS * GROUPS], largest logits of disjoint groups. sums: pointer to the parts' sums of weights, each
    relative to the part's largest. GROUPS: of a part. STEPS: bisection steps for top_k. scale: as in `weight_of`.
    """
    highest = tl.max(peaks, axis=0)
    if (k > 0) & (k < VOCABULARY):
        # Any value that k peaks reach is a bound, since k logits then reach it.
        low = tl.full([], LOWEST_KEY, tl.int32)
        high = key_of(highest) + 1
        for _ in range(STEPS):
            middle = midpoint(low, high)
            enough = tl.sum((peaks >= value_from_key(middle)).to(tl.int32), axis=0) >= k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        lowest = value_from_key(low)
    elif p < 1.0:
        # All weights below this bound sum to less than half of what top_p leaves out.
        part_peaks = tl.max(tl.reshape(peaks, [PARTS, GROUPS]), axis=1)
        total = tl.sum(part_weights(sums, part_peaks, highest, scale, PARTS), axis=0)
        lowest = highest + (tl.log2((1.0 - p) * total / (2.0 * VOCABULARY)) - 1.0) / scale
    else:
        lowest = highest + (tl.log2(tl.minimum(least, 1.0)) - 1.0) / scale
    return lowest


@triton.jit
def _tile(
    logits: tl.tensor,
    offsets: tl.tensor,
    count: tl.tensor,
    start: tl.tensor,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Listed logits of all parts, COLUMNS from index `start` of each list: [PARTS, COLUMNS], minus infinity after its
    end. offsets: pointer to the lists, [PARTS, WIDTH] columns within the part; count: [PARTS], their lengths."""
    base = tl.arange(0, PARTS)[:, None] * WIDTH
    index = start + tl.arange(0, COLUMNS)[None, :]
    listed = index < count[:, None]
    offset = tl.load(offsets + base + index, mask=listed, other=0).to(tl.int32)
    return tl.load(logits + base + offset, mask=listed, other=float("-inf")).to(tl.float32)


@triton.jit
def _sum_above(
    logits: tl.tensor,
    offsets: tl.tensor,
    count: tl.tensor,
    bound: tl.tensor,
    highest: tl.tensor,
    scale: tl.tensor,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COUNT: tl.constexpr,
) -> tl.tensor:
    """Sum of the weights of all listed logits above `bound`; with COUNT, their number, as float32. Other parameters as
    in `_tile` and `weight_of`."""
    total = tl.zeros([PARTS, COLUMNS], tl.float32)
    for start in range(0, tl.max(count, axis=0), COLUMNS):
        value = _tile(logits, offsets, count, start, WIDTH, PARTS, COLUMNS)
        share = 1.0 if COUNT else weight_of(value, highest, scale)
        total += tl.where(value > bound, share, 0.0)
    return tl.sum(tl.sum(total, axis=1), axis=0)


@triton.jit
def _threshold(
    logits: tl.tensor,
    offsets: tl.tensor,
    count: tl.tensor,
    low: tl.tensor,
    mark: tl.tensor,
    highest: tl.tensor,
    scale: tl.tensor,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COUNT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Returns (threshold, amount above it). The threshold is the smallest logit of the lists that has less than `mark`
    above it, by bisection between `low`, the integer key of a value with `mark` or more above it, and the largest
    logit. Lists (`offsets`, `count`), `highest` and `scale`: as in `_sum_above`.

    With COUNT the amount is a number of logits: a mark of k gives the k-th largest. Otherwise it is their weight: a
    mark of p times the total gives the smallest logit that top_p keeps.
    """
    high = key_of(highest)
    above = tl.full([], 0.0, tl.float32)
    middle = midpoint(low, high)
    while middle != low:
        found = _sum_above(logits, offsets, count, value_from_key(middle), highest, scale, WIDTH, PARTS, COLUMNS, COUNT)
        less = found < mark
        high = tl.where(less, middle, high)
        above = tl.where(less, found, above)
        low = tl.where(less, low, middle)
        middle = midpoint(low, high)
    return value_from_key(high), above


@triton.jit
def apply_filters(
    logits: tl.tensor,
    offsets: tl.tensor,
    count: tl.tensor,
    lowest: tl.tensor,
    total: tl.tensor,
    k: tl.tensor,
    p: tl.tensor,
    least: tl.tensor,
    highest: tl.tensor,
    scale: tl.tensor,
    VOCABULARY: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Applies top_k `k`, top_p `p` and min_p `least` to a row, in this order. Returns (bound, ties [PARTS], weights
    [PARTS]).

    Kept are the logits above the bound, and in each part the first `ties` of those equal to it, all of weight `least`
    or more; `weights` are the kept weights of each part. lowest: lower bound of the listed logits. total: weight of the
    whole row. Lists, `highest` and `scale`: as in `_sum_above`.
    """
    bound = tl.full([], float("-inf"), tl.float32)
    allowed = tl.full([], VOCABULARY, tl.float32)
    low = tl.maximum(key_of(lowest) - 1, LOWEST_KEY)
    if (k > 0) & (k < VOCABULARY):
        number = k.to(tl.float32)
        bound, _ = _threshold(logits, offsets, count, low, number, highest, scale, WIDTH, PARTS, COLUMNS, True)
        low = key_of(bound) - 1
        total = _sum_above(logits, offsets, count, value_from_key(low), highest, scale, WIDTH, PARTS, COLUMNS, False)
    if p < 1.0:
        mark = p * total
        bound, above = _threshold(logits, offsets, count, low, mark, highest, scale, WIDTH, PARTS, COLUMNS, False)
        allowed = tl.ceil((mark - above) / weight_of(bound, highest, scale))
        allowed = tl.maximum(tl.minimum(allowed, VOCABULARY), 1.0)
    above = tl.zeros([PARTS, COLUMNS], tl.float32)
    equal = tl.zeros([PARTS, COLUMNS], tl.float32)
    for start in range(0, tl.max(count, axis=0), COLUMNS):
        value = _tile(logits, offsets, count, start, WIDTH, PARTS, COLUMNS)
        weight = weight_of(value, highest, scale)
        above += tl.where((value > bound) & (weight >= least), weight, 0.0)
        equal += tl.where((value == bound) & (weight >= least), 1.0, 0.0)
    equal = tl.sum(equal, axis=1)
    part = tl.arange(0, PARTS)
    before = tl.sum(tl.where(part[:, None] > part[None, :], equal[None, :], 0.0), axis=1)
    ties = tl.minimum(tl.maximum(allowed - before, 0.0), equal)
    return bound, ties, tl.sum(above, axis=1) + ties * weight_of(bound, highest, scale)


# ---- draws


@triton.jit
def walk(
    logits: tl.tensor,
    offsets: tl.tensor,
    count: tl.tensor,
    listed: tl.tensor,
    mark: tl.tensor,
    bound: tl.tensor,
    ties: tl.tensor,
    least: tl.tensor,
    highest: tl.tensor,
    scale: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """Column, within one part, of the first kept logit whose cumulative weight is above `mark`, or else of the last
    kept one, 0 if there is none.

    Kept are logits as in `apply_filters`, by the row's `bound` and `least` and this part's `ties`; without a filter all
    (minus infinity, 0, 0). logits, offsets: pointers to the part's logits and list. count: logits of the part, or of
    its list if `listed`.
    """
    start = tl.full([], 0, tl.int32)
    found = tl.full([], WIDTH, tl.int32)
    last = tl.full([], 0, tl.int32)
    total = tl.full([], 0.0, tl.float32)
    seen = tl.full([], 0.0, tl.float32)
    while (found == WIDTH) & (start < count):
        index = start + tl.arange(0, COLUMNS)
        inside = index < count
        place = tl.load(offsets + index, mask=index < tl.where(listed, count, 0), other=0).to(tl.int32)
        place = tl.where(listed, place, index)
        value = tl.load(logits + place, mask=inside, other=float("-inf")).to(tl.float32)
        weight = weight_of(value, highest, scale)
        tied = tl.where(inside & (value == bound), 1.0, 0.0)
        rank = seen + tl.cumsum(tied, axis=0) - tied
        kept = inside & (weight >= least) & ((value > bound) | ((tied > 0.0) & (rank < ties)))
        weight = tl.where(kept, weight, 0.0)
        beyond = (weight > 0.0) & (total + tl.cumsum(weight, axis=0) > mark)
        found = tl.min(tl.where(beyond, place, WIDTH), axis=0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, place, 0), axis=0))
        total += tl.sum(weight, axis=0)
        seen += tl.sum(tied, axis=0)
        start += COLUMNS
    return tl.where(found == WIDTH, last, found)
