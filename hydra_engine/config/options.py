"""The table of options, which serves flags, variables, files and keywords alike.

An option has one name everywhere: `--max-num-seqs` as a flag, HYDRA_MAX_NUM_SEQS in the environment, `max-num-seqs` in
a configuration file.
"""

from __future__ import annotations

import json
import re
from functools import cache

from hydra_engine.config.engine import PARTS, EngineConfig
from hydra_engine.config.fields import Option, options_of
from hydra_engine.config.server import ServerConfig
from hydra_engine.config.values import MAX_TEXT
from hydra_engine.core.units import size
from hydra_engine.errors import ConfigError

# Sections of a configuration file.
SECTIONS: dict[str, type] = {"engine": EngineConfig, **PARTS, "server": ServerConfig}
# vLLM's name for several limits at once; becomes the fields named here.
MEDIA_LIMITS = "limit-mm-per-prompt"
MEDIA_LIMIT_FIELDS = {"image": "max_images", "video": "max_videos"}

_LONG_TPOT_S = 1.0
_SHOWN = 40  # characters that a message quotes
_FLAG = re.compile(  # or a command
    r"`[^`]*`|--(?P<no>no-)?(?P<name>[a-z][a-z0-9-]*)(?: (?P<value>[a-z][a-z0-9]*|[0-9]+(?:\.[0-9]+)?))?"
)


def variable_of(name: str) -> str:
    return "HYDRA_" + name.replace("-", "_").upper()


@cache
def all_options() -> tuple[Option, ...]:
    return tuple(option for cls in SECTIONS.values() for option in options_of(cls))


@cache
def options_by_name() -> dict[str, Option]:
    """Options by each of their names and aliases, with dashes."""
    return {name: option for option in all_options() for name in (option.name, *option.aliases)}


def as_keywords(message: str) -> str:
    """`message` with keywords of `Engine(...)` in place of flags, `quantization="int4"` for `--quantization int4`.
    Commands in backticks stay."""
    return _FLAG.sub(_keyword, message)


def _keyword(found: re.Match[str]) -> str:
    negated, name, value = found["no"], found["name"], found["value"]
    option = options_by_name().get(name or "")
    if option is None or option.owner is ServerConfig:
        return found[0]
    if option.kind is bool:
        return f"{option.field}={not negated}" + (f" {value}" if value else "")
    if value is not None and (value in (option.choices or ()) or value[0].isdigit()):
        return f"{option.field}={value if value[0].isdigit() else json.dumps(value)}"
    return option.field + (f" {value}" if value else "")


_said: set[float] = set()


def warning_of_units(config: EngineConfig) -> str | None:
    """The warning about a limit between tokens in which seconds stand for milliseconds, the first time in this process;
    None if there is nothing to say."""
    limit_s = config.scheduler.tpot_slo
    if limit_s is None or limit_s <= _LONG_TPOT_S or limit_s in _said:
        return None
    _said.add(limit_s)
    return f"tpot_slo is {limit_s:g} s between two tokens; for {limit_s:g} milliseconds write {limit_s:g}ms"


def described_default(option: Option) -> str:
    """The default of an option in words; empty if its help says all."""
    if option.default in (None, (), ""):
        return option.unset
    shown = ("off", "on")[option.default] if option.kind is bool else str(option.default)
    return f"{shown}, {size(option.default)}" if option.name.endswith("-bytes") else shown


def media_limits(value: object, where: str) -> dict[str, int]:
    """Converts vLLM's `{"image": 4, "video": 0}`, or its JSON text, to fields of MediaConfig. Raises ConfigError."""
    if isinstance(value, str):
        try:
            value = json.loads(value[:MAX_TEXT])
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict) or not all(type(count) is int and 0 <= count <= 4096 for count in value.values()):
        raise ConfigError(f'{where} must be counts such as {{"image": 4, "video": 0}}', param="max_images")
    limits = {}
    for kind, count in value.items():
        if kind in MEDIA_LIMIT_FIELDS:
            limits[MEDIA_LIMIT_FIELDS[kind]] = count
        elif count:
            raise ConfigError(f"{where}: {str(kind)[:_SHOWN]!r} is not served here, only image and video", param=kind)
    return limits
