"""Declaration of options by the fields of the configuration classes."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any

from hydra_engine.errors import ConfigError

LOG_FORMATS = ("text", "json")

_INTERNAL = frozenset({"local_files"})  # set by a command itself
_POSITIONAL = frozenset({"model"})
_SECRET_ENDINGS = ("_key", "_token", "_password")


def _names() -> Any:
    return field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Option:
    """A field of a configuration class. `name` has dashes; `kind` is bool, int, float, str or tuple, of `item`s."""

    name: str
    field: str
    owner: type
    kind: type
    default: Any
    help: str
    item: type = str
    optional: bool = False  # None is a value
    unset: str = ""  # what None stands for
    form: str = ""  # seconds, json, file or folder
    choices: tuple[str, ...] | None = None
    # Choices by the names that other engines have for them, and choices of other engines with what to do instead.
    other_choices: Mapping[str, str] = _names()
    refused_choices: Mapping[str, str] = _names()
    aliases: tuple[str, ...] = ()
    secret: bool = False
    positional: bool = False
    internal: bool = False  # no user sets it

    @property
    def flag(self) -> str:
        return "--" + self.name


def opt(default: Any, help: str, *, secret: bool = False, **metadata: Any) -> Any:
    return field(default=default, repr=not secret, metadata={"help": help, "secret": secret, **metadata})


def positive(group: object, *names: str) -> None:
    for name in names:
        if (value := getattr(group, name)) is not None and value <= 0:
            raise ConfigError(f"{name} must be positive", param=name)


def not_negative(group: object, *names: str) -> None:
    for name in names:
        if (value := getattr(group, name)) is not None and value < 0:
            raise ConfigError(f"{name} must be 0 or more", param=name)


@cache
def declared_options(cls: type) -> tuple[Option, ...]:
    """Options of a configuration class: all of its fields but those that are configuration classes."""
    hints = typing.get_type_hints(cls)
    return tuple(_option(cls, f, hints[f.name]) for f in fields(cls) if not is_dataclass(hints[f.name]))


def options_of(cls: type) -> Iterator[Option]:
    return (option for option in declared_options(cls) if not option.internal)


def _option(cls: type, f: Field[Any], hint: Any) -> Option:
    optional = isinstance(hint, types.UnionType)
    if optional:
        hint = next(t for t in typing.get_args(hint) if t is not type(None))
    return Option(
        name=f.metadata.get("flag", f.name).replace("_", "-"),
        field=f.name,
        owner=cls,
        kind=typing.get_origin(hint) or hint,
        default=None if f.default is MISSING else f.default,
        help=f.metadata.get("help", ""),
        item=next(iter(typing.get_args(hint)), str),
        optional=optional,
        unset=f.metadata.get("unset", ""),
        form=f.metadata.get("kind", ""),
        choices=f.metadata.get("choices"),
        other_choices=f.metadata.get("other_choices", {}),
        refused_choices=f.metadata.get("refused_choices", {}),
        aliases=f.metadata.get("aliases", ()),
        secret=f.metadata.get("secret", f.name.endswith(_SECRET_ENDINGS)),
        positional=f.name in _POSITIONAL,
        internal="help" not in f.metadata or f.name in _INTERNAL,
    )
