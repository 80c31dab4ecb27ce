"""Values of options: from flags, then HYDRA_* variables, then the YAML file, then the defaults.

All are parsed by the same rules; the configuration classes check ranges. Each value keeps its source, for error
messages and for `hydra-engine config`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from hydra_engine.config import (
    DEMO_MODEL,
    EngineConfig,
    ServerConfig,
    environment_api_keys,
    environment_settings,
)
from hydra_engine.config.options import (
    MEDIA_LIMITS,
    SECTIONS,
    all_options,
    media_limits,
    options_by_name,
    variable_of,
    warning_of_units,
)
from hydra_engine.config.other_engines import Spelling, reason_ignored, unknown_name
from hydra_engine.config.values import value_from_flags, value_from_object, value_from_text
from hydra_engine.errors import ConfigError

C = TypeVar("C")

_MAX_FILE_BYTES = 1 << 20
_MAX_WARNINGS = 8
_MAX_KEY = 60  # characters of an unknown key that its message quotes
# HYDRA_* variables that are not options: for tests, the extension and its build (setup.py).
_OTHER_VARIABLES = frozenset(
    (
        *("HYDRA_CONFIG", "HYDRA_MAX_CPU_ISA", "HYDRA_CUDA_SYNC"),
        *("HYDRA_CPU_ONLY", "HYDRA_REQUIRE_CUDA", "HYDRA_CUDA_ARCHS", "HYDRA_NVCC_FLAGS", "HYDRA_BUILD_JOBS"),
    )
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and its source as the user wrote it, for example `--port` or `HYDRA_PORT`."""

    value: Any
    source: str


Layer = dict[str, Setting]  # values by field


@dataclass(frozen=True, slots=True)
class Settings:
    """The values that were set, by field."""

    chosen: Layer

    def engine(self, model: str | None = None, **media: Any) -> EngineConfig:
        """Builds the engine's configuration. `model` replaces the user's, for commands with a fixed model; `media`
        replaces fields of MediaConfig. Raises ConfigError."""
        parts: dict[str, Any] = {}
        for name, cls in SECTIONS.items():
            if cls not in (EngineConfig, ServerConfig):
                parts[name] = self._make(cls)
        if media:
            parts["media"] = replace(parts["media"], **media)
        config = self._make(EngineConfig, model=model or self.model, **parts)
        if (warning := warning_of_units(config)) is not None:
            sys.stderr.write(f"hydra-engine: warning: {warning}\n")
        return config

    def server(self) -> ServerConfig:
        return self._make(ServerConfig)

    @property
    def model(self) -> str:
        return self.chosen["model"].value if "model" in self.chosen else DEMO_MODEL

    def _make(self, cls: type[C], **more: Any) -> C:
        given = {o.field: self.chosen[o.field].value for o in all_options() if o.owner is cls if o.field in self.chosen}
        try:
            return cls(**(given | more))
        except ConfigError as error:
            setting = self.chosen.get(error.param or "")
            if setting is None or setting.source.startswith("--"):
                raise
            raise ConfigError(f"{error.message} (set by {setting.source})", param=error.param) from error


def read_settings(arguments: argparse.Namespace, skip: frozenset[str] = frozenset()) -> Settings:
    """Reads all sources. `skip`: fields whose flag means something else in this command. Raises ConfigError with one
    sentence."""
    environment = environment_settings()
    file = getattr(arguments, "config", None) or environment.get("HYDRA_CONFIG")
    layers = (
        _from_file(Path(file)) if file else {},
        _from_environment(environment),
        _from_flags(arguments, skip),
    )
    chosen: Layer = {}
    for layer in layers:
        chosen |= layer
    from_file, from_environment, from_flags = (layer.get("api_key") for layer in layers)
    if from_environment is not None and (other := from_flags or from_file) is not None:
        # The server accepts the environment's keys in addition to others.
        both = (*other.value, *environment_api_keys())
        chosen["api_key"] = Setting(both, f"{other.source} and {from_environment.source}")
    return Settings(chosen)


# ---- flags


def _from_flags(arguments: argparse.Namespace, skip: frozenset[str]) -> Layer:
    layer: Layer = {}
    for option in all_options():
        given = None if option.field in skip else getattr(arguments, option.field, None)
        if given is not None:
            where = "the command line" if option.positional else option.flag
            layer[option.field] = Setting(value_from_flags(option, given), where)
    if (limits := getattr(arguments, MEDIA_LIMITS.replace("-", "_"), None)) is not None:
        _add_media_limits(layer, limits, f"--{MEDIA_LIMITS}")
    return layer


def _add_media_limits(layer: Layer, value: object, where: str, source: str | None = None) -> None:
    """Adds the fields of `--limit-mm-per-prompt` to `layer`. `where` names it in errors, and `source` (None: `where`)
    in settings. Raises ConfigError if `layer` has another value for a field."""
    for field, count in media_limits(value, where).items():
        if field in layer and layer[field].value != count:
            raise ConfigError(f"{where} and {layer[field].source} contradict each other; give one", param=field)
        layer[field] = Setting(count, source or where)


# ---- the environment


