"""Simulated deployments of up to hundreds of devices: whether each device does as much as in a small one, what the one
frontend's table and router take of a core, and how soon an instance that joins carries its share.

The router, the frontend's table and the schedulers are the real ones; their seconds are those of this machine, of the
thread alone. Only what the simulator plays (devices, links, preprocessing, processes) is virtual.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from hydra_engine.cluster.channel import encode_frames
from hydra_engine.config import CacheConfig, EngineConfig, MediaConfig, SchedulerConfig
from hydra_engine.core.instances import InstanceSpec, Role, Topology
from hydra_engine.core.messages import ToFrontend, ToInstance
from hydra_engine.core.reports import Status
from hydra_planner.hardware.devices import find_device
from hydra_planner.hardware.roofline import device_kind
from hydra_planner.papers.models import spec_of
from hydra_planner.records import Record, quantile
from hydra_planner.simulator.costs import Host
from hydra_planner.simulator.deployment import Deployment
from hydra_planner.simulator.node import Site
from hydra_planner.slo import Limits
from hydra_planner.workload.generators import make_load

MODEL, DEVICE, LOAD, DTYPE = "llava-34b", "H200", "textcaps", "float16"
LIMITS = Limits(2.0, 0.06)
LINK_BYTES_PER_S = 40e9  # of a network card of 400 Gbit/s for each device
HOST_CORES = 128  # of the frontend's node, for pictures
_KV_BLOCKS, _IMAGE_BLOCKS = 4096, 64
_COLD = 0.35  # share of a load in which queues form: not judged
_SAMPLED = 64  # one message of so many is encoded, to know its bytes
_SHARE = 0.9  # of what its peers hold

KINDS = ("EPD", "E+P+D")


def topology(kind: str, devices: int) -> Topology:
    """`devices` instances, each on its own; E, P and D in the ratio 1 : 3 : 4."""
    eighth = devices // 8
    roles = ["EPD"] * devices if kind == "EPD" else ["E"] * eighth + ["P"] * 3 * eighth + ["D"] * 4 * eighth
    return Topology(tuple(InstanceSpec(Role.parse(role), f"cuda:{n}") for n, role in enumerate(roles)))


def site(devices: int) -> Site:
    spec = spec_of(MODEL)
    kind = replace(device_kind(spec, find_device(DEVICE), DTYPE), link_bytes_per_s=LINK_BYTES_PER_S)
    config = EngineConfig(
        dtype=DTYPE,
        media=MediaConfig(decode_workers=HOST_CORES),
        cache=CacheConfig(num_kv_blocks=_KV_BLOCKS, num_image_blocks=_IMAGE_BLOCKS),
        scheduler=SchedulerConfig(ttft_slo=LIMITS.ttft_s, tpot_slo=LIMITS.tpot_limit_s, max_queue=1 << 20),
    )
    return Site(spec, config, {f"cuda:{n}": kind for n in range(devices)}, Host(cores=HOST_CORES))


@dataclass
class Meter:
    """Seconds of the frontend's code in a simulation, and what reaches it."""

    deployment: Deployment
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)
    routes: list[tuple[int, float]] = field(default_factory=list)  # (requests in flight, seconds)
    messages: Counter[str] = field(default_factory=Counter)
    sampled_bytes: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    tokens: int = 0
    max_in_flight: int = 0

    def __post_init__(self) -> None:
        dispatcher = self.deployment.dispatcher
        router: Any = dispatcher._router
        for owner, name in (
            *((router, name) for name in ("route", "decoder", "encoders")),
            *((dispatcher, name) for name in ("submit", "tick", "on_pair")),
            (dispatcher.instances, "on_status"),
        ):
            setattr(owner, name, self._timed(name, getattr(owner, name)))
        setattr(self.deployment, "on_messages", self._counted(self.deployment.on_messages))  # noqa: B010 - a method

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        requests = self.deployment.dispatcher.requests

        def timed(*arguments: Any, **named: Any) -> Any:
            began_s = time.thread_time()
            found = call(*arguments, **named)
            took_s = time.thread_time() - began_s
            self.seconds[name] += took_s
            self.calls[name] += 1
            if name == "route":
                self.routes.append((len(requests), took_s))
            return found

        return timed

    def _counted(self, call: Callable[[str, Sequence[ToFrontend]], None]) -> Callable[..., None]:
        def counted(name: str, messages: Sequence[ToFrontend]) -> None:
            for message in messages:
                kind = type(message).__name__
                self.messages[kind] += 1
                if self.messages[kind] % _SAMPLED == 1:
                    self.sampled_bytes[kind].append(len(encode_frames([message])))
                self.tokens += len(message.token_ids) if kind == "Tokens" else 0  # type: ignore[union-attr]
            self.max_in_flight = max(self.max_in_flight, len(self.deployment.dispatcher.requests))
            call(name, messages)

        return counted

    def document(self, span_s: float) -> dict[str, Any]:
        """Shares of a core are of the virtual time: what a frontend would be busy with these calls."""
        found = {
            name: {"calls": self.calls[name], "us": 1e6 * took_s / self.calls[name], "core": took_s / span_s}
            for name, took_s in self.seconds.items()
        }
        kinds = {
            kind: {"per_s": count / span_s, "bytes": fmean(self.sampled_bytes[kind])}
            for kind, count in self.messages.items()
        }
        return {"calls": found, "messages": kinds, "tokens_per_s": self.tokens / span_s}


