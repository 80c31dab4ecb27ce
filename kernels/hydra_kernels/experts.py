"""Mixtures of experts: the choice of experts, and the weighted sum of the outputs of the chosen ones.

Pairs (token, expert) are sorted by expert on the device, and each program multiplies a tile of one expert's rows with a
tile of its outputs. Which tiles there are is read on the device too, so that launches depend on shapes alone and can be
captured; programs beyond the last tile leave at once. Weights of experts that no token chose are not read.

    launches: the sort, gate and up, their activation, down, the weighted sum
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydra_kernels._checks import FLOATS, check_rows, described
from hydra_kernels._common import (
    DOT_DTYPE,
    INTERPRETING,
    LinearLaunch,
    capability_of,
    dot,
    experts_launch,
    quantized_experts_launch,
)
from hydra_kernels._launch import Launch, cached_launch
from hydra_kernels._sizes import cdiv, next_power_of_2
from hydra_kernels.activation import ACTIVATIONS, act_and_mul
from hydra_kernels.quantized_linear import PackedWeight, quantized_sums

_SORT_BLOCK = 1024  # pairs that a program looks at at once
_SUM_COLUMNS = 1024


class QuantizedMatrices(NamedTuple):
    """The matrices [N, K] of E experts, as E `PackedWeight`s: words int16 [E, N, words of a row]; scales [E, G, N];
    offsets float32 [E, G, N] or None."""

    words: Tensor
    scales: Tensor
    offsets: Tensor | None
    num_in: int
    num_bits: int
    part: int
    floats: bool

    @property
    def group_size(self) -> int:
        """Number of inputs that share a scale."""
        return self.num_in // self.scales.shape[1]


Matrices = Tensor | QuantizedMatrices  # of E experts: a tensor [E, N, K], or quantised


def stack(parts: Sequence[PackedWeight]) -> QuantizedMatrices:
    """Copies matrices of one format, an expert each, behind one another."""
    first, offsets = parts[0], [part.offsets for part in parts if part.offsets is not None]
    return QuantizedMatrices(
        torch.stack([part.words for part in parts]),
        torch.stack([part.scales for part in parts]),
        torch.stack(offsets) if offsets else None,
        *(first.num_in, first.num_bits, first.part, first.floats),
    )


# ---- the choice


@triton.jit
def _route_kernel(
    logits: tl.tensor,
    shared: tl.tensor,
    experts: tl.tensor,
    weights: tl.tensor,
    stride: tl.tensor,
    stride_shared: tl.tensor,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    RENORMALISE: tl.constexpr,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Stores the CHOSEN largest logits' numbers and weights, by falling logit, of equal ones the lowest number first.
    NaN is chosen as infinity. Grid (T,)."""
    row = tl.program_id(0).to(tl.int64)
    place, column = tl.arange(0, PADDED), tl.arange(0, COLUMNS)
    values = tl.load(logits + row * stride + place, mask=place < EXPERTS, other=float("-inf")).to(tl.float32)
    keys = tl.where(values == values, values, float("inf"))
    sizes = tl.exp(values - tl.max(keys, axis=0))
    total = tl.sum(tl.where(place < EXPERTS, sizes, 0.0), axis=0)
    free = place < EXPERTS
    found = tl.zeros([COLUMNS], tl.int32)
    share = tl.zeros([COLUMNS], tl.float32)
    for index in tl.static_range(CHOSEN):
        top = tl.max(tl.where(free, keys, float("-inf")), axis=0)
        best = tl.min(tl.where(free & (keys == top), place, PADDED), axis=0)
        size = tl.sum(tl.where(place == best, sizes, 0.0), axis=0)
        found = tl.where(column == index, best, found)
        share = tl.where(column == index, size / total, share)
        free = free & (place != best)
    if RENORMALISE:
        share = share / tl.sum(share, axis=0)
    count = CHOSEN
    if shared is not None:
        gate = tl.load(shared + row * stride_shared).to(tl.float32)
        found = tl.where(column == CHOSEN, EXPERTS, found)
        share = tl.where(column == CHOSEN, tl.sigmoid(gate), share)
        count = CHOSEN + 1
    tl.store(experts + row * count + column, found, mask=column < count)
    tl.store(weights + row * count + column, share, mask=column < count)


