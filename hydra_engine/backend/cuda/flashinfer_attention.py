"""Attention by FlashInfer, with the interface of attention.py.

FlashInfer plans on the host, once per step and kind of layer, into a wrapper that all these layers run. Decodes take
its Ampere kernels, which are as fast as others where memory is the limit; prompts and segments can take Hopper kernels
("fa3"). What FlashInfer does not support, or has no kernel for and cannot compile here, falls back to Triton.

Captured steps with prompts take Triton, which reads their rows on the device. In a captured decode step only `run` is
part of the graph; the host plans before each replay. A graph keeps addresses
and launch sizes. So pages and schedule are in buffers of a lane, one set per kind of layer, since all kinds of a step
are planned before the step is replayed; and a plan for other lengths must have the captured launch sizes. Copies to the
device are ordered by the lane's stream. The schedule's pinned source is not: a wrapper plans again only after its copy.

Written for FlashInfer 0.4 to 0.7.2. Importing this needs Triton; the package itself is imported when the class is made.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend import checks
from hydra_engine.backend.base import AttentionPlan, MixedRows, PackedPlan, PagedCache, Segments
from hydra_engine.backend.cuda import flashinfer_kernels
from hydra_engine.backend.cuda.attention import CudaAttention, CudaPlan, Int32s, num_leading_decodes
from hydra_engine.backend.cuda.attention_choice import DTYPES, HEAD_DIMS
from hydra_engine.backend.cuda.flashinfer_kernels import uses_tensor_cores
from hydra_engine.backend.device import Send

# A schedule needs a few words per block of its largest launch; a wrapper's own buffer would be 16 times as large.
SCHEDULE_BYTES = 512 << 10
_TILES = (16, 64, 128)  # rows of a query tile: FlashInfer takes the first that holds the group
_BLOCKS_PER_SM = 2  # blocks that its tensor-core kernels plan per SM


class Pages(NamedTuple):
    """Rows of a step in FlashInfer's format, on the host."""

    cu_q: Int32s  # [B + 1]
    indptr: Int32s  # [B + 1]: row r has indices[indptr[r]:indptr[r + 1]]
    indices: Int32s  # blocks of all rows, concatenated
    last_page_len: Int32s  # [B], 1 to the block size


def pages_of(num_q: Int32s, num_context: Int32s, block_tables: Int32s, block_size: int) -> Pages:
    """Converts B rows to `Pages`. Rows without queries are left out: they have no result, and may have no block.

    num_q, num_context: [B]. block_tables: [B, W] with at least as many blocks as each context needs.
    """
    kept = num_q > 0
    num_q, num_context, block_tables = num_q[kept], num_context[kept], block_tables[kept]
    used = -(-num_context // block_size)
    columns = np.arange(block_tables.shape[1], dtype=np.int32)
    return Pages(
        cu_q=cumulative_sums(num_q),
        indptr=cumulative_sums(used),
        indices=block_tables[columns < used[:, None]],
        last_page_len=(num_context - (used - 1) * block_size).astype(np.int32),
    )


def cumulative_sums(counts: Int32s) -> Int32s:
    """Sums before each count and after the last: [B + 1] int32, from 0. counts: [B]."""
    result = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=result[1:])
    return result


class Kind(NamedTuple):
    """Parameters of FlashInfer's `plan` besides the rows; layers with equal ones share a plan. block_size 0: keys are
    not paged."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    scale: float

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Positional arguments of FlashInfer's paged `plan`, after the pages."""
        return self.heads, self.kv_heads, self.head_dim, self.block_size

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of FlashInfer's `plan`. Dtypes are always passed: its default is float16."""
        return {"q_data_type": self.dtype, "kv_data_type": self.dtype, "sm_scale": self.scale}

    @property
    def tensor_cores(self) -> bool:
        """True if decodes use tensor cores."""
        return uses_tensor_cores(self.heads, self.kv_heads, self.head_dim)


