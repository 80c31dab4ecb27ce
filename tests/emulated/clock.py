"""Time on an emulated device: what each kernel takes alone, how kernels of several streams slow each other, and when.

`Machine` has the figures, `Clock` the streams in virtual time (virtual_time.py): a launch costs its host thread time, a
kernel begins behind those before it on its stream, and a thread that waits for a mark goes on when the device has come
there. Nothing depends on the real time. Does not know tensors: works are given.

How kernels share. A kernel alone takes the longer of its FLOP and its bytes over the machine's rates, and a gap before
it. Streams of the whole device share its multiprocessors equally while they have kernels, and a kernel that begins
beside another one on the same multiprocessors first waits for blocks of that one to end, which are long where it
multiplies; streams with multiprocessors of their own neither share them nor wait. Products are as fast as the share is
large; reads are at full speed from `read_share` of the multiprocessors on, and all streams share the bandwidth. The
processor's threads do not slow each other, and the device has no power limit.

Priorities. A stream that goes first leaves the others `left_share` of the multiprocessors while a kernel of it runs,
and all of them in its gaps and while its kernel waits for their blocks. Kernels that begin early (dependent launch)
take that away: the programs of the next one stand ready while the one before it runs, and take each place that falls
free. A graph has the priority of the stream on which it was captured. `left_share` is what encodes of two pictures
beside steps of 8 requests were measured to have on an H200; figures of other pairs follow (test_clock.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from math import inf
from typing import NamedTuple

from tests.emulated.virtual_time import Member, VirtualTime

SHORTEST_S = 1e-9  # of a kernel's work


class Work(NamedTuple):
    """Costs of a kernel. `is_dependent`: it is launched to begin early, and lets the next one do so."""

    flop: float = 0.0
    num_bytes: float = 0.0
    is_dependent: bool = False


@dataclass(frozen=True)
class Machine:
    """An H200, by the ceilings and assumptions of the benchmarks' notes."""

    flop_per_s: float = 790e12
    bytes_per_s: float = 4.3e12
    multiprocessors: int = 132
    read_share: float = 0.6  # 64 to 80 of 132 reach 90 % of the bandwidth
    gap_s: float = 1.3e-6  # from kernel to kernel of a stream
    graph_s: float = 5e-6  # more before the first kernel of a graph
    block_s: float = 20e-6  # of a large kernel's blocks, for which one that begins beside it waits
    left_share: float = 0.058  # of the multiprocessors, beside a kernel that goes first
    launch_s: float = 10e-6  # of the processor, for one kernel from Python
    replay_s: float = 20e-6  # of the processor, for one graph
    wake_s: float = 10e-6  # from a mark on the device to the thread that waits for it

    def alone_s(self, work: Work, share: float = 1.0) -> float:
        """Seconds of a kernel on that share of the multiprocessors, without its gap."""
        reads = min(1.0, share / self.read_share)
        return max(work.flop / self.flop_per_s / share, work.num_bytes / self.bytes_per_s / reads)


class Mark:
    """A point on a stream, and when the device was there."""

    def __init__(self, issued_s: float) -> None:
        self.issued_s = issued_s
        self.done_s: float | None = None
        self.waiting: deque[Member] = deque()


class _Order(NamedTuple):
    """Orders the line's later items after the mark."""

    issued_s: float
    mark: Mark


class _Kernel:
    """`left`: of its work, 1 to 0. `delay_s`: of its gap, and of its wait for blocks of another one. `is_early`: its
    programs stand ready while the kernel before it runs."""

    def __init__(self, issued_s: float, work: Work, gap_s: float, priority: int, *, is_early: bool) -> None:
        self.issued_s, self.work, self.gap_s = issued_s, work, gap_s
        self.priority, self.is_early = priority, is_early
        self.begun_s: float | None = None
        self.delay_s = 0.0
        self.left = 1.0


class Line:
    """Items issued to a stream that are not over. `multiprocessors`: of its own, 0: the device's, which it shares.
    `priority`: the smaller, the earlier its blocks begin."""

    def __init__(self, multiprocessors: int, priority: int = 0) -> None:
        self.multiprocessors, self.priority = multiprocessors, priority
        self.items: deque[_Kernel | Mark | _Order] = deque()
        self.lets_next_begin = False  # the last launch, to one right behind it
        self.spans: list[tuple[float, float]] = []  # of each kernel that has ended, its gap before it included

    def add_kernel(self, issued_s: float, work: Work, gap_s: float, priority: int) -> None:
        is_early = work.is_dependent and self.lets_next_begin
        self.items.append(_Kernel(issued_s, work, gap_s, priority, is_early=is_early))
        self.lets_next_begin = work.is_dependent

    def add_point(self, item: Mark | _Order) -> None:
        self.items.append(item)
        self.lets_next_begin = False

    @property
    def running(self) -> _Kernel | None:
        head = self.items[0] if self.items else None
        return head if isinstance(head, _Kernel) and head.begun_s is not None else None


