"""Typical durations of language steps on a machine without a cost surface: medians of the latest steps, so that single
slow ones do not matter. Reads no clock; times are arguments.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from hydra_engine.core.cost import LanguageLoad

_RECENT = 32  # steps behind each median


class TypicalSteps:
    """Medians of step durations. One instance holds steps beside vision or steps without vision, never both."""

    def __init__(self) -> None:
        self._decodes: dict[int, deque[float]] = {}  # seconds by the bit length of the number of rows
        self._per_token: deque[float] = deque(maxlen=_RECENT)

    def learn(self, load: LanguageLoad, duration_s: float) -> None:
        """Records a step. Tokens of chunks are learned from what a step takes beyond its decodes."""
        if not load.prefill_tokens:
            size = load.num_decodes.bit_length()
            if size not in self._decodes:
                self._decodes[size] = deque(maxlen=_RECENT)
            self._decodes[size].append(duration_s)
            return
        decode_s = self.decode_s(max(load.num_decodes, 1))  # a step of chunks alone reads the weights too
        if decode_s is not None or not load.num_decodes:
            self._per_token.append(max(0.0, duration_s - (decode_s or 0.0)) / load.prefill_tokens)

    def decode_s(self, num_decodes: int) -> float | None:
        """Seconds of a step of about `num_decodes` decodes and no chunks; None before any such step."""
        size = num_decodes.bit_length()
        nearest = min(self._decodes, key=lambda other: abs(other - size), default=None)
        return None if nearest is None else median(self._decodes[nearest])

    def per_token_s(self) -> float | None:
        """Seconds that one token of a chunk adds to a step; None before any step with chunks."""
        return median(self._per_token) if self._per_token else None
