"""Ops on the heads of a projection, for every implementation: rotation, norm, and both on the way into a cache.
Against float64 and against each other: views of fused projections, odd head dims, poison, empty calls, messages.
"""

import pytest
import torch
from torch import Tensor

from hydra_engine import _C
from hydra_engine.backend.base import HeadNorms, Ops, PagedCache
from hydra_engine.backend.cpu.linear import DTYPE_CODES

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DIMS = [2, 16, 22, 64, 72, 80, 128, 258]
EPS = 1e-6


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def angles(tokens: int, dim: int) -> tuple[Tensor, Tensor]:
    """cos as rows of its own, sin as the left part of wider rows."""
    angle = torch.rand(tokens, dim, generator=torch.Generator().manual_seed(3)) * 100
    return angle[:, : dim // 2].cos().contiguous(), angle.sin()[:, : dim // 2]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """The formula of transformers' Qwen3RMSNorm; for float64 input everything stays float64."""
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def assert_as_good_as(result: Tensor, plain: Tensor, truth: Tensor) -> None:
    allowed = 2 * (plain.double() - truth).abs().max() + 2e-6 * (1 + truth.abs().max())
    error = (result.double() - truth).abs().max()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def poisoned_heads(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """[T, H, D] with NaN between tokens and between heads."""
    around = torch.full((tokens + 2, heads + 2, dim + 3), float("nan"), dtype=dtype)
    inside = around[1:-1, 1:-1, 2:-1]
    inside.copy_(random(tokens, heads, dim, dtype=dtype))
    return inside


@pytest.mark.quick("float32", "bfloat16", "avx", "amx")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_rotation_matches_float64(ops: Ops, dtype: torch.dtype, dim: int) -> None:
    x = poisoned_heads(5, 3, dim, dtype)
    cos, sin = angles(5, dim)
    result = ops.rotate(x, cos, sin)
    assert result.shape == x.shape and result.dtype == dtype and result.is_contiguous()
    plain = rotated(x.float(), cos, sin).to(dtype)
    assert_as_good_as(result, plain, rotated(x.double(), cos, sin))
    assert torch.equal(ops.rotate(x.contiguous(), cos, sin), result)


def test_rotation_of_heads_before_tokens_and_of_repeated_angles(ops: Ops) -> None:
    x = random(4, 7, 80, dtype=torch.bfloat16).transpose(0, 1)  # [7, 4, 80], heads far apart
    cos, sin = (a[:1].expand(7, 40) for a in angles(1, 80))
    result = ops.rotate(x, cos, sin)
    assert result.is_contiguous()
    assert torch.equal(result, ops.rotate(x.contiguous(), cos.contiguous(), sin.contiguous()))


@pytest.mark.quick("float32", "bfloat16", "avx", "amx")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [22, 80])
def test_a_rotated_token_depends_on_itself_alone(ops: Ops, threads: int, dtype: torch.dtype, dim: int) -> None:
    fused = random(700, 3 * 4 * dim, dtype=dtype).view(700, 3, 4, dim)
    cos, sin = angles(700, dim)
    both = ops.rotate(fused[:, :2].flatten(1, 2), cos, sin)  # queries and keys in one call
    assert torch.equal(both[:, :4], ops.rotate(fused[:, 0], cos, sin))
    assert torch.equal(both[:, 4:], ops.rotate(fused[:, 1], cos, sin))
    for begin, end in ((0, 1), (1, 18), (349, 351), (18, 700)):
        part = slice(begin, end)
        assert torch.equal(ops.rotate(fused[part, 0], cos[part], sin[part]), both[part, :4])


@pytest.mark.quick("float32", "bfloat16", "avx", "amx")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, *DIMS])
def test_norm_of_heads_is_the_norm_of_their_rows(ops: Ops, threads: int, dtype: torch.dtype, dim: int) -> None:
    x, weight = poisoned_heads(300, 3, dim, dtype), random(dim, dtype=dtype)
    result = ops.rms_norm(x, weight, EPS)
    assert result.shape == x.shape and result.dtype == dtype and result.is_contiguous()
    assert_as_good_as(result, normed(x, weight), normed(x.double(), weight.double()))
    assert torch.equal(result, ops.rms_norm(x.reshape(-1, dim), weight, EPS).view(x.shape))
    for begin, end in ((0, 1), (149, 151), (7, 300)):
        assert torch.equal(ops.rms_norm(x[begin:end], weight, EPS), result[begin:end])
    assert torch.equal(ops.rms_norm(x[:, 1:2], weight, EPS), result[:, 1:2])


@pytest.mark.quick("float32", "bfloat16", "avx", "amx")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 22, 64, 80, 128])
@pytest.mark.parametrize("which", ["both", "q", "k"])
def test_norm_rotation_and_write_in_one_call_are_the_three_in_turn(
    ops: Ops, dtype: torch.dtype, dim: int, which: str
) -> None:
    fused = random(9, 6 * dim, dtype=dtype).view(9, 6, dim)
    q, k, v = fused.split((4, 1, 1), dim=1)
    q_norm = None if which == "k" else random(dim, dtype=dtype, seed=1)
    k_norm = None if which == "q" else random(dim, dtype=dtype, seed=2)
    cos, sin = angles(9, dim)
    slots = torch.tensor([3, 5, -1, 0, 7, 11, 2, 9, -1])
    cache, other = (PagedCache(torch.full((3, 2, 2, 4, 1, dim), float("nan"), dtype=dtype)) for _ in range(2))
    result = ops.rope_and_write(q, k, v, (cos, sin), cache, 1, slots, HeadNorms(q_norm, k_norm, EPS))
    normed_q = q if q_norm is None else ops.rms_norm(q, q_norm, EPS)
    normed_k = k if k_norm is None else ops.rms_norm(k, k_norm, EPS)
    expected = ops.rotate(normed_q, cos, sin)
    ops.write_cache(other, 1, (ops.rotate(normed_k, cos, sin), v), slots)
    assert torch.equal(result, expected) and result.is_contiguous()
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(cache.data.view(integers), other.data.view(integers))


