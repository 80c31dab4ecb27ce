"""Whether a topology can serve the model on this machine: asked before instances start, and when roles are switched."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hydra_engine.cluster.fit import Demand, check_memory
from hydra_engine.core.messages import InstanceSummary
from hydra_engine.core.roles import EPD, Role, Topology, check_devices, check_serves, check_states

DEVICES = ("cpu",)  # that instances can be placed on


@dataclass(frozen=True, slots=True)
class Placement:
    """What a model asks of a topology."""

    has_vision: bool = True
    keeps_states: bool = False  # its decoder has recurrent states

    @property
    def stages(self) -> Role:
        return EPD if self.has_vision else Role.P | Role.D

    def check(self, text: str) -> None:
        """Raises ConfigError, with a topology that would do."""
        topology = Topology.parse(text)
        check_devices(topology, DEVICES)
        check_serves(topology, self.has_vision)
        if self.keeps_states:
            check_states(topology)


def check_fits(summaries: Iterable[InstanceSummary]) -> None:
    """Raises ResourceError if the instances of one device hold more than it has. Pages that nobody has written yet are
    not missed before they are."""
    by_device: dict[str, list[InstanceSummary]] = {}
    for summary in summaries:
        by_device.setdefault(summary.device, []).append(summary)
    for together in by_device.values():
        demands = [
            Demand(s.name, s.weights_bytes, s.kv_cache_bytes + s.image_cache_bytes + s.state_bytes) for s in together
        ]
        check_memory(demands, together[0].device_bytes)
