"""Attention on a CUDA device: plans, and the kernel of each row.

The engine puts a step's decodes (rows with one query) first. Their contexts are divided into splits over the device
(decode kernel); the other rows are divided into tiles of queries (prefill kernel). Both write one result. When
deterministic, all rows take the prefill kernel, which visits keys in one order, so a token's result does not depend on
whether it was decoded or prefilled. Head dims above MAX_HEAD_DIM take torch's attention over the gathered context, row
by row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from hydra_engine.backend import checks
from hydra_engine.backend.base import AttentionPlan, MixedRows, PackedPlan, PagedCache, Segments
from hydra_engine.backend.device import Send
from hydra_kernels.decode_attention import Scales, choose_num_splits, decode_attention, new_counters, programs_per_sm
from hydra_kernels.packed_attention import packed_attention
from hydra_kernels.prefill_attention import prefill_attention
from hydra_kernels.tma_attention import can_read_cache

MAX_HEAD_DIM = 256  # of the kernels
_MAX_SEGMENTS = 32  # lists of segments that a thread caches

Int32s = npt.NDArray[np.int32]


class Rows(NamedTuple):
    """The rows of a plan, copied to the host: cu_q [B + 1] and num_context [B]. Never changed."""

    cu_q: Int32s
    num_context: Int32s


@dataclass(frozen=True, slots=True)
class CudaPlan:
    """`AttentionPlan.native`: the first `num_decodes` rows take the decode kernel, the others the prefill kernel.

    num_decodes: 0 if deterministic; else, in a mixed plan (`mixed`), all rows: the prefill kernel then overwrites the
    results of prompts. max_decode_context: tokens of the longest context of a decode; None: as long as the block
    tables. rest_cu_q, max_rest_q: the prefill kernel's cu_q, from 0, and the most queries that one of its rows has.
    """

    num_tokens: int
    num_decodes: int
    max_decode_context: int | None
    rest_cu_q: Tensor
    max_rest_q: int
    rows: Rows | None  # None: known to the device only
    mixed: MixedRows | None = None  # of a captured mixed step
    max_prompts: int = 0  # of a mixed step: rows with queries of the prefill kernel at most


def num_leading_decodes(cu_q: Int32s) -> int:
    """Number of rows before the first that has not exactly one query. cu_q: [B + 1]."""
    others = np.flatnonzero(np.diff(cu_q) != 1)
    return int(others[0]) if others.size else len(cu_q) - 1


class _LaneBuffers(threading.local):
    """Buffers of the calling lane's thread. All its launches may use them, since they run in order."""

    def __init__(self) -> None:
        self.segments: dict[tuple[int, ...], tuple[Tensor, int]] = {}  # as `CudaAttention.segments` returns them
        self.counters: Tensor | None = None  # of splits; captured steps keep the address


