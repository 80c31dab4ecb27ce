"""Recurrent states in every implementation: formulas in float64, bits under every cut and company."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hydra_engine.backend.base import DeltaInputs, Ops, StateCache, StateRows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
LAYERS = 2


class Shape(NamedTuple):
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int


SHAPES = [Shape(2, 6, 16, 24, 4), Shape(3, 3, 7, 5, 3), Shape(1, 2, 128, 128, 4)]


class Inputs(NamedTuple):
    """Inputs of a request for both operations."""

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor

    def piece(self, begin: int, end: int) -> Inputs:
        return Inputs(*(part[begin:end] for part in self))


class Case:
    def __init__(self, ops: Ops, shape: Shape, dtype: torch.dtype) -> None:
        self.ops, self.shape, self.dtype = ops, shape, dtype
        generator = torch.Generator().manual_seed(1)
        self.channels = 37
        self.taps = torch.randn(self.channels, shape.taps, generator=generator).to(dtype)
        self.rates = torch.randn(shape.heads, generator=generator)
        self.shift = torch.randn(shape.heads, generator=generator)

    def cache(self, places: int) -> StateCache:
        s = self.shape
        conv = torch.full((places, LAYERS, s.taps - 1, self.channels), float("nan"), dtype=self.dtype)
        return StateCache(conv, torch.full((places, LAYERS, s.heads, s.key_dim, s.value_dim), float("nan")))

    def inputs(self, tokens: int, seed: int = 0) -> Inputs:
        """Views of wider rows, as they come from a fused projection."""
        s, generator = self.shape, torch.Generator().manual_seed(seed)

        def made(*shape: int) -> Tensor:
            return torch.randn(tokens, 2, *shape, generator=generator).to(self.dtype)[:, 1]

        heads = (s.key_heads, s.key_dim), (s.key_heads, s.key_dim), (s.heads, s.value_dim)
        return Inputs(made(self.channels), *(made(*one) for one in heads), made(s.heads), made(s.heads))

    def of_rule(self, inputs: Inputs) -> DeltaInputs:
        return DeltaInputs(*inputs[1:], self.rates, self.shift)

    def __call__(self, inputs: Inputs, cache: StateCache, rows: Sequence[tuple[int, int, int, int]]) -> Tensor:
        """`rows`: (tokens, start, read, write) each; both results of a token side by side."""
        cu_q = torch.tensor([0, *(row[0] for row in rows)]).cumsum(0)
        given = StateRows(cu_q, *(torch.tensor([row[i] for row in rows], dtype=torch.int64) for i in (1, 2, 3)))
        conv = self.ops.causal_conv(inputs.x, self.taps, cache, 1, given)
        mixed = self.ops.delta_rule(self.of_rule(inputs), cache, 1, given)
        return torch.cat((conv, mixed.flatten(1)), dim=1)

    def cut(self, inputs: Inputs, counts: Sequence[int]) -> Tensor:
        cache, parts, start = self.cache(2), [], 0
        for index, count in enumerate([*counts, len(inputs.x)]):
            count = min(count, len(inputs.x) - start)
            if count:
                piece = inputs.piece(start, start + count)
                parts.append(self(piece, cache, [(count, start, index % 2, 1 - index % 2)]))
                start += count
        return torch.cat(parts)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_formulas(ops: Ops, shape: Shape, dtype: torch.dtype) -> None:
    case = Case(ops, shape, dtype)
    inputs = case.inputs(20)
    result = case.cut(inputs, [7]).double()
    x, q, k, v, a, b = (part.double() for part in inputs)
    padded = F.pad(x, (0, 0, shape.taps - 1, 0))
    conv = F.silu(sum(padded[i : i + 20] * case.taps[:, i].double() for i in range(shape.taps)))
    q, k = (F.normalize(part, dim=-1).repeat_interleave(shape.heads // shape.key_heads, dim=1) for part in (q, k))
    decay = torch.exp(-case.rates.double().exp() * F.softplus(a + case.shift.double()))
    strength = torch.sigmoid(b).to(dtype).double()
    state, outs = torch.zeros(shape.heads, shape.key_dim, shape.value_dim, dtype=torch.float64), []
    for t in range(20):
        state = state * decay[t, :, None, None]
        known = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], strength[t, :, None] * (v[t] - known))
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]) / shape.key_dim**0.5)
    truth = torch.cat((conv, torch.stack(outs).flatten(1)), dim=1)
    assert result.shape == truth.shape
    allowed = 4 * ROUNDING[dtype] * (truth.abs() + 0.2)
    assert ((result - truth).abs() <= allowed).all(), (result - truth).abs().max()


@pytest.mark.quick("native", "float32")
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_bits_do_not_depend_on_cuts(ops: Ops, shape: Shape, dtype: torch.dtype) -> None:
    case, rng = Case(ops, shape, dtype), random.Random(0)
    inputs = case.inputs(70)
    whole = case.cut(inputs, [])
    cuts = [[1] * 70, [64], [69], [2] * 35, *([rng.randint(1, 20) for _ in range(20)] for _ in range(4))]
    for counts in cuts:
        assert torch.equal(case.cut(inputs, counts), whole), counts


def test_bits_do_not_depend_on_neighbours(ops: Ops) -> None:
    """Rows of several requests in one call, each in places of its own, and the call made twice."""
    case = Case(ops, SHAPES[0], torch.bfloat16)
    requests = [case.inputs(length, seed) for seed, length in enumerate((9, 1, 30, 17))]
    alone = [case.cut(request, []) for request in requests]
    cache = case.cache(8)
    begins = [(0, 4), (0, 1), (0, 29), (0, 2)]
    ends = [(4, 9), (1, 1), (29, 30), (2, 17)]
    for which, pieces in ((0, begins), (1, ends)):
        chosen = [i for i, (begin, end) in enumerate(pieces) if begin < end]
        parts = [requests[i].piece(*pieces[i]) for i in chosen]
        packed = Inputs(*(torch.cat(together) for together in zip(*parts, strict=True)))
        rows = [(pieces[i][1] - pieces[i][0], pieces[i][0], 2 * i + which, 2 * i + 1 - which) for i in chosen]
        result = case(packed, cache, rows)
        assert torch.equal(case(packed, cache, rows), result)
        for i, rows_of_one in zip(chosen, result.split([row[0] for row in rows]), strict=True):
            assert torch.equal(rows_of_one, alone[i][slice(*pieces[i])])


def test_threads_change_nothing(ops: Ops, threads: int) -> None:
    case = Case(ops, SHAPES[2], torch.float32)
    inputs = case.inputs(40)
    assert torch.equal(case.cut(inputs, [1, 5]), case.cut(inputs, []))


def test_nothing_else_is_written(ops: Ops) -> None:
    case = Case(ops, SHAPES[1], torch.float32)
    cache = case.cache(3)
    case(case.inputs(5), cache, [(5, 0, 0, 2)])
    for states in cache.conv, cache.recurrent:
        assert states[:2].isnan().all() and states[2, 0].isnan().all() and states[2, 1].isfinite().all()


@pytest.mark.parametrize("width", [16, 37])
def test_gates(ops: Ops, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, 11, 3, width, generator=generator).to(dtype)
    wide = torch.cat((gate, x), dim=1)  # strided, as in a fused projection
    gate = wide[:, :3]
    weight = torch.randn(width, generator=generator).to(dtype)
    a, g = x.double(), gate.double()
    normed = a * torch.rsqrt(a.square().mean(-1, keepdim=True) + 1e-6)
    truth = normed * weight.double() * F.silu(g)
    result = ops.gated_rms_norm(x, weight, gate, 1e-6).double()
    assert ((result - truth).abs() <= 4 * ROUNDING[dtype] * (truth.abs() + 0.01)).all()
    truth = a * torch.sigmoid(g)
    assert ((ops.sigmoid_mul(x, gate).double() - truth).abs() <= ROUNDING[dtype] * (truth.abs() + 0.1)).all()
    wide_weight = 1 + weight.float() / 300  # more digits than the dtype has
    truth = normed * wide_weight.double()
    for normed_rows in (ops.rms_norm(x, wide_weight, 1e-6), ops.rms_norm(x[:, 1], wide_weight, 1e-6)):
        expected = truth if normed_rows.dim() == 3 else truth[:, 1]
        assert ((normed_rows.double() - expected).abs() <= ROUNDING[dtype] * (expected.abs() + 0.01)).all()
    total = (x[:, 0] + x[:, 1]).clone()
    both = ops.add_rms_norm(x[:, 0], x[:, 1].clone(), wide_weight, 1e-6)
    assert torch.equal(both[0], ops.rms_norm(total, wide_weight, 1e-6)) and torch.equal(both[1], total)


def test_wrong_arguments_are_named(ops: Ops) -> None:
    case = Case(ops, SHAPES[0], torch.float32)
    inputs, cache = case.inputs(5), case.cache(2)
    with pytest.raises(ValueError, match="weight: expected"):
        case.ops.causal_conv(inputs.x, case.taps.bfloat16(), cache, 0, _rows([0, 5], 0, 0, 1))
    for rows, words in (
        (_rows([0, 4], 0, 0, 1), "rows: expected cu_q"),
        (_rows([0, 5], 0, 0, 2), "rows: expected"),
        (_rows([0, 5], 0, -1, 1), "rows: expected"),
    ):
        with pytest.raises(ValueError, match=words):
            case.ops.causal_conv(inputs.x, case.taps, cache, 0, rows)
        with pytest.raises(ValueError, match=words):
            case.ops.delta_rule(case.of_rule(inputs), cache, 0, rows)
    with pytest.raises(ValueError, match="layer: expected 0 to 1, got 2"):
        case.ops.causal_conv(inputs.x, case.taps, cache, 2, _rows([0, 5], 0, 0, 1))
    with pytest.raises(ValueError, match="gate: expected"):
        case.ops.sigmoid_mul(inputs.q, inputs.v)


def _rows(cu_q: list[int], start: int, read: int, write: int) -> StateRows:
    return StateRows(*(torch.tensor(values) for values in (cu_q, [start], [read], [write])))
