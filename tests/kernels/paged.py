"""Steps over a paged cache whose every unused element is poison: NaN in slots that hold no token, block ids far outside
the cache behind a request's last block."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hydra_engine.backend.base import PagedCache
from hydra_engine.backend.reference.ops import ReferenceOps, quantized

OUTSIDE = 2**31 - 1


@dataclass(frozen=True)
class Step:
    """`counts[r]` queries at the end of `contexts[r]` tokens, in layer 1 of 2."""

    q: Tensor  # [T, Hq, D], a strided part of a fused projection
    cache: PagedCache
    block_tables: Tensor
    cu_q: Tensor
    num_context: Tensor

    @property
    def k_cache(self) -> Tensor:
        return self.cache.data[:, 1, 0]

    @property
    def v_cache(self) -> Tensor:
        return self.cache.data[:, 1, 1]

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        """Scales of keys and values in a cache of int8, else None."""
        scales = self.cache.scales
        return None if scales is None else (scales[:, 1, 0], scales[:, 1, 1])

    def expected(self, scale: float) -> Tensor:
        ops = ReferenceOps()
        data, scales = self.cache.data, self.cache.scales
        wide = PagedCache(data.float()) if scales is None else PagedCache(data, None, scales, torch.float32)
        plan = ops.plan_attention(self.cu_q, self.num_context, self.block_tables)
        return ops.attention_paged(self.q.float().contiguous(), wide, 1, plan, scale)


def in_int8(step: Step) -> Step:
    """The step with a cache of int8; scales of slots without a token are NaN."""
    data = step.cache.data
    *_, block_size, heads, dim = data.shape
    raw = torch.full((data.numel() // dim * (dim + 4),), 0xFF, dtype=torch.uint8)
    cache = PagedCache.quantized(raw, tuple(data.shape), data.dtype)
    assert cache.scales is not None
    for x in (0, 1):
        rows = data[:, 1, x]  # [N, S, H, D]
        integers, scales = quantized(rows.flatten(0, 1))
        held = rows.isfinite().all(-1)
        cache.data[:, 1, x] = torch.where(held[..., None], integers.view(rows.shape), cache.data[:, 1, x])
        cache.scales[:, 1, x] = torch.where(held, scales.view(-1, block_size, heads), torch.nan).mT
    return replace(step, cache=cache)


def make_step(
    rows: list[tuple[int, int]], heads: tuple[int, int, int], block_size: int, dtype: torch.dtype, seed: int = 0
) -> Step:
    """rows: (queries, context) of each request; heads: (Hq, Hkv, D)."""
    num_heads, num_kv_heads, dim = heads
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-context // block_size) for _, context in rows]
    ids = torch.randperm(sum(needed) + 2, generator=generator).int()
    data = torch.full((len(ids), 2, 2, block_size, num_kv_heads, dim), float("nan"), dtype=dtype)
    tables = torch.full((len(rows), max([*needed, 1]) + 1), OUTSIDE, dtype=torch.int32)
    taken = 0
    for row, (_, context) in enumerate(rows):
        tables[row, : needed[row]] = ids[taken : taken + needed[row]]
        taken += needed[row]
        position = torch.arange(context)
        block = tables[row].long()[position // block_size]
        values = torch.randn(context, 2, num_kv_heads, dim, generator=generator).to(dtype)
        for x in (0, 1):
            data[block, 1, x, position % block_size] = values[:, x]
    counts = torch.tensor([0, *(count for count, _ in rows)])
    fused = torch.randn(int(counts.sum()), num_heads + 2 * num_kv_heads, dim, generator=generator).to(dtype)
    context = torch.tensor([context for _, context in rows], dtype=torch.int32)
    return Step(fused[:, :num_heads], PagedCache(data), tables, counts.cumsum(0).int(), context)
