"""Norms and gated activations against float64 torch: every level and dtype, odd sizes, strides, poisoned memory."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend.cpu.linear import DTYPE_CODES, act_and_mul, add_rms_norm, layer_norm, rms_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(1, 1), (3, 7), (2, 16), (5, 100), (70, 128), (4, 1031)]
EPS = 1e-5
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """The formula of transformers' LlamaRMSNorm; for float64 input everything stays float64."""
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def assert_as_good_as(result: Tensor, plain: Tensor, truth: Tensor) -> None:
    allowed = 2 * (plain.double() - truth).abs().max() + 1e-6 * (1 + truth.abs().max())
    error = (result.double() - truth).abs().max()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def assert_almost_bitwise(result: Tensor, plain: Tensor) -> None:
    """Same roundings at the same places: all but a few values, at rounding borders, are equal."""
    if result.dtype != torch.float32:
        assert (result != plain).sum() <= 1 + 0.01 * result.numel()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_rms_norm(isa: str, dtype: torch.dtype, size: tuple[int, int]) -> None:
    x, weight = random(size, dtype), random(size[1:], dtype)
    result = rms_norm(x, weight, EPS)
    assert result.dtype == dtype and result.is_contiguous()
    assert_as_good_as(result, plain_rms_norm(x, weight), plain_rms_norm(x.double(), weight.double()))
    assert_almost_bitwise(result, plain_rms_norm(x, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_add_rms_norm_norms_the_rounded_sum(isa: str, dtype: torch.dtype, size: tuple[int, int]) -> None:
    x, residual, weight = random(size, dtype), random(size, dtype, seed=1), random(size[1:], dtype)
    expected = x + residual
    normed, total = add_rms_norm(x, residual.clone(), weight, EPS)
    assert torch.equal(total, expected)
    assert torch.equal(normed, rms_norm(expected, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_layer_norm(isa: str, dtype: torch.dtype, size: tuple[int, int]) -> None:
    x = (random(size, torch.float32) + 3).to(dtype)  # a mean away from zero
    weight, bias = random(size[1:], dtype), random(size[1:], dtype, seed=2)
    result = layer_norm(x, weight, bias, EPS)
    truth = F.layer_norm(x.double(), size[1:], weight.double(), bias.double(), EPS)
    assert_as_good_as(result, F.layer_norm(x, size[1:], weight, bias, EPS), truth)


@pytest.mark.quick("float32", "bfloat16", "avx", "amx")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_act_and_mul(isa: str, dtype: torch.dtype, act: str, size: tuple[int, int]) -> None:
    rows, columns = size
    gate_up = random((rows, 2 * columns), dtype) * 4
    gate, up = gate_up[:, :columns], gate_up[:, columns:]
    result = act_and_mul(gate_up, act)  # type: ignore[arg-type]
    plain = ACTIVATIONS[act](gate) * up
    assert_as_good_as(result, plain, ACTIVATIONS[act](gate.double()) * up.double())
    if act in ("none", "silu"):  # torch's own error is large on the tails of gelu, and quick_gelu has two roundings
        assert_almost_bitwise(result, plain)


def all_ops(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    even = x.shape[1] // 2 * 2
    return [
        rms_norm(x, weight, EPS),
        *add_rms_norm(x, residual.clone(), weight, EPS),
        layer_norm(x, weight, bias, EPS),
        act_and_mul(x[:, :even], "silu"),
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_batch_or_threads(isa: str, threads: int, dtype: torch.dtype) -> None:
    size = (70, 1031)
    x, residual, weight = random(size, dtype), random(size, dtype, seed=1), random(size[1:], dtype)
    together = all_ops(x, residual, weight, weight)
    for row in (0, 1, 34, 35, 69):
        alone = all_ops(x[row : row + 1], residual[row : row + 1], weight, weight)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 2, 15, 100])
def test_memory_around_rows_is_left_alone(isa: str, dtype: torch.dtype, columns: int) -> None:
    x, residual, weight = random((5, columns), dtype), random((5, columns), dtype, 1), random((columns,), dtype)

    def poisoned(values: Tensor) -> Tensor:
        around = torch.full((*values.shape[:-1], columns + 9), float("nan"), dtype=dtype)
        around[..., 4 : 4 + columns] = values
        return around[..., 4 : 4 + columns]

    if columns > 1:
        dense = all_ops(x, residual, weight, weight)
        strided = all_ops(poisoned(x), poisoned(residual), poisoned(weight), poisoned(weight))
        assert all(torch.equal(a, b) for a, b in zip(dense, strided, strict=True))
    guarded = torch.full((7, columns), float("nan"), dtype=dtype)
    inside = guarded[1:-1]
    arguments = (x.data_ptr(), columns, weight.data_ptr(), inside.data_ptr(), 5, columns, EPS, DTYPE_CODES[dtype])
    _C.rms_norm(*arguments)
    assert torch.equal(inside, rms_norm(x, weight, EPS))
    assert guarded[0].isnan().all() and guarded[-1].isnan().all()


def test_add_rms_norm_reuses_a_contiguous_residual_only() -> None:
    x, weight = random((4, 10), torch.bfloat16), random((10,), torch.bfloat16)
    residual = random((4, 10), torch.bfloat16, seed=1)
    assert add_rms_norm(x, residual, weight, EPS)[1].data_ptr() == residual.data_ptr()
    wide = random((4, 20), torch.bfloat16, seed=2)
    before = wide.clone()
    add_rms_norm(x, wide[:, :10], weight, EPS)
    assert torch.equal(wide, before)


def test_empty_batch_gives_empty_results(isa: str) -> None:
    empty, weight = torch.empty(0, 6), torch.ones(6)
    assert [tuple(out.shape) for out in all_ops(empty, empty, weight, weight)] == [(0, 6)] * 4 + [(0, 3)]


def test_wrong_arguments_are_named_with_expected_and_actual() -> None:
    x, weight = torch.ones(3, 6), torch.ones(6)
    with pytest.raises(ValueError, match=r"x: expected \[T, 5\].*got \[3, 6\]"):
        rms_norm(x, weight[:5], EPS)
    with pytest.raises(ValueError, match=r"weight: expected contiguous \[6\].*float32, got \[6\] torch.bfloat16"):
        rms_norm(x, weight.bfloat16(), EPS)
    with pytest.raises(ValueError, match=r"x: expected .*float32, bfloat16 or float16.*got .*float64"):
        rms_norm(x.double(), weight.double(), EPS)
    with pytest.raises(ValueError, match=r"residual: expected \[3, 6\].*got \[2, 6\]"):
        add_rms_norm(x, x[:2], weight, EPS)
    with pytest.raises(ValueError, match=r"residual: expected \[3, 6\].*got \[3, 5\]"):
        add_rms_norm(x, x[:, :5], weight, EPS)
    with pytest.raises(ValueError, match=r"bias: expected contiguous \[6\].*got \[4\]"):
        layer_norm(x, weight, weight[:4], EPS)
    with pytest.raises(ValueError, match=r"gate_up: expected \[T, 2 \* F\], got \[3, 5\]"):
        act_and_mul(x[:, :5], "silu")
    with pytest.raises(ValueError, match="act: expected one of none"):
        act_and_mul(x, "relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="columns: expected at least 1, got 0"):
        _C.rms_norm(0, 0, 0, 0, 1, 0, EPS, 0)
