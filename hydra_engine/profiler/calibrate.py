"""Measures steps on the lanes of an instance that does not serve yet: each lane alone, then both side by side.

Points of the grid take turns in rounds, so that a busy moment of the machine does not spoil a single one; the first
round is ordered so that a fit is possible wherever the time ends. The lane reports the time of a step. Drives the lanes
by the same calls as the instance's loop; knows neither tensors nor what the times are for.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

from hydra_engine.clock import Clock
from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import PixelPayload
from hydra_engine.core.plans import LanguageLoad, LanguagePlan, VisionPlan
from hydra_engine.core.request import Request
from hydra_engine.core.results import LaneResult, LanguageResult, VisionResult
from hydra_engine.errors import BackendError
from hydra_engine.models.specs.base import VisionSpec
from hydra_engine.profiler.fit import CorunTimes, LanguageTimes, Samples, VisionTimes
from hydra_engine.profiler.grid import CorunPoint, Grid, LanguagePoint, Point, Sizes, VisionPoint, make_grid
from hydra_engine.profiler.synthetic import PlanMaker, picture_request, text_request

ROUNDS = 7
DEADLINE_S = 40.0
_BURST = 3  # steps of one visit, if all of them together take at most
_BURST_S = 0.05
_GUESS = 1.5  # margin for a point that was not visited yet
_LONG_S = 1.0
_LOST_S = 600.0  # a step that takes longer has failed without a result
_COVERED = 0.95  # of a step's time that the other lane must have been busy
_CORUN_STEPS = 3  # of the language lane, and 1 of the vision lane
_CORUN_PATIENCE = 8.0  # times what the steps take alone
_CORUN_ROUNDS = 3
_CORUN_KEPT = 64  # steps of one lane and point; short ones come by the hundred
_SHORT_S = 0.05  # beside steps that take less, the pause between two of them is not negligible

StepResult = LanguageResult | VisionResult


class Lanes(Protocol):
    """The part of an instance's worker that runs steps, see `instance/ports.py`."""

    def add_request(self, request: Request, pixels: Sequence[PixelPayload]) -> str | None: ...

    def remove_request(self, request_id: RequestId) -> None: ...

    def submit_vision(self, plan: VisionPlan) -> None: ...

    def submit_language(self, plan: LanguagePlan) -> None: ...

    def poll(self) -> Sequence[LaneResult]: ...


@dataclass(frozen=True, slots=True)
class Site:
    """An instance to measure. The worker sets `wake` when a result is ready. `vision` None: no vision tower, or no
    synthetic pictures for it. `stateful`: layers keep a state per slot, and a row continues from the slot's state."""

    lanes: Lanes
    wake: threading.Event
    clock: Clock
    sizes: Sizes
    vocab_size: int
    vision: VisionSpec | None
    stateful: bool = False


@dataclass(frozen=True, slots=True)
class Calibration:
    """The result of a calibration. `submit_s`: seconds from a plan's submission to an idle lane to the start of its
    step; `collect_s`: from the end of a step until its result is read. `num_left`: points that there was no time to
    measure."""

    samples: Samples
    submit_s: float
    collect_s: float
    num_points: int
    num_left: int
    seconds: float


def calibrate(site: Site, progress: Callable[[int, int], None], deadline_s: float = DEADLINE_S) -> Calibration:
    """Measures the points of the grid for about `deadline_s` at most, or until each has been measured `ROUNDS` times.
    Raises BackendError if the model cannot run a step."""
    run = _Run(site, deadline_s)
    try:
        run.open()
        run.measure(make_grid(site.sizes, site.vision), progress)
    finally:
        run.close()
    return run.calibration()


