"""Shared parts of the kernels: a matrix product that the interpreter supports, launch sizes, and dependent launch.

Launch parameters are plain tables, read from here at every call; nothing is tuned while serving.

Programmatic dependent launch (capability 9.0 and newer, CUDA programming guide 4.5): a kernel launched with
`dependent_launch` may begin while the previous kernel in the stream still runs. Each of its programs

1. allows the same to the next kernel (`launch_dependents`); 2. may then read what no kernel of a step writes, that is
weights only; 3. waits (`wait_for_previous`) until the previous kernel has ended and its writes are visible.

The wait is never left out, and nothing else is read or written before it. A kernel learns only that its predecessor has
ended, which includes the predecessor's own wait: that is how it knows that all earlier kernels have ended, and that
memory which they read may be overwritten. Kernels launched without it wait for everything before them, as always, and
may be mixed with these.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hydra_kernels._sizes import cdiv, next_power_of_2

INTERPRETING: bool = triton.knobs.runtime.interpret
# The interpreter multiplies the bit patterns of bfloat16 operands as integers; on a GPU operands are not converted.
DOT_DTYPE = tl.float32 if INTERPRETING else None

Entry = TypeVar("Entry")
LOG2_E = 1.4426950408889634
_MAX_WARPS = 16
_ELEMENTS_PER_THREAD = 16


@triton.jit
def dot(a: tl.tensor, b: tl.tensor, acc: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Returns acc + a @ b in float32. Float32 operands keep their precision by three tf32 products. DTYPE: `DOT_DTYPE`,
    to which operands are converted unless it is None."""
    if DTYPE is not None:
        a = a.to(DTYPE)
        b = b.to(DTYPE)
    return tl.dot(a, b, acc=acc, input_precision="tf32x3")


@triton.jit
def launch_dependents(PDL: tl.constexpr) -> None:
    """Lets the next kernel start early (programmatic dependent launch) once every program of this one has called it or
    has ended. Does nothing without PDL."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr) -> None:
    """Waits until the previous kernel has ended and its writes are visible. Does nothing without PDL, where a kernel
    starts after that."""
    if PDL:
        gdc_wait()


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """The constant PDL and the launch option `launch_pdl` of a kernel that calls `launch_dependents` and
    `wait_for_previous`: both true from capability 9.0 on, false on older devices and in the interpreter."""
    has_it = not INTERPRETING and capability_of(device) >= 90
    return {"PDL": has_it, "launch_pdl": has_it}


class RowLaunch(NamedTuple):
    """Rows and columns of a program's tile, and its warps."""

    rows: int
    columns: int
    warps: int


