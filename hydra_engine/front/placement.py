"""Whether a topology can serve the model on this machine: asked before instances start, and when roles are switched."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hydra_engine.backend import devices
from hydra_engine.cluster.fit import Demand, check_memory
from hydra_engine.core.messages import InstanceSummary
from hydra_engine.core.roles import EPD, Role, Topology, check_devices, check_serves, check_states


@dataclass(frozen=True, slots=True)
class Placement:
    """What a model asks of a topology."""

    has_vision: bool = True
    keeps_states: bool = False  # its decoder has recurrent states
    device: str = "auto"  # where instances are that name none

    @property
    def stages(self) -> Role:
        return EPD if self.has_vision else Role.P | Role.D

    def check(self, text: str) -> None:
        """Raises ConfigError, with a topology that would do."""
        topology = Topology.parse(text)
        named = {spec.device for spec in topology.instances} - {"auto"}
        check_devices(topology, _known(named))
        # `device` itself is asked for by the instances, which say why they cannot have it.
        placed = topology.devices(self.device)
        check_devices(topology.on(placed), placed)
        check_serves(topology, self.has_vision)
        if self.keeps_states:
            check_states(topology)


def _known(named: Iterable[str]) -> tuple[str, ...]:
    """The devices of this machine. The driver is asked only where a GPU is named."""
    return devices.names() if any(device != devices.CPU for device in named) else (devices.CPU,)


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
