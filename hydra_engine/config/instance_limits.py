"""Limits of single instances of a topology: `D:max_num_seqs=128;e0:image_budget=4096`.

A key is the letters of a role, for all instances of exactly that role, or the name of one instance, which wins over its
role. Does not know what the limits mean, only which roles use them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType

from hydra_engine.core.instances import Role, Topology
from hydra_engine.errors import ConfigError

Limits = Mapping[str, int | float]

# The part of the configuration to which each limit belongs.
_PARTS = {
    "token_budget": "scheduler",
    "max_num_seqs": "scheduler",
    "image_budget": "scheduler",
    "kv_cache_gib": "cache",
    "image_cache_gib": "cache",
    "num_kv_blocks": "cache",
    "num_image_blocks": "cache",
}
# A limit is refused for roles without any of these stages.
_USED_BY = {
    "token_budget": Role.P | Role.D,
    "max_num_seqs": Role.P | Role.D,
    "image_budget": Role.E,
    "kv_cache_gib": Role.P | Role.D,
    "image_cache_gib": Role.E | Role.P,
    "num_kv_blocks": Role.P | Role.D,
    "num_image_blocks": Role.E | Role.P,
}
# A number of blocks overrides a size in GiB, so a limit in GiB clears the number.
_BLOCKS_OF = {"kv_cache_gib": "num_kv_blocks", "image_cache_gib": "num_image_blocks"}
_WHOLE = re.compile(r"[1-9][0-9]{0,8}")
_NUMBER = re.compile(r"[0-9]{1,6}(\.[0-9]{1,9})?|\.[0-9]{1,9}")
_SHOWN = 40  # characters that a message quotes


@lru_cache(maxsize=16)
def parse_instance_limits(text: str, topology: str) -> Mapping[str, Limits]:
    """Returns limits by key, a role's letters or an instance name of that topology. Raises ConfigError."""
    roles = _roles_by_key(Topology.parse(topology, nodes=True))
    found: dict[str, Limits] = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        key, colon, limits = entry.partition(":")
        key = _in_order(key.strip())
        if not colon or not limits.strip():
            raise _refused(f"{entry[:_SHOWN]!r} has no limits; write for example D:max_num_seqs=128")
        if key not in roles:
            raise _refused(f"{topology} has no instance or role {key[:_SHOWN]!r}{_nearest(key, roles)}")
        if key in found:
            raise _refused(
                f"{key} is given twice; write its limits with commas, as in D:token_budget=64,max_num_seqs=8"
            )
        found[key] = MappingProxyType(_limits(key, roles[key], limits))
    if not found:
        raise _refused("nothing is limited; write for example D:max_num_seqs=128, or leave it out")
    return MappingProxyType(found)


def chosen_limits(limits: Mapping[str, Limits], name: str, role: Role) -> dict[str, dict[str, int | float | None]]:
    """The limits of one instance by part of the configuration ("scheduler", "cache"); its name's win over its
    role's."""
    chosen: dict[str, int | float | None] = {}
    for key in (role.letters, name):
        own = limits.get(key, {})
        chosen |= {_BLOCKS_OF[limit]: None for limit in own if limit in _BLOCKS_OF} | dict(own)
    parts: dict[str, dict[str, int | float | None]] = {}
    for limit, value in chosen.items():
        parts.setdefault(_PARTS[limit], {})[limit] = value
    return parts


def _roles_by_key(topology: Topology) -> dict[str, Role]:
    by_name = dict(zip(topology.names, (spec.role for spec in topology.instances), strict=True))
    return {role.letters: role for role in by_name.values()} | by_name


def _in_order(key: str) -> str:
    """The letters of a role in the order E, P, D (DP becomes PD); any other key unchanged."""
    letters = "".join(letter for letter in "EPD" if letter in key)
    return letters if sorted(letters) == sorted(key) else key


def _limits(key: str, role: Role, text: str) -> dict[str, int | float]:
    found: dict[str, int | float] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        name = name.replace("-", "_")
        if name not in _PARTS:
            raise _refused(f"{key}: there is no limit {name[:_SHOWN]!r}{_nearest(name, _PARTS)}")
        if not equals:
            raise _refused(f"{key}: {name} has no value; write for example {name}=8")
        if not role & _USED_BY[name]:
            raise _refused(f"{key}: {name} changes nothing for an instance of role {role.letters}; leave it out")
        if name in found:
            raise _refused(f"{key}: {name} is given twice")
        found[name] = _value(key, name, value)
    return found


def _value(key: str, name: str, text: str) -> int | float:
    if name in _BLOCKS_OF:
        if _NUMBER.fullmatch(text) and float(text) > 0:
            return float(text)
        raise _refused(f"{key}: {name} must be a number of GiB above 0, not {text[:_SHOWN]!r}")
    if _WHOLE.fullmatch(text):
        return int(text)
    raise _refused(f"{key}: {name} must be a whole number above 0, not {text[:_SHOWN]!r}")


def _nearest(word: str, known: Iterable[str]) -> str:
    known = list(known)
    near = [other for other in known if other.lower() == word.lower()]
    near = near or difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f"; the nearest one is {near[0]}" if near else f"; there are {', '.join(known[:8])}"


def _refused(why: str) -> ConfigError:
    return ConfigError(f"instance_limits: {why}", param="instance_limits")
