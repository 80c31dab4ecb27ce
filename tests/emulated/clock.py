"""Time on an emulated device: what each kernel takes alone, how kernels of several streams slow each other, and when.

`Machine` has the figures, `Clock` the streams in virtual time (virtual_time.py): a launch costs its host thread time, a
kernel begins behind those before it on its stream, and a thread that waits for a mark goes on when the device has come
there. Nothing depends on the real time. Does not know tensors: works are given.

How kernels share. A kernel alone takes the longer of its FLOP and its bytes over the machine's rates, and a gap before
it. Streams of the whole device share its multiprocessors equally while they have kernels, and a kernel that begins
beside another one on the same multiprocessors first waits for blocks of that one to end; streams with multiprocessors
of their own neither share them nor wait. Products are as fast as the share is large; reads are at full speed from
`read_share` of the multiprocessors on, and all streams share the bandwidth. The processor's threads do not slow each
other, and the device has no power limit.
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
    """What a kernel computes and moves."""

    flop: float = 0.0
    num_bytes: float = 0.0


@dataclass(frozen=True)
class Machine:
    """One H200, by the ceilings and assumptions of the benchmarks' notes."""

    flop_per_s: float = 790e12
    bytes_per_s: float = 4.3e12
    multiprocessors: int = 132
    read_share: float = 0.6  # 64 to 80 of 132 reach 90 % of the bandwidth
    gap_s: float = 1.3e-6  # from kernel to kernel of a stream
    graph_s: float = 5e-6  # more before the first kernel of a graph
    block_s: float = 20e-6  # of a large kernel's blocks, for which one that begins beside it waits
    launch_s: float = 10e-6  # of the processor, for one kernel from Python
    replay_s: float = 20e-6  # of the processor, for one graph
    wake_s: float = 10e-6  # from a mark on the device to the thread that waits for it

    def alone_s(self, work: Work, share: float = 1.0) -> float:
        """Of a kernel on that share of the multiprocessors, without its gap."""
        reads = min(1.0, share / self.read_share)
        return max(work.flop / self.flop_per_s / share, work.num_bytes / self.bytes_per_s / reads)


class Mark:
    """A point on a stream, and when the device was there."""

    def __init__(self, issued_s: float) -> None:
        self.issued_s = issued_s
        self.done_s: float | None = None
        self.waiting: deque[Member] = deque()


class _Order(NamedTuple):
    """What follows begins behind the mark."""

    issued_s: float
    mark: Mark


class _Kernel:
    """`left`: of its work, 1 to 0. `delay_s`: of its gap, and of its wait for blocks of another one."""

    def __init__(self, issued_s: float, work: Work, gap_s: float) -> None:
        self.issued_s, self.work, self.gap_s = issued_s, work, gap_s
        self.begun_s: float | None = None
        self.delay_s = 0.0
        self.left = 1.0


class Line:
    """What was issued to a stream and is not over. `multiprocessors`: of its own, 0: the device's, which it shares."""

    def __init__(self, multiprocessors: int) -> None:
        self.multiprocessors = multiprocessors
        self.items: deque[_Kernel | Mark | _Order] = deque()
        self.spans: list[tuple[float, float]] = []  # of each kernel that has ended, its gap before it included

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

    def line(self, multiprocessors: int = 0) -> Line:
        self._lines.append(made := Line(multiprocessors))
        return made

    # ---- threads

    def now(self) -> float:
        """As in hydra_engine/clock.py."""
        return self.time.now()

    def launch(self, line: Line, work: Work) -> None:
        line.items.append(_Kernel(self.now() + self.machine.launch_s, work, self.machine.gap_s))
        self.time.spend(self.machine.launch_s)

    def replay(self, line: Line, works: Sequence[Work]) -> None:
        issued_s = self.now() + self.machine.replay_s
        gaps_s = chain((self.machine.gap_s + self.machine.graph_s,), repeat(self.machine.gap_s))
        line.items.extend(_Kernel(issued_s, work, gap_s) for work, gap_s in zip(works, gaps_s, strict=False))
        self.time.spend(self.machine.replay_s)

    def record(self, line: Line) -> Mark:
        line.items.append(mark := Mark(self.now()))
        return mark

    def order(self, line: Line, behind: Mark) -> None:
        """What is launched on the line from now on begins behind the mark."""
        line.items.append(_Order(self.now(), behind))

    def wait(self, mark: Mark) -> None:
        self.time.turn()
        if mark.done_s is None:
            self.time.wait_in(mark.waiting)

    def is_done(self, mark: Mark) -> bool:
        self.time.turn()
        return mark.done_s is not None

    # ---- the device

    def advance(self, until_s: float) -> bool:
        """As `Outside` of virtual_time.py says."""
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
        """What happens now: kernels end and begin, marks are reached. Whether a thread was woken."""
        woken = changed = False
        while not changed:
            changed = True
            for line in self._lines:
                while line.items and line.items[0].issued_s <= self._now_s:
                    head = line.items[0]
                    if isinstance(head, _Kernel):
                        if head.begun_s is None:
                            head.begun_s, head.delay_s = self._now_s, head.gap_s + self._wait_s(line)
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

    def _wait_s(self, line: Line) -> float:
        """Of a kernel that begins there, for blocks of others to end."""
        if line.multiprocessors:
            return 0.0
        others = [other.running for other in self._lines if other is not line and not other.multiprocessors]
        left = (kernel.left * self.machine.alone_s(kernel.work) for kernel in others if kernel and not kernel.delay_s)
        return min(self.machine.block_s, max(left, default=0.0))

    def _rates(self, lines: Sequence[Line], kernels: Sequence[_Kernel]) -> list[float]:
        """Of its whole work, a second, each."""
        machine = self.machine
        working = [kernel.delay_s == 0 for kernel in kernels]
        sharing = sum(works and not line.multiprocessors for line, works in zip(lines, working, strict=True))
        shares = [line.multiprocessors / machine.multiprocessors or 1 / max(1, sharing) for line in lines]
        rates = [
            1 / max(SHORTEST_S, machine.alone_s(kernel.work, share))
            for kernel, share in zip(kernels, shares, strict=True)
        ]
        asked = [(rate, kernel.work) for rate, kernel in zip(rates, kernels, strict=True) if not kernel.delay_s]
        flop = sum(rate * work.flop for rate, work in asked) / machine.flop_per_s
        num_bytes = sum(rate * work.num_bytes for rate, work in asked) / machine.bytes_per_s
        return [rate / max(1.0, flop, num_bytes) for rate in rates]


def _pass(kernel: _Kernel, seconds: float, rate: float, *, ends_now: bool) -> None:
    if kernel.delay_s:
        kernel.delay_s = 0.0 if ends_now else kernel.delay_s - seconds
    else:
        kernel.left = 0.0 if ends_now else kernel.left - seconds * rate
