"""What steps really take, compared with what the cost surface predicts: ratios by kind of step, and the pause between
steps.

Budgets reckon with a high quantile of the recent ratios, because a limit is to be kept by nearly all steps and not by
the average one. A quantile of a window follows a machine that has become slower within a few steps, forgets within a
window that it was, and cannot be moved by one stalled step. Does not know limits or budgets.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from statistics import NormalDist, median

from hydra_engine.core.cost import LanguageLoad
from hydra_engine.scheduler.step_times import Window

WINDOW = 200  # steps
FEW = 32  # with fewer steps of a kind, the ratios of all kinds are taken; also how many the error bars stand for
KEPT = 0.99  # share of the steps that are to take no longer than budgets reckon: half of the 2 % that may be late
LOWEST, HIGHEST = 0.5, 3.0  # bounds of a correction
RECENT = 15  # steps whose median says what is normal right now
STALL = 2.0  # a step that takes so many times what is normal was held up by something that no budget prevents
_BARS = NormalDist().inv_cdf(0.95)  # standard deviations within which 90 % of the residuals of a fit lie


class Kind(IntEnum):
    """Steps that may err differently."""

    DECODES = 0  # nothing but decodes, alone on the machine
    CHUNKS = 1  # with prefill, alone on the machine
    VISION = 2  # beside the vision lane


def kind_of(load: LanguageLoad, vision_s: float) -> Kind:
    if vision_s > 0:
        return Kind.VISION
    return Kind.CHUNKS if load.prefill_tokens else Kind.DECODES


class _Ratios:
    """Ratios of one kind of step: those measured, and before these as many as the surface's error bars stand for."""

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
    """Ratios of measured over predicted seconds of language steps.

    `alone_error` and `corun_error` are the error bars of the surface (90 % of the relative residuals). A step that
    takes more than `STALL` times what the surface and the steps just before it say was held up by something else and is
    not counted; if half of the latest steps are like that, it is what the machine does now.
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
        """Median of what lies between two steps of late."""
        return self._pause_s

    def paused(self, seconds: float) -> None:
        self._pauses.append(max(0.0, seconds))
        self._pause_s = median(self._pauses)

    def measured(self, kind: Kind, ratio: float) -> None:
        normal = median(self._recent)
        self._recent.append(ratio)
        if ratio <= STALL * normal:
            self._kinds[kind].add(_bounded(ratio))
            self._all.add(_bounded(ratio))

    def high(self, kind: Kind) -> float:
        """The factor that nearly all steps of this kind stay below."""
        return self._of(kind).quantile(KEPT)

    def middle(self, kind: Kind) -> float:
        """The factor of the typical step of this kind."""
        return self._of(kind).quantile(0.5)

    def _of(self, kind: Kind) -> Window:
        ratios = self._kinds[kind]
        return (ratios if ratios.count >= FEW else self._all).window


def _bounded(ratio: float) -> float:
    return min(HIGHEST, max(LOWEST, ratio))
