"""Checks that a topology can serve the model on this machine, and plans switches between topologies at run time.

Roles and devices are checked before instances start, memory once every instance has reported its size. An instance can
only take stages that it was loaded for, and only while it holds no work; at no moment may a stage be unserved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hydra_engine.backend import devices
from hydra_engine.clock import Clock
from hydra_engine.core.instances import EPD, InstanceState, Role, Topology, check_devices, check_serves
from hydra_engine.core.reports import InstanceSummary
from hydra_engine.core.units import size
from hydra_engine.errors import ConfigError, ResourceError
from hydra_engine.frontend.transitions import Dispatcher

_MAX_NAMED = 8  # instances named in an error


@dataclass(frozen=True, slots=True)
class Placement:
    """A model's demands on a topology."""

    has_vision: bool = True
    nodes: bool = False  # the topology may name nodes

    @property
    def stages(self) -> Role:
        return EPD if self.has_vision else Role.P | Role.D

    def check(self, text: str) -> None:
        """Raises ConfigError if the topology cannot serve the model; the error names one that can."""
        topology = Topology.parse(text, nodes=self.nodes)
        # A device named by --device is checked by the instances, which say why it is not available.
        named = {spec.device for spec in topology.instances if not spec.node} - {"auto"}
        check_devices(topology, _known(named))
        check_serves(topology, self.has_vision)


def _known(named: Iterable[str]) -> tuple[str, ...]:
    """The devices of this machine. Queries the driver only if a GPU is named."""
    return devices.names() if any(device != devices.CPU for device in named) else (devices.CPU,)


def check_fits(summaries: Iterable[InstanceSummary]) -> None:
    """Raises ResourceError if the instances of a device hold more than its memory; it names them and what would fit.
    Needed because configured sizes apply per instance, and because pages are not allocated before they are written."""
    by_device: dict[str, list[InstanceSummary]] = {}
    for summary in summaries:
        by_device.setdefault(summary.device, []).append(summary)
    for together in by_device.values():
        _check_device(together, together[0].device_bytes)


def _check_device(summaries: Sequence[InstanceSummary], total_bytes: int) -> None:
    weights = sum(summary.weights_bytes for summary in summaries)
    caches = sum(summary.cache_bytes for summary in summaries)
    if weights + caches <= total_bytes:
        return
    percent = 100 * max(total_bytes - weights, 0) // max(caches, 1)
    if percent >= 1:
        change = (
            f"beside the weights {size(total_bytes - weights)} are left for caches: lower --kv-cache-gib and "
            f"--image-cache-gib (or the numbers of blocks) to {percent} % of what they are"
        )
    else:
        held = accumulate(summary.weights_bytes + summary.cache_bytes for summary in summaries)
        fitting = [
            s.name for s, num_bytes in zip(summaries[:_MAX_NAMED], held, strict=False) if num_bytes <= total_bytes
        ]
        alone = f"; {', '.join(fitting)} would fit" if fitting else ""
        fewer = "" if any(s.quantization for s in summaries) else ", --quantization int8 or int4"
        change = f"the weights alone fill it: take fewer instances{fewer} or a smaller --dtype{alone}"
    named = [f"{s.name} {size(s.weights_bytes)} + {size(s.cache_bytes)}" for s in summaries[:_MAX_NAMED]]
    if len(summaries) > _MAX_NAMED:
        named.append(f"{len(summaries) - _MAX_NAMED} others")
    raise ResourceError(
        f"the instances of one device need {size(weights + caches)}, and it has {size(total_bytes)} (weights + "
        f"caches: {', '.join(named)}); {change}",
        param="kv_cache_gib",
    )


_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Switch:
    name: str
    role: Role


def plan_switches(
    text: str, states: Sequence[InstanceState], devices: Mapping[str, str], stages: Role = EPD
) -> list[list[Switch]]:
    """Returns groups to switch one after the other, each at once after it has been drained. Instances and parts of
    `text` are matched in order; `stages` are the model's. Raises ConfigError if an instance would need weights
    that it does not have."""
    specs = Topology.parse(text, nodes=True).instances
    if len(specs) != len(states):
        raise ConfigError(
            f"topology {text[:80]!r} has {len(specs)} instances, {len(states)} are running; roles can be switched, "
            "instances cannot be added or removed at run time",
            param="topology",
        )
    switches = []
    for spec, state in zip(specs, states, strict=True):
        loaded = Role.parse(state.loaded)
        if spec.role not in loaded:
            raise ConfigError(
                f"instance {state.name} has loaded the weights for {loaded.letters} and cannot serve "
                f"{spec.role.letters}; start it with a role that has both",
                param="topology",
            )
        if spec.node not in ("", state.node):
            raise ConfigError(
                f"instance {state.name} runs on node {state.node} and cannot move to {spec.node}; leave the node out",
                param="topology",
            )
        if spec.device not in ("auto", devices.get(state.name, "auto")):
            raise ConfigError(
                f"instance {state.name} runs on {devices[state.name]} and cannot move to {spec.device}; leave the "
                "device out",
                param="topology",
            )
        if spec.role != Role.parse(state.role):
            switches.append(Switch(state.name, spec.role))
    return _in_order(switches, {state.name: Role.parse(state.role) for state in states}, stages)


def _in_order(switches: list[Switch], roles: dict[str, Role], stages: Role) -> list[list[Switch]]:
    """Switches one by one while the other instances serve all stages, and the rest together."""
    groups: list[list[Switch]] = []
    left = list(switches)
    while left:
        for switch in left:
            others = Role(0)
            for name, role in roles.items():
                if name != switch.name:
                    others |= role
            if stages in others:
                break
        else:
            return [*groups, left]
        groups.append([switch])
        roles[switch.name] = switch.role
        left.remove(switch)
    return groups


async def switch_roles(
    group: Sequence[Switch],
    dispatcher: Dispatcher,
    clock: Clock,
    *,
    set_role: Callable[[str, Role], None],
    check: Callable[[], None],
) -> None:
    """Drains the group's instances, then switches their roles; they get no new requests meanwhile. `set_role` informs
    the instance; `check` raises if the frontend cannot continue."""
    names = [switch.name for switch in group]
    dispatcher.instances.drain(names)
    try:
        # Requests in prefill may still have images encoded there.
        due = [in_flight for in_flight in dispatcher.requests.values() if in_flight.may_need_images()]
        while any(in_flight.may_need_images() for in_flight in due) or any(map(dispatcher.holds_work, names)):
            await asyncio.sleep(_POLL_S)
            check()
        for switch in group:
            set_role(switch.name, switch.role)
            dispatcher.instances[switch.name].role = switch.role
    finally:
        dispatcher.undrain(names, clock.now())
