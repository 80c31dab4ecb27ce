"""A paper's deployment as a simulation: models, devices and layouts by their names in the papers.

Layouts are written as HydraInfer and EPD-Serve write them: 1E3P4D, EP+D, (E-P)-D, where roles in one bracket share a
device. Step times come from a roofline of the device (`hardware/roofline.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median

from hydra_engine.config import EngineConfig, MediaConfig
from hydra_engine.core.instances import InstanceSpec, Role, Topology
from hydra_engine.scheduler.scheduler import StageScheduler
from hydra_planner.hardware.devices import find_device
from hydra_planner.hardware.roofline import device_kind
from hydra_planner.papers.models import spec_of
from hydra_planner.papers.results import Scale, Spread
from hydra_planner.papers.simulations import Measured
from hydra_planner.records import Record
from hydra_planner.search.candidates import Candidate
from hydra_planner.search.halving import Effort, judged, requests_at
from hydra_planner.search.load import window
from hydra_planner.search.measure import SHARE, Question, measure
from hydra_planner.search.plan import COLD, lasting
from hydra_planner.search.settings import Setting
from hydra_planner.simulator.costs import DeviceKind, Host
from hydra_planner.simulator.deployment import Deployment
from hydra_planner.simulator.node import Site
from hydra_planner.simulator.schedules import BatchScheduler, OneLaneScheduler, RequestScheduler
from hydra_planner.slo import Limits, goodput, search
from hydra_planner.workload.file import WorkloadRequest
from hydra_planner.workload.generators import make_load

NO_LIMITS = Limits(math.inf, math.inf, "none")
_HOST_CORES = 128  # of EPD's servers; HydraInfer's have 96
_PART = re.compile(r"(\d*)(?:\(([EPD]+(?:-[EPD]+)*)\)|([EPD]+))")


@cache
def kind_of(model: str, device: str, dtype: str = "float16") -> DeviceKind:
    return device_kind(spec_of(model), find_device(device), dtype)


def layout(text: str, *settings: Setting) -> Candidate:
    """Parses 2EP+D, 1E3P4D or (E-P)-D: one device for each role, or for each bracket."""
    instances, device = [], 0
    for count, together, alone in _PART.findall(text):
        for _ in range(int(count or 1)):
            roles = together.split("-") if together else (alone,)
            instances += [InstanceSpec(Role.parse(role), f"cuda:{device}") for role in roles]
            device += 1
    return Candidate(Topology(tuple(instances)), text, settings)


def num_devices(text: str) -> int:
    return len(layout(text).devices)


@dataclass(frozen=True, slots=True)
class PaperQuestion(Question):
    """A question whose deployments may have the schedule of another engine, or no parallel encodes."""

    schedule: str = ""
    parallel_encodes: bool = True

    def site(self, candidate: Candidate) -> Site:
        found = Question.site(self, candidate)
        return replace(found, scheduler=SCHEDULES[self.schedule], parallel_encodes=self.parallel_encodes)


SCHEDULES: dict[str, type[StageScheduler]] = {
    "": StageScheduler,
    "prefill first": RequestScheduler,
    "one lane": OneLaneScheduler,
    "batches to completion": BatchScheduler,
}


@dataclass(frozen=True, slots=True)
class Runs:
    """The same deployment and rate over seeds."""

    each: tuple[Measured, ...]

    def spread(self, number: Callable[[Measured], float]) -> Spread | float:
        """The median and the range; of one seed the number alone."""
        values = sorted(map(number, self.each))
        return values[0] if len(values) == 1 else Spread(median(values), values[0], values[-1])

    @property
    def falls_behind(self) -> bool:
        """True if most seeds fall behind."""
        return 2 * sum(one.falls_behind for one in self.each) > len(self.each)

    @property
    def keeps_limits(self) -> bool:
        """True if most seeds keep the limits, and would if the load went on."""
        return 2 * sum(one.attainment >= SHARE and not one.falls_behind for one in self.each) > len(self.each)

    @property
    def attainment(self) -> Spread | float:
        """Shares in per cent."""
        return self.spread(lambda one: 100 * one.attainment)

    @property
    def ttft_ms(self) -> Spread | float:
        """The median request's."""
        return self.ttft_at(0)

    @property
    def tpot_ms(self) -> Spread | float:
        return self.tpot_at(0)

    def ttft_at(self, place: int) -> Spread | float:
        """Milliseconds of p50, p90 or p99."""
        return self.spread(lambda one: 1e3 * one.ttft[place])

    def tpot_at(self, place: int) -> Spread | float:
        return self.spread(lambda one: 1e3 * one.tpot[place])

    def more(self, name: str, factor: float = 1.0) -> Spread | float:
        """A number of `Measured.more`, times a factor."""
        return self.spread(lambda one: factor * one.more[name])


Look = Callable[[Deployment, Sequence[Record]], dict[str, float]]


