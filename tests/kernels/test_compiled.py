"""Every kernel compiled ahead of time for sm_80 and sm_90 from what its wrapper launches: it fits, does not spill,
moves 16 bytes at a time, and uses the tensor cores of the target."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.base import PagedCache
from hydra_engine.backend.quantized import FLOAT8
from hydra_engine.backend.quantized import quantized as quantized_weight
from hydra_kernels._common import packed_launch, prefill_launch
from hydra_kernels._occupancy import Limits, places
from hydra_kernels.activation import act_and_mul, sigmoid_mul
from hydra_kernels.causal_conv import TILE, causal_conv
from hydra_kernels.decode_attention import decode_attention
from hydra_kernels.delta_rule import delta_rule
from hydra_kernels.epilogue import finish
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
from tests.gpu.side import interpreted
from tests.kernels.compiling import SHARED_LIMIT, Compiled, Launch, compile_for, record, specialised

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="this process interprets kernels; unset TRITON_INTERPRET"
)
KERNELS = Path(__file__).parents[2] / "kernels" / "hydra_kernels"
BF16 = torch.bfloat16
INDICES = torch.zeros(5, dtype=torch.int32)


def rows(columns: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(8, columns, dtype=dtype)


def heads(dim: int) -> Tensor:
    """Part of a fused projection."""
    return torch.zeros(8, 40, dim, dtype=BF16)[:, 8:]


def decode(heads: int, kv_heads: int, dim: int, splits: int) -> object:
    cache = torch.zeros(4, 2, 2, 16, kv_heads, dim, dtype=BF16)
    q = torch.zeros(4, heads + 2 * kv_heads, dim, dtype=BF16)[:, :heads]
    tables = torch.zeros(4, 64, dtype=torch.int32)
    return decode_attention(q, cache[:, 1, 0], cache[:, 1, 1], tables, INDICES[:4], 0.1, num_splits=splits)


def prefill(heads: int, kv_heads: int, dim: int, *, most_requests: int = 0) -> object:
    cache = torch.zeros(4, 2, 2, 16, kv_heads, dim, dtype=BF16)
    q = torch.zeros(300, heads + 2 * kv_heads, dim, dtype=BF16)[:, :heads]
    tables = torch.zeros(4, 64, dtype=torch.int32)
    caches, searched = (cache[:, 1, 0], cache[:, 1, 1]), {"max_q": 300, "most_requests": most_requests}
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


def packed(dim: int, max_length: int, *, segments: int = 0) -> object:
    """`segments`: more of them than the rows have tiles, which programs then go through."""
    q, k, v = torch.zeros(600, 3, 16, dim, dtype=BF16).unbind(1)
    cu_seqlens = torch.zeros(segments + 1, dtype=torch.int32) if segments else INDICES
    return packed_attention(q, k, v, cu_seqlens, 0.1, max_length=max_length, search=segments > 0)


def linear(
    num_rows: int, num_out: int, num_in: int, *, residual: bool = False, out_dtype: torch.dtype = BF16
) -> object:
    """By one kernel for up to 16 rows and another for more; weights are never touched, so that they take no memory."""
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
    """As `linear`."""
    numbers, groups = num_in * num_bits // 8, num_in // group_size
    values = torch.zeros(num_out, numbers, dtype=torch.int8 if num_bits == 8 else torch.uint8)
    scales = torch.zeros(num_out, groups, dtype=BF16)
    if floats:
        values, scales = values.view(FLOAT8), scales.float()
    weight = pack(values, scales, torch.zeros(num_out, groups) if offsets else None, num_bits)
    x = torch.empty(num_rows, num_in, dtype=BF16)
    return (small_quantized_linear if num_rows <= 64 else invariant_quantized_linear)(x, weight)


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


def convolution(tokens: int) -> object:
    """Over the queries, keys and values of a fused projection of MiniCPM-V 4.6."""
    states = torch.zeros(2, 3, 3, 6144, dtype=BF16)[:, 1]
    x, taps = rows(6144 + 2048 + 32)[:, :6144], torch.zeros(6144, 4, dtype=BF16)
    return causal_conv(x, taps, states, TILES, PLACES, PLACES[:4], PLACES[:4], PLACES[:4], tokens=tokens)


def recurrence(dim: int) -> object:
    """Of the convolution's results; gates are parts of a fused projection."""
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
    "prefill-gqa-128-searched": lambda: prefill(28, 4, 128, most_requests=2),
    "packed-80": lambda: packed(80, 577),
    "packed-72-windows": lambda: packed(72, 64),
    "packed-80-searched": lambda: packed(80, 600, segments=66),
}
# Matrix products of bf16 in tiles of 64 rows or more.
WGMMA = [name for name in CASES if name.startswith(("prefill", "packed", "linear-tiled", "quantized"))]
# Kernels whose tiles go through shared memory, and those that read into registers.
_PIPELINED = ("decode", "prefill", "packed", "linear-few", "linear-gated-few", "linear-rope-few", "linear-tiled")
_PIPELINED += ("quantized",)
PIPELINED = [name for name in CASES if name.startswith(_PIPELINED)]
DIRECT = [name for name in CASES if name not in PIPELINED]
# One number of a row or a few of them are all that a program stores, or stores of every token; or bytes, of which a
# thread has eight.
_REDUCING = ("greedy", "sample", "score", "linear-vector", "linear-gated-vector", "linear-rope-vector", "delta_rule")
_REDUCING += ("write_int8",)
REDUCING = [name for name in DIRECT if name.startswith(_REDUCING)]
# Reads what it was given a list of, in any order; reads the beginnings of short lists; looks up what bytes say.
GATHERING = ("_draw_kernel", "_score_kernel", "_pixel_rows_kernel")


