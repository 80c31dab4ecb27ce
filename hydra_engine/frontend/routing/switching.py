"""From one topology to another at run time: which instances change their role, and in which order.

An instance can only take stages that it was loaded for, and only while it holds nothing; at no moment may the roles of
all leave a stage out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hydra_engine.clock import Clock
from hydra_engine.core.instances import InstanceState
from hydra_engine.core.roles import EPD, Role, Topology
from hydra_engine.errors import ConfigError
from hydra_engine.frontend.dispatch import Dispatcher

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Switch:
    name: str
    role: Role


def plan_switches(
    text: str, states: Sequence[InstanceState], devices: Mapping[str, str], stages: Role = EPD
) -> list[list[Switch]]:
    """Groups to switch one after the other, each at once after it has been emptied. Instances and parts of `text` are
    matched in order; `stages` are those that the model has. Raises ConfigError where an instance would need weights
    that it does not have."""
    specs = Topology.parse(text).instances
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
    """One by one as long as the others serve all stages meanwhile, the rest together."""
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


class RoleSwitch:
    """`set_role` tells the instance; `check` raises when the front cannot go on."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        clock: Clock,
        *,
        set_role: Callable[[str, Role], None],
        check: Callable[[], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        self._set_role = set_role
        self._check = check

    async def carry_out(self, group: Sequence[Switch]) -> None:
        """Waits until the group's instances have finished what they have; they get nothing new meanwhile."""
        names = [switch.name for switch in group]
        dispatcher = self._dispatcher
        dispatcher.drain(names)
        try:
            # Requests that are under way may still have their images encoded there.
            due = [in_flight for in_flight in dispatcher.requests.values() if in_flight.may_need_images()]
            while any(in_flight.may_need_images() for in_flight in due) or any(map(dispatcher.holds_work, names)):
                await asyncio.sleep(_POLL_S)
                self._check()
            for switch in group:
                self._set_role(switch.name, switch.role)
                dispatcher.set_role(switch.name, switch.role)
        finally:
            dispatcher.undrain(names, self._clock.now())
