"""Streams of an emulated device: what was issued to them, what is known to be done, and what is done late.

Nothing is done before somebody waits for it: a copy to the host arrives, and a copy from pinned memory is checked to
have found that memory as it was, when its stream is waited for. So what is read or changed too early is wrong every
time and not now and then. With a clock (clock.py) what is issued takes time too. Does not know tensors.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tests.emulated.captures import Captures
from tests.emulated.clock import Clock, Line, Mark, Work

if TYPE_CHECKING:
    from tests.emulated.graphs import Trace

PACKAGE = f"{Path(__file__).parents[2] / 'hydra_engine'}/"


class Finding(NamedTuple):
    """Something that a device would punish, and the line of the engine that did it."""

    what: str
    place: str  # "worker/language/step.py:61 PromptScoring._take"

    @property
    def function(self) -> str:
        """The place without its line number, which moves: "worker/language/step.py PromptScoring._take"."""
        file, _, rest = self.place.partition(":")
        return f"{file} {rest.partition(' ')[2]}"


class Streams:
    """The streams of one device, which of them each thread works on, and what was found. One lock for all. With a
    clock, threads that take part in its time pay for what they launch, and wait until the device has done it."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self.findings: Counter[Finding] = Counter()
        self.serving = False  # from then on lanes must not wait for the device
        self.begins_early = True  # kernels of the package do (dependent launch)
        self._handles = itertools.count()
        self.default = Stream(self, "default")
        self.by_handle = {self.default.cuda_stream: self.default}
        self._of_thread = threading.local()
        self.working = threading.Event()  # unset: whoever waits for the device waits until it is set
        self.working.set()
        self.waiting = threading.Event()  # somebody waits, or did
        self.captures = Captures()
        self.memory: Any = None  # of the device: `Present` of tensors.py

    def make(self, name: str = "", part: frozenset[int] = frozenset(), priority: int = 0) -> Stream:
        """`part`: multiprocessors of its own; empty: it runs on all."""
        if priority and self.begins_early:
            self.found("a stream that goes first, on a device whose kernels begin early")
        with self.lock:
            made = Stream(self, name, part, priority)
            self.by_handle[made.cuda_stream] = made
        return made

    @property
    def current(self) -> Stream:
        found: Stream = getattr(self._of_thread, "stream", self.default)
        return found

    def has_device(self) -> None:
        """The calling thread has said which device it works on."""
        self._of_thread.has_device = True

    @contextmanager
    def having_device(self) -> Iterator[None]:
        """Sets `has_device` for the calling thread inside."""
        before = getattr(self._of_thread, "has_device", False)
        self._of_thread.has_device = True
        try:
            yield
        finally:
            self._of_thread.has_device = before

    def check_device(self) -> None:
        """Records a finding if the thread has not set its device before it asks an event or waits for one: torch
        uses the thread's device, whatever the event's is. The main thread is exempt: it builds an instance and names
        the device each time."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main and not getattr(self._of_thread, "has_device", False):
            self.found("an event, by a thread that has not set its device")

    def use(self, stream: Stream) -> None:
        self._of_thread.stream = stream

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        before = self.current
        self.use(stream)
        try:
            yield
        finally:
            self.use(before)

    def found(self, what: str) -> None:
        with self.lock:
            self.findings[Finding(what, place_in_engine())] += 1

    @property
    def timing(self) -> Clock | None:
        """The clock, for a thread that takes part in its time."""
        return self.clock if self.clock is not None and self.clock.time.takes_part else None

    def check_part(self) -> None:
        """Records a finding if kernels of another stream, unless this one comes after it, are in flight on
        multiprocessors of the calling thread's stream. Streams of the whole device share it on purpose."""
        stream = self.current
        if not stream.part or not self.serving:
            return
        with self.lock:
            for other in self.by_handle.values():
                if other.part & stream.part and not stream.is_behind(other, other.kernels):
                    self.found("shares multiprocessors with another lane's part")
            stream.kernels = stream.issued

    def launch(self, work: Work) -> None:
        """A kernel on the calling thread's stream; without the lock, for other threads may run until it returns."""
        stream = self.current
        if not self.begins_early:
            work = work._replace(is_dependent=False)
        if stream.trace is not None:
            stream.trace.works.append(work)
            return
        self.check_part()
        if self.timing is not None:
            self.timing.launch(stream.line, stream.scaled(work))

    def wait_for_device(self) -> None:
        self.waiting.set()
        assert self.working.wait(90), "nobody lets the device work"

    def check_draw(self) -> None:
        """Raises torch's error if random numbers are drawn, or a graph is replayed that may draw some, outside a
        capture."""
        if self.captures.draws and self.current.trace is None:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    def waits(self, what: str) -> None:
        """An op that returns only when all before it is done, and that no capture permits."""
        stream = self.current
        if stream.trace is not None:
            stream.trace.is_invalid = True
            self.found(f"{what} while a graph is captured")
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
        if self.serving and stream is not self.default:
            self.found(f"{what} waits for the device")
        stream.synchronize()


