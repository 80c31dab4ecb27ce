"""Calls of every kernel's wrapper, with the shapes of published models, for tests that compile what they launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.base import PagedCache
from hydra_engine.backend.quantized import FLOAT8
from hydra_kernels._launch import clear_launch_caches
from hydra_kernels.activation import act_and_mul, sigmoid_mul
from hydra_kernels.causal_conv import TILE, causal_conv
from hydra_kernels.decode_attention import decode_attention
from hydra_kernels.delta_rule import delta_rule
from hydra_kernels.epilogue import finish
from hydra_kernels.experts import Matrices, grouped_experts, route_tokens, stack
from hydra_kernels.float8_rows import round_rows
from hydra_kernels.fused_linear import gated_linear, rope_linear
from hydra_kernels.linear import invariant_linear, small_linear
from hydra_kernels.logits import adjust_logits, score_tokens
from hydra_kernels.norms import add_layer_norm, add_rms_norm, gated_rms_norm, layer_norm, rms_norm
from hydra_kernels.packed_attention import packed_attention
from hydra_kernels.pixels import pixel_rows
from hydra_kernels.prefill_attention import prefill_attention
from hydra_kernels.quantized_cache import rope_and_write_quantized
from hydra_kernels.quantized_linear import invariant_quantized_linear, pack, small_quantized_linear
from hydra_kernels.rotary import rotate
from hydra_kernels.sampling import greedy, sample
from tests.kernels.compiling import Compiled, Launch, compile_for, record

BF16 = torch.bfloat16
INDICES = torch.zeros(5, dtype=torch.int32)


def rows(columns: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(8, columns, dtype=dtype)


def heads(dim: int) -> Tensor:
    """Part of a fused projection."""
    return torch.zeros(8, 40, dim, dtype=BF16)[:, 8:]


def decode(heads: int, kv_heads: int, dim: int, splits: int, dtype: torch.dtype = BF16) -> object:
    cache = torch.zeros(4, 2, 2, 16, kv_heads, dim, dtype=dtype)
    q = torch.zeros(4, heads + 2 * kv_heads, dim, dtype=dtype)[:, :heads]
    tables = torch.zeros(4, 64, dtype=torch.int32)
    return decode_attention(q, cache[:, 1, 0], cache[:, 1, 1], tables, INDICES[:4], 0.1, num_splits=splits)


def prefill(heads: int, kv_heads: int, dim: int, dtype: torch.dtype = BF16, *, max_requests: int = 0) -> object:
    cache = torch.zeros(4, 2, 2, 16, kv_heads, dim, dtype=dtype)
    q = torch.zeros(300, heads + 2 * kv_heads, dim, dtype=dtype)[:, :heads]
    tables = torch.zeros(4, 64, dtype=torch.int32)
    caches, searched = (cache[:, 1, 0], cache[:, 1, 1]), {"max_q": 300, "max_requests": max_requests}
    return prefill_attention(q, *caches, tables, INDICES, INDICES[:4], 0.1, **searched)


def int8_cache(kv_heads: int, dim: int) -> PagedCache:
    raw = torch.zeros(4 * 2 * 2 * 16 * kv_heads * (dim + 4), dtype=torch.uint8)
    return PagedCache.quantized(raw, (4, 2, 2, 16, kv_heads, dim), BF16)


def over_int8(heads: int, kv_heads: int, dim: int, tokens: int) -> object:
    """Decodes of 4 requests in 4 splits, or prompts of `tokens` in all."""
    cache, q = int8_cache(kv_heads, dim), torch.zeros(max(tokens, 4), heads, dim, dtype=BF16)
    assert cache.scales is not None
    caches = cache.data[:, 1, 0], cache.data[:, 1, 1]
    scales, tables = (cache.scales[:, 1, 0], cache.scales[:, 1, 1]), torch.zeros(4, 64, dtype=torch.int32)
    if tokens == 0:
        return decode_attention(q, *caches, tables, INDICES[:4], 0.1, num_splits=4, scales=scales)
    return prefill_attention(q, *caches, tables, INDICES, INDICES[:4], 0.1, max_q=tokens, scales=scales)


def written_in_int8(heads: int, kv_heads: int, dim: int) -> object:
    cache = int8_cache(kv_heads, dim)
    assert cache.scales is not None
    fused = torch.zeros(4, heads + 2 * kv_heads, dim, dtype=BF16)
    angles, norms = torch.zeros(2, 4, dim // 2).unbind(0), (fused[0, 0], fused[0, 0], 1e-6)
    q, k, v = fused.split([heads, kv_heads, kv_heads], dim=1)
    return rope_and_write_quantized(cache.data, cache.scales, 1, q, k, v, angles, PLACES[:4], norms)


def packed(dim: int, max_length: int, dtype: torch.dtype = BF16, *, segments: int = 0) -> object:
    """`segments`: more of them than the rows have tiles, which programs then go through."""
    q, k, v = torch.zeros(600, 3, 16, dim, dtype=dtype).unbind(1)
    cu_seqlens = torch.zeros(segments + 1, dtype=torch.int32) if segments else INDICES
    return packed_attention(q, k, v, cu_seqlens, 0.1, max_length=max_length, search=segments > 0)


def linear(
    num_rows: int, num_out: int, num_in: int, *, residual: bool = False, out_dtype: torch.dtype = BF16
) -> object:
    """A product: one kernel for up to 16 rows and another for more; weights are never touched, so they take no
    memory."""
    x, weight = torch.empty(num_rows, num_in, dtype=BF16), torch.empty(num_out, num_in, dtype=BF16)
    added = torch.empty(num_rows, num_out, dtype=BF16) if residual else None
    function = small_linear if num_rows <= 16 else invariant_linear
    return function(x, weight, residual=added, out_dtype=out_dtype)


def gated(num_rows: int, width: int, num_in: int) -> object:
    """Weights as those of `linear`; one row with its norm."""
    x, weight = torch.empty(num_rows, num_in, dtype=BF16), torch.empty(2 * width, num_in, dtype=BF16)
    return gated_linear(x, weight, None, "silu", x[0] if num_rows == 1 else None, 1e-5)


def roped(num_rows: int, heads: int, kv_heads: int, dim: int, num_in: int, *, bias: bool) -> object:
    cache = torch.zeros(4, 2, 2, 16, kv_heads, dim, dtype=BF16)
    num_out = (heads + 2 * kv_heads) * dim
    x, weight = torch.empty(num_rows, num_in, dtype=BF16), torch.empty(num_out, num_in, dtype=BF16)
    added = torch.empty(num_out, dtype=BF16) if bias else None
    angles, slots = torch.zeros(num_rows, dim), torch.zeros(num_rows, dtype=torch.int64)
    caches, norm = (cache[:, 1, 0], cache[:, 1, 1]), x[0] if num_rows == 1 else None
    return rope_linear(x, weight, added, *angles.chunk(2, dim=1), slots, *caches, norm, 1e-5)


def patches(num_rows: int) -> object:
    """The first linear of a tower of 1280 and an activation that compiles to much."""
    x, weight = torch.empty(num_rows, 1176, dtype=BF16), torch.empty(1280, 1176, dtype=BF16)
    return invariant_linear(x, weight, torch.empty(1280, dtype=BF16), act="gelu")


def quantized(
    num_rows: int,
    num_out: int,
    num_in: int,
    num_bits: int,
    group_size: int,
    *,
    offsets: bool = False,
    floats: bool = False,
) -> object:
    """A quantised product: one kernel for up to 64 rows and another for more."""
    numbers, groups = num_in * num_bits // 8, num_in // group_size
    values = torch.zeros(num_out, numbers, dtype=torch.int8 if num_bits == 8 else torch.uint8)
    scales = torch.zeros(num_out, groups, dtype=BF16)
    if floats:
        values, scales = values.view(FLOAT8), scales.float()
    weight = pack(values, scales, torch.zeros(num_out, groups) if offsets else None, num_bits)
    x = torch.empty(num_rows, num_in, dtype=BF16)
    return (small_quantized_linear if num_rows <= 64 else invariant_quantized_linear)(x, weight)


def mixture(num_rows: int, num_bits: int = 16) -> object:
    """A layer of Qwen3-30B-A3B; floats, or quantised per output in 8 bits or in groups of 128 in 4."""
    count, width, inner = 128, 2048, 768
    x, chosen = torch.empty(num_rows, width, dtype=BF16), torch.zeros(num_rows, 8, dtype=torch.int32)
    matrices: list[Matrices] = []
    for num_out, num_in in ((2 * inner, width), (width, inner)):
        if num_bits == 16:
            matrices.append(torch.empty(count, num_out, num_in, dtype=BF16))
            continue
        values = torch.zeros(num_out, num_in * num_bits // 8, dtype=torch.int8 if num_bits == 8 else torch.uint8)
        groups = 1 if num_bits == 8 else num_in // 128
        one = stack([pack(values, torch.zeros(num_out, groups, dtype=BF16), None, num_bits)])
        words, scales = (part.expand(count, -1, -1) for part in (one.words, one.scales))
        matrices.append(one._replace(words=words, scales=scales))
    return grouped_experts(x, chosen, chosen.float(), *matrices, "silu")


def draws(vocabulary: int) -> object:
    field = torch.zeros(4)
    return sample(torch.zeros(4, vocabulary), field, field.int(), field, field, field)


def adjustments(logits: torch.Tensor, first: int = 0) -> object:
    """`first`: where the columns of a captured step begin."""
    count, vocabulary = logits.shape
    column, numbers = (torch.zeros(count + first, dtype=dtype)[first:] for dtype in (torch.int32, torch.float64))
    penalties = torch.zeros(3 * (count + first), dtype=torch.float64)[3 * first :].view(count, 3)
    tables = torch.zeros(2, vocabulary, dtype=torch.int32), torch.zeros(2, -(-vocabulary // 32), dtype=torch.int32)
    return adjust_logits(logits, column, column, column, numbers, penalties, column, tables[0], column, tables[1])


QUANTIZED = pack(torch.zeros(512, 4096, dtype=torch.int8), torch.zeros(512, 1), None, 8)
PLACES = torch.zeros(5, dtype=torch.int64)
TILES = torch.zeros(4, 2, dtype=torch.int32)


def convolution(tokens: int, tiles: torch.Tensor | None = TILES) -> object:
    """A causal convolution of the queries, keys and values in a fused projection of MiniCPM-V 4.6."""
    states = torch.zeros(2, 3, 3, 6144, dtype=BF16)[:, 1]
    x, taps = rows(6144 + 2048 + 32)[:, :6144], torch.zeros(6144, 4, dtype=BF16)
    return causal_conv(x, taps, states, tiles, PLACES, PLACES[:4], PLACES[:4], PLACES[:4], tokens=tokens)


def recurrence(dim: int) -> object:
    """A delta rule on the convolution's results; gates are parts of a fused projection."""
    q, k, v = rows(3 * 16 * dim).view(8, 3, 16, dim).unbind(1)
    a, b = rows(4 * 16 * dim + 32)[:, -32:].split(16, dim=1)
    states, scales = torch.zeros(2, 3, 16, dim, dim)[:, 1], torch.zeros(2, 16)
    return delta_rule(q, k, v, a, b, *scales, states, PLACES, PLACES[:4], PLACES[:4], PLACES[:4])


