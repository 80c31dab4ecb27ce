"""Requests that may be what instances die of: who is blamed for a death, and who is tried alone.

All requests of an instance that dies are blamed, as nobody knows which it was. Before the death that would be the last
one a request is a suspect, and suspects are tried one at a time, so that the one that kills takes no other with it.
Decides only; `dispatch.py` carries out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hydra_engine.core.ids import RequestId
from hydra_engine.frontend.in_flight import Phase, RequestInFlight

# The death of an instance is often felt by its peers before it is reported: so long a request that has left an instance
# is still blamed.
LATE_S = 1.0


class PoisonGuard:
    """`requests` are all requests, by the user's number."""

    def __init__(self, requests: Mapping[RequestId, RequestInFlight], max_attempts: int) -> None:
        self._requests = requests
        self._max_attempts = max_attempts

    def is_poison(self, in_flight: RequestInFlight) -> bool:
        return in_flight.deaths >= self._max_attempts

    def is_suspect(self, in_flight: RequestInFlight) -> bool:
        return 0 < in_flight.deaths == self._max_attempts - 1

    def must_wait(self, in_flight: RequestInFlight) -> bool:
        """The request has to wait, for another suspect is being tried."""
        return self.is_suspect(in_flight) and any(
            other is not in_flight and other.running and self.is_suspect(other) for other in self._requests.values()
        )

    def on_token(self, in_flight: RequestInFlight) -> None:
        """The request got a token where it decodes. That clears a suspect once, which may cost one more instance than
        `max_attempts`; from then on it is tried to its end."""
        if self.is_suspect(in_flight) and in_flight.prefilled and not in_flight.cleared:
            in_flight.cleared = True
            in_flight.deaths -= 1

    def note_left(self, in_flight: RequestInFlight, names: Iterable[str], now: float) -> None:
        """The request is taken away from these instances though none of them is known to be dead."""
        in_flight.left, in_flight.left_s = frozenset(names), now

    def left_lately(self, name: str, now: float) -> list[RequestInFlight]:
        """The requests that have just left instance `name`, which is dead, the oldest first; each is returned once."""
        blamed = [
            f
            for f in self._requests.values()
            if name in f.left and now - f.left_s <= LATE_S and f.phase is not Phase.CLOSING
        ]
        for in_flight in blamed:
            in_flight.left = frozenset()
        return sorted(blamed, key=lambda in_flight: in_flight.age)
