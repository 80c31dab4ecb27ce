"""A listener that records its events and checks the order that every frontend may rely on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from hydra_engine.cluster.member import InstanceLink
from hydra_engine.cluster.supervisor import Supervisor
from hydra_engine.core.messages import Loading, PeerState, StartMessage, ToFrontend
from hydra_engine.core.reports import Status


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, ...]] = []
        self.times: list[float] = []
        self.links: dict[str, InstanceLink] = {}
        self.pairs: set[tuple[str, str]] = set()
        self.messages: dict[str, list[ToFrontend]] = {}
        self.loaded: dict[str, int] = {}

    def _note(self, *event: str) -> None:
        self.events.append(event)
        self.times.append(time.monotonic())

    def on_progress(self, name: str, loading: Loading) -> None:
        assert name not in self.links
        self.loaded[name] = self.loaded.get(name, 0) + 1

    def on_messages(self, name: str, messages: list[ToFrontend]) -> None:
        assert name in self.links, "messages of an instance that is not up"
        assert messages and not any(isinstance(m, StartMessage | PeerState) for m in messages)
        self.messages.setdefault(name, []).extend(m for m in messages if not isinstance(m, Status))

    def on_up(self, link: InstanceLink) -> None:
        assert link.name not in self.links, "up twice"
        self.links[link.name] = link
        self._note("up", link.name)

    def on_down(self, name: str, reason: str, since_s: float, *, restarts: bool) -> None:
        assert not [pair for pair in self.pairs if name in pair], "a pair outlives an instance"
        assert since_s <= time.monotonic()
        self.links.pop(name, None)
        self._note("down", name, reason, "restarts" if restarts else "stays down")

    def on_silent(self, name: str, since_s: float | None) -> None:
        assert name in self.links and (since_s is None or since_s < time.monotonic())
        self._note("silent" if since_s is not None else "heard", name)

    def on_pair(self, one: str, other: str, up: bool) -> None:
        assert one in self.links and other in self.links
        assert ((one, other) in self.pairs) is not up, "told twice"
        if up:
            self.pairs.add((one, other))
        else:
            self.pairs.remove((one, other))
        self._note("pair" if up else "unpair", one, other)

    async def start(self, supervisor: Supervisor) -> list[InstanceLink]:
        """Starts the cluster; its instances in the order of the topology."""
        await supervisor.start(self)
        return [self.links[state.name] for state in supervisor.states()]

    def of(self, *start: str) -> list[tuple[str, ...]]:
        return [event for event in self.events if event[: len(start)] == start]

    async def until(self, condition: Callable[[], object], within_s: float = 20.0) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"not in {within_s} s: {self.events}"
            await asyncio.sleep(0.005)
