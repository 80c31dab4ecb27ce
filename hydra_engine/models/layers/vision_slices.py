"""Cuts an encode into pieces, so that a vision step can wait between them: at layers, and inside large ones.

Waiting never changes a result. Computation inside a layer is cut by rows (or heads), so with deterministic ops the cuts
change no result either. Does not know what a wait is for.

The cost of a piece: without `piece_rows` a layer of the whole batch. With `piece_rows` that many rows of a layer's
products, or attention of some segments or heads with about as many (query, key) pairs as those products have
multiplications; one head of one picture is not cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from hydra_engine.backend.base import PackedPlan, Segments

T = TypeVar("T")
Mix = Callable[[Tensor, Tensor, Tensor, Segments], Tensor]


class AttentionPiece(NamedTuple):
    """Segments [first, last) and heads [head, head_end) of a packed batch."""

    first: int
    last: int
    head: int
    head_end: int


class Slices:
    """Runs computations in pieces, with `checkpoint` called between them. `piece_rows`: most rows of a layer in one
    piece; 0: layers are not cut."""

    def __init__(self, checkpoint: Callable[[], None], piece_rows: int = 0) -> None:
        self.checkpoint = checkpoint
        self._piece_rows = piece_rows

    def with_checkpoints(self, parts: Iterable[T]) -> Iterator[T]:
        """Yields the parts of a tower, with a checkpoint before each and one after the last: n parts make n + 1 pieces,
        the work before the first and after the last included."""
        for part in parts:
            self.checkpoint()
            yield part
        self.checkpoint()

    def rows(self, compute: Callable[..., Tensor], *tensors: Tensor, group: int = 1) -> Tensor:
        """Computes compute(*tensors) in pieces of nearly equal size. Rows of the result depend only on the same rows of
        the tensors, or on the same `group` adjacent rows."""
        results = self._pieces(compute, tensors, group)
        return results[0] if len(results) == 1 else torch.cat(results)

    def row_pairs(self, compute: Callable[..., tuple[Tensor, Tensor]], *tensors: Tensor) -> tuple[Tensor, Tensor]:
        """Does what `rows` does, for a function with two results."""
        results = self._pieces(compute, tensors, group=1)
        if len(results) == 1:
            return results[0]
        first, second = zip(*results, strict=True)
        return torch.cat(first), torch.cat(second)

    def _pieces(self, compute: Callable[..., T], tensors: Sequence[Tensor], group: int) -> list[T]:
        count = tensors[0].shape[0]
        num_pieces = -(-count // self._piece_rows) if self._piece_rows else 1
        num_pieces = min(num_pieces, count // group)
        if num_pieces <= 1:
            return [compute(*tensors)]
        ends = [count // group * i // num_pieces * group for i in range(num_pieces + 1)]
        results = []
        for begin, end in pairwise(ends):
            if begin:
                self.checkpoint()
            results.append(compute(*(tensor[begin:end] for tensor in tensors)))
        return results

    def attention(self, mix: Mix, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Segments) -> Tensor:
        """Computes mix(q, k, v, cu_seqlens), [P, H, D], in pieces of segments and heads, which do not interact
        (`Ops.attention_packed`). Planned segments (`PackedPlan`) are never cut."""
        num_rows, num_heads, head_dim = q.shape
        # As much work as products with the 9 C * C weights after attention:
        # R * 9 C * C = pairs * heads * 2 D, with C = H * D.
        most = self._piece_rows * 9 * num_heads * num_heads * head_dim // 2
        if not most or num_rows <= self._piece_rows or isinstance(cu_seqlens, PackedPlan):
            return mix(q, k, v, cu_seqlens)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for piece in attention_pieces(cu_seqlens, num_heads, most):
            self.checkpoint()
            rows = slice(cu_seqlens[piece.first], cu_seqlens[piece.last])
            heads = slice(piece.head, piece.head_end)
            bounds = [end - rows.start for end in cu_seqlens[piece.first : piece.last + 1]]
            out[rows, heads] = mix(q[rows, heads], k[rows, heads], v[rows, heads], bounds)
        self.checkpoint()
        return out


def attention_pieces(cu_seqlens: Sequence[int], num_heads: int, most: int) -> Iterator[AttentionPiece]:
    """Yields pieces with at most `most` (query, key) pairs over all their heads, or a single head if one has more. The
    heads of a run of segments are divided as equally as possible."""
    runs: list[tuple[int, int, int]] = []  # segments [first, last) and the pairs of one head
    for segment, (begin, end) in enumerate(pairwise(cu_seqlens)):
        first, pairs = segment, (end - begin) ** 2
        if runs and (runs[-1][2] + pairs) * num_heads <= most:
            first, _, earlier = runs.pop()
            pairs += earlier
        runs.append((first, segment + 1, pairs))
    for first, last, pairs in runs:
        num_pieces = -(-num_heads // max(most // max(pairs, 1), 1))
        for head, head_end in pairwise(num_heads * i // num_pieces for i in range(num_pieces + 1)):
            yield AttentionPiece(first, last, head, head_end)