# Further shapes of a kernel that another case has.
FURTHER = {"rms_norm-heads", "rms_norm-4096-float32", "act_and_mul-gelu", "sample-152064", "linear-vector-4096"}
FURTHER |= {
    "linear-vector-head",
    "linear-few-22016",
    "linear-gated-vector-18944",
    "linear-tiled-37888",
    "linear-tiled-head",
}
FURTHER |= {"quantized-few-4-32-offsets", "quantized-few-4-64-rows", "quantized-tiled-4-32", "quantized-tiled-8"}
FURTHER |= {"quantized-tiled-4-offsets", "quantized-few-8", "quantized-few-float8-128", "quantized-tiled-float8-128"}
FURTHER |= {"round_rows-4096", "linear-few-512", "linear-gated-few-18944"}
FURTHER |= {"linear-rope-vector-gqa", "linear-rope-few-mha", "linear-rope-few-80"}
FURTHER |= {"decode-gqa-128-int8", "prefill-mha-128-int8", "write_int8-gqa-64"}
QUANTIZED_CASES = [name for name in CASES if name.startswith("quantized")]
FURTHER |= {
    "delta_rule-64",
    "delta_rule-96",
    "decode-mha-80",
    "decode-gqa-64",
    "prefill-mha-64",
    "prefill-gqa-128-searched",
    "packed-80",
    "packed-72-windows",
}


def targets(names: list[str]) -> list[Any]:
    """Each for both. Further shapes are slow, and so is sm_80 where its code has no way of its own."""
    same = CASES.keys() - set(WGMMA)
    slow = {(name, capability) for name in FURTHER for capability in (80, 90)} | {(name, 80) for name in same}
    slow |= {
        (name, 80)
        for name in ("quantized-few-4-128", "quantized-few-float8", "packed-80-searched", "linear-tiled-patches")
    }
    return [
        pytest.param(name, capability, marks=pytest.mark.slow if (name, capability) in slow else ())
        for name in names
        for capability in (80, 90)
    ]


def on_the_newest(names: list[str]) -> list[Any]:
    """Further shapes are slow."""
    return [pytest.param(name, marks=pytest.mark.slow if name in FURTHER else ()) for name in names]


def launches_of(name: str, capability: int) -> list[Launch]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in ("_common", "linear", "fused_linear", "quantized_linear"):
            monkeypatch.setattr(f"hydra_kernels.{module}.capability_of", lambda device: capability)
        forget_launches()
        return record(monkeypatch, CASES[name])


def forget_launches() -> None:
    """Those that are kept are of the one capability that a device has."""
    for module in [module for name, module in sys.modules.items() if name.startswith("hydra_kernels.")]:
        for function in [*vars(module).values()]:
            if hasattr(function, "cache_clear"):
                function.cache_clear()


@cache
def compiled(name: str, capability: int) -> dict[str, Compiled]:
    """The kernels that a case launches, by name."""
    return {launch.name: compile_for(launch, capability) for launch in launches_of(name, capability)}