class _Run:
    """A calibration: the requests registered with the lanes, and the times measured so far."""

    def __init__(self, site: Site, deadline_s: float) -> None:
        self._site = site
        self._began = site.clock.now()
        self._deadline = self._began + deadline_s
        self._maker = PlanMaker(site.sizes, site.vocab_size, stateful=site.stateful)
        self._pictures: dict[VisionPoint, Request] = {}
        self._request_ids: list[RequestId] = []
        self._wall_s: dict[Point, float] = {}  # of the last visit, of one step where there were several
        self._language: dict[LanguageLoad, list[float]] = defaultdict(list)
        self._vision: dict[VisionPoint, list[float]] = defaultdict(list)
        self._corun: dict[CorunPoint, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
        self._submit_s: list[float] = []
        self._collect_s: list[float] = []
        self._num_points = 0
        self._num_left = 0

    def open(self) -> None:
        for seq_slot in range(self._site.sizes.max_num_seqs):
            self._register(text_request(seq_slot, self._site.sizes.max_model_len), ())
        self._run(self._maker.opening())

    def close(self) -> None:
        for request_id in self._request_ids:
            self._site.lanes.remove_request(request_id)
        self._request_ids.clear()

    def measure(self, grid: Grid, progress: Callable[[int, int], None]) -> None:
        points = [*grid.coarse, *grid.rest]
        self._num_points = len(points)
        total = ROUNDS * len(points)
        done = 0
        progress(0, total)
        for number in range(ROUNDS):
            if number:
                random.Random(number).shuffle(points)
            visited = 0
            for point in points:
                if number >= _CORUN_ROUNDS and isinstance(point, CorunPoint):
                    done += 1
                    continue
                if self._affordable(point):
                    self._visit(point)
                    visited += 1
                done += 1
                progress(min(done, total - 1), total)
            if not visited:
                break
        self._num_left = sum(point not in self._wall_s for point in points)
        progress(total, total)

    def calibration(self) -> Calibration:
        language = tuple(LanguageTimes(load, tuple(times)) for load, times in self._language.items())
        vision = tuple(VisionTimes(point.load, tuple(times)) for point, times in self._vision.items())
        corun = tuple(
            CorunTimes(
                point.language.load, point.vision.load, _thinned(language_s), _thinned(vision_s), point.partition
            )
            for point, (language_s, vision_s) in self._corun.items()
            if language_s or vision_s
        )
        return Calibration(
            Samples(language, vision, corun),
            median(self._submit_s),
            median(self._collect_s),
            self._num_points,
            self._num_left,
            self._site.clock.now() - self._began,
        )

    # ---- time

    def _affordable(self, point: Point) -> bool:
        """True if the point is expected to end in time, by its last visit or by the nearest point of its kind. Also
        true for the first point of a kind, and always for the very first: without it there is nothing to fit."""
        expected = self._expected_s(point) or 0.0
        return not self._wall_s or self._site.clock.now() + expected < self._deadline

    def _expected_s(self, point: Point) -> float | None:
        if (last_s := self._wall_s.get(point)) is not None:
            return last_s
        if isinstance(point, CorunPoint):
            language, vision = self._expected_s(point.language), self._expected_s(point.vision)
            return None if language is None or vision is None else 2 * (_CORUN_STEPS * language + vision)
        work = point.work
        near = [
            (abs(other.work - work), other.work, seconds)
            for other, seconds in self._wall_s.items()
            if not isinstance(other, CorunPoint) and type(other) is type(point)
        ]
        if not near:
            return None
        _, other_work, seconds = min(near)
        return 2 * _GUESS * seconds * max(1.0, work / other_work)  # twice: the first visit warms up

    # ---- points

    def _visit(self, point: Point) -> None:
        began = self._site.clock.now()
        first = point not in self._wall_s
        if isinstance(point, CorunPoint):
            self._beside(point)
            self._wall_s[point] = self._site.clock.now() - began
            return
        expected = self._expected_s(point)
        if first and (expected is None or expected <= _LONG_S):  # its first call costs nothing beside a long step
            self._alone(point, 1, keep=False)
        began = self._site.clock.now()
        last_s = self._wall_s.get(point)
        count = _BURST if last_s is not None and _BURST * last_s <= _BURST_S else 1
        self._alone(point, count, keep=True)
        self._wall_s[point] = (self._site.clock.now() - began) / count

    def _alone(self, point: LanguagePoint | VisionPoint, count: int, *, keep: bool) -> None:
        """Measures `count` steps without a pause between them."""
        self._prepare(point)
        loads = []
        submitted = self._site.clock.now()
        for _ in range(count):
            loads.append(self._submit(point))
        results = self._collect(count)
        if not keep:
            return
        self._submit_s.append(max(0.0, results[0].started_s - submitted))
        for load, result in zip(loads, results, strict=True):
            seconds = result.ended_s - result.started_s
            if isinstance(point, VisionPoint):
                self._vision[point].append(seconds)
            elif load is not None:
                self._language[load].append(seconds)

    def _beside(self, point: CorunPoint) -> None:
        """Keeps both lanes busy until enough steps of each have run while the other was busy."""
        clock = self._site.clock
        language = _Track(point.language, self._expected_s(point.language) or 0.0)
        vision = _Track(point.vision, self._expected_s(point.vision) or 0.0)
        alone_s = _CORUN_STEPS * language.step_s + vision.step_s
        until = min(clock.now() + _CORUN_PATIENCE * max(alone_s, 0.01), self._deadline)
        self._prepare(point.language)
        self._submit(point.language, point.partition)  # says where the next encode runs
        self._collect(1)
        for track in (language, vision):
            for _ in range(2 if track.step_s < _SHORT_S else 1):  # one runs, one waits
                self._submit(track.point, point.partition)
                track.in_flight += 1
        while language.in_flight or vision.in_flight:
            for result in self._collect(1):
                track = language if isinstance(result, LanguageResult) else vision
                track.in_flight -= 1
                track.spans.append((result.started_s, result.ended_s))
                enough = len(language.time_beside(vision)) >= _CORUN_STEPS and len(vision.time_beside(language)) >= 1
                if clock.now() < until and not enough:
                    self._submit(track.point, point.partition)
                    track.in_flight += 1
        language_s, vision_s = self._corun[point]
        language_s += language.time_beside(vision)
        vision_s += vision.time_beside(language)

    # ---- the lanes

    def _prepare(self, point: Point) -> None:
        if isinstance(point, LanguagePoint):
            self._run(self._maker.preparation(point))

    def _run(self, plans: Sequence[LanguagePlan]) -> None:
        for plan in plans:
            self._site.lanes.submit_language(plan)
            self._collect(1)

    def _submit(self, point: LanguagePoint | VisionPoint, partition: int = 0) -> LanguageLoad | None:
        """Submits a step; returns the load of a language step, None for a vision step. With states, rows may start a
        little later than the point says."""
        if isinstance(point, LanguagePoint):
            plan = replace(self._maker.language(point), partition=partition)
            self._site.lanes.submit_language(plan)
            return plan.load
        if point not in self._pictures:
            request, pixels = picture_request(len(self._pictures), point)
            self._register(request, pixels)
            self._pictures[point] = request
        self._site.lanes.submit_vision(self._maker.vision(self._pictures[point]))
        return None

    def _collect(self, count: int) -> list[StepResult]:
        """Waits for at least `count` results and returns them, each lane's in order. Raises BackendError if none
        comes."""
        results: list[StepResult] = []
        while len(results) < count:
            if not self._site.wake.wait(_LOST_S):
                raise BackendError("a measured step has not come back; the log says what happened in its lane")
            self._site.wake.clear()
            new = [r for r in self._site.lanes.poll() if isinstance(r, StepResult)]  # no peer is connected yet
            now = self._site.clock.now()
            for result in new:
                _check(result)
                self._collect_s.append(max(0.0, now - result.ended_s))
            results += new
        return results

    def _register(self, request: Request, pixels: Sequence[PixelPayload]) -> None:
        self._site.lanes.add_request(request, pixels)
        self._request_ids.append(request.id)


@dataclass(slots=True)
class _Track:
    """A lane while both are measured. `step_s`: seconds of a step alone."""

    point: LanguagePoint | VisionPoint
    step_s: float
    in_flight: int = 0
    spans: list[tuple[float, float]] = field(default_factory=list)  # (start, end) of the steps that have come back

    def time_beside(self, other: _Track) -> list[float]:
        """Seconds of the steps during which the other lane was busy. If a step of the other lane is in flight, that
        lane counts as busy from the end of its last finished step on."""
        spans = other.spans
        if other.in_flight and spans:
            spans = [*spans, (spans[-1][1], float("inf"))]
        return covered_seconds(self.spans, spans)


def covered_seconds(spans: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> list[float]:
    """Seconds of the spans that `others` cover to at least `_COVERED`. Both ascend without overlap."""
    durations = []
    first = 0
    for begin, end in spans:
        while first < len(others) and others[first][1] <= begin:
            first += 1
        beside, index = 0.0, first
        while index < len(others) and others[index][0] < end:
            beside += min(end, others[index][1]) - max(begin, others[index][0])
            index += 1
        if end > begin and beside >= _COVERED * (end - begin):
            durations.append(end - begin)
    return durations


def _thinned(times: Sequence[float]) -> tuple[float, ...]:
    return tuple(times[:: -(-len(times) // _CORUN_KEPT)]) if times else ()


def _check(result: StepResult) -> None:
    if isinstance(result, LanguageResult):
        errors = [error for _, error in result.failures]
    else:
        errors = [error for error in result.errors if error is not None]
    if errors:
        raise BackendError(f"the model cannot run a step that was to be measured: {errors[0].message}")
