"""Roles and topologies: which stages an instance serves, and which instances make up a deployment.

Does not know which devices exist; `config.resolve()` checks that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Flag

from hydra_engine.errors import ConfigError


class Role(Flag):
    E = 1
    P = 2
    D = 4

    @classmethod
    def parse(cls, letters: str) -> Role:
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
        """Holds the vision tower, the projector and an image cache to write."""
        return Role.E in self

    @property
    def needs_language(self) -> bool:
        """Holds the decoder and a KV cache."""
        return Role.P in self or Role.D in self


EPD = Role.E | Role.P | Role.D


def sends_features(source: Role, target: Role) -> bool:
    """Whether features that one instance encodes are ever fetched by the other."""
    return Role.E in source and Role.P in target


def sends_kv(source: Role, target: Role) -> bool:
    """Whether requests are ever handed over to the other to decode there. What prefills and decodes keeps its requests,
    but may lend some to an instance that encodes and decodes while that has nothing to encode."""
    if Role.P not in source or Role.D not in target:
        return False
    return Role.D not in source or lends_decodes(source, target)


def lends_decodes(source: Role, target: Role) -> bool:
    """Never in a circle: who may borrow encodes, who lends does not."""
    return Role.D in source and Role.E not in source and Role.E in target and Role.D in target


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    role: Role
    device: str  # "auto", "cpu", "cuda:0"


_PART = re.compile(r"^(?P<count>\d{0,2})(?P<role>[EPD]{1,3})(?:@(?P<device>[a-z]+(?::\d+)?))?$")


@dataclass(frozen=True, slots=True)
class Topology:
    """A multiset of instances, written `EPD`, `EP+D`, `2E+P+D`, `1E3P4D` or `E@cuda:0,P@cuda:0,D@cuda:1`."""

    instances: tuple[InstanceSpec, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """One for each instance, for example e0, e1, pd0."""
        counts: dict[str, int] = {}
        names = []
        for spec in self.instances:
            letters = spec.role.letters.lower()
            names.append(f"{letters}{counts.get(letters, 0)}")
            counts[letters] = counts.get(letters, 0) + 1
        return tuple(names)

    @classmethod
    def parse(cls, text: str) -> Topology:
        # "1E3P4D" is short for "1E+3P+4D": every digit opens a new part.
        spread = re.sub(r"(?<=[EPD])(?=\d+[EPD])", "+", text.strip())
        instances: list[InstanceSpec] = []
        for part in re.split(r"[+,]", spread):
            match = _PART.match(part.strip())
            if match is None:
                raise ConfigError(
                    f"topology {text[:80]!r}: cannot read the part {part[:20]!r}; write for example EPD, EP+D, "
                    "1E3P4D or E@cuda:0,P@cuda:0,D@cuda:1",
                    param="topology",
                )
            spec = InstanceSpec(Role.parse(match["role"]), match["device"] or "auto")
            instances.extend([spec] * int(match["count"] or 1))
        served = Role(0)
        for spec in instances:
            served |= spec.role
        if served != EPD:
            missing = "".join(c for c in "EPD" if Role[c] not in served)
            raise ConfigError(f"topology {text[:80]!r} has no instance for stage {missing}", param="topology")
        return cls(tuple(instances))

    def __str__(self) -> str:
        parts = []
        for spec in self.instances:
            parts.append(spec.role.letters + ("" if spec.device == "auto" else f"@{spec.device}"))
        return "+".join(parts)