@pytest.mark.parametrize(("name", "capability"), targets(list(CASES)))
def test_compiles_and_fits(name: str, capability: int) -> None:
    for kernel, result in compiled(name, capability).items():
        assert result.shared <= SHARED_LIMIT[capability], kernel
        assert result.registers * result.warps * 32 <= 65536, kernel
        # The largest tiles are chosen for sm_90; sm_80 may spill a few registers there.
        assert result.stack <= (0 if capability == 90 else 128), f"{kernel} keeps {result.stack} bytes on the stack"


@pytest.mark.parametrize(("name", "capability"), targets(WGMMA))
def test_tensor_cores(name: str, capability: int) -> None:
    result = next(iter(compiled(name, capability).values()))
    if capability == 90:
        assert result.count(r"wgmma\.mma_async") > 0 and result.count(r"mma\.sync") == 0
    else:
        assert result.count(r"mma\.sync") > 0


@pytest.mark.parametrize("capability", [80, 90])
def test_few_rows_use_tensor_cores_and_one_row_does_not(capability: int) -> None:
    assert compiled("linear-few-3584", capability)["_small_linear_kernel"].count(r"mma\.sync") > 0
    assert compiled("linear-vector-3584", capability)["_small_linear_kernel"].count("mma") == 0


@pytest.mark.parametrize(
    "name", ["linear-few-3584", "linear-few-22016", "linear-gated-few-11008", "linear-rope-few-mha"]
)
def test_few_rows_fit_devices_before_hopper(name: str) -> None:
    """Those of capability 8.6 and 8.9 have 99 KB for a program."""
    assert all(result.shared <= 99 << 10 for result in compiled(name, 80).values())


def test_decodes_are_split_into_whole_waves() -> None:
    """Of what the compiled kernels leave room for: shared memory, whatever the joint at the end takes in registers."""
    limits = Limits(233472, 2048)
    for name, expected in (("decode-mha-128", 4), ("decode-gqa-128", 2)):
        (result,) = compiled(name, 90).values()
        assert places(result.shared, result.registers, result.warps, limits) == expected


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
def test_warps_of_prompts_and_towers_share_no_rows(dim: int, dtype: torch.dtype) -> None:
    """A warp has 16 rows of a product of 64 and more. Where two groups of four warps had the same 64 rows, and 16
    columns, a kernel that Triton 3.6 compiles for Hopper read outside of its shared memory."""
    for launch in (prefill_launch(dim, dtype), *(packed_launch(dim, length, dtype) for length in (64, 4096))):
        assert launch.rows < 64 or launch.rows >= 16 * launch.warps


def test_groups_of_a_decode_step_use_tensor_cores_and_single_heads_do_not() -> None:
    assert compiled("decode-gqa-128", 90)["_decode_gqa_kernel"].count(r"mma\.sync") > 0
    assert compiled("decode-mha-128", 90)["_decode_mha_kernel"].count("mma") == 0


@pytest.mark.parametrize("name", on_the_newest(DIRECT))
def test_rows_move_sixteen_bytes_at_a_time(name: str) -> None:
    for kernel, result in compiled(name, 90).items():
        assert kernel in GATHERING or result.count(r"ld\.global[.\w:]*\.v4") > 0
        assert name in REDUCING or result.count(r"st\.global[.\w:]*\.v4") > 0
        # What is left is one piece of a weight that all rows share, if anything, and steps of rounded rows.
        others = result.count(r"st\.global") - result.count(r"st\.global[.\w:]*\.v4")
        assert others <= name.startswith("round_rows") or name in REDUCING


@pytest.mark.parametrize("name", on_the_newest([name for name in PIPELINED if name not in QUANTIZED_CASES]))
def test_keys_and_values_are_copied_asynchronously_sixteen_bytes_at_a_time(name: str) -> None:
    result = next(iter(compiled(name, 90).values()))
    assert result.count(r"cp\.async\.c[ag]\.shared\.global[^;]*0x10") >= 4


@pytest.mark.parametrize(("name", "capability"), targets(QUANTIZED_CASES))
def test_words_are_copied_sixteen_bytes_at_a_time(name: str, capability: int) -> None:
    """As many copies as tiles have 16 bytes for each thread and stage; the rest is parts of tokens, and offsets."""
    launch = launches_of(name, capability)[0]
    given = launch.arguments
    num_bytes = given["COLUMNS"] * given["DEPTH"] * given["BITS"] // 8
    copies = compiled(name, capability)[launch.name].count(r"cp\.async\.cg\.shared\.global[^;]*0x10")
    assert copies >= num_bytes // (16 * 32 * launch.options["num_warps"]) * given["STAGES"]


