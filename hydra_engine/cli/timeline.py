"""What `generate`, `chat` and `demo` print below an answer: the timeline, and whether the limits were kept."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydra_engine.cli.summary import seconds
from hydra_engine.core.outputs import SloReport, StageSpan
from hydra_engine.observe.timeline import draw

if TYPE_CHECKING:
    from rich.text import Text

_LINE = re.compile(r"(\w+ *)(\|[^|]*\|)(.*)")
_COLOURS = {
    "fetch": "blue",
    "tokenize": "blue",
    "preprocess": "blue",
    "encode": "magenta",
    "prefill": "yellow",
    "decode": "green",
    "pull_features": "cyan",
    "pull_kv": "cyan",
}


def timeline_lines(timeline: Sequence[StageSpan], slo: SloReport, *, width: int = 48) -> list[str]:
    """`width`: columns of a bar."""
    return [*draw(timeline, width=width), *_verdict(slo)]


def coloured(line: str) -> Text:
    """One of these lines for a terminal: bars in the colour of their stage, waits dim, lost time in red."""
    from rich.text import Text  # only a terminal needs it

    if found := _LINE.fullmatch(line):
        stage, bar, rest = found.groups()
        return Text.assemble((stage, "bold"), (bar, _COLOURS.get(stage.strip(), "dim")), (rest, "dim"))
    missed = line.startswith("late:") or ": missed" in line
    return Text(line, style="red" if missed else "dim")


def _verdict(slo: SloReport) -> list[str]:
    """One line, or none without limits."""
    parts = []
    if slo.ttft_limit_s is not None:
        parts.append(f"first token within {seconds(slo.ttft_limit_s)}: {_word(slo.ttft_met)}")
    if slo.tpot_limit_s is not None:
        late = f" ({slo.late_gaps} of {slo.num_gaps} late)" if slo.num_gaps else ""
        parts.append(f"90 % of gaps within {seconds(slo.tpot_limit_s)}: {_word(slo.tpot_met)}{late}")
    if slo.reason:
        parts.append(slo.reason)
    return [f"{'limits':12} {' · '.join(parts)}"] if parts else []


def _word(met: bool | None) -> str:
    return {True: "met", False: "missed", None: "not known"}[met]
