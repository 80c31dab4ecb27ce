"""Instances: the role of one (the stages that it serves), the topology of a deployment, checks that a topology serves a
model, and the state of a running instance.

An error for a topology suggests a similar one that works. Does not know models or machines: the checks receive what a
model needs and which devices exist.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Flag, StrEnum
from itertools import groupby

from hydra_engine.core.reports import InstanceSummary, Status
from hydra_engine.errors import ConfigError


class Role(Flag):
    """The stages that an instance serves: any of E (encode), P (prefill) and D (decode)."""

    E = 1
    P = 2
    D = 4

    @classmethod
    def parse(cls, letters: str) -> Role:
        """Parses letters such as "PD". Raises ConfigError for none, for other letters, and if one occurs twice."""
        if not letters or any(c not in "EPD" for c in letters) or len(set(letters)) != len(letters):
            raise ConfigError(f"role {letters[:20]!r} is not a combination of the letters E, P and D", param="topology")
        role = cls(0)
        for letter in letters:
            role |= cls[letter]
        return role

    @property
    def letters(self) -> str:
        return "".join(c for c in "EPD" if Role[c] in self)

    @property
    def needs_vision(self) -> bool:
        """True if its instances load the vision tower and the projector: with E."""
        return Role.E in self

    @property
    def needs_language(self) -> bool:
        """True if its instances load the language model and have a KV cache: with P or D."""
        return Role.P in self or Role.D in self


EPD = Role.E | Role.P | Role.D


def role_of(name: str) -> Role:
    """The role with which an instance of this name starts, for example PD for pd0 (see `Topology.names`). Raises
    ConfigError for a name without a role."""
    return Role.parse(name.rstrip("0123456789").upper())


def lends_decodes(source: Role, target: Role) -> bool:
    """True if decodes may move from an instance of role `source` to one of role `target` while that has nothing to
    encode. There is no cycle, also not with hand-overs after a prefill: only the borrower has E, and it has no P."""
    return Role.D in source and Role.E not in source and target == Role.E | Role.D


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    role: Role
    device: str  # "auto", "cpu", "cuda:0"
    node: str = ""  # the machine, of a cluster of several; "": this one

    @property
    def place(self) -> str:
        """The part behind "@" in a topology: "a", "cuda:0", "a:cuda:0"; "" for none."""
        return ":".join(filter(None, (self.node, "" if self.device == "auto" else self.device)))


MAX_INSTANCES = 64

_PART = re.compile(r"(?P<count>[0-9]{0,6})(?P<role>[EPD]{1,3})(?:@(?P<device>.*))?")
_DEVICE = re.compile(r"auto|cpu|cuda:(?:0|[1-9][0-9]{0,2})")
_NODE = re.compile(r"(?!(?:auto|cpu|cuda)(?::|$))(?P<node>[A-Za-z0-9][A-Za-z0-9._-]{0,252})(?::(?P<device>.*))?", re.I)
_MAX_EXAMPLE = 100  # characters of a topology in a message


@dataclass(frozen=True, slots=True)
class Topology:
    """The instances of a deployment in order, written as `EPD`, `EP+D`, `2E+P+D`, `1E3P4D`,
    `E@cuda:0,P@cuda:0,D@cuda:1` or, over several machines, `2E@node1+PD@node2:cuda:0`."""

    instances: tuple[InstanceSpec, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the instances by role and number, for example e0, e1, pd0."""
        counts: dict[str, int] = {}
        names = []
        for spec in self.instances:
            letters = spec.role.letters.lower()
            names.append(f"{letters}{counts.get(letters, 0)}")
            counts[letters] = counts.get(letters, 0) + 1
        return tuple(names)

    def devices(self, default: str) -> tuple[str, ...]:
        """Devices of the instances, in order. "auto" becomes `default`; if that is "auto" too, the first device that
        the topology names on the same node, and if it names none, "auto" stays."""
        others: dict[str, str] = {}
        for spec in self.instances:
            if default != "auto" or spec.device != "auto":
                others.setdefault(spec.node, spec.device if default == "auto" else default)
        return tuple(others.get(spec.node, "auto") if spec.device == "auto" else spec.device for spec in self.instances)

    def with_devices(self, devices: Sequence[str]) -> Topology:
        """A copy of the topology with these devices, one for each instance. Raises ValueError for another number."""
        placed = zip(self.instances, devices, strict=True)
        return Topology(tuple(replace(spec, device=device) for spec, device in placed))

    @property
    def served(self) -> Role:
        """The stages that at least one instance serves."""
        role = Role(0)
        for spec in self.instances:
            role |= spec.role
        return role

    @classmethod
    def parse(cls, text: str, *, nodes: bool = False) -> Topology:
        """Parses a topology, with names of nodes only if `nodes`. Raises ConfigError if it cannot be read, has more
        than MAX_INSTANCES instances, or has none for P or for D; `check_serves` also requires E for a vision model."""
        # "1E3P4D" is short for "1E+3P+4D": every digit opens a new part, but for those in names of nodes.
        spread = re.sub(r"(@[^+,]*)|(?<=[EPD])(?=[0-9]+[EPD])", lambda match: match[1] or "+", text.strip())
        instances: list[InstanceSpec] = []
        for part in re.split(r"[+,]", spread):
            count, spec = _part(text, part.strip(), nodes=nodes)
            if len(instances) + count > MAX_INSTANCES:
                raise _refused(text, f"there can be at most {MAX_INSTANCES} instances; start a second server for more")
            instances.extend([spec] * count)
        topology = cls(tuple(instances))
        _check_stages(topology, Role.P | Role.D)
        return topology

    def __str__(self) -> str:
        parts = []
        for spec, run in groupby(self.instances):
            count = len(list(run))
            place = f"@{spec.place}" if spec.place else ""
            parts.append(f"{count if count > 1 else ''}{spec.role.letters}{place}")
        return "+".join(parts)


