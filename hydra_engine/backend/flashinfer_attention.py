"""Attention by FlashInfer, for those who ask for it by name: the same door as cuda_attention.py.

FlashInfer plans on the host, once for a step and a shape, into a wrapper that all layers then run. That is why a decode
step that is captured takes our own kernels: a replay brings new contents and nobody plans them. Head dims that
FlashInfer lacks take them too. Importing this needs Triton; the package itself is imported when the class is made.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend import checks
from hydra_engine.backend.attention_choice import DTYPES, HEAD_DIMS
from hydra_engine.backend.base import AttentionPlan, PagedCache
from hydra_engine.backend.cuda_attention import CudaAttention, CudaPlan, Ints, Send, num_leading_decodes

WORKSPACE_BYTES = 128 << 20  # of partial results, one for all wrappers of a lane, whose steps run in order
NUM_STEPS = 2  # plans of steps that a lane holds: one is planned while another runs
NUM_PACKED = 4  # lists of segments: towers alternate between whole pictures and windows
_PLAIN_GROUPS = (1, 2)  # query heads for each KV head up to which decodes take no tensor cores


class Pages(NamedTuple):
    """Rows of a step as FlashInfer takes them, on the host."""

    cu_q: Ints  # [B + 1]
    indptr: Ints  # [B + 1], of `indices`
    indices: Ints  # blocks of all rows behind each other
    last_page_len: Ints  # [B], 1 to the block size


def pages_of(num_q: Ints, num_context: Ints, block_tables: Ints, block_size: int) -> Pages:
    """Rows without queries are left out: they have no result, and may have no block."""
    kept = num_q > 0
    num_q, num_context, block_tables = num_q[kept], num_context[kept], block_tables[kept]
    used = -(-num_context // block_size)
    columns = np.arange(block_tables.shape[1], dtype=np.int32)
    return Pages(
        cu_q=_cumulated(num_q),
        indptr=_cumulated(used),
        indices=block_tables[columns < used[:, None]],
        last_page_len=(num_context - (used - 1) * block_size).astype(np.int32),
    )


def _cumulated(counts: Ints) -> Ints:
    result = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=result[1:])
    return result


@dataclass(frozen=True, slots=True, eq=False)
class FlashPlan:
    """`AttentionPlan.native`, equal to itself alone."""

    num_decodes: int
    num_q: Ints  # [B]
    num_context: Ints  # [B]
    block_tables: Ints  # [B, W]
    triton: CudaPlan


class Wrappers:
    """Wrappers of one kind in one lane, each with what it was last planned for. The one longest unused plans next."""

    def __init__(self, make: Callable[[], Any], count: int) -> None:
        self._make = make
        self._count = count
        self._held: dict[Hashable, tuple[Any, torch.cuda.Event]] = {}  # the event: its plan was copied; last used last

    def planned(self, key: Hashable, plan: Callable[[Any], None]) -> Any:
        if key in self._held:
            self._held[key] = self._held.pop(key)
            return self._held[key][0]
        if len(self._held) < self._count:
            wrapper, copied = self._make(), torch.cuda.Event()
        else:
            wrapper, copied = self._held.pop(next(iter(self._held)))
            # A plan lies in pinned memory until the device has copied it.
            copied.synchronize()
        plan(wrapper)
        copied.record()
        self._held[key] = wrapper, copied
        return wrapper


class _OfLane:
    """No lane shares these with another: two that ran at once would write to one workspace."""

    def __init__(self, library: Any, device: torch.device) -> None:
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        prefill = partial(library.BatchPrefillWithPagedKVCacheWrapper, workspace, kv_layout="NHD", backend="fa2")
        packed = partial(library.BatchPrefillWithRaggedKVCacheWrapper, workspace, kv_layout="NHD", backend="fa2")
        decode = partial(library.BatchDecodeWithPagedKVCacheWrapper, workspace, kv_layout="NHD")
        self.prefill = Wrappers(prefill, NUM_STEPS)
        self.packed = Wrappers(packed, NUM_PACKED)
        # By whether tensor cores are used.
        self.decode = {use: Wrappers(partial(decode, use_tensor_cores=use), NUM_STEPS) for use in (False, True)}


CHOICES = {
    "attention_paged": ("flashinfer", "asked for by name; decodes that are captured as graphs take Triton"),
    "attention_packed": ("flashinfer", "asked for by name; head dims other than 64, 128 and 256 take Triton"),
}


class FlashInferAttention:
    """Attention of one device; `send` as that of its `Device`. `library`: the package."""

    def __init__(self, device: torch.device, send: Send, by_triton: CudaAttention, library: Any = None) -> None:
        self._device = device
        self._send = send
        self._by_triton = by_triton
        self._library = importlib.import_module("flashinfer") if library is None else library
        self._of_thread = threading.local()

    # ---- plans

    def plan(self, cu_q: Tensor, num_context: Tensor, block_tables: Tensor) -> AttentionPlan:
        """Reads all three before it returns. Heads and block size are known at the first layer, which then plans."""
        plan = self._by_triton.plan(cu_q, num_context, block_tables)
        num_q = np.diff(cu_q.numpy()).astype(np.int32)
        native = FlashPlan(
            num_leading_decodes(cu_q.numpy()),
            num_q,
            num_context.numpy().copy(),
            block_tables.numpy().copy(),
            plan.native,
        )
        return replace(plan, native=native)

    def plan_decode(self, num_context: Tensor, block_tables: Tensor) -> AttentionPlan:
        return self._by_triton.plan_decode(num_context, block_tables)

    # ---- attention

    def paged(self, q: Tensor, cache: PagedCache, layer: int, plan: AttentionPlan, scale: float) -> Tensor:
        native = plan.native
        if not isinstance(native, FlashPlan):
            return self._by_triton.paged(q, cache, layer, plan, scale)
        if not _fits(q):
            return self._by_triton.paged(q, cache, layer, replace(plan, native=native.triton), scale)
        checks.check_paged(q, cache, layer, plan.block_tables.shape[1], plan.max_context)
        num_tokens = native.triton.num_tokens
        if num_tokens != q.shape[0]:
            raise ValueError(f"q: expected {num_tokens} tokens as the plan says, got {q.shape[0]}")
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        kv = cache.data[:, layer, 0], cache.data[:, layer, 1]  # [N, S, Hkv, D] each, with the same strides
        split = native.num_decodes
        if split:
            self._decode(q, cache, native, scale).run(q[:split], kv, out=out[:split])
        if split < num_tokens:
            self._prefill(q, cache, native, scale).run(q[split:], kv, out=out[split:])
        return out

    def packed(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Sequence[int], scale: float) -> Tensor:
        bounds = tuple(cu_seqlens)
        if not _fits(q) or not q.shape[0]:
            return self._by_triton.packed(q, k, v, bounds, scale)
        checks.check_packed(q, k, v, bounds)
        _, num_heads, head_dim = q.shape

        def plan(wrapper: Any) -> None:
            lengths = [end - begin for begin, end in pairwise(bounds) if end > begin]
            indptr = torch.from_numpy(_cumulated(np.array(lengths, dtype=np.int32)))
            wrapper.plan(
                *(indptr, indptr, num_heads, num_heads, head_dim),
                causal=False,
                sm_scale=scale,
                q_data_type=q.dtype,
                kv_data_type=k.dtype,
            )

        key = (bounds, num_heads, head_dim, q.dtype, scale)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._lane.packed.planned(key, plan).run(q, k, v, out=out)
        return out

    # ---- wrappers

    @property
    def _lane(self) -> _OfLane:
        found: _OfLane | None = getattr(self._of_thread, "lane", None)
        if found is None:
            found = self._of_thread.lane = _OfLane(self._library, self._device)
        return found

    def _decode(self, q: Tensor, cache: PagedCache, native: FlashPlan, scale: float) -> Any:
        split, shape = native.num_decodes, _shape(q, cache)

        def plan(wrapper: Any) -> None:
            pages = self._pages(native, slice(split), cache.block_size)
            indptr, indices, last_page_len = self._tensors(pages)
            wrapper.plan(indptr, indices, last_page_len, *shape, **_types(q, cache), sm_scale=scale)

        tensor_cores = q.shape[1] // cache.data.shape[4] not in _PLAIN_GROUPS
        return self._lane.decode[tensor_cores].planned((native, shape, q.dtype, scale), plan)

    def _prefill(self, q: Tensor, cache: PagedCache, native: FlashPlan, scale: float) -> Any:
        shape = _shape(q, cache)

        def plan(wrapper: Any) -> None:
            pages = self._pages(native, slice(native.num_decodes, None), cache.block_size)
            cu_q = torch.from_numpy(pages.cu_q)
            wrapper.plan(cu_q, *self._tensors(pages), *shape, causal=True, **_types(q, cache), sm_scale=scale)

        return self._lane.prefill.planned((native, shape, q.dtype, scale), plan)

    def _pages(self, native: FlashPlan, rows: slice, block_size: int) -> Pages:
        return pages_of(native.num_q[rows], native.num_context[rows], native.block_tables[rows], block_size)

    def _tensors(self, pages: Pages) -> tuple[Tensor, Tensor, Tensor]:
        """(indptr, indices, last_page_len). What plans read stays on the host, where the library asks for it; the list
        of blocks can be long, so it is sent without waiting."""
        (indices,) = self._send((pages.indices,))
        return torch.from_numpy(pages.indptr), indices, torch.from_numpy(pages.last_page_len)


def _fits(q: Tensor) -> bool:
    return q.dtype in DTYPES and q.shape[2] in HEAD_DIMS


def _shape(q: Tensor, cache: PagedCache) -> tuple[int, int, int, int]:
    """(query heads, KV heads, head dim, block size)."""
    return q.shape[1], cache.data.shape[4], q.shape[2], cache.block_size


def _types(q: Tensor, cache: PagedCache) -> dict[str, torch.dtype]:
    """Named always: the library's default is float16."""
    return {"q_data_type": q.dtype, "kv_data_type": cache.data.dtype}
