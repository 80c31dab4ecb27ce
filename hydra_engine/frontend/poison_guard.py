"""Requests that may crash instances: which are blamed for a death, and which run alone.

All requests of an instance that dies are blamed, since the cause is unknown. A request that may only be blamed once
more is a suspect, and suspects run one at a time, so that the one that kills an instance takes no other suspect with
it. Decides only; `transitions.py` acts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hydra_engine.core.ids import RequestId
from hydra_engine.frontend.request import RequestInFlight

# For this long a request that has left an instance is still blamed for its death, which peers often notice before it is
# reported.
LATE_S = 1.0


class PoisonGuard:
    """The suspects and the poison, by the deaths counted per request. `requests` is a live view of all requests, by the
    user's number."""

    def __init__(self, requests: Mapping[RequestId, RequestInFlight], max_attempts: int) -> None:
        self._requests = requests
        self._max_attempts = max_attempts

    def is_poison(self, in_flight: RequestInFlight) -> bool:
        return in_flight.deaths >= self._max_attempts

    def is_suspect(self, in_flight: RequestInFlight) -> bool:
        return 0 < in_flight.deaths == self._max_attempts - 1

    def must_wait(self, in_flight: RequestInFlight) -> bool:
        """True if the request is a suspect while another suspect runs."""
        return self.is_suspect(in_flight) and any(
            other is not in_flight and other.running and self.is_suspect(other) for other in self._requests.values()
        )

    def on_token(self, in_flight: RequestInFlight) -> None:
        """Takes back one death of a suspect that has got a token from its decoder. Once per request, since it may cost
        one instance more than `max_attempts`."""
        if self.is_suspect(in_flight) and in_flight.is_prefilled and not in_flight.is_cleared:
            in_flight.is_cleared = True
            in_flight.deaths -= 1

    def note_left(self, in_flight: RequestInFlight, names: Iterable[str], now: float) -> None:
        """Records that the request leaves these instances, none of which is known to be dead."""
        in_flight.left_instances, in_flight.left_s = frozenset(names), now

    def left_lately(self, name: str, now: float) -> list[RequestInFlight]:
        """Returns the requests that left the dead instance `name` within `LATE_S`, the oldest first; each once."""
        blamed = [f for f in self._requests.values() if name in f.left_instances and now - f.left_s <= LATE_S]
        for in_flight in blamed:
            in_flight.left_instances = frozenset()
        return sorted(blamed, key=lambda in_flight: in_flight.age)
