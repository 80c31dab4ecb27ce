"""The table of commands and its parser.

A command is a module with `add_options` and `run`, imported only when it is used: a module of this package, or of
another one that has an entry point in the group `hydra_engine.commands`, which names a `Command`.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from hydra_engine import __version__
from hydra_engine.cli.parser import Parser
from hydra_engine.config.other_engines import command_instead
from hydra_engine.entry_points import load_entry_points


class Command(NamedTuple):
    """`help`: its line in the list of commands. `module`: the one with its `add_options` and `run`. `position`: its
    place in the list, in which the engine's commands have 10, 20, ..; the default is the end."""

    help: str
    module: str
    position: int = 1000


_OWN = {
    "serve": Command("start the OpenAI-compatible server on a model", "hydra_engine.cli.serve", 10),
    "generate": Command(
        "answer one question, with or without pictures, with an embedded engine", "hydra_engine.cli.generate", 20
    ),
    "demo": Command("answer four questions with the shipped model, with timelines", "hydra_engine.cli.demo", 40),
    "config": Command("print the effective configuration and the source of each value", "hydra_engine.cli.config", 60),
    "doctor": Command(
        "print hardware, libraries and the implementation of each operation; also called env",
        "hydra_engine.cli.doctor",
        70,
    ),
}
_ALIASES = {"env": "doctor"}


@cache
def _all() -> dict[str, Command]:
    """Commands of all packages by name, in the order of the list. Loads other packages once, which takes a while."""
    found: dict[str, Command] = _OWN | load_entry_points("hydra_engine.commands")
    return dict(sorted(found.items(), key=lambda item: item[1].position))


def command_of(word: str) -> str | None:
    """The command with this name or alias, or None."""
    name = _ALIASES.get(word, word)
    return name if name in _OWN or name in _all() else None


def unknown_command(word: str) -> str:
    """The error message for a command that does not exist."""
    if (hint := command_instead(word)) is not None:
        return f"{word!r} is not a command here: {hint}"
    names = [*_all(), *_ALIASES]
    begins = [name for name in names if word and name.startswith(word)]
    near = begins or difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return f"{word[:60]!r} is not a command" + (f"; did you mean {near[0]}?" if near else "")


def runner(name: str) -> Callable[[argparse.Namespace], int]:
    run: Callable[[argparse.Namespace], int] = _module(name).run
    return run


def build_parser(only: str | None = None) -> tuple[Parser, dict[str, Parser]]:
    """Builds the parser, and the commands' parsers by name and alias; with `only`, other commands have no options."""
    parser = Parser(
        prog="hydra-engine",
        usage="%(prog)s COMMAND [options]",
        description="An inference engine for vision-language models on one node.",
        epilog="Start here: `hydra-engine run demo`, then `hydra-engine serve demo`. "
        "`hydra-engine COMMAND --help` explains one command.",
    )
    parser.add_argument("--version", action="version", version=f"hydra-engine {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, prog=parser.prog)
    parsers: dict[str, Parser] = {}
    for name, listed in (_OWN if only in _OWN else _all()).items():
        aliases = [alias for alias, target in _ALIASES.items() if target == name]
        description = listed.help[0].upper() + listed.help[1:] + "."
        command = subparsers.add_parser(name, aliases=aliases, help=listed.help, description=description)
        if only in (None, name):
            _module(name).add_options(command)
        parsers |= dict.fromkeys((name, *aliases), command)
    return parser, parsers


def _module(name: str) -> Any:
    return import_module((_OWN.get(name) or _all()[name]).module)
