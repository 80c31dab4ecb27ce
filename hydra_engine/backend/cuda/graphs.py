"""Capturing launches as CUDA graphs, and what they cost in memory. Does not know what is captured."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from hydra_engine.backend.cuda.copies import failure

Launch = Callable[[], None]

# Torch allows one capture at a time in a process.
_CAPTURING = threading.Lock()


class CudaGraph:
    """`Graph` of backend/device.py. Keeps what `launch` refers to: a replay reads the memory of the capture."""

    def __init__(self, graph: torch.cuda.CUDAGraph, num_bytes: int, launch: Launch) -> None:
        self.num_bytes = num_bytes
        self._graph = graph
        self._launch = launch

    def replay(self) -> None:
        """On the calling thread's current stream. In inference mode, as it was captured: torch keeps tensors of its own
        for the graphs of a process, which it may not write otherwise."""
        with torch.inference_mode():
            self._graph.replay()


class GraphPools:
    """Memory of graphs, one pool for each stream: those of one stream never run at the same time and share it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Of each stream, by its handle, the graph that was captured last: torch gives up a pool that no graph has.
        self._last: dict[int, torch.cuda.CUDAGraph] = {}
        self._side: torch.cuda.Stream | None = None  # for threads without a stream of their own
        self._failed: list[torch.cuda.CUDAGraph] = []  # the allocator may go on asking them what belongs to them

    def capture(self, launch: Launch) -> CudaGraph:
        """On the calling thread's current stream, or beside it where that is the default one, which cannot be captured.
        Other threads may launch meanwhile, on other streams. Raises BackendError where `launch` cannot be captured."""
        with _CAPTURING, torch.inference_mode():
            stream = torch.cuda.current_stream(self._device)
            if stream == torch.cuda.default_stream(self._device):
                return self._capture_beside(launch, stream)
            return self._capture(launch, stream)

    def _capture_beside(self, launch: Launch, stream: torch.cuda.Stream) -> CudaGraph:
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)
        self._side.wait_stream(stream)
        with torch.cuda.stream(self._side):
            graph = self._capture(launch, self._side)
        stream.wait_stream(self._side)
        return graph

    def _capture(self, launch: Launch, stream: torch.cuda.Stream) -> CudaGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            # Compiles kernels, loads them and makes workspaces for this stream, none of which can be captured.
            launch()
            stream.synchronize()
            last = self._last.get(stream.cuda_stream)
            pool = torch.cuda.graph_pool_handle() if last is None else last.pool()
            torch.cuda.empty_cache()
            free_before, _ = torch.cuda.mem_get_info(self._device)
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                launch()
            free_after, _ = torch.cuda.mem_get_info(self._device)
        except RuntimeError as error:
            self._failed.append(graph)
            self._last.pop(stream.cuda_stream, None)  # to the allocator its pool may be in use for ever
            raise failure(self._device, error) from error
        self._last[stream.cuda_stream] = graph
        return CudaGraph(graph, max(0, free_before - free_after), launch)
