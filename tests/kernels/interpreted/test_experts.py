"""Mixtures of experts against the reference: tiles that are not full, experts without rows, rows without experts,
weights of every kind, rows that keep bits."""

from __future__ import annotations

from typing import Any
from weakref import finalize

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_engine.backend.base import Routes
from hydra_engine.backend.experts_memory import ExpertsShape, device_bytes
from hydra_engine.backend.quantized import QuantizedWeight
from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_kernels.experts import Matrices, grouped_experts, route_tokens, stack
from tests.kernels.comparison import DTYPES, assert_close, strided
from tests.kernels.interpreted.test_quantized_linear import FLOATS, packed, random, weight_of
from tests.kernels.poison import poisoned_memory  # noqa: F401

OPS = ReferenceOps()
EXPERTS, WIDTH, INNER = 5, 96, 32


@pytest.mark.quick("128-8-torch.bfloat16", "7-7-torch.float32")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_experts", "k"), [(1, 1), (7, 7), (60, 4), (128, 8)])
def test_routes(num_experts: int, k: int, dtype: torch.dtype) -> None:
    logits, shared = strided(random(5, num_experts).to(dtype) * 3), strided(random(5, 1, seed=1).to(dtype))
    logits[1] = 0.5  # ties
    logits[2, : max(num_experts - k, 0)] = float("-inf")
    for renormalise in (False, True):
        expected = OPS.route(logits, k, renormalise=renormalise, shared=shared)
        chosen, weights = route_tokens(logits, k, renormalise=renormalise, shared=shared)
        assert torch.equal(chosen, expected.experts)
        torch.testing.assert_close(weights, expected.weights, rtol=1e-5, atol=1e-30)
        plain = route_tokens(logits[3:4], k, renormalise=renormalise)
        assert torch.equal(plain[0], chosen[3:4, :k]) and torch.equal(plain[1], weights[3:4, :k])


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # infinity - infinity, as on a GPU
def test_rows_that_are_not_finite_have_valid_experts_and_nan() -> None:
    logits = random(4, 20)
    logits[0, 3], logits[1], logits[2, 19] = float("nan"), float("nan"), float("inf")
    chosen, weights = route_tokens(logits, 4, renormalise=True)
    assert chosen.min() >= 0 and chosen.max() < 20 and all(len(set(row)) == 4 for row in chosen.tolist())
    assert weights[:3].isnan().all() and weights[3].isfinite().all()


def quantised(num_bits: int, group_size: int, *, offsets: bool) -> list[list[QuantizedWeight]]:
    """Weights of gate and up, and of down."""
    shapes = (2 * INNER, WIDTH), (WIDTH, INNER)
    sizes = [(*shape, min(group_size, shape[1])) for shape in shapes]
    plain = [weight_of(*size, num_bits, offsets=offsets) for size in sizes]
    return [[one.scaled(torch.full((one.num_out,), e + 0.5)) for e in range(EXPERTS)] for one in plain]


def floats(dtype: torch.dtype) -> list[list[Tensor]]:
    shapes = (2 * INNER, WIDTH), (WIDTH, INNER)
    return [[(random(*s, seed=e) * s[1] ** -0.5).to(dtype) for e in range(EXPERTS)] for s in shapes]


