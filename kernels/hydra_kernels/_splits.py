"""Split contexts (Flash-Decoding): the keys of a split, the last program to finish, and the merge of partial
results."""

from __future__ import annotations

import triton
import triton.language as tl

from hydra_kernels._attention import LOWEST


@triton.jit
def split_bounds(
    context: tl.tensor, split: tl.tensor, num_splits: tl.tensor, KEYS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Returns (first, last), the range of a split's keys: equal numbers of whole tiles of KEYS; the last splits have
    fewer keys or none, with first >= last."""
    keys = tl.cdiv(tl.cdiv(context, num_splits), KEYS) * KEYS
    return split * keys, tl.minimum((split + 1) * keys, context)


@triton.jit
def is_last(counter: tl.tensor, num_splits: tl.tensor) -> tl.tensor:
    """Counts this program in `counter`. True if it is the last of `num_splits`; then the counter is 0 again.

    Stores of the other programs are visible after this: barriers order the threads of a program, the atomic the
    programs.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1
    tl.debug_barrier()
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def merge(
    out: tl.tensor,
    partial: tl.tensor,
    log_totals: tl.tensor,
    group: tl.tensor,
    context: tl.tensor,
    num_splits: tl.tensor,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    PADDED: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """Writes the result of one request and KV head, number `group` of all such pairs, for its GROUP query heads: the
    average of the splits' results, weighted by their softmax totals, STEP splits at a time. A context of 0 gives zeros.

    ROWS: GROUP rounded up to a tile. partial: [.., num_splits, D]; log_totals: [.., num_splits], in base 2, read only
    for splits that have keys. PADDED: the least power of two >= D. KEYS: as in `split_bounds`.
    """
    member = tl.arange(0, ROWS)
    place = group * GROUP + member
    logs = log_totals + (place * num_splits)[:, None]
    highest = tl.full([ROWS], LOWEST, tl.float32)
    for begin in range(0, num_splits, STEP):
        split = begin + tl.arange(0, STEP)
        first, last = split_bounds(context, split, num_splits, KEYS)
        used = (member < GROUP)[:, None] & ((split < num_splits) & (first < last))[None, :]
        highest = tl.maximum(highest, tl.max(tl.load(logs + split[None, :], mask=used, other=LOWEST), axis=1))
    column = tl.arange(0, PADDED)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    for begin in range(0, num_splits, STEP):
        split = begin + tl.arange(0, STEP)
        first, last = split_bounds(context, split, num_splits, KEYS)
        used = (member < GROUP)[:, None] & ((split < num_splits) & (first < last))[None, :]
        weight = tl.exp2(tl.load(logs + split[None, :], mask=used, other=float("-inf")) - highest[:, None])
        total += tl.sum(weight, axis=1)
        values = tl.load(
            partial + ((place * num_splits)[:, None] + split[None, :])[:, :, None] * D + column[None, None, :],
            mask=used[:, :, None] & (column < D)[None, None, :],
            other=0.0,
        )
        acc += tl.sum(values * weight[:, :, None], axis=1)
    mean = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    stored = (member < GROUP)[:, None] & (column < D)[None, :]
    tl.store(out + place[:, None] * D + column[None, :], mean.to(out.dtype.element_ty), mask=stored)