@pytest.mark.parametrize(("name", "capability"), targets([name for name in CASES if name.startswith("linear")]))
def test_weights_are_read_sixteen_bytes_at_a_time_and_nothing_smaller_is_copied(name: str, capability: int) -> None:
    """But the weights of a norm, one copy a stage."""
    result = next(iter(compiled(name, capability).values()))
    copies = result.count(r"cp\.async\.c[ag]\.shared\.global")
    given = launches_of(name, capability)[0].arguments
    norms = given["STAGES"] if copies and given.get("norm") is not None else 0
    assert copies == norms + result.count(r"cp\.async\.c[ag]\.shared\.global[^;]*0x10")
    assert copies > 0 or result.count(r"ld\.global[.\w:]*\.v4") >= 4


# Pieces of 16 bytes that a thread reads before it waits: weights, of one step of a product or of a norm.
AHEAD = {"rms_norm-4096": 2, "add_rms_norm-3584": 2, "decode-mha-128": 0, "decode-gqa-128": 0}
AHEAD |= {"linear-vector-4096": 6, "linear-few-3584": 16}
AHEAD |= {"linear-gated-vector-11008": 16, "linear-gated-few-11008": 8}
AHEAD |= {"linear-rope-vector-mha": 8, "linear-rope-few-gqa": 8}


@pytest.mark.quick("[rms_norm", "gated-vector", "decode-gqa")
@pytest.mark.parametrize("name", on_the_newest([*AHEAD]))
def test_nothing_but_weights_is_touched_before_the_kernel_ahead_has_ended(name: str) -> None:
    """The rule of `hydra_kernels._common`, in the order of the machine code. On sm_80 there is no such launch."""
    (launch,) = launches_of(name, 90)
    assert launch.options["launch_pdl"]
    ((kernel, result),) = compiled(name, 90).items()
    before, after = result.ptx.split("griddepcontrol.wait")
    assert before.count("griddepcontrol.launch_dependents") == 1, kernel
    assert re.findall(r"\b(?:st\.global|red\.|atom\.|cp\.async)", before) == [], kernel
    assert "griddepcontrol" not in after
    code = re.findall(r"\b(?:LDG|STG|RED|ATOM|LDGSTS|ACQBULK)\b", result.machine_code())
    assert code.index("ACQBULK") == AHEAD[name] and {*code[: AHEAD[name]]} <= {"LDG"}, kernel
    assert not any(launch.options["launch_pdl"] for launch in launches_of(name, 80))


