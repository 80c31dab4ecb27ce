"""Prints the transition table of the frontend (`frontend/transitions.py`) in Markdown, as docs/architecture.md has it.

python -m tools.frontend_table
"""

from __future__ import annotations

from hydra_engine.frontend.request import RUNNING, Phase
from hydra_engine.frontend.transitions import TRANSITIONS, Actions

_IMPOSSIBLE = "-"


def table() -> str:
    """The table: a row per event, a column per phase, one column for the three phases of a running attempt."""
    lines = ["| event | WAITING | PREFILLING, MOVING, DECODING | CLOSING | ENDED |", "| --- | --- | --- | --- | --- |"]
    for event, row in TRANSITIONS.items():
        cells = {phase: _cell(row.get(phase)) for phase in Phase}
        running = list(dict.fromkeys(cells[phase] for phase in RUNNING))
        if len(running) == 1:
            joined = running[0]
        else:
            groups = {cell: ", ".join(phase.name for phase in RUNNING if cells[phase] == cell) for cell in running}
            joined = "; ".join(f"{phases}: {cell}" for cell, phases in groups.items())
        columns = (event.value, cells[Phase.WAITING], joined, cells[Phase.CLOSING], cells[Phase.ENDED])
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join(lines) + "\n"


def _cell(actions: Actions | None) -> str:
    if actions is None:
        return _IMPOSSIBLE
    if isinstance(actions, str):
        return f"*{actions}*"
    return ", ".join(f"`{action.__name__}`" for action in actions)


if __name__ == "__main__":
    print(table(), end="")
