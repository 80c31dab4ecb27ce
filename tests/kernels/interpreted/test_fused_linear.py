"""Products of few rows and what follows them, against the ops one after another: shapes that fill no tile, head dims,
biases, strides, slots that are not written, poison."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.base import Activation, DeferredNorm, PagedCache
from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_kernels.activation import ACTIVATIONS
from hydra_kernels.fused_linear import gated_linear, rope_linear
from tests.kernels.comparison import DTYPES, assert_close, assert_same_rounding, strided
from tests.kernels.interpreted.test_linear import random, weight_of
from tests.kernels.poison import poisoned_memory  # noqa: F401

OPS = ReferenceOps()
# (rows, gates, inputs): one row, inputs that are no whole step, a tile of rows, gates that fill no tile
SHAPES = [(1, 37, 200), (1, 2, 588), (3, 70, 588), (16, 33, 257)]


@pytest.mark.quick("(1, 37, 200)-torch.bfloat16", "(3, 70, 588)-torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gated_linear(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_rows, width, num_in = shape
    x, weight = strided(random(num_rows, num_in).to(dtype)), weight_of(2 * width, num_in, dtype)
    bias = random(2 * width, seed=2).to(dtype)
    result = gated_linear(x, weight, bias, "silu")
    assert result.is_contiguous()
    expected = OPS.linear_act_and_mul(x, (OPS.pack_linear(weight, bias),), "silu")
    # The product, the activation and the result are rounded, the first of them before it is bent.
    assert_close(result, expected, ulps=12, atol=2e-2 if dtype is torch.bfloat16 else 4e-3)


def norm_of(num_in: int, dtype: torch.dtype) -> Tensor:
    return (1 + random(num_in, seed=8) / 4).to(dtype)


@pytest.mark.quick("(37, 200)-torch.bfloat16-True")
@pytest.mark.parametrize("is_wide", [False, True])  # weights of the norm in float32
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(37, 200), (70, 588), (8, 5000)], ids=str)
def test_gated_linear_of_a_normed_row(shape: tuple[int, int], is_wide: bool, dtype: torch.dtype) -> None:
    width, num_in = shape
    x, weight = strided((random(1, num_in) * 7).to(dtype)), weight_of(2 * width, num_in, dtype)
    bias, norm = random(2 * width, seed=2).to(dtype), norm_of(num_in, torch.float32 if is_wide else dtype)
    expected = OPS.linear_act_and_mul(DeferredNorm(x, norm, 1e-5), (OPS.pack_linear(weight, bias),), "silu")
    result = gated_linear(x, weight, bias, "silu", norm, 1e-5)
    assert_close(result, expected, ulps=12, atol=3e-2 if dtype is torch.bfloat16 else 4e-3)


def test_a_row_of_zeros_is_normed_to_zeros() -> None:
    x, weight, bias = torch.zeros(1, 40), weight_of(6, 40, torch.float32), random(6, seed=2)
    result = gated_linear(x, weight, bias, "silu", norm_of(40, torch.float32), 1e-6)
    assert_close(result, OPS.act_and_mul(bias[None], "silu"), ulps=4)


@pytest.mark.quick("silu-3")
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_every_rounding_is_where_the_ops_have_it(num_rows: int, act: Activation) -> None:
    x, weight = random(num_rows, 96).half(), weight_of(400, 96, torch.float16)
    bias = random(400, seed=2)
    expected = OPS.linear_act_and_mul(x, (OPS.pack_linear(weight, bias.half()),), act)
    assert_same_rounding(gated_linear(x, weight, bias.half(), act), expected)


def rotary(rows: int, dim: int) -> tuple[Tensor, Tensor]:
    """Halves of rows of a table."""
    angles = random(rows, dim, seed=5)
    return angles.cos()[:, : dim // 2], angles.sin()[:, dim // 2 :]


def filled(heads: int, dim: int, block_size: int, dtype: torch.dtype) -> PagedCache:
    return PagedCache(torch.full((4, 2, 2, block_size, heads, dim), float("nan"), dtype=dtype))


# Hq, Hkv, D, block size: one query head per KV head and several, dims of one tile, of parts of one, and of two
HEADS = [(2, 2, 64, 16), (3, 1, 80, 16), (7, 1, 128, 4), (2, 1, 256, 5), (2, 2, 20, 16), (4, 2, 8, 3)]


@pytest.mark.quick("[5-(3, 1, 80, 16)-torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "heads"), [(1, HEADS[4]), (1, (1, 1, 64, 5)), *((5, h) for h in HEADS)], ids=str)
def test_rope_linear(dtype: torch.dtype, num_rows: int, heads: tuple[int, int, int, int]) -> None:
    num_heads, num_kv_heads, dim, block_size = heads
    num_in = 150
    x = strided(random(num_rows, num_in).to(dtype))
    weight = weight_of((num_heads + 2 * num_kv_heads) * dim, num_in, dtype)
    bias = random(len(weight), seed=2).to(dtype)
    angles, slots = rotary(num_rows, dim), torch.tensor([7, -1, 0, 3 * block_size + 2, 2])[:num_rows]
    caches = [filled(num_kv_heads, dim, block_size, dtype) for _ in range(2)]
    expected = OPS.linear_rope_and_write(x, (OPS.pack_linear(weight, bias),), angles, caches[0], 1, slots)
    planes = caches[1].data[:, 1, 0], caches[1].data[:, 1, 1]
    found = rope_linear(x, weight, bias, *angles, slots, *planes)
    assert found.is_contiguous()
    assert_close(found, expected, ulps=4, atol=3e-2 if dtype is torch.bfloat16 else 4e-3)
    written = [cache.data.isnan() for cache in caches]
    assert torch.equal(*written), "other elements were written than those of the slots"
    keys_and_values = [cache.data[~written[0]] for cache in caches]
    assert_close(keys_and_values[1], keys_and_values[0], ulps=4, atol=3e-2 if dtype is torch.bfloat16 else 4e-3)


def test_rope_linear_of_a_normed_row() -> None:
    num_rows, num_in, dim = 1, 150, 20
    x = strided(random(num_rows, num_in).bfloat16())
    weight, norm = weight_of(3 * dim, num_in, torch.bfloat16), norm_of(num_in, torch.bfloat16)
    angles, slots = rotary(num_rows, dim), torch.arange(num_rows)
    caches = [filled(1, dim, 16, torch.bfloat16) for _ in range(2)]
    packed = (OPS.pack_linear(weight),)
    expected = OPS.linear_rope_and_write(DeferredNorm(x, norm, 1e-5), packed, angles, caches[0], 1, slots)
    found = rope_linear(x, weight, None, *angles, slots, *caches[1].data[:, 1].unbind(1), norm, 1e-5)
    assert_close(found, expected, ulps=4, atol=3e-2)
    keys_and_values = [cache.data[0, 1, :, :num_rows] for cache in caches]
    assert_close(keys_and_values[1], keys_and_values[0], ulps=4, atol=3e-2)


@pytest.mark.quick("[4]")
@pytest.mark.parametrize("num_rows", [1, 4])
def test_rotated_heads_are_rounded_where_the_ops_round(num_rows: int) -> None:
    x, weight = random(num_rows, 64).half(), weight_of(3 * 64, 64, torch.float16)
    angles, slots = rotary(num_rows, 64), torch.arange(num_rows)
    caches = [filled(1, 64, 16, torch.float16) for _ in range(2)]
    expected = OPS.linear_rope_and_write(x, (OPS.pack_linear(weight),), angles, caches[0], 0, slots)
    planes = caches[1].data[:, 0, 0], caches[1].data[:, 0, 1]
    assert_same_rounding(rope_linear(x, weight, None, *angles, slots, *planes), expected)
    assert_same_rounding(*(cache.data[0, 0, :, :num_rows] for cache in caches))


def test_values_are_not_turned() -> None:
    """An angle of 0 would make NaN of infinity."""
    x, weight = torch.ones(1, 16), torch.zeros(3 * 16, 16)
    weight[-16:, 0] = float("inf")
    weight[-16:, 1:] = 1.0
    cache = filled(1, 16, 16, torch.float32)
    rope_linear(x, weight, None, *rotary(1, 16), torch.tensor([0]), cache.data[:, 0, 0], cache.data[:, 0, 1])
    assert cache.data[0, 0, 1, 0].isposinf().all()


@pytest.mark.slow
def test_slots_outside_of_the_cache_are_not_written() -> None:
    x, weight, cache = torch.ones(3, 16), torch.ones(3 * 16, 16), filled(1, 16, 4, torch.float32)
    slots = torch.tensor([16, -5, 2**40])
    rope_linear(x, weight, None, *rotary(3, 16), slots, cache.data[:, 0, 0], cache.data[:, 0, 1])
    assert cache.data.isnan().all()


def test_nothing_in_nothing_out() -> None:
    assert gated_linear(torch.empty(0, 8), torch.ones(6, 8), None, "silu").shape == (0, 3)
    assert gated_linear(torch.ones(2, 8), torch.ones(0, 8), None, "silu").shape == (2, 0)
    cache = filled(1, 16, 4, torch.float32).data
    none = torch.empty(0, dtype=torch.int64)
    q = rope_linear(torch.empty(0, 8), torch.ones(64, 8), None, *rotary(0, 16), none, cache[:, 0, 0], cache[:, 0, 1])
    assert q.shape == (0, 2, 16) and cache.isnan().all()


def test_messages() -> None:
    x, weight = torch.ones(2, 8), torch.ones(4, 8)
    with pytest.raises(ValueError, match=r"x: expected at most 16 rows, got 17"):
        gated_linear(torch.ones(17, 8), weight, None, "silu")
    with pytest.raises(ValueError, match=r"act: expected one of silu, .*, got 'none'"):
        gated_linear(x, weight, None, "none")
    with pytest.raises(ValueError, match=r"weight: expected \[2 \* F, K\], got \[3, 8\]"):
        gated_linear(x, weight[:3], None, "silu")
    with pytest.raises(ValueError, match=r"weight: expected contiguous \[N, 8\] torch.float32"):
        gated_linear(x, weight.half(), None, "silu")
    with pytest.raises(ValueError, match=r"bias: expected contiguous \[4\]"):
        gated_linear(x, weight, weight[0], "silu")
    with pytest.raises(ValueError, match=r"norm: expected contiguous \[8\] torch.float32"):
        gated_linear(x[:1], weight, None, "silu", weight[:, 0], 1e-5)
    with pytest.raises(ValueError, match=r"x: expected one row where there is a norm, got \[2, 8\]"):
        gated_linear(x, weight, None, "silu", x[0], 1e-5)
    planes = filled(1, 16, 4, torch.float32).data[:, 0].unbind(1)
    cos, sin = rotary(2, 16)
    wide, slots = torch.ones(48, 8), torch.arange(2)
    with pytest.raises(ValueError, match="weight: expected outputs of whole heads of an even 16, with 1 of keys"):
        rope_linear(x, wide[:40], None, cos, sin, slots, *planes)
    with pytest.raises(ValueError, match=r"slots: expected contiguous \[2\] torch.int64"):
        rope_linear(x, wide, None, cos, sin, slots[:1], *planes)
    with pytest.raises(ValueError, match=r"cos: expected \[2, 8\] float32"):
        rope_linear(x, wide, None, cos[:, :4], sin, slots, *planes)
    with pytest.raises(ValueError, match=r"sin: expected \[2, 8\] float32"):
        rope_linear(x, wide, None, cos, sin.half(), slots, *planes)
    with pytest.raises(ValueError, match=r"k_cache: expected \[N, S, Hkv, D\] torch.float32"):
        rope_linear(x, wide, None, cos, sin, slots, planes[0].half(), planes[1])
    with pytest.raises(ValueError, match="v_cache: expected what k_cache is"):
        rope_linear(x, wide, None, cos, sin, slots, planes[0], planes[1].half())
