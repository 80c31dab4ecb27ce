"""The reference itself: formulas against torch in float64, and rows that do not depend on their neighbours.

Its caches and attention are checked with every other implementation in test_cache_ops.py and test_attention.py.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hydra_engine.backend.reference.ops import ALL_OPS, ReferenceOps

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPSILON = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
ROWS, WIDTH = 70, 96


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(result: Tensor, truth: Tensor, roundings: int = 1) -> None:
    allowed = roundings * EPSILON[result.dtype] * (truth.abs() + 0.1)
    assert ((result.double() - truth).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ["none", "silu", "gelu", "gelu_tanh", "quick_gelu"])
def test_linear(dtype: torch.dtype, act: str) -> None:
    ops = ReferenceOps()
    x, weight, bias = random(ROWS, WIDTH, dtype=dtype), random(33, WIDTH, dtype=dtype) / 8, random(33, dtype=dtype)
    sums = F.linear(x.double(), weight.double(), bias.double())
    truth = {
        "none": sums,
        "silu": F.silu(sums),
        "gelu": F.gelu(sums),
        "gelu_tanh": F.gelu(sums, approximate="tanh"),
        "quick_gelu": sums * torch.sigmoid(1.702 * sums),
    }[act]
    packed = ops.pack_linear(weight, bias)
    assert (packed.num_out, packed.num_in) == (33, WIDTH)
    result = ops.linear(x, packed, act=act)
    assert result.dtype == dtype
    assert_rounded(result, truth, roundings=8 if dtype == torch.float32 else 2)
    assert ops.linear(x, packed, act=act, out_dtype=torch.float32).dtype == torch.float32
    assert ops.linear(x[:0], packed).shape == (0, 33)
    residual = random(ROWS, 33, dtype=dtype, seed=1)
    added = ops.linear(x, packed, act=act, residual=residual)
    assert added.dtype == dtype
    error = (added.double() - (truth + residual)).abs()  # torch rounds what is added, too
    assert (error <= 8 * EPSILON[dtype] * (truth.abs() + residual.abs() + 0.1)).all()
    assert ops.linear(x[:0], packed, residual=residual[:0]).shape == (0, 33)
    with pytest.raises(ValueError, match=r"residual: expected \[70, 33\]"):
        ops.linear(x, packed, residual=residual[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_and_gates(dtype: torch.dtype) -> None:
    ops = ReferenceOps()
    x, residual = random(ROWS, WIDTH, dtype=dtype), random(ROWS, WIDTH, dtype=dtype, seed=1)
    weight, bias = random(WIDTH, dtype=dtype, seed=2), random(WIDTH, dtype=dtype, seed=3)
    exact = (x + residual).double()
    truth = exact / torch.sqrt(exact.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    normed, total = ops.add_rms_norm(x, residual.clone(), weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert_rounded(normed, truth, roundings=2)
    assert torch.equal(ops.rms_norm(total, weight, 1e-5), normed)
    layer = F.layer_norm(x.double(), (WIDTH,), weight.double(), bias.double(), 1e-5)
    assert_rounded(ops.layer_norm(x, weight, bias, 1e-5), layer, roundings=2)
    gate, up = x.double().chunk(2, dim=-1)
    assert_rounded(ops.act_and_mul(x, "silu"), F.silu(gate) * up, roundings=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(64, 96), (999, 77), (1024, 512)], ids=str)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    """The place in the call does not count: torch picks its matrix product by shape, so the reference keeps the
    shape."""
    ops = ReferenceOps()
    num_in, num_out = sizes
    x, weight = random(ROWS, num_in, dtype=dtype), random(num_in, dtype=dtype, seed=4)
    packed = ops.pack_linear(random(num_out, num_in, dtype=dtype, seed=5))
    gates = random(ROWS, 2 * num_in, dtype=dtype, seed=6)
    calls = {
        "linear": lambda part: ops.linear(x[part], packed),
        "rms_norm": lambda part: ops.rms_norm(x[part], weight, 1e-5),
        "layer_norm": lambda part: ops.layer_norm(x[part], weight, weight, 1e-5),
        "act_and_mul": lambda part: ops.act_and_mul(gates[part], "silu"),
    }
    for name, call in calls.items():
        whole = call(slice(None))
        for begin, end in ((0, 1), (1, 2), (31, 32), (32, 33), (69, 70), (0, 7), (5, 44), (38, 70)):
            assert torch.equal(call(slice(begin, end)), whole[begin:end]), f"{name} of rows {begin} to {end}"


def test_choices_name_every_op_once() -> None:
    assert tuple(choice.op for choice in ReferenceOps().choices()) == ALL_OPS


def test_wrong_arguments_are_named_with_what_was_expected() -> None:
    ops = ReferenceOps()
    packed = ops.pack_linear(torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"x: expected \[T, 4\].*got \[2, 5\]"):
        ops.linear(torch.zeros(2, 5), packed)
    with pytest.raises(ValueError, match="act: expected none, silu"):
        ops.linear(torch.zeros(2, 4), packed, act="relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight: expected"):
        ops.pack_linear(torch.zeros(3))
    with pytest.raises(ValueError, match=r"weight: expected .*float32.*bfloat16"):
        ops.rms_norm(torch.zeros(2, 4), torch.zeros(4).bfloat16(), 1e-5)
    with pytest.raises(ValueError, match=r"residual: expected \[2, 4\]"):
        ops.add_rms_norm(torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(4), 1e-5)
    with pytest.raises(ValueError, match=r"gate_up: expected \[T, 2 \* F\]"):
        ops.act_and_mul(torch.zeros(2, 5), "silu")
