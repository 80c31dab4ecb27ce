"""Experiments and their results: a table of numbers, a sentence, and the paper's own numbers beside them.

Numbers are kept to four digits, so that a stored result is equal wherever it was made. Does not know any paper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

Cell = str | int | float | None
How = Literal["simulated", "closed form", "on a GPU", "on this machine"]
DIGITS = 4
Value = TypeVar("Value")


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
    """A result in a file. `scale`: with which it was made."""

    name: str
    scale: str
    result: Result


@dataclass(frozen=True, slots=True)
class Scale:
    """Amount of simulation: requests of a load, and points of a sweep."""

    name: str
    factor: int

    def requests(self, quick: int) -> int:
        return quick * self.factor

    def some(self, values: Sequence[Value], quick: int) -> tuple[Value, ...]:
        """Returns all values, or `quick` of them at even steps with both ends."""
        if self.factor > 1 or quick >= len(values):
            return tuple(values)
        return tuple(values[round(place * (len(values) - 1) / max(quick - 1, 1))] for place in range(quick))


QUICK, FULL = Scale("quick", 1), Scale("full", 4)


@dataclass(frozen=True, slots=True)
class Experiment:
    """`run` None: it needs hardware that a simulation does not stand for, and `command` measures it. `setting`: model,
    devices and load of ours, and what is not as in the paper. `remark`: where the paper's numbers do not add up."""

    name: str
    paper: str
    title: str
    how: How
    setting: str
    run: Callable[[Scale], Result] | None = None
    theirs: Table | None = None
    remark: str = ""
    command: str = ""


def closed_form(form: Callable[[], Result]) -> Callable[[Scale], Result]:
    """A closed form is the same at every scale."""

    def run(_scale: Scale) -> Result:
        return form()

    return run


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], keys: int = 1) -> Table:
    return Table(tuple(columns), tuple(tuple(map(rounded, row)) for row in rows), keys)


def rounded(cell: Cell) -> Cell:
    return float(f"{cell:.{DIGITS}g}") if isinstance(cell, float) else cell


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
    theirs = experiment.theirs
    if result is None:
        return [] if theirs is None else [("the paper's", theirs)]
    if theirs is None:
        return [("ours", result.table)]
    if shares_rows(result.table, theirs):
        return [("ours and the paper's", join_tables(result.table, theirs))]
    return [("ours", result.table), ("the paper's", theirs)]
