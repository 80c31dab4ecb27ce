"""Causal attention of one request in plain torch, in tiles of fixed shape; matrix products take the same tiles.

Does not know caches or batches.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from hydra_engine.backend.reference.delta_rule import by_vectors

_QUERY_TILE = 32
_KEY_TILE = 128  # keys per step of the running softmax, aligned to position 0


def causal(q: Tensor, keys: Tensor, values: Tensor, first_position: int, scale: float) -> Tensor:
    """Causal attention of one request by a running softmax over key tiles: [Q, Hq, D] float32.

    q: [Q, Hq, D] at positions first_position + i; keys, values: [Hkv, context, D] float32. A tile that is masked for a
    query leaves its result unchanged, bit for bit (weights 0, rescaling factor 1), so queries may share a call with
    others that see more.
    """
    num_queries, num_heads, dim = q.shape
    group = num_heads // keys.shape[0]
    out = torch.empty(num_queries, num_heads, dim)
    for begin, end in tiles(num_queries, _QUERY_TILE):
        tile = padded(q[begin:end].float(), _QUERY_TILE).transpose(0, 1).contiguous()
        position = torch.arange(begin, begin + _QUERY_TILE)[:, None] + first_position
        top = torch.full((num_heads, _QUERY_TILE, 1), float("-inf"))
        total = torch.zeros(num_heads, _QUERY_TILE, 1)
        sums = torch.zeros(num_heads, _QUERY_TILE, dim)
        for first, last in tiles(first_position + end, _KEY_TILE):
            key, value = (
                F.pad(x[:, first:last], (0, 0, 0, _KEY_TILE - (last - first))).repeat_interleave(group, dim=0)
                for x in (keys, values)
            )
            scores = torch.bmm(tile, key.transpose(1, 2)) * scale
            scores.masked_fill_(torch.arange(first, first + _KEY_TILE) > position, float("-inf"))
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights = by_vectors(torch.exp, scores - new_top)
            shrink = by_vectors(torch.exp, top - new_top)
            total = total * shrink + weights.sum(-1, keepdim=True)
            sums = sums * shrink + torch.bmm(weights, value)
            top = new_top
        out[begin:end] = (sums / total).transpose(0, 1)[: end - begin]
    return out


def tiles(count: int, size: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + size, count)) for begin in range(0, count, size))


def padded(rows: Tensor, count: int) -> Tensor:
    """Copies `rows` as float32 to fresh memory of `count` rows, so that torch sees one shape and one alignment."""
    padded = torch.zeros((count, *rows.shape[1:]), dtype=torch.float32)
    padded[: rows.shape[0]] = rows
    return padded
