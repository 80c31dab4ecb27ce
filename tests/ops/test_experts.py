"""Mixtures of experts: the choice of experts, and their outputs against float64 and the products of `linear`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hydra_engine.backend.base import Ops, Routes
from hydra_engine.backend.cpu.experts import NativeExperts
from hydra_engine.backend.cpu.ops import NativeOps
from hydra_engine.backend.quantized import QuantizedWeight, quantized
from tests.ops.test_quantized_linear import in_two_levels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Weights = list[Tensor] | list[QuantizedWeight]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights_of(experts: int, num_in: int, inner: int, form: str, dtype: torch.dtype) -> tuple[Weights, Weights]:
    """Weights (gate_up, down) in one format."""
    if form == "two levels":
        sizes = (2 * inner, num_in, 32, 4), (num_in, inner, 16, 6)
        gate_up, down = ([in_two_levels(size, offsets=size[3] == 4) for _ in range(experts)] for size in sizes)
        return gate_up, down
    shapes = (2 * inner, num_in), (num_in, inner)
    plain = [[normal(*shape, seed=e, dtype=dtype) / shape[1] ** 0.5 for e in range(experts)] for shape in shapes]
    if form == "float":
        return plain[0], plain[1]
    bits, group = {"int8": (8, None), "int4": (4, 32)}[form]
    many = [[quantized(w, bits, group or w.shape[1], torch.float16) for w in part] for part in plain]
    return many[0], many[1]


def routes_of(rows: int, experts: int, k: int, seed: int = 0) -> Routes:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(rows)])
    return Routes(chosen.int(), torch.rand(rows, k, generator=generator))


def exact(x: Tensor, routes: Routes, gate_up: list[Tensor], down: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The formula in float64; the inner rows are rounded to `dtype` as `linear_act_and_mul` does."""
    total = torch.zeros(x.shape, dtype=torch.float64)
    for t, j in torch.cartesian_prod(torch.arange(len(x)), torch.arange(routes.experts.shape[1])).tolist():
        expert = int(routes.experts[t, j])
        if expert >= 0:
            gate, up = (gate_up[expert].double() @ x[t].double()).to(dtype).double().chunk(2)
            inner = (F.silu(gate).to(dtype).double() * up).to(dtype).double()
            total[t] += routes.weights[t, j].double() * (down[expert].double() @ inner)
    return total


# ---- the choice


@pytest.mark.parametrize(
    ("renormalise", "dtype"), [(False, torch.float32), (True, torch.bfloat16), (True, torch.float16)]
)
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (5, 5), (60, 4), (513, 10)])
def test_routes_are_the_largest_of_the_softmax(
    ops: Ops, dtype: torch.dtype, experts: int, k: int, *, renormalise: bool
) -> None:
    around = torch.full((11, experts + 5), float("nan"), dtype=dtype)
    around[:9, 2 : 2 + experts] = normal(9, experts, dtype=dtype) * 4
    logits, shared = around[:9, 2 : 2 + experts], normal(9, 1, seed=1, dtype=dtype)
    routes = ops.route(logits, k, renormalise=renormalise, shared=shared)
    assert (routes.experts.shape, routes.experts.dtype, routes.weights.dtype) == (
        (9, k + 1),
        torch.int32,
        torch.float32,
    )
    values, order = torch.sort(logits.double(), dim=1, descending=True, stable=True)
    assert torch.equal(routes.experts[:, :k].long(), order[:, :k]) and (routes.experts[:, k] == experts).all()
    weights = torch.softmax(values, dim=1)[:, :k]
    weights = weights / weights.sum(1, keepdim=True) if renormalise else weights
    expected = torch.cat((weights, torch.sigmoid(shared.double())), dim=1)
    torch.testing.assert_close(routes.weights.double(), expected, rtol=4e-6, atol=0)
    for row in range(9):
        alone = ops.route(logits[row : row + 1], k, renormalise=renormalise, shared=shared[row : row + 1])
        assert all(torch.equal(*pair) for pair in zip(alone, [part[row : row + 1] for part in routes], strict=True))
    plain = ops.route(logits, k, renormalise=renormalise)
    assert torch.equal(plain.experts, routes.experts[:, :k]) and torch.equal(plain.weights, routes.weights[:, :k])