def _from_environment(environment: dict[str, str]) -> Layer:
    by_variable = {variable_of(name): option for name, option in options_by_name().items()}
    layer: Layer = {}
    unknown = []
    limits = None
    for variable, text in sorted(environment.items()):
        option = by_variable.get(variable)
        if variable == variable_of(MEDIA_LIMITS):
            limits = text
        elif option is not None:
            _refuse_service_link(variable, text)
            if option.field in layer:
                raise ConfigError(f"{variable} and {layer[option.field].source} mean the same; set one of them")
            layer[option.field] = Setting(value_from_text(option, text, variable), variable)
        elif variable not in _OTHER_VARIABLES:
            unknown.append(variable)
    if limits is not None:
        _add_media_limits(layer, limits, variable_of(MEDIA_LIMITS))
    _warn(unknown)
    return layer


def _refuse_service_link(variable: str, text: str) -> None:
    """Raises ConfigError for HYDRA_PORT=tcp://..., which Kubernetes sets in every pod if a Service is called hydra."""
    if variable == "HYDRA_PORT" and "://" in text:
        raise ConfigError(
            "HYDRA_PORT holds an address and not a port number; Kubernetes sets it for a Service named hydra: rename "
            "the Service or set enableServiceLinks: false",
            param="port",
        )


def _warn(unknown: list[str]) -> None:
    for variable in unknown[:_MAX_WARNINGS]:
        sentence = unknown_name(variable.removeprefix("HYDRA_"), options_by_name(), variable, Spelling.VARIABLE)
        sys.stderr.write(f"hydra-engine: warning: {sentence}; the variable is ignored\n")
    if more := unknown[_MAX_WARNINGS:]:
        sys.stderr.write(f"hydra-engine: warning: {len(more)} more HYDRA_ variables are no options and are ignored\n")


# ---- the file


def _from_file(path: Path) -> Layer:
    """Reads the file: keys are options with dashes or underscores, at the top or in sections named like the
    configuration's parts. Raises ConfigError."""
    loader, root = _document(path)
    options = options_by_name()
    layer: Layer = {}
    limits: tuple[object, str, str] | None = None
    try:
        for key, node, section in _entries(root):
            name = key.value.replace("_", "-")
            where = f"{key.value} (line {key.start_mark.line + 1} of the configuration file)"
            value = _value(loader, node, where)
            option = options.get(name)
            if name == MEDIA_LIMITS and section in ("", "media"):
                limits = value, where, _source(path, key)
            elif option is None and (reason := reason_ignored(name, value)) is not None:
                sys.stderr.write(f"hydra-engine: note: {where} changes nothing here: {reason}\n")
            elif option is None:
                sentence = unknown_name(name, [*options, MEDIA_LIMITS], f"{key.value[:_MAX_KEY]!r}", Spelling.KEY)
                raise ConfigError(f"line {key.start_mark.line + 1} of the configuration file: {sentence}", param=name)
            elif section and SECTIONS[section] is not option.owner:
                home = next(name for name, cls in SECTIONS.items() if cls is option.owner)
                raise ConfigError(f"{where} belongs to the section {home}, not to {section}", param=option.field)
            elif option.field in layer:
                raise ConfigError(f"{where} is given twice", param=option.field)
            elif value is not None:
                layer[option.field] = Setting(value_from_object(option, value, where), _source(path, key))
        if limits is not None and limits[0] is not None:
            _add_media_limits(layer, *limits)
    finally:
        loader.dispose()
    return layer


def _source(path: Path, key: yaml.Node) -> str:
    return f"{path.name}, line {key.start_mark.line + 1}"


def _document(path: Path) -> tuple[yaml.SafeLoader, yaml.MappingNode | None]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}", param="config") from error
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError("the configuration file is larger than 1 MiB", param="config")
    try:
        loader = yaml.SafeLoader(data)
        root = loader.get_single_node()
    except yaml.YAMLError as error:
        raise ConfigError(f"the configuration file is not valid YAML: {_problem(error)}", param="config") from error
    except RecursionError as error:
        raise ConfigError("the configuration file is nested too deeply", param="config") from error
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise ConfigError("the configuration file must hold lines such as `max-num-seqs: 8` (YAML)", param="config")
    return loader, root


def _problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "it contains characters that YAML does not allow"
    return problem if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _entries(root: yaml.MappingNode | None) -> Iterator[tuple[yaml.ScalarNode, yaml.Node, str]]:
    """Yields (key, value, section); the section is "" for keys at the top. Raises ConfigError."""
    for key, node in root.value if root is not None else ():
        if _key(key).value not in SECTIONS or (isinstance(node, yaml.ScalarNode) and _is_option(key, node)):
            yield key, node, ""
        elif isinstance(node, yaml.MappingNode):
            for inner, value in node.value:
                yield _key(inner), value, key.value
        elif node.value:  # an empty section is allowed
            raise ConfigError(
                f"the section {key.value} of the configuration file must hold lines such as `name: value`"
            )


def _is_option(key: yaml.ScalarNode, node: yaml.ScalarNode) -> bool:
    """True for `cluster: ray`, where a section has the name of an option."""
    return bool(node.value) and key.value in options_by_name()


def _key(node: yaml.Node) -> yaml.ScalarNode:
    if not isinstance(node, yaml.ScalarNode):
        line = node.start_mark.line + 1
        raise ConfigError(f"line {line} of the configuration file: a key must be the name of an option", param="config")
    return node


def _value(loader: yaml.SafeLoader, node: yaml.Node, where: str) -> object:
    try:
        return loader.construct_object(node, deep=True)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is no plain value: {_problem(error)}", param="config") from error
    except (ValueError, TypeError, RecursionError) as error:  # an impossible date, a list as a key, ...
        raise ConfigError(f"{where} is no plain value", param="config") from error
