"""The instances of a deployment on devices, connected in pairs; what dies is noticed and comes back empty.

Does what `cluster/supervisor.py` does with processes, and tells a listener the same. Does not know requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from hydra_engine.core.instances import Role
from hydra_engine.core.messages import PeerState, SetRole, ToFrontend, ToInstance
from hydra_engine.core.options import NICENESS
from hydra_planner.simulator.agenda import Agenda
from hydra_planner.simulator.links import Links
from hydra_planner.simulator.machine import Machine
from hydra_planner.simulator.node import Node, Site
from hydra_planner.simulator.worker import Surroundings

# From the end of a process until the frontend learns of it: the supervisor's interval between looks.
NOTICED_S = 0.05


class Listener(Protocol):
    """The part of `ClusterListener` (cluster/member.py) that a simulation calls."""

    def on_up(self, name: str) -> None: ...

    def on_down(self, name: str, *, restarts: bool) -> None: ...

    def on_pair(self, one: str, other: str, up: bool) -> None: ...

    def on_messages(self, name: str, messages: Sequence[ToFrontend]) -> None: ...


class SimulatedCluster:
    """`roles` and `devices` by instance. An instance that has died stays among `nodes` until that is noticed."""

    def __init__(
        self, site: Site, agenda: Agenda, roles: Mapping[str, Role], devices: Mapping[str, str], listener: Listener
    ) -> None:
        self.nodes: dict[str, Node] = {}
        self.machines = {
            name: Machine(agenda, kind.costs.cores if kind.on_processor else 0, time_sliced=kind.time_sliced)
            for name, kind in site.devices.items()
        }
        self._site = site
        self._agenda = agenda
        self._loaded = dict(roles)
        self._roles = dict(roles)  # that they serve now
        self._devices = devices
        self._listener = listener
        self._links = Links(agenda, site.devices, site.host.fabric_bytes_per_s)
        self._lives = dict.fromkeys(roles, 0)
        self._up_sides: dict[frozenset[str], set[str]] = {}

    def start(self) -> None:
        """Starts all instances. Raises ResourceError if the model does not fit a device."""
        for name in self._loaded:
            self._make(name)
        for name in self._loaded:
            self._join(name)

    def send(self, name: str, messages: Sequence[ToInstance]) -> None:
        self.nodes[name].send(messages)

    def set_role(self, name: str, role: Role) -> None:
        """Sets the role of the instance, also for its starts after a death."""
        self._roles[name] = role
        if name in self.nodes:
            self.send(name, [SetRole(role.letters)])

    @property
    def complete(self) -> bool:
        """True if all instances are up and every two of them connected."""
        num = len(self._loaded)
        up = sum(len(sides) == 2 for sides in self._up_sides.values())
        return len(self.nodes) == num and up == num * (num - 1) // 2

    # ---- lives

    def _make(self, name: str) -> None:
        device = self._devices[name]
        neighbours = [other for other in self._loaded if self._devices[other] == device]
        costs = self._site.devices[device].costs
        niceness = NICENESS[self._site.config.lane_order]
        around = Surroundings(device, self.machines[device], self._links, costs, self._site.host, niceness)
        self._lives[name] += 1
        self.nodes[name] = Node(
            name, self._loaded[name], self._lives[name], self._site, self._agenda, around, neighbours, self._receive
        )

    def _join(self, name: str) -> None:
        node = self.nodes[name]
        if self._roles[name] != self._loaded[name]:
            node.send([SetRole(self._roles[name].letters)])
        self._listener.on_up(name)
        for other in self.nodes.values():
            pair = frozenset((name, other.name))
            if other is not node and other.alive and pair not in self._up_sides:
                self._up_sides[pair] = set()
                node.connect(other)

    def kill(self, name: str, back_s: float | None) -> None:
        """Kills the instance at once; no-op if it is not running. It comes back after `back_s` seconds; None: never."""
        node = self.nodes.get(name)
        if node is None or not node.alive:
            return
        node.die()
        self.machines[node.device].drop(name)
        self._links.drop(name)
        for other in self.nodes.values():
            other.lose(node)
        self._agenda.schedule_after(NOTICED_S, lambda: self._notice(name, restarts=back_s is not None))
        if back_s is not None:
            self._agenda.schedule_after(max(back_s, NOTICED_S), lambda: self._restart(name))

    def _notice(self, name: str, *, restarts: bool) -> None:
        del self.nodes[name]
        for pair in [pair for pair in self._up_sides if name in pair]:
            if len(self._up_sides.pop(pair)) == 2:
                one, other = sorted(pair)
                self._listener.on_pair(one, other, False)
        self._listener.on_down(name, restarts=restarts)

    def _restart(self, name: str) -> None:
        self._make(name)
        self._join(name)

    # ---- what instances say

    def _receive(self, node: Node, messages: Sequence[ToFrontend]) -> None:
        if self.nodes.get(node.name) is not node:
            return  # an earlier life: its messages are dropped once its end is known
        states = [message for message in messages if isinstance(message, PeerState)]
        for state in states:
            self._on_peer(node.name, state)
        rest = [message for message in messages if not isinstance(message, PeerState)] if states else messages
        if rest:
            self._listener.on_messages(node.name, rest)

    def _on_peer(self, name: str, state: PeerState) -> None:
        """A pair is up once both sides have said so, and down when one does."""
        sides = self._up_sides.get(frozenset((name, state.name)))
        if sides is None or state.incarnation != self._lives[state.name]:
            return
        was_up = len(sides) == 2
        if state.up:
            sides.add(name)
        else:
            sides.discard(name)
        if was_up != (len(sides) == 2):
            self._listener.on_pair(name, state.name, state.up)
