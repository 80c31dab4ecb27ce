"""Simulated loads of the experiments, each by a line of words that says what was simulated.

They are kept in a file with a digest of the sources that decide, so that experiments share them, a run that was ended
goes on where it was, and a test can repeat some of them. Knows no paper.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import msgspec

_DIGITS = 6  # kept, so that a number is equal wherever it was made


class Measured(msgspec.Struct, frozen=True, array_like=True):
    """A load that was simulated. Seconds; `load_s`: from the first arrival to the last, 0 if all came at once.
    `judged`: the attainment, of a load that falls behind less than is needed. `more`: what some experiments ask for."""

    seed: int
    requests: int
    load_s: float
    attainment: float
    judged: float
    falls_behind: bool
    ttft: tuple[float, float, float]  # p50, p90, p99
    tpot: tuple[float, float, float]
    requests_per_s: float
    tokens_per_s: float
    more: dict[str, float] = {}


class Line(msgspec.Struct, frozen=True):
    key: str
    sources: str
    measured: Measured


class Simulations:
    """`file`: in which they are kept, None: in memory alone. `sources`: digest of the sources; lines of others
    are simulated again. None: all lines but those in `again` are taken as they are, and none is added to the file."""

    def __init__(self, file: Path | None = None, sources: str | None = "", again: Collection[str] = ()) -> None:
        self._file = file
        self._sources = sources
        self._lines: dict[str, Line] = {}
        self._used: dict[str, Measured] = {}
        if file is not None and file.exists():
            decoded = (msgspec.json.decode(text, type=Line) for text in file.read_bytes().splitlines())
            kept = (line for line in decoded if sources in (None, line.sources) and line.key not in again)
            self._lines = {line.key: line for line in kept}

    def get(self, key: str, simulate: Callable[[], Measured]) -> Measured:
        """Returns what was simulated under this key; calls `simulate` where nothing was."""
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = Line(key, self._sources or "", _rounded(simulate()))
            if self._file is not None and self._sources is not None:
                sys.stderr.write(f"  {key}\n")
                with self._file.open("ab") as file:
                    file.write(msgspec.json.encode(line) + b"\n")
        self._used[key] = line.measured
        return line.measured

    def take_used(self) -> dict[str, Measured]:
        """Returns what was asked for since the last call, by key."""
        used, self._used = self._used, {}
        return used

    def write(self, keys: Collection[str]) -> None:
        """Writes the file anew, in order, with these keys alone."""
        assert self._file is not None
        lines = (msgspec.json.encode(self._lines[key]) for key in sorted(keys))
        self._file.write_bytes(b"".join(line + b"\n" for line in lines))


def _rounded(measured: Measured) -> Measured:
    def each(value: object) -> object:
        match value:
            case float():
                return float(f"{value:.{_DIGITS}g}")
            case list():
                return [each(one) for one in value]
            case dict():
                return {name: each(one) for name, one in value.items()}
            case _:
                return value

    return msgspec.convert(each(msgspec.to_builtins(measured)), Measured)


def loads_text(used: Collection[Measured], cold: float) -> str:
    """Says how many loads these are, of how many requests, how long they last and how many seeds they have."""
    if not used:
        return ""
    requests, seeds = [one.requests for one in used], {one.seed for one in used}
    lasting = [one.load_s for one in used if one.load_s]
    text = f"{len(used)} loads of {_range(requests)} requests"
    if lasting:
        text += f", {_range(lasting)} s of arrivals, of which the first {cold:.0%} are not judged"
    if len(lasting) < len(used):
        text += f"{', others' if lasting else ','} all at once"
    return f"{text}; {len(seeds)} {'seed' if len(seeds) == 1 else 'seeds'}"


def _range(values: Collection[float]) -> str:
    low, high = (f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


# ---- sources


def sources_digest() -> str:
    """A digest of the sources that decide what a simulation gives: `deployments`, `traces`, and all that they import,
    directly or not, of the packages in the same folder. Comments do not count."""
    root = Path(__file__).parents[2]
    trees, queue = dict[str, ast.Module](), [f"{__package__}.deployments", f"{__package__}.traces"]
    while queue:
        name = queue.pop()
        path = root.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name not in trees and path.is_file():
            trees[name] = ast.parse(path.read_bytes())
            queue += _imports(trees[name])
    digest = hashlib.sha256()
    for path in sorted((root / "hydra_planner" / "hardware").glob("*.json")):
        digest.update(path.read_bytes())
    for name, tree in sorted(trees.items()):
        digest.update(name.encode() + ast.dump(tree).encode())
    return digest.hexdigest()[:12]


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module)):
                yield module
                yield from (f"{module}.{alias.name}" for alias in node.names)
