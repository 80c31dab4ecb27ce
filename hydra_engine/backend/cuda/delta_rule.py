"""Recurrent states on a CUDA device: the token rows of each state, sent once per step, and the two kernels' arguments.

Does not know which request uses which slot.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_engine.backend import checks
from hydra_engine.backend.base import DeltaInputs, StateCache, StateRows
from hydra_engine.backend.device import Send
from hydra_kernels import causal_conv as convolution
from hydra_kernels import delta_rule as recurrence


@dataclass(frozen=True, slots=True)
class CudaStateRows:
    """`StateRows.native`. tiles: [M, 2] int32, for each tile of the convolution its row and its first token's number in
    that row; a tile has at most `tile` tokens. None: its programs search `cu_q`."""

    num_tokens: int
    num_slots: int  # slots that the cache must have; 0: known to the device only
    tiles: Tensor | None
    tile: int


def plan(rows: StateRows, send: Send) -> StateRows:
    """Implements `Ops.plan_states`: sends state rows to the device, with the tiles of the convolution. The host tensors
    may be changed afterwards. Raises ValueError if cu_q falls or does not begin with 0, or a slot is negative."""
    checks.check_state_rows(rows)
    cu_q, read_slots, write_slots = rows.cu_q.numpy(), rows.read_slots.numpy(), rows.write_slots.numpy()
    counts = np.diff(cu_q)
    num_tokens = int(cu_q[-1])
    if cu_q[0] != 0 or (counts < 0).any():
        raise ValueError(f"rows: expected cu_q to rise from 0, got {cu_q[:8].tolist()}")
    places = np.concatenate((read_slots, write_slots))
    if (places < 0).any():
        raise ValueError(f"rows: expected places of 0 and more, got {int(places.min())}")
    tile = 1 if counts.max(initial=0) <= 1 else convolution.TILE
    tiles, *sent = send((_tiles(counts, tile), cu_q, rows.starts.numpy(), read_slots, write_slots))
    native = CudaStateRows(num_tokens, int(places.max(initial=-1)) + 1, tiles, tile)
    return StateRows(sent[0], sent[1], sent[2], sent[3], native)


def plan_decode(starts: Tensor, read_slots: Tensor, write_slots: Tensor) -> StateRows:
    """Implements `Ops.plan_decode_states`: one token per row. The vectors on the device are read at launch time:
    capturable."""
    batch = checks.check_indices("starts", starts)
    for name, places in (("read_slots", read_slots), ("write_slots", write_slots)):
        checks.check_indices(name, places, batch)
    checks.check_device(starts.device, (("read_slots", read_slots), ("write_slots", write_slots)))
    cu_q = torch.arange(batch + 1, device=starts.device)
    tiles = torch.stack((cu_q[:-1], torch.zeros_like(starts)), dim=1).int()
    return StateRows(cu_q, starts, read_slots, write_slots, native=CudaStateRows(batch, 0, tiles, 1))


def plan_mixed(rows: StateRows, num_tokens: int) -> StateRows:
    """Implements `Ops.plan_mixed_states`. The vectors on the device are read at launch time: capturable."""
    checks.check_state_rows(rows)
    vectors = (("cu_q", rows.cu_q), ("read_slots", rows.read_slots), ("write_slots", rows.write_slots))
    checks.check_device(rows.starts.device, vectors)
    return replace(rows, native=CudaStateRows(num_tokens, 0, None, convolution.TILE))


def causal_conv(x: Tensor, weight: Tensor, cache: StateCache, layer: int, rows: StateRows) -> Tensor:
    """Implements `Ops.causal_conv`. Raises ValueError also if `rows` do not fit x, or if the cache lacks `layer` or,
    with rows of `plan`, one of their slots."""
    native = _checked(rows, x.shape[0], cache.conv, layer)
    return convolution.causal_conv(
        *(x, weight, cache.conv[:, layer], native.tiles, rows.cu_q, rows.starts, rows.read_slots, rows.write_slots),
        tokens=native.tile,
    )


def delta_rule(inputs: DeltaInputs, cache: StateCache, layer: int, rows: StateRows) -> Tensor:
    """Implements `Ops.delta_rule`. Raises ValueError also if `rows` do not fit the inputs, or if the cache lacks
    `layer` or, with rows of `plan`, one of their slots."""
    _checked(rows, inputs.v.shape[0], cache.recurrent, layer)
    states = cache.recurrent[:, layer]
    return recurrence.delta_rule(*inputs, states, rows.cu_q, rows.starts, rows.read_slots, rows.write_slots)


def _checked(rows: StateRows, tokens: int, states: Tensor, layer: int) -> CudaStateRows:
    """Returns `rows.native`. Raises ValueError unless the rows have `tokens` tokens together, and `states` [N, L, ..]
    has this layer and, with rows of `plan`, all of their slots; other slots are on the device, unchecked. Asserts
    that a plan of this module made the rows."""
    native = rows.native
    assert isinstance(native, CudaStateRows), "rows that Ops.plan_states of these ops has not seen"
    places, layers = states.shape[:2]
    if not 0 <= layer < layers:
        raise ValueError(f"layer: expected 0 to {layers - 1}, got {layer}")
    if native.num_tokens != tokens:
        raise ValueError(f"rows: expected cu_q to rise from 0 to {tokens}, got {native.num_tokens} tokens")
    if native.num_slots > places:
        raise ValueError(f"rows: expected places 0 to {places - 1}, got {native.num_slots - 1}")
    return native


def _tiles(counts: npt.NDArray[np.int64], tile: int) -> npt.NDArray[np.int32]:
    """`CudaStateRows.tiles` of rows with `counts` tokens; a row without tokens has one too, which copies its state."""
    per_row = np.maximum(-(-counts // tile), 1)
    rows = np.repeat(np.arange(len(counts)), per_row)
    firsts = np.arange(len(rows)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    return np.stack((rows, firsts * tile), axis=1).astype(np.int32)
