"""Two pieces of work on two lanes of one device: one after the other, without end beside each other, and each once.

Begins and ends are read from the clock in the lanes' threads, after each has waited for what it launched: some tens of
microseconds in steps of milliseconds. Does not know what the work is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple, TypeVar

from bench.micro.harness import Effort, Run, Seconds
from bench.micro.subject import in_lane
from hydra_engine.backend.device import Device, Lane

MIN_FIRSTS = 3

T = TypeVar("T")


class Span(NamedTuple):
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Together(NamedTuple):
    """`whole`: from the first begin to the last end."""

    whole: Seconds
    first: Seconds
    second: Seconds


class Beside(NamedTuple):
    """Measurements of two works that ran without end at once. `whole_s`: the time of all runs of the first; `steps`:
    runs of the second that lie in it."""

    steps: Seconds
    num_steps: float  # in that time, the one cut by its end counted in part
    num_firsts: int
    whole_s: float

    @property
    def first_s(self) -> float:
        """Mean seconds from one run of the first work to the next."""
        return self.whole_s / self.num_firsts

    @property
    def step_s(self) -> float:
        return self.whole_s / self.num_steps


class Duo:
    """`first` goes to the vision lane, `second` to the language lane, both on one partition of the device."""

    def __init__(
        self, device: Device, vision: Lane, language: Lane, first: Run, second: Run, partition: int = 0
    ) -> None:
        self._device, self._vision, self._language = device, vision, language
        self._first, self._second, self._partition = first, second, partition

    def in_turn(self, effort: Effort) -> Together:
        """Runs both works one after the other on the language lane."""
        spans = [
            in_lane(self._language, lambda: (self._timed(self._first), self._timed(self._second))).result()
            for _ in range(effort.turns + 1)
        ]
        return _of_spans(spans[1:])

    def together(self, effort: Effort) -> Together:
        spans = []
        for _ in range(effort.turns + 1):  # the first one warms up
            barrier = threading.Barrier(2)
            waits = [
                in_lane(lane, self._from(barrier, run))
                for lane, run in ((self._vision, self._first), (self._language, self._second))
            ]
            spans.append((waits[0].result(), waits[1].result()))
        return _of_spans(spans[1:])

    def beside(self, seconds: float) -> Beside:
        """Runs both works over and over for `seconds`, and until the first has been done `MIN_FIRSTS` times."""
        barrier, over = threading.Barrier(2), threading.Event()

        def firsts() -> list[Span]:
            try:
                spans = [self._timed(self._first)]
                while spans[-1].ended - spans[0].began < seconds or len(spans) < MIN_FIRSTS:
                    spans.append(self._timed(self._first))
                return spans
            finally:
                over.set()

        def steps() -> list[Span]:
            spans = [self._timed(self._second)]  # one at least, however short the first work is
            while not over.is_set():
                spans.append(self._timed(self._second))
            return spans

        one = in_lane(self._vision, self._after(barrier, firsts))
        other = in_lane(self._language, self._after(barrier, steps))
        first_spans, spans = one.result(), other.result()
        whole = Span(first_spans[0].began, first_spans[-1].ended)
        inside = [span.seconds for span in spans if whole.began <= span.began and span.ended <= whole.ended]
        parts = [(min(s.ended, whole.ended) - max(s.began, whole.began)) / max(s.seconds, 1e-9) for s in spans]
        counted = inside or [span.seconds for span in spans]  # a step may be longer than all of the first
        num_steps = sum(max(part, 0.0) for part in parts)
        return Beside(Seconds.of(counted), num_steps, len(first_spans), whole.seconds)

    def _from(self, barrier: threading.Barrier, run: Run) -> Callable[[], Span]:
        return self._after(barrier, lambda: self._timed(run))

    def _after(self, barrier: threading.Barrier, job: Callable[[], T]) -> Callable[[], T]:
        def run() -> T:
            # Also on partition 0: lanes of a divided device move by themselves while both have work.
            with self._device.partitions.use(self._partition):
                barrier.wait(timeout=60)
                return job()

        return run

    def _timed(self, run: Run) -> Span:
        began = perf_counter()
        run()
        self._device.finish()
        return Span(began, perf_counter())


def _of_spans(spans: list[tuple[Span, Span]]) -> Together:
    whole = [max(a.ended, b.ended) - min(a.began, b.began) for a, b in spans]
    return Together(Seconds.of(whole), *(Seconds.of([pair[i].seconds for pair in spans]) for i in (0, 1)))
