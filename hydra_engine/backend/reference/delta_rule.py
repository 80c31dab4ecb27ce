"""The gated delta rule and its causal convolution over packed rows of requests, in plain torch with float32 sums.

Walks token by token, so a token's result depends on its own request alone, not on prompt chunks or other rows. The
recurrence (Yang, Kautz, Hatamizadeh: Gated Delta Networks, section 3.1) is in `Ops.delta_rule`. Does not know weights
or schedulers.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from hydra_engine.backend.base import DeltaInputs, StateCache, StateRows

LENGTH_EPS = 1e-6  # added to the squared length of keys and queries
_PIECE = 1 << 14  # elements: a multiple of any vector width, and few enough for one thread


def causal_conv(x: Tensor, weight: Tensor, cache: StateCache, layer: int, rows: StateRows) -> Tensor:
    """`Ops.causal_conv`, without checks; x may have padding after the last row. A row whose write slot is negative
    stores no state."""
    states, taps = cache.conv, weight.shape[1]
    before = taps - 1
    bounds, starts, read_slots, write_slots = rows.lists()
    num_tokens = bounds[-1]
    counts = [end - begin for begin, end in pairwise(bounds)]
    parts = []
    for row, count in enumerate(counts):
        old = states[read_slots[row], layer] if starts[row] else torch.zeros_like(states[0, 0])
        parts += [old, x[bounds[row] : bounds[row] + count]]
    padded = torch.cat(parts)  # each row with the K - 1 inputs before it
    ends = torch.tensor(bounds[1:]) + before * torch.arange(1, len(counts) + 1)
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    first = (torch.arange(num_tokens) + before * owners).to(x.device)
    wide = weight.float()
    total = padded.index_select(0, first).float() * wide[:, 0]
    for tap in range(1, taps):
        total += padded.index_select(0, first + tap).float() * wide[:, tap]
    for row, end in enumerate(ends.tolist()):
        if write_slots[row] >= 0:
            states[write_slots[row], layer] = padded[end - before : end]
    out = x.new_empty(x.shape)
    out[:num_tokens] = by_vectors(F.silu, total)
    return out


def delta_rule(inputs: DeltaInputs, cache: StateCache, layer: int, rows: StateRows) -> Tensor:
    """`Ops.delta_rule`, without checks, all heads of a token at once. A row whose write slot is negative stores no
    state."""
    q, k, v, a, b, rates, shift = inputs
    group = v.shape[1] // k.shape[1]
    q, k = (_unit(x).repeat_interleave(group, dim=1) for x in (q, k))
    q = q * q.shape[2] ** -0.5
    decays = by_vectors(torch.exp, -by_vectors(torch.exp, rates) * by_vectors(F.softplus, a.float() + shift))
    strengths = by_vectors(torch.sigmoid, b.float()).to(b.dtype).float()
    states, out = cache.recurrent, torch.empty(v.shape, dtype=v.dtype, device=v.device)
    bounds, starts, read_slots, write_slots = rows.lists()
    for row, (begin, end) in enumerate(pairwise(bounds)):
        state = states[read_slots[row], layer].clone() if starts[row] else torch.zeros_like(states[0, 0])
        for t in range(begin, end):
            state *= decays[t, :, None, None]
            recalled = (state * k[t, :, :, None]).sum(1)  # S^T k, [Hv, Dv]
            change = (v[t].float() - recalled) * strengths[t, :, None]
            state += k[t, :, :, None] * change[:, None]
            out[t] = (state * q[t, :, :, None]).sum(1)
        if write_slots[row] >= 0:
            states[write_slots[row], layer] = state
    return out


def _unit(x: Tensor) -> Tensor:
    """x in float32, divided by its length over the last dimension; LENGTH_EPS keeps zeros finite."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + LENGTH_EPS)


def by_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Returns function(x), an element-wise function; for x on a CPU in pieces of one size, each by one thread.

    On a CPU torch computes exp and the like with vectors, but the rest of a thread's share with scalars, and the two
    differ in the last bit: an element's value would depend on the size of the call.
    """
    if not x.is_cpu:
        return function(x)
    flat = F.pad(x.flatten(), (0, -x.numel() % _PIECE))
    pieces = [function(piece) for piece in flat.split(_PIECE)]
    return torch.cat(pieces)[: x.numel()].view(x.shape) if pieces else x
