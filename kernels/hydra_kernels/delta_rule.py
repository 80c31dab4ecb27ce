"""The gated delta rule over packed rows of requests, token by token: decodes and prompts in one kernel.

State S [Dk, Dv] of a head; for a token with key k and query q, both of length 1, value v, decay d and strength beta:

    S = d S;    S = S + k (beta (v - S^T k))^T;    out = S^T q / sqrt(Dk)

A program of one warp takes a row, a value head and a block of columns of S, which stays in registers from the row's
first token to its last; columns are independent. A token's result has the same terms in the same order for any chunking
of a prompt and any batch, which a chunked form (products of 64 tokens at a time) would not give: its sums depend on
where chunks begin. The inputs of a token are loaded one token ahead.

Decodes are bound by memory: 8 Hv Dk Dv bytes per row. A prompt is bound by the latency of a token until its rows fill
the device (bench/NOTES.md has the estimate).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hydra_kernels._checks import check_heads, check_rows, check_vector, described
from hydra_kernels._sizes import cdiv, next_power_of_2

MAX_KEY_DIM = 512
_ELEMENTS = 2048  # of the state per warp: 64 registers per thread
_LENGTH_EPS = tl.constexpr(1e-6)

_CHANGING = ["cu_q", "starts", "reads", "writes"]  # of any alignment: nothing is compiled while serving


@triton.jit
def _unit(x: tl.tensor) -> tl.tensor:
    """x / sqrt(|x|^2 + 1e-6) of a vector, in float32: of length 1, unless x is tiny."""
    wide = x.to(tl.float32)
    return wide * tl.rsqrt(tl.sum(wide * wide, axis=0) + _LENGTH_EPS)


@triton.jit
def _softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)) of float32 x; x itself above 20. The quotient corrects the rounding of 1 + exp(x) for small
    exp(x)."""
    power = tl.exp(tl.minimum(x, 20.0))
    total = 1.0 + power
    small = total == 1.0
    soft = tl.where(small, power, tl.log(total) * (power / tl.where(small, 1.0, total - 1.0)))
    return tl.where(x > 20.0, x, soft)


