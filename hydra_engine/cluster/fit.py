"""Whether the instances on one device fit it together: weights and caches of each, in bytes.

Cache sizes that somebody gave hold for each instance and know nothing of the others; sizes that the engine chose share
the device already. Asks no device and reads no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hydra_engine.errors import ResourceError

_MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class Demand:
    """What one instance holds. `cache_bytes`: KV, images and recurrent states together."""

    name: str
    weights_bytes: int
    cache_bytes: int


def check_memory(demands: Sequence[Demand], total_bytes: int) -> None:
    """For the instances of one device that has `total_bytes`. Raises ResourceError naming them and what would fit."""
    weights = sum(demand.weights_bytes for demand in demands)
    caches = sum(demand.cache_bytes for demand in demands)
    if weights + caches <= total_bytes:
        return
    percent = 100 * max(total_bytes - weights, 0) // max(caches, 1)
    if percent >= 1:
        change = (
            f"beside the weights {_gib(total_bytes - weights)} are left for caches: lower kv_cache_gib and "
            f"image_cache_gib (or the numbers of blocks) to {percent} % of what they are"
        )
    else:
        fitting = _fitting(demands, total_bytes)
        alone = f"; {', '.join(fitting)} would fit" if fitting else ""
        change = f"the weights alone fill it: take fewer instances or a smaller dtype{alone}"
    raise ResourceError(
        f"the instances of one device need {_gib(weights + caches)}, and it has {_gib(total_bytes)} (weights + "
        f"caches: {_needs(demands)}); {change}",
        param="kv_cache_gib",
    )


def _needs(demands: Sequence[Demand]) -> str:
    named = [f"{d.name} {_gib(d.weights_bytes)} + {_gib(d.cache_bytes)}" for d in demands[:_MAX_NAMED]]
    if len(demands) > _MAX_NAMED:
        named.append(f"{len(demands) - _MAX_NAMED} others")
    return ", ".join(named)


def _fitting(demands: Sequence[Demand], total_bytes: int) -> list[str]:
    """The first instances that fit as they are."""
    names: list[str] = []
    for demand in demands[:_MAX_NAMED]:
        total_bytes -= demand.weights_bytes + demand.cache_bytes
        if total_bytes < 0:
            break
        names.append(demand.name)
    return names


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.3g} GiB"
