"""Attention by FlashInfer, with the interface of attention.py.

FlashInfer plans on the host, once per step and kind of layer, into a wrapper that all these layers run. Decodes of
captured graphs have wrappers of their own (flashinfer_graphs.py), planned before each replay. Decodes take its Ampere
kernels, which are as fast where memory bounds; prompts and segments can take Hopper kernels ("fa3"). Head dims that
FlashInfer does not support, and kernels that are neither compiled nor can be, fall back to Triton. Importing this needs
Triton; the package itself is imported when the class is made.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend import checks
from hydra_engine.backend.base import AttentionPlan, MixedRows, PackedPlan, PagedCache, Segments
from hydra_engine.backend.cuda import flashinfer_kernels
from hydra_engine.backend.cuda.attention import CudaAttention, CudaPlan, Int32s, num_leading_decodes
from hydra_engine.backend.cuda.attention_choice import DTYPES, HEAD_DIMS
from hydra_engine.backend.cuda.flashinfer_graphs import (
    GraphBuffers,
    GraphDecode,
    GraphPlan,
    Kind,
    cumulative_sums,
    pages_of,
    workspace_bytes,
)
from hydra_engine.backend.device import Send

_HOPPER = 9  # major compute capability
NUM_STEPS = 2  # step plans that a lane holds: one is planned while another runs
NUM_PACKED = 4  # lists of segments: towers alternate between whole pictures and windows


@dataclass(frozen=True, slots=True, eq=False)
class FlashPlan:
    """`AttentionPlan.native`. Compares by identity."""

    num_decodes: int
    num_q: Int32s  # [B]
    num_context: Int32s  # [B]
    block_tables: Int32s  # [B, W]
    triton: CudaPlan


class Wrappers:
    """FlashInfer wrappers of one kind in one lane, each with its last plan. The least recently used one plans next."""

    def __init__(self, make: Callable[[], Any], count: int) -> None:
        self._make = make
        self._count = count
        self._held: dict[Hashable, tuple[Any, torch.cuda.Event]] = {}  # in LRU order; the event: its plan was copied

    def get_planned(self, key: Hashable, plan: Callable[[Any], None]) -> Any:
        if key in self._held:
            self._held[key] = self._held.pop(key)
            return self._held[key][0]
        if len(self._held) < self._count:
            wrapper, copied = self._make(), torch.cuda.Event()
        else:
            wrapper, copied = self._held.pop(next(iter(self._held)))
            # The plan is in pinned memory until the device has copied it.
            copied.synchronize()
        plan(wrapper)
        copied.record()
        self._held[key] = wrapper, copied
        return wrapper


class _OfLane:
    """Wrappers and workspace of one lane. Not shared between lanes: two at once would write to one workspace."""

    def __init__(self, library: Any, device: torch.device) -> None:
        self._library = library
        self._device = device
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._of_step: dict[Hashable, Wrappers] = {}
        self._retired: list[dict[Hashable, Wrappers]] = []  # kept alive: their plans may not have been copied yet
        self._of_graphs: dict[Kind, GraphBuffers] = {}

    def graphs(self, kind: Kind) -> GraphBuffers:
        return self._of_graphs.setdefault(kind, GraphBuffers(self._device))

    def workspace(self, num_bytes: int) -> Tensor:
        """The workspace for partial results, shared by all wrappers of the lane, whose steps run in order. Zeroed, as
        the library requires."""
        if num_bytes > self._workspace.shape[0]:
            self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
            self._retired.append(self._of_step)
            self._of_step = {}
        return self._workspace

    def wrappers(self, name: str, num_bytes: int, count: int, **options: Any) -> Wrappers:
        """Up to `count` of the library's Batch<name>KVCacheWrapper with these options."""
        workspace, key = self.workspace(num_bytes), (name, *options.values())
        if key not in self._of_step:
            make = getattr(self._library, f"Batch{name}KVCacheWrapper")
            self._of_step[key] = Wrappers(partial(make, workspace, kv_layout="NHD", **options), count)
        return self._of_step[key]


