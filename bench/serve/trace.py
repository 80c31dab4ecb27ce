"""The stage timelines of a load as one Chrome trace (ui.perfetto.dev) and one Gantt picture.

A timeline counts from when its request arrived at the server; the client puts it on its own clock by the first token,
which both have stamped, so requests are placed to within the time that an event takes through the socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.gantt import draw_gantt
from bench.serve.breakdown import timeline
from hydra_engine.telemetry.trace import TraceRing
from hydra_planner.records import Record


def write(records: Sequence[Record], path: Path, title: str) -> Path | None:
    """Writes the trace and, beside it, the picture, whose path it gives; None if no record has a timeline."""
    requests = [
        (f"{record.index} {record.kind}", record.stamps[0] - record.metrics["ttft_s"], timeline(record))
        for record in sorted(records, key=lambda record: record.planned_s)
        if record.metrics and record.stamps
    ]
    if not requests:
        return None
    ring = TraceRing()
    for request in requests:
        ring.add(*request)
    ring.write(path)
    picture = path.with_suffix(".png")
    draw_gantt(requests, picture, title=title)
    return picture
