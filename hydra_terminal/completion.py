"""`hydra-engine completion bash|zsh|fish`: a script for the shell, generated from the parsers of all commands.

The script is static: pressing Tab starts no Python. Values with the metavar FILE, FOLDER or MODEL complete as paths.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

_PATHS = frozenset({"FILE", "FOLDER", "MODEL"})
_HINTS = {
    "bash": 'eval "$(hydra-engine completion bash)" in ~/.bashrc',
    "zsh": "hydra-engine completion zsh > a file _hydra-engine in a folder of $fpath",
    "fish": "hydra-engine completion fish > ~/.config/fish/completions/hydra-engine.fish",
}


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of a command. `values` is None for a switch, else the possible values, empty for any; `path`: they are
    paths."""

    names: tuple[str, ...]
    help: str
    values: tuple[str, ...] | None
    path: bool


@dataclass(frozen=True, slots=True)
class Command:
    """A command. `words` are the possible values of its first argument; `path`: it is a path."""

    names: tuple[str, ...]
    help: str
    flags: tuple[Flag, ...]
    words: tuple[str, ...]
    path: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(_HINTS), help="the shell of the script")
    parser.epilog = "; ".join(f"{shell}: {hint}" for shell, hint in _HINTS.items())


def run(arguments: argparse.Namespace) -> int:
    from hydra_engine.cli.commands import build_parser

    _, parsers = build_parser()
    scripts: dict[str, Callable[[list[Command]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
    sys.stdout.write(scripts[arguments.shell](describe(parsers)))
    return 0


def describe(parsers: Mapping[str, argparse.ArgumentParser]) -> list[Command]:
    """Returns the commands; one parser under several names is one command with aliases."""
    names: dict[int, list[str]] = {}
    for name, parser in parsers.items():
        names.setdefault(id(parser), []).append(name)
    entries = []
    for several in names.values():
        parser = parsers[several[0]]
        places = [action for action in parser._actions if not action.option_strings]
        words = tuple(places[0].choices or ()) if places else ()
        path = bool(places) and places[0].metavar in _PATHS
        flags = tuple(_flags(parser))
        entries.append(Command(tuple(several), _first_sentence(parser.description or ""), flags, words, path))
    return entries


def _flags(parser: argparse.ArgumentParser) -> Iterator[Flag]:
    for action in parser._actions:
        names = tuple(name for name in action.option_strings if name.startswith("--"))
        if not names or action.help == argparse.SUPPRESS:
            continue
        takes = action.nargs != 0 and "--help" not in names
        values = tuple(map(str, action.choices or ())) if takes else None
        yield Flag(names, _first_sentence(action.help or ""), values, action.metavar in _PATHS)


def _first_sentence(text: str) -> str:
    text = text.replace("%%", "%").replace("%(default)s", "").split("; ")[0].split(" (default")[0].split(": ")[0]
    return text.strip().rstrip(".")[:80]


# ---- bash


def bash(commands: list[Command]) -> str:
    flags = []
    values: dict[str, list[str]] = {}  # action -> command:flag pairs whose value it completes
    for command in commands:
        pattern = "|".join(command.names)
        names = " ".join(name for flag in command.flags for name in flag.names)
        flags.append(f"    {pattern}) flags={shlex.quote(names)}; words={shlex.quote(' '.join(command.words))} ;;")
        for flag in command.flags:
            if flag.values is not None:
                what = "return" if flag.path else f"_hydra_engine_words {shlex.quote(' '.join(flag.values))}; return"
                cases = [f"{name}:{option}" for name in command.names for option in flag.names]
                values.setdefault(what, []).extend(cases)
    return _BASH.format(
        commands=" ".join(name for command in commands for name in command.names),
        flags="\n".join(flags),
        values="\n".join(f"    {'|'.join(cases)}) {what} ;;" for what, cases in values.items()),
    )


# Paths are left to readline's default, which quotes them; other values turn that default off.
_BASH = """\
# bash completion of hydra-engine
_hydra_engine_words() {{
  compopt +o default 2>/dev/null
  COMPREPLY=($(compgen -W "$1" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
_hydra_engine() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}"
  local flags="" words=""
  COMPREPLY=()
  if ((COMP_CWORD == 1)); then _hydra_engine_words "{commands} --help --version"; return; fi
  case "$command:$prev" in
{values}
  esac
  case "$command" in
{flags}
  esac
  if [[ $cur == -* ]]; then _hydra_engine_words "$flags"
  elif [[ -n $words ]] && ((COMP_CWORD == 2)); then _hydra_engine_words "$words"; fi
}}
complete -o default -F _hydra_engine hydra-engine
"""


# ---- zsh


def zsh(commands: list[Command]) -> str:
    cases = []
    for command in commands:
        specs = [_zsh_flag(flag, name) for flag in command.flags for name in flag.names]
        if command.words:
            specs.append(shlex.quote(f"1:word:({' '.join(command.words)})"))
        elif command.path:
            specs.append("'1:model:_files'")
        lines = " \\\n        ".join(specs)
        cases.append(f"    {'|'.join(command.names)})\n      _arguments \\\n        {lines} ;;")
    names = " ".join(shlex.quote(f"{name}:{command.help}") for command in commands for name in command.names)
    return (
        "#compdef hydra-engine\n_hydra_engine() {\n"
        f"  local -a commands=({names})\n"
        "  if ((CURRENT == 2)); then _describe command commands; return; fi\n"
        "  local command=$words[2]\n  shift words\n  ((CURRENT--))\n"
        "  case $command in\n" + "\n".join(cases) + "\n  esac\n}\n"
        "if [[ $funcstack[1] == _hydra-engine ]]; then _hydra_engine; else compdef _hydra_engine hydra-engine; fi\n"
    )


def _zsh_flag(flag: Flag, name: str) -> str:
    text = flag.help
    for char in "\\[]:":
        text = text.replace(char, "\\" + char)
    if flag.values is None:
        return shlex.quote(f"{name}[{text}]")
    values = "_files" if flag.path else f"({' '.join(flag.values)})" if flag.values else " "
    return shlex.quote(f"*{name}=[{text}]:value:{values}")


# ---- fish


def fish(commands: list[Command]) -> str:
    lines = ["# fish completion of hydra-engine"]
    every = " ".join(name for command in commands for name in command.names)
    for command in commands:
        for name in command.names:
            lines.append(
                f"complete -c hydra-engine -f -n 'not __fish_seen_subcommand_from {every}' "
                f"-a {name} -d {_fish_quoted(command.help)}"
            )
        seen = f"-n '__fish_seen_subcommand_from {' '.join(command.names)}'"
        if command.words:
            lines.append(f"complete -c hydra-engine {seen} -f -a {_fish_quoted(' '.join(command.words))}")
        for flag in command.flags:
            for name in flag.names:
                takes = "" if flag.values is None else " -r -F" if flag.path else " -x"
                choices = f" -a {_fish_quoted(' '.join(flag.values))}" if flag.values else ""
                lines.append(
                    f"complete -c hydra-engine {seen} -l {name.removeprefix('--')}{takes}{choices} "
                    f"-d {_fish_quoted(flag.help)}"
                )
    return "\n".join(lines) + "\n"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