class FlashInferAttention:
    """FlashInfer's attention for a device with `num_sms` SMs.

    send: `Device.send`. library: the package. decodes: False leaves them to Triton. prompts: the library's name of
    their kernels, "fa2", "fa3" or "auto"; None leaves them to Triton.
    """

    def __init__(
        self,
        device: torch.device,
        num_sms: int,
        send: Send,
        by_triton: CudaAttention,
        library: Any = None,
        *,
        decodes: bool = True,
        prompts: str | None = "auto",
    ) -> None:
        self._device = device
        self._num_sms = num_sms
        self._send = send
        self._by_triton = by_triton
        self._decodes = decodes
        self.wanted_prompts = prompts
        self._library = importlib.import_module("flashinfer") if library is None else library
        self._kernels = flashinfer_kernels.installed()
        self._of_thread = threading.local()

    # ---- plans

    def plan(self, cu_q: Tensor, num_context: Tensor, block_tables: Tensor) -> AttentionPlan:
        """`Ops.plan_attention`. Copies all three tensors before it returns. The first layer plans, since it knows heads
        and block size."""
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
        """`Ops.plan_decode`. Must be refreshed before its first use and before each replay, in the same thread and on
        the same stream."""
        plan = self._by_triton.plan_decode(num_context, block_tables)
        if not self._decodes:
            return plan
        batch, width = block_tables.shape
        native = GraphPlan(batch, width, plan.native)
        return replace(plan, native=native, refresh=native.refresh)

    def plan_mixed(self, rows: MixedRows, num_tokens: int, max_prompts: int) -> AttentionPlan:
        raise ValueError("plan_mixed: expected ops that plan without contents; FlashInfer cuts prompts by them")

    def plan_packed(self, cu_seqlens: Tensor, max_length: int) -> PackedPlan:
        return self._by_triton.plan_packed(cu_seqlens, max_length)

    # ---- attention

    def paged(self, q: Tensor, cache: PagedCache, layer: int, plan: AttentionPlan, scale: float) -> Tensor:
        native = plan.native
        if isinstance(native, CudaPlan):
            return self._by_triton.paged(q, cache, layer, plan, scale)
        assert isinstance(native, FlashPlan | GraphPlan), "a plan of other ops"
        decodes, prompts = self._takes_decodes(q, cache.data.shape[4]), self._prompts(q)
        if not decodes and (prompts is None or isinstance(native, GraphPlan)):
            return self._by_triton.paged(q, cache, layer, replace(plan, native=native.triton), scale)
        checks.check_paged(q, cache, layer, plan.block_tables.shape[1], plan.max_context)
        num_tokens = native.triton.num_tokens
        if num_tokens != q.shape[0]:
            raise ValueError(f"q: expected {num_tokens} tokens as the plan says, got {q.shape[0]}")
        kind = Kind(q.shape[1], cache.data.shape[4], q.shape[2], cache.block_size, q.dtype, scale)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        kv = cache.keys_and_values(layer)  # [N, S, Hkv, D] each, with the same strides
        if isinstance(native, GraphPlan):
            self._captured(kind, native).run(q, kv, out=out)
            return out
        split = native.num_decodes
        if not decodes:
            self._by_triton.decodes(q, cache, layer, plan, native.triton, scale, out)
        elif split:
            self._decode(kind, native).run(q[:split], kv, out=out[:split])
        if prompts is None:
            self._by_triton.prompts(q, cache, layer, plan, native.triton, scale, out)
        elif split < num_tokens:
            self._prefill(kind, native, prompts).run(q[split:], kv, out=out[split:])
        return out

    def takes_packed(self, q: Tensor, cu_seqlens: Segments) -> bool:
        """True if `attend_packed` uses FlashInfer: it plans on the host, so the host must know the segments."""
        return not isinstance(cu_seqlens, PackedPlan) and self._segments(q) is not None

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Segments, scale: float) -> Tensor:
        kernel = self._segments(q)
        if isinstance(cu_seqlens, PackedPlan) or kernel is None or not q.shape[0]:
            return self._by_triton.attend_packed(q, k, v, cu_seqlens, scale)
        bounds = tuple(cu_seqlens)
        checks.check_packed(q, k, v, bounds)
        _, num_heads, head_dim = q.shape
        kind = Kind(num_heads, num_heads, head_dim, 0, q.dtype, scale)

        def plan(wrapper: Any) -> None:
            lengths = [end - begin for begin, end in pairwise(bounds) if end > begin]
            indptr = torch.from_numpy(cumulative_sums(np.array(lengths, dtype=np.int32)))
            wrapper.plan(indptr, indptr, num_heads, num_heads, head_dim, causal=False, **kind.settings)

        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        size = workspace_bytes(kind, self._num_sms)
        wrappers = self._lane.wrappers("PrefillWithRagged", size, NUM_PACKED, backend=kernel)
        wrappers.get_planned((bounds, kind), plan).run(q, k, v, out=out)
        return out

    # ---- kernels

    def _takes_decodes(self, q: Tensor, kv_heads: int) -> bool:
        _, heads, head_dim = q.shape
        kernel = flashinfer_kernels.decode_kernel(heads, kv_heads, head_dim)
        return self._decodes and _fits(q) and not self._kernels.reason_missing(kernel, q.dtype, head_dim)

    def _prompts(self, q: Tensor) -> str | None:
        return None if self.wanted_prompts is None else self._tiled(self.wanted_prompts, q)

    def _segments(self, q: Tensor) -> str | None:
        return self._tiled("auto", q)

    def _tiled(self, wanted: str, q: Tensor) -> str | None:
        """The library's name of the tiled kernels to use; None: Triton."""
        hopper = bool(self._kernels.problem) and self._hopper
        return self._kernels.prompts(wanted, q.dtype, q.shape[2], hopper=hopper) if _fits(q) else None

    @cached_property
    def _hopper(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.get_device_capability(self._device)[0] == _HOPPER

    # ---- wrappers

    @property
    def _lane(self) -> _OfLane:
        lane: _OfLane | None = getattr(self._of_thread, "lane", None)
        if lane is None:
            lane = self._of_thread.lane = _OfLane(self._library, self._device)
        return lane

    def _captured(self, kind: Kind, native: GraphPlan) -> Any:
        """The wrapper of a captured decode, planned at its first use. That use is never captured: `Device.capture` runs
        once before it captures."""
        decode = native.decodes.get(kind)
        if decode is None:
            pages = native.pages(kind.block_size)
            workspace = self._lane.workspace(workspace_bytes(kind, self._num_sms, native.batch))
            decode = GraphDecode(
                self._library, workspace, self._lane.graphs(kind), self._send, kind, native.batch, native.width
            )
            decode.plan(pages)
            native.decodes[kind] = decode
        return decode.wrapper

    def _decode(self, kind: Kind, native: FlashPlan) -> Any:
        def plan(wrapper: Any) -> None:
            _, *pages = self._pages(native, slice(native.num_decodes), kind)
            wrapper.plan(*pages, *kind.shape, **kind.settings)

        size, cores = workspace_bytes(kind, self._num_sms), kind.tensor_cores
        wrappers = self._lane.wrappers("DecodeWithPaged", size, NUM_STEPS, backend="fa2", use_tensor_cores=cores)
        return wrappers.get_planned((native, kind), plan)

    def _prefill(self, kind: Kind, native: FlashPlan, kernel: str) -> Any:
        def plan(wrapper: Any) -> None:
            pages = self._pages(native, slice(native.num_decodes, None), kind)
            wrapper.plan(*pages, *kind.shape, causal=True, **kind.settings)

        size = workspace_bytes(kind, self._num_sms)
        wrappers = self._lane.wrappers("PrefillWithPaged", size, NUM_STEPS, backend=kernel)
        return wrappers.get_planned((native, kind), plan)

    def _pages(self, native: FlashPlan, rows: slice, kind: Kind) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns (cu_q, indptr, indices, last_page_len). The library reads plans on the host; only the list of blocks,
        which can be long, is sent, without waiting."""
        pages = pages_of(native.num_q[rows], native.num_context[rows], native.block_tables[rows], kind.block_size)
        (indices,) = self._send((pages.indices,))
        cu_q, indptr, last = (torch.from_numpy(part) for part in (pages.cu_q, pages.indptr, pages.last_page_len))
        return cu_q, indptr, indices, last


def _fits(q: Tensor) -> bool:
    return q.dtype in DTYPES and q.shape[2] in HEAD_DIMS
