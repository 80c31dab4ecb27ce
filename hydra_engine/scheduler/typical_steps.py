"""What language steps take on a machine without a cost surface: medians of the latest ones, so that single slow steps
do not matter. Is told times, never asks for them.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from hydra_engine.core.cost import LanguageLoad

_RECENT = 32  # steps that a typical duration is taken from


class TypicalSteps:
    """To be taught steps beside which vision ran, or others, but not both."""

    def __init__(self) -> None:
        self._decodes: dict[int, deque[float]] = {}  # seconds by the bit length of the number of rows
        self._per_token: deque[float] = deque(maxlen=_RECENT)

    def learn(self, load: LanguageLoad, duration_s: float) -> None:
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
        """A step of about so many decodes and nothing else; None if no such step has been seen."""
        size = num_decodes.bit_length()
        nearest = min(self._decodes, key=lambda other: abs(other - size), default=None)
        return None if nearest is None else median(self._decodes[nearest])

    def per_token_s(self) -> float | None:
        """What a token of a chunk adds to a step; None if no step with chunks has been seen."""
        return median(self._per_token) if self._per_token else None
