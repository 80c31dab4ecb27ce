"""Statistics of step durations: what the next step is expected to take, from which gap a token is late, the speed that
this instance reports to the frontend, and the typical durations that budgets use on a machine without a cost surface.

Sizes are bit lengths of an amount (tokens, rows or patches): steps of one size take about the same time. Reads no
clock; times are arguments.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from statistics import geometric_mean

from hydra_engine.core.plans import LanguageLoad
from hydra_engine.core.reports import StepSpeeds

MIN_GAP_S = 0.05
_REMEMBERED_STEPS = 64  # behind the typical duration of all steps
_RECENT = 32  # steps behind each median by size
_EXPECTED_SHARE = 0.25  # weight of the newest step in what the next one is expected to take
_SPEED_SHARE = 0.1  # weight of the newest step in a reported speed
_MIN_STEPS = 4  # steps of a size before its speed is reported
_MAX_OF_MEAN = 2.0  # a longer step (the process was stopped) counts as this multiple of the mean


class Window:
    """The latest `size` values, kept both in order of time and sorted."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        if len(self._values) == self._size:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]
        self._values.append(value)
        insort(self._sorted, value)

    def quantile(self, share: float) -> float:
        """The value that the next one exceeds with a probability of at most 1 - `share`, if it is distributed like the
        window; the largest value if the window is too short for that. Raises IndexError if it is empty."""
        rank = min(len(self._sorted) - 1, int(share * (len(self._sorted) + 1)))
        return self._sorted[rank]

    @property
    def median(self) -> float:
        """Median of the window. Raises IndexError if it is empty."""
        middle = len(self._sorted) // 2
        return self._sorted[middle] if len(self._sorted) % 2 else (self._sorted[middle - 1] + self._sorted[middle]) / 2


class MeansBySize:
    """Moving means of seconds by size, the bit length of an amount. `new_share`: weight of the newest step.
    `averages_first`: the first steps of a size all weigh the same. `max_of_mean`: a longer step counts as this multiple
    of the mean."""

    def __init__(self, new_share: float, *, averages_first: bool = False, max_of_mean: float = math.inf) -> None:
        self._new_share = new_share
        self._averages_first = averages_first
        self._max_of_mean = max_of_mean
        self._means: dict[int, tuple[int, float]] = {}  # (steps, seconds)

    def add(self, amount: int, seconds: float) -> None:
        size = amount.bit_length()
        count, mean_s = self._means.get(size, (0, seconds))
        share = max(self._new_share, 1 / (count + 1)) if self._averages_first else self._new_share
        counted_s = min(seconds, self._max_of_mean * mean_s) if mean_s else seconds
        self._means[size] = count + 1, mean_s + share * (counted_s - mean_s)

    def mean_s(self, amount: int) -> float | None:
        """Mean seconds of steps of this size, i.e. with an amount of the same bit length; None before the first one."""
        found = self._means.get(amount.bit_length())
        return None if found is None else found[1]

    def by_size(self, min_steps: int = 1) -> dict[int, float]:
        """Bit length -> mean seconds, of the sizes with at least `min_steps` steps."""
        return {size: mean_s for size, (count, mean_s) in self._means.items() if count >= min_steps}


class StepTimes:
    """The durations of the latest language steps. `typical_s`: their median; 0.0 before the first."""

    def __init__(self) -> None:
        self._durations = Window(_REMEMBERED_STEPS)
        self._means = MeansBySize(_EXPECTED_SHARE)  # by number of tokens
        self.typical_s = 0.0

    def record(self, duration_s: float, num_tokens: int) -> None:
        self._means.add(num_tokens, duration_s)
        self._durations.add(duration_s)
        self.typical_s = self._durations.median

    def expected_s(self, num_tokens: int) -> float | None:
        """Expected seconds of a step of `num_tokens` tokens: the moving mean of its size, else `typical_s`;
        None before the first step."""
        mean_s = self._means.mean_s(num_tokens)
        return mean_s if mean_s is not None or not len(self._durations) else self.typical_s

    @property
    def shortest_s(self) -> float:
        """The smallest of the moving means, about the fixed cost of a step; 0.0 before the first step."""
        return min(self._means.by_size().values(), default=0.0)

    @property
    def gap_s(self) -> float:
        """Gap between two tokens, in seconds, above which the later one is late if its request has no limit."""
        return max(MIN_GAP_S, 2 * self.typical_s)


class SpeedMeter:
    """Moving means of the durations of steps by size: language steps with prefill, those without, and vision steps.
    `expected`: predicted ones, for sizes without enough steps."""

    def __init__(self, expected: StepSpeeds | None = None) -> None:
        self._expected = StepSpeeds() if expected is None else expected
        self._prefill, self._decode, self._vision = (
            MeansBySize(_SPEED_SHARE, averages_first=True, max_of_mean=_MAX_OF_MEAN) for _ in range(3)
        )

    def on_language(self, load: LanguageLoad, duration_s: float, vision_s: float) -> None:
        """Records a language step. Ignores one beside vision, which slows it."""
        if not vision_s:
            means = self._prefill if load.prefill_tokens else self._decode
            means.add(load.num_rows, duration_s)

    def on_vision(self, num_patches: int, duration_s: float) -> None:
        self._vision.add(num_patches, duration_s)

    def report(self) -> StepSpeeds:
        """The means of the sizes with at least `_MIN_STEPS` steps. The other sizes are as expected, times the factor by
        which the measured ones differ from that."""
        expected = self._expected
        return StepSpeeds(
            _completed(self._prefill.by_size(_MIN_STEPS), expected.prefill),
            _completed(self._decode.by_size(_MIN_STEPS), expected.decode),
            _completed(self._vision.by_size(_MIN_STEPS), expected.vision),
        )


def _completed(measured: Mapping[int, float], expected: Mapping[int, float]) -> dict[int, float]:
    ratios = [seconds / expected[size] for size, seconds in measured.items() if seconds and expected.get(size)]
    factor = geometric_mean(ratios) if ratios else 1.0
    return {size: factor * seconds for size, seconds in expected.items()} | dict(measured)


class TypicalSteps:
    """Medians of the durations of recent language steps, either of those beside vision or of those without."""

    def __init__(self) -> None:
        self._decodes: dict[int, Window] = {}  # seconds by the size of the number of rows
        self._per_token = Window(_RECENT)

    def learn(self, load: LanguageLoad, duration_s: float) -> None:
        """Records a step. One with chunks gives the time per token: its time beyond that of its decodes or, without
        any, of one decode if that is known. With decodes whose time is not known yet, it is ignored."""
        if not load.prefill_tokens:
            size = load.num_decodes.bit_length()
            if size not in self._decodes:
                self._decodes[size] = Window(_RECENT)
            self._decodes[size].add(duration_s)
            return
        decode_s = self.decode_s(max(load.num_decodes, 1))  # a step of chunks alone reads the weights too
        if decode_s is not None or not load.num_decodes:
            self._per_token.add(max(0.0, duration_s - (decode_s or 0.0)) / load.prefill_tokens)

    def decode_s(self, num_decodes: int) -> float | None:
        """Median seconds of steps without chunks, of the size nearest to `num_decodes`; None before the first one."""
        size = num_decodes.bit_length()
        nearest = min(self._decodes, key=lambda other: abs(other - size), default=None)
        return None if nearest is None else self._decodes[nearest].median

    def per_token_s(self) -> float | None:
        """Median seconds that one token of a chunk adds to a step; None before the first recorded step with chunks."""
        return self._per_token.median if len(self._per_token) else None
