"""Flags and variables that exist: of the commands, of the benchmarks and of the tools."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from hydra_engine.cli.commands import build_parser
from hydra_engine.config.options import all_options, options_by_name, variable_of

ROOT = Path(__file__).parents[2]
FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*)")
VARIABLE = re.compile(r"\bHYDRA_[A-Z_]*[A-Z]\b")


def commands() -> dict[str, set[str]]:
    """Spellings of each command's flags, without the dashes."""
    _, parsers = build_parser()
    return {name: {flag.removeprefix("--") for flag in _spellings(parser)} for name, parser in parsers.items()}


def _spellings(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]


def of_scripts() -> set[str]:
    """Flags that a file outside the command line defines."""
    sources = [
        path
        for folder in ("bench", "tools", "tests/campaigns", "hydra_terminal/load")
        for path in (ROOT / folder).rglob("*.py")
    ]
    sources.append(ROOT / "tests" / "preprocess" / "prompt_parity.py")
    defined: set[str] = set()
    for path in sources:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r'"--([a-z][a-z0-9-]*)"', text):
            defined |= {name, f"no-{name}"} if "BooleanOptionalAction" in text else {name}
    return defined


def variables() -> set[str]:
    """Variables that something reads: options under each of their names, and what the code and the build name."""
    named = {variable_of(option.name) for option in all_options()} | {variable_of(name) for name in options_by_name()}
    for path in (ROOT / "setup.py", *(ROOT / "hydra_engine").rglob("*.py"), *(ROOT / "csrc").rglob("*.c*")):
        named |= set(re.findall(r'"(HYDRA_[A-Z_]*[A-Z])', path.read_text(encoding="utf-8")))
    return named