class CudaAttention:
    """Triton's attention for a device with `num_sms` SMs.

    send: `Device.send`. deterministic: all rows take the prefill kernel. num_sms_here: for a device that is divided:
    given `num_sms`, returns the SMs that the calling thread's launches get; None: not divided. tma_prompts: rows of
    prompts take the kernel with TMA descriptors if it can read the cache, but not in mixed plans.
    """

    def __init__(
        self,
        device: torch.device,
        num_sms: int,
        send: Send,
        *,
        deterministic: bool,
        num_sms_here: Callable[[int], int] | None = None,
        tma_prompts: bool = False,
    ) -> None:
        self._device = device
        self._num_sms = num_sms
        self._num_sms_here = num_sms_here
        self._send = send
        self._deterministic = deterministic
        self._tma_prompts = tma_prompts
        self._lane = _LaneBuffers()
        self._programs_per_sm: dict[
            tuple[object, ...], int
        ] = {}  # of decode kernels, by the shapes they are compiled for

    # ---- plans

    def plan(self, cu_q: Tensor, num_context: Tensor, block_tables: Tensor) -> AttentionPlan:
        """Implements `Ops.plan_attention`. Copies all three tensors before it returns."""
        max_q, max_context = checks.check_plan(cu_q, num_context, block_tables)
        rows = Rows(cu_q.numpy().copy(), num_context.numpy().copy())
        num_decodes = 0 if self._deterministic else num_leading_decodes(rows.cu_q)
        rest = rows.cu_q[num_decodes:] - rows.cu_q[num_decodes]
        sent_cu_q, sent_context, tables, rest_cu_q = self._send(
            (rows.cu_q, rows.num_context, block_tables.numpy(), rest)
        )
        native = CudaPlan(
            num_tokens=int(rows.cu_q[-1]),
            num_decodes=num_decodes,
            max_decode_context=int(rows.num_context[:num_decodes].max(initial=0)),
            rest_cu_q=rest_cu_q,
            max_rest_q=int(np.diff(rest).max(initial=0)),
            rows=rows,
        )
        return AttentionPlan(sent_cu_q, sent_context, tables, max_q, max_context, native)

    def plan_decode(self, num_context: Tensor, block_tables: Tensor) -> AttentionPlan:
        """Implements `Ops.plan_decode`. `max_context` of the plan is 0, since only the cache knows the block size."""
        batch, _ = checks.check_decode_plan(num_context, block_tables)
        checks.check_device(self._device, (("num_context", num_context), ("block_tables", block_tables)))
        cu_q = torch.arange(batch + 1, dtype=torch.int32, device=self._device)
        num_decodes = 0 if self._deterministic else batch
        max_rest_q = min(1, batch - num_decodes)
        native = CudaPlan(batch, num_decodes, None, cu_q[: batch + 1 - num_decodes], max_rest_q, None)
        return AttentionPlan(cu_q, num_context, block_tables, 1, 0, native)

    def plan_mixed(self, rows: MixedRows, num_tokens: int, max_prompts: int) -> AttentionPlan:
        """Implements `Ops.plan_mixed`. Unless deterministic, the decode kernel runs for all rows, with a context of 0
        for rows of prompts, and the prefill kernel then overwrites their results."""
        batch = checks.check_mixed_plan(rows, num_tokens)
        checks.check_device(self._device, rows._asdict().items())
        num_decodes, rest = (0, rows.cu_q) if self._deterministic else (batch, rows.rest_cu_q)
        max_prompts = batch if self._deterministic else min(max_prompts, batch)
        native = CudaPlan(num_tokens, num_decodes, None, rest, num_tokens, None, rows, max_prompts)
        return AttentionPlan(rows.cu_q, rows.num_context, rows.block_tables, num_tokens, 0, native)

    def plan_packed(self, cu_seqlens: Tensor, max_length: int) -> PackedPlan:
        """Implements `Ops.plan_packed`: checks shapes and device, and reads no contents."""
        checks.check_packed_plan(cu_seqlens, max_length)
        checks.check_device(self._device, (("cu_seqlens", cu_seqlens),))
        return PackedPlan(cu_seqlens, max_length)

    # ---- attention

    def paged(self, q: Tensor, cache: PagedCache, layer: int, plan: AttentionPlan, scale: float) -> Tensor:
        """Implements `Ops.attention_paged` for plans that this class made. Head dims above MAX_HEAD_DIM take torch's
        attention; raises ValueError for these if the cache is quantized or only the device knows the plan's rows."""
        native = plan.native
        assert isinstance(native, CudaPlan), "a plan of other ops"
        checks.check_paged(q, cache, layer, plan.block_tables.shape[1], plan.max_context)
        if native.num_tokens != q.shape[0]:
            raise ValueError(f"q: expected {native.num_tokens} tokens as the plan says, got {q.shape[0]}")
        if q.shape[2] > MAX_HEAD_DIM:
            if cache.scales is not None:
                raise ValueError(f"cache: expected no int8 with a head dim above {MAX_HEAD_DIM}, got {q.shape[2]}")
            return _paged_by_torch(q, cache, layer, plan, native, scale)
        out = q.new_empty(q.shape)
        self.decodes(q, cache, layer, plan, native, scale, out)
        self.prompts(q, cache, layer, plan, native, scale, out)
        return out

    def decodes(
        self, q: Tensor, cache: PagedCache, layer: int, plan: AttentionPlan, native: CudaPlan, scale: float, out: Tensor
    ) -> None:
        """Writes the attention of the plan's decodes into the first `native.num_decodes` rows of `out`, [T, Hq, D].

        native: Triton's part of the plan; `plan.native` is another object if FlashInfer made the plan. Arguments are
        checked by the caller.
        """
        split = native.num_decodes
        if split:
            k_cache, v_cache = cache.keys_and_values(layer)
            scales = _scales(cache, layer)
            longest = native.max_decode_context
            if longest is None:
                longest = plan.block_tables.shape[1] * cache.block_size
            context = plan.num_context if native.mixed is None else native.mixed.decode_context
            rows = (_first(q, split), k_cache, v_cache, _first(plan.block_tables, split), _first(context, split), scale)
            key = (*q.shape[1:], q.dtype, *k_cache.shape[1:3], k_cache.dtype)
            if key not in self._programs_per_sm:
                self._programs_per_sm[key] = programs_per_sm(*rows, scales)
            num_sms = self._num_sms if self._num_sms_here is None else self._num_sms_here(self._num_sms)
            splits = choose_num_splits(split, k_cache.shape[2], longest, self._programs_per_sm[key] * num_sms)
            lane = self._lane
            if lane.counters is None:
                lane.counters = new_counters(self._device)
            decode_attention(*rows, num_splits=splits, counters=lane.counters, out=_first(out, split), scales=scales)

    def prompts(
        self, q: Tensor, cache: PagedCache, layer: int, plan: AttentionPlan, native: CudaPlan, scale: float, out: Tensor
    ) -> None:
        """Writes the attention of the rows of the prefill kernel into their rows of `out`, [T, Hq, D].

        native: as in `decodes`. Call it after `decodes`, whose results for prompts of a mixed plan it overwrites.
        Arguments are checked by the caller.
        """
        # The rows of a mixed plan count tokens from the first one of the step.
        split = native.num_decodes if native.mixed is None else 0
        if native.max_rest_q:
            k_cache, v_cache = cache.keys_and_values(layer)
            scales = _scales(cache, layer)
            prefill_attention(
                _rest(q, split),
                k_cache,
                v_cache,
                _rest(plan.block_tables, split),
                native.rest_cu_q,
                _rest(plan.num_context, split),
                scale,
                max_q=native.max_rest_q,
                max_requests=native.max_prompts,
                out=_rest(out, split),
                tma=self._tma_prompts and native.mixed is None and scales is None and can_read_cache(k_cache, v_cache),
                scales=scales,
            )

    def attend_packed(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Segments, scale: float, *, tma: bool = False
    ) -> Tensor:
        """Implements `Ops.attention_packed`. tma: uses the Hopper kernel; the caller has checked
        `tma_attention.can_read(k, v)`.

        Head dims above MAX_HEAD_DIM take torch's attention; raises ValueError for these if `cu_seqlens` is a
        `PackedPlan`.
        """
        planned = isinstance(cu_seqlens, PackedPlan)
        if isinstance(cu_seqlens, PackedPlan):
            checks.check_packed_rows(q, k, v)
            if q.shape[2] > MAX_HEAD_DIM:
                raise ValueError(
                    f"cu_seqlens: expected numbers for a head dim above {MAX_HEAD_DIM}, whose segments are cut on the "
                    "host"
                )
            segments, max_length = cu_seqlens.cu_seqlens, min(cu_seqlens.max_length, q.shape[0])
        else:
            segments, max_length = self.segments(q, k, v, cu_seqlens)
            if q.shape[2] > MAX_HEAD_DIM:
                return _packed_by_torch(q, k, v, cu_seqlens, scale)
        return packed_attention(
            q, k, v, segments, scale, max_length=max_length, one_tile=self._deterministic, search=planned, tma=tma
        )

    def segments(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Sequence[int]) -> tuple[Tensor, int]:
        """Returns (cu_seqlens on the device, int32 [segments + 1]; rows of the longest segment).

        Cached per lane, since every layer of a tower asks for the same. Raises ValueError unless `cu_seqlens` rises
        from 0 to the rows of q; dtypes and shapes of q, k and v are checked only if the result is not cached.
        """
        sent, bounds = self._lane.segments, tuple(cu_seqlens)
        segments = sent.get(bounds)
        if segments is not None and q.shape[0] == bounds[-1]:
            return segments
        checks.check_packed(q, k, v, bounds)
        (on_device,) = self._send((np.array(bounds, dtype=np.int32),))
        while len(sent) >= _MAX_SEGMENTS:
            del sent[next(iter(sent))]
        sent[bounds] = on_device, max((end - begin for begin, end in pairwise(bounds)), default=0)
        return sent[bounds]


