"""The documents of a folder of micro-benchmarks as rows, each with its goal, and as tables in Markdown.

Does not know how anything was measured; needs nothing but the standard library.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.micro.goals import BENCHES, Row, goal_of, value_of

TABLE, PICTURE = "summary.md", "summary.png"
_PEERS_SHOWN = 3
_BESIDE = ("gain", "gain_best", "decode_slowdown", "first_slowdown")
_KERNELS_SHOWN, _KERNEL_LENGTH = 15, 100


class Document(NamedTuple):
    """A file's rows, what was skipped, and where it was measured."""

    name: str  # of the file, without .json
    bench: str
    mode: str
    rows: tuple[Row, ...]
    remarks: tuple[str, ...]  # what was not measured and why, a sentence each
    ceilings: Mapping[str, Any]
    card: Mapping[str, Any]


def read(folder: Path) -> tuple[list[Document], list[str]]:
    """The documents of the micro-benchmarks in `folder`, in the order in which they run, and one sentence for every
    file that is none."""
    found, problems = [], []
    for path in sorted(folder.glob("*.json")):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(document, dict) or document.get("suite") != "micro":
                continue
            found.append(document_of(path.stem, document))
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"{path.name} is not a document of a micro-benchmark: {type(error).__name__} {error}"[:200])
    order = {bench: place for place, bench in enumerate(BENCHES)}
    return sorted(found, key=lambda d: (order.get(d.bench, len(order)), d.name)), problems


def document_of(name: str, made: Mapping[str, Any]) -> Document:
    card = made["card"]
    rows = tuple(_row(made["bench"], row, str(card.get("device", "cpu"))) for row in made["rows"])
    return Document(name, made["bench"], made["mode"], rows, _remarks(made), made.get("ceilings") or {}, card)


def _remarks(made: Mapping[str, Any]) -> tuple[str, ...]:
    kinds = {"Wrong result": "wrong", "Failed": "failed", "Skipped": "skipped"}
    found = [f"{kind}: {each['what']}: {each['reason']}" for kind, name in kinds.items() for each in made.get(name, ())]
    return (*found, *(() if made.get("complete", True) else ("It ended before its last row.",)))


def _row(bench: str, row: Mapping[str, Any], device: str) -> Row:
    goal = goal_of(bench, row, device)
    return Row(
        bench,
        row["what"],
        value_of(row, "seconds.median"),
        value_of(row, "floor_s"),
        value_of(row, "sustained_floor_s"),
        goal,
        None if goal is None else value_of(row, goal.measure),
        row.get("over_peers") or {},
        row,
    )


# ---- the table


