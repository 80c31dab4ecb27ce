"""What `generate`, `chat` and `demo` print below an answer: the timeline, and whether the limits were kept."""

from __future__ import annotations

from collections.abc import Sequence

from hydra_engine.cli.summary import seconds
from hydra_engine.core.outputs import SloReport, StageSpan
from hydra_engine.observe.timeline import draw


def timeline_lines(timeline: Sequence[StageSpan], slo: SloReport) -> list[str]:
    return [*draw(timeline), *_verdict(slo)]


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