@triton.jit(do_not_specialize_on_alignment=_CHANGING)
def _delta_rule_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    rates: tl.tensor,
    shift: tl.tensor,
    states: tl.tensor,
    out: tl.tensor,
    cu_q: tl.tensor,
    starts: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    scale: tl.tensor,
    stride_q: tl.tensor,
    stride_k: tl.tensor,
    stride_v: tl.tensor,
    stride_a: tl.tensor,
    stride_b: tl.tensor,
    stride_place: tl.tensor,
    STRIDE_Q_HEAD: tl.constexpr,
    STRIDE_K_HEAD: tl.constexpr,
    STRIDE_V_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Computes `delta_rule` of all tokens of a row for one value head and COLUMNS columns of its state. Grid (blocks of
    columns, Hv, B). GROUP: value heads per key head. KEYS: the least power of two >= KEY_DIM."""
    head, row = tl.program_id(1), tl.program_id(2)
    key = tl.arange(0, KEYS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    real_column = column < VALUE_DIM
    inner = head * KEY_DIM * VALUE_DIM + key[:, None] * VALUE_DIM + column[None, :]
    old_keys = tl.where(tl.load(starts + row) != 0, KEY_DIM, 0)
    old = states + tl.load(reads + row) * stride_place + inner
    state = tl.load(old, mask=(key[:, None] < old_keys) & real_column[None, :], other=0.0)
    tl.debug_barrier()  # all of the old state has been read
    rate = tl.exp(tl.load(rates + head))
    move = tl.load(shift + head)
    begin = tl.load(cu_q + row)
    count = (tl.load(cu_q + row + 1) - begin).to(tl.int32)
    q_at = q + begin * stride_q + head // GROUP * STRIDE_Q_HEAD + key
    k_at = k + begin * stride_k + head // GROUP * STRIDE_K_HEAD + key
    v_at = v + begin * stride_v + head * STRIDE_V_HEAD + column
    a_at = a + begin * stride_a + head
    b_at = b + begin * stride_b + head
    out_at = out + (begin * HEADS + head) * VALUE_DIM + column
    some = count > 0
    keys, columns = tl.where(some, KEY_DIM, 0), tl.where(some, VALUE_DIM, 0)
    next_q = tl.load(q_at, mask=key < keys, other=0.0)
    next_k = tl.load(k_at, mask=key < keys, other=0.0)
    next_v = tl.load(v_at, mask=column < columns, other=0.0)
    next_a = tl.load(a_at, mask=some, other=0.0)
    next_b = tl.load(b_at, mask=some, other=0.0)
    for token in tl.range(0, count):
        raw_q, raw_k, raw_v, raw_a, raw_b = next_q, next_k, next_v, next_a, next_b
        q_at += stride_q
        k_at += stride_k
        v_at += stride_v
        a_at += stride_a
        b_at += stride_b
        more = token + 1 < count
        keys, columns = tl.where(more, KEY_DIM, 0), tl.where(more, VALUE_DIM, 0)
        next_q = tl.load(q_at, mask=key < keys, other=0.0)
        next_k = tl.load(k_at, mask=key < keys, other=0.0)
        next_v = tl.load(v_at, mask=column < columns, other=0.0)
        next_a = tl.load(a_at, mask=more, other=0.0)
        next_b = tl.load(b_at, mask=more, other=0.0)
        query, unit = _unit(raw_q) * scale, _unit(raw_k)
        decay = tl.exp(-rate * _softplus(raw_a.to(tl.float32) + move))
        strength = tl.sigmoid(raw_b.to(tl.float32)).to(raw_b.dtype).to(tl.float32)
        state *= decay
        known = tl.sum(state * unit[:, None], axis=0)
        change = (raw_v.to(tl.float32) - known) * strength
        state += unit[:, None] * change[None, :]
        mixed = tl.sum(state * query[:, None], axis=0)
        tl.store(out_at, mixed.to(out.dtype.element_ty), mask=real_column)
        out_at += HEADS * VALUE_DIM
    place = tl.load(writes + row)
    if place >= 0:
        target = states + place * stride_place + inner
        tl.store(target, state, mask=(key[:, None] < KEY_DIM) & real_column[None, :])


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    rates: Tensor,
    shift: Tensor,
    states: Tensor,
    cu_q: Tensor,
    starts: Tensor,
    reads: Tensor,
    writes: Tensor,
) -> Tensor:
    """Returns the outputs of the gated delta rule, new contiguous [T, Hv, Dv]; sums in float32.

    A token computes S = d S; S = S + k (beta (v - S^T k))^T; out = S^T q / sqrt(Dk), with q and k scaled to length 1,
    d = exp(-exp(rates) softplus(a + shift)) and beta = sigmoid(b), rounded to b's dtype. q, k: [T, Hk, Dk], Dk at most
    512; v: [T, Hv, Dv], tokens and heads at any stride; a, b: [T, Hv], rows at any stride; one dtype for all. Value
    head h reads key head h // (Hv / Hk). rates, shift: [Hv] float32. states: [N, Hv, Dk, Dv] float32, a view of one
    layer.

    Row r has tokens [cu_q[r], cu_q[r + 1]); it continues the state in slot reads[r], or zeros if starts[r] is 0, and
    leaves its state in slot writes[r], or nowhere if that is -1. cu_q: [B + 1]; starts, reads, writes: [B]; int64.
    Reads nothing back from the device.
    """
    _check(q, k, v, a, b, rates, shift, states)
    batch = starts.shape[0] if starts.dim() == 1 else -1
    for name, vector, size in (("cu_q", cu_q, batch + 1), ("starts", starts, None), ("reads", reads, batch)):
        check_vector(name, vector, size, torch.int64, v.device)
    check_vector("writes", writes, batch, torch.int64, v.device)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    (_, heads, value_dim), (key_heads, key_dim) = v.shape, k.shape[1:]
    if batch:
        keys = next_power_of_2(key_dim)
        columns = min(max(8, _ELEMENTS // keys), next_power_of_2(value_dim))
        _delta_rule_kernel[(cdiv(value_dim, columns), heads, batch)](
            *(q, k, v, a, b, rates, shift, states, out, cu_q, starts, reads, writes),
            key_dim**-0.5,
            *(q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0), states.stride(0)),
            STRIDE_Q_HEAD=q.stride(1),
            STRIDE_K_HEAD=k.stride(1),
            STRIDE_V_HEAD=v.stride(1),
            HEADS=heads,
            GROUP=heads // key_heads,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            KEYS=keys,
            COLUMNS=columns,
            num_warps=1,
        )
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, rates: Tensor, shift: Tensor, states: Tensor) -> None:
    """Raises ValueError if one of these arguments of `delta_rule` is wrong."""
    check_heads("v", v)
    tokens, heads, value_dim = v.shape
    for name, x in (("q", q), ("k", k)):
        check_heads(name, x)
        if x.shape != k.shape or x.shape[0] != tokens or x.dtype is not v.dtype or x.device != v.device:
            raise ValueError(f"{name}: expected [{tokens}, Hk, Dk] {v.dtype} on {v.device} like v, got {described(x)}")
    if k.shape[1] == 0 or heads == 0 or heads % k.shape[1]:
        raise ValueError(f"v: expected a multiple of {k.shape[1]} key heads, got {heads} heads")
    if k.shape[2] > MAX_KEY_DIM:
        raise ValueError(f"k: expected a head dim of at most {MAX_KEY_DIM}, got {k.shape[2]}")
    for name, x in (("a", a), ("b", b)):
        check_rows(name, x)
        if x.shape != (tokens, heads) or x.dtype is not v.dtype or x.device != v.device:
            raise ValueError(f"{name}: expected [{tokens}, {heads}] {v.dtype} on {v.device}, got {described(x)}")
    for name, x in (("rates", rates), ("shift", shift)):
        check_vector(name, x, heads, torch.float32, v.device)
    shape = (heads, k.shape[2], value_dim)
    dense = states.dim() == 4 and states.stride()[1:] == (shape[1] * shape[2], shape[2], 1)
    if not dense or states.shape[1:] != shape or states.dtype is not torch.float32 or states.device != v.device:
        raise ValueError(
            f"states: expected [N, {', '.join(map(str, shape))}] torch.float32 on {v.device} with dense places, "
            f"got {described(states)}"
        )
