"""Whether a topology can serve the model on this machine: its roles and devices before instances start and when roles
are switched, and its memory once every instance has said what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hydra_engine.backend import devices
from hydra_engine.core.messages import InstanceSummary
from hydra_engine.core.roles import EPD, Role, Topology, check_devices, check_serves, check_states
from hydra_engine.core.units import size
from hydra_engine.errors import ResourceError

_MAX_NAMED = 8  # instances in a message


@dataclass(frozen=True, slots=True)
class Placement:
    """The stages, states and devices that a model asks of a topology."""

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
    """Raises ResourceError, naming the instances of a device that hold more than it has, and what would fit. Sizes that
    the configuration gives hold for each instance and know nothing of the others. Pages that nobody has written yet are
    not missed before they are."""
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
        change = f"the weights alone fill it: take fewer instances or a smaller --dtype{alone}"
    named = [f"{s.name} {size(s.weights_bytes)} + {size(s.cache_bytes)}" for s in summaries[:_MAX_NAMED]]
    if len(summaries) > _MAX_NAMED:
        named.append(f"{len(summaries) - _MAX_NAMED} others")
    raise ResourceError(
        f"the instances of one device need {size(weights + caches)}, and it has {size(total_bytes)} (weights + "
        f"caches: {', '.join(named)}); {change}",
        param="kv_cache_gib",
    )
