"""Devices by name: what their datasheets say, where each figure comes from, and the ways between two of them.

Figures are those of `devices.json`, peaks that nothing reaches; what is reached of them is for `roofline.py`. A device
whose figures are public but not its maker's says so in its sources. Does not know models.
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from pathlib import Path

import msgspec

from hydra_engine.errors import ConfigError

# Reached of a link in one direction: 380 of NVLink 4's 450 GB/s, 160 of the 200 of an H800, 25 of PCIe 4's 31.5.
LINK_SHARE = 0.8


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Peaks of one device. Rates of links are per direction. `flops_per_s`: of dense matrix products in 16
    bits with sums in float32, a multiply-add counted as two. `price`: of one, in dollars; None: no source."""

    name: str
    aliases: tuple[str, ...]
    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: int
    multiprocessors: int | None = None
    link: str  # to other devices of its kind
    link_bytes_per_s: float
    host_link: str
    host_bytes_per_s: float
    price: float | None = None
    hour_price: float | None = None  # dollars for an hour
    sources: tuple[str, ...]

    @property
    def copy_bytes_per_s(self) -> float:
        """Bandwidth of copies within the device: each byte is read and written."""
        return self.memory_bytes_per_s / 2


class Link(msgspec.Struct, frozen=True):
    """A way between two devices. `bytes_per_s`: what is reached in one direction."""

    name: str
    bytes_per_s: float


@cache
def devices() -> tuple[Device, ...]:
    content = Path(__file__).with_name("devices.json").read_bytes()
    return msgspec.json.decode(content, type=tuple[Device, ...])


def is_known(name: str) -> bool:
    """True if `find_device` finds the name."""
    return _plain(name) in _known()


def slowest_ways() -> tuple[Link, float]:
    """(the way through the host, bytes per second of copies within a device): the slowest of all known devices, for a
    device of which nothing is known."""
    host = min(devices(), key=lambda device: device.host_bytes_per_s)
    way = Link(host.host_link, LINK_SHARE * host.host_bytes_per_s)
    return way, min(device.copy_bytes_per_s for device in devices())


def _known() -> dict[str, Device]:
    return {_plain(alias): device for device in devices() for alias in (device.name, *device.aliases)}


def find_device(name: str) -> Device:
    """Finds a device by its name or an alias, ignoring case, spaces and hyphens. Raises ConfigError."""
    known = _known()
    found = known.get(_plain(name))
    if found is not None:
        return found
    names = ", ".join(device.name for device in devices())
    near = get_close_matches(_plain(name), known, n=1)
    hint = f"; did you mean {known[near[0]].name}?" if near else ""
    raise ConfigError(f"the planner knows no device {name[:40]!r}; there are {names}{hint}", param="device")


def links_between(one: Device, other: Device) -> tuple[Link, ...]:
    """The fastest first: their own link, where both have the same, and the way through the host, which every pair
    has and which is as fast as the slower of its two ends."""
    slower = min(one, other, key=lambda device: device.host_bytes_per_s)
    ways = [Link(slower.host_link, LINK_SHARE * slower.host_bytes_per_s)]
    if one.link == other.link and one.link != slower.host_link:
        ways.append(Link(one.link, LINK_SHARE * min(one.link_bytes_per_s, other.link_bytes_per_s)))
    return tuple(sorted(ways, key=lambda link: -link.bytes_per_s))


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.casefold()))
