"""The command line: `hydra-engine serve | generate | chat | demo | ...`; `cli/commands.py` has the table.

Also `python -m hydra_engine`. Known errors end with one line and their exit code.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from hydra_engine.cli.parser import Parser

_LOADING_THRESHOLD = 50_000
_SERVERS = ("serve", "demo")  # a service manager ends these with SIGTERM, and expects 0


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of a command. `argv` None: the process is its own, so signals and the collector are set for it."""
    given = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        _prepare_process(given[0] if given else "")
    try:
        try:
            return _run(given)
        finally:
            if argv is None and sys.stdout is not None:
                sys.stdout.flush()  # at the interpreter's end the exit code is lost
    except KeyboardInterrupt:
        return 130


def _prepare_process(command: str) -> None:
    if command in _SERVERS:
        signal.signal(signal.SIGTERM, _end_at_once if command == "serve" else _end)
    if command in ("run", "chat"):  # which leave the terminal as it was
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _leave_terminal)
    if command == "serve" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # A KeyboardInterrupt while a dataclass is made would end the process by the signal, even if caught: CPython
        # takes one that leaves `exec` of a string for unhandled.
        signal.signal(signal.SIGINT, _end_at_once)
    if command == "serve" and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _on_hangup)  # until the server handles it
    # Modules make hundreds of thousands of objects and no garbage. Without this the collector looks through them again
    # and again while they are read and once more at the end: a quarter of the time of a short command.
    gc.set_threshold(_LOADING_THRESHOLD)
    atexit.register(_leave_to_the_system)
    _replace_output()


_CLOSED_PIPE = 128 + signal.SIGPIPE  # as a shell reports a program that the closed pipe has ended
_LOST_OUTPUT = 4  # as ResourceError


class _Output(io.FileIO):
    """Standard output that ends the command if it cannot be written: without a word after a pipe's reader has gone, as
    with `head`, else with one sentence."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            null = os.open(os.devnull, os.O_WRONLY)  # for what is still buffered
            os.dup2(null, self.fileno())
            os.close(null)
            if isinstance(error, BrokenPipeError):
                raise SystemExit(_CLOSED_PIPE) from None
            reason = (error.strerror or "no reason given").lower()
            sys.stderr.write(f"hydra-engine: standard output cannot be written: {reason}\n")
            raise SystemExit(_LOST_OUTPUT) from None


def _replace_output() -> None:
    if (old := sys.stdout) is not None:  # Python has none where the descriptor was closed
        raw = io.BufferedWriter(_Output(old.fileno(), "wb", closefd=False))
        sys.stdout = io.TextIOWrapper(raw, old.encoding, old.errors, line_buffering=old.isatty())


def _end_at_once(number: int, _frame: object) -> NoReturn:
    """Ends a server that has nothing to drain yet; Linux ends its children. Raises nothing, because libraries swallow
    what is raised while they are imported."""
    os._exit(0 if number == signal.SIGTERM else 130)


def _end(number: int, _frame: object) -> NoReturn:
    """Ends the process by SystemExit. A second signal ends it at once."""
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(0 if number == signal.SIGTERM else 130)


def _leave_terminal(number: int, _frame: object) -> NoReturn:
    """Ends the process by SystemExit, with the exit code of a process that the signal has ended. A second signal ends
    it at once."""
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)


def _run(given: list[str]) -> int:
    # Imported here: a signal is answered while these are read.
    from hydra_engine.cli.commands import build_parser, command_of, runner, unknown_command

    given = _with_help(given)
    _refuse_flag_without_command(given[0])
    asked = next((command_of(word) for word in given if not word.startswith("-")), None)
    parser, commands = build_parser(only=asked or "")
    if asked is None and not given[0].startswith("-"):
        parser.error(unknown_command(given[0]))
    arguments, extra = parser.parse_known_args(given)
    name = command_of(arguments.command)
    assert name is not None  # argparse knows the others
    from hydra_engine.errors import HydraError  # not before --help has ended, for which it takes long

    try:
        if extra := _without_switches(extra):
            _refuse(commands[name], extra)
        return runner(name)(arguments)
    except HydraError as error:
        sys.stderr.write(f"hydra-engine: {error.message}\n")
        return error.exit_code


def _refuse_flag_without_command(first: str) -> None:
    """Ends with an error if `first` is a flag, other than those of the help and the version."""
    flag = first.partition("=")[0]
    if not flag.startswith("-") or flag in ("-h", "--help", "--version"):
        return
    from hydra_engine.cli.commands import build_parser
    from hydra_engine.config.other_engines import unknown_name

    parser, commands = build_parser(only="serve")
    known = commands["serve"].flags()
    if (flag := flag.replace("_", "-")) in known:
        parser.error(f"a command is missing, as in `hydra-engine serve {flag[:60]} ...`")
    sentence = unknown_name(flag.lstrip("-"), (name[2:] for name in known), flag[:60])
    parser.error(f"{sentence}; a command comes first, as in `hydra-engine serve demo`")


def _with_help(given: list[str]) -> list[str]:
    """Rewrites `help`, `help serve` and `--help serve` for argparse; no arguments give the help too."""
    from hydra_engine.cli.commands import command_of

    if not given or given == ["help"]:
        return ["--help"]
    if len(given) == 2 and (given[0] == "help" or (given[0] in ("-h", "--help") and command_of(given[1]))):
        return [given[1], "--help"]
    return given


def _on_hangup(*_: object) -> None:
    sys.stderr.write("hydra-engine: SIGHUP changes nothing yet: the server is starting, and will read its keys then\n")


def _leave_to_the_system() -> None:
    """Skips the collection at exit, since memory is freed with the process. Triton prints errors about uncollected
    objects, so with Triton it runs."""
    if "triton" not in sys.modules:
        gc.freeze()


def _without_switches(extra: Sequence[str]) -> list[str]:
    """Drops switches of other engines that have no effect here, with a note on standard error."""
    if not extra:
        return []
    from hydra_engine.config.other_engines import reason_ignored

    rest = []
    for argument in extra:
        name, equals, value = argument.partition("=")
        plain = name.lstrip("-").replace("_", "-")
        reason = reason_ignored(plain, value if equals else True) if argument.startswith("-") else None
        if reason is None:
            rest.append(argument)
        else:
            sys.stderr.write(f"hydra-engine: note: {name} changes nothing here: {reason}\n")
    return rest


def _refuse(parser: Parser, extra: Sequence[str]) -> NoReturn:
    """Ends with an error that names the unknown argument and its nearest name."""
    from hydra_engine.cli.parser import unknown_flags

    names = unknown_flags(extra)
    if not names:
        parser.error(f"{extra[0][:60]!r} is one argument too many")
    parser.refuse_flag(names[0])


if __name__ == "__main__":
    sys.exit(main())
