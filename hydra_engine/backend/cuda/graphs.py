"""Captures launches as CUDA graphs, and measures their memory. Does not know what is captured."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch

from hydra_engine.backend.cuda.copies import failure
from hydra_engine.backend.device import Cut

Launch = Callable[[Cut], None]

Pool = Any  # a memory pool of torch.cuda.graph_pool_handle

# Torch's text if the driver has no memory, as for a graph that was captured; its allocator raises OutOfMemoryError.
_NO_MEMORY = "CUDA error: out of memory"
# Torch allows one capture at a time in a process.
_CAPTURING = threading.Lock()
# Kept alive: torch's allocator of pinned memory keeps calling them.
_FAILED: list[torch.cuda.CUDAGraph] = []


class CudaGraph:
    """`Graph` of backend/device.py. Keeps what `launch` refers to: a replay reads the memory of the capture. num_bytes:
    0 for all pieces of a launch but the first."""

    def __init__(self, graph: torch.cuda.CUDAGraph, num_bytes: int, launch: Launch) -> None:
        self.num_bytes = num_bytes
        self._graph = graph
        self._launch = launch

    def replay(self) -> None:
        """Replays on the calling thread's current stream, in inference mode as in the capture: torch keeps tensors of
        its own for the graphs of a process, which can only be written in the mode that made them."""
        with torch.inference_mode():
            self._graph.replay()


class GraphPools:
    """Captures graphs, with one memory pool per stream: graphs of one stream never run at the same time and share
    memory."""

    def __init__(self, device: torch.device) -> None:
        self.kept_free = 0  # bytes of device memory that graphs leave
        self._device = device
        # The last captured graph of each stream, by stream handle: torch frees a pool that no graph uses.
        self._last: dict[int, torch.cuda.CUDAGraph] = {}
        self._side: torch.cuda.Stream | None = None  # for threads without a stream of their own

    def capture(self, launch: Callable[[], None]) -> CudaGraph:
        """Captures `launch` as one graph; streams and errors as in `capture_pieces`."""
        (graph,) = self.capture_pieces(lambda _: launch())
        return graph

    def capture_pieces(self, launch: Launch) -> tuple[CudaGraph, ...]:
        """Runs `launch` to warm up, then captures it as graphs that are cut where it calls its argument.

        Captures on the calling thread's current stream, or on a side stream if that is the default stream, which cannot
        be captured. Other threads may launch on other streams meanwhile, but not capture: they wait. Raises
        BackendError if `launch` cannot be captured, and torch.OutOfMemoryError.
        """
        with _CAPTURING, torch.inference_mode():
            stream = torch.cuda.current_stream(self._device)
            if stream == torch.cuda.default_stream(self._device):
                return self._capture_beside(launch, stream)
            return self._capture(launch, stream)

    def _capture_beside(self, launch: Launch, stream: torch.cuda.Stream) -> tuple[CudaGraph, ...]:
        """Captures on the side stream, which waits for the present work on `stream`; later work on `stream` waits for
        the warm-up."""
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)
        self._side.wait_stream(stream)
        with torch.cuda.stream(self._side):
            graphs = self._capture(launch, self._side)
        stream.wait_stream(self._side)
        return graphs

    def _capture(self, launch: Launch, stream: torch.cuda.Stream) -> tuple[CudaGraph, ...]:
        """Runs `launch` once, waits for it, empties torch's cache, and captures it in the stream's memory pool, beside
        `kept_free` bytes. Replays the graphs once, since the driver may take memory then. The first graph counts the
        device memory that all of them took. If memory runs out, no graph of the stream is kept here, so that the pool
        is freed with the caller's graphs."""
        try:
            # Warm-up: compiles and loads kernels and makes this stream's workspaces, which cannot be captured.
            launch(_no_cut)
            stream.synchronize()
            last = self._last.get(stream.cuda_stream)
            pool = torch.cuda.graph_pool_handle() if last is None else last.pool()
            torch.cuda.empty_cache()
            kept = torch.empty(self.kept_free, dtype=torch.uint8, device=self._device)
            free_before, _ = torch.cuda.mem_get_info(self._device)
            graphs = self._record(launch, pool, stream)
            for graph in graphs:
                graph.replay()
            stream.synchronize()
            free_after, _ = torch.cuda.mem_get_info(self._device)
            del kept
        except torch.OutOfMemoryError:
            # The caller may drop its last graph too, and then wants the memory back.
            self._last.pop(stream.cuda_stream, None)
            raise
        except RuntimeError as error:
            raise self._cause(error) from error
        self._last[stream.cuda_stream] = graphs[-1]
        num_bytes = max(0, free_before - free_after)
        return tuple(CudaGraph(graph, 0 if index else num_bytes, launch) for index, graph in enumerate(graphs))

    def _cause(self, error: RuntimeError) -> Exception:
        """The error to raise for a capture that failed with `error`: OutOfMemoryError or BackendError, made from what
        was raised inside the capture, the context of `error`; from `error` itself if that is no RuntimeError."""
        inside = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        if isinstance(inside, torch.OutOfMemoryError) or _NO_MEMORY in str(inside):
            return torch.OutOfMemoryError(str(inside))  # a new one: the traceback of this one keeps memory
        return failure(self._device, inside)

    def _record(self, launch: Launch, pool: Pool, stream: torch.cuda.Stream) -> list[torch.cuda.CUDAGraph]:
        """Records `launch` on the current stream: a graph per piece. On an error torch's state is restored, unless the
        device itself has failed, and later graphs of the stream get a new pool."""
        graphs: list[torch.cuda.CUDAGraph] = []
        captured = ExitStack()

        def begin() -> None:
            """Starts to record the next graph."""
            graphs.append(torch.cuda.CUDAGraph())
            captured.enter_context(
                torch.cuda.graph(graphs[-1], pool=pool, stream=stream, capture_error_mode="thread_local")
            )

        def cut() -> None:
            """Ends the present graph and begins the next."""
            captured.close()
            begin()

        try:
            with captured:
                begin()
                launch(cut)
        except BaseException:
            # The allocator of pinned memory keeps recording and refuses this pool from now on.
            self._last.pop(stream.cuda_stream, None)
            with suppress(RuntimeError):
                self._take_back(graphs[-1], pool, stream)
            raise
        return graphs

    def _take_back(self, graph: torch.cuda.CUDAGraph, pool: Pool, stream: torch.cuda.Stream) -> None:
        """Restores torch's state after a capture that failed, since `capture_end` throws before it resets it.

        Otherwise the allocator would treat the capture as running and free no memory; before torch 2.13 the random
        generator would too, and refuse draws and replays. Raises RuntimeError if the capture has ended.
        """
        torch._C._cuda_endAllocateToPool(self._device.index, pool)
        torch._C._cuda_releasePool(self._device.index, pool)
        graph.reset()
        _FAILED.append(graph)
        # The generator resets at the end of the next capture that succeeds.
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            torch.zeros(1, device=self._device)


def _no_cut() -> None:
    """Does nothing: the `Cut` of the warm-up, which is not captured."""
