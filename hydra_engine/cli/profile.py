"""`hydra-engine profile MODEL`: measures what steps cost on this machine, saves it for the next start, and prints it.

Assembles an instance in this process without serving. The same measuring runs at the start of `serve` when a limit
between tokens is given and nothing valid is saved.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra_engine import log
from hydra_engine.cli.options import add_engine_options, add_model_argument
from hydra_engine.cli.sources import read_settings
from hydra_engine.config import find_model
from hydra_engine.errors import ConfigError

# As where instances run: an idle OpenMP team that spins would take the cores from the other lane.
_OPENMP_IDLE = ("OMP_WAIT_POLICY", "PASSIVE")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the profile here too, as JSON")
    parser.add_argument("--cached", action="store_true", help="show what is saved if it still holds, do not measure")
    parser.add_argument(
        "--seconds", type=float, help="most time to measure; less where every step was measured often enough before"
    )
    add_engine_options(parser)


def run(arguments: argparse.Namespace) -> int:
    config = find_model(read_settings(arguments).engine())
    # Imported here: only this command needs them.
    from hydra_engine.planner.report import profile_lines
    from hydra_engine.planner.store import save

    log.configure(config.log_level, log_format=config.log_format)
    output: Path | None = arguments.output
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no folder {output.parent}", param="output")
    if arguments.seconds is not None and not 0 < arguments.seconds < 3600:
        raise ConfigError("--seconds must be more than 0 and less than an hour", param="seconds")
    os.environ.setdefault(*_OPENMP_IDLE)
    parts: Any = import_module("hydra_engine.instance.build")  # loads torch
    measured = parts.profile_instance(config, _progress(), fresh=not arguments.cached, deadline_s=arguments.seconds)
    limit_s = config.scheduler.tpot_slo
    sys.stdout.write("\n".join(profile_lines(measured.profile, limit_s)) + "\n\n")
    sys.stdout.write(
        f"{measured.source}; {'kept' if measured.file.exists() else 'could not be kept'} in {measured.file}\n"
    )
    if output is not None:
        try:
            save(measured.profile, output)
        except OSError as error:
            raise ConfigError(f"the profile cannot be written: {error.strerror}", param="output") from error
    return 0


def _progress() -> Any:
    """A counting line on a terminal, nothing elsewhere."""
    shown = sys.stderr.isatty()

    def report(what: str, done: int, total: int) -> None:
        if shown:
            end = "\r\x1b[K" if done >= total else ""
            sys.stderr.write(f"\r{what} {100 * done // max(total, 1):3d} %{end}")
            sys.stderr.flush()

    return report
