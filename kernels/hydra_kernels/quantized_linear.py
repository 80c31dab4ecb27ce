"""Linears with weights of 8 or 4 bits: act(x @ W^T + bias) + residual, x and the result in a float type.

    w[n, k] = scales[n, g] * number[n, k] + offsets[n, g]       g = k // group size; number: -128..127, -8..7, or E4M3

Numbers are exact in every float type, so the tensor cores multiply them unscaled; scales multiply the float32 sums of a
group, and offsets the sums of the group's x. Weights are never rounded to a 16-bit type. One kernel is launched in two
ways: `small_quantized_linear` for decode steps, bound by reading the weights, and `invariant_quantized_linear`, in
whose results a row depends on itself alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from hydra_kernels._checks import check_rows, described
from hydra_kernels._common import (
    DOT_DTYPE,
    INTERPRETING,
    LinearLaunch,
    capability_of,
    dot,
    few_rows_quantized_launch,
    num_sms_of,
    tiled_quantized_launch,
)
from hydra_kernels._launch import Launch, cached_launch
from hydra_kernels._linear import GROUP, checked_output, finish_tile, join_splits
from hydra_kernels._sizes import cdiv

MAX_SMALL_ROWS = 64
_PART = 32  # most inputs of one product: two steps of the tensor cores
_WORD = 16  # bits
_PACKED_ROWS = 4096  # rows that are packed at once, to bound temporary memory


class PackedWeight(NamedTuple):
    """A matrix [N, K] in the kernel's layout, made by `pack`.

    words: int16 [N, words of a row]. A block of 16 / num_bits parts with `part` inputs each is `part` words: word j has
    number j of every part, the first part in the lowest bits; 4-bit numbers are stored + 8. Rows are padded with zero
    bits to whole blocks.
    scales: [G, N]; offsets: float32 [G, N], or None for zeros.
    """

    words: Tensor
    scales: Tensor
    offsets: Tensor | None
    num_in: int
    num_bits: int
    part: int
    floats: bool = False  # True: 8-bit numbers are E4M3

    @property
    def group_size(self) -> int:
        """Number of inputs that share a scale."""
        return self.num_in // self.scales.shape[0]


def pack(values: Tensor, scales: Tensor, offsets: Tensor | None, num_bits: int) -> PackedWeight:
    """Packs a quantised matrix [N, K]; scales and offsets are transposed, nothing is rounded.

    values: 8 bits: int8 or float8_e4m3fn [N, K]; 4 bits: uint8 [N, K / 2] of numbers + 8, the even k in the lower half.
    scales: [N, G] of a float type; offsets: float32 [N, G] or None. G is 1, or groups are multiples of 16 inputs;
    else ValueError, as for other bits.
    """
    num_out, num_in, groups = values.shape[0], values.shape[1] * 8 // num_bits, scales.shape[1]
    if num_bits not in (8, 4) or groups == 0 or num_in % groups or (groups > 1 and num_in // groups % 16):
        raise ValueError(
            f"scales: expected one for each output, or for each multiple of 16 of {num_in} inputs in 8 or 4 bits, "
            f"got {described(scales)} and {num_bits} bits"
        )
    size = num_in // groups
    part = _PART if groups == 1 or size % _PART == 0 else 16
    width = cdiv(num_in, _WORD // num_bits * part) * part
    words = torch.empty((num_out, width), dtype=torch.int16, device=values.device)
    for some, target in zip(values.split(_PACKED_ROWS), words.split(_PACKED_ROWS), strict=True):
        target.copy_(_words(some, num_bits, part, width))
    offsets = None if offsets is None else offsets.t().contiguous()
    floats = values.dtype is torch.float8_e4m3fn
    return PackedWeight(words, scales.t().contiguous(), offsets, num_in, num_bits, part, floats)


def _words(values: Tensor, num_bits: int, part: int, width: int) -> Tensor:
    """Returns `values` of `pack` as int16 words [N, width] in the layout of `PackedWeight`."""
    numbers = values.view(torch.uint8) if num_bits == 8 else torch.stack((values & 15, values >> 4), dim=2).flatten(1)
    parts = _WORD // num_bits
    blocks = pad(numbers, (0, parts * width - numbers.shape[1])).view(-1, width // part, parts, part)
    words = blocks[:, :, 0].to(torch.int16)
    for place in range(1, parts):
        words |= blocks[:, :, place].to(torch.int16) << (num_bits * place)
    return words.flatten(1)


@triton.jit
def _fields(words: tl.tensor, SHIFT: tl.constexpr, MASK: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """128 (bfloat16) or 1024 (float16) + (words >> SHIFT & MASK), two words at once: the field becomes the lowest bits
    of the fraction. MASK: at most 7 bits, or bit 128 alone, which raises bfloat16's exponent and so adds 128 too."""
    BASE: tl.constexpr = 0x43004300 if DTYPE.is_bf16() else 0x64006400
    MASKS: tl.constexpr = MASK * 0x10001
    fields = tl.inline_asm_elementwise(
        f"{{ .reg .b32 t; shr.b32 t, $1, {SHIFT}; and.b32 t, t, {MASKS}; or.b32 $0, t, {BASE}; }}",
        "=r,r",
        [words],
        dtype=tl.int16,
        is_pure=True,
        pack=2,
    )
    return fields.to(DTYPE, bitcast=True)


