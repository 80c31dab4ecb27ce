"""The causal convolution of layers with a recurrent state, over packed rows of requests. Bound by memory.

A program takes a tile of tokens of one row and a block of channels, and reads an input once per tap, all but the first
time from the L1 cache. A channel's sum has the same terms in the same order in every tile, so a token gets the same
bits for any chunking of a prompt and any batch.

Only the first tile of a row reads the state before the row, since no other one reaches so far back; it also writes the
new state. So both may be in one slot.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydra_kernels._attention import tile_of_segment
from hydra_kernels._checks import check_rows, check_vector, described
from hydra_kernels._sizes import cdiv, next_power_of_2
from hydra_kernels.activation import activate

TILE = 16  # tokens of a tile, if rows have more than one
MAX_TAPS = 16  # at most TILE, so that only the first tile of a row reads the state
_MAX_SEARCHED = 1024  # rows that a program can search for its tile


class _Launch(NamedTuple):
    """Channels of a program's tile, and its warps."""

    channels: int
    warps: int


_ONE_TOKEN = _Launch(256, 1)
_TILED = _Launch(256, 4)

_CHANGING = ["tiles", "cu_q", "starts", "reads", "writes"]  # of any alignment: nothing is compiled while serving


@triton.jit
def _inputs(
    x: tl.tensor,
    old: tl.tensor,
    begin: tl.tensor,
    at: tl.tensor,
    oldest: tl.tensor,
    channel: tl.tensor,
    real: tl.tensor,
    stride_x: tl.tensor,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> tl.tensor:
    """Loads the inputs at positions `at`, counted in a row that begins at token `begin` of x: from x, from the old
    state for negative positions, or 0 below `oldest` and where `real` is false."""
    here = tl.load(x + (begin + at) * stride_x + channel, mask=real & (at >= 0), other=0.0)
    past = tl.load(old + (at + TAPS - 1) * CHANNELS + channel, mask=real & (at < 0) & (at >= oldest), other=0.0)
    return tl.where(at < 0, past, here)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_CHANGING)
