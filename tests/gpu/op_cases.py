"""Cases of the CUDA ops that run on a device (tests/gpu) and, with Triton's interpreter, on the host
(tests/kernels/interpreted): what is chosen, split, padded and cached around the kernels, against the reference.

Kernels have their own cases in tests/kernels, so shapes are few and small here. Every input is a view of a wider buffer
whose other columns are NaN.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.base import (
    Activation,
    Adjustments,
    DeltaInputs,
    MixedRows,
    Normed,
    PagedCache,
    RowNorm,
    SamplingTensors,
    StateCache,
    StateRows,
    computed,
)
from hydra_engine.backend.cuda.attention import MAX_HEAD_DIM
from hydra_engine.backend.cuda.linear import SMALL_ROWS, WIDTH_STEP, CudaLinear, QuantizedCudaLinear, implementation
from hydra_engine.backend.float8 import BLOCK, product
from hydra_engine.backend.quantized import FLOAT8, QuantizedWeight, quantized
from hydra_engine.backend.reference.ops import ALL_OPS, PlainLinear, ReferenceOps, activation
from hydra_kernels.quantized_linear import MAX_SMALL_ROWS
from tests.gpu.side import Side
from tests.kernels.comparison import DTYPES, assert_attention_close, assert_close, strided
from tests.kernels.paged import Step, make_step

REFERENCE = ReferenceOps()


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- linear


def close_to_product(result: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Twice rounded at most, of values of about 10."""
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


