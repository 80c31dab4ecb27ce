"""FlashInfer's decodes in captured graphs: `run` is captured, and the host plans before each replay.

A graph keeps addresses and launch sizes. So pages and schedule are in buffers of a lane, one set per kind of layer,
since all kinds of a step are planned before the step is replayed; and a plan for other lengths must need the captured
launch. Copies to the device are ordered by the lane's stream; the pinned copy of the schedule is not, so a wrapper
plans again only after it has arrived. Written for FlashInfer 0.4 to 0.7.2. Does not know steps, nor eager plans.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend.cuda.attention import CudaPlan, Int32s
from hydra_engine.backend.cuda.flashinfer_kernels import takes_tensor_cores
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
    """Converts rows. Rows without queries are left out: they have no result, and may have no block."""
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
    result = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=result[1:])
    return result


class Kind(NamedTuple):
    """Parameters of a wrapper's plan besides the rows. block_size 0: keys are not paged."""

    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    scale: float

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.heads, self.kv_heads, self.head_dim, self.block_size

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of `plan`. Dtypes are always passed: the library's default is float16."""
        return {"q_data_type": self.dtype, "kv_data_type": self.dtype, "sm_scale": self.scale}

    @property
    def tensor_cores(self) -> bool:
        """True if decodes use them."""
        return takes_tensor_cores(self.heads, self.kv_heads, self.head_dim)


def workspace_bytes(kind: Kind, num_sms: int, captured_batch: int = 0) -> int:
    """Upper bound of FlashInfer's partial results: float32 per head, query tile and part of a context. A captured
    decode needs as many parts as its launch has blocks."""
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
        if not self._schedule.shape[0]:
            self._schedule = torch.empty(SCHEDULE_BYTES, dtype=torch.uint8, device=self._device)
        return self._schedule

    def pages(self, batch: int, max_pages: int) -> tuple[Tensor, Tensor, Tensor]:
        """(indptr [batch + 1], indices of at least `max_pages`, last_page_len [batch]), int32."""
        self._indptr = self._of(self._indptr, batch + 1)
        self._indices = self._of(self._indices, max_pages)
        self._last_page_len = self._of(self._last_page_len, batch)
        return self._indptr[: batch + 1], self._indices, self._last_page_len[:batch]

    def _of(self, present: Tensor, size: int) -> Tensor:
        if size <= present.shape[0]:
            return present
        return torch.zeros(size, dtype=torch.int32, device=self._device)


class GraphDecode:
    """A captured decode wrapper for one batch size and kind of layer. For the lane's thread."""

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
        """Plans on the current stream. Raises ValueError if FlashInfer's launch differs from the captured one."""
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
        """Raises ValueError if the launch changed: the library does not promise equal launches for equal batch sizes,
        and a graph with another launch would read out of its schedule's bounds."""
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
    """`AttentionPlan.native` of a captured decode step: `batch` rows of at most `width` blocks."""

    batch: int
    width: int
    triton: CudaPlan
    decodes: dict[Kind, GraphDecode] = field(default_factory=dict)
    rows: list[tuple[Int32s, Int32s]] = field(default_factory=list)  # (num_context, block_tables) of the last refresh

    def refresh(self, num_context: Int32s, block_tables: Int32s) -> None:
        """`AttentionPlan.refresh`: plans all kinds of layers for new contents."""
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
        if not self.rows:
            raise ValueError("plan: expected one that was refreshed, whose rows are known to the host")
        ((num_context, tables),) = self.rows
        longest = tables.shape[1] * block_size
        if num_context.min(initial=1) < 1 or num_context.max(initial=1) > longest:
            raise ValueError(f"num_context: expected 1 to {longest}, as many as the tables have slots")
        return pages_of(np.ones(self.batch, dtype=np.int32), num_context, tables, block_size)
