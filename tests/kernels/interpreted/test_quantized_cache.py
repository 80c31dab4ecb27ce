"""Caches of int8: what is written, and attention over it, against the reference; odd heads, slots that are skipped,
numbers that are not finite. Unused slots have NaN as their scales."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.base import HeadNorms, PagedCache
from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_kernels.decode_attention import decode_attention
from hydra_kernels.prefill_attention import prefill_attention
from hydra_kernels.quantized_cache import rope_and_write_quantized, write_quantized
from tests.kernels.comparison import DTYPES
from tests.kernels.paged import Step, in_int8, make_step
from tests.kernels.poison import poisoned_memory  # noqa: F401
from tests.ops.test_quantized_cache import SHAPES, fused_rows, poisoned, random, some_slots

REFERENCE = ReferenceOps()
HEADS = [(4, 2, 16), (2, 2, 32), (3, 3, 80), (14, 2, 64)]  # (query heads, KV heads, head dim)
ROWS = [(1, 1), (1, 130), (3, 67), (20, 20), (0, 9), (1, 64)]  # (queries, context)
WIDE = (3, 1, 2, 4, 40, 128)  # more heads than a program holds


def pair(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[PagedCache, Tensor], tuple[PagedCache, Tensor]]:
    return poisoned(shape, dtype), poisoned(shape, dtype)


@pytest.mark.quick("bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, WIDE], ids=str)
def test_written_rows_have_the_bits_of_the_reference_and_nothing_else_changes(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    (cache, raw), (expected, expected_raw) = pair(shape, dtype)
    layer, heads, dim = shape[1] - 1, *shape[4:]
    slots = some_slots(shape, 9)
    k, v = (row.clone() for row in fused_rows(len(slots), [1, 1], heads, dim, dtype))
    k[0, 0], k[1, -1], v[0, -1, 3], v[1, 0, 0] = 0, 1e-30, torch.inf, torch.nan
    assert cache.scales is not None
    write_quantized(cache.data, cache.scales, layer, k, v, slots)
    REFERENCE.write_cache(expected, layer, (k, v), slots)
    assert torch.equal(raw, expected_raw)


@pytest.mark.quick("False-(5, 3, 2, 4, 2, 8)", "True-(4, 2, 2, 3, 2, 80)-torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], SHAPES[3], WIDE], ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_keys_are_rotated_before_they_are_rounded(dtype: torch.dtype, shape: tuple[int, ...], normed: bool) -> None:
    """The norm's own roundings are the interpreter's in bfloat16, which cuts bits off."""
    (cache, raw), (expected, expected_raw) = pair(shape, dtype)
    layer, size, heads, dim = shape[1] - 1, *shape[3:]
    slots = some_slots(shape, 9)
    q, k, v = fused_rows(len(slots), [2, 1, 1], heads, dim, dtype)
    angles = torch.rand(len(slots), dim // 2, generator=torch.Generator().manual_seed(3)) * 100
    weight = random(dim, dtype=dtype, seed=4)
    norms = HeadNorms(weight, weight, 1e-6) if normed else HeadNorms(None, None, 0.0)
    assert cache.scales is not None and expected.scales is not None
    rotary = angles.cos(), angles.sin()
    turned = rope_and_write_quantized(cache.data, cache.scales, layer, q, k, v, rotary, slots, norms)
    plain = REFERENCE.rope_and_write(q, k, v, rotary, expected, layer, slots, norms)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(turned, plain, rtol=2 * eps, atol=(24 if normed else 8) * eps)
    kept = slots[slots >= 0]
    places = kept // size, layer, 0, kept % size
    most = 1 if dtype is torch.float32 or not normed else 4
    assert (cache.data[places].int() - expected.data[places].int()).abs().max() <= most
    scales = cache.scales.transpose(3, 4)[places], expected.scales.transpose(3, 4)[places]
    torch.testing.assert_close(*scales, rtol=1e-5 if not normed else 4 * eps, atol=0)
    for x in (cache, expected):
        x.data[places], x.scales.transpose(3, 4)[places] = 0, 0  # type: ignore[union-attr]
    assert torch.equal(raw, expected_raw), "values, and what was not written"


@pytest.mark.parametrize("slot", [-1, 12, 1 << 40])
def test_a_slot_that_does_not_exist_is_skipped(slot: int) -> None:
    cache, raw = poisoned((3, 1, 2, 4, 2, 8), torch.float32)
    rows, before = torch.ones(1, 2, 8), raw.clone()
    assert cache.scales is not None
    write_quantized(cache.data, cache.scales, 0, rows, rows, torch.tensor([slot]))
    assert torch.equal(raw, before)


def test_nothing_in_nothing_out() -> None:
    cache, raw = poisoned((2, 1, 2, 4, 1, 8), torch.float32)
    none, empty, before = torch.empty(0, dtype=torch.int64), torch.empty(0, 1, 8), raw.clone()
    angles = torch.empty(0, 4), torch.empty(0, 4)
    assert cache.scales is not None
    write_quantized(cache.data, cache.scales, 0, empty, empty, none)
    out = rope_and_write_quantized(cache.data, cache.scales, 0, empty, empty, empty, angles, none, (None, None, 0.0))
    assert out.shape == (0, 1, 8) and torch.equal(raw, before)


def test_messages() -> None:
    cache, _ = poisoned((2, 1, 2, 4, 1, 8), torch.float32)
    assert cache.scales is not None
    slots, rows = torch.zeros(1, dtype=torch.int64), torch.ones(1, 2, 8)
    with pytest.raises(ValueError, match=r"data: expected \[N, L, 2, S, 2, 8\] torch.int8"):
        write_quantized(cache.data, cache.scales, 0, rows, rows, slots)
    step = in_int8(make_step([(1, 5)], (2, 1, 16), 4, torch.float32))
    scales = step.cache.scales
    assert scales is not None
    for bad in ((scales[:, 1, 0], scales[:, 1, 1, :, :3]), (scales[:, 1, 0].double(),) * 2):
        with pytest.raises(ValueError, match="scales: expected two of"):
            prefill(replace(step), bad)
    with pytest.raises(ValueError, match=r"k_cache: expected \[N, S, Hkv, 16\] torch.float32"):
        prefill(step, None)


def prefill(step: Step, scales: tuple[Tensor, Tensor] | None, max_q: int = 1) -> Tensor:
    tables = step.block_tables, step.cu_q, step.num_context
    return prefill_attention(step.q, step.k_cache, step.v_cache, *tables, 0.3, max_q=max_q, scales=scales)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_over_integers(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    step = in_int8(make_step(ROWS, heads, 16 if dtype is torch.bfloat16 else 3, dtype))
    close(prefill(step, step.scales, 20), step.expected(0.3))
    one = in_int8(make_step([(1, 1), (1, 130), (1, 67)], heads, 4, dtype))
    expected = one.expected(0.3)
    for splits in (1, 3):
        found = decode_attention(
            *(one.q, one.k_cache, one.v_cache, one.block_tables, one.num_context, 0.3),
            num_splits=splits,
            scales=one.scales,
        )
        close(found, expected)


def close(result: Tensor, expected: Tensor) -> None:
    """Weights times scales are rounded once to 16 bits, integers never; the interpreter cuts bfloat16 off."""
    atol = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 4e-2}[result.dtype]
    torch.testing.assert_close(result.float(), expected, rtol=0, atol=atol)


def test_a_token_has_the_same_bits_in_every_chunk() -> None:
    heads, dtype = (4, 2, 16), torch.bfloat16
    whole = in_int8(make_step([(90, 90)], heads, 4, dtype))
    found = prefill(whole, whole.scales, 90)
    for begin, end in ((0, 1), (33, 70), (89, 90)):
        part = replace(
            whole,
            q=whole.q[begin:end],
            cu_q=torch.tensor([0, end - begin], dtype=torch.int32),
            num_context=torch.tensor([end], dtype=torch.int32),
        )
        assert torch.equal(prefill(part, part.scales, end - begin), found[begin:end])
