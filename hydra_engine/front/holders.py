"""Which instance holds which id for whom, and the way to send it something.

An id that the front has lost interest in stays here as stale until the instance has reported its end, so that an
instance that was silent is told again, a drain knows when it is over, and a message about an id that nobody knows is
answered once. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import Abort, ToInstance
from hydra_engine.front.flights import Flight

Send = Callable[[str, Sequence[ToInstance]], None]


class Holders:
    """`send` reaches an instance that is up."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._stale: dict[str, dict[RequestId, Flight | None]] = {}  # one entry for each instance that is up
        self._by_id: dict[RequestId, Flight] = {}

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
        """To an instance that is heard again."""
        if stale := self._stale.get(name):
            self._send(name, [Abort(number) for number in stale])

    # ---- ids

    def send(self, name: str, messages: Sequence[ToInstance]) -> None:
        if name in self._stale:
            self._send(name, messages)

    def know(self, number: RequestId, flight: Flight) -> None:
        """Messages about this id are the flight's."""
        self._by_id[number] = flight

    def forget(self, number: RequestId) -> None:
        self._by_id.pop(number, None)

    def find(self, number: RequestId) -> Flight | None:
        return self._by_id.get(number)

    def drop(self, name: str, number: RequestId, flight: Flight | None) -> None:
        """What the instance does under this id is wanted no more; `flight` may still want its report."""
        stale = self._stale.get(name)
        if stale is not None:
            stale[number] = flight
            self._send(name, [Abort(number)])

    def stray(self, name: str, number: RequestId) -> None:
        """A message about an id that is not known as this instance's."""
        if number not in self._stale.get(name, ()):
            self.drop(name, number, None)

    def ended(self, name: str, number: RequestId) -> Flight | None:
        """The instance is done with a stale id. Returns whose it was."""
        return self._stale.get(name, {}).pop(number, None)