class Stream:
    """`scale`: how many times the work of a kernel counts on the clock, where a small model stands for a large one,
    and `flop_scale` its FLOP besides."""

    def __init__(self, streams: Streams, name: str, part: frozenset[int] = frozenset(), priority: int = 0) -> None:
        make_line = Line if streams.clock is None else streams.clock.line
        self.line = make_line(len(part), priority)
        self.part, self.priority = part, priority
        self.scale = self.flop_scale = 1.0
        self.cuda_stream: int = next(streams._handles)
        self.name = name or f"stream {self.cuda_stream}"
        self.issued = 0
        self.done = 0
        self.kernels = 0  # the number of the last launch that runs on multiprocessors
        self.behind: dict[Stream, int] = {}  # what of other streams comes before all that is issued from now on
        self.trace: Trace | None = None  # a graph is captured from what is issued
        self._streams = streams
        self._late: deque[tuple[int, Callable[[], None]]] = deque()

    def issue(self, late: Callable[[], None] | None = None) -> int:
        """The number of one more launch; `late` is called when it is known to be done."""
        with self._streams.lock:
            self.issued += 1
            if late is not None:
                self._late.append((self.issued, late))
            return self.issued

    def is_behind(self, other: Stream, number: int) -> bool:
        """True if what is issued here now comes after that launch of another stream."""
        return other is self or other.done >= number or self.behind.get(other, 0) >= number

    def complete(self, number: int) -> None:
        with self._streams.lock:
            while self._late and self._late[0][0] <= number:
                self._late.popleft()[1]()
            self.done = max(self.done, number)

    def scaled(self, work: Work) -> Work:
        return work._replace(flop=work.flop * self.scale * self.flop_scale, num_bytes=work.num_bytes * self.scale)

    # ---- as torch.cuda.Stream

    def synchronize(self) -> None:
        issued = self.issued
        if (clock := self._streams.timing) is not None:
            clock.wait(clock.record(self.line))
        if self.done < issued:
            self._streams.wait_for_device()
        self.complete(issued)

    def query(self) -> bool:
        if (clock := self._streams.timing) is not None and clock.is_done(clock.record(self.line)):
            self.complete(self.issued)
        return self.done == self.issued

    def wait_event(self, event: Event) -> None:
        if event.stream is None or event.stream is self:
            return
        with self._streams.lock:
            for other, number in (*event.behind.items(), (event.stream, event.number)):
                if other is not self:
                    self.behind[other] = max(self.behind.get(other, 0), number)
        if event.mark is not None and (clock := self._streams.timing) is not None:
            clock.order(self.line, event.mark)
        stream, number = event.stream, event.number
        self.issue(lambda: stream.complete(number))

    def wait_stream(self, other: Stream) -> None:
        event = Event(self._streams)
        event.record(other)
        self.wait_event(event)


class Event:
    """Emulates torch.cuda.Event."""

    def __init__(self, streams: Streams, *, enable_timing: bool = False) -> None:
        self._streams = streams
        self._is_timed = enable_timing
        self.mark: Mark | None = None
        self.stream: Stream | None = None
        self.number = 0
        self.behind: dict[Stream, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._streams.current
        assert stream.trace is None, "an event of a stream that is captured"
        with self._streams.lock:
            self.stream, self.number, self.behind = stream, stream.issue(), dict(stream.behind)
        if (clock := self._streams.timing) is not None:
            self.mark = clock.record(stream.line)

    def synchronize(self) -> None:
        self._streams.check_device()
        if self.stream is not None:
            if self.mark is not None and (clock := self._streams.timing) is not None:
                clock.wait(self.mark)
            if self.stream.done < self.number:
                self._streams.wait_for_device()
            self.stream.complete(self.number)

    def query(self) -> bool:
        self._streams.check_device()
        if self.stream is None:
            return True
        if self.mark is not None and (clock := self._streams.timing) is not None and clock.is_done(self.mark):
            self.stream.complete(self.number)
        return self.stream.done >= self.number

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds, as float32."""
        for event in (self, end):
            if not event._is_timed or event.stream is None:
                raise ValueError("both events must be recorded before calculating elapsed time")
            if not event.query():
                raise RuntimeError("CUDA error: device not ready")
        if self.mark is None or end.mark is None:
            return 0.0  # nothing takes time without a clock
        assert self.mark.done_s is not None and end.mark.done_s is not None
        return float(np.float32((end.mark.done_s - self.mark.done_s) * 1e3))


def place_in_engine() -> str:
    """The innermost line of the engine on this thread's stack."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            function = frame.f_code.co_qualname.split(".<locals>")[0]
            return f"{name.removeprefix(PACKAGE)}:{frame.f_lineno} {function}"
        frame = frame.f_back  # type: ignore[assignment]
    return "tests"