def workspace_bytes(kind: Kind, num_sms: int, captured_batch: int = 0) -> int:
    """Upper bound of the memory for FlashInfer's partial results: float32 per head, query tile and part of a context.

    captured_batch: rows of a captured decode, which needs as many parts as its launch has blocks; 0: not captured.
    """
    parts = _BLOCKS_PER_SM * num_sms // kind.kv_heads
    tile = _TILES[-1]
    if captured_batch:
        group = kind.heads // kind.kv_heads
        tile = next((tile for tile in _TILES if group <= tile), tile)
        parts = max(parts, -(-captured_batch * group // tile) + captured_batch - 1)
    return kind.heads * max(parts, 1) * tile * (kind.head_dim + 1) * 4 + (1 << 20)


class GraphBuffers:
    """Buffers of the captured graphs of one lane for one kind of layer; one graph runs at a time.

    The first graphs captured, the largest, decide the sizes; a larger later one gets new memory, and earlier ones keep
    theirs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._schedule = torch.empty(0, dtype=torch.uint8)
        self._indptr = self._indices = self._last_page_len = torch.empty(0, dtype=torch.int32)

    @property
    def schedule(self) -> Tensor:
        """Memory for FlashInfer's schedule, uint8 [SCHEDULE_BYTES], made at first use and kept."""
        if not self._schedule.shape[0]:
            self._schedule = torch.empty(SCHEDULE_BYTES, dtype=torch.uint8, device=self._device)
        return self._schedule

    def pages(self, batch: int, max_pages: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (indptr [batch + 1], indices of at least `max_pages`, last_page_len [batch]), int32. Earlier buffers
        are used again if they are large enough."""
        self._indptr = self._grown(self._indptr, batch + 1)
        self._indices = self._grown(self._indices, max_pages)
        self._last_page_len = self._grown(self._last_page_len, batch)
        return self._indptr[: batch + 1], self._indices, self._last_page_len[:batch]

    def _grown(self, present: Tensor, size: int) -> Tensor:
        """Returns `present` if it has `size` entries or more, else a new buffer of zeros."""
        if size <= present.shape[0]:
            return present
        return torch.zeros(size, dtype=torch.int32, device=self._device)


class GraphDecode:
    """A FlashInfer wrapper of captured decodes, for one kind of layer and `batch` rows of at most `width` blocks.

    Only the lane's thread uses it. workspace, buffers: the lane's, the latter for this kind. send: `Device.send`.
    """

    def __init__(
        self, library: Any, workspace: Tensor, buffers: GraphBuffers, send: Send, kind: Kind, batch: int, width: int
    ) -> None:
        self._library = library
        self._send = send
        self._kind = kind
        self._pages = buffers.pages(batch, batch * width)
        indptr, indices, last_page_len = self._pages
        self.wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            kv_layout="NHD",
            backend="fa2",
            use_cuda_graph=True,
            use_tensor_cores=kind.tensor_cores,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last_page_len,
        )
        self.wrapper.reset_workspace_buffer(workspace, buffers.schedule)
        self._arrived = torch.cuda.Event()
        self._launch: tuple[int, ...] | None = None

    def plan(self, pages: Pages) -> None:
        """Plans on the current stream, after waiting for the copies of the previous plan. Raises ValueError if
        FlashInfer's launch differs from that of the first plan, which is the captured one."""
        self._arrived.synchronize()
        sent = self._send((pages.indptr, pages.indices, pages.last_page_len))
        for buffer, part in zip(self._pages, sent, strict=True):
            buffer[: part.shape[0]].copy_(part)
        host = torch.from_numpy(pages.indptr), sent[1], torch.from_numpy(pages.last_page_len)
        if self._launch is None:
            # Loads the kernels, and copies the pages once more.
            self.wrapper.plan(*host, *self._kind.shape, **self._kind.settings)
        else:
            # In graph mode this does not write the buffers.
            self._library.fast_decode_plan(self.wrapper, *host, *self._kind.shape, **self._kind.settings)
        self._arrived.record()
        self._check_launch()

    def _check_launch(self) -> None:
        """Keeps the launch of the first plan; raises ValueError if a later one differs. FlashInfer does not promise
        equal launches for equal batch sizes, and a graph with another launch would read out of its schedule's
        bounds."""
        planned = getattr(self.wrapper, "_plan_info", None)
        launch = () if planned is None else tuple(int(number) for number in planned)
        if self._launch is None:
            self._launch = launch
        elif launch != self._launch:
            raise ValueError(
                "FlashInfer plans a decode in another form than the one that was captured; set attention_backend to "
                "triton or enforce_eager"
            )


@dataclass(frozen=True, slots=True, eq=False)
class GraphPlan:
    """`AttentionPlan.native` of a captured decode step: `batch` rows of at most `width` blocks.

    triton: the plan for layers that FlashInfer does not support. decodes: wrappers by kind of layer, made at first use.
    """

    batch: int
    width: int
    triton: CudaPlan
    decodes: dict[Kind, GraphDecode] = field(default_factory=dict)
    rows: list[tuple[Int32s, Int32s]] = field(default_factory=list)  # (num_context, block_tables) of the last refresh

    def refresh(self, num_context: Int32s, block_tables: Int32s) -> None:
        """Implements `AttentionPlan.refresh`: keeps new contents, and plans them for all kinds of layers that were used
        so far. Raises ValueError unless there are `batch` contexts, at most `batch` rows of tables and at most `width`
        blocks, and as `pages` and `GraphDecode.plan`."""
        count, width = block_tables.shape
        if num_context.shape != (self.batch,) or count > self.batch or width > self.width:
            raise ValueError(
                f"num_context, block_tables: expected [{self.batch}] and at most [{self.batch}, {self.width}], "
                f"got {list(num_context.shape)} and {list(block_tables.shape)}"
            )
        tables = np.zeros((self.batch, max(width, 1)), dtype=np.int32)
        tables[:count, :width] = block_tables
        self.rows[:] = [(num_context.astype(np.int32), tables)]
        for kind, decode in self.decodes.items():
            decode.plan(self.pages(kind.block_size))

    def pages(self, block_size: int) -> Pages:
        """The rows of the last refresh as `Pages`. Raises ValueError if there was none, or if a context is below 1 or
        longer than the tables' blocks."""
        if not self.rows:
            raise ValueError("plan: expected one that was refreshed, whose rows are known to the host")
        ((num_context, tables),) = self.rows
        longest = tables.shape[1] * block_size
        if num_context.min(initial=1) < 1 or num_context.max(initial=1) > longest:
            raise ValueError(f"num_context: expected 1 to {longest}, as many as the tables have slots")
        return pages_of(np.ones(self.batch, dtype=np.int32), num_context, tables, block_size)


_HOPPER = 9  # major compute capability
NUM_STEPS = 2  # step plans that a lane holds: one is planned while another runs
NUM_PACKED = 4  # lists of segments: towers alternate between whole pictures and windows


@dataclass(frozen=True, slots=True, eq=False)
class FlashPlan:
    """`AttentionPlan.native` of a step that is not captured: its rows on the host, from which the first layer of each
    kind plans, and Triton's plan. Compares by identity, since `Wrappers` has it as a key."""

    num_decodes: int
    num_q: Int32s  # [B]
    num_context: Int32s  # [B]
    block_tables: Int32s  # [B, W]
    triton: CudaPlan


class Wrappers:
    """FlashInfer wrappers with equal options in one lane, at most `count`, each with its last plan. The least recently
    used one plans next."""

    def __init__(self, make: Callable[[], Any], count: int) -> None:
        self._make = make
        self._count = count
        self._held: dict[Hashable, tuple[Any, torch.cuda.Event]] = {}  # in LRU order; the event: its plan was copied

    def get_planned(self, key: Hashable, plan: Callable[[Any], None]) -> Any:
        """Returns the wrapper whose last plan has this key. If there is none, plans a new one or the least recently
        used one by `plan(wrapper)`, after waiting until the device has copied the latter's last plan."""
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


class _LaneWrappers(threading.local):
    """Wrappers and workspace of the calling lane's thread. Not shared between lanes: two at once would write to one
    workspace."""

    def __init__(self, library: Any, device: torch.device) -> None:
        self._library = library
        self._device = device
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._of_step: dict[Hashable, Wrappers] = {}
        self._retired: list[dict[Hashable, Wrappers]] = []  # kept alive: their plans may not have been copied yet
        self._of_graphs: dict[Kind, GraphBuffers] = {}

    def graphs(self, kind: Kind) -> GraphBuffers:
        """The lane's buffers of captured graphs for one kind of layer, made at first use."""
        return self._of_graphs.setdefault(kind, GraphBuffers(self._device))

    def workspace(self, num_bytes: int) -> Tensor:
        """Returns at least `num_bytes` for partial results, shared by all wrappers of the lane, whose steps run in
        order. Zeroed when allocated, as FlashInfer requires. A larger one than before is new memory, and new wrappers
        are made for it."""
        if num_bytes > self._workspace.shape[0]:
            self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
            self._retired.append(self._of_step)
            self._of_step = {}
        return self._workspace

    def wrappers(self, name: str, num_bytes: int, count: int, **options: Any) -> Wrappers:
        """The wrappers of FlashInfer's class Batch<name>KVCacheWrapper with these options, made when they are first
        needed, at most `count`. Their shared workspace has at least `num_bytes`."""
        workspace, key = self.workspace(num_bytes), (name, *options.values())
        if key not in self._of_step:
            make = getattr(self._library, f"Batch{name}KVCacheWrapper")
            self._of_step[key] = Wrappers(partial(make, workspace, kv_layout="NHD", **options), count)
        return self._of_step[key]


class FlashInferAttention:
    """FlashInfer's attention for a device with `num_sms` SMs.

    send: `Device.send`. by_triton: computes what FlashInfer does not support. library: the package, imported if None.
    decodes: False leaves them to Triton. prompts: FlashInfer's name of their kernels, "fa2", "fa3" or "auto"; None
    leaves them to Triton.
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
        self._lane = _LaneWrappers(self._library, device)

    # ---- plans

    def plan(self, cu_q: Tensor, num_context: Tensor, block_tables: Tensor) -> AttentionPlan:
        """Implements `Ops.plan_attention`. Copies all three tensors before it returns. FlashInfer plans in the first
        layer, which knows heads and block size."""
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
        """Implements `Ops.plan_decode`. The plan is Triton's if decodes are left to it. Otherwise call its `refresh`
        before its first use and before each replay, in the same thread and on the same stream."""
        plan = self._by_triton.plan_decode(num_context, block_tables)
        if not self._decodes:
            return plan
        batch, width = block_tables.shape
        native = GraphPlan(batch, width, plan.native)
        return replace(plan, native=native, refresh=native.refresh)

    def plan_mixed(self, rows: MixedRows, num_tokens: int, max_prompts: int) -> AttentionPlan:
        """Returns Triton's plan: FlashInfer plans prompts on the host and cannot read rows on the device. A small step
        gains more from being one graph than from faster attention."""
        return self._by_triton.plan_mixed(rows, num_tokens, max_prompts)

    def plan_packed(self, cu_seqlens: Tensor, max_length: int) -> PackedPlan:
        """Returns Triton's plan: FlashInfer plans on the host and cannot use such segments."""
        return self._by_triton.plan_packed(cu_seqlens, max_length)

    # ---- attention

    def paged(self, q: Tensor, cache: PagedCache, layer: int, plan: AttentionPlan, scale: float) -> Tensor:
        """Implements `Ops.attention_paged` for plans of this class and caches that are not quantized. Decodes, and
        likewise prompts, take Triton where FlashInfer has no kernel for their dtype and heads, or is not to be used."""
        native = plan.native
        if isinstance(native, CudaPlan):
            return self._by_triton.paged(q, cache, layer, plan, scale)
        assert isinstance(native, FlashPlan | GraphPlan), "a plan of other ops"
        decodes, prompts = self._supports_decodes(q, cache.data.shape[4]), self._kernel(self.wanted_prompts, q)
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

    def supports_packed(self, q: Tensor, cu_seqlens: Segments) -> bool:
        """True if FlashInfer has a kernel for rows like q, and the host, which plans, knows the segments: then
        `attend_packed` uses it, unless there are no rows."""
        return not isinstance(cu_seqlens, PackedPlan) and self._kernel("auto", q) is not None

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Segments, scale: float) -> Tensor:
        """Implements `Ops.attention_packed`; by Triton where `supports_packed` is False, and without rows."""
        kernel = self._kernel("auto", q)
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

    def _supports_decodes(self, q: Tensor, kv_heads: int) -> bool:
        """True if FlashInfer has a kernel for decodes of q [T, Hq, D] and is to be used for them."""
        _, heads, head_dim = q.shape
        kernel = flashinfer_kernels.decode_kernel(heads, kv_heads, head_dim)
        return self._decodes and _fits(q) and not self._kernels.reason_missing(kernel, q.dtype, head_dim)

    def _kernel(self, wanted: str | None, q: Tensor) -> str | None:
        """FlashInfer's name of the kernels to use for prompts or segments like q. None: Triton. wanted: as `prompts` of
        the class."""
        if wanted is None or not _fits(q):
            return None
        hopper = bool(self._kernels.problem) and self._hopper
        return self._kernels.prompts(wanted, q.dtype, q.shape[2], hopper=hopper)

    @cached_property
    def _hopper(self) -> bool:
        """True on a GPU of compute capability 9.x."""
        return self._device.type == "cuda" and torch.cuda.get_device_capability(self._device)[0] == _HOPPER

    # ---- wrappers

    def _captured(self, kind: Kind, native: GraphPlan) -> Any:
        """Returns FlashInfer's wrapper of a captured decode, made and planned at the first call for this kind, which is
        never part of the graph: `Device.capture` runs the step once before it captures."""
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
        """Returns FlashInfer's wrapper, planned for the step's decodes; all layers of this kind run the same plan."""

        def plan(wrapper: Any) -> None:
            _, *pages = self._pages(native, slice(native.num_decodes), kind)
            wrapper.plan(*pages, *kind.shape, **kind.settings)

        size, cores = workspace_bytes(kind, self._num_sms), kind.tensor_cores
        wrappers = self._lane.wrappers("DecodeWithPaged", size, NUM_STEPS, backend="fa2", use_tensor_cores=cores)
        return wrappers.get_planned((native, kind), plan)

    def _prefill(self, kind: Kind, native: FlashPlan, kernel: str) -> Any:
        """Returns FlashInfer's wrapper, planned for the step's rows after the decodes; all layers of this kind run the
        same plan. kernel: from `_kernel`."""

        def plan(wrapper: Any) -> None:
            pages = self._pages(native, slice(native.num_decodes, None), kind)
            wrapper.plan(*pages, *kind.shape, causal=True, **kind.settings)

        size = workspace_bytes(kind, self._num_sms)
        wrappers = self._lane.wrappers("PrefillWithPaged", size, NUM_STEPS, backend=kernel)
        return wrappers.get_planned((native, kind), plan)

    def _pages(self, native: FlashPlan, rows: slice, kind: Kind) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`Pages` of some rows as tensors: (cu_q, indptr, indices, last_page_len). FlashInfer reads plans on the host;
        only the list of blocks, which can be long, is sent to the device."""
        pages = pages_of(native.num_q[rows], native.num_context[rows], native.block_tables[rows], kind.block_size)
        (indices,) = self._send((pages.indices,))
        cu_q, indptr, last = (torch.from_numpy(part) for part in (pages.cu_q, pages.indptr, pages.last_page_len))
        return cu_q, indptr, indices, last


def _fits(q: Tensor) -> bool:
    """True if FlashInfer computes in q's dtype and with its head dim."""
    return q.dtype in DTYPES and q.shape[2] in HEAD_DIMS
