"""The table of commands and the parser made of it. A command is a module of this folder with `add_options` and `run`,
imported only when it is asked for.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable
from importlib import import_module
from typing import Any

from hydra_engine import __version__
from hydra_engine.cli.parser import Parser

_COMMANDS: dict[str, str] = {
    "serve": "start the OpenAI-compatible server on a model",
    "generate": "ask one question, with or without pictures, and print the answer",
    "chat": "talk to a running server in the terminal",
    "run-batch": "answer a file of requests in OpenAI's batch form through an embedded engine",
    "demo": "three pictures and a text question through the shipped model, with their timelines",
    "bench": "measure this machine: ops, stages, serving",
    "profile": "measure what steps cost on this machine, save it, and print what a latency limit allows",
    "memory": "print what each instance of a topology would hold and what its role saves; loads no weights",
    "config": "print the configuration that flags, environment and file lead to, and where each value comes from",
    "doctor": "print what was found here and which implementation each operation takes; also called env",
    "completion": "print a completion script for bash, zsh or fish",
}
_ALIASES = {"env": "doctor"}


def command_of(word: str) -> str | None:
    """The command that goes by this name."""
    name = _ALIASES.get(word, word)
    return name if name in _COMMANDS else None


def unknown_command(word: str) -> str:
    """A sentence about a command that does not exist."""
    names = [*_COMMANDS, *_ALIASES]
    begins = [name for name in names if word and name.startswith(word)]
    near = begins or difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return f"{word[:60]!r} is not a command" + (f"; did you mean {near[0]}?" if near else "")


def runner(name: str) -> Callable[[argparse.Namespace], int]:
    run: Callable[[argparse.Namespace], int] = _module(name).run
    return run


def build_parser(only: str | None = None) -> tuple[Parser, dict[str, Parser]]:
    """The parser, and those of its commands by every name; with `only`, the others have no options."""
    parser = Parser(
        prog="hydra-engine",
        description="An inference engine for vision-language models on one node.",
        epilog="Start here: `hydra-engine demo`, then `hydra-engine serve demo`. "
        "`hydra-engine COMMAND --help` explains one command.",
    )
    parser.add_argument("--version", action="version", version=f"hydra-engine {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands: dict[str, Parser] = {}
    for name, text in _COMMANDS.items():
        aliases = [alias for alias, command in _ALIASES.items() if command == name]
        description = text[0].upper() + text[1:] + "."
        command = subparsers.add_parser(name, aliases=aliases, help=text, description=description)
        if only in (None, name):
            _module(name).add_options(command)
        commands |= dict.fromkeys((name, *aliases), command)
    return parser, commands


def _module(name: str) -> Any:
    return import_module(f"hydra_engine.cli.{name.replace('-', '_')}")
