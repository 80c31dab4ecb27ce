"""Declaration of options by the fields of the configuration classes."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from hydra_engine.errors import ConfigError

# Names that vLLM and SGLang use for KV cache types.
KV_DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}
LOAD_FORMAT_NAMES = {"dummy": "random"}  # names that vLLM uses for load formats
LOG_FORMATS = ("text", "json")

_HIDDEN = frozenset({"local_files"})  # set by a command itself
_POSITIONAL = frozenset({"model"})
_SECRET_ENDINGS = ("_key", "_token", "_password")


@dataclass(frozen=True, slots=True)
class Option:
    """A field of a configuration class. `name` has dashes; `kind` is bool, int, float, str or tuple (of texts)."""

    name: str
    field: str
    owner: type
    kind: type
    default: Any
    help: str
    form: str = ""  # seconds, json, file or folder
    choices: tuple[str, ...] | None = None
    aliases: tuple[str, ...] = ()
    secret: bool = False
    positional: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name


def opt(default: Any, help: str, *, secret: bool = False, **metadata: Any) -> Any:
    return field(default=default, repr=not secret, metadata={"help": help, "secret": secret, **metadata})


def check_choices(config: object) -> None:
    for f in fields(config):  # type: ignore[arg-type]
        choices = f.metadata.get("choices", ())
        if choices and getattr(config, f.name) not in choices:
            *others, last = choices
            raise ConfigError(f"{f.name} must be {', '.join(others)} or {last}", param=f.name)


def positive(group: object, *names: str) -> None:
    for name in names:
        if (value := getattr(group, name)) is not None and value <= 0:
            raise ConfigError(f"{name} must be positive", param=name)


def options_of(cls: type) -> Iterator[Option]:
    hints = typing.get_type_hints(cls)
    for f in fields(cls):
        if "help" not in f.metadata or f.name in _HIDDEN:
            continue
        yield Option(
            name=f.metadata.get("flag", f.name).replace("_", "-"),
            field=f.name,
            owner=cls,
            kind=_plain_type(hints[f.name]),
            default=None if f.default is MISSING else f.default,
            help=f.metadata["help"],
            form=f.metadata.get("kind", ""),
            choices=f.metadata.get("choices"),
            aliases=f.metadata.get("aliases", ()),
            secret=f.metadata.get("secret", f.name.endswith(_SECRET_ENDINGS)),
            positional=f.name in _POSITIONAL,
        )


def _plain_type(hint: Any) -> type:
    if isinstance(hint, types.UnionType):
        hint = next(t for t in typing.get_args(hint) if t is not type(None))
    plain: type = typing.get_origin(hint) or hint
    return plain