CASES: dict[str, Callable[[], object]] = {
    "pixel_rows-588": lambda: pixel_rows(torch.zeros(8, 588, dtype=torch.uint8), torch.zeros(256, 3, dtype=BF16), 592),
    "rms_norm-4096": lambda: rms_norm(rows(4096), rows(4096)[0], 1e-5),
    "rms_norm-heads": lambda: rms_norm(torch.zeros(8, 36, 128, dtype=BF16)[:, :28], rows(128)[0], 1e-5),
    "add_rms_norm-3584": lambda: add_rms_norm(rows(3584), rows(3584), rows(3584)[0], 1e-5),
    "rms_norm-4096-float32": lambda: rms_norm(rows(4096), rows(4096, torch.float32)[0], 1e-5),
    "gated_rms_norm-128": lambda: gated_rms_norm(heads(128), rows(128)[0], heads(128), 1e-6),
    "layer_norm-1152": lambda: layer_norm(rows(1152), rows(1152)[0], rows(1152)[0], 1e-5),
    "add_layer_norm-1024": lambda: add_layer_norm(rows(1024), rows(1024), rows(1024)[0], rows(1024)[0], 1e-5),
    "act_and_mul-silu": lambda: act_and_mul(rows(2 * 18944), "silu"),
    "act_and_mul-gelu": lambda: act_and_mul(rows(2 * 4304), "gelu"),
    "sigmoid_mul-256": lambda: sigmoid_mul(heads(256), heads(256)),
    "finish-quick_gelu": lambda: finish(rows(4096), None, None, "quick_gelu"),
    "finish-all": lambda: finish(rows(3584, torch.float32), rows(3584)[0], rows(3584), "gelu", BF16),
    "rotate-80": lambda: rotate(torch.zeros(8, 48, 80, dtype=BF16)[:, :32], *torch.zeros(2, 8, 40)),
    "causal_conv-one": lambda: convolution(1),
    "causal_conv-tile": lambda: convolution(TILE),
    "causal_conv-search": lambda: convolution(TILE, None),
    "delta_rule-64": lambda: recurrence(64),
    "delta_rule-96": lambda: recurrence(96),
    "delta_rule-128": lambda: recurrence(128),
    "delta_rule-256": lambda: recurrence(256),
    "greedy": lambda: greedy(rows(32064, torch.float32)),
    "sample-32064": lambda: draws(32064),
    "sample-152064": lambda: draws(152064),
    "adjust-152064": lambda: adjustments(rows(152064, torch.float32)),
    "score-152064": lambda: score_tokens(rows(152064, torch.float32), PLACES.new_zeros(8), TILES.new_zeros(8), 20),
    "linear-vector-4096": lambda: linear(1, 4096, 11008, residual=True),
    "linear-vector-3584": lambda: linear(1, 3584, 18944, residual=True),
    "linear-vector-head": lambda: linear(1, 152064, 3584, out_dtype=torch.float32),
    "linear-few-22016": lambda: linear(8, 22016, 4096),
    "linear-few-3584": lambda: linear(16, 3584, 18944, residual=True),
    "linear-few-512": lambda: linear(8, 512, 3584),
    "linear-gated-vector-11008": lambda: gated(1, 11008, 4096),
    "linear-gated-vector-18944": lambda: gated(1, 18944, 3584),
    "linear-gated-few-11008": lambda: gated(16, 11008, 4096),
    "linear-gated-few-18944": lambda: gated(16, 18944, 3584),
    "linear-rope-vector-mha": lambda: roped(1, 32, 32, 128, 4096, bias=False),
    "linear-rope-vector-gqa": lambda: roped(1, 28, 4, 128, 3584, bias=True),
    "linear-rope-few-mha": lambda: roped(16, 32, 32, 128, 4096, bias=False),
    "linear-rope-few-gqa": lambda: roped(16, 28, 4, 128, 3584, bias=True),
    "linear-rope-few-80": lambda: roped(8, 8, 8, 80, 640, bias=False),
    "linear-tiled-4096": lambda: linear(100, 4096, 11008, residual=True),
    "linear-tiled-37888": lambda: linear(100, 37888, 3584),
    "linear-tiled-head": lambda: linear(100, 152064, 3584, out_dtype=torch.float32),
    "linear-tiled-patches": lambda: patches(100),
    "quantized-few-4-128": lambda: quantized(8, 4096, 4096, 4, 128),
    "quantized-few-4-32-offsets": lambda: quantized(16, 3584, 4096, 4, 32, offsets=True),
    "quantized-few-4-64-rows": lambda: quantized(64, 4096, 4096, 4, 128),
    "quantized-few-8": lambda: quantized(8, 4096, 4096, 8, 4096),
    "quantized-tiled-4-128": lambda: quantized(100, 8192, 4096, 4, 128),
    "quantized-tiled-4-32": lambda: quantized(100, 8192, 1024, 4, 32),
    "quantized-tiled-4-offsets": lambda: quantized(100, 4096, 1024, 4, 128, offsets=True),
    "quantized-tiled-8": lambda: quantized(100, 8192, 4096, 8, 4096),
    "quantized-few-float8": lambda: quantized(8, 4096, 4096, 8, 4096, floats=True),
    "quantized-few-float8-128": lambda: quantized(16, 3584, 4096, 8, 128, floats=True),
    "quantized-tiled-float8-128": lambda: quantized(100, 8192, 4096, 8, 128, floats=True),
    "route-128": lambda: route_tokens(rows(128), 8, renormalise=True, shared=rows(1)),
    "experts-few": lambda: mixture(4),
    "experts-many": lambda: mixture(512),
    "experts-few-4": lambda: mixture(4, 4),
    "experts-many-8": lambda: mixture(512, 8),
    "round_rows-4096": lambda: round_rows(rows(4096), 2048, 4096),
    "round_rows-18944": lambda: round_rows(rows(18944), 9472, 18944),
    "round_rows-blocks": lambda: round_rows(rows(18944), 9472, 128),
    "decode-mha-128": lambda: decode(32, 32, 128, 4),
    "decode-mha-80": lambda: decode(16, 16, 80, 1),
    "decode-gqa-128": lambda: decode(28, 4, 128, 4),
    "decode-gqa-64": lambda: decode(14, 2, 64, 1),
    "prefill-gqa-128": lambda: prefill(28, 4, 128),
    "prefill-mha-64": lambda: prefill(16, 16, 64),
    "decode-mha-128-int8": lambda: over_int8(32, 32, 128, 0),
    "decode-gqa-128-int8": lambda: over_int8(28, 4, 128, 0),
    "prefill-mha-128-int8": lambda: over_int8(32, 32, 128, 300),
    "write_int8-mha-128": lambda: written_in_int8(32, 32, 128),
    "write_int8-gqa-64": lambda: written_in_int8(14, 2, 64),
    "packed-64": lambda: packed(64, 577),
    "prefill-gqa-128-searched": lambda: prefill(28, 4, 128, max_requests=2),
    "packed-80": lambda: packed(80, 577),
    "packed-72-windows": lambda: packed(72, 64),
    "packed-80-searched": lambda: packed(80, 600, segments=66),
}