def test_a_token_that_is_not_finite_stays_alone(ops: Ops) -> None:
    x, weight = random(6, 2, 80, dtype=torch.bfloat16), random(80, dtype=torch.bfloat16)
    cos, sin = angles(6, 80)
    clean = ops.rotate(x, cos, sin), ops.rms_norm(x, weight, EPS)
    x[2, 1, 5], x[4, 0, 79] = float("nan"), float("inf")
    others = torch.tensor([0, 1, 3, 5])
    for before, after in zip(clean, (ops.rotate(x, cos, sin), ops.rms_norm(x, weight, EPS)), strict=True):
        assert torch.equal(after[others], before[others])
        assert not after[2, 1].isfinite().all() and not after[4, 0].isfinite().all()
        assert torch.equal(after[2, 0], before[2, 0]) and torch.equal(after[4, 1], before[4, 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [2, 6, 22, 40, 80])
def test_memory_around_results_is_left_alone(isa: str, dtype: torch.dtype, dim: int) -> None:
    x, (cos, sin) = random(4, 2, dim, dtype=dtype), angles(4, dim)
    guarded = torch.full((6, 2, dim), float("nan"), dtype=dtype)
    inside = guarded[1:-1]
    _C.rotate(
        *(x.data_ptr(), 2 * dim, 2, dim, cos.data_ptr(), cos.stride(0), sin.data_ptr(), sin.stride(0)),
        *(inside.data_ptr(), 4, dim, DTYPE_CODES[dtype]),
    )
    assert inside.isfinite().all()
    assert guarded[0].isnan().all() and guarded[-1].isnan().all()


def test_empty_calls(ops: Ops) -> None:
    weight = torch.ones(8)
    for tokens, heads in ((0, 3), (3, 0), (0, 0)):
        x, cos = torch.empty(tokens, heads, 8), torch.empty(tokens, 4)
        assert ops.rotate(x, cos, cos).shape == x.shape
        assert ops.rms_norm(x, weight, EPS).shape == x.shape
    cache, none = PagedCache(torch.zeros(1, 1, 2, 4, 2, 8)), torch.empty(0, dtype=torch.int64)
    x, cos = torch.empty(0, 2, 8), torch.empty(0, 4)
    result = ops.rope_and_write(x, x, x, (cos, cos), cache, 0, none, HeadNorms(weight, weight, EPS))
    assert result.shape == x.shape


def test_wrong_arguments_are_named_with_what_was_expected(ops: Ops) -> None:
    x, cos, weight = torch.ones(3, 2, 8), torch.ones(3, 4), torch.ones(8)
    cache, slots = PagedCache(torch.zeros(1, 1, 2, 4, 2, 8)), torch.arange(3)

    def write(q: Tensor | None = None, k: Tensor | None = None) -> Tensor:
        return ops.rope_and_write(x, x, x, (cos, cos), cache, 0, slots, HeadNorms(q, k, EPS))

    cases = {
        r"x: expected an even head dim for rotation, got 7": lambda: ops.rotate(x[..., :7], cos, cos),
        r"x: expected \[T, H, D\] .*got \[3, 16\]": lambda: ops.rotate(x.flatten(1), cos, cos),
        r"x: expected .*dense last dimension, got \[3, 8, 2\]": lambda: ops.rotate(x.mT, cos, cos),
        r"x: expected .*float32, bfloat16 or float16.*float64": lambda: ops.rotate(x.double(), cos, cos),
        r"cos: expected \[3, 4\] torch.float32, got \[2, 4\]": lambda: ops.rotate(x, cos[:2], cos),
        r"sin: expected \[3, 4\] torch.float32, got \[3, 4\] torch.bfloat16": lambda: ops.rotate(
            x, cos, cos.bfloat16()
        ),
        r"x: expected \[T, H, 7\]": lambda: ops.rms_norm(x, weight[:7], EPS),
        r"x: expected .*dense last dimension.*strides \[16, 1, 8\]": lambda: ops.rms_norm(x.mT, torch.ones(2), EPS),
        r"q_norm: expected contiguous \[8\].*got \[7\]": lambda: write(q=weight[:7]),
        r"k_norm: expected contiguous \[8\] torch.float32, got \[8\] torch.bfloat16": lambda: write(
            k=weight.bfloat16()
        ),
        r"k_norm: expected contiguous \[8\].*strides \[2\]": lambda: write(k=torch.ones(16)[::2]),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=message):
            call()
    assert not cache.data.any()


def test_native_checks_name_expected_and_actual() -> None:
    with pytest.raises(ValueError, match="columns: expected an even head dim, got 7"):
        _C.rotate(0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 7, 0)
    with pytest.raises(ValueError, match="heads: expected at least 0, got -1"):
        _C.rms_norm(0, 0, 0, 0, 1, 8, EPS, 0, -1, 0)
