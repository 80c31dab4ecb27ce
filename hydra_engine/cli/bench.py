"""`hydra-engine bench NAME`: runs a benchmark of the source tree's bench/ folder with the arguments that follow.

A benchmark is a module that can be run, or a folder with a `__main__.py`, whose other modules are its own affair.
Those of `bench/micro` are benchmarks too, and go by their bare names where nothing else has them.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from hydra_engine.errors import ConfigError

_FOLDER = Path(__file__).parents[2] / "bench"
_MICRO = _FOLDER / "micro"
_RUNS = 'if __name__ == "__main__":'


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="which benchmark; without a name, lists them")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on; try --help")


def run(arguments: argparse.Namespace) -> int:
    found = _benchmarks()
    if not found:
        raise ConfigError("the benchmarks are part of the source tree; run this from a clone of the repository")
    if arguments.name is None:
        for name, path in found.items():
            summary = path.read_text(encoding="utf-8").lstrip('"').split("\n", 1)[0]
            sys.stdout.write(f"{name:20} {summary}\n")
        return 0
    if arguments.name not in found:
        raise ConfigError(f"unknown benchmark {arguments.name[:40]!r}; there are: {', '.join(found)}")
    sys.argv = [f"hydra-engine bench {arguments.name}", *arguments.arguments]
    sys.path.insert(0, str(_FOLDER.parent))
    runpy.run_path(str(found[arguments.name]), run_name="__main__")
    return 0


def _benchmarks() -> dict[str, Path]:
    """Name with dots -> the file to run."""
    folders = {path.parent for path in _FOLDER.rglob("__main__.py")} - {_MICRO}
    found = {}
    for path in sorted(_FOLDER.rglob("*.py")):
        if path.name == "__main__.py":
            found[".".join(path.parent.relative_to(_FOLDER).parts)] = path
        elif path.parent not in folders and _RUNS in path.read_text(encoding="utf-8"):
            found[".".join(path.relative_to(_FOLDER).with_suffix("").parts)] = path
    for name in [name for name, path in found.items() if path.parent == _MICRO and path.name != "__main__.py"]:
        if (bare := name.rpartition(".")[2]) not in found:
            found[bare] = found.pop(name)
    return dict(sorted(found.items()))
