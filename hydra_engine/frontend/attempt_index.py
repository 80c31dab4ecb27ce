"""Which ids instances work on, for which request, and the way to send an instance a message.

An id that the front has lost interest in stays here as stale until the instance has reported its end, so that an
instance that was silent is told again, a drain knows when it is over, and a message about an id that nobody knows is
answered once. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import Abort, ToInstance
from hydra_engine.frontend.in_flight import RequestInFlight

Send = Callable[[str, Sequence[ToInstance]], None]


class AttemptIndex:
    """`send` reaches an instance that is up."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._stale: dict[str, dict[RequestId, RequestInFlight | None]] = {}  # one entry for each instance that is up
        self._by_id: dict[RequestId, RequestInFlight] = {}

    # ---- instances

    def up(self, name: str) -> None:
        self._stale[name] = {}

    def down(self, name: str) -> None:
        self._stale.pop(name, None)

    def is_up(self, name: str) -> bool:
        return name in self._stale

    def num_stale(self, name: str) -> int:
        return len(self._stale.get(name, ()))

    def repeat_aborts(self, name: str) -> None:
        """Sends aborts again to an instance that was silent."""
        if stale := self._stale.get(name):
            self._send(name, [Abort(number) for number in stale])

    # ---- ids

    def send(self, name: str, messages: Sequence[ToInstance]) -> None:
        if name in self._stale:
            self._send(name, messages)

    def add(self, number: RequestId, in_flight: RequestInFlight) -> None:
        """Messages about this id belong to this request."""
        self._by_id[number] = in_flight

    def remove(self, number: RequestId) -> None:
        self._by_id.pop(number, None)

    def find(self, number: RequestId) -> RequestInFlight | None:
        return self._by_id.get(number)

    def abort(self, name: str, number: RequestId, in_flight: RequestInFlight | None) -> None:
        """Aborts this id at the instance; `in_flight` may still want its report."""
        stale = self._stale.get(name)
        if stale is not None:
            stale[number] = in_flight
            self._send(name, [Abort(number)])

    def reject(self, name: str, number: RequestId) -> None:
        """The instance speaks of an id that is not its own (any more): the id is aborted there, once."""
        if number not in self._stale.get(name, ()):
            self.abort(name, number, None)

    def on_end(self, name: str, number: RequestId) -> RequestInFlight | None:
        """The instance is done with a stale id. Returns whose it was."""
        return self._stale.get(name, {}).pop(number, None)