def test_of_equal_logits_the_lowest_expert_is_first(ops: Ops) -> None:
    logits = torch.zeros(3, 40)
    logits[1, 7::4] = 1.0
    logits[2] = float("-inf")
    logits[2, 33] = logits[2, 39] = -3.0
    routes = ops.route(logits, 3, renormalise=True)
    assert routes.experts.tolist() == [[0, 1, 2], [7, 11, 15], [33, 39, 0]]
    torch.testing.assert_close(routes.weights[1], torch.full((3,), 1 / 3))
    assert routes.weights[2].tolist() == [0.5, 0.5, 0.0]


def test_rows_that_are_not_finite_have_valid_experts_and_nan(ops: Ops) -> None:
    logits = normal(5, 20)
    clean = ops.route(logits, 4, renormalise=True)
    logits[1, 3], logits[2], logits[3, 19] = float("nan"), float("nan"), float("inf")
    routes = ops.route(logits, 4, renormalise=True)
    assert routes.experts.min() >= 0 and routes.experts.max() < 20
    assert all(len(set(row)) == 4 for row in routes.experts.tolist())
    assert routes.weights[1:4].isnan().all()
    assert torch.equal(routes.weights[[0, 4]], clean.weights[[0, 4]])
    x, packed = normal(5, 8), ops.pack_experts(*weights_of(20, 8, 4, "float", torch.float32))
    result = ops.experts(x, routes, packed, "silu")
    assert result[1:4].isnan().all() and torch.equal(result[[0, 4]], ops.experts(x, clean, packed, "silu")[[0, 4]])


# ---- the outputs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "experts", "k", "num_in", "inner"), [(1, 3, 1, 5, 7), (7, 6, 2, 40, 33), (40, 4, 4, 64, 48)]
)
def test_outputs_match_float64(
    ops: Ops, dtype: torch.dtype, rows: int, experts: int, k: int, num_in: int, inner: int
) -> None:
    x, routes = normal(rows, num_in, seed=9, dtype=dtype), routes_of(rows, experts, k)
    gate_up, down = weights_of(experts, num_in, inner, "float", dtype)
    packed = ops.pack_experts(gate_up, down)
    assert (packed.num_experts, packed.num_in, packed.num_inner) == (experts, num_in, inner)
    truth = exact(x, routes, gate_up, down, dtype)  # type: ignore[arg-type]
    result = ops.experts(x, routes, packed, "silu")
    assert result.dtype is dtype and result.is_contiguous()
    torch.testing.assert_close(
        result.double(), truth, rtol=0, atol=4 * torch.finfo(dtype).eps * float(truth.abs().max())
    )


FORMS = ["float", "narrow", "int8", "int4", "two levels"]


@pytest.mark.quick("native", "reference-1-int4-torch.bfloat16", "reference-1-float-")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_products_have_the_bits_of_linear(ops: Ops, threads: int, form: str, dtype: torch.dtype) -> None:
    """Sends each token to one expert with the weight 1, so that nothing is added. Narrow: 16 bits for float32 rows."""
    experts, (num_in, inner), rows = 5, (512, 256) if form == "two levels" else (96, 160), 70
    kind = torch.bfloat16 if form == "narrow" else dtype
    gate_up, down = weights_of(experts, num_in, inner, "float" if form == "narrow" else form, kind)
    packed = ops.pack_experts(gate_up, down, dtype)
    x = normal(rows, num_in, seed=9, dtype=dtype)
    chosen = (torch.arange(rows) ** 2 % 7 % experts).int()[:, None]
    chosen[:40] = 3
    result = ops.experts(x, Routes(chosen, torch.ones(rows, 1)), packed, "silu")
    for expert in range(experts):
        some = (chosen[:, 0] == expert).nonzero()[:, 0]
        inside = ops.linear_act_and_mul(x[some], [ops.pack_linear(gate_up[expert], rows=dtype)], "silu")
        assert torch.equal(result[some], ops.linear(inside, ops.pack_linear(down[expert], rows=dtype))), expert


