"""`hydra-engine config`: the effective configuration as a valid `--config` file, with the source of each value. A value
that is found when the model starts is null, and its comment says from what.

Secrets are counted, never printed.
"""

from __future__ import annotations

import argparse
import sys

import yaml

from hydra_engine.cli.options import add_all_options, add_model_argument
from hydra_engine.cli.sources import Settings, read_settings
from hydra_engine.config import DEFAULT_REQUESTS, DEFAULT_TOKENS
from hydra_engine.config.fields import Option
from hydra_engine.config.options import SECTIONS, all_options

_COLUMN = 44  # where sources begin
# What is known of a processor before the model is.
_ON_CPU = {"token_budget": str(DEFAULT_TOKENS), "max_num_seqs": str(DEFAULT_REQUESTS), "look_ahead": "off"}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--changed", action="store_true", help="print only values that are not the default")
    add_all_options(parser)


def run(arguments: argparse.Namespace) -> int:
    settings = read_settings(arguments)
    lines = config_lines(settings, changed_only=arguments.changed)
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def config_lines(settings: Settings, *, changed_only: bool = False) -> list[str]:
    """The lines of the configuration file. Raises ConfigError if values contradict each other."""
    engine, server = settings.engine(), settings.server()
    lines = []
    for section, cls in SECTIONS.items():
        target = {"engine": engine, "server": server}.get(section) or getattr(engine, section)
        shown = [
            _line(option, getattr(target, option.field), settings, on_cpu=engine.device == "cpu")
            for option in all_options()
            if option.owner is cls and (option.field in settings.chosen or not changed_only)
        ]
        if shown:
            lines += [f"{section}:", *shown]
    return lines or ["{}  # all defaults"]


def _meaning(option: Option, *, on_cpu: bool) -> str:
    """Words for what a value that is not set stands for; empty if its help says all."""
    return _ON_CPU.get(option.field, option.unset) if on_cpu else option.unset


def _line(option: Option, value: object, settings: Settings, *, on_cpu: bool) -> str:
    setting = settings.chosen.get(option.field)
    source = setting.source if setting is not None else "default"
    if value in (None, ()) and setting is None and (meaning := _meaning(option, on_cpu=on_cpu)):
        source = f"default: {meaning}"
    if option.secret and value:
        count = len(value) if isinstance(value, tuple) else 1
        text = f"  # {option.name}: {count} not shown"
    else:
        plain = list(value) if isinstance(value, tuple) else value
        dumped = yaml.safe_dump(plain, default_flow_style=True, width=1000, allow_unicode=True)
        text = f"  {option.name}: {dumped.removesuffix('...' + chr(10)).strip()}"
    return f"{text:{_COLUMN}}  # {source}"
