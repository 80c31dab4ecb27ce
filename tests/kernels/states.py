"""Rows of requests that keep a recurrent state: what kernels take of them, places full of NaN, and the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hydra_engine.backend.base import DeltaInputs, StateCache, StateRows
from hydra_engine.backend.reference import delta_rule as reference


@dataclass(frozen=True)
class Row:
    """`tokens` of a request, of which `start` came before; the state is read in one place and left in another."""

    tokens: int
    start: int
    read: int
    write: int


def state_rows(rows: list[Row]) -> StateRows:
    cu_q = torch.tensor([0, *(row.tokens for row in rows)]).cumsum(0)
    fields = [[row.start, row.read, row.write] for row in rows]
    return StateRows(cu_q, *torch.tensor(fields, dtype=torch.int64).view(-1, 3).t().contiguous())


def places_of(rows: list[Row], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """[places, 2 layers, *shape], in layer 1 of which is what rows go on from; all else is NaN."""
    count = max((max(row.read, row.write) for row in rows), default=0) + 2
    states = torch.full((count, 2, *shape), float("nan"), dtype=dtype)
    for row in rows:
        if row.start:
            states[row.read, 1] = torch.randn(shape, generator=torch.Generator().manual_seed(row.read)).to(dtype)
    return states


def by_reference(states: Tensor, rows: StateRows, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """(result, states after it) of the convolution for x and weight, else of the rule."""
    after = states.clone()
    if len(tensors) == 2:
        return reference.causal_conv(*tensors, StateCache(after, after), 1, rows), after
    return reference.delta_rule(DeltaInputs(*tensors), StateCache(after, after), 1, rows), after
