"""A whole deployment on virtual time: the real dispatcher, and instances of `node.py` on the devices of a site.

Everything that decides is the code that serves: routing, replays, scheduling, budgets, migration, leases. What is
played: bytes, steps, preprocessing, and the processes between them. One thread, no clock of the system, no randomness
of its own.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import InstanceState, Topology
from hydra_engine.core.messages import QueryLedger, ToFrontend, ToInstance
from hydra_engine.core.outputs import Result
from hydra_engine.core.reports import LedgerReport, Status
from hydra_engine.core.request import Slo
from hydra_engine.errors import ConfigError
from hydra_engine.frontend.frontend import TICK_S
from hydra_engine.frontend.request import ActiveRequest
from hydra_engine.frontend.routing.decode_stealing import DecodeStealing
from hydra_engine.frontend.routing.placement import Switch, plan_switches
from hydra_planner.records import Record
from hydra_planner.simulator.agenda import Agenda
from hydra_planner.simulator.cluster import SimulatedCluster
from hydra_planner.simulator.costs import DeviceKind
from hydra_planner.simulator.frontend import Stamped, TextlessDispatcher, active_of
from hydra_planner.simulator.machine import HOST, Machine
from hydra_planner.simulator.node import Site
from hydra_planner.simulator.preprocessing import FRONTEND, Preprocessing
from hydra_planner.simulator.requests import RequestMaker
from hydra_planner.workload.file import WorkloadRequest

_FIRST_ATTEMPT = 1 << 32  # larger than all ids of requests
_REST_S = 1.0  # after the last request: what is on its way arrives
_LONGEST_S = 360_000.0  # of virtual time: what has not ended by then never does
_POLL_S = 0.05  # while an instance is emptied


class SimulationError(RuntimeError):
    """The deployment has lost something, which is a bug of the engine or of the simulator."""


@contextmanager
def _without_collections() -> Iterator[None]:
    """Turns the garbage collector off: it finds nothing during a run, and looking takes a seventh of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Busy:
    """Shares of the time from the first arrival to the last end in which a lane of an instance computed."""

    vision: float
    language: float


def assign_devices(topology: Topology, devices: Mapping[str, DeviceKind]) -> tuple[str, ...]:
    """The device of each instance. Raises ConfigError where there are not enough."""
    names = [*devices]
    if unknown := [spec.device for spec in topology.instances if spec.device not in ("auto", *names)]:
        raise ConfigError(f"topology {topology} names {unknown[0]}; there are {', '.join(names)}", param="topology")
    if len(names) == 1:
        return (names[0],) * len(topology.instances)
    free = [name for name in names if name not in {spec.device for spec in topology.instances}]
    wanted = sum(spec.device == "auto" for spec in topology.instances)
    if wanted > len(free):
        raise ConfigError(
            f"topology {topology} has {wanted} instances without a device, and {len(free)} devices are left; say which "
            "share one, for example E@cuda:0+PD@cuda:0",
            param="topology",
        )
    own = iter(free)
    return tuple(next(own) if spec.device == "auto" else spec.device for spec in topology.instances)