class Joining:
    """Watches an instance that comes into a busy deployment: when it gets its first message, and when it holds as many
    requests as its peers of the same role."""

    def __init__(self, deployment: Deployment, name: str, at_s: float) -> None:
        self.first_s: float | None = None  # since it was there
        self.share_s: float | None = None
        self._name, self._deployment = name, deployment
        self._due_s = deployment.agenda.now_s + at_s
        roles = deployment.dispatcher.instances
        self._peers = [one for one in roles if one != name and roles[one].role == roles[name].role]
        deployment.kill(name, 0.0, at_s)
        send, on_messages = deployment.cluster.send, deployment.on_messages

        def sending(to: str, messages: Sequence[ToInstance]) -> None:
            if to == name and self.first_s is None and self._is_back:
                self.first_s = self._since_s
            send(to, messages)

        def receiving(of: str, messages: Sequence[ToFrontend]) -> None:
            on_messages(of, messages)
            if of == name and self._is_back and any(isinstance(message, Status) for message in messages):
                self._compare()

        setattr(deployment.cluster, "send", sending)  # noqa: B010 - methods
        setattr(deployment, "on_messages", receiving)  # noqa: B010

    @property
    def _since_s(self) -> float:
        return self._deployment.agenda.now_s - self._due_s

    @property
    def _is_back(self) -> bool:
        return self._since_s >= 0

    def _compare(self) -> None:
        loads = self._deployment.dispatcher.instances
        held = loads[self._name].decodes
        if self.share_s is None and held and held >= _SHARE * fmean(loads[one].decodes for one in self._peers):
            self.share_s = self._since_s


def run(kind: str, devices: int, rate: float, seconds: float, *, joins_s: float | None = None) -> dict[str, Any]:
    """Simulates `rate` requests a second and device for so many seconds. `joins_s`: the last instance comes then."""
    count = max(int(rate * devices * seconds), 2)
    rows = make_load(LOAD, count, rate * devices, seed=1)
    began_s = time.perf_counter()
    deployment = Deployment(topology(kind, devices), site(devices), content=1)
    built_s = time.perf_counter() - began_s
    meter = Meter(deployment)
    joining = None if joins_s is None else Joining(deployment, deployment.topology.names[-1], joins_s)
    for row in rows:
        deployment.submit(row)
    last_s = rows[-1].at_s
    records = deployment.run(audit=False, until_s=last_s)
    judged = [one for one in records if _COLD * last_s <= one.planned_s <= last_s - LIMITS.ttft_s]
    return {
        "topology": kind,
        "devices": devices,
        "rate_per_device": rate,
        "requests": count,
        "seconds": last_s,
        "wall_s": time.perf_counter() - began_s,
        "built_s": built_s,
        "in_flight": meter.max_in_flight,
        **_quality(judged, rate),
        "preprocessing_cores": deployment.preprocessing_busy() * HOST_CORES,
        "frontend": meter.document(last_s),
        "routes": _by_in_flight(meter.routes),
        "joined": None if joining is None else {"first_s": joining.first_s, "share_s": joining.share_s},
        "statuses": list(deployment.statuses.values()),  # for what follows; no part of the document
    }


def _quality(judged: Sequence[Record], rate: float) -> dict[str, Any]:
    met = sum(map(LIMITS.met, judged))
    ttft = [one.latency_s if one.ttft_s is None else one.ttft_s for one in judged]
    tpot = [one.tpot_s for one in judged if one.tpot_s is not None]
    shares = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    return {
        "judged": len(judged),
        "attainment": met / len(judged),
        "goodput_per_device": rate * met / len(judged),
        "ttft_ms": {name: 1e3 * (quantile(ttft, share) or 0.0) for name, share in shares},
        "tpot_ms": {name: 1e3 * (quantile(tpot, share) or 0.0) for name, share in shares},
    }


def _by_in_flight(routes: Sequence[tuple[int, float]]) -> list[dict[str, float]]:
    """Medians of a decision's microseconds over tenths of the load, by the requests in flight there."""
    part = max(len(routes) // 10, 1)
    groups = [routes[begin : begin + part] for begin in range(0, len(routes), part)]
    return [
        {"in_flight": median(count for count, _ in group), "us": 1e6 * median(took_s for _, took_s in group)}
        for group in groups
    ]
