"""`hydra-engine bench NAME`: runs a benchmark of the source tree's bench/ folder with the arguments that follow.

A benchmark is a runnable module, or a folder with a `__main__.py`, whose other modules are not listed. Benchmarks of
`bench/micro` are listed by their bare names unless another benchmark has that name.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from hydra_engine.errors import ConfigError

_FOLDER = Path(__file__).parents[1] / "bench"
_MICRO = _FOLDER / "micro"
_WIDTH = 100
_SERVING = "the engine as it is used"
_GROUPS = {
    "serve": _SERVING,  # and files outside these folders
    "micro": "parts of it on this machine",
    "ops": "single operations",
    "peers": "other engines, for `bench compare`",
}
_RUNS = 'if __name__ == "__main__":'


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="the benchmark; without a name, lists them")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed to the benchmark; try --help")


def run(arguments: argparse.Namespace) -> int:
    benches = _benchmarks()
    if not benches:
        raise ConfigError("the benchmarks are part of the source tree; run this from a clone of the repository")
    if arguments.name is None:
        sys.stdout.write("\n".join(_list(benches)) + "\n")
        return 0
    if arguments.name not in benches:
        raise ConfigError(f"unknown benchmark {arguments.name[:40]!r}; there are: {', '.join(benches)}")
    sys.argv = [f"hydra-engine bench {arguments.name}", *arguments.arguments]
    sys.path.insert(0, str(_FOLDER.parent))
    runpy.run_path(str(benches[arguments.name]), run_name="__main__")
    return 0


def _list(benches: dict[str, Path]) -> Iterator[str]:
    """Yields a line per benchmark, grouped by folder."""
    groups: dict[str, list[str]] = {title: [] for title in _GROUPS.values()}
    for name, path in benches.items():
        groups[_GROUPS.get(path.relative_to(_FOLDER).parts[0], _SERVING)].append(name)
    for title, names in groups.items():
        yield f"{title}:"
        width = max(map(len, names), default=0)
        for name in names:
            summary = benches[name].read_text(encoding="utf-8").lstrip('"').split("\n", 1)[0].rstrip('"')
            yield f"  {name:{width}}  {textwrap.shorten(summary, _WIDTH - width - 4, placeholder=' ...')}"


def _benchmarks() -> dict[str, Path]:
    """Files of the benchmarks by their dotted names."""
    folders = {path.parent for path in _FOLDER.rglob("__main__.py")} - {_MICRO}
    benches = {}
    for path in sorted(_FOLDER.rglob("*.py")):
        if path.name == "__main__.py":
            benches[".".join(path.parent.relative_to(_FOLDER).parts)] = path
        elif path.parent not in folders and _RUNS in path.read_text(encoding="utf-8"):
            benches[".".join(path.relative_to(_FOLDER).with_suffix("").parts)] = path
    for name in [name for name, path in benches.items() if path.parent == _MICRO and path.name != "__main__.py"]:
        if (bare := name.rpartition(".")[2]) not in benches:
            benches[bare] = benches.pop(name)
    return dict(sorted(benches.items()))
