"""The table of commands and its parser. A command is a module of this package with `add_options` and `run`, imported
only when it is used."""

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
    "generate": "answer one question, with or without pictures, with an embedded engine",
    "chat": "chat with a running server in the terminal",
    "run-batch": "answer a file of requests in OpenAI's batch format with an embedded engine",
    "demo": "answer four questions with the shipped model, with timelines",
    "bench": "run a benchmark of the source tree: ops, stages, serving",
    "plan": "find the topology that keeps latency limits at the highest rate or the least cost, in simulated time",
    "reproduce": "repeat the experiments of the papers that the engine builds on, by simulation and closed forms",
    "profile": "measure step times on this machine, save them, and print what a latency limit allows",
    "quantize": "write a checkpoint again with its decoder in 8 or 4 bits, as compressed-tensors stores it",
    "memory": "print the memory of each instance of a topology and what its role saves; loads no weights",
    "config": "print the effective configuration and the source of each value",
    "doctor": "print hardware, libraries and the implementation of each operation; also called env",
    "completion": "print a completion script for bash, zsh or fish",
}
_ALIASES = {"env": "doctor"}


def command_of(word: str) -> str | None:
    """The command with this name or alias, or None."""
    name = _ALIASES.get(word, word)
    return name if name in _COMMANDS else None


def unknown_command(word: str) -> str:
    """The error message for a command that does not exist."""
    names = [*_COMMANDS, *_ALIASES]
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