@pytest.mark.quick("native", "reference-1-int4-torch.bfloat16", "reference-1-float-")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_the_others(ops: Ops, threads: int, form: str, dtype: torch.dtype) -> None:
    experts, k, (num_in, inner) = 9, 4, (256, 256) if form == "two levels" else (96, 64)
    kind = torch.bfloat16 if form == "narrow" else dtype
    packed = ops.pack_experts(*weights_of(experts, num_in, inner, "float" if form == "narrow" else form, kind), dtype)
    x, routes = normal(64, num_in, seed=9, dtype=dtype), routes_of(64, experts, k)
    whole = ops.experts(x, routes, packed, "silu")
    for begin, end in ((0, 1), (13, 14), (63, 64), (5, 8), (31, 64)):
        part = Routes(routes.experts[begin:end].contiguous(), routes.weights[begin:end].contiguous())
        assert torch.equal(ops.experts(x[begin:end], part, packed, "silu"), whole[begin:end]), (begin, end)


@pytest.mark.parametrize("form", ["float", "int4"])
def test_many_rows_are_cut_without_changing_them(isa: str, threads: int, form: str) -> None:
    """Has more pairs than are multiplied at once, and outputs that would not stay in the caches."""
    ops = NativeOps()
    packed = ops.pack_experts(*weights_of(9, 70 if form == "float" else 64, 32, form, torch.bfloat16))
    x, routes = normal(1100, packed.num_in, dtype=torch.bfloat16), routes_of(1100, 9, 8)
    whole = ops.experts(x, routes, packed, "silu")
    for rows in (slice(0, 1), slice(1023, 1025), slice(1099, 1100)):
        part = Routes(*(column[rows].contiguous() for column in routes))
        assert torch.equal(ops.experts(x[rows], part, packed, "silu"), whole[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_chosen_experts_and_given_rows_are_read(ops: Ops, threads: int, dtype: torch.dtype) -> None:
    gate_up, down = weights_of(8, 40, 24, "float", dtype)
    x, routes = normal(33, 40, seed=9, dtype=dtype), routes_of(33, 3, 2)  # of experts 0 to 2
    expected = ops.experts(x, routes, ops.pack_experts(gate_up, down), "gelu")
    for weight in (*gate_up[3:], *down[3:]):
        weight.fill_(float("nan"))
    around = torch.full((35, 51), float("nan"), dtype=dtype)
    around[1:-1, 6:46] = x
    packed = ops.pack_experts(gate_up, down)
    everywhere = Routes(torch.full((33, 2), 7, dtype=torch.int32), routes.weights)
    assert ops.experts(x, everywhere, packed, "gelu").isnan().all()  # also leaves NaN in reused working memory
    assert torch.equal(ops.experts(around[1:-1, 6:46], routes, packed, "gelu"), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_without_rows_and_routes_without_experts_are_legal(ops: Ops, dtype: torch.dtype) -> None:
    packed = ops.pack_experts(*weights_of(4, 32, 16, "float", dtype))
    x, routes = normal(6, 32, seed=9, dtype=dtype), routes_of(6, 4, 3)
    empty = ops.experts(x[:0], Routes(routes.experts[:0], routes.weights[:0]), packed, "silu")
    assert empty.shape == (0, 32) and empty.dtype is dtype
    chosen = routes.experts.clone()
    chosen[2], chosen[4, 0] = -1, -1
    weights = routes.weights.masked_fill(chosen < 0, float("nan"))
    result = ops.experts(x, Routes(chosen, weights), packed, "silu")
    assert not result[2].any()
    rest = Routes(chosen[4:5, 1:].contiguous(), weights[4:5, 1:].contiguous())
    assert torch.equal(result[4:5], ops.experts(x[4:5], rest, packed, "silu"))
    others = [0, 1, 3, 5]
    assert torch.equal(result[others], ops.experts(x, routes, packed, "silu")[others])


def test_a_token_may_choose_an_expert_twice(ops: Ops) -> None:
    packed = ops.pack_experts(*weights_of(4, 32, 16, "float", torch.float32))
    x, weights = normal(1, 32, seed=9), torch.tensor([[0.25, 0.5, 0.125]])
    twice = ops.experts(x, Routes(torch.tensor([[2, 2, 1]], dtype=torch.int32), weights), packed, "silu")
    parts = [
        ops.experts(x, Routes(torch.tensor([[e]], dtype=torch.int32), torch.ones(1, 1)), packed, "silu") for e in (2, 1)
    ]
    torch.testing.assert_close(twice, parts[0] * 0.75 + parts[1] * 0.125)


def test_wrong_arguments_are_named_with_expected_and_actual(ops: Ops) -> None:
    gate_up, down = weights_of(4, 32, 16, "float", torch.float32)
    packed, x, routes = ops.pack_experts(gate_up, down), normal(6, 32), routes_of(6, 4, 2)
    for number in (4, -2):
        with pytest.raises(ValueError, match=f"experts: expected -1 to 3, got {number}"):
            ops.experts(x, routes._replace(experts=torch.full_like(routes.experts, number)), packed, "silu")
    with pytest.raises(ValueError, match=r"x: expected \[T, 32\].*got \[6, 31\]"):
        ops.experts(x[:, :31], routes, packed, "silu")
    with pytest.raises(ValueError, match=r"experts: expected .*\[6, 2\] torch.int32, got .*int64"):
        ops.experts(x, routes._replace(experts=routes.experts.long()), packed, "silu")
    with pytest.raises(ValueError, match=r"weights: expected .*\[6, 2\] torch.float32, got \[6, 1\]"):
        ops.experts(x, routes._replace(weights=routes.weights[:, :1]), packed, "silu")
    with pytest.raises(ValueError, match="one weight per expert in each, got 4 and 3"):
        ops.pack_experts(gate_up, down[:3])
    with pytest.raises(ValueError, match=r"gate_up\[2\]: expected \[32, 32\].*got \[30, 32\]"):
        ops.pack_experts([*gate_up[:2], normal(30, 32), gate_up[3]], down)
    with pytest.raises(ValueError, match=r"down\[3\]: expected .*float32.*got .*bfloat16"):
        ops.pack_experts(gate_up, [*down[:3], normal(32, 16, dtype=torch.bfloat16)])
    for k in (0, 5):
        with pytest.raises(ValueError, match=f"k: expected 1 to 4 experts, got {k}"):
            ops.route(torch.zeros(2, 4), k, renormalise=True)
    with pytest.raises(ValueError, match=r"shared: expected \[2, 1\].*got \[2, 2\]"):
        ops.route(torch.zeros(2, 4), 1, renormalise=True, shared=torch.zeros(2, 2))


@pytest.mark.parametrize("form", ["float", "int4"])
def test_packed_experts_are_restored_from_their_bytes(form: str) -> None:
    ops, weights = NativeOps(), weights_of(3, 64, 32, form, torch.bfloat16)
    packed = ops.pack_experts(*weights)
    assert isinstance(packed, NativeExperts)
    restored = NativeExperts.from_packed(3, packed.forms, packed.data)
    assert restored.nbytes == packed.nbytes == sum(part.nbytes for part in packed.data)
    x, routes = normal(5, 64, dtype=torch.bfloat16), routes_of(5, 3, 2)
    assert torch.equal(ops.experts(x, routes, restored, "silu"), ops.experts(x, routes, packed, "silu"))
    with pytest.raises(ValueError, match="data: expected"):
        NativeExperts.from_packed(3, packed.forms, [packed.data[0][:-64], packed.data[1]])