# The largest in shared memory: float32, and more heads for each KV head than published models have. They have to fit.
LARGE_CASES: dict[str, Callable[[], object]] = {
    "packed-80": lambda: packed(80, 577, torch.float32),
    "packed-128": lambda: packed(128, 577, torch.float32),
    "packed-256-windows": lambda: packed(256, 64, torch.float32),
    "prefill-gqa-128": lambda: prefill(28, 4, 128, torch.float32),
    "prefill-gqa-256": lambda: prefill(8, 2, 256, torch.float32),
    "decode-gqa-256": lambda: decode(8, 2, 256, 1, torch.float32),
    "decode-64-heads-80-bfloat16": lambda: decode(64, 1, 80, 1),
    "decode-128-heads-256-bfloat16": lambda: decode(128, 1, 256, 1),
}


def launches_of(name: str, capability: int, cases: Mapping[str, Callable[[], object]] = CASES) -> list[Launch]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in ("_common", "linear", "fused_linear", "quantized_linear", "experts"):
            monkeypatch.setattr(f"hydra_kernels.{module}.capability_of", lambda device: capability)
        clear_launch_caches()
        return record(monkeypatch, cases[name])


@cache
def compiled(name: str, capability: int) -> dict[str, Compiled]:
    """The kernels that a case launches, by name."""
    return {launch.name: compile_for(launch, capability) for launch in launches_of(name, capability)}
