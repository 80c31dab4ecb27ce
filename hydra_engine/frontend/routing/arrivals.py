"""The requests that come while others decode, counted over the answers that have ended lately. Reads no clock."""

from __future__ import annotations

# Weight that an answer keeps at the end of each later one: about the last twenty count.
_KEPT = 0.95


class Arrivals:
    """`count`: requests routed so far. `per_token`: requests that come per token of an answer; 0.0 before one has
    ended, and where all have come at once."""

    __slots__ = ("_came", "_tokens", "count", "per_token")

    def __init__(self) -> None:
        self.count = 0
        self.per_token = 0.0
        self._came = self._tokens = 0.0

    def on_answer(self, count: int, num_tokens: int) -> None:
        """Records the end of an answer: `count` as it was at its first token, and the tokens that came after that."""
        if num_tokens:
            self._came = _KEPT * self._came + self.count - count
            self._tokens = _KEPT * self._tokens + num_tokens
            self.per_token = self._came / self._tokens
