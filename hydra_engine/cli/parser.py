"""An argparse parser in which `--help PART` finds flags by a part of their name, names may have underscores but no
abbreviations, the usage is one line, and an error is one sentence instead of a page of usage.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

_MAX_WIDTH = 100
_WORD = re.compile(r"-[a-zA-Z][\w-]+")


class Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size((_MAX_WIDTH, 24)).columns - 2, _MAX_WIDTH)
        super().__init__(prog, max_help_position=30, width=width)

    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Iterable[Any], prefix: str | None = None
    ) -> None:
        """Shows the arguments with a place; flags have their own lines below."""
        if usage is None:
            places = [action for action in actions if not action.option_strings and action.help != argparse.SUPPRESS]
            metavars = (self._format_args(place, place.dest) for place in places)
            usage = " ".join(("%(prog)s", *metavars, "[options]"))
        super().add_usage(usage, actions, groups, prefix)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Shows a switch as `--x, --no-x`, and both spellings of the help."""
        if isinstance(action, argparse.BooleanOptionalAction):
            return ", ".join(action.option_strings)
        text = super()._format_action_invocation(action)
        return f"-h, {text}" if isinstance(action, _Help) else text


class Parser(argparse.ArgumentParser):
    """A parser of the command line or of one command."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**(keywords | {"allow_abbrev": False, "add_help": False, "formatter_class": Formatter}))
        self.add_argument("-h", action=_Help, nargs=0, help=argparse.SUPPRESS)
        self.add_argument(
            "--help", action=_Help, nargs="?", metavar="PART", help="this text, or flags with PART in their name"
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Accepts underscores in names of flags, never in values, and not in arguments after `bench NAME`."""
        given = list(sys.argv[1:] if args is None else args)
        if not any(action.nargs == argparse.REMAINDER for action in self._actions) and self._subparsers is None:
            given = _with_numbers([_dashed(argument) for argument in given])
            self._refuse_other_words(given)
        namespace, extra = super().parse_known_args(given, namespace)
        # argparse ends a list of arguments at the first flag.
        if extra and (rest := next((action for action in self._actions if action.nargs == "*"), None)) is not None:
            words = [argument for argument in extra if not argument.startswith("-")]
            setattr(namespace, rest.dest, [*getattr(namespace, rest.dest), *words])
            extra = [argument for argument in extra if argument.startswith("-")]
        return namespace, extra

    def _refuse_other_words(self, given: Sequence[str]) -> None:
        """Ends with an error for a word with one dash, such as llama.cpp's `-hf`, which argparse reads as `-h` and the
        value `f`. Other names of one letter may have a value behind them (`-oFILE`)."""
        from hydra_engine.config.other_engines import replacement_for

        for argument in given:
            name = argument.partition("=")[0]
            if argument == "--":
                return
            if _WORD.fullmatch(name) and (name[1] == "h" or replacement_for(name[1:]) is not None):
                self.refuse_flag(name)

    def refuse_flag(self, name: str) -> NoReturn:
        """Ends with an error that names the flag and what to write instead, if anything is near."""
        from hydra_engine.config.other_engines import unknown_name

        known = [flag.removeprefix("--") for flag in self.flags()]
        self.error(unknown_name(name.lstrip("-"), known, name[:60]))

    def error(self, message: str) -> NoReturn:
        find = ", or `--help PART` to find a flag" if self._subparsers is None else ""
        sys.stderr.write(f"{self.prog}: {message}\nTry `{self.prog} --help`{find}.\n")
        self.exit(2)

    def flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]

    def find_options(self, part: str) -> list[tuple[str | None, list[argparse.Action]]]:
        """Options with `part` in one of their names or aliases, by group."""
        term = part.strip().lstrip("-").replace("_", "-").lower()
        fields = {
            action.dest
            for action in self._actions
            if any(term in flag.lstrip("-") for flag in action.option_strings) and term
        }
        matches = []
        for group in self._action_groups:
            actions = [a for a in group._group_actions if a.dest in fields and a.help != argparse.SUPPRESS]
            if actions:
                matches.append((group.title, actions))
        return matches

    def format_matching(self, part: str) -> str:
        """Help of the matching options, or the nearest names."""
        matches = self.find_options(part)
        if not matches:
            near = difflib.get_close_matches("--" + part.lstrip("-"), self.flags(), n=3, cutoff=0.5)
            hint = f"; near are {', '.join(near)}" if near else ""
            if self._subparsers is not None:
                hint = f"; commands have flags, try `{self.prog} serve --help {part}`"
            return f"{self.prog} has no flag with {part!r} in its name{hint}.\n"
        formatter = self._get_formatter()
        for title, actions in matches:
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        return formatter.format_help()


class _Help(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **keywords: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, default=argparse.SUPPRESS, **keywords)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, Parser)
        if not values:
            parser.print_help()
            parser.exit()
        text = parser.format_matching(str(values))
        sys.stdout.write(text)
        parser.exit(0 if parser.find_options(str(values)) else 2)


def unknown_flags(extra: Iterable[str]) -> list[str]:
    """The names of flags, as written and without values, among arguments that no parser has accepted."""
    return [argument.partition("=")[0] for argument in extra if argument.startswith("-")]


def _with_numbers(given: Sequence[str]) -> list[str]:
    """Returns the arguments with `--tp 1` as `--tp=1`: for flags of other engines argparse would take the number for a
    positional argument."""
    joined: list[str] = []
    for argument in given:
        if argument.isdigit() and joined and joined[-1].startswith("-"):
            from hydra_engine.config.other_engines import MODEL_PARTS  # not for the help of a command

            if joined[-1].lstrip("-") in MODEL_PARTS:
                joined[-1] += f"={argument}"
                continue
        joined.append(argument)
    return joined


def _dashed(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value