def table(documents: Sequence[Document], notes: Iterable[str] = ()) -> str:
    """Markdown, ending in a newline."""
    lines = ["# Micro-benchmarks", ""]
    lines += [*dict.fromkeys(_machine(document.card) for document in documents), ""]
    rows = [row for document in documents for row in document.rows]
    judged = [row for row in rows if row.goal is not None]
    counts = ", ".join(f"{sum(r.verdict == v for r in judged)} {v}" for v in ("moonshot", "par", "below par"))
    lines += [f"{len(rows)} rows, {len(judged)} of them with a goal: {counts}.", ""]
    lines += [f"- {note}" for note in notes]
    for document in documents:
        lines += ["", f"## {document.name} ({document.mode})", ""]
        if rates := _rates(document.ceilings):
            lines += [f"Ceilings of the same run: {rates}.", ""]
        lines += _steady_state(document.rows)
        if document.rows:
            lines += [
                "| what | time | floor | of floor | sustained | of it | goal: par, moonshot | got | | over peers |"
            ]
            lines += ["| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
            lines += [_cells(row) for row in document.rows]
        for row in document.rows:
            lines += _kernels(row)
        lines += [f"\n{remark}" for remark in document.remarks]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> str:
    goal, got = "", ""
    if row.goal is not None and row.value is not None:
        sign, unit = ("≤" if row.goal.less_is_better else "≥"), f" {row.goal.unit}" if row.goal.unit else ""
        name = "" if row.goal.measure in ("of_floor", row.goal.unit) else f"{row.goal.measure} "
        goal = f"{name}{sign} {row.goal.par:.3g}, {row.goal.moonshot:.3g}{unit}"
        got = f"{row.value:.3g}{unit}"
    elif (rate := value_of(row.made, "gb_per_s_sm")) is not None:
        got = f"{row.made['gb_per_s']:.0f} GB/s, {rate:.1f} of each"
    peers = ", ".join(f"{name} {ratio:.2f}" for name, ratio in list(row.peers.items())[:_PEERS_SHOWN])
    what = row.what.replace("|", "/")
    if (spread := value_of(row.made, "spread")) is not None:
        what += f", {len(row.made['repeats_s'])} times, {spread:.1%} apart"
    of_floors = [*_of_floor(row, row.floor_s), *_of_floor(row, row.sustained_floor_s)]
    cells = (what, duration(row.seconds), *of_floors, goal, got, row.verdict, peers)
    return f"| {' | '.join(cells)} |"


def _of_floor(row: Row, floor_s: float | None) -> tuple[str, str]:
    return duration(floor_s), "" if floor_s is None or not row.seconds else f"{floor_s / row.seconds:.2f}"


def _steady_state(rows: Sequence[Row]) -> list[str]:
    """A table of work beside decodes without end: what both gain over one after the other, and what it costs each."""
    lines = ["| beside each other | steady-state gain | at most | decodes slower | other slower |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for row in rows:
        gain, most, *slowdowns = (value_of(row.made, name) for name in _BESIDE)
        if gain is not None and ", beside, " in row.what:
            cells = ["" if value is None else f"{value:.2f}" for value in (gain, most, *slowdowns)]
            lines.append(f"| {row.what.replace('|', '/')} | {' | '.join(cells)} |")
    return [*lines, ""] if len(lines) > 2 else []


def _kernels(row: Row) -> list[str]:
    """Lines on the kernels that a profiler has seen, longest first; none without them."""
    kernels = row.made.get("kernels")
    if not kernels:
        return []
    head = (
        f"{row.what}: {row.made['launches']:.0f} launches, {duration(row.made['kernels_s'])} of {duration(row.seconds)}"
    )
    if gap := row.made.get("gap_us"):
        head += f", gaps {gap['median']:.2f} us in the middle, {gap['p95']:.2f} at the 95th percentile"
    lines = ["", f"{head}.", "", "| launches | us | share | kernel |", "| --- | --- | --- | --- |"]
    for kernel in kernels[:_KERNELS_SHOWN]:
        name = kernel["name"][:_KERNEL_LENGTH].replace("|", "/")
        lines.append(f"| {kernel['count']:g} | {kernel['us']:.1f} | {kernel['share']:.1%} | `{name}` |")
    return lines


def duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _machine(card: Mapping[str, Any]) -> str:
    device = card.get("gpu") or f"{card.get('cpu')}, {card.get('cores')} cores"
    versions = (f"{name} {card[name]}" for name in ("torch", "triton", "python") if card.get(name))
    return f"{device} · {' · '.join(versions)} · commit {card.get('commit')}"


def _rates(ceilings: Mapping[str, Any]) -> str:
    names = {
        "gemm_flops_per_s": ("matrix products", 1e12, "TFLOP/s"),
        "sustained_flops_per_s": ("sustained", 1e12, "TFLOP/s"),
        "read_bytes_per_s": ("read", 1e9, "GB/s"),
        "copy_bytes_per_s": ("copy", 1e9, "GB/s"),
        "graph_gap_s": ("gap in a graph", 1e-6, "us"),
    }
    shown = ((name, *names[name]) for name in names if isinstance(ceilings.get(name), int | float))
    return ", ".join(f"{label} {ceilings[name] / size:.3g} {unit}" for name, label, size, unit in shown)


# ---- files


def write(folder: Path, notes: Iterable[str] = ()) -> list[Path]:
    """Writes the summary of `folder` there; gives what was written."""
    documents, problems = read(folder)
    notes = [*notes, *problems]
    path = folder / TABLE
    path.write_text(table(documents, notes), encoding="utf-8")
    written = [path]
    rows = [row for document in documents for row in document.rows if row.goal is not None]
    if rows and importlib.util.find_spec("matplotlib") is not None:
        from bench.summary.drawing import draw  # takes a while to load

        draw(rows, list(dict.fromkeys(_machine(document.card) for document in documents)), folder / PICTURE)
        written.append(folder / PICTURE)
    return written
