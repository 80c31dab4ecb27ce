"""A paper's deployment as a simulation: models, devices and layouts by their names in the papers.

Layouts are written as HydraInfer and EPD-Serve write them: 1E3P4D, EP+D, (E-P)-D, where roles in one bracket share a
device. Step times come from a roofline of the device (`hardware/roofline.py`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cache

from hydra_engine.config import EngineConfig, MediaConfig
from hydra_engine.core.instances import InstanceSpec, Role, Topology
from hydra_planner.hardware.devices import find_device
from hydra_planner.hardware.roofline import device_kind
from hydra_planner.papers.models import spec_of
from hydra_planner.records import Record
from hydra_planner.search.candidates import Candidate
from hydra_planner.search.halving import judged
from hydra_planner.search.load import window
from hydra_planner.search.measure import Point, Question, measure
from hydra_planner.search.settings import Setting
from hydra_planner.simulator.costs import DeviceKind, Host
from hydra_planner.simulator.deployment import Deployment
from hydra_planner.slo import Goodput, Limits, goodput, search
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
class Setup:
    """`devices`: kinds in the order of a layout's devices, the last one for all that follow. `load`: a name of
    `workload/generators.py`, `requests` of it. `sets_limits`: instances get the limits; if False, they only judge the
    requests."""

    model: str
    devices: tuple[str, ...]
    load: str
    requests: int
    limits: Limits = NO_LIMITS
    dtype: str = "float16"
    sets_limits: bool = True

    def question(self, chosen: Candidate) -> Question:
        kinds = {}
        for place, name in enumerate(chosen.devices):
            kinds[name] = kind_of(self.model, self.devices[min(place, len(self.devices) - 1)], self.dtype)
        config = EngineConfig(dtype=self.dtype, media=MediaConfig(decode_workers=_HOST_CORES))
        rows = _rows(self.load, self.requests)
        asked = Question(spec_of(self.model), config, kinds, Host(cores=_HOST_CORES), rows, self.limits)
        return asked.limited() if self.sets_limits and self.limits is not NO_LIMITS else asked

    def point(self, text: str, rate: float | None, *settings: Setting) -> Point:
        """`rate`: requests a second; None: all at once."""
        chosen = layout(text, *settings)
        return measure(self.question(chosen), chosen, rate, self.requests)

    def run(self, text: str, rate: float | None, *settings: Setting) -> tuple[Deployment, list[Record]]:
        """Runs the load of `point`; returns the deployment and a record of each request."""
        chosen = layout(text, *settings)
        question = self.question(chosen)
        deployment = Deployment(chosen.topology, question.site(chosen))
        for row in window(question.rows, self.requests, rate):
            deployment.submit(row)
        return deployment, deployment.run()

    def goodput(self, text: str, start: float, steps: int = 2, *settings: Setting) -> Goodput:
        """The highest rate that keeps the limits, from a first guess on."""

        def attained(rate: float) -> float:
            return judged(self.point(text, rate, *settings))

        return goodput(search(attained, start, steps, doublings=4))

    def with_limits(self, ttft_s: float, tpot_limit_s: float) -> Setup:
        return replace(self, limits=Limits(ttft_s, tpot_limit_s))


@cache
def _rows(load: str, requests: int) -> tuple[WorkloadRequest, ...]:
    return make_load(load, requests, 1.0, 0)
