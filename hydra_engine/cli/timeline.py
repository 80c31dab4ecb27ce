"""What `generate`, `chat` and `demo` print below an answer: the timeline, and whether the limits were kept."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hydra_engine.cli.summary import seconds
from hydra_engine.core.outputs import SloReport, StageSpan
from hydra_engine.telemetry.timeline import draw

_LINE = re.compile(r"(\w+ *)(\|[^|]*\|)(.*)")
BOLD, DIM, RED = 1, 2, 31  # as terminals number them
_COLOURS = {
    **dict.fromkeys(("fetch", "tokenize", "preprocess"), 34),  # blue
    "encode": 35,  # magenta
    "prefill": 33,  # yellow
    "decode": 32,  # green
    **dict.fromkeys(("pull_features", "pull_kv"), 36),  # cyan
}


def timeline_lines(timeline: Sequence[StageSpan], slo: SloReport, *, width: int = 48) -> list[str]:
    """`width`: columns of a bar."""
    return [*draw(timeline, width=width), *_verdict(slo)]


def coloured(line: str) -> str:
    """One of these lines for a terminal: bars in the colour of their stage, waits dim, lost time in red."""
    if match := _LINE.fullmatch(line):
        stage, bar, rest = match.groups()
        return painted(stage, BOLD) + painted(bar, _COLOURS.get(stage.strip(), DIM)) + painted(rest, DIM)
    missed = line.startswith("late:") or ": missed" in line
    return painted(line, RED if missed else DIM)


def painted(text: str, code: int) -> str:
    return f"\x1b[{code}m{text}\x1b[0m"


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
