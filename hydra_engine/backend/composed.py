"""Fused ops as sequences of plain ops, for implementations that gain nothing from fusing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hydra_engine.backend.base import (
    Activation,
    DeferredNorm,
    HeadNorms,
    Ops,
    PackedLinear,
    PagedCache,
    Rotary,
    RowNorm,
    apply_deferred_norm,
)


def concat_linear(
    linear: Callable[[Tensor, PackedLinear], Tensor], x: Tensor, weights: Sequence[PackedLinear]
) -> Tensor:
    if len(weights) == 1:
        return linear(x, weights[0])
    return torch.cat([linear(x, part) for part in weights], dim=1)


class ComposedOps:
    """A base class with the fused ops of `Ops` (backend/base.py)."""

    width_step = 1

    def pixel_rows(self: Ops, pixels: Tensor, table: Tensor, width: int) -> Tensor:
        rows = table.gather(0, pixels.reshape(-1, 3).to(torch.int64)).view(pixels.shape)
        return rows if width == pixels.shape[1] else F.pad(rows, (0, width - pixels.shape[1]))

    def linear_add_rms_norm(
        self: Ops, x: Tensor, linear: PackedLinear, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor | DeferredNorm, Tensor]:
        return self.add_rms_norm(self.linear(x, linear), residual, weight, eps)

    def linear_add_norm(
        self: Ops, x: Tensor, linear: PackedLinear, residual: Tensor, norm: RowNorm
    ) -> tuple[Tensor, Tensor]:
        total = self.linear(x, linear, residual=residual)
        if norm.bias is None:
            return self.rms_norm(total, norm.weight, norm.eps), total
        return self.layer_norm(total, norm.weight, norm.bias, norm.eps), total

    def linear_act_and_mul(
        self: Ops, x: Tensor | DeferredNorm, weights: Sequence[PackedLinear], act: Activation
    ) -> Tensor:
        return self.act_and_mul(concat_linear(self.linear, apply_deferred_norm(self, x), weights), act)

    def linear_rope_and_write(
        self: Ops,
        x: Tensor | DeferredNorm,
        weights: Sequence[PackedLinear],
        rotary: Rotary,
        cache: PagedCache,
        layer: int,
        slots: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        num_kv_heads, dim = cache.data.shape[4:]
        rows = concat_linear(self.linear, apply_deferred_norm(self, x), weights)
        num_heads = rows.shape[1] // dim
        # Instead of unflatten and split, whose Python takes longer than the views.
        heads = rows.view(rows.shape[0], num_heads, dim)
        q, k, v = heads.split_with_sizes((num_heads - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
        return self.rope_and_write(q, k, v, rotary, cache, layer, slots, norms)