def _causal_conv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    states: tl.tensor,
    out: tl.tensor,
    tiles: tl.tensor,
    cu_q: tl.tensor,
    starts: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    stride_x: tl.tensor,
    stride_place: tl.tensor,
    num_rows: tl.tensor,
    TAPS: tl.constexpr,
    BEFORE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEARCH: tl.constexpr,
) -> None:
    """Computes `causal_conv` of a tile of TOKENS tokens and COLUMNS channels; in a row's first tile also writes its
    state. Grid (tiles, blocks of channels). BEFORE: the least power of two >= TAPS - 1. SEARCH: 0 if `tiles` says which
    row and tokens a tile has; else as in `tile_of_segment`."""
    if SEARCH > 0:
        row, first = tile_of_segment(cu_q, num_rows, TOKENS, SEARCH)
    else:
        row = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
        first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    begin = tl.load(cu_q + row)
    count = tl.load(cu_q + row + 1) - begin
    oldest = tl.where(tl.load(starts + row) != 0, 1 - TAPS, 0)
    old = states + tl.load(reads + row) * stride_place
    channel = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = channel < CHANNELS
    token = first + tl.arange(0, TOKENS)[:, None]
    real = inside & (token < count)
    total = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for tap in tl.static_range(TAPS):
        at = token - (TAPS - 1) + tap
        value = _inputs(x, old, begin, at, oldest, channel, real, stride_x, TAPS, CHANNELS)
        factor = tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        total += value.to(tl.float32) * factor
    result = activate(total, "silu").to(out.dtype.element_ty)
    tl.store(out + (begin + token) * CHANNELS + channel, result, mask=real)
    place = tl.load(writes + row)
    if (first == 0) & (place >= 0):
        index = tl.arange(0, BEFORE)[:, None]
        kept = inside & (index < TAPS - 1)
        last = _inputs(x, old, begin, count - (TAPS - 1) + index, oldest, channel, kept, stride_x, TAPS, CHANNELS)
        tl.debug_barrier()  # all of the old state has been read
        tl.store(states + place * stride_place + index * CHANNELS + channel, last, mask=kept)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    tiles: Tensor | None,
    cu_q: Tensor,
    starts: Tensor,
    reads: Tensor,
    writes: Tensor,
    *,
    tokens: int,
) -> Tensor:
    """Returns silu(sum over j of weight[:, j] * x[t - K + 1 + j]) per channel, new [T, C], in float32, rounded once.

    x: [T, C], rows at any stride; weight: [C, K] contiguous, K from 2 to 16; states: [N, K - 1, C], a view of one
    layer; one dtype for all three. Row r has tokens [cu_q[r], cu_q[r + 1]). Its earlier inputs are in slot reads[r] of
    the states, or zeros if starts[r] is 0; its last K - 1 inputs are written to slot writes[r], or dropped if that is
    -1. cu_q: [B + 1]; starts, reads, writes: [B]; int64.

    tiles: [M, 2] int32, row and first token (counted in the row) of each tile of `tokens` tokens; each row has a tile
    at token 0, also if it is empty. None, for at most 1024 rows that only the device knows: launches programs for as
    many tiles as T tokens can have, which search cu_q; rows without tokens then write no state, and results of tokens
    from cu_q[B] on are undefined. tokens: 1 if no row has more, else TILE. Reads nothing back from the device.
    """
    taps = _check(x, weight, states)
    if tokens not in (1, TILE):
        raise ValueError(f"tokens: expected 1 or {TILE}, got {tokens}")
    batch = starts.shape[0] if starts.dim() == 1 else -1
    for name, vector, size in (("cu_q", cu_q, batch + 1), ("starts", starts, None), ("reads", reads, batch)):
        check_vector(name, vector, size, torch.int64, x.device)
    check_vector("writes", writes, batch, torch.int64, x.device)
    if tiles is None:
        if batch > _MAX_SEARCHED or tokens != TILE:
            raise ValueError(f"tiles: expected [M, 2] for {batch} rows with tiles of {tokens} tokens, got None")
        num_tiles = x.shape[0] // TILE + batch if x.shape[0] else 0  # each row has at most one partial tile
    elif tiles.dim() != 2 or tiles.shape[1] != 2 or not tiles.is_contiguous() or tiles.device != x.device:
        raise ValueError(f"tiles: expected contiguous [M, 2] torch.int32 on {x.device}, got {described(tiles)}")
    else:
        check_vector("tiles", tiles.view(-1), None, torch.int32, x.device)
        num_tiles = tiles.shape[0]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    channels = x.shape[1]
    if num_tiles and channels:
        launch = _ONE_TOKEN if tokens == 1 else _TILED
        columns = min(launch.channels, next_power_of_2(channels))
        _causal_conv_kernel[(num_tiles, cdiv(channels, columns))](
            *(x, weight, states, out, tiles, cu_q, starts, reads, writes),
            x.stride(0),
            states.stride(0),
            batch,
            TAPS=taps,
            BEFORE=next_power_of_2(taps - 1),
            CHANNELS=channels,
            TOKENS=tokens,
            COLUMNS=columns,
            SEARCH=next_power_of_2(batch) if tiles is None else 0,
            num_warps=launch.warps,
        )
    return out


def _check(x: Tensor, weight: Tensor, states: Tensor) -> int:
    """Returns K. Raises ValueError for a wrong x, weight or states."""
    check_rows("x", x)
    channels = x.shape[1]
    taps = weight.shape[1] if weight.dim() == 2 else 0
    dense = weight.is_contiguous() and weight.dtype is x.dtype and weight.device == x.device
    if not 2 <= taps <= MAX_TAPS or weight.shape[0] != channels or not dense:
        raise ValueError(
            f"weight: expected contiguous [{channels}, 2 to {MAX_TAPS}] {x.dtype} on {x.device}, "
            f"got {described(weight)}"
        )
    dense = states.dim() == 3 and states.stride()[1:] == (channels, 1) and states.device == x.device
    if not dense or states.shape[1:] != (taps - 1, channels) or states.dtype is not x.dtype:
        raise ValueError(
            f"states: expected [N, {taps - 1}, {channels}] {x.dtype} on {x.device} with dense places, "
            f"got {described(states)}"
        )
    return taps
