"""Candidate deployments: roles assigned to devices, some instances together on one device.

Families after HydraInfer (section 5.3: EP+D, ED+P, E+P+D), with EPD and E+PD, and EPD-Serve's instances that share a
device, written there (E-PD), (E-P)-D and (E-D)-P. Does not know loads or costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hydra_engine.core.instances import InstanceSpec, Role, Topology
from hydra_planner.search.settings import Setting

_MAX_SPLITS = 24  # of one family: more devices than make these are shared out in larger steps


@dataclass(frozen=True, slots=True)
class Candidate:
    """`family` is its name in tables; every instance of `topology` names its device. `settings`: beyond the user's."""

    topology: Topology
    family: str
    settings: tuple[Setting, ...] = ()

    @property
    def name(self) -> str:
        """Short: numbers of roles, and in brackets what shares a device."""
        return self.name_on({})

    def name_on(self, kinds: Mapping[str, str]) -> str:
        """Returns `name`, with the kind of each device behind an @ where `kinds`, by device, has several."""
        unlike = len(set(kinds.values())) > 1
        groups = Counter(
            (roles, kinds[device].replace(" ", "") if unlike else "") for device, roles in self._by_device().items()
        )
        parts = []
        for (roles, kind), count in groups.items():
            text = roles[0] if len(roles) == 1 else f"({'-'.join(roles)})"
            parts.append(f"{count if count > 1 else ''}{text}{'@' if kind else ''}{kind}")
        return "+".join(parts)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self._by_device())

    def _by_device(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        for spec in self.topology.instances:
            found[spec.device] = (*found.get(spec.device, ()), spec.role.letters)
        return found


# (family, what stands on the devices of each part)
_APART: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("EPD", (("EPD",),)),
    ("EP+D", (("EP",), ("D",))),
    ("ED+P", (("ED",), ("P",))),
    ("E+PD", (("E",), ("PD",))),
    ("E+P+D", (("E",), ("P",), ("D",))),
    ("EPD+PD", (("EPD",), ("PD",))),
    ("E+EPD", (("E",), ("EPD",))),
)
_TOGETHER: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("(E-PD)", (("E", "PD"),)),
    ("(E-P)-D", (("E", "P"), ("D",))),
    ("(E-D)-P", (("E", "D"), ("P",))),
)
_ONE_DEVICE: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("(EP-D)", (("EP", "D"),)),
    ("(ED-P)", (("ED", "P"),)),
    ("(E-P-D)", (("E", "P", "D"),)),
    ("2EPD", (("EPD", "EPD"),)),
)
_TEXT: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("PD", (("PD",),)),
    ("P+D", (("P",), ("D",))),
)


def candidates(devices: Mapping[str, str], *, has_vision: bool = True, together: bool = True) -> list[Candidate]:
    """`devices`: the kind of each by name. Parts get devices in every ratio; where kinds differ, each part may also
    prefer either end of their order, so that encoders can stand on the cheaper ones. `together`: also with instances
    that share a device."""
    shared = (*_TOGETHER, *(_ONE_DEVICE if len(devices) == 1 else ())) if together else ()
    families = (*_APART, *shared) if has_vision else _TEXT
    orders = [list(devices)]
    if len(set(devices.values())) > 1:
        orders.append(orders[0][::-1])
    found: dict[str, Candidate] = {}
    for family, parts in families:
        for names in orders:
            for counts in _splits(len(names), len(parts)):
                candidate = Candidate(_placed(parts, counts, names), family)
                key = repr(sorted((devices[name], roles) for name, roles in candidate._by_device().items()))
                found.setdefault(key, candidate)
    return list(found.values())


def _splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Numbers of devices of each part, all of them used and none without."""
    every = list(_compositions(total, parts))
    step = -(-len(every) // _MAX_SPLITS) if every else 1
    yield from every[::step]


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        if total >= 1:
            yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in _compositions(total - first, parts - 1):
            yield (first, *rest)


def _placed(parts: Sequence[Sequence[str]], counts: Sequence[int], names: Sequence[str]) -> Topology:
    instances, at = [], 0
    for roles, count in zip(parts, counts, strict=True):
        for name in names[at : at + count]:
            instances += [InstanceSpec(Role.parse(role), name) for role in roles]
        at += count
    return Topology(tuple(instances))
