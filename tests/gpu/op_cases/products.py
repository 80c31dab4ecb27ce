"""Products with weights of every kind, and with what follows them in one launch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.base import (
    Activation,
    DeferredNorm,
    PagedCache,
    Routes,
    apply_deferred_norm,
)
from hydra_engine.backend.cuda.experts import CudaExperts
from hydra_engine.backend.cuda.linear import SMALL_ROWS, WIDTH_STEP, CudaLinear, QuantizedCudaLinear, implementation
from hydra_engine.backend.quantized import FLOAT8, FLOAT8_BLOCK, QuantizedWeight, float8_product, quantized
from hydra_engine.backend.reference.ops import PlainLinear, activation
from hydra_kernels.quantized_linear import MAX_SMALL_ROWS
from tests.gpu.op_cases.inputs import REFERENCE, random
from tests.gpu.side import Side
from tests.kernels.comparison import DTYPES, assert_close, strided

# ---- linear


def close_to_product(result: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Allows two roundings of values of about 10."""
    assert result.dtype is dtype and result.is_contiguous() and result.shape == expected.shape
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(result.cpu().double(), expected.double(), rtol=3 * eps, atol=max(24 * eps, 1e-4))


@pytest.mark.quick(
    "none-True-True-1-torch.bfloat16", "gelu-True-False-16-torch.float16", "none-False-True-17-torch.float32"
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, SMALL_ROWS, SMALL_ROWS + 1])
@pytest.mark.parametrize(
    ("act", "with_bias", "with_residual"),
    [("none", True, False), ("none", False, True), ("none", True, True), ("gelu", True, False)],
)
def test_linear(
    side: Side, rows: int, dtype: torch.dtype, act: Activation, with_bias: bool, with_residual: bool
) -> None:
    weight, bias = random(56, 48, dtype=dtype, seed=1), random(56, dtype=dtype, seed=2) if with_bias else None
    x, residual = strided(random(rows, 48, dtype=dtype, seed=3)), strided(random(rows, 56, dtype=dtype, seed=4))
    expected = REFERENCE.linear(
        x.float(),
        REFERENCE.pack_linear(weight, bias),
        act=act,
        residual=residual.float() if with_residual else None,
    )
    for ops in (side.ops, side.exact):
        packed = ops.pack_linear(side.there(weight), None if bias is None else side.there(bias))
        assert packed.nbytes == weight.nbytes + (0 if bias is None else bias.nbytes)
        given = side.there(residual) if with_residual else None
        result = ops.linear(side.there(x), packed, act=act, residual=given)
        close_to_product(result, expected, dtype)
        if given is not None:
            assert torch.equal(given.cpu(), residual), "the residual was written"


