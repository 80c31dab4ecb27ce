"""The record of a request: when it was due, sent, answered token by token, and ended. Seconds since its run began.

Latencies count from when the request was due, not from when it was sent, so a client that is late can only make a
server look worse, never better. Does not know limits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Record:
    index: int
    kind: str  # the shape's name
    planned_s: float
    sent_s: float
    end_s: float
    wanted_tokens: int
    stamps: tuple[float, ...] = ()  # of events with tokens
    counts: tuple[int, ...] = ()  # tokens of each
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    metrics: dict[str, Any] | None = None  # the server's own, where it has them

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)

    @property
    def ok(self) -> bool:
        """Ended as asked; another number of tokens than was wanted is an error too."""
        return self.error is None

    @property
    def late_s(self) -> float:
        """Seconds by which the client sent it later than planned."""
        return self.sent_s - self.planned_s

    @property
    def ttft_s(self) -> float | None:
        return self.stamps[0] - self.planned_s if self.stamps else None

    @property
    def latency_s(self) -> float:
        return self.end_s - self.planned_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first event's."""
        after = self.num_tokens - self.counts[0] if self.counts else 0
        return (self.stamps[-1] - self.stamps[0]) / after if after else None

    @property
    def slo(self) -> dict[str, Any] | None:
        """The server's own verdict on the limits that the request gave it, None without limits."""
        return (self.metrics or {}).get("slo")

    def gaps(self, since_s: float = float("-inf"), until_s: float = float("inf")) -> list[float]:
        """Time between tokens, one per token after the first event's, of gaps that reach into the time between the two.

        An event with k tokens stands for k gaps of a k-th of its wait each: as one long gap it would say that tokens
        were late which only had no text of their own; as one long and k - 1 empty ones, that most were early.
        """
        found: list[float] = []
        for before, stamp, count in zip(self.stamps, self.stamps[1:], self.counts[1:], strict=False):
            if stamp > since_s and before < until_s:
                found.extend([(stamp - before) / count] * count)
        return found

    def document(self) -> dict[str, Any]:
        """The record for JSON, times rounded to 10 microseconds; `metrics` of the server without its timeline, which
        --trace has."""
        fields = asdict(self)
        for name in ("planned_s", "sent_s", "end_s"):
            fields[name] = round(fields[name], 5)
        fields["stamps"] = [round(stamp, 5) for stamp in self.stamps]
        if self.metrics is not None:
            fields["metrics"] = {name: value for name, value in self.metrics.items() if name != "timeline"}
        return fields


def quantile(values: Iterable[float], share: float) -> float | None:
    """Quantile with linear interpolation; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