def _part(text: str, part: str, *, nodes: bool) -> tuple[int, InstanceSpec]:
    """(number of instances, their spec) of a part such as `2P@cuda:1`. Raises ConfigError that quotes all of `text`."""
    match = _PART.fullmatch(part)
    if match is None:
        raise _refused(
            text,
            f"cannot read the part {part[:20]!r}; write for example EPD, EP+D, 1E3P4D or E@cuda:0,P@cuda:0,D@cuda:1",
        )
    node, device = "", match["device"] if match["device"] is not None else "auto"
    if (named := _NODE.fullmatch(device)) is not None:
        if not nodes:
            raise _refused(
                text,
                f"there is no device {device[:20]!r}, and names of other machines need --cluster; write cpu or cuda:N, "
                "for example E@cuda:0+PD@cuda:1",
            )
        node, device = named["node"], named["device"] if named["device"] is not None else "auto"
    if _DEVICE.fullmatch(device) is None:
        raise _refused(text, f"there is no device {device[:20]!r}; write cpu or cuda:N, for example E@cuda:0+PD@cuda:1")
    count = int(match["count"] or 1)
    if count == 0:
        raise _refused(text, f"the part {part[:20]!r} stands for no instance; leave it out or write a number above 0")
    return count, InstanceSpec(Role.parse(match["role"]), device, node)


# ---- checks, each with a topology that would work


def check_serves(topology: Topology, has_vision: bool) -> None:
    """Raises ConfigError unless every stage of the model is served and every instance has a stage to run: without
    vision no instance may have only E."""
    _check_stages(topology, EPD if has_vision else Role.P | Role.D)
    names = [name for name, spec in zip(topology.names, topology.instances, strict=True) if spec.role == Role.E]
    if names and not has_vision:
        rest = Topology(tuple(spec for spec in topology.instances if spec.role != Role.E))
        raise _refused(
            str(topology),
            f"this model has no vision tower, so {_listed(names)} would have nothing to do; write {_examples(rest)}",
        )


def check_devices(topology: Topology, devices: Sequence[str]) -> None:
    """Raises ConfigError if an instance of the topology names a device that is not in `devices`, for example ("cpu",
    "cuda:0"). "auto" is allowed, and what is on another node is not checked."""
    here = [spec.device for spec in topology.instances if not spec.node]
    wanted = list(dict.fromkeys(device for device in here if device != "auto"))
    missing = [device for device in wanted if device not in devices]
    if missing:
        others = [device for device in devices if _kind(device) == _kind(missing[0])] or ["cpu"]
        moved = dict.fromkeys(missing, others[-1])
        raise _refused(
            str(topology),
            f"this machine has no {' and no '.join(missing)}, only {_listed(devices)}; write for example "
            f"{_examples(_moved(topology, moved))}",
        )