def _first(x: Tensor, count: int) -> Tensor:
    """x[:count]; x itself if that is all, since a view costs as much as all checks of an op."""
    return x if x.shape[0] == count else x[:count]


def _rest(x: Tensor, count: int) -> Tensor:
    """x[count:]; x itself for 0, since a view costs as much as all checks of an op."""
    return x[count:] if count else x


def _scales(cache: PagedCache, layer: int) -> Scales | None:
    """The cache's scales of keys and of values, [N, Hkv, S] each; None if it is not quantized."""
    return None if cache.scales is None else (cache.scales[:, layer, 0], cache.scales[:, layer, 1])


# ---- fallback for head dims above MAX_HEAD_DIM


def _paged_by_torch(
    q: Tensor, cache: PagedCache, layer: int, plan: AttentionPlan, native: CudaPlan, scale: float
) -> Tensor:
    """Computes attention row by row with torch, over the gathered context. Raises ValueError if only the device knows
    the plan's rows."""
    if native.rows is None:
        raise ValueError(
            f"plan: expected one of plan_attention for a head dim above {MAX_HEAD_DIM}, whose rows are cut on the host"
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    bounds = native.rows.cu_q.tolist()
    for row, (begin, end) in enumerate(pairwise(bounds)):
        num_context = int(native.rows.num_context[row])
        if begin == end:
            continue
        blocks = plan.block_tables[row, : -(-num_context // cache.block_size)]
        keys, values = (
            cache.data[:, layer, x].index_select(0, blocks).flatten(0, 1)[:num_context].transpose(0, 1) for x in (0, 1)
        )
        positions = torch.arange(num_context, device=q.device)
        sees = positions <= positions[num_context - (end - begin) :, None]
        mixed = F.scaled_dot_product_attention(
            q[begin:end].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=sees,
            scale=scale,
            enable_gqa=q.shape[1] != keys.shape[0],
        )
        out[begin:end] = mixed[0].transpose(0, 1)
    return out


def _packed_by_torch(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Sequence[int], scale: float) -> Tensor:
    """Computes attention segment by segment with torch. cu_seqlens: checked by the caller."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for begin, end in pairwise(cu_seqlens):
        if begin < end:
            query, key, value = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))
            out[begin:end] = F.scaled_dot_product_attention(query, key, value, scale=scale)[0].transpose(0, 1)
    return out
