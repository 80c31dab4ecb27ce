"""MLPs on a device that wants rows of certain widths: zeros fill them up, the results stay what they are."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.quantized import quantized
from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_engine.models.layers.basic import GatedMlp, Linear, Mlp
from hydra_engine.models.loading.parameters import Demands, Scope

CHANNELS, INNER, WIDE = 16, 20, 24
Form = Literal["tensors", "gate is quantised", "all are quantised", "quantised at load"]


class WideOps(ReferenceOps):
    width_step = 8


def mlp_of(ops: ReferenceOps, kind: str, form: Form) -> tuple[GatedMlp | Mlp, list[Linear]]:
    """A feed-forward block and its linears."""
    demands = Demands()
    scope = Scope(ops, torch.float32, torch.device("cpu"), demands, quantize=4 if form == "quantised at load" else None)
    if kind == "gated":
        mlp: GatedMlp | Mlp = GatedMlp(scope, CHANNELS, INNER, "silu", bias=True)
    else:
        act = kind.removeprefix("scaled ")
        scale = "scale" if kind.startswith("scaled") else None
        mlp = Mlp(scope, ("gate_proj", "second"), CHANNELS, INNER, CHANNELS, act, scale=scale)
    generator = torch.Generator().manual_seed(1)
    for name, slot in demands.slots.items():
        tensor = torch.randn(slot.shape, generator=generator)
        chosen = form == "all are quantised" or (form == "gate is quantised" and name == "gate_proj.weight")
        if chosen and slot.fill_quantized is not None:
            slot.fill_quantized(quantized(tensor, 8, tensor.shape[1], torch.float32))
        else:
            slot.fill(tensor)
    return mlp, [holder for holder in demands.holders if isinstance(holder, Linear)]


def widths(linears: list[Linear]) -> list[tuple[int, int]]:
    """(outputs, inputs) of each"""
    return [(sum(part.num_out for part in linear.packed), linear.packed[0].num_in) for linear in linears]


@pytest.mark.parametrize("form", ["tensors", "gate is quantised", "all are quantised", "quantised at load"])
@pytest.mark.parametrize("kind", ["gated", "gelu", "scaled gelu_tanh", "quick_gelu"])
def test_an_mlp_of_rows_with_zeros_gives_the_same(kind: str, form: Form) -> None:
    (plain, plain_linears), (wide, wide_linears) = (mlp_of(ops, kind, form) for ops in (ReferenceOps(), WideOps()))
    parts = 2 if kind == "gated" else 1
    assert widths(plain_linears) == [(parts * INNER, CHANNELS), (CHANNELS, INNER)]
    assert widths(wide_linears) == [(parts * WIDE, CHANNELS), (CHANNELS, WIDE)]
    x: Tensor = torch.randn(5, CHANNELS, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(wide(x, residual=x), plain(x, residual=x), rtol=1e-5, atol=1e-5)


def test_a_width_that_is_wanted_stays() -> None:
    demands = Demands()
    GatedMlp(Scope(WideOps(), torch.float32, torch.device("cpu"), demands), CHANNELS, WIDE, "silu")
    for slot in demands.slots.values():
        slot.fill(torch.randn(slot.shape))
    linears = [holder for holder in demands.holders if isinstance(holder, Linear)]
    assert widths(linears) == [(2 * WIDE, CHANNELS), (CHANNELS, WIDE)]
