"""The command line: `hydra-engine serve | generate | chat | demo | bench | profile | memory | doctor`.

Also `python -m hydra_engine`. Each command lives in `cli/` and is imported only when it runs. Known errors end with one
line and their exit code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from hydra_engine import __version__
from hydra_engine.errors import HydraError

_COMMANDS: tuple[tuple[str, str], ...] = (
    ("serve", "start the OpenAI-compatible server on a model"),
    ("generate", "ask one question, with or without pictures, and print the answer"),
    ("chat", "talk to a running server in the terminal"),
    ("demo", "three pictures and a text question through the shipped model, with their timelines"),
    ("bench", "measure this machine: ops, stages, serving"),
    ("profile", "measure what steps cost on this machine, save it, and print what a latency limit allows"),
    ("memory", "print what each instance of a topology would hold and what its role saves; loads no weights"),
    ("doctor", "print what was found here and which implementation each operation takes"),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="hydra-engine",
        description="An inference engine for vision-language models on one node.",
        epilog="Start here: `hydra-engine demo`, then `hydra-engine serve demo`. "
        "`hydra-engine COMMAND --help` explains one command.",
    )
    parser.add_argument("--version", action="version", version=f"hydra-engine {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in _COMMANDS:
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        import_module(f"hydra_engine.cli.{name}").add_options(command)
    arguments = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = import_module(f"hydra_engine.cli.{arguments.command}").run
    try:
        return run(arguments)
    except HydraError as error:
        sys.stderr.write(f"hydra-engine: {error.message}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
