"""Command-line options from the configuration classes: one place defines name, type, default and help.

Flags win over environment variables, these over a `--config` file (TOML with flag names as keys).
Imports no torch, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import tomllib
import types
import typing
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from hydra_engine.config import CacheConfig, ClusterConfig, EngineConfig, MediaConfig, SchedulerConfig, ServerConfig
from hydra_engine.core.request import SamplingParams
from hydra_engine.errors import ConfigError

_ENGINE_GROUPS: tuple[tuple[str, str, type], ...] = (
    ("engine", "", EngineConfig),
    ("scheduler", "scheduler", SchedulerConfig),
    ("caches", "cache", CacheConfig),
    ("images", "media", MediaConfig),
    ("instances", "cluster", ClusterConfig),
)
# Set by the command itself, never by a flag.
_HIDDEN = frozenset({"model", "local_files"})


class _Unset:
    def __repr__(self) -> str:
        return "unset"


UNSET = _Unset()


def add_engine_options(parser: argparse.ArgumentParser, skip: frozenset[str] = frozenset()) -> None:
    """`skip`: fields whose flag means something else in this command."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with flag names as keys; flags win over it")
    for title, _, cls in _ENGINE_GROUPS:
        _add_fields(parser.add_argument_group(title), cls, skip)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    _add_fields(parser.add_argument_group("server"), ServerConfig)


def add_sampling_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    group = parser.add_argument_group("sampling")
    for name, kind, text in (
        ("temperature", float, "0 takes the most likely token each time"),
        ("top_p", float, "smallest set of tokens with this probability"),
        ("top_k", int, "that many most likely tokens; 0: all"),
        ("min_p", float, "tokens at least this likely relative to the best"),
        ("seed", int, "same seed, same text"),
        ("max_tokens", int, "most new tokens"),
        ("repetition_penalty", float, "above 1: repeats become less likely"),
        ("presence_penalty", float, "-2 to 2"),
        ("frequency_penalty", float, "-2 to 2"),
    ):
        group.add_argument(_flag(name), dest=name, type=kind, default=defaults.get(name), help=text)
    group.add_argument("--stop", action="append", default=[], help="stop string; may be given several times")


def sampling_from(arguments: argparse.Namespace) -> SamplingParams:
    names = [f.name for f in fields(SamplingParams) if f.name != "stop"]
    chosen = {n: getattr(arguments, n) for n in names if getattr(arguments, n, None) is not None}
    return SamplingParams(**chosen, stop=tuple(arguments.stop))


def engine_config_from(
    arguments: argparse.Namespace, model: str, skip: frozenset[str] = frozenset(), **media: Any
) -> EngineConfig:
    from_file = _read_file(arguments.config, (*(c for _, _, c in _ENGINE_GROUPS), ServerConfig))
    parts: dict[str, Any] = {}
    for _, part, cls in _ENGINE_GROUPS[1:]:
        parts[part] = replace(cls(), **_given(arguments, cls, from_file))
    if media:
        parts["media"] = replace(parts["media"], **media)
    given = {name: v for name, v in _given(arguments, EngineConfig, from_file).items() if name not in skip}
    return EngineConfig(model=model, **given, **parts)


def server_config_from(arguments: argparse.Namespace) -> ServerConfig:
    from_file = _read_file(arguments.config, (*(c for _, _, c in _ENGINE_GROUPS), ServerConfig))
    return ServerConfig(**_given(arguments, ServerConfig, from_file))


def _add_fields(group: argparse._ArgumentGroup, cls: type, skip: frozenset[str] = frozenset()) -> None:
    hints = typing.get_type_hints(cls)
    for f in fields(cls):
        if "help" not in f.metadata or f.name in _HIDDEN or f.name in skip:
            continue
        flag = _flag(f.metadata.get("flag", f.name))
        default = None if f.default is MISSING else f.default
        text = f.metadata["help"] + ("" if default in (None, (), "") else f" (default: {default})")
        kind = _plain_type(hints[f.name])
        options: dict[str, Any] = {"dest": f.name, "default": UNSET, "help": text.replace("%", "%%")}
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        elif kind is tuple:
            group.add_argument(flag, action="append", metavar="VALUE", **options)
        elif f.metadata.get("kind") == "seconds":  # the configuration reads it
            group.add_argument(flag, type=str, metavar="TIME", **options)
        else:
            group.add_argument(
                flag,
                type=kind,
                choices=f.metadata.get("choices"),
                metavar=None if "choices" in f.metadata else kind.__name__.upper(),
                **options,
            )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _plain_type(hint: Any) -> type:
    if isinstance(hint, types.UnionType):
        hint = next(t for t in typing.get_args(hint) if t is not type(None))
    return typing.get_origin(hint) or hint


def _given(arguments: argparse.Namespace, cls: type, from_file: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for f in fields(cls):
        value = getattr(arguments, f.name, UNSET)
        if value is UNSET:
            value = from_file.get(f.name, UNSET)
        if value is not UNSET and f.name not in _HIDDEN and "help" in f.metadata:
            values[f.name] = tuple(value) if isinstance(value, list) else value
    return values


def _read_file(path: str | None, classes: tuple[type, ...]) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file: {error.strerror}", param="config") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the configuration file is not valid TOML: {error}", param="config") from error
    by_flag = {
        f.metadata.get("flag", f.name).replace("_", "-"): f.name
        for cls in classes
        for f in fields(cls)
        if "help" in f.metadata and f.name not in _HIDDEN
    }
    values: dict[str, Any] = {}
    for key, value in document.items():
        name = by_flag.get(key.replace("_", "-"))
        if name is None:
            raise ConfigError(f"the configuration file has an unknown key {key[:40]!r}", param=key[:40])
        values[name] = value
    return values