def _check_stages(topology: Topology, needed: Role) -> None:
    """Raises ConfigError unless every stage in `needed` has an instance."""
    missing = needed & ~topology.served
    if not missing:
        return
    stages = ("stage " if len(missing.letters) == 1 else "stages ") + " and ".join(missing.letters)
    fill = EPD & ~topology.served
    raise ConfigError(
        f"topology {_shown(str(topology))} has no instance for {stages}; write "
        f"for example {_examples(_with_instance(topology, fill), _with_stages(topology, fill))}",
        param="topology",
    )


def _nearest(topology: Topology) -> int:
    """Index of the instance that can serve another stage most cheaply: the first with P, else with D, which have the
    decoder's weights, else with E. Raises ValueError without instances."""
    for stage in (Role.P, Role.D, Role.E):
        for index, spec in enumerate(topology.instances):
            if stage in spec.role:
                return index
    raise ValueError("a topology without instances")


def _with_stages(topology: Topology, stages: Role) -> Topology:
    """A copy of the topology in which the `_nearest` instance, the one that takes them most cheaply, also serves
    `stages`."""
    instances = list(topology.instances)
    index = _nearest(topology)
    instances[index] = replace(instances[index], role=instances[index].role | stages)
    return Topology(tuple(instances))


def _with_instance(topology: Topology, role: Role) -> Topology:
    """A copy of the topology with one more instance, of this role and on the device of the `_nearest` one, before the
    first instance whose role begins with a later stage."""
    instances = list(topology.instances)
    own = "EPD".index(role.letters[0])
    later = (i for i, spec in enumerate(instances) if "EPD".index(spec.role.letters[0]) > own)
    instances.insert(next(later, len(instances)), replace(instances[_nearest(topology)], role=role))
    return Topology(tuple(instances))


def _moved(topology: Topology, devices: dict[str, str]) -> Topology:
    """A copy of the topology in which devices that are keys of `devices` are replaced by their values."""
    return Topology(tuple(replace(spec, device=devices.get(spec.device, spec.device)) for spec in topology.instances))


def _kind(device: str) -> str:
    """The kind of a device: "cuda" for "cuda:0"."""
    return device.split(":")[0]


def _examples(*topologies: Topology) -> str:
    """The distinct topologies that are short enough for a message, joined by "or"; EPD if none is."""
    shown = [text for topology in topologies if len(text := str(topology)) <= _MAX_EXAMPLE]
    return " or ".join(dict.fromkeys(shown)) or "EPD"


def _listed(words: Sequence[str]) -> str:
    """The words joined by commas and "and"; of more than four, the first three and the number of the rest."""
    if len(words) > 4:
        return f"{', '.join(words[:3])} and {len(words) - 3} others"
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _shown(text: str) -> str:
    """The text in quotes, cut to `_MAX_EXAMPLE` characters."""
    return repr(text if len(text) <= _MAX_EXAMPLE else text[: _MAX_EXAMPLE - 1] + "…")


def _refused(text: str, why: str) -> ConfigError:
    """The error that refuses the topology `text`, for the caller to raise."""
    return ConfigError(f"topology {_shown(text)}: {why}", param="topology")


class Condition(StrEnum):
    """The condition of an instance, as the frontend process knows it."""

    STARTING = "starting"  # for the first time or again; also while it waits for its next start
    READY = "ready"
    SILENT = "silent"  # no message for too long: it gets no work, and is killed if that continues
    DRAINING = "draining"  # it finishes its requests and gets no new ones
    FAILED = "failed"  # it has ended and is not started again: too many failed starts, or it ran on a thread
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class InstanceState:
    """The state of an instance. `role`: the stages that it serves now; `loaded`: those that it has weights for; both as
    letters. `restarts`: how often it has ended without being stopped. `pid`: None without a process on this machine.
    `status`, `summary`: the latest that it sent, None from each start until the first."""

    name: str
    role: str
    loaded: str
    condition: Condition
    incarnation: int
    restarts: int = 0
    pid: int | None = None
    reason: str = ""  # why it is not ready
    status: Status | None = None
    summary: InstanceSummary | None = None
    node: str = ""  # of a cluster of several machines
