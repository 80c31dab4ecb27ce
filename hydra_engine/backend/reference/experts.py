"""Mixtures of experts in plain torch: the choice of experts, and their outputs as a composition of `linear` ops.

The oracle of every kernel, and what runs without the extension. A token's result depends on that token alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from hydra_engine.backend import checks
from hydra_engine.backend.base import Activation, Ops, PackedLinear, Routes
from hydra_engine.backend.reference.delta_rule import by_vectors


class LinearExperts:
    """`PackedExperts` of one packed weight per matrix. gate_up: [2 * F, C] each; down: [C, F] each."""

    def __init__(self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> None:
        self.gate_up, self.down = gate_up, down
        self.num_experts = len(down)
        self.num_in, self.num_inner = down[0].num_out, down[0].num_in

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in (*self.gate_up, *self.down))


def route(logits: Tensor, k: int, *, renormalise: bool, shared: Tensor | None) -> Routes:
    """`Ops.route`, on the logits' device."""
    checks.check_route(logits, k, shared)
    order = torch.sort(logits.float(), dim=1, descending=True, stable=True)
    sizes = by_vectors(torch.exp, order.values - order.values[:, :1])
    weights = sizes[:, :k] / _sum(sizes)
    if renormalise:
        weights = weights / _sum(weights)
    experts = order.indices[:, :k].to(torch.int32)
    if shared is not None:
        weights = torch.cat((weights, by_vectors(torch.sigmoid, shared.float())), dim=1)
        experts = torch.cat((experts, torch.full_like(experts[:, :1], logits.shape[1])), dim=1)
    return Routes(experts.contiguous(), weights.contiguous())


def _sum(sizes: Tensor) -> Tensor:
    """The sums of rows [T, 1], column by column: torch's own order depends on the shape."""
    return sizes.cumsum(1)[:, -1:]


def experts(ops: Ops, x: Tensor, routes: Routes, experts: LinearExperts, act: Activation) -> Tensor:
    """`Ops.experts` by the products of `ops`, an expert at a time."""
    rows, chosen, _ = checks.check_experts(x, routes, experts, x.dtype)
    numbers = routes.experts.flatten().long()
    for number in (numbers.min().item(), numbers.max().item()) if len(numbers) else ():
        if not -1 <= number < experts.num_experts:
            raise ValueError(f"experts: expected -1 to {experts.num_experts - 1}, got {number}")
    order = numbers.argsort(stable=True)
    ends = torch.bincount(numbers + 1, minlength=experts.num_experts + 1).cumsum(0).tolist()
    outputs = torch.zeros((rows * chosen, experts.num_in), dtype=torch.float32, device=x.device)
    for expert, (begin, end) in enumerate(pairwise(ends)):
        if begin == end:
            continue
        places = order[begin:end]
        inner = ops.linear_act_and_mul(x[places // chosen], (experts.gate_up[expert],), act)
        outputs[places] = ops.linear(inner, experts.down[expert], out_dtype=torch.float32)
    weights = routes.weights.masked_fill(routes.experts < 0, 0.0)
    total = torch.zeros((rows, experts.num_in), dtype=torch.float32, device=x.device)
    for column, output in enumerate(outputs.view(rows, chosen, experts.num_in).unbind(1)):
        total += output * weights[:, column : column + 1]
    return total.to(x.dtype)
