"""Experiments and their results: a table of numbers, a sentence, and the paper's own numbers beside them.

Numbers are kept to four digits, so that a stored result is equal wherever it was made. Does not know any paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

import msgspec

from hydra_planner.papers.simulations import Simulations

How = Literal["simulated", "closed form", "on a GPU", "on this machine"]
DIGITS = 4
Value = TypeVar("Value")


class Spread(NamedTuple):
    """The median over seeds, and the range."""

    median: float
    low: float
    high: float


Cell = str | int | float | Spread | None


class Table(msgspec.Struct, frozen=True):
    """`keys`: so many of the first columns name a row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    keys: int = 1


class Result(msgspec.Struct, frozen=True):
    """`finding`: one sentence, of these numbers."""

    table: Table
    finding: str


class Stored(msgspec.Struct, frozen=True):
    """A result in a file. `scale`: with which it was made; `loads`: what was simulated, in words."""

    name: str
    scale: str
    result: Result
    loads: str = ""


@dataclass(frozen=True, slots=True)
class Scale:
    """Amount of simulation. `factor`: times the requests of a load that comes at once. `seeds`: loads that are drawn
    for each rate. `share`: of the seconds that `plan` has a load last; `requests_of_load`: fewest and most requests of
    one. `simulations`: what was simulated already."""

    name: str
    factor: int
    seeds: int
    share: float
    requests_of_load: tuple[int, int]
    simulations: Simulations = field(default_factory=Simulations)

    def requests(self, quick: int) -> int:
        return quick * self.factor

    def some(self, values: Sequence[Value], quick: int) -> tuple[Value, ...]:
        """Returns all values, or `quick` of them at even steps with both ends."""
        if self.factor > 1 or quick >= len(values):
            return tuple(values)
        return tuple(values[round(place * (len(values) - 1) / max(quick - 1, 1))] for place in range(quick))


QUICK, FULL = Scale("quick", 1, 1, 0.25, (24, 3000)), Scale("full", 2, 3, 1.0, (120, 3000))


@dataclass(frozen=True, slots=True)
class Experiment:
    """`run` None: it needs hardware that a simulation does not stand for, and `command` measures it. `setting`: model,
    devices and load of ours, and what is not as in the paper. `remark`: where the paper's numbers do not add up.
    `before`: what the page showed of it when loads were shorter or limits were not told. `measured`: on hardware, with
    its place in bench/results."""

    name: str
    paper: str
    title: str
    how: How
    setting: str
    run: Callable[[Scale], Result] | None = None
    theirs: Table | None = None
    remark: str = ""
    command: str = ""
    before: str = ""
    measured: tuple[str, Table] | None = None


def closed_form(form: Callable[[], Result]) -> Callable[[Scale], Result]:
    """A closed form is the same at every scale."""

    def run(_scale: Scale) -> Result:
        return form()

    return run


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], keys: int = 1) -> Table:
    return Table(tuple(columns), tuple(tuple(map(rounded, row)) for row in rows), keys)


def rounded(cell: Cell) -> Cell:
    if isinstance(cell, Spread):
        return Spread(*(float(f"{value:.{DIGITS}g}") for value in cell))
    return float(f"{cell:.{DIGITS}g}") if isinstance(cell, float) else cell


def number_of(cell: Cell) -> float:
    """The number in a cell, of a spread its median; 0 where there is none."""
    if isinstance(cell, Spread):
        return cell.median
    return float(cell) if isinstance(cell, int | float) else 0.0


# ---- the best, and what cannot be told from it


def leaders(cells: Mapping[str, Cell], *, least: bool = False) -> list[str]:
    """Names of the largest (or least) number and of those that cannot be told from it: whose ranges over seeds, and a
    hundredth, meet its range. The largest comes first."""
    ranges = {name: _range(cell) for name, cell in cells.items()}
    order = sorted(cells, key=lambda name: number_of(cells[name]), reverse=not least)
    low, high = ranges[order[0]]
    return [name for name in order if ranges[name][1] >= low and ranges[name][0] <= high]


def _range(cell: Cell) -> tuple[float, float]:
    low, high = (cell.low, cell.high) if isinstance(cell, Spread) else (number_of(cell),) * 2
    return low - _ALIKE * abs(low), high + _ALIKE * abs(high)


_ALIKE = 0.01


def listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else "".join(names)


# ---- ours and theirs


def shares_rows(ours: Table, theirs: Table) -> bool:
    """True if the tables have the same keys and a row in common, so that they can be shown side by side."""
    return ours.keys == theirs.keys and bool(
        {_key(ours, row) for row in ours.rows} & {_key(theirs, r) for r in theirs.rows}
    )


def join_tables(ours: Table, theirs: Table) -> Table:
    """Joins two tables: each column of ours, then the paper's of that name; then what only the paper has."""
    keys = ours.keys
    by_key = {_key(theirs, row): row for row in theirs.rows}
    columns = list(ours.columns[:keys])
    places: list[tuple[bool, int]] = []  # (of the paper, column)
    for place, name in enumerate(ours.columns[keys:], keys):
        columns.append(name)
        places.append((False, place))
        if name in theirs.columns[keys:]:
            columns.append(f"{name}, paper")
            places.append((True, theirs.columns.index(name, keys)))
    for place, name in enumerate(theirs.columns[keys:], keys):
        if name not in ours.columns[keys:]:
            columns.append(f"{name}, paper")
            places.append((True, place))
    own = {_key(ours, row): row for row in ours.rows}
    rows = []
    for key in dict.fromkeys((*own, *by_key)):
        found = (own.get(key), by_key.get(key))
        rows.append((*key, *(None if (row := found[paper]) is None else row[place] for paper, place in places)))
    return Table(tuple(columns), tuple(rows), keys)


def _key(of: Table, row: Sequence[Cell]) -> tuple[Cell, ...]:
    return tuple(row[: of.keys])


# ---- in words


def cell_text(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, Spread):
        median, low, high = map(cell_text, cell)
        return median if low == high else f"{median} ({low}-{high})"
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"
    return str(cell)


def text_lines(shown: Table) -> list[str]:
    """Columns padded with spaces: names to the left, numbers to the right."""
    cells = [shown.columns, *(tuple(map(cell_text, row)) for row in shown.rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [
            cell.ljust(width) if place < shown.keys else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def tables_of(experiment: Experiment, result: Result | None) -> list[tuple[str, Table]]:
    """Tables to show, with titles: one for both results, or one for each if no row names are in common."""
    theirs, measured = experiment.theirs, experiment.measured
    more = [] if measured is None else [(f"measured (bench/results/{measured[0]})", measured[1])]
    if result is None:
        return [*([] if theirs is None else [("the paper's", theirs)]), *more]
    if theirs is None:
        return [("ours", result.table), *more]
    if shares_rows(result.table, theirs):
        return [("ours and the paper's", join_tables(result.table, theirs)), *more]
    return [("ours", result.table), ("the paper's", theirs), *more]