@pytest.mark.quick("588-17-torch.bfloat16", "27-1-torch.float16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, SMALL_ROWS, SMALL_ROWS + 1])
@pytest.mark.parametrize("num_in", [27, 588])
def test_linear_of_rows_that_are_no_multiple_of_16_bytes(
    side: Side, num_in: int, rows: int, dtype: torch.dtype
) -> None:
    """Such as the pixels of a patch."""
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


@pytest.mark.quick("True-65-torch.float16", "False-1-torch.bfloat16")
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
    """Where groups are smaller than rows, 128 outputs share their scales."""
    values = random(num_out, num_in, seed=1).to(FLOAT8)
    scales = random(-(-num_out // BLOCK), num_in // group_size, seed=5).abs() * num_in**-0.5
    if group_size < num_in:
        return QuantizedWeight(values, scales.repeat_interleave(BLOCK, dim=0)[:num_out].contiguous())
    return QuantizedWeight(values, random(num_out, 1, seed=5).abs() * num_in**-0.5)


@pytest.mark.quick("17-200-200", "18-512-128")
@pytest.mark.parametrize(("num_in", "group_size"), [(200, 200), (512, 512), (512, BLOCK)])
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
        blocks = packed.tensor_core_scales.nbytes if group_size == BLOCK else 0
        words = 48 * (-(-num_in // 64) * 64)
        assert packed.nbytes == words + weight.scales.nbytes + blocks, "a byte of each weight"
        packed.has_been_used = rows != SMALL_ROWS + 1  # what the first product compiles is looked at once
        sums = product(x, weight) if rounds else exact
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

    assert takes(float8_weight(144, 200, 200)) and takes(float8_weight(144, 512, BLOCK))
    assert not takes(float8_weight(56, 512, 512)), "outputs that are no multiple of 16"
    assert not takes(float8_weight(144, 384, BLOCK)), "cuBLAS reads the scales of four blocks at a time"
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


# ---- products and what follows them


@pytest.mark.parametrize("rows", [0, 1, 5, SMALL_ROWS + 1])
def test_products_and_gated_activations(side: Side, rows: int) -> None:
    """In one launch or in two, of one weight or of two, of which one is quantised."""
    gate, up = quantized_weight(4, 64, offsets=False), random(56, 256, dtype=torch.float16, seed=6) * 0.1
    bias = random(112, dtype=torch.float16, seed=2)
    x = strided(random(rows, 256, dtype=torch.float16, seed=3))
    whole = torch.cat((gate.dequantized(torch.float16), up))
    expected = REFERENCE.linear_act_and_mul(x, (REFERENCE.pack_linear(whole, bias),), "silu")
    norm = random(256, dtype=torch.float16, seed=5)
    of_normed = REFERENCE.linear_act_and_mul(Normed(x, norm, 1e-5), (REFERENCE.pack_linear(whole, bias),), "silu")
    for ops in (side.ops, side.exact):
        packed = (ops.pack_linear(side.there(whole), side.there(bias)),)
        found = ops.linear_act_and_mul(side.there(x), packed, "silu")
        assert_close(found.cpu(), expected, ulps=12, atol=1e-3)
        found = ops.linear_act_and_mul(Normed(side.there(x), side.there(norm), 1e-5), packed, "silu")
        assert_close(found.cpu(), of_normed, ulps=12, atol=4e-3)
    parts = (
        side.ops.pack_linear(gate.to(side.device), side.there(bias[:56].clone())),
        side.ops.pack_linear(side.there(up), side.there(bias[56:].clone())),
    )
    assert_close(side.ops.linear_act_and_mul(side.there(x), parts, "silu").cpu(), expected, ulps=12, atol=1e-3)


@pytest.mark.parametrize("rows", [0, 1, 5, SMALL_ROWS + 1])
def test_products_and_norms_on_both_sides(side: Side, rows: int) -> None:
    """Whether the norm is left to the product behind it or not, as for many rows and for those of a fixed order."""
    x, residual = strided(random(rows, 96)), random(rows, 64, seed=7)
    weights = random(64, 96, seed=1), random(2 * 40, 64, seed=2)
    bias, norm = random(64, seed=3), random(64, seed=4)
    given = x, REFERENCE.pack_linear(weights[0], bias), residual.clone(), norm, 1e-5
    normed, total = REFERENCE.linear_add_rms_norm(*given)
    expected = REFERENCE.linear_act_and_mul(normed, (REFERENCE.pack_linear(weights[1]),), "silu")
    for ops in (side.ops, side.exact):
        packed = ops.pack_linear(side.there(weights[0]), side.there(bias))
        found, sums = ops.linear_add_rms_norm(side.there(x), packed, side.there(residual), side.there(norm), 1e-5)
        assert isinstance(found, Normed) == (rows == 1 and ops is side.ops)
        inner = ops.linear_act_and_mul(found, (ops.pack_linear(side.there(weights[1])),), "silu")
        for one, other in ((sums, total), (inner, expected), (computed(ops, found), computed(REFERENCE, normed))):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-3, atol=1e-3)


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
        wanted, rows_there = Normed(x, norm, 1e-5) if normed else x, side.there(x)
        expected = REFERENCE.linear_rope_and_write(wanted, reference, (cos, sin), host, 1, slots)
        found = side.ops.linear_rope_and_write(
            Normed(rows_there, side.there(norm), 1e-5) if normed else rows_there, (packed,), angles, there, 1, given
        )
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(there.data.cpu(), host.data, rtol=1e-4, atol=1e-4, equal_nan=True)
    with pytest.raises(ValueError, match="layer: expected 0 to 1, got 2"):
        side.ops.linear_rope_and_write(side.there(x), (packed,), (cos, sin), there, 2, slots)


# ---- keys and values of int8


@pytest.mark.quick("(4, 2, 16)-torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 2, 16), (3, 3, 80)], ids=str)
def test_keys_and_values_of_int8(side: Side, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Written rotated and as they are, then read by decodes and by prompts; slots lie on the host or on the device."""
    num_heads, num_kv_heads, dim = heads
    shape = (6, 2, 2, 4, num_kv_heads, dim)
    raw = torch.full((6 * 2 * 2 * 4 * num_kv_heads * (dim + 4),), 0xFF, dtype=torch.uint8)
    expected, cache = (PagedCache.quantized(memory, shape, dtype) for memory in (raw.clone(), raw.to(side.device)))
    slots, tokens = torch.tensor([20, 21, 22, 23, 8, 9, -1]), 7
    fused = random(tokens, (num_heads + 2 * num_kv_heads) * dim, dtype=dtype)
    parts = fused.split([count * dim for count in (num_heads, num_kv_heads, num_kv_heads)], dim=1)
    q, k, v = (part.unflatten(1, (-1, dim)) for part in parts)
    angles = random(tokens, dim // 2, seed=3)
    rotary = angles.cos(), angles.sin()
    turned = REFERENCE.rope_and_write(q, k, v, rotary, expected, 1, slots)
    there = [side.there(part) for part in (q, k, v)]
    found = side.ops.rope_and_write(*there, (side.there(rotary[0]), side.there(rotary[1])), cache, 1, slots)
    assert_close(found.cpu(), turned, ulps=2, atol=4e-2 if dtype is torch.bfloat16 else 1e-3)
    places = torch.tensor([5, 5, 5, 5, 2, 2]), 1, 0, torch.tensor([0, 1, 2, 3, 0, 1])
    assert (cache.data.cpu()[places].int() - expected.data[places].int()).abs().max() <= 1
    REFERENCE.write_cache(expected, 1, (k, v), slots)
    side.ops.write_cache(cache, 1, there[1:], slots.to(side.device))
    assert torch.equal(cache.data.cpu(), expected.data)
    cu_q, context = torch.tensor([0, 1, 4], dtype=torch.int32), torch.tensor([5, 3], dtype=torch.int32)
    tables = torch.tensor([[5, 2], [5, 1 << 30]], dtype=torch.int32)
    wide = PagedCache(expected.data, None, expected.scales, torch.float32)
    plan = REFERENCE.plan_attention(cu_q, context, tables)
    wanted = REFERENCE.attention_paged(q[:4].float(), wide, 1, plan, 0.3)
    for ops in (side.ops, side.exact):
        result = ops.attention_paged(there[0][:4], cache, 1, ops.plan_attention(cu_q, context, tables), 0.3)
        atol = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 4e-2}[dtype]
        torch.testing.assert_close(result.cpu().float(), wanted, rtol=0, atol=atol)


# ---- element-wise


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pixels_become_rows(side: Side, dtype: torch.dtype) -> None:
    """All bytes of all colours, bit for bit; a width of no power of 2, with zeros behind, and as it is."""
    pixels = torch.arange(5 * 1029).to(torch.uint8).view(5, 1029)[:, :588]
    table = random(256, 3, dtype=dtype)
    for width in (588, 592, 1100):
        found = side.ops.pixel_rows(side.there(pixels), side.there(table), width)
        assert found.is_contiguous() and torch.equal(found.cpu(), REFERENCE.pixel_rows(pixels, table, width))
    assert side.ops.pixel_rows(side.there(pixels)[:0], side.there(table), 592).shape == (0, 592)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms(side: Side, dtype: torch.dtype) -> None:
    x, residual = strided(random(5, 80, dtype=dtype)), strided(random(5, 80, dtype=dtype, seed=1))
    weight, bias, wide = random(80, dtype=dtype, seed=2), random(80, dtype=dtype, seed=3), random(80, seed=4)
    ops, there = side.ops, side.there
    for scale in (weight, wide):
        assert_close(ops.rms_norm(there(x), there(scale), 1e-5).cpu(), REFERENCE.rms_norm(x, scale, 1e-5), ulps=3)
    normed, total = REFERENCE.add_rms_norm(x, residual.clone(), weight, 1e-5)
    found, summed = ops.add_rms_norm(there(x), there(residual), there(weight), 1e-5)
    assert_close(summed.cpu(), total, ulps=1)
    assert_close(found.cpu(), normed, ulps=4)
    expected = REFERENCE.layer_norm(x, weight, bias, 1e-5)
    assert_close(ops.layer_norm(there(x), there(weight), there(bias), 1e-5).cpu(), expected, ulps=2, atol=1e-4)
    assert ops.rms_norm(there(x)[:0], there(weight), 1e-5).shape == (0, 80)


@pytest.mark.quick("True-torch.bfloat16", "False-torch.float32")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_norms_of_products_and_residuals(side: Side, dtype: torch.dtype, *, with_bias: bool) -> None:
    """Sums have the bits of those that the ops give one after another; residuals stay as they are."""
    weight, bias = random(48, 40, dtype=dtype, seed=1), random(48, dtype=dtype, seed=2)
    scale, shift = side.there(random(48, dtype=dtype, seed=3)), side.there(random(48, dtype=dtype, seed=4))
    for rows in (0, 1, SMALL_ROWS, SMALL_ROWS + 1, 70):
        x, residual = strided(random(rows, 40, dtype=dtype)), strided(random(rows, 48, dtype=dtype, seed=5))
        for ops in (side.ops, side.exact):
            packed = ops.pack_linear(side.there(weight), side.there(bias) if with_bias else None)
            given, before = side.there(residual), side.there(residual)
            total = ops.linear(side.there(x), packed, residual=before)
            for norm in (RowNorm(scale, shift, 1e-5), RowNorm(scale, None, 1e-5)):
                found, summed = ops.linear_add_norm(side.there(x), packed, given, norm)
                expected = ops.rms_norm(total, scale, 1e-5)
                if norm.bias is not None:
                    expected = ops.layer_norm(total, scale, norm.bias, 1e-5)
                assert torch.equal(summed, total) and torch.equal(given, before)
                assert_close(found.cpu(), expected.cpu(), ulps=2, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads(side: Side, dtype: torch.dtype) -> None:
    fused, weight = random(6, 9, 40, dtype=dtype), random(40, dtype=dtype, seed=1)
    x, gate = fused[:, 1:5], fused[:, 5:]
    moved = side.there(fused)
    here = moved[:, 1:5], moved[:, 5:]
    expected = REFERENCE.gated_rms_norm(x, weight, gate, 1e-6)
    assert_close(side.ops.gated_rms_norm(here[0], side.there(weight), here[1], 1e-6).cpu(), expected, ulps=4, atol=1e-3)
    assert_close(side.ops.sigmoid_mul(*here).cpu(), REFERENCE.sigmoid_mul(x, gate), ulps=2, atol=1e-4)
    cos, sin = random(6, 20, seed=2), random(6, 20, seed=3)
    rotated = side.ops.rotate(here[0], side.there(cos), side.there(sin))
    assert_close(rotated.cpu(), REFERENCE.rotate(x, cos, sin), ulps=3, atol=1e-2 if dtype is torch.bfloat16 else 2e-3)
    gate_up = strided(fused.flatten(1))
    found = side.ops.act_and_mul(side.there(gate_up), "quick_gelu")
    assert_close(found.cpu(), REFERENCE.act_and_mul(gate_up, "quick_gelu"), ulps=4, atol=1e-4)


# ---- recurrent states


def states(places: int, taps: int, channels: int, heads: int, dim: int) -> StateCache:
    return StateCache(random(places, 2, taps - 1, channels, seed=8), random(places, 2, heads, dim, dim, seed=9))


def rule_inputs(tokens: int, key_heads: int, heads: int, dim: int) -> DeltaInputs:
    q, k, v = (random(tokens, count, dim, seed=s) for s, count in ((2, key_heads), (3, key_heads), (4, heads)))
    return DeltaInputs(q, k, v, random(tokens, heads, seed=5), random(tokens, heads, seed=6), *random(2, heads, seed=7))


def test_recurrent_states_move_on_as_those_of_the_reference(side: Side) -> None:
    """A request that begins, one that goes on, one without tokens, one in its place; a step of decodes behind it."""
    steps = [([0, 3, 3, 22, 23], [0, 5, 4, 1], [0, 2, 4, 6], [1, 3, 5, 6]), ([0, 1, 2], [3, 23], [1, 5], [0, 4])]
    host = states(7, 4, 24, 4, 8)
    there = StateCache(side.there(host.conv), side.there(host.recurrent))
    for vectors in steps:
        rows = StateRows(*(torch.tensor(v) for v in vectors))
        tokens = vectors[0][-1]
        planned = side.ops.plan_states(rows)
        assert [x.tolist() for x in (planned.cu_q, planned.starts, planned.reads, planned.writes)] == list(vectors)
        x, weight = strided(random(tokens, 24)), random(24, 4, seed=1)
        expected = REFERENCE.causal_conv(x, weight, host, 1, rows)
        found = side.ops.causal_conv(side.there(x), side.there(weight), there, 1, planned)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(there.conv.cpu(), host.conv)
        tensors = rule_inputs(tokens, 2, 4, 8)
        expected = REFERENCE.delta_rule(tensors, host, 1, rows)
        found = side.ops.delta_rule(DeltaInputs(*map(side.there, tensors)), there, 1, planned)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(there.recurrent.cpu(), host.recurrent, rtol=1e-4, atol=1e-4)


def test_rows_of_states_are_not_read_again(side: Side) -> None:
    given = [torch.tensor(v) for v in ([0, 2], [4], [1], [0])]
    planned = side.ops.plan_states(StateRows(*given))
    for tensor in given:
        tensor.fill_(-1)
    assert [x.tolist() for x in (planned.cu_q, planned.starts, planned.reads, planned.writes)] == [
        [0, 2],
        [4],
        [1],
        [0],
    ]


def test_decodes_read_their_places_when_they_are_used(side: Side) -> None:
    """As a captured step does it: tensors at fixed addresses, and a row that fills up the batch, whose state is kept
    nowhere."""
    host, device = states(5, 4, 24, 4, 8), side.device
    there = StateCache(side.there(host.conv), side.there(host.recurrent))
    starts, reads, writes = (torch.full((3,), value, device=device) for value in (0, 0, -1))
    planned = side.ops.plan_decode_states(starts, reads, writes)
    x, weight, tensors = random(3, 24), random(24, 4, seed=1), rule_inputs(3, 2, 4, 8)
    moved = side.there(x), side.there(weight), DeltaInputs(*map(side.there, tensors))
    for places in (([9, 5], [0, 3], [1, 2]), ([10, 6], [1, 2], [0, 3])):
        for column, values in zip((starts, reads, writes), places, strict=True):
            column[:2] = torch.tensor(values)
        rows = StateRows(torch.arange(3), *(torch.tensor(v) for v in places))
        expected = REFERENCE.causal_conv(x[:2], weight, host, 1, rows)
        found = side.ops.causal_conv(*moved[:2], there, 1, planned)
        torch.testing.assert_close(found[:2].cpu(), expected, rtol=1e-5, atol=1e-5)
        expected = REFERENCE.delta_rule(DeltaInputs(*(t[:2] for t in tensors[:5]), *tensors[5:]), host, 1, rows)
        found = side.ops.delta_rule(moved[2], there, 1, planned)
        torch.testing.assert_close(found[:2].cpu(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(there.conv.cpu(), host.conv)
        torch.testing.assert_close(there.recurrent.cpu(), host.recurrent, rtol=1e-4, atol=1e-4)


def test_messages_of_states(side: Side) -> None:
    ops, cache = side.ops, states(2, 4, 24, 4, 8)
    there = StateCache(side.there(cache.conv), side.there(cache.recurrent))
    x, weight = side.there(random(3, 24)), side.there(random(24, 4, seed=1))

    def rows(*vectors: list[int]) -> StateRows:
        return ops.plan_states(StateRows(*(torch.tensor(v) for v in vectors)))

    good = rows([0, 3], [0], [0], [1])
    with pytest.raises(ValueError, match="rows: expected cu_q to rise from 0 to 2, got 3 tokens"):
        ops.causal_conv(x[:2], weight, there, 1, good)
    with pytest.raises(ValueError, match="layer: expected 0 to 1, got 2"):
        ops.causal_conv(x, weight, there, 2, good)
    with pytest.raises(ValueError, match="rows: expected places 0 to 1, got 2"):
        ops.delta_rule(DeltaInputs(*map(side.there, rule_inputs(3, 2, 4, 8))), there, 1, rows([0, 3], [0], [0], [2]))
    for bad in ([0, 3, 2], [1, 2, 3]):
        with pytest.raises(ValueError, match="rows: expected cu_q to rise from 0, got"):
            rows(bad, [0, 0], [0, 0], [0, 1])
    with pytest.raises(ValueError, match="rows: expected places of 0 and more, got -1"):
        rows([0, 3], [0], [0], [-1])
    with pytest.raises(ValueError, match=r"writes: expected contiguous \[1\] torch.int64"):
        ops.plan_decode_states(good.starts, good.reads, good.cu_q)


# ---- paged attention

HEADS = [(4, 2, 16), (2, 2, 20)]
# (queries, context) of rows: decodes alone; prompts alone; decodes before chunks, one of a single token, one of none;
# a decode behind a chunk
STEPS = {
    "decodes": [(1, 1), (1, 70), (1, 9)],
    "prompts": [(5, 5), (3, 20)],
    "mixed": [(1, 33), (1, 4), (6, 6), (1, 1), (0, 7), (2, 40)],
    "behind": [(4, 9), (1, 66)],
}
MIXED = [[(1, 33), (1, 70), (6, 6), (1, 1), (0, 7)], [(1, 1), (1, 70), (1, 9)], [(40, 45), (2, 2)]]


def attend(side: Side, step: Step, *, exact: bool = False) -> Tensor:
    ops = side.exact if exact else side.ops
    plan = ops.plan_attention(step.cu_q, step.num_context, step.block_tables)
    return ops.attention_paged(side.there(step.q), side.cache(step.cache), 1, plan, 0.3)


@pytest.mark.quick("(4, 2, 16)-mixed", "(2, 2, 20)-decodes")
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_paged_attention(side: Side, name: str, heads: tuple[int, int, int]) -> None:
    for dtype in (torch.float16, torch.float32):
        step = make_step(STEPS[name], heads, 4, dtype)
        for exact in (False, True):
            result = attend(side, step, exact=exact)
            assert_attention_close(result.cpu(), step.expected(0.3).to(dtype))


@pytest.mark.parametrize("name", ["decodes", "mixed"])
def test_head_dims_without_a_kernel_take_torch(side: Side, name: str) -> None:
    step = make_step(STEPS[name], (2, 1, MAX_HEAD_DIM + 4), 4, torch.float32)
    assert_attention_close(attend(side, step).cpu(), step.expected(0.3))
    with pytest.raises(ValueError, match="plan: expected one of plan_attention for a head dim above"):
        plan = side.ops.plan_decode(*(side.there(x[:1].contiguous()) for x in (step.num_context, step.block_tables)))
        side.ops.attention_paged(side.there(step.q)[:1], side.cache(step.cache), 1, plan, 0.3)


def test_how_a_step_is_split(side: Side) -> None:
    step = make_step(STEPS["mixed"], HEADS[0], 4, torch.float32)
    plan = side.ops.plan_attention(step.cu_q, step.num_context, step.block_tables)
    native = plan.native
    assert (native.num_decodes, native.max_decode_context, native.max_rest_q) == (2, 33, 6)
    assert native.rest_cu_q.tolist() == [0, 6, 7, 7, 9] and plan.cu_q.tolist() == step.cu_q.tolist()
    assert (plan.max_q, plan.max_context) == (6, 40)
    exact = side.exact.plan_attention(step.cu_q, step.num_context, step.block_tables).native
    assert (exact.num_decodes, exact.rest_cu_q.tolist()) == (0, step.cu_q.tolist())


def test_a_plan_does_not_read_its_tensors_again(side: Side) -> None:
    step = make_step(STEPS["mixed"], HEADS[0], 4, torch.float32)
    given = step.cu_q.clone(), step.num_context.clone(), step.block_tables.clone()
    plan = side.ops.plan_attention(*given)
    for tensor in given:
        tensor.fill_(-1)
    result = side.ops.attention_paged(side.there(step.q), side.cache(step.cache), 1, plan, 0.3)
    assert_attention_close(result.cpu(), step.expected(0.3))


@pytest.mark.parametrize("exact", [False, True])
def test_a_plan_of_decodes_reads_what_is_there_when_it_is_used(side: Side, exact: bool) -> None:
    """As a captured step does it: tensors at fixed addresses, longer than needed, rows that fill up the batch."""
    ops = side.exact if exact else side.ops
    steps = [make_step([(1, n) for n in contexts], HEADS[0], 4, torch.float32) for contexts in ((9, 70), (33, 1))]
    width = max(step.block_tables.shape[1] for step in steps) + 3
    tables = torch.zeros(3, width, dtype=torch.int32, device=side.device)
    context = torch.zeros(3, dtype=torch.int32, device=side.device)
    plan = ops.plan_decode(context, tables)
    assert (plan.max_q, plan.max_context) == (1, 0)
    for step in steps:
        tables[:2, : step.block_tables.shape[1]] = step.block_tables.to(side.device)
        context[:2] = step.num_context.to(side.device)
        q = torch.cat((side.there(step.q), torch.ones(1, 4, 16, device=side.device)))
        result = ops.attention_paged(q, side.cache(step.cache), 1, plan, 0.3).cpu()
        assert_attention_close(result[:2], step.expected(0.3))
        assert not result[2].any(), "a row of no context"


@pytest.mark.parametrize("exact", [False, True])
def test_a_plan_of_mixed_rows_reads_what_is_there_when_it_is_used(side: Side, exact: bool) -> None:
    """As a captured step does it: decodes beside prompts, decodes alone, a prompt alone; rows and tokens behind them
    fill up the bucket."""
    ops, num_rows, num_tokens = side.exact if exact else side.ops, 6, 48
    steps = [make_step(rows, HEADS[0], 4, torch.float32) for rows in MIXED]
    width = max(step.block_tables.shape[1] for step in steps) + 3

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=side.device)

    rows = MixedRows(zeros(num_rows + 1), zeros(num_rows + 1), zeros(num_rows), zeros(num_rows), zeros(num_rows, width))
    plan = ops.plan_mixed(rows, num_tokens, 2)
    for step, num_decodes in zip(steps, (2, 3, 0), strict=True):
        given, count = len(step.num_context), step.q.shape[0]
        cu_q = torch.full((num_rows + 1,), count, dtype=torch.int32)
        cu_q[: given + 1] = step.cu_q
        for column in rows[2:]:
            column.zero_()
        rows.cu_q.copy_(cu_q)
        rows.rest_cu_q.copy_(cu_q.clamp(min=num_decodes))
        rows.num_context[:given] = step.num_context.to(side.device)
        rows.decode_context[:num_decodes] = step.num_context[:num_decodes].to(side.device)
        rows.block_tables[:given, : step.block_tables.shape[1]] = step.block_tables.to(side.device)
        q = torch.cat((side.there(step.q), torch.ones(num_tokens - count, 4, 16, device=side.device)))
        result = ops.attention_paged(q, side.cache(step.cache), 1, plan, 0.3).cpu()
        assert_attention_close(result[:count].contiguous(), step.expected(0.3))


def test_exact_attention_does_not_depend_on_batch_chunks_or_who_decodes(side: Side) -> None:
    whole = make_step([(40, 40)], (4, 2, 16), 4, torch.float16)
    together = attend(side, whole, exact=True)
    for parts in ((40,), (1, 39), (16, 16, 8), (39, 1)):
        for begin, end in pairwise(accumulate(parts, initial=0)):
            cu_q = torch.tensor([0, end - begin], dtype=torch.int32)
            context = torch.tensor([end], dtype=torch.int32)
            part = Step(whole.q[begin:end], whole.cache, whole.block_tables, cu_q, context)
            assert torch.equal(attend(side, part, exact=True), together[begin:end])


def test_messages_of_plans(side: Side) -> None:
    step = make_step(STEPS["decodes"], HEADS[0], 4, torch.float32)
    plan = side.ops.plan_attention(step.cu_q, step.num_context, step.block_tables)
    with pytest.raises(ValueError, match="q: expected 3 tokens as the plan says, got 2"):
        side.ops.attention_paged(side.there(step.q)[:2], side.cache(step.cache), 1, plan, 0.3)
    with pytest.raises(ValueError, match=r"num_context: expected torch\.int32"):
        side.ops.plan_decode(side.there(step.num_context).long(), side.there(step.block_tables))
    with pytest.raises(ValueError, match=r"num_context, block_tables: expected \[B\] and \[B, max_blocks\]"):
        side.ops.plan_decode(side.there(step.num_context)[:2], side.there(step.block_tables))
    with pytest.raises(ValueError, match="row 0 has 3 queries"):
        side.ops.plan_attention(torch.tensor([0, 3], dtype=torch.int32), step.num_context[:1], step.block_tables[:1])


# ---- packed attention


def qkv(rows: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return random(rows, 3, 2, dim, dtype=dtype).unbind(1)


@pytest.mark.parametrize("dim", [24, MAX_HEAD_DIM + 2])
def test_packed_attention(side: Side, dim: int) -> None:
    q, k, v = (side.there(x) for x in qkv(30, dim, torch.float32))
    for bounds in ([0, 7, 7, 30], (0, 30), range(0, 31, 10), [0, 7, 7, 30]):
        expected = REFERENCE.attention_packed(*qkv(30, dim, torch.float32), bounds, 0.2)
        for ops in (side.ops, side.exact):
            assert_attention_close(ops.attention_packed(q, k, v, bounds, 0.2).cpu(), expected)


def test_a_segment_of_exact_attention_does_not_depend_on_the_others(side: Side) -> None:
    q, k, v = (side.there(x) for x in qkv(80, 16, torch.float16))
    together = side.exact.attention_packed(q, k, v, [0, 5, 80], 0.2)
    alone = side.exact.attention_packed(q[:5], k[:5], v[:5], [0, 5], 0.2)
    assert torch.equal(alone, together[:5])


def test_segments_are_sent_once_and_checked(side: Side) -> None:
    ops = side.ops.attention_packed.__self__
    q, k, v = (side.there(x) for x in qkv(12, 16, torch.float32))
    first, longest = ops.segments(q, k, v, [0, 4, 12])
    assert longest == 8 and first.tolist() == [0, 4, 12] and first.dtype is torch.int32
    assert ops.segments(q, k, v, (0, 4, 12))[0] is first
    for count in range(1, 60):
        ops.segments(q, k, v, sorted({0, 12, count % 12, count // 5}))
    assert len(ops._of_thread.segments) <= 32
    for bad in ([0, 4, 11], [1, 12], [0, 8, 4, 12], []):
        with pytest.raises(ValueError, match="cu_seqlens: expected to rise from 0 to 12"):
            side.ops.attention_packed(q, k, v, bad, 0.2)
    with pytest.raises(ValueError, match="cu_seqlens: expected to rise from 0 to 11"):
        side.ops.attention_packed(q[:11], k[:11], v[:11], [0, 4, 12], 0.2)


@pytest.mark.quick("7, 7")
@pytest.mark.parametrize("bounds", [[0, 7, 7, 30], [0, 30, 30, 30], [0, 1, 2, 30]], ids=str)
def test_segments_are_read_at_each_use_of_a_plan(side: Side, bounds: list[int]) -> None:
    cu = side.there(torch.zeros(4, dtype=torch.int32))
    q, k, v = (side.there(x) for x in qkv(30, 24, torch.float32))
    expected = REFERENCE.attention_packed(*qkv(30, 24, torch.float32), bounds, 0.2)
    for ops in (side.ops, side.exact):
        plan = ops.plan_packed(cu, 30)
        cu.copy_(side.there(torch.tensor(bounds, dtype=torch.int32)))
        assert_attention_close(ops.attention_packed(q, k, v, plan, 0.2).cpu(), expected)
    with pytest.raises(ValueError, match=r"cu_seqlens: expected .* torch.int32"):
        side.ops.plan_packed(cu.long(), 30)
    wide = (side.there(x) for x in qkv(30, MAX_HEAD_DIM + 2, torch.float32))
    with pytest.raises(ValueError, match="cut on the host"):
        side.ops.attention_packed(*wide, side.ops.plan_packed(cu, 30), 0.2)


# ---- sampling, and what the ops say of themselves


def test_sampling(side: Side) -> None:
    """Rows: greedy with a tie, a draw from everything, the same with a filter of one token, one that is not finite."""
    logits = random(4, 300)
    logits[0, [40, 90]] = 9.0
    logits[3, 7] = float("nan")
    weights = torch.softmax(logits[1].double(), 0).cumsum(0)
    token = 120
    middle = float(weights[token - 1] + weights[token]) / 2
    draws = SamplingTensors(
        torch.tensor([0.0, 1.0, 1.0, 1.0]),
        torch.tensor([0, 0, 1, 0], dtype=torch.int32),
        torch.ones(4),
        torch.zeros(4),
        torch.tensor([0.5, middle, middle, 0.5]),
    )
    tokens, finite = side.ops.sample(side.there(logits), SamplingTensors(*(side.there(column) for column in draws)))
    assert tokens.dtype is torch.int64 and finite.tolist() == [True, True, True, False]
    assert tokens.tolist()[:3] == [40, token, int(logits[2].argmax())] and 0 <= int(tokens[3]) < 300


def test_special_rows(side: Side) -> None:
    """Rows: a bias, penalties, a mask with all of them, nothing, one that is not finite; those that ask are scored."""
    logits = (random(5, 9001) * 8).round() / 2
    logits[4, 7] = float("nan")
    generator = torch.Generator().manual_seed(5)
    counts = torch.randint(0, 4, (2, 9001), generator=generator, dtype=torch.int32)
    masks = torch.randint(-(1 << 31), (1 << 31) - 1, (1, 282), generator=generator).int()
    columns = [[0, 0, 0, 2, 0], [2, 0, 2, 2, 0], [-1, 1, 0, -1, 0], [-1, -1, 0, -1, 0]]
    begins, ends, counted, masked = (torch.tensor(column, dtype=torch.int32) for column in columns)
    penalties = torch.tensor([[1.0, 0.0, 0.0], [1.3, 0.4, -0.2], [0.7, -1.1, 2.0], [1, 0, 0], [1, 0, 0]]).double()
    ids, values = torch.tensor([8191, 4], dtype=torch.int32), torch.tensor([3.25, -1.75], dtype=torch.float64)
    adjustments = Adjustments(begins, ends, ids, values, penalties, counted, counts, masked, masks)
    found = side.ops.adjust_logits(side.there(logits), Adjustments(*(side.there(part) for part in adjustments)))
    expected = REFERENCE.adjust_logits(logits, adjustments)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-7, atol=0, equal_nan=True)
    tokens, num_top = torch.tensor([3, 9000, 17, 0, 5]), torch.tensor([20, 0, 3, -1, 2], dtype=torch.int32)
    numbers, places = (x.cpu() for x in side.ops.score_tokens(*map(side.there, (logits, tokens, num_top)), 20))
    wanted_numbers, wanted_places = REFERENCE.score_tokens(logits, tokens, num_top, 20)
    for row, count in ((0, 20), (1, 0), (2, 3)):
        assert torch.equal(places[row, : 1 + count], wanted_places[row, : 1 + count])
        torch.testing.assert_close(numbers[row, : 3 + count], wanted_numbers[row, : 3 + count], rtol=2e-6, atol=0)


def test_every_op_says_what_computes_it_and_why(side: Side) -> None:
    for ops in (side.ops, side.exact):
        choices = ops.choices()
        assert {choice.op for choice in choices} >= {*ALL_OPS, "sample"} and all(choice.reason for choice in choices)
    changed = {a.op for a, b in zip(side.ops.choices(), side.exact.choices(), strict=True) if a != b}
    assert changed == {"linear", "attention_paged"}
    assert (side.ops.deterministic, side.exact.deterministic) == (False, True)


def test_sums_stay_float32_when_a_product_is_split(side: Side) -> None:
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
