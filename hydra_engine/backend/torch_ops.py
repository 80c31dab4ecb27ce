"""Torch's own kernels where they are faster than the reference; asked for by name (`backend="torch"`).

Not deterministic in the sense of backend/base.py: torch picks its matrix product by shape, so a row's result may depend
on how many rows share the call. Everything that is not overridden is the reference.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from hydra_engine.backend import checks
from hydra_engine.backend.base import Activation, OpChoice, PackedLinear, Segments
from hydra_engine.backend.reference import ReferenceOps, activation, bounds_of


class TorchLinear:
    """The weight as it is, [num_out, K] in its own dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.num_out, self.num_in = weight.shape
        self.weight = weight.detach().contiguous()
        self.bias = None if bias is None else bias.detach().to(weight.dtype)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class TorchOps(ReferenceOps):
    """`Ops` of backend/base.py, except that activation and residual of a linear act on the rounded sums."""

    name = "torch"
    deterministic = False

    def choices(self) -> tuple[OpChoice, ...]:
        own = ("linear", "attention_packed")
        return tuple(
            OpChoice(c.op, "torch", "torch's own kernel, asked for by name") if c.op in own else c
            for c in super().choices()
        )

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        return TorchLinear(weight, bias)

    def linear(
        self,
        x: Tensor,
        weight: PackedLinear,
        *,
        act: Activation = "none",
        residual: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        assert isinstance(weight, TorchLinear)
        if x.dim() != 2 or x.shape[1] != weight.num_in or x.dtype is not weight.weight.dtype:
            raise ValueError(f"x: expected [T, {weight.num_in}] {weight.weight.dtype}, got {list(x.shape)} {x.dtype}")
        product = F.linear(x, weight.weight, weight.bias)
        if act != "none":
            product = activation(product.float(), act)
        if residual is not None:
            if residual.shape != product.shape or residual.dtype is not (out_dtype or x.dtype):
                wanted = f"{list(product.shape)} {out_dtype or x.dtype}"
                raise ValueError(f"residual: expected {wanted}, got {checks.described(residual)}")
            product = product.float() + residual
        return product.to(out_dtype or x.dtype)

    def attention_packed(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Segments, scale: float) -> Tensor:
        bounds = bounds_of(cu_seqlens)
        checks.check_packed(q, k, v, bounds)
        out = torch.empty(q.shape, dtype=q.dtype)
        for begin, end in pairwise(bounds):
            if begin < end:
                query, key, value = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))
                rows = F.scaled_dot_product_attention(query, key, value, scale=scale)
                out[begin:end] = rows[0].transpose(0, 1)
        return out
