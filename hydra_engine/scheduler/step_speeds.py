"""The speed of this instance, measured on its own steps: moving means of their seconds, by kind and size.

The frontend compares instances at equal sizes, so that a device with large steps is not taken for a slow one. Reads no
clock; times are arguments.
"""

from __future__ import annotations

from hydra_engine.core.cost import LanguageLoad
from hydra_engine.core.messages import StepSpeeds

_NEW_SHARE = 0.1  # weight of the newest step in the moving mean
_MIN_STEPS = 4  # steps of a size before it is reported
_MAX_OF_MEAN = 2.0  # a longer step (the process was stopped) counts as this multiple of the mean


class _Means:
    """Moving means of seconds by size, the bit length of an amount."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[int, float]] = {}  # (steps, seconds)

    def add(self, amount: int, seconds: float) -> None:
        size = amount.bit_length()
        count, mean_s = self._means.get(size, (0, seconds))
        share = max(_NEW_SHARE, 1 / (count + 1))
        self._means[size] = count + 1, mean_s + share * (min(seconds, _MAX_OF_MEAN * mean_s) - mean_s)

    def report(self) -> dict[int, float]:
        return {size: mean_s for size, (count, mean_s) in self._means.items() if count >= _MIN_STEPS}


class SpeedMeter:
    """Mean durations of the steps of this instance: steps with prefill, decode steps and vision steps."""

    def __init__(self) -> None:
        self._prefill, self._decode, self._vision = _Means(), _Means(), _Means()

    def on_language(self, load: LanguageLoad, duration_s: float, vision_s: float) -> None:
        """Records a language step. Ignores one beside vision, which slows it."""
        if not vision_s:
            means = self._prefill if load.prefill_tokens else self._decode
            means.add(load.num_rows, duration_s)

    def on_vision(self, num_patches: int, duration_s: float) -> None:
        self._vision.add(num_patches, duration_s)

    def report(self) -> StepSpeeds:
        return StepSpeeds(self._prefill.report(), self._decode.report(), self._vision.report())
