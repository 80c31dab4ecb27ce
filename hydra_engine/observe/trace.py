"""A ring of finished requests' spans, written as Chrome trace JSON for a standard viewer (ui.perfetto.dev).

One process row per instance, one thread row per lane, plus one row per request. Prompts never appear in it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra_engine.core.outputs import StageSpan

_RING = 2_000


class TraceRing:
    """Keeps the last requests' timelines; `spans` are relative to `arrival_s` on the monotonic clock."""

    def __init__(self, capacity: int = _RING) -> None:
        self._requests: deque[tuple[str, float, Sequence[StageSpan]]] = deque(maxlen=capacity)

    def add(self, request_id: str, arrival_s: float, spans: Sequence[StageSpan]) -> None:
        self._requests.append((request_id, arrival_s, spans))

    def events(self) -> list[dict[str, Any]]:
        """Complete events ("ph": "X"), microseconds since the oldest request in the ring."""
        if not self._requests:
            return []
        origin = min(arrival for _, arrival, _ in self._requests)
        events: list[dict[str, Any]] = []
        for request_id, arrival, spans in self._requests:
            for span in spans:
                event = {
                    "name": span.stage,
                    "cat": span.lane,
                    "ph": "X",
                    "ts": round((arrival - origin + span.start_s) * 1e6, 1),
                    "dur": round((span.end_s - span.start_s) * 1e6, 1),
                    "args": {"request": request_id, "batch": span.batch, "tokens": span.tokens, "cause": span.cause},
                }
                events.append(event | {"pid": "requests", "tid": request_id})
                if span.batch:
                    events.append(event | {"pid": span.instance, "tid": span.lane})
        return events

    def write(self, path: str | Path) -> None:
        document = {"traceEvents": self.events(), "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(document), encoding="utf-8")