@pytest.mark.quick("-4]")
@pytest.mark.parametrize(("name", "num_bits"), [("quantized-few-4-128", 4), ("quantized-few-8", 8)])
def test_numbers_become_fractions_of_floats(name: str, num_bits: int) -> None:
    """The few instructions of it are written by hand and no interpreter runs them: here all 16-bit words go through
    what was compiled, two at once, and are the numbers that `pack` has put there."""
    ptx = compiled(name, 90)["_quantized_linear_kernel"].ptx
    step = r"shr\.b32 t, %r\d+, (\d+); and\.b32 t, t, (\d+); or\.b32 %r\d+, t, (\d+);"
    steps = sorted({tuple(map(int, found)) for found in re.findall(step, ptx)})
    lower = torch.arange(1 << 16)
    pairs = lower | lower.flip(0) << 16

    def floats(shift: int, mask: int, base: int) -> Tensor:
        return (pairs >> shift & mask | base).to(torch.int32).view(BF16).view(-1, 2)

    places = range(0, 16, num_bits)
    if num_bits == 4:
        found = [floats(*given) - 136 for given in steps]
    else:
        found = [floats(*steps[i]) - floats(*steps[i + 1]) for i in range(0, len(steps), 2)]
    assert len(found) == len(places)
    for shift, numbers in zip(places, found, strict=True):
        words = torch.stack((lower, lower.flip(0)), dim=1) >> shift
        expected = (words & 15) - 8 if num_bits == 4 else (words & 255).to(torch.uint8).view(torch.int8)
        assert torch.equal(numbers.float(), expected.float()), shift


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_octets_become_floats(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """As the test above, of E4M3 numbers: what was compiled moves their bits, and a product gives them their size."""
    weight = pack(torch.zeros(512, 1024, dtype=FLOAT8), torch.zeros(512, 1), None, 8)
    launch = record(monkeypatch, lambda: small_quantized_linear(torch.zeros(8, 1024, dtype=dtype), weight))[0]
    ptx = compile_for(launch, 90).ptx
    move = r"(mov|shl|shr)\.b32 ([st]), %r\d+(?:, (\d+))?;"
    step = rf"{move} {move} and\.b32 t, t, (\d+); and\.b32 s, s, (\d+); or\.b32"
    steps = set(re.findall(step, ptx))
    lower = torch.arange(1 << 16)
    pairs = lower | lower.flip(0) << 16
    moved = {"mov": lambda _: pairs, "shl": lambda by: pairs << int(by), "shr": lambda by: pairs >> int(by)}
    found = []
    for way, first, by, sign_way, second, sign_by, magnitude, sign in steps:
        assert (first, second) == ("t", "s")
        bits = (moved[way](by) & int(magnitude)) | (moved[sign_way](sign_by) & int(sign))
        floats = (bits & 0xFFFFFFFF).to(torch.int64).view(-1, 1).view(torch.int16)[:, :2].contiguous().view(dtype)
        found.append((way, floats.float() * (2.0**120 if dtype is BF16 else 2.0**8)))
    words = torch.stack((lower, lower.flip(0)), dim=1)
    assert {way for way, _ in found} == {"shl", "shr"} and len(found) == 2
    for way, numbers in found:
        octets = (words >> (8 if way == "shr" else 0) & 255).to(torch.uint8)
        number = octets & 127 != 127
        assert torch.equal(numbers[number], octets.view(FLOAT8).float()[number])
    factor = "0x7B807B80" if dtype is BF16 else "0x5C005C00"
    assert re.search(r"mul\.(bf16|f16)x2", ptx) and str(int(factor, 16)) in ptx


def of_step(tokens: int, first: int) -> object:
    """What every kernel whose arguments follow from a step is given in one of `tokens` rows, if they begin at row
    `first` of what was sent."""
    rest = slice(first, first + tokens)
    x, wide, hidden = (torch.zeros(64, size, dtype=BF16)[rest] for size in (4096, 2 * 4096, 6144))
    context, cu_q = torch.zeros(65, dtype=torch.int32)[rest], torch.zeros(66, dtype=torch.int32)[first:][: tokens + 1]
    tables, cache = torch.zeros(64, 37, dtype=torch.int32)[rest], torch.zeros(4, 2, 2, 16, 4, 64, dtype=BF16)
    k_cache, v_cache, q = cache[:, 1, 0], cache[:, 1, 1], torch.zeros(64, 28, 64, dtype=BF16)[rest]
    # Of one bucket: what else is compiled for is its number of rows.
    mixed = tables.new_zeros(8, 37), torch.zeros(10, dtype=torch.int32)[1:], torch.zeros(9, dtype=torch.int32)[1:]
    places, tiles = torch.zeros(65, dtype=torch.int64)[first:], torch.zeros(64, 2, dtype=torch.int32)[rest]
    projection = x.new_zeros(36 * 64, 4096), None, *torch.zeros(2, tokens, 32), places[:tokens]
    vectors = places[: tokens + 1], *(places[:tokens],) * 3
    fields = torch.zeros(5, 64)[:, rest]
    conv, state = torch.zeros(2, 3, 6144, dtype=BF16), torch.zeros(2, 16, 128, 128)
    parts = hidden.view(tokens, 3, 16, 128).unbind(1)
    taps, scales = torch.zeros(6144, 4, dtype=BF16), torch.zeros(2, 16)
    return (
        pixel_rows(torch.zeros(tokens, 1176, dtype=torch.uint8), torch.zeros(256, 3, dtype=BF16), 1176),
        rms_norm(x, x[0], 1e-5),
        rms_norm(parts[0], x[0, :128], 1e-5),
        add_rms_norm(x, x, x[0], 1e-5),
        gated_rms_norm(parts[0], x[0, :128], parts[1], 1e-5),
        layer_norm(x, x[0], x[0], 1e-5),
        add_layer_norm(x, x, x[0], x[0], 1e-5),
        act_and_mul(wide, "silu"),
        sigmoid_mul(parts[0], parts[1]),
        rotate(parts[0], *torch.zeros(2, tokens, 64)),
        finish(x, None, x, "gelu"),
        round_rows(x, 2048, 4096),
        *((small_linear(x, x.new_zeros(512, 4096)),) if 1 < tokens <= 16 else ()),
        *((gated_linear(x, x.new_zeros(512, 4096), None, "silu"),) if 1 < tokens <= 16 else ()),
        *((rope_linear(x, *projection, k_cache, v_cache),) if 1 < tokens <= 16 else ()),
        invariant_linear(x, x.new_zeros(512, 4096)),
        small_quantized_linear(x, QUANTIZED),
        invariant_quantized_linear(x, QUANTIZED),
        prefill_attention(q, k_cache, v_cache, tables, cu_q, context, 0.1, max_q=tokens),
        prefill_attention(q, k_cache, v_cache, *mixed, 0.1, max_q=tokens, most_requests=8),
        packed_attention(q, q, q, cu_q, 0.1, max_length=tokens),
        *(decode_attention(q, k_cache, v_cache, tables, context, 0.1, num_splits=splits) for splits in (3, 1)),
        sample(torch.zeros(tokens, 32064), fields[0], fields[1].int(), *fields[2:]),
        adjustments(torch.zeros(tokens, 32064), first),
        score_tokens(torch.zeros(tokens, 32064), places[:tokens], cu_q[:tokens], 20),
        causal_conv(hidden, taps, conv, tiles, *vectors, tokens=TILE),
        delta_rule(*parts, x[:, :16], x[:, 16:32], *scales, state, *vectors),
    )


def test_no_step_needs_a_kernel_that_another_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is compiled anew for an integer that is 1 or a multiple of 16, or an address that is, where it has not
    been told to look away. While serving that costs a second, and inside a captured step it cannot be."""
    seen: dict[str, set[str]] = {}
    for tokens, first in ((16, 0), (3, 0), (2, 1), (16, 3), (1, 5), (33, 2), (7, 16)):
        for launch in record(monkeypatch, lambda t=tokens, f=first: of_step(t, f)):
            compiled_for = repr((specialised(launch), launch.options))
            seen.setdefault(launch.name, set()).add(compiled_for)
    kinds = {name: len(kinds) for name, kinds in seen.items()}
    # Forms of the wrappers above.
    several = {
        "_rms_norm_kernel": 4,
        "_layer_norm_kernel": 2,
        "_prefill_kernel": 2,
        "_decode_gqa_kernel": 2,
        "_quantized_linear_kernel": 3,
        "_join_splits_kernel": 2,
    }
    assert kinds == {name: several.get(name, 1) for name in kinds}


@pytest.mark.parametrize("num_bits", [8, 4])
def test_the_first_product_with_a_quantised_weight_compiles_for_all_others(
    monkeypatch: pytest.MonkeyPatch, num_bits: int
) -> None:
    ops = interpreted().ops
    weight = quantized_weight(torch.zeros(2048, 1024), num_bits, 128, BF16)
    packed_linear = ops.pack_linear(weight, torch.zeros(2048))

    def kinds(rows: int) -> set[str]:
        x, residual = torch.zeros(rows, 1024, dtype=BF16), torch.zeros(rows, 2048, dtype=BF16)
        launches = record(monkeypatch, lambda: ops.linear(x, packed_linear, residual=residual))
        return {repr((launch.name, specialised(launch), launch.options)) for launch in launches}

    first = kinds(3)
    assert all(kinds(rows) <= first for rows in (1, 2, 16, 17, 33, 64, 65, 200, 3000))


@pytest.mark.slow
def test_every_kernel_is_compiled_here() -> None:
    """A kernel is a jitted function of no other: every `_..._kernel` of the package."""
    defined = {
        node.name
        for path in KERNELS.glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    with_descriptors = {"packed_tma_kernel", "prefill_tma_kernel"}  # test_compiled_tma.py
    assert defined == {kernel for name in CASES for kernel in compiled(name, 90)} | with_descriptors


def test_a_launch_without_a_gpu_fails_loudly() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises((RuntimeError, ValueError), match=r"driver|cpu"):
        rms_norm(rows(64), rows(64)[0], 1e-5)