@cache
def row_launch(columns: int) -> RowLaunch:
    """Launch of kernels with whole rows, padded to a power of two, in registers: 16 elements per thread, more for rows
    beyond 8192; rows of up to 1024 share a program."""
    padded = next_power_of_2(columns)
    rows = max(1, 2048 // padded)
    warps = min(_MAX_WARPS, max(1, rows * padded // (32 * _ELEMENTS_PER_THREAD)))
    return RowLaunch(rows, padded, warps)


@cache
def split_head_dim(dim: int) -> tuple[int, int]:
    """Columns (D0, D1) of the two tiles of a head dim, powers of two of at least 16 with D0 + D1 >= dim; D1 is 0 if one
    tile is no wider. 72 and 80 become 64 + 16, not 128."""
    first = max(16, 1 << (dim.bit_length() - 1))
    rest = 0 if first >= dim else max(16, next_power_of_2(dim - first))
    return (2 * first, 0) if rest == first else (first, rest)


def split_for_lanes(dim: int) -> tuple[int, int]:
    """Columns (D0, D1) of the two tiles of a head dim in kernels without tensor cores, where the lanes of a warp add
    the products. As `split_head_dim`, but a single tile of 128 becomes 64 + 64, with a third of its registers."""
    return (64, 64) if split_head_dim(dim) == (128, 0) else split_head_dim(dim)


class AttentionLaunch(NamedTuple):
    """Query rows and keys of a tile, warps and pipeline stages of a program."""

    rows: int
    keys: int
    warps: int
    stages: int


# Launches by padded head dim, for 16-bit tensors: the first entry that is wide enough.
_DECODE_MHA = {
    64: AttentionLaunch(1, 64, 4, 4),
    128: AttentionLaunch(1, 32, 4, 4),
    256: AttentionLaunch(1, 16, 4, 4),
}
_DECODE_GQA = {
    64: AttentionLaunch(16, 64, 4, 5),
    128: AttentionLaunch(16, 64, 8, 5),
    256: AttentionLaunch(16, 32, 4, 4),
}
_PREFILL = {64: AttentionLaunch(128, 64, 4, 3), 128: AttentionLaunch(64, 64, 4, 2), 256: AttentionLaunch(64, 32, 4, 2)}
_PACKED = {64: AttentionLaunch(128, 64, 4, 3), 128: AttentionLaunch(128, 64, 8, 3), 256: AttentionLaunch(64, 32, 4, 2)}
_WINDOW = {64: AttentionLaunch(64, 64, 4, 2), 128: AttentionLaunch(64, 64, 4, 2), 256: AttentionLaunch(64, 32, 4, 2)}
_FLOAT32_TILES = 80 << 10  # bytes of queries, and of keys and values in two stages


# Launches with TMA descriptors. With too few registers ptxas makes the kernel wait after every product.
TMA_KEYS = 64
TMA_WIDTH = 128  # columns of a padded head dim
_TMA = {64: AttentionLaunch(128, TMA_KEYS, 8, 3), TMA_WIDTH: AttentionLaunch(128, TMA_KEYS, 8, 3)}


@cache
def decode_launch(dim: int, group: int, dtype: torch.dtype) -> AttentionLaunch:
    """Launch of decode attention. group: query heads per KV head; several are the rows of a tile of 16 or more for the
    tensor cores. Raises ValueError for a head dim above 256."""
    if group == 1:
        return _launch(_DECODE_MHA, dim, dtype)
    rows, launch = max(16, next_power_of_2(group)), _launch(_DECODE_GQA, dim, dtype)
    if rows >= 64:  # fewer keys, to fit shared memory; warps as in `_launch`
        launch = launch._replace(keys=max(16, launch.keys // 2), warps=min(launch.warps, rows // 16))
    return launch._replace(rows=rows)


@cache
def prefill_launch(dim: int, dtype: torch.dtype) -> AttentionLaunch:
    """Launch of `prefill_attention` without TMA. Raises ValueError for a head dim above 256."""
    return _launch(_PREFILL, dim, dtype)


def packed_launch(dim: int, max_length: int, dtype: torch.dtype) -> AttentionLaunch:
    """Launch of packed attention without TMA. If no segment has more than 64 rows (windows), tiles have 64 rows, fewer
    in float32. Raises ValueError for a head dim above 256."""
    return _launch(_WINDOW if max_length <= _WINDOW[64].rows else _PACKED, dim, dtype)


def tma_launch(dim: int) -> AttentionLaunch:
    """Launch of the kernels with TMA descriptors. Raises ValueError for a head dim above TMA_WIDTH."""
    return _launch(_TMA, dim, torch.bfloat16)


def _launch(table: dict[int, AttentionLaunch], dim: int, dtype: torch.dtype) -> AttentionLaunch:
    """Entry of the table for a head dim, smaller tiles in float32. Raises ValueError if no entry is wide enough."""
    width = sum(split_head_dim(dim))
    launch = next((entry for limit, entry in table.items() if width <= limit), None)
    if launch is None:
        raise ValueError(f"q: expected a head dim of at most {max(table)}, got {dim}")
    if dtype.itemsize == 2:
        return launch
    # float32 tiles of the same size fit neither the registers nor the 99 KB of shared memory that every GPU has. Four
    # warps take the 64 rows of a product on Hopper; with eight warps and 16 columns Triton 3.6 reads outside of its
    # shared memory.
    rows, keys = max(16, launch.rows // 2), max(16, launch.keys // 2)
    if (rows + 4 * keys) * width * dtype.itemsize > _FLOAT32_TILES:
        rows = max(16, rows // 2)
    return AttentionLaunch(rows, keys, min(launch.warps, max(4, rows // 16)), 2)


def tile_constants(dim: int, launch: AttentionLaunch) -> dict[str, Any]:
    """Constants, number of warps included, of kernels with tiles of query rows and of keys, and a head dim in two
    tiles."""
    first, rest = split_head_dim(dim)
    return {
        "D": dim,
        "D0": first,
        "D1": rest,
        "ROWS": launch.rows,
        "KEYS": launch.keys,
        "STAGES": launch.stages,
        "DTYPE": DOT_DTYPE,
        "num_warps": launch.warps,
    }


class LinearLaunch(NamedTuple):
    """Tokens, outputs and inputs of one step of a program, its warps and pipeline stages, and the split-K count."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    splits: int = 1


# Launches by the least number of outputs, widest first: the fastest on an H200 (bench.micro.launches) for the 16-bit
# products of 7B models. One row: a few long programs on each SM; a tile: many loads in flight.
_VECTOR = {
    16384: LinearLaunch(1, 4, 4096, 4, 3),
    2048: LinearLaunch(1, 2, 4096, 4, 3),
    0: LinearLaunch(1, 1, 4096, 4, 3),
}
_SHORT_VECTOR = LinearLaunch(1, 2, 2048, 4, 3)  # instead of the second entry, for rows of at most two such pieces
_MANY_OUTPUTS, _MAX_OUTPUTS = 3072, 8192
# Tables for two kinds of device, by `_tables_of`.
_FEW_ROWS = {
    80: {_MANY_OUTPUTS: LinearLaunch(16, 32, 256, 4, 4), 0: LinearLaunch(16, 16, 256, 4, 5)},
    90: {
        _MAX_OUTPUTS: LinearLaunch(16, 64, 128, 4, 4),
        _MANY_OUTPUTS: LinearLaunch(16, 64, 128, 4, 6),
        0: LinearLaunch(16, 16, 256, 4, 5),
    },
}
_PAIRS_OF_ROWS = {
    80: _FEW_ROWS[80],
    90: {_MANY_OUTPUTS: LinearLaunch(16, 64, 128, 4, 4), 0: LinearLaunch(16, 16, 256, 4, 5)},
}
_FEW_ROWS_LONG = LinearLaunch(16, 32, 512, 4, 4)  # 90, _MANY_OUTPUTS to _MAX_OUTPUTS, more than 8192 inputs
_FEW_ROWS_WIDE = {_MANY_OUTPUTS: LinearLaunch(16, 32, 128, 4, 4), 0: LinearLaunch(16, 16, 128, 4, 5)}  # float32
_FEW_PROGRAMS = 64  # fewer do not read at full memory speed: split-K makes up to twice as many
# Narrow tiles of outputs give more programs in a step of few tokens; wide tiles read the tokens less often.
_TILED = {
    80: {_MAX_OUTPUTS: LinearLaunch(128, 128, 64, 8, 3), 0: LinearLaunch(128, 64, 64, 4, 4)},
    90: {_MAX_OUTPUTS: LinearLaunch(128, 256, 64, 8, 3), 0: LinearLaunch(128, 64, 64, 4, 6)},
}
_TILED_WIDE = LinearLaunch(64, 64, 32, 4, 3)  # float32
# Weights in 8 and 4 bits, by the least number of rows minus one: a tile has all rows of a step.
_FEW_ROWS_QUANTIZED = {
    16: LinearLaunch(64, 64, 128, 4, 4),
    0: LinearLaunch(16, 64, 128, 4, 3),
}
_LONG_QUANTIZED = 8192  # inputs from which up to 16 rows take twice the depth
_QUANTIZED_PROGRAMS = 256  # two for each of 132 SMs: conversion to floats takes warps, besides loads in flight
_TILED_QUANTIZED = {
    80: {_MAX_OUTPUTS: LinearLaunch(128, 128, 128, 8, 3), 0: LinearLaunch(64, 128, 128, 8, 3)},
    90: {_MAX_OUTPUTS: LinearLaunch(128, 128, 128, 8, 4), 0: LinearLaunch(128, 64, 128, 4, 4)},
}
_SMALL_GROUP = 64  # inputs: sums of several groups at once need registers
_TILED_QUANTIZED_SMALL = LinearLaunch(64, 128, 128, 8, 3)
_TILED_QUANTIZED_WIDE = LinearLaunch(32, 64, 128, 4, 2)  # float32
# Mixtures of experts, where most experts of a decode step have a row or two: few and many rows of an expert.
_EXPERTS = {
    80: (LinearLaunch(16, 32, 256, 4, 4), LinearLaunch(64, 128, 64, 4, 3)),
    90: (LinearLaunch(16, 64, 128, 4, 4), LinearLaunch(64, 128, 64, 4, 4)),
}
_EXPERTS_WIDE = LinearLaunch(16, 32, 128, 4, 4), _TILED_WIDE  # float32


def _tables_of(capability: int) -> int:
    """Returns 90 if a program may have 227 KB of shared memory (capability 9.0 to 11.0), else 80, whose entries need at
    most 99 KB: 12.0 has no more than 8.6 (CUDA programming guide, technical specifications)."""
    return 90 if 90 <= capability < 120 else 80


@cache
def small_launch(num_rows: int, num_out: int, num_in: int, dtype: torch.dtype, capability: int) -> LinearLaunch:
    """Launch for up to 16 rows: a single row, or a tile of 16, whose inputs are split (split-K) if there are few
    outputs and enough inputs for about two steps of each program. Depends on `num_rows` only by whether it is 1."""
    if num_rows == 1:
        launch = _first(_VECTOR, num_out)
        if launch.columns == _SHORT_VECTOR.columns and num_in <= 2 * _SHORT_VECTOR.depth:
            launch = _SHORT_VECTOR
        return _fitted(launch, num_in, dtype)
    if dtype.itemsize > 2:
        launch = _first(_FEW_ROWS_WIDE, num_out)
    elif _tables_of(capability) == 90 and _MANY_OUTPUTS <= num_out < _MAX_OUTPUTS < num_in:
        launch = _FEW_ROWS_LONG
    else:
        launch = _first(_FEW_ROWS[_tables_of(capability)], num_out)
    programs = cdiv(num_out, launch.columns)
    if num_out >= _MANY_OUTPUTS or programs >= _FEW_PROGRAMS:
        return launch
    longest = cdiv(num_in, 2 * launch.depth)  # but for the last program at least two steps
    return launch._replace(splits=max(1, min(2 * _FEW_PROGRAMS // programs, longest)))


def _fitted(launch: LinearLaunch, num_in: int, dtype: torch.dtype) -> LinearLaunch:
    """The launch for one row with its depth, meant for 16 bits, set to the same bytes per step in `dtype`, but to no
    more than the least power of two >= `num_in`."""
    return launch._replace(depth=min(launch.depth * 2 // dtype.itemsize, next_power_of_2(num_in)))


@cache
def pairs_launch(
    num_rows: int, num_out: int, width: int, num_in: int, dtype: torch.dtype, capability: int
) -> LinearLaunch:
    """Launch for up to 16 rows whose outputs are computed in pairs, never split-K: `columns` counts pairs, at
    most `width` (the pairs of a head or of the whole product, rounded up to a power of two), but at least 8 in a tile
    of rows."""
    if num_rows == 1:
        launch, least = _fitted(_first(_VECTOR, num_out), num_in, dtype), 1
    else:
        table = _PAIRS_OF_ROWS[_tables_of(capability)]
        launch = _first(_FEW_ROWS_WIDE if dtype.itemsize > 2 else table, num_out)
        least = 8  # tensor cores need 16 columns
    return launch._replace(columns=max(least, min(launch.columns // 2, next_power_of_2(width))))


def tiled_launch(num_out: int, dtype: torch.dtype, capability: int) -> LinearLaunch:
    """Launch for any number of rows, on which it does not depend, so that a row's bits do not either."""
    if dtype.itemsize > 2:
        return _TILED_WIDE
    return _first(_TILED[_tables_of(capability)], num_out)


def few_rows_quantized_launch(num_rows: int, num_out: int, num_in: int, dtype: torch.dtype) -> LinearLaunch:
    """Launch for up to 64 rows and quantised weights: one for up to 16 rows, another for 17 to 64. Split-K if there are
    few outputs and enough inputs for four steps of each program."""
    launch = _first(_FEW_ROWS_QUANTIZED, num_rows - 1)
    if dtype.itemsize > 2:
        launch = launch._replace(stages=2)
    elif launch.rows == 16 and num_in >= _LONG_QUANTIZED:
        launch = launch._replace(depth=2 * launch.depth)
    programs = cdiv(num_out, launch.columns)
    longest = num_in // (4 * launch.depth)  # a program has at least four steps
    return launch._replace(splits=max(1, min(_QUANTIZED_PROGRAMS // programs, longest)))


def tiled_quantized_launch(num_out: int, group_size: int, dtype: torch.dtype, capability: int) -> LinearLaunch:
    """Launch for any number of rows, on which it does not depend, with `group_size` inputs per scale of the weight."""
    if dtype.itemsize > 2:
        return _TILED_QUANTIZED_WIDE
    if group_size <= _SMALL_GROUP:
        return _TILED_QUANTIZED_SMALL
    return _first(_TILED_QUANTIZED[_tables_of(capability)], num_out)


def experts_launch(dtype: torch.dtype, capability: int, *, many: bool) -> LinearLaunch:
    """Launch of a product of a mixture's experts, with tiles of few rows or of many."""
    if dtype.itemsize > 2:
        return _EXPERTS_WIDE[many]
    return _EXPERTS[_tables_of(capability)][many]


def quantized_experts_launch(dtype: torch.dtype, *, many: bool) -> LinearLaunch:
    """Launch of a product with quantised weights of a mixture's experts, as `experts_launch`."""
    if dtype.itemsize > 2:
        return _TILED_QUANTIZED_WIDE
    return _TILED_QUANTIZED_SMALL if many else _FEW_ROWS_QUANTIZED[0]


def _first(table: dict[int, Entry], size: int) -> Entry:
    """Entry with the first key, in a table of descending keys, that is at most `size`."""
    return next(entry for least, entry in table.items() if size >= least)


@cache
def capability_of(device: torch.device) -> int:
    """Compute capability as 80, 90, ..; 90 for tensors on the host (kernels interpreted, or compiled without a GPU)."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def num_sms_of(device: torch.device) -> int:
    """Number of streaming multiprocessors; 4 for tensors on the host, to interpret kernels with several programs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
