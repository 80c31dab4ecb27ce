"""Measured durations of steps compared with the predictions of the cost surface: ratios by kind of step, and the pause
between steps.

Budgets use a high quantile of the recent ratios, because nearly all steps have to keep a limit, not the average one. A
quantile over a window follows a machine that slows down within a few steps, recovers within a window, and is not moved
by one stalled step. Does not know limits or budgets.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from statistics import NormalDist, median

from hydra_engine.core.plans import LanguageLoad
from hydra_engine.scheduler.step_stats import Window

WINDOW = 200  # steps
FEW = 32  # with fewer steps of a kind, the ratios of all kinds are used; also the number of ratios from the error bars
KEPT = 0.99  # share of steps that take no longer than budgets assume: half of the 2 % that may be late
LOWEST, HIGHEST = 0.5, 3.0  # bounds of a correction
RECENT = 15  # steps whose median is the present normal
STALL = 2.0  # a step above this multiple of the normal was stalled by something that no budget prevents
_BARS = NormalDist().inv_cdf(0.95)  # standard deviations within which 90 % of the residuals of a fit lie


class Kind(IntEnum):
    """Kinds of steps with separate prediction errors."""

    DECODES = 0  # only decodes, no vision beside them
    CHUNKS = 1  # with prefill, no vision beside it
    VISION = 2  # beside the vision lane


def kind_of(load: LanguageLoad, vision_s: float) -> Kind:
    if vision_s > 0:
        return Kind.VISION
    return Kind.CHUNKS if load.prefill_tokens else Kind.DECODES


class _Ratios:
    """A window of the ratios of one kind of step. It starts with `FEW` samples of the normal distribution in which 90 %
    of the relative errors are at most `error`; `count` leaves these out."""

    def __init__(self, error: float) -> None:
        self.window = Window(WINDOW)
        self.count = 0
        spread = NormalDist(1.0, max(error, 1e-9) / _BARS)
        for place in range(FEW):
            self.window.add(_bounded(spread.inv_cdf((place + 0.5) / FEW)))

    def add(self, ratio: float) -> None:
        self.window.add(ratio)
        self.count += 1


class Correction:
    """Ratios of measured to predicted seconds of language steps.

    `alone_error` and `corun_error` are the error bars of the surface (90 % of the relative residuals). A step whose
    ratio is above `STALL` times the median of the last `RECENT` ratios was stalled and is not counted; if half of the
    latest ratios are that high, the median follows. Other ratios count as at least `LOWEST` and at most `HIGHEST`.
    """

    def __init__(self, alone_error: float, corun_error: float) -> None:
        worse = max(alone_error, corun_error)
        self._kinds = (_Ratios(alone_error), _Ratios(alone_error), _Ratios(worse))
        self._all = _Ratios(worse)
        self._recent: deque[float] = deque((1.0,) * RECENT, RECENT)
        self._pauses: deque[float] = deque(maxlen=RECENT)
        self._pause_s = 0.0

    @property
    def pause_s(self) -> float:
        """Median of the latest `RECENT` pauses between two steps, in seconds; 0.0 before the first."""
        return self._pause_s

    def add_pause(self, seconds: float) -> None:
        """Records the seconds between two steps; a negative number counts as 0."""
        self._pauses.append(max(0.0, seconds))
        self._pause_s = median(self._pauses)

    def add_ratio(self, kind: Kind, ratio: float) -> None:
        """Records a ratio of measured to predicted seconds. That of a stalled step moves only the median of the latest
        ratios."""
        normal = median(self._recent)
        self._recent.append(ratio)
        if ratio <= STALL * normal:
            self._kinds[kind].add(_bounded(ratio))
            self._all.add(_bounded(ratio))

    def high(self, kind: Kind) -> float:
        """Factor on the prediction that 99 % of the recent steps stay below: steps of this kind, or of all kinds while
        it has few."""
        return self._of(kind).quantile(KEPT)

    def middle(self, kind: Kind) -> float:
        """Median factor on the prediction, of the same steps as in `high`."""
        return self._of(kind).quantile(0.5)

    def _of(self, kind: Kind) -> Window:
        """The ratios of this kind, or of all kinds while fewer than `FEW` of this kind were measured."""
        ratios = self._kinds[kind]
        return (ratios if ratios.count >= FEW else self._all).window


def _bounded(ratio: float) -> float:
    """The ratio, or `LOWEST` or `HIGHEST` if it lies beyond."""
    return min(HIGHEST, max(LOWEST, ratio))
