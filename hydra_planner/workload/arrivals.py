"""Arrival times of requests, fixed before a run from a seed, whatever the server does (an open loop).

Every process has exactly the asked rate: `count` requests in `count / rate` seconds. Drawn freely, 50 Poisson gaps
would miss their rate by 14 %, which is more than what is compared. The same seed gives the same pattern at every rate,
stretched, except that on/off bursts keep their own length. Does not know what is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Arrivals:
    """`kind` is poisson, gamma or onoff.

    gamma: gaps with a coefficient of variation `cv`, bursty above 1 and equal to Poisson at 1. onoff: a Poisson process
    that is on for `on_s` seconds, then silent for `off_s`, at a rate while on that gives the asked rate overall.
    """

    kind: str = "poisson"
    cv: float = 1.0
    on_s: float = 0.0
    off_s: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Arrivals:
        """`poisson`, `gamma:CV` or `onoff:ON,OFF` in seconds. Raises ValueError."""
        kind, _, rest = text.partition(":")
        if kind == "poisson" and not rest:
            return cls()
        if kind == "gamma" and float(rest) > 0:
            return cls("gamma", cv=float(rest))
        if kind == "onoff":
            on_s, off_s = (float(part) for part in rest.split(","))
            if on_s > 0 and off_s >= 0:
                return cls("onoff", on_s=on_s, off_s=off_s)
        raise ValueError(f"arrivals are poisson, gamma:CV or onoff:ON,OFF, not {text!r}")

    def __str__(self) -> str:
        if self.kind == "gamma":
            return f"gamma:{self.cv:g}"
        return f"onoff:{self.on_s:g},{self.off_s:g}" if self.kind == "onoff" else self.kind

    def times(self, rate: float, count: int, seed: int) -> np.ndarray:
        """Ascending seconds since the start of the run `[count]`, all within `count / rate`."""
        if rate <= 0 or count < 1:
            raise ValueError("a load needs a rate above 0 and at least one request")
        rng = np.random.default_rng([seed, 0xA221])
        span_s = count / rate
        if self.kind == "gamma":
            shape = 1 / self.cv**2
            edges = np.cumsum(rng.gamma(shape, size=count + 1))
            times: np.ndarray = edges[:-1] / edges[-1] * span_s
            return times
        # Given how many arrivals a Poisson process has in a span, they are uniform in it.
        places = np.sort(rng.random(count))
        if self.kind == "onoff":
            return self._busy_to_wall(places, span_s)
        return places * span_s

    def _busy_to_wall(self, places: np.ndarray, span_s: float) -> np.ndarray:
        """Shares of the span's busy time -> seconds, skipping the silences."""
        period_s = self.on_s + self.off_s
        periods, rest_s = divmod(span_s, period_s)
        busy_s = periods * self.on_s + min(rest_s, self.on_s)
        busy = places * busy_s
        return busy + np.floor(busy / self.on_s) * self.off_s
