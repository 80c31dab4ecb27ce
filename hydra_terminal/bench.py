"""`hydra-engine bench NAME`: runs the load generator (`serve`) or a benchmark of the source tree's bench/ folder with
the arguments that follow.

A benchmark is a runnable module, or a folder with a `__main__.py`, whose other modules are not listed. Benchmarks of
`bench/micro` are listed by their bare names unless another benchmark has that name.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import runpy
import sys
import textwrap
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

from hydra_engine.errors import ConfigError

_FOLDER = Path(__file__).parents[1] / "bench"
_MICRO = _FOLDER / "micro"
_WIDTH = 100
_LOAD = "serve"  # the load generator, which every installation has
_LOAD_SUMMARY = "Sends requests to any server with OpenAI's API: throughput and latencies, as `vllm bench serve`."
_ALL = "`hydra-engine bench` lists all."
_IN_A_CLONE = "others than `serve` are part of the source tree: run this from a clone of the repository."
_RENAMED = {"serve": "goodput"}  # folders of bench/ whose name is taken
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
    name: str | None = arguments.name
    if name == _LOAD:
        from hydra_terminal.load.command import run as run_load

        return run_load(arguments.arguments)
    benches = _benchmarks()
    if name is None:
        sys.stdout.write("\n".join([*_list(benches), *([] if benches else [f"\n{_IN_A_CLONE.capitalize()}"])]) + "\n")
        return 0
    if name not in benches:
        near = difflib.get_close_matches(name, [_LOAD, *benches], n=2)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise ConfigError(f"unknown benchmark {name[:40]!r}; {meant}{_ALL if benches else _IN_A_CLONE}")
    sys.argv = [f"hydra-engine bench {name}", *arguments.arguments]
    sys.path.insert(0, str(_FOLDER.parent))
    runpy.run_path(str(benches[name]), run_name="__main__")
    return 0


def _list(benches: dict[str, Path]) -> Iterator[str]:
    """Yields benchmarks by group, each with the whole first sentence of its docstring."""
    summaries = {_LOAD: _LOAD_SUMMARY} | {name: _summary(path) for name, path in benches.items()}
    groups: dict[str, list[str]] = {title: [] for title in _GROUPS.values()}
    for name in summaries:
        folder = benches[name].relative_to(_FOLDER).parts[0] if name in benches else ""
        groups[_GROUPS.get(folder, _SERVING)].append(name)
    for title, names in filter(itemgetter(1), groups.items()):
        yield f"{title}:"
        width = max(map(len, names))
        for name in names:
            yield from textwrap.wrap(
                summaries[name],
                _WIDTH,
                initial_indent=f"  {name:{width}}  ",
                subsequent_indent=" " * (width + 4),
                break_on_hyphens=False,
            )


def _summary(path: Path) -> str:
    """The first sentence of a benchmark's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0]


def _benchmarks() -> dict[str, Path]:
    """Files of the benchmarks by their dotted names."""
    folders = {path.parent for path in _FOLDER.rglob("__main__.py")} - {_MICRO}
    benches = {}
    for path in sorted(_FOLDER.rglob("*.py")):
        if path.name == "__main__.py":
            name = ".".join(path.parent.relative_to(_FOLDER).parts)
            benches[_RENAMED.get(name, name)] = path
        elif path.parent not in folders and _RUNS in path.read_text(encoding="utf-8"):
            benches[".".join(path.relative_to(_FOLDER).with_suffix("").parts)] = path
    for name in [name for name, path in benches.items() if path.parent == _MICRO and path.name != "__main__.py"]:
        if (bare := name.rpartition(".")[2]) not in benches:
            benches[bare] = benches.pop(name)
    return dict(sorted(benches.items()))