@triton.jit
def _float8_fields(words: tl.tensor, SHIFT: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """The E4M3 number in (words >> SHIFT & 255) times 2^-120 (bfloat16) or 2^-8 (float16), two words at once: sign,
    exponent and fraction are moved to where DTYPE has them, which is right for subnormal numbers too."""
    RIGHT: tl.constexpr = 4 if DTYPE.is_bf16() else 1  # shift of the number's last seven bits, from the upper half
    MAGNITUDE: tl.constexpr = (0x7F << (8 - RIGHT)) * 0x10001
    MOVE: tl.constexpr = f"shr.b32 t, $1, {RIGHT};" if SHIFT == 8 else f"shl.b32 t, $1, {8 - RIGHT};"
    SIGN: tl.constexpr = "mov.b32 s, $1;" if SHIFT == 8 else "shl.b32 s, $1, 8;"
    fields = tl.inline_asm_elementwise(
        f"{{ .reg .b32 s, t; {MOVE} {SIGN} and.b32 t, t, {MAGNITUDE}; and.b32 s, s, {0x80008000}; or.b32 $0, s, t; }}",
        "=r,r",
        [words],
        dtype=tl.int16,
        is_pure=True,
        pack=2,
    )
    return fields.to(DTYPE, bitcast=True)


@triton.jit
def _numbers(
    words: tl.tensor,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    DTYPE: tl.constexpr,
    ASM: tl.constexpr,
) -> tl.tensor:
    """The number of BITS bits from bit SHIFT of each int16 word, exact in DTYPE; E4M3 if FLOATS. ASM: by inline
    assembly, two words with a few instructions; bfloat16 and float16 only."""
    if FLOATS:
        if ASM:
            FACTOR: tl.constexpr = 2.0**120 if DTYPE.is_bf16() else 2.0**8
            return _float8_fields(words, SHIFT, DTYPE) * tl.full([], FACTOR, DTYPE)
        octet = words.to(tl.int32) >> SHIFT
        wide = ((octet & 127) << 20 | (octet & 128) << 24).to(tl.float32, bitcast=True)
        return (wide * 2.0**120).to(DTYPE)
    if ASM:
        if BITS == 8:
            return _fields(words, SHIFT, 127, DTYPE) - _fields(words, SHIFT, 128, DTYPE)
        ZERO: tl.constexpr = 136.0 if DTYPE.is_bf16() else 1032.0
        return _fields(words, SHIFT, 15, DTYPE) - ZERO
    field = words.to(tl.int32) >> SHIFT
    if BITS == 8:
        return ((field & 127) - (field & 128)).to(tl.float32).to(DTYPE)
    return ((field & 15) - 8).to(tl.float32).to(DTYPE)


@triton.jit
def _group_entries(
    source: tl.tensor,
    column: tl.tensor,
    k0: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    STEP: tl.constexpr,
    COUNT: tl.constexpr,
) -> tl.tuple:
    """Entries of source [G, N] for the groups of inputs k0, k0 + STEP, ..: a tuple of COUNT tensors, float32 [C],
    loaded before the products that need them. Inputs beyond K get the last group's."""
    found = ()
    for index in tl.static_range(COUNT):
        group = tl.minimum((k0 + index * STEP) // GROUP_SIZE, K // GROUP_SIZE - 1)  # x is 0 after the last one
        piece = tl.load(source + group * N + column, mask=column < N, other=0.0)
        found += (piece.to(tl.float32),)  # type: ignore[assignment]
    return found


@triton.jit
def quantized_sums(
    tokens: tl.tensor,
    alive: tl.tensor,
    source: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    column: tl.tensor,
    first: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    EVICTION: tl.constexpr,
    ASM: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Returns the products of rows with outputs `column` over inputs first to first + SPAN: [COLUMNS, ROWS] float32.

    tokens: [ROWS, 1], the beginnings of rows; alive: [ROWS, 1], False for those to skip, whose sums are 0. source:
    [COLUMNS, 1], the beginnings of the outputs' words. Tensor cores take the left operand, here the converted weights,
    from registers.
    """
    PARTS: tl.constexpr = 16 // BITS
    BLOCK: tl.constexpr = PARTS * PART
    WIDTH: tl.constexpr = (K + BLOCK - 1) // BLOCK * PART
    GROUPS: tl.constexpr = K // GROUP_SIZE
    # Consecutive parts that share a group: all, or a common divisor.
    SHARED: tl.constexpr = (
        PARTS if GROUP_SIZE % BLOCK == 0 else (2 if GROUP_SIZE % (2 * PART) == 0 and BITS == 4 else 1)
    )
    inside = column < N
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    row_sums = tl.zeros([ROWS], tl.float32)
    for start in tl.range(first, first + SPAN, DEPTH, num_stages=STAGES):
        for block in tl.static_range(DEPTH // BLOCK):
            k0 = start + block * BLOCK
            word = k0 // PARTS + tl.arange(0, PART)[None, :]
            mask = inside[:, None] & (word < WIDTH)
            piece = tl.load(source + word, mask=mask, other=0, eviction_policy=EVICTION)
            if GROUPS > 1:
                scale = _group_entries(scales, column, k0, N, K, GROUP_SIZE, SHARED * PART, PARTS // SHARED)
                if offsets is not None:
                    offset = _group_entries(offsets, column, k0, N, K, GROUP_SIZE, SHARED * PART, PARTS // SHARED)
            for part in tl.static_range(PARTS):
                k = k0 + part * PART + tl.arange(0, PART)[None, :]
                values = tl.load(tokens + k, mask=alive & (k < K), other=0.0)
                numbers = _numbers(piece, part * BITS, BITS, FLOATS, values.dtype, ASM)
                if offsets is not None:
                    row_sums += tl.sum(values.to(tl.float32), axis=1)
                if GROUPS == 1:
                    sums = dot(numbers, tl.trans(values), sums, DTYPE)
                else:
                    if part % SHARED == 0:
                        of_group = tl.zeros([COLUMNS, ROWS], tl.float32)
                    of_group = dot(numbers, tl.trans(values), of_group, DTYPE)
                    if part % SHARED == SHARED - 1:
                        sums += of_group * scale[part // SHARED][:, None]
                        if offsets is not None:
                            sums += offset[part // SHARED][:, None] * row_sums[None, :]
                            row_sums = tl.zeros([ROWS], tl.float32)
    if GROUPS == 1:
        sums *= tl.load(scales + column, mask=inside, other=0.0).to(tl.float32)[:, None]
        if offsets is not None:
            sums += tl.load(offsets + column, mask=inside, other=0.0)[:, None] * row_sums[None, :]
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def _quantized_linear_kernel(
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE_X: tl.constexpr,
    STRIDE_RESIDUAL: tl.constexpr,
    ACT: tl.constexpr,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    EVICTION: tl.constexpr,
    ASM: tl.constexpr,
    DTYPE: tl.constexpr,
) -> None:
    """Stores tiles of the result: program i of n has tiles i, i + n, .. Grid (n, K / SPAN), for any n. With several
    spans (split-K) `out` is [splits, num_rows, N] float32, and ACT, bias and residual are None."""
    WIDTH: tl.constexpr = (K + 16 // BITS * PART - 1) // (16 // BITS * PART) * PART
    tiles_down = tl.cdiv(num_rows, ROWS)
    tiles_across = tl.cdiv(N, COLUMNS)
    first = tl.program_id(1) * SPAN
    for tile in range(tl.program_id(0), tiles_down * tiles_across, tl.num_programs(0)):
        group = tile // (GROUP * tiles_across)
        height = tl.minimum(tiles_down - group * GROUP, GROUP)
        place = tile % (GROUP * tiles_across)
        row = (group * GROUP + place % height) * ROWS + tl.arange(0, ROWS)
        column = (place // height) * COLUMNS + tl.arange(0, COLUMNS)
        alive = (row < num_rows)[:, None]
        tokens = x + row.to(tl.int64)[:, None] * STRIDE_X
        source = words + column.to(tl.int64)[:, None] * WIDTH
        sums = quantized_sums(
            tokens,
            alive,
            source,
            scales,
            offsets,
            column,
            first,
            N,
            K,
            SPAN,
            BITS,
            FLOATS,
            GROUP_SIZE,
            PART,
            ROWS,
            COLUMNS,
            DEPTH,
            STAGES,
            EVICTION,
            ASM,
            DTYPE,
        )
        target = out + tl.program_id(1).to(tl.int64) * num_rows * N
        finish_tile(tl.trans(sums), bias, residual, target, row, column, num_rows, N, ACT, STRIDE_RESIDUAL)


def small_quantized_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    act: str = "none",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns act(x @ W^T + bias) + residual, new contiguous [M, N].

    x: [M, K], M at most 64, rows at any stride; bias: [N] of x's dtype or float32; residual: [M, N] of the result's
    dtype, rows at any stride; act: "none" or one of `activation.ACTIVATIONS`; out_dtype: a float type, x's by default.
    A row of the result depends on that row of x and residual, and on whether M is above 16.
    """
    out = _checked(x, weight, bias, residual, act, out_dtype)
    num_rows, num_out = out.shape
    if num_rows > MAX_SMALL_ROWS:
        raise ValueError(f"x: expected at most {MAX_SMALL_ROWS} rows, got {num_rows}")
    if out.numel() == 0:
        return out
    launch = few_rows_quantized_launch(num_rows, num_out, weight.num_in, x.dtype)
    name = None if act == "none" else act
    programs = cdiv(num_out, launch.columns)
    if launch.splits == 1:
        _launch(x, weight, (bias, residual, out), launch, name, programs, "evict_first")
        return out
    partial = torch.empty((launch.splits, num_rows, num_out), dtype=torch.float32, device=x.device)
    _launch(x, weight, (None, None, partial), launch, None, programs, "evict_first")
    join_splits(partial, bias, residual, out, name)
    return out


def invariant_quantized_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    act: str = "none",
    out_dtype: torch.dtype | None = None,
    *,
    num_sms: int | None = None,
) -> Tensor:
    """Returns what `small_quantized_linear` does, for any M: row i depends on row i of x and of the residual alone.

    num_sms: the most programs, by default the SMs of the GPU; it changes no bit.
    """
    out = _checked(x, weight, bias, residual, act, out_dtype)
    num_rows, num_out = out.shape
    if out.numel() == 0:
        return out
    launch = tiled_quantized_launch(num_out, weight.group_size, x.dtype, capability_of(x.device))
    tiles = cdiv(num_rows, launch.rows) * cdiv(num_out, launch.columns)
    programs = min(tiles, num_sms or num_sms_of(x.device))
    _launch(x, weight, (bias, residual, out), launch, None if act == "none" else act, programs, "")
    return out


def _launch(
    x: Tensor,
    weight: PackedWeight,
    end: tuple[Tensor | None, Tensor | None, Tensor],
    launch: LinearLaunch,
    act: str | None,
    programs: int,
    eviction: str,
) -> None:
    """Launches the kernel. end = (bias, residual, out), or (None, None, partial sums) of several splits. programs: of
    the grid, for each split. eviction: Triton's eviction policy for loads of the weight."""
    residual = end[1]
    form = weight.words.shape[0], weight.num_in, weight.num_bits, weight.floats, weight.group_size, weight.part
    strides = x.stride(0), 0 if residual is None else residual.stride(0)
    launches = _launches(form, strides, act, launch, eviction, x.dtype)
    tensors = x, weight.words, weight.scales, weight.offsets, *end
    launches(_quantized_linear_kernel, (programs, launch.splits, 1), *tensors, x.shape[0])


@cached_launch
def _launches(
    form: tuple[int, int, int, bool, int, int],
    strides: tuple[int, int],
    act: str | None,
    launch: LinearLaunch,
    eviction: str,
    dtype: torch.dtype,
) -> Launch:
    """Constants and options of `_quantized_linear_kernel`. form: outputs, inputs, bits, whether numbers are E4M3,
    inputs of a group and of a part. strides: between rows of x, and of the residual."""
    num_out, num_in, num_bits, floats, group_size, part = form
    depth = max(launch.depth, _WORD // num_bits * part)
    return Launch(
        N=num_out,
        K=num_in,
        STRIDE_X=strides[0],
        STRIDE_RESIDUAL=strides[1],
        ACT=act,
        BITS=num_bits,
        FLOATS=floats,
        GROUP_SIZE=group_size,
        PART=part,
        ROWS=launch.rows,
        COLUMNS=launch.columns,
        DEPTH=depth,
        SPAN=cdiv(num_in, launch.splits * depth) * depth,
        GROUP=GROUP,
        STAGES=launch.stages,
        EVICTION=eviction,
        ASM=not INTERPRETING and dtype is not torch.float32,
        DTYPE=DOT_DTYPE,
        num_warps=launch.warps,
    )


def _checked(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    act: str,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """Allocates the result, [M, N]. Raises ValueError for a wrong argument."""
    check_rows("x", x)
    if x.shape[1] != weight.num_in or x.device != weight.words.device:
        raise ValueError(f"x: expected [T, {weight.num_in}] on {weight.words.device}, got {described(x)}")
    return checked_output(x, weight.words.shape[0], bias, residual, act, out_dtype)