class Clock:
    """`time` runs the threads that take part; all else but `line` is for them."""

    def __init__(self, machine: Machine | None = None) -> None:
        self.machine = machine or Machine()
        self.time = VirtualTime(self)
        self._lines: list[Line] = []
        self._now_s = 0.0

    def line(self, multiprocessors: int = 0, priority: int = 0) -> Line:
        self._lines.append(made := Line(multiprocessors, priority))
        return made

    # ---- threads

    def now(self) -> float:
        """Seconds of the calling thread, for hydra_engine/clock.py."""
        return self.time.now()

    def launch(self, line: Line, work: Work) -> None:
        line.add_kernel(self.now() + self.machine.launch_s, work, self.machine.gap_s, line.priority)
        self.time.spend(self.machine.launch_s)

    def replay(self, line: Line, works: Sequence[Work], priority: int | None = None) -> None:
        """`priority`: of the stream on which the graph was captured, if it was not this one."""
        issued_s = self.now() + self.machine.replay_s
        gaps_s = chain((self.machine.gap_s + self.machine.graph_s,), repeat(self.machine.gap_s))
        line.lets_next_begin = False
        for work, gap_s in zip(works, gaps_s, strict=False):
            line.add_kernel(issued_s, work, gap_s, line.priority if priority is None else priority)
        self.time.spend(self.machine.replay_s)

    def record(self, line: Line) -> Mark:
        line.add_point(mark := Mark(self.now()))
        return mark

    def order(self, line: Line, behind: Mark) -> None:
        """Launches on the line from now on begin after the mark."""
        line.add_point(_Order(self.now(), behind))

    def wait(self, mark: Mark) -> None:
        self.time.turn()
        if mark.done_s is None:
            self.time.wait_in(mark.waiting)

    def is_done(self, mark: Mark) -> bool:
        self.time.turn()
        return mark.done_s is not None

    # ---- the device

    def advance(self, until_s: float) -> bool:
        """Implements `Outside.advance` of virtual_time.py."""
        while not self._settle():
            running = [(line, line.running) for line in self._lines if line.running is not None]
            kernels = [kernel for _, kernel in running if kernel is not None]
            rates = self._rates([line for line, _ in running], kernels)
            ends = [
                self._now_s + (kernel.delay_s or kernel.left / rate)
                for kernel, rate in zip(kernels, rates, strict=True)
            ]
            heads = (line.items[0].issued_s for line in self._lines if line.items)
            next_s = min(until_s, *ends, *(issued_s for issued_s in heads if issued_s > self._now_s), inf)
            if next_s == self._now_s or next_s == inf:
                return False
            for kernel, rate, end_s in zip(kernels, rates, ends, strict=True):
                _pass(kernel, next_s - self._now_s, rate, ends_now=end_s <= next_s)
            self._now_s = next_s
        return True

    def _settle(self) -> bool:
        """Applies the events of this time: kernels end and begin, marks are reached. True if a thread was woken."""
        woken = changed = False
        while not changed:
            changed = True
            for line in self._lines:
                while line.items and line.items[0].issued_s <= self._now_s:
                    head = line.items[0]
                    if isinstance(head, _Kernel):
                        if head.begun_s is None:
                            head.begun_s, head.delay_s = self._now_s, head.gap_s + self._wait_s(line, head)
                        if head.left > 0:
                            break
                        line.spans.append((head.begun_s, self._now_s))
                    elif isinstance(head, Mark):
                        head.done_s = self._now_s
                        for member in [*head.waiting]:
                            self.time.wake(member, self._now_s + self.machine.wake_s)
                            woken = True
                    elif head.mark.done_s is None:
                        break
                    line.items.popleft()
                    changed = False
        return woken

    def _wait_s(self, line: Line, begins: _Kernel) -> float:
        """Seconds until blocks of other streams end. A kernel that begins early took its places as those of its own
        stream became free, unless another stream has the same priority or goes first."""
        if line.multiprocessors:
            return 0.0
        others = [other.running for other in self._lines if other is not line and not other.multiprocessors]
        left = (
            kernel.left * kernel.work.flop / self.machine.flop_per_s
            for kernel in others
            if kernel and not kernel.delay_s and not (begins.is_early and begins.priority < kernel.priority)
        )
        return min(self.machine.block_s, max(left, default=0.0))

    def _rates(self, lines: Sequence[Line], kernels: Sequence[_Kernel]) -> list[float]:
        """Rates of the kernels, in shares of their whole work per second."""
        machine = self.machine
        shared = [kernel for line, kernel in zip(lines, kernels, strict=True) if not line.multiprocessors]
        shares = [
            line.multiprocessors / machine.multiprocessors or self._share(kernel, shared)
            for line, kernel in zip(lines, kernels, strict=True)
        ]
        rates = [
            1 / max(SHORTEST_S, machine.alone_s(kernel.work, share))
            for kernel, share in zip(kernels, shares, strict=True)
        ]
        asked = [(rate, kernel.work) for rate, kernel in zip(rates, kernels, strict=True) if not kernel.delay_s]
        flop = sum(rate * work.flop for rate, work in asked) / machine.flop_per_s
        num_bytes = sum(rate * work.num_bytes for rate, work in asked) / machine.bytes_per_s
        return [rate / max(1.0, flop, num_bytes) for rate in rates]

    def _share(self, kernel: _Kernel, shared: Sequence[_Kernel]) -> float:
        """The share of the streams' multiprocessors that one of these kernels has."""
        left = self.machine.left_share
        working = [other.priority for other in shared if not other.delay_s]
        alike = max(1, working.count(kernel.priority))
        if any(other.priority < kernel.priority and (not other.delay_s or other.is_early) for other in shared):
            return left / alike
        return (1 - left * any(other > kernel.priority for other in working)) / alike


def _pass(kernel: _Kernel, seconds: float, rate: float, *, ends_now: bool) -> None:
    if kernel.delay_s:
        kernel.delay_s = 0.0 if ends_now else kernel.delay_s - seconds
    else:
        kernel.left = 0.0 if ends_now else kernel.left - seconds * rate
