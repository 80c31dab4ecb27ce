"""Requests that may be what instances die of: who is blamed for a death, and who is tried alone.

All requests of an instance that dies are blamed, as nobody knows which it was. Before the death that would be the last
one a request is a suspect, and suspects are tried one at a time, so that the one that kills takes no other with it.
Decides only; `dispatch.py` carries out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hydra_engine.core.ids import RequestId
from hydra_engine.front.flights import Flight

# The death of an instance is often felt by its peers before it is reported: so long a request that has left an instance
# is still blamed.
LATE_S = 1.0


class Suspects:
    """`flights` are all requests, by the user's number."""

    def __init__(self, flights: Mapping[RequestId, Flight], max_attempts: int) -> None:
        self._flights = flights
        self._max_attempts = max_attempts

    def is_poison(self, flight: Flight) -> bool:
        return flight.deaths >= self._max_attempts

    def is_suspect(self, flight: Flight) -> bool:
        return 0 < flight.deaths == self._max_attempts - 1

    def in_line(self, flight: Flight) -> bool:
        """It has to wait, for another one is being tried."""
        return self.is_suspect(flight) and any(
            other is not flight and other.attempt is not None and not other.closing and self.is_suspect(other)
            for other in self._flights.values()
        )

    def spoke(self, flight: Flight) -> None:
        """Where it decodes, it has got a token. That clears a suspect once, which may cost one more instance than
        `max_attempts`; from then on it is tried to its end."""
        if self.is_suspect(flight) and flight.prefilled and not flight.cleared:
            flight.cleared = True
            flight.deaths -= 1

    def left(self, flight: Flight, names: Iterable[str], now: float) -> None:
        """It is taken away from these instances though none of them is known to be dead."""
        flight.left, flight.left_s = frozenset(names), now

    def late(self, name: str, now: float) -> list[Flight]:
        """Those that have just left instance `name`, which is dead; each is named once, the oldest first."""
        found = [f for f in self._flights.values() if name in f.left and now - f.left_s <= LATE_S and not f.closing]
        for flight in found:
            flight.left = frozenset()
        return sorted(found, key=lambda flight: flight.age)