def route_tokens(logits: Tensor, k: int, *, renormalise: bool, shared: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns (experts int32, weights float32) of `Ops.route`, [T, k], with `shared` [T, k + 1].

    logits: [T, E] of a float type, rows at any stride; shared: [T, 1] of logits' dtype, rows at any stride.
    """
    check_rows("logits", logits)
    rows, num_experts = logits.shape
    if not 1 <= k <= num_experts:
        raise ValueError(f"k: expected 1 to {num_experts} experts, got {k}")
    if shared is not None:
        check_rows("shared", shared, logits[:, :1])
    count = k if shared is None else k + 1
    experts = torch.empty((rows, count), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, count), dtype=torch.float32, device=logits.device)
    if rows:
        stride_shared = 0 if shared is None else shared.stride(0)
        launch = _route_launches(num_experts, k, renormalise)
        launch(_route_kernel, (rows, 1, 1), logits, shared, experts, weights, logits.stride(0), stride_shared)
    return experts, weights


@cached_launch
def _route_launches(num_experts: int, k: int, renormalise: bool) -> Launch:
    padded = next_power_of_2(num_experts)
    return Launch(
        EXPERTS=num_experts,
        CHOSEN=k,
        RENORMALISE=renormalise,
        PADDED=padded,
        COLUMNS=next_power_of_2(k + 1),
        num_warps=1 if padded <= 512 else 4,
    )


# ---- pairs by expert


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_kernel(
    experts: tl.tensor, order: tl.tensor, counts: tl.tensor, num_pairs: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Stores the pairs of an expert, in order, behind those of the experts before, and their number. Grid (E,)."""
    expert = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    smaller = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pair = start + offset
        chosen = tl.load(experts + pair, mask=pair < num_pairs, other=-1)
        smaller += ((chosen >= 0) & (chosen < expert)).to(tl.int32)
    begin = tl.sum(smaller, axis=0)
    place = begin
    for start in range(0, num_pairs, BLOCK):
        pair = start + offset
        own = (tl.load(experts + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(own, axis=0) - 1, pair, mask=own > 0)
        place += tl.sum(own, axis=0)
    tl.store(counts + expert, place - begin)


@triton.jit
def _tile_of(
    counts: tl.tensor, tile: tl.tensor, EXPERTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Returns (expert, begin, end): sorted pairs [begin, end) of this tile of at most ROWS; empty beyond the last
    tile."""
    number = tl.arange(0, PADDED)
    count = tl.load(counts + number, mask=number < EXPERTS, other=0)
    tiles = (count + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, axis=0)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    before = tl.sum(tl.where(number < expert, count, 0), axis=0)
    own = tl.sum(tl.where(number == expert, count, 0), axis=0)
    first = tl.sum(tl.where(number < expert, tiles, 0), axis=0)
    begin = before + (tile - first) * ROWS
    return expert, begin, tl.minimum(begin + ROWS, before + own)


# ---- products


@triton.jit
def _grouped_linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    order: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE_X: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
) -> None:
    """Stores a tile of rows of x times the matrix of their expert. Grid (tiles of rows * N / COLUMNS,).

    CHOSEN > 0: sorted pair i has row order[i] // CHOSEN of x, and its result is row i. CHOSEN 0: it has row i of x, and
    its result is row order[i].
    """
    across = tl.cdiv(N, COLUMNS)
    expert, begin, end = _tile_of(counts, tl.program_id(0) // across, EXPERTS, PADDED, ROWS)
    if begin < end:
        place = begin + tl.arange(0, ROWS)
        alive = (place < end)[:, None]
        pair = tl.load(order + place, mask=place < end, other=0)
        column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
        row = pair // CHOSEN if CHOSEN else place
        target = place if CHOSEN else pair
        tokens = x + row.to(tl.int64)[:, None] * STRIDE_X
        source = weight + expert.to(tl.int64) * N * K + column.to(tl.int64)[:, None] * K
        sums = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in tl.range(0, K, DEPTH, num_stages=STAGES):
            k = start + tl.arange(0, DEPTH)[None, :]
            values = tl.load(tokens + k, mask=alive & (k < K), other=0.0)
            piece = tl.load(source + k, mask=(column < N)[:, None] & (k < K), other=0.0)
            sums = dot(values, tl.trans(piece), sums, DTYPE)
        goal = out + target.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(goal, sums.to(out.dtype.element_ty), mask=alive & (column < N)[None, :])


@triton.jit
def _grouped_quantized_kernel(
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    order: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE_X: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    CHOSEN: tl.constexpr,
    BITS: tl.constexpr,
    FLOATS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    DTYPE: tl.constexpr,
) -> None:
    """Does what `_grouped_linear_kernel` does with weights in the layout of `QuantizedMatrices`."""
    WIDTH: tl.constexpr = (K + 16 // BITS * PART - 1) // (16 // BITS * PART) * PART
    GROUPS: tl.constexpr = K // GROUP_SIZE
    across = tl.cdiv(N, COLUMNS)
    expert, begin, end = _tile_of(counts, tl.program_id(0) // across, EXPERTS, PADDED, ROWS)
    if begin < end:
        place = begin + tl.arange(0, ROWS)
        alive = (place < end)[:, None]
        pair = tl.load(order + place, mask=place < end, other=0)
        column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
        row = pair // CHOSEN if CHOSEN else place
        target = place if CHOSEN else pair
        tokens = x + row.to(tl.int64)[:, None] * STRIDE_X
        wide = expert.to(tl.int64)
        source = words + wide * N * WIDTH + column.to(tl.int64)[:, None] * WIDTH
        scales += wide * GROUPS * N
        if offsets is not None:
            offsets += wide * GROUPS * N
        sums = quantized_sums(
            tokens,
            alive,
            source,
            scales,
            offsets,
            column,
            0,
            N,
            K,
            K,
            BITS,
            FLOATS,
            GROUP_SIZE,
            PART,
            ROWS,
            COLUMNS,
            DEPTH,
            STAGES,
            "",
            ASM,
            DTYPE,
        )
        goal = out + target.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(goal, tl.trans(sums).to(out.dtype.element_ty), mask=alive & (column < N)[None, :])


@triton.jit
def _weighted_sum_kernel(
    outputs: tl.tensor,
    experts: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Stores the sum of a token's rows of outputs [T * CHOSEN, WIDTH] times their weights, in their order; rows without
    an expert are not read. Grid (T, WIDTH / COLUMNS)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([COLUMNS], tl.float32)
    for index in range(CHOSEN):
        pair = token * CHOSEN + index
        expert = tl.load(experts + pair)
        end = tl.where((expert >= 0) & (expert < EXPERTS), WIDTH, 0)
        output = tl.load(outputs + pair * WIDTH + column, mask=column < end, other=0.0)
        sums += tl.where(column < end, tl.load(weights + pair), 0.0) * output
    tl.store(out + token * WIDTH + column, sums.to(out.dtype.element_ty), mask=column < WIDTH)


def grouped_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Matrices,
    down: Matrices,
    act: str,
    *,
    many: bool | None = None,
) -> Tensor:
    """Returns `Ops.experts`, new contiguous [T, C] of x's dtype.

    x: [T, C] of a float type, rows at any stride; chosen: [T, K] int32 and weights: [T, K] float32, contiguous;
    gate_up: of [2 * F, C]; down: of [C, F]; tensors are contiguous and of x's dtype. Numbers outside of 0 to E - 1 are
    skipped. many: takes tiles of many rows, or of few; None: by the number of pairs. A row of the result depends on
    that row of x, chosen and weights, and on the tiles.
    """
    num_experts, width, inner = _checked(x, chosen, weights, gate_up, down, act)
    rows, count = chosen.shape
    out = x.new_empty((rows, width))
    if out.numel() == 0:
        return out
    pairs = rows * count
    if pairs == 0:
        return out.zero_()
    # Each at a multiple of 16 bytes, whatever the number of pairs: a kernel is compiled for that.
    numbers = torch.empty(cdiv(num_experts, 4) * 4 + pairs, dtype=torch.int32, device=x.device)
    counts, order = numbers[:num_experts], numbers[-pairs:]
    _sort_launches()(_sort_kernel, (num_experts, 1, 1), chosen, order, counts, pairs)
    if many is None:
        many = pairs >= _MANY_PAIRS * num_experts
    inside = x.new_empty((pairs, 2 * inner))
    _multiply(x, gate_up, (order, counts, inside), count, many=many)
    outputs = torch.empty((pairs, width), dtype=torch.float32, device=x.device)
    _multiply(act_and_mul(inside, act), down, (order, counts, outputs), 0, many=many)
    grid = rows, cdiv(width, _SUM_COLUMNS), 1
    _sum_launches(num_experts, count, width)(_weighted_sum_kernel, grid, outputs, chosen, weights, out)
    return out


_MANY_PAIRS = 16  # for each expert: from then on its rows fill a larger tile


def _multiply(x: Tensor, matrices: Matrices, ends: tuple[Tensor, Tensor, Tensor], chosen: int, *, many: bool) -> None:
    """Launches a product of all pairs. ends = (order, counts, out). chosen: as in `_grouped_linear_kernel`. many: takes
    tiles of many rows."""
    order = ends[0]
    num_experts = ends[1].shape[0]
    if isinstance(matrices, Tensor):
        launch = experts_launch(x.dtype, capability_of(x.device), many=many)
        form: tuple[int, ...] = matrices.shape[1], matrices.shape[2]
        tensors: tuple[Tensor | None, ...] = (matrices,)
    else:
        launch = quantized_experts_launch(x.dtype, many=many)
        form = matrices.words.shape[1], matrices.num_in, matrices.num_bits, matrices.floats
        form += matrices.group_size, matrices.part
        tensors = matrices.words, matrices.scales, matrices.offsets
    kernel = _grouped_linear_kernel if isinstance(matrices, Tensor) else _grouped_quantized_kernel
    pairs = order.shape[0]
    tiles = min(pairs, pairs // launch.rows + num_experts)  # at most: each expert's last tile may be part of one
    grid = tiles * cdiv(form[0], launch.columns), 1, 1
    launches = _product_launches(form, x.stride(0), num_experts, chosen, launch, x.dtype)
    launches(kernel, grid, x, *tensors, *ends)


@cached_launch
def _product_launches(
    form: tuple[int, ...], stride: int, num_experts: int, chosen: int, launch: LinearLaunch, dtype: torch.dtype
) -> Launch:
    """Constants and options of a product. form: outputs and inputs; of quantised matrices also bits, whether numbers
    are E4M3, inputs of a group and of a part."""
    num_out, num_in, *rest = form
    constants: dict[str, object] = {}
    depth = launch.depth
    if rest:
        num_bits, floats, group_size, part = rest
        depth = max(depth, 16 // num_bits * part)
        constants = {
            "BITS": num_bits,
            "FLOATS": bool(floats),
            "GROUP_SIZE": group_size,
            "PART": part,
            "ASM": not INTERPRETING and dtype is not torch.float32,
        }
    return Launch(
        N=num_out,
        K=num_in,
        STRIDE_X=stride,
        EXPERTS=num_experts,
        PADDED=next_power_of_2(num_experts),
        CHOSEN=chosen,
        ROWS=launch.rows,
        COLUMNS=launch.columns,
        DEPTH=depth,
        STAGES=launch.stages,
        DTYPE=DOT_DTYPE,
        num_warps=launch.warps,
        **constants,
    )


@cached_launch
def _sort_launches() -> Launch:
    return Launch(BLOCK=_SORT_BLOCK, num_warps=4)


@cached_launch
def _sum_launches(num_experts: int, chosen: int, width: int) -> Launch:
    return Launch(EXPERTS=num_experts, CHOSEN=chosen, WIDTH=width, COLUMNS=_SUM_COLUMNS, num_warps=4)


def _checked(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Matrices, down: Matrices, act: str
) -> tuple[int, int, int]:
    """Returns E, C and F. Raises ValueError for a wrong argument."""
    check_rows("x", x)
    if act not in ACTIVATIONS:
        raise ValueError(f"act: expected one of {', '.join(ACTIVATIONS)}, got {act!r}")
    shape = (x.shape[0], chosen.shape[1] if chosen.dim() == 2 else 0)
    for name, tensor, dtype in (("chosen", chosen, torch.int32), ("weights", weights, torch.float32)):
        if (
            tensor.shape != shape
            or tensor.dtype is not dtype
            or not tensor.is_contiguous()
            or tensor.device != x.device
        ):
            raise ValueError(
                f"{name}: expected contiguous {list(shape)} {dtype} on {x.device}, got {described(tensor)}"
            )
    num_experts, width, inner = _shape("down", down, x)
    wanted = num_experts, 2 * inner, width
    if _shape("gate_up", gate_up, x) != wanted or x.shape[1] != width:
        raise ValueError(f"gate_up: expected {list(wanted)} for x {list(x.shape)}, got {_shape('gate_up', gate_up, x)}")
    return wanted[0], width, inner


def _shape(name: str, matrices: Matrices, x: Tensor) -> tuple[int, int, int]:
    """Returns E, N and K. Raises ValueError for a tensor that is not contiguous, of another dtype or device than x."""
    if not isinstance(matrices, Tensor):
        return matrices.words.shape[0], matrices.words.shape[1], matrices.num_in
    if matrices.dim() != 3 or matrices.dtype not in FLOATS or matrices.dtype is not x.dtype:
        raise ValueError(f"{name}: expected [E, N, K] {x.dtype}, got {described(matrices)}")
    if not matrices.is_contiguous() or matrices.device != x.device:
        raise ValueError(f"{name}: expected a contiguous tensor on {x.device}, got {described(matrices)}")
    return matrices.shape[0], matrices.shape[1], matrices.shape[2]