class Deployment:
    """`submit`, then `run` once."""

    def __init__(self, topology: str | Topology, site: Site, *, content: int = 0) -> None:
        self.agenda = Agenda()
        self.results: dict[int, Result] = {}  # by the number of the request
        self.handles: dict[int, Stamped] = {}
        self.statuses: dict[str, Status] = {}
        self.topology = Topology.parse(topology) if isinstance(topology, str) else topology
        self._site = site
        scheduler = site.config.scheduler
        slo = Slo(scheduler.ttft_slo, scheduler.tpot_slo)  # the frontend gives each request these limits
        self._maker = RequestMaker(site.spec, content, slo)
        self._ended_s: dict[int, float] = {}
        self._ledgers: dict[str, LedgerReport] = {}
        self._rows: list[WorkloadRequest] = []
        self._open_s = 0.0
        self._switches = 0
        self._stop_s = math.inf
        self._ticks = False
        ids = itertools.count(_FIRST_ATTEMPT)
        self._roles = {n: one.role for n, one in zip(self.topology.names, self.topology.instances, strict=True)}
        self.dispatcher = TextlessDispatcher(
            site.config,
            self._roles,
            send=self._send,
            next_id=lambda: RequestId(next(ids)),
            report=self._report,
        )
        if not site.parallel_encodes:
            self.dispatcher.encode_together(site.config.cluster.router)
        self._stealing = DecodeStealing(site.config, self.dispatcher)
        self.device_of = dict(zip(self._roles, assign_devices(self.topology, site.devices), strict=True))
        self.cluster = SimulatedCluster(site, self.agenda, self._roles, self.device_of, self)
        self.cluster.start()
        self._host_cores = self._host_machine()
        self._preprocessing = Preprocessing(self._host_cores, site.host, site.config.media)
        self._until(lambda: self.cluster.complete)
        self._open_s = self.agenda.now_s

    def _host_machine(self) -> Machine:
        """The machine of preprocessing: the device's cores, unless the host has its own."""
        site = self._site
        on_processor = [name for name, kind in site.devices.items() if kind.on_processor]
        if on_processor and not site.host.cores:
            return self.cluster.machines[on_processor[0]]
        return Machine(self.agenda, max(site.host.cores, 1))

    # ---- requests

    def submit(self, row: WorkloadRequest) -> None:
        """Submits a request at its time, in seconds after the deployment is up."""
        self._rows.append(row)
        number = len(self._rows)
        at_s = self._open_s + row.at_s
        self.agenda.schedule_at(at_s, lambda: self._preprocessing.submit(row, lambda: self._submit(number, row, at_s)))

    def _submit(self, number: int, row: WorkloadRequest, arrival_s: float) -> None:
        request, pixels = self._maker.request(row, number, arrival_s)
        handle = self.handles[number] = Stamped(f"r{number}", self.agenda.now)
        self.dispatcher.submit(active_of(request, handle), pixels, self.agenda.now_s)

    def run(self, *, audit: bool = True, until_s: float = math.inf, due_s: float = math.inf) -> list[Record]:
        """Runs until every request has ended, or so many seconds after the deployment was up; records of those that
        run then end there, and it can go on from there. `due_s`: records only of requests that were due by then.
        Raises SimulationError if one does not end, or with `audit` if something is held then: every instance is
        asked for its ledger, which takes as long as a small load."""
        with _without_collections():
            if not self._ticks:
                self._ticks = True
                self._tick()
            self._stop_s = self._open_s + until_s
            self._until(self._is_over)
            if audit:
                rest_s = self.agenda.now_s + _REST_S
                self._until(lambda: self.agenda.now_s >= rest_s)
                self._check_rest()
            return [self._record(index) for index, row in enumerate(self._rows) if row.at_s <= due_s]

    def _is_over(self) -> bool:
        ended = len(self.results) == len(self._rows) and not self._switches
        return ended or self.agenda.now_s >= self._stop_s

    def _span_s(self) -> float:
        """Seconds from when the deployment was up to the last end."""
        running = len(self.results) < len(self._rows)
        ended_s = self.agenda.now_s if running else max(self._ended_s.values(), default=0.0)
        return max(ended_s - self._open_s, 1e-9)

    def busy(self) -> dict[str, Busy]:
        """Busy shares by instance. Call it after `run`."""
        span_s = self._span_s()
        found = {}
        for name, device in self.device_of.items():
            seconds = self.cluster.machines[device].busy_s
            found[name] = Busy(*(seconds.get((name, kind), 0.0) / span_s for kind in ("vision", "language")))
        return found

    def preprocessing_busy(self) -> float:
        """The share of their time for which the decode workers computed, after `run`."""
        span_s = self._span_s()
        busy_s = self._host_cores.busy_s.get((FRONTEND, HOST), 0.0)
        return busy_s / span_s / self._preprocessing.num_workers

    def kill(self, name: str, at_s: float, back_s: float | None) -> None:
        """An instance dies so many seconds after the deployment is up, and is back, empty, `back_s` later or never.
        Nothing happens if it is not there at that time."""
        self.agenda.schedule_at(self._open_s + at_s, lambda: self.cluster.kill(name, back_s))

    # ---- roles at run time

    def switch(self, text: str, at_s: float) -> None:
        """Switches the topology from `at_s` seconds on, as `POST /admin/topology` does: each instance once it is
        empty."""
        self._switches += 1
        self.agenda.schedule_at(self._open_s + at_s, lambda: self._begin_switch(text))

    def _begin_switch(self, text: str) -> None:
        instances = self.dispatcher.instances
        states = [
            InstanceState(name, instances[name].role.letters, loaded.letters, instances[name].condition, 1)
            for name, loaded in self._roles.items()
        ]
        self._next_group(plan_switches(text, states, {}))

    def _next_group(self, groups: Sequence[Sequence[Switch]]) -> None:
        if not groups:
            self._switches -= 1
            return
        names = [switch.name for switch in groups[0]]
        self.dispatcher.instances.drain(names)
        due = [in_flight for in_flight in self.dispatcher.requests.values() if in_flight.may_need_images()]

        def poll() -> None:
            if any(one.may_need_images() for one in due) or any(map(self.dispatcher.holds_work, names)):
                self.agenda.schedule_after(_POLL_S, poll)
                return
            for switch in groups[0]:
                self.cluster.set_role(switch.name, switch.role)
                self.dispatcher.instances[switch.name].role = switch.role
            self.dispatcher.undrain(names, self.agenda.now_s)
            self._next_group(groups[1:])

        poll()

    # ---- time

    def _tick(self) -> None:
        self.dispatcher.tick(self.agenda.now_s)
        self._stealing.tick(self.agenda.now_s)
        self.agenda.schedule_after(TICK_S, self._tick)

    def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            if not self.agenda.step() or self.agenda.now_s > _LONGEST_S:
                lost = [number for number in range(1, len(self._rows) + 1) if number not in self.results]
                raise SimulationError(f"{len(lost)} requests have not ended, the first is {lost[:1]}")

    def _check_rest(self) -> None:
        asked = [node for node in self.cluster.nodes.values() if node.alive]
        for node in asked:
            node.send([QueryLedger(0)])
        self._until(lambda: all(node.name in self._ledgers or not node.alive for node in asked))
        held = {name: ledger for name, ledger in self._ledgers.items() if not ledger.at_rest}
        if held or self.dispatcher.requests:
            raise SimulationError(f"held at rest: {held}, {list(self.dispatcher.requests)}")

    def _record(self, index: int) -> Record:
        number, row = index + 1, self._rows[index]
        result, handle = self.results.get(number), self.handles.get(number)
        stamps = [] if handle is None else handle.stamps
        return Record(
            index=index,
            kind=row.kind,
            planned_s=row.at_s,
            sent_s=row.at_s,
            end_s=self._ended_s.get(number, self.agenda.now_s) - self._open_s,
            wanted_tokens=row.output_tokens,
            stamps=tuple([stamp - self._open_s for stamp in stamps]),
            counts=() if handle is None else handle.counts,
            prompt_tokens=0 if result is None else result.usage.prompt_tokens,
            cached_tokens=0 if result is None else result.usage.cached_tokens,
            error=None if result is None or result.error is None else str(result.error),
        )

    # ---- messages

    def _send(self, name: str, messages: Sequence[ToInstance]) -> None:
        self.cluster.send(name, messages)

    def _report(self, active: ActiveRequest, result: Result) -> None:
        number = int(active.request.arrival_index)
        if number in self.results:
            raise SimulationError(f"request {number} has ended twice")
        self.results[number] = result
        self._ended_s[number] = self.agenda.now_s

    # ---- the cluster's listener

    def on_up(self, name: str) -> None:
        sizes = self.cluster.nodes[name].sizes
        max_num_seqs = sizes.config.scheduler.max_running_requests
        self._stealing.on_up(name, max_num_seqs)
        kv_tokens = sizes.plan.num_kv_blocks * sizes.config.cache.block_size
        self.dispatcher.on_up(name, self.agenda.now_s, max_num_seqs, kv_tokens)

    def on_down(self, name: str, *, restarts: bool) -> None:
        self.statuses.pop(name, None)
        self.dispatcher.on_down(name, self.agenda.now_s, restarts=restarts)

    def on_pair(self, one: str, other: str, up: bool) -> None:
        self.dispatcher.on_pair(one, other, up, self.agenda.now_s)

    def on_messages(self, name: str, messages: Sequence[ToFrontend]) -> None:
        """Handles messages of an instance as frontend/frontend.py does."""
        now = self.agenda.now_s
        for message in messages:
            match message:
                case Status():
                    self.statuses[name] = message
                    self.dispatcher.instances.on_status(name, message)
                case LedgerReport():
                    self._ledgers[name] = message
                case _:
                    self.dispatcher.on_message(name, message, now)


def simulate(topology: str | Topology, site: Site, rows: Sequence[WorkloadRequest], content: int = 0) -> list[Record]:
    """Simulates a load and returns a record of each request. Raises ConfigError for a topology that does not fit the
    site, ResourceError for a model that does not fit a device."""
    deployment = Deployment(topology, site, content=content)
    for row in rows:
        deployment.submit(row)
    return deployment.run()