@pytest.mark.quick("588-17-torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, SMALL_ROWS, SMALL_ROWS + 1])
@pytest.mark.parametrize("num_in", [27, 588])
def test_linear_of_rows_that_are_no_multiple_of_16_bytes(
    side: Side, num_in: int, rows: int, dtype: torch.dtype
) -> None:
    """The pixels of a patch are such rows."""
    weight, bias = random(56, num_in, dtype=dtype, seed=1) * 0.1, random(56, dtype=dtype, seed=2)
    x, residual = strided(random(rows, num_in, dtype=dtype, seed=3)), strided(random(rows, 56, dtype=dtype, seed=4))
    plain, bare = REFERENCE.pack_linear(weight, bias), REFERENCE.pack_linear(weight)
    for ops in (side.ops, side.exact):
        packed, without = ops.pack_linear(side.there(weight), side.there(bias)), ops.pack_linear(side.there(weight))
        assert isinstance(packed, CudaLinear) and packed.num_in == num_in
        assert dtype is torch.float32 or packed.weight.shape[1] % WIDTH_STEP == 0
        assert packed.nbytes == packed.weight.nbytes + bias.nbytes, "what is kept, zeros too"
        result = ops.linear(side.there(x), packed)
        close_to_product(result, REFERENCE.linear(x.float(), plain), dtype)
        result = ops.linear(side.there(x), without, residual=side.there(residual))
        close_to_product(result, REFERENCE.linear(x.float(), bare, residual=residual.float()), dtype)
        gated = ops.linear_act_and_mul(side.there(x), (packed,), "silu")
        close_to_product(gated, REFERENCE.linear_act_and_mul(x.float(), (plain,), "silu"), dtype)
        total = residual.float() + REFERENCE.linear(x.float(), plain)
        norm = side.there(torch.ones(56, dtype=dtype))
        _, found = ops.linear_add_rms_norm(side.there(x), packed, side.there(residual), norm, 1e-5)
        torch.testing.assert_close(found.cpu().float(), total, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("rows", [0, 3, 40])
def test_logits_are_float32(side: Side, rows: int) -> None:
    if side.device.type == "cpu" and rows > SMALL_ROWS:
        pytest.skip("torch multiplies into another dtype on a device only")
    weight, x = random(70, 64, dtype=torch.bfloat16, seed=1), random(rows, 64, dtype=torch.bfloat16)
    expected = REFERENCE.linear(x, REFERENCE.pack_linear(weight), out_dtype=torch.float32)
    packed = side.ops.pack_linear(side.there(weight))
    result = side.ops.linear(side.there(x), packed, out_dtype=torch.float32)
    assert result.dtype is torch.float32
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-5, atol=1e-4)


def test_a_row_of_an_exact_linear_does_not_depend_on_the_others(side: Side) -> None:
    weight = side.exact.pack_linear(side.there(random(48, 64, dtype=torch.float16, seed=1)))
    x = side.there(random(37, 64, dtype=torch.float16))
    whole = side.exact.linear(x, weight)
    for begin, end in pairwise((0, 1, 5, 21, 37)):
        assert torch.equal(side.exact.linear(x[begin:end], weight), whole[begin:end])


def quantized_weight(num_bits: int, group_size: int, *, offsets: bool) -> QuantizedWeight:
    """[56, 256]"""
    weight = quantized(random(56, 256, seed=1) * 0.1, num_bits, group_size, torch.float16)
    return QuantizedWeight(
        weight.values, weight.scales, random(*weight.scales.shape, seed=5) * 0.1 if offsets else None, num_bits
    )


@pytest.mark.quick("4-32-True-1-torch.float16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, MAX_SMALL_ROWS + 1])
@pytest.mark.parametrize(("num_bits", "group_size", "offsets"), [(8, 256, False), (4, 64, False), (4, 32, True)])
def test_linear_with_a_quantized_weight(
    side: Side, num_bits: int, group_size: int, offsets: bool, rows: int, dtype: torch.dtype
) -> None:
    """Is that with the dequantised one: activations are not rounded."""
    weight, bias = quantized_weight(num_bits, group_size, offsets=offsets), random(56, dtype=dtype, seed=2)
    x, residual = strided(random(rows, 256, dtype=dtype, seed=3)), strided(random(rows, 56, dtype=dtype, seed=4))
    plain = REFERENCE.pack_linear(weight.dequantized(torch.float32), bias)
    expected = REFERENCE.linear(x.float(), plain, act="gelu", residual=residual.float())
    for ops in (side.ops, side.exact):
        packed = ops.pack_linear(weight.to(side.device), side.there(bias))
        assert isinstance(packed, QuantizedCudaLinear) and (packed.num_out, packed.num_in) == weight.shape
        assert packed.nbytes == weight.nbytes + 4 * bias.numel(), "nothing is padded here, and nothing kept twice"
        result = ops.linear(side.there(x), packed, act="gelu", residual=side.there(residual))
        close_to_product(result, expected, dtype)
        logits = ops.linear(side.there(x), packed, out_dtype=torch.float32)
        close_to_product(logits, REFERENCE.linear(x.float(), plain), torch.float32)


def test_a_row_of_an_exact_linear_with_a_quantized_weight_does_not_depend_on_the_others(side: Side) -> None:
    weight = side.exact.pack_linear(quantized_weight(4, 32, offsets=True).to(side.device))
    x = side.there(random(70, 256, dtype=torch.float16))
    whole = side.exact.linear(x, weight)
    for begin, end in pairwise((0, 1, 5, 70)):
        assert torch.equal(side.exact.linear(x[begin:end], weight), whole[begin:end])


def float8_weight(num_out: int, num_in: int, group_size: int) -> QuantizedWeight:
    """A float8 weight. If groups are smaller than rows, 128 outputs share their scales."""
    values = random(num_out, num_in, seed=1).to(FLOAT8)
    scales = random(-(-num_out // FLOAT8_BLOCK), num_in // group_size, seed=5).abs() * num_in**-0.5
    if group_size < num_in:
        return QuantizedWeight(values, scales.repeat_interleave(FLOAT8_BLOCK, dim=0)[:num_out].contiguous())
    return QuantizedWeight(values, random(num_out, 1, seed=5).abs() * num_in**-0.5)


@pytest.mark.quick("18-512-128")
@pytest.mark.parametrize(("num_in", "group_size"), [(200, 200), (512, 512), (512, FLOAT8_BLOCK)])
@pytest.mark.parametrize("rows", [0, 1, SMALL_ROWS, SMALL_ROWS + 1, SMALL_ROWS + 2])
def test_linear_with_a_weight_of_floats(side: Side, rows: int, num_in: int, group_size: int) -> None:
    """Few rows are multiplied as they are, many are rounded first; those of `exact` never are."""
    weight, dtype = float8_weight(48, num_in, group_size), torch.bfloat16
    bias, residual = random(48, dtype=dtype, seed=2), strided(random(rows, 48, dtype=dtype, seed=4))
    x = strided(random(rows, num_in, dtype=dtype, seed=3))
    exact = REFERENCE.linear(x.float(), REFERENCE.pack_linear(weight.dequantized(torch.float32)))
    for ops, rounds in ((side.ops, rows > SMALL_ROWS), (side.exact, False)):
        packed = ops.pack_linear(weight.to(side.device))
        assert isinstance(packed, QuantizedCudaLinear) and packed.tensor_core_scales is not None
        blocks = packed.tensor_core_scales.nbytes if group_size == FLOAT8_BLOCK else 0
        words = 48 * (-(-num_in // 64) * 64)
        assert packed.nbytes == words + weight.scales.nbytes + blocks, "a byte of each weight"
        packed.has_been_used = rows != SMALL_ROWS + 1  # what the first product compiles is looked at once
        sums = float8_product(x, weight) if rounds else exact
        close_to_product(ops.linear(side.there(x), packed), sums, dtype)
        with_bias = ops.pack_linear(weight.to(side.device), side.there(bias))
        assert isinstance(with_bias, QuantizedCudaLinear)
        with_bias.has_been_used = True
        result = ops.linear(side.there(x), with_bias, act="gelu", residual=side.there(residual))
        rounded = sums.to(dtype).float() if rounds else sums
        close_to_product(result, activation(rounded + bias.float(), "gelu") + residual.float(), dtype)
        close_to_product(ops.linear(side.there(x), packed, out_dtype=torch.float32), exact, torch.float32)


def test_which_weights_of_floats_tensor_cores_take(side: Side) -> None:
    def takes(weight: QuantizedWeight) -> bool:
        packed = side.ops.pack_linear(weight.to(side.device))
        assert isinstance(packed, QuantizedCudaLinear)
        return packed.tensor_core_scales is not None

    assert takes(float8_weight(144, 200, 200)) and takes(float8_weight(144, 512, FLOAT8_BLOCK))
    assert not takes(float8_weight(56, 512, 512)), "outputs that are no multiple of 16"
    assert not takes(float8_weight(144, 384, FLOAT8_BLOCK)), "cuBLAS reads the scales of four blocks at a time"
    assert not takes(float8_weight(144, 512, 64))
    uneven = QuantizedWeight(random(144, 512).to(FLOAT8), random(144, 4, seed=5))
    assert not takes(uneven), "outputs of a block have scales of their own"
    assert not takes(quantized(random(64, 128), 8, 128, torch.float32)), "integers"


def test_what_computes_a_linear_follows_from_the_rows(side: Side) -> None:
    chosen = [implementation(rows, deterministic=False) for rows in (1, SMALL_ROWS, SMALL_ROWS + 1, 4096)]
    assert chosen == ["small", "small", "cublas", "cublas"]
    assert {implementation(rows, deterministic=True) for rows in (1, 17, 4096)} == {"invariant"}
    chosen = [implementation(rows, deterministic=False, quantized=True) for rows in (1, MAX_SMALL_ROWS, 65, 4096)]
    assert chosen == ["small", "small", "invariant", "invariant"]
    assert implementation(1, deterministic=True, quantized=True) == "invariant"
    floats = [implementation(n, deterministic=False, quantized=True, rounds_rows=True) for n in (1, SMALL_ROWS, 17)]
    assert floats == ["small", "small", "scaled"]
    assert implementation(17, deterministic=True, quantized=True, rounds_rows=True) == "invariant"


def test_messages_of_linear(side: Side) -> None:
    packed = side.ops.pack_linear(side.there(random(8, 16)), side.there(random(8)))
    assert isinstance(packed, PlainLinear) and (packed.num_out, packed.num_in) == (8, 16)
    x = side.there(random(2, 16))
    for bad in (x[:, :15], x.half(), x.t(), x[0]):
        with pytest.raises(ValueError, match=r"x: expected \[T, 16\] torch\.float32 with a dense last dimension"):
            side.ops.linear(bad, packed)
    with pytest.raises(ValueError, match="act: expected none, silu"):
        side.ops.linear(x, packed, act="relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"residual: expected \[2, 8\] torch\.float32"):
        side.ops.linear(x, packed, residual=x)
    with pytest.raises(ValueError, match=r"bias: expected \[8\]"):
        side.ops.pack_linear(side.there(random(8, 16)), side.there(random(7)))
    weight = quantized_weight(8, 256, offsets=False).to(side.device)
    with pytest.raises(ValueError, match=r"bias: expected \[56\]"):
        side.ops.pack_linear(weight, side.there(random(7)))
    with pytest.raises(ValueError, match=r"x: expected \[T, 256\] torch\.float32 with a dense last dimension"):
        side.ops.linear(x, side.ops.pack_linear(weight))


def test_sums_stay_float32_when_a_product_is_split(side: Side) -> None:
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction


# ---- products and what follows them


@pytest.mark.quick("[5]", "[0]")
@pytest.mark.parametrize("rows", [0, 1, 5, SMALL_ROWS + 1])
def test_products_and_gated_activations(side: Side, rows: int) -> None:
    """Uses one launch or two, and one weight or two, of which one is quantised."""
    gate, up = quantized_weight(4, 64, offsets=False), random(56, 256, dtype=torch.float16, seed=6) * 0.1
    bias = random(112, dtype=torch.float16, seed=2)
    x = strided(random(rows, 256, dtype=torch.float16, seed=3))
    whole = torch.cat((gate.dequantized(torch.float16), up))
    expected = REFERENCE.linear_act_and_mul(x, (REFERENCE.pack_linear(whole, bias),), "silu")
    norm = random(256, dtype=torch.float16, seed=5)
    of_normed = REFERENCE.linear_act_and_mul(DeferredNorm(x, norm, 1e-5), (REFERENCE.pack_linear(whole, bias),), "silu")
    for ops in (side.ops, side.exact):
        packed = (ops.pack_linear(side.there(whole), side.there(bias)),)
        found = ops.linear_act_and_mul(side.there(x), packed, "silu")
        assert_close(found.cpu(), expected, ulps=12, atol=1e-3)
        found = ops.linear_act_and_mul(DeferredNorm(side.there(x), side.there(norm), 1e-5), packed, "silu")
        assert_close(found.cpu(), of_normed, ulps=12, atol=4e-3)
    parts = (
        side.ops.pack_linear(gate.to(side.device), side.there(bias[:56].clone())),
        side.ops.pack_linear(side.there(up), side.there(bias[56:].clone())),
    )
    assert_close(side.ops.linear_act_and_mul(side.there(x), parts, "silu").cpu(), expected, ulps=12, atol=1e-3)


@pytest.mark.quick("[5]", "[0]")
@pytest.mark.parametrize("rows", [0, 1, 5, SMALL_ROWS + 1])
def test_products_and_norms_on_both_sides(side: Side, rows: int) -> None:
    """The norm is deferred to the product after it, except for many rows and for ops of a fixed order."""
    x, residual = strided(random(rows, 96)), random(rows, 64, seed=7)
    weights = random(64, 96, seed=1), random(2 * 40, 64, seed=2)
    bias, norm = random(64, seed=3), random(64, seed=4)
    given = x, REFERENCE.pack_linear(weights[0], bias), residual.clone(), norm, 1e-5
    normed, total = REFERENCE.linear_add_rms_norm(*given)
    expected = REFERENCE.linear_act_and_mul(normed, (REFERENCE.pack_linear(weights[1]),), "silu")
    for ops in (side.ops, side.exact):
        packed = ops.pack_linear(side.there(weights[0]), side.there(bias))
        found, sums = ops.linear_add_rms_norm(side.there(x), packed, side.there(residual), side.there(norm), 1e-5)
        assert isinstance(found, DeferredNorm) == (rows == 1 and ops is side.ops)
        inner = ops.linear_act_and_mul(found, (ops.pack_linear(side.there(weights[1])),), "silu")
        for one, other in (
            (sums, total),
            (inner, expected),
            (apply_deferred_norm(ops, found), apply_deferred_norm(REFERENCE, normed)),
        ):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-3, atol=1e-3)


@pytest.mark.quick("[5]")
@pytest.mark.parametrize("rows", [1, 5])
def test_products_rotation_and_write(side: Side, rows: int) -> None:
    host = PagedCache(torch.full((4, 2, 2, 4, 2, 16), float("nan")))
    there = side.cache(host)
    x, weight, bias = strided(random(rows, 40)), random(8 * 16, 40, seed=1), random(8 * 16, seed=2)
    cos, sin = random(rows, 16, seed=4).chunk(2, dim=1)
    slots = torch.tensor([13, -1, 0, 5, 6])[:rows]
    norm, reference = random(40, seed=9), (REFERENCE.pack_linear(weight, bias),)
    packed, angles = side.ops.pack_linear(side.there(weight), side.there(bias)), (side.there(cos), side.there(sin))
    for given, normed in ((slots, False), (slots.to(side.device), False), (slots.to(side.device), True)):
        wanted, rows_there = DeferredNorm(x, norm, 1e-5) if normed else x, side.there(x)
        expected = REFERENCE.linear_rope_and_write(wanted, reference, (cos, sin), host, 1, slots)
        found = side.ops.linear_rope_and_write(
            DeferredNorm(rows_there, side.there(norm), 1e-5) if normed else rows_there,
            (packed,),
            angles,
            there,
            1,
            given,
        )
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(there.data.cpu(), host.data, rtol=1e-4, atol=1e-4, equal_nan=True)
    with pytest.raises(ValueError, match="layer: expected 0 to 1, got 2"):
        side.ops.linear_rope_and_write(side.there(x), (packed,), (cos, sin), there, 2, slots)


# ---- mixtures of experts


@pytest.mark.quick("float-1-torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 30])
@pytest.mark.parametrize("form", ["float", "8", "4"])
def test_experts(side: Side, form: str, rows: int, dtype: torch.dtype) -> None:
    """Six experts, the first of which nobody chooses, and a shared one. Thirty rows fill tiles of many rows."""
    shapes = (96, 64), (64, 48)
    plain = [[random(*shape, dtype=dtype, seed=e) * shape[1] ** -0.5 for e in range(7)] for shape in shapes]
    given: list[list[Tensor | QuantizedWeight]] = [[*part] for part in plain]
    if form != "float":
        rounded = [[quantized(w, int(form), w.shape[1], torch.float16) for w in part] for part in plain]
        plain, given = [[w.dequantized(dtype) for w in part] for part in rounded], [[*part] for part in rounded]
    logits, gate = random(rows, 6, dtype=dtype, seed=8), random(rows, 1, dtype=dtype, seed=9)
    logits[:, 0] = float("-inf")
    x = strided(random(rows, 64, dtype=dtype, seed=3))
    expected = REFERENCE.route(logits, 3, renormalise=True, shared=gate)
    wide = REFERENCE.pack_experts([w.float() for w in plain[0]], [w.float() for w in plain[1]])
    result = REFERENCE.experts(x.float(), expected, wide, "silu")
    for ops in (side.ops, side.exact):
        packed = ops.pack_experts(*([w.to(side.device) for w in part] for part in given))
        routes = ops.route(side.there(logits), 3, renormalise=True, shared=side.there(gate))
        assert torch.equal(routes.experts.cpu(), expected.experts)
        torch.testing.assert_close(routes.weights.cpu(), expected.weights, rtol=1e-5, atol=1e-7)
        assert isinstance(packed, CudaExperts)
        packed.has_been_used = rows != 1  # what the first use compiles is looked at once
        found = ops.experts(side.there(x), routes, packed, "silu")
        close_to_product(found, result, dtype)
        if rows > 2 and ops is side.exact:
            some = Routes(routes.experts[1:2].contiguous(), routes.weights[1:2].contiguous())
            assert torch.equal(ops.experts(side.there(x)[1:2], some, packed, "silu"), found[1:2])