def routes_of(rows: int, k: int) -> tuple[Tensor, Tensor]:
    """Expert 3 has no rows, one token has no experts, and expert 1 has most rows."""
    chosen = (torch.arange(rows * k) * 7 % 3).view(rows, k).int()
    chosen[chosen == 0] = 4
    chosen[: 2 * rows // 3, 0] = 1
    chosen[rows // 2] = -1
    return chosen, torch.rand(rows, k, generator=torch.Generator().manual_seed(2))


def expected_of(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: list[Tensor], down: list[Tensor], dtype: torch.dtype
) -> Tensor:
    packed_experts = OPS.pack_experts(gate_up, down)
    return OPS.experts(x.to(dtype), Routes(chosen, weights), packed_experts, "silu").to(x.dtype)


@pytest.mark.quick("True-torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("many", [False, True])
def test_experts(dtype: torch.dtype, *, many: bool) -> None:
    gate_up, down = floats(dtype)
    for rows, k in ((1, 2), (31, 2)):
        x, (chosen, weights) = strided(random(rows, WIDTH).to(dtype)), routes_of(rows, k)
        stacks = torch.stack(gate_up), torch.stack(down)
        stacks[0][3], stacks[1][3] = float("nan"), float("nan")
        result = grouped_experts(x, chosen, weights, *stacks, "silu", many=many)
        expected = expected_of(x, chosen, weights, gate_up, down, dtype)
        assert result.is_contiguous() and not result[rows // 2].any()
        assert_close(result, expected, ulps=8, atol=float(expected.abs().max()) * 4 * torch.finfo(dtype).eps)


@pytest.mark.quick("4-32-True")
@pytest.mark.parametrize(
    ("num_bits", "group_size", "offsets"), [(8, 96, False), (4, 32, True), (4, 96, False), (FLOATS, 96, False)]
)
def test_quantised_experts(num_bits: int, group_size: int, *, offsets: bool) -> None:
    given = quantised(num_bits, group_size, offsets=offsets)
    stacks: list[Matrices] = [stack([packed(weight) for weight in part]) for part in given]
    plain = [[weight.dequantized(torch.float32) for weight in part] for part in given]
    for rows, dtype in ((1, torch.float16), (31, torch.float32)):
        x, (chosen, weights) = strided(random(rows, WIDTH).to(dtype)), routes_of(rows, 2)
        result = grouped_experts(x, chosen, weights, *stacks, "silu")
        expected = expected_of(x, chosen, weights, *plain, torch.float32)
        assert_close(result, expected, ulps=8, atol=float(expected.abs().max()) * 4 * torch.finfo(dtype).eps)


@pytest.mark.slow
def test_a_row_has_the_same_bits_in_every_step() -> None:
    (gate_up, down), x = floats(torch.float32), random(18, WIDTH)
    stacks, (chosen, weights) = (torch.stack(gate_up), torch.stack(down)), routes_of(18, 2)
    for many in (True, False):
        full = grouped_experts(x, chosen, weights, *stacks, "silu", many=many)
        part = grouped_experts(x[7:8], chosen[7:8], weights[7:8], *stacks, "silu", many=many)
        assert torch.equal(part, full[7:8])


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that exist at once."""

    now = peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if "empty" in func.name():
            size = made.untyped_storage().nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            finalize(made.untyped_storage(), self._freed, size)
        return made

    def _freed(self, num_bytes: int) -> None:
        self.now -= num_bytes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_allocated_is_what_the_memory_plan_says(dtype: torch.dtype) -> None:
    """`device_bytes` counts the router's products too, and not the result."""
    rows, k = 40, 3
    x, (gate_up, down) = random(rows, WIDTH).to(dtype), map(torch.stack, floats(dtype))
    routes = routes_of(rows, k)
    with Allocations() as seen:
        out = grouped_experts(x, *routes, gate_up, down, "silu")
    shape = ExpertsShape(EXPERTS, k, WIDTH, INNER, dtype.itemsize, quantized=False)
    assert seen.peak - out.nbytes == device_bytes(shape, rows) - rows * (4 * EXPERTS + 8 * k)


def test_nothing_in_nothing_out() -> None:
    stacks = [torch.stack(part) for part in floats(torch.float32)]
    none = torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2)
    assert grouped_experts(torch.empty(0, WIDTH), *none, *stacks, "silu").shape == (0, WIDTH)
    assert not grouped_experts(
        torch.ones(2, WIDTH), torch.empty(2, 0, dtype=torch.int32), torch.empty(2, 0), *stacks, "silu"
    ).any()
    assert route_tokens(torch.empty(0, 4), 2, renormalise=True)[0].shape == (0, 2)


def test_messages() -> None:
    stacks = [torch.stack(part) for part in floats(torch.float32)]
    x, (chosen, weights) = torch.ones(4, WIDTH), routes_of(4, 2)
    with pytest.raises(ValueError, match=r"k: expected 1 to 4 experts, got 5"):
        route_tokens(torch.ones(2, 4), 5, renormalise=True)
    with pytest.raises(ValueError, match=r"shared: expected \[2, 1\]"):
        route_tokens(torch.ones(2, 4), 1, renormalise=True, shared=torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"chosen: expected contiguous \[4, 2\] torch.int32"):
        grouped_experts(x, chosen.long(), weights, *stacks, "silu")
    with pytest.raises(ValueError, match=r"weights: expected contiguous \[4, 2\] torch.float32"):
        grouped_experts(x, chosen, weights.half(), *stacks, "silu")
    with pytest.raises(ValueError, match=r"act: expected one of silu, .*, got 'none'"):
        grouped_experts(x, chosen, weights, *stacks, "none")
    with pytest.raises(ValueError, match=r"down: expected \[E, N, K\] torch.float16"):
        grouped_experts(x.half(), chosen, weights, *stacks, "silu")
    with pytest.raises(ValueError, match=r"gate_up: expected \[5, 64, 96\]"):
        grouped_experts(x, chosen, weights, stacks[0][:, :62].contiguous(), stacks[1], "silu")
