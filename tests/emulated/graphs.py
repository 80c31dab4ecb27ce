"""Graphs of an emulated device: the ops of a capture, run again on the memory that they were captured with.

As on a device nothing of the engine's runs in a replay: what it decided while it was captured stays as it was, memory
that was freed since holds something else, and what the capture made and let go holds garbage when a replay begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tests.emulated.captures import Pool
from tests.emulated.clock import Work
from tests.emulated.streams import Stream, Streams

if TYPE_CHECKING:
    from tests.emulated.tensors import Memory, OnDevice

GARBAGE = 0x7F  # bytes; as indices out of every range, as floats almost infinite


class Trace:
    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.is_invalid = False  # something was done that no capture permits
        self._steps: list[Callable[[], Any]] = []
        self.works: list[Work] = []  # of its kernels
        self.priority = 0  # of the stream that was captured, which its kernels keep
        self.launched: list[str] = []  # names of Triton's kernels, and "cache" for those of the extension
        self._kept: list[Tensor] = []
        self._made: list[tuple[weakref.ref[Memory], torch.UntypedStorage]] = []
        self._read: weakref.WeakSet[Memory] = weakref.WeakSet()
        self._written: weakref.WeakSet[Memory] = weakref.WeakSet()

    def makes(self, memory: Memory) -> None:
        """Memory of the capture belongs to the graph from then on; other memory stays its owner's."""
        memory.lasting = True
        self._made.append((weakref.ref(memory), memory.storage))

    def uses_address(self, tensor: OnDevice) -> None:
        self._kept.append(tensor.held)

    def touches(self, read: Iterable[Memory], written: Iterable[Memory]) -> None:
        self._read.update(read)
        self._written.update(written)

    def add(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any], outs: Sequence[Tensor]) -> None:
        """`outs`: what the op has made."""

        def again() -> None:
            found = op(*args, **kwargs)
            for out, value in zip(outs, [found] if isinstance(found, Tensor) else found, strict=bool(outs)):
                out.copy_(value)

        self._steps.append(again)

    def call(self, again: Callable[[], Any]) -> None:
        self._steps.append(again)

    def replay(self) -> None:
        with self._streams.lock, torch.inference_mode():
            stream = self._streams.current
            number = stream.issue()
            for memory in self._read - self._written:
                memory.touch(stream, number, write=False)
            for memory in self._written:
                memory.touch(stream, number, write=True)
            for reference, storage in self._made:
                if reference() is None:
                    storage.fill_(GARBAGE)  # type: ignore[attr-defined]
            for step in self._steps:
                step()
        self._streams.check_part()
        if (clock := self._streams.timing) is not None:
            clock.replay(stream.line, [stream.scaled(work) for work in self.works], self.priority)


class CUDAGraph:
    """Emulates torch.cuda.CUDAGraph."""

    def __init__(self, streams: Streams) -> None:
        self.trace = Trace(streams)
        self.place: Pool | None = None
        self.has_ended = False
        self._streams = streams

    def pool(self) -> Pool:
        if self.place is None or not self.has_ended:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.place

    def replay(self) -> None:
        assert self.has_ended, "a graph is replayed before its capture has ended"
        self._streams.check_draw()
        self.trace.replay()

    def reset(self) -> None:
        if self.has_ended:
            self._streams.captures._cuda_releasePool(0, self.pool())
        self.has_ended = False


class Capturing:
    """Emulates torch.cuda.graph."""

    def __init__(self, streams: Streams, graph: CUDAGraph, stream: Stream, pool: Pool | None) -> None:
        assert stream is not streams.default, "the default stream cannot be captured"
        graph.place = pool or Pool()
        self._streams, self._graph, self._stream, self._pool = streams, graph, stream, graph.place

    def __enter__(self) -> None:
        self._stream.synchronize()
        self._before = self._streams.current
        self._streams.use(self._stream)
        self._streams.captures.begin(self._pool)
        self._taken = self._streams.memory.captured_in(self._pool)
        self._taken.__enter__()
        self._stream.trace = self._graph.trace
        self._graph.trace.priority = self._stream.priority

    def __exit__(self, *raised: Any) -> None:
        self._stream.trace = None
        self._taken.__exit__(*raised)
        if self._graph.trace.is_invalid:  # no error is reported, and the thread stays on the stream
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self._streams.captures.end(self._pool)
        self._graph.has_ended = True
        self._streams.use(self._before)