@dataclass(frozen=True, slots=True)
class Setup:
    """`devices`: kinds in the order of a layout's devices, the last one for all that follow. `load`: a name of
    `workload/generators.py`. `limits`: judge the requests; `sets_limits`: instances get them too. `seconds`: the load
    lasts so long; None: as long as `plan`'s, a request at its limits. `schedule`: a name in SCHEDULES."""

    scale: Scale
    model: str
    devices: tuple[str, ...]
    load: str
    limits: Limits = NO_LIMITS
    dtype: str = "float16"
    sets_limits: bool = True
    seconds: float | None = None
    schedule: str = ""
    parallel_encodes: bool = True

    def question(self, chosen: Candidate, count: int = 1, seed: int = 0) -> Question:
        kinds = {}
        for place, name in enumerate(chosen.devices):
            kinds[name] = kind_of(self.model, self.devices[min(place, len(self.devices) - 1)], self.dtype)
        config = EngineConfig(dtype=self.dtype, media=MediaConfig(decode_workers=_HOST_CORES))
        rows, host = _rows(self.load, count, seed), Host(cores=_HOST_CORES)
        asked = PaperQuestion(
            *(spec_of(self.model), config, kinds, host, rows, self.limits),
            cold=COLD,
            to_the_end=False,
            schedule=self.schedule,
            parallel_encodes=self.parallel_encodes,
        )
        return asked.limited() if self.sets_limits and self.limits is not NO_LIMITS else asked

    def at_rate(self, text: str, rate: float, *settings: Setting) -> Runs:
        """`rate`: requests a second, of all devices."""
        return Runs(tuple(self._measured(text, rate, self._count(rate), seed, settings) for seed in self._seeds))

    def at_once(self, text: str, count: int, *settings: Setting, seeds: int = 1) -> Runs:
        """Runs loads whose requests all come at once; `count` of them at the quick scale."""
        count, seeds = self.scale.requests(count), min(seeds, self.scale.seeds)
        return Runs(tuple(self._measured(text, None, count, seed, settings) for seed in range(seeds)))

    def traced(self, text: str, rate: float, name: str, look: Look) -> Runs:
        """Loads at a rate that run to their end; `look` takes numbers of the judged requests, for `Measured.more`."""
        chosen, count = layout(text), self._count(rate)

        def run(seed: int) -> Measured:
            question = self.question(chosen, count, seed)
            deployment = Deployment(chosen.topology, question.site(chosen), content=seed)
            rows = window(question.rows, count, rate)
            for row in rows:
                deployment.submit(row)
            found = look(deployment, deployment.run(audit=False)[int(COLD * count) :])
            return Measured(seed, count, rows[-1].at_s, 0.0, 0.0, False, (0.0,) * 3, (0.0,) * 3, 0.0, 0.0, found)

        def measured(seed: int) -> Measured:
            return self.scale.simulations.get(f"{self._key(text, rate, count, seed)}, {name}", lambda: run(seed))

        return Runs(tuple(map(measured, self._seeds)))

    def goodput(self, text: str, start: float, steps: int = 2) -> Spread | float:
        """The highest rate that keeps the limits, from a first guess on; 0 where none of the tried ones does."""

        def highest(seed: int) -> float:
            def attained(rate: float) -> float:
                return self._measured(text, rate, self._count(rate), seed, ()).judged

            best = goodput(search(attained, start, steps, doublings=4))
            return 0.0 if best.bound == "at_most" else best.rate

        rates = sorted(map(highest, self._seeds))
        return rates[0] if len(rates) == 1 else Spread(median(rates), rates[0], rates[-1])

    def with_limits(self, ttft_s: float, tpot_limit_s: float) -> Setup:
        return replace(self, limits=Limits(ttft_s, tpot_limit_s))

    # ---- one load

    @property
    def _seeds(self) -> range:
        return range(self.scale.seeds)

    def _count(self, rate: float) -> int:
        """Requests of a load at that rate."""
        seconds = self.seconds
        if seconds is None:
            seconds = lasting(Effort(), self.question(layout("EPD"), _SAMPLE)).seconds or 0.0
        return requests_at(rate, Effort(seconds=self.scale.share * seconds, requests=self.scale.requests_of_load))

    def _measured(
        self, text: str, rate: float | None, count: int, seed: int, settings: tuple[Setting, ...]
    ) -> Measured:
        def run() -> Measured:
            chosen = layout(text, *settings)
            point = measure(self.question(chosen, count, seed), chosen, rate, count, seed)
            return Measured(
                seed,
                point.requests,
                0.0 if rate is None else count / rate,
                point.attainment,
                judged(point),
                point.falls_behind,
                point.ttft,
                point.tpot,
                point.requests_per_s,
                point.tokens_per_s,
                {f"{role} {lane}": pair[place] for role, pair in point.busy.items() for place, lane in _LANES},
            )

        return self.scale.simulations.get(self._key(text, rate, count, seed, settings), run)

    def _key(self, text: str, rate: float | None, count: int, seed: int, settings: tuple[Setting, ...] = ()) -> str:
        words = [self.model, "+".join(self.devices), self.load, text]
        words += ["all at once" if rate is None else f"{rate:.6g}/s", f"{count} requests"]
        if self.limits is not NO_LIMITS:
            words.append(f"{self.limits.ttft_s:g} s, {1e3 * self.limits.tpot_limit_s:g} ms")
        words += [] if self.sets_limits else ["limits not told"]
        words += [self.schedule] if self.schedule else []
        words += [] if self.parallel_encodes else ["no parallel encodes"]
        return ", ".join([*words, *(setting.flags for setting in settings), f"seed {seed}"])


_LANES = ((0, "vision"), (1, "language"))
_SAMPLE = 200  # requests that say how long one takes at its limits


@cache
def _rows(load: str, count: int, seed: int) -> tuple[WorkloadRequest, ...]:
    return make_load(load, count, 1.0, seed)
