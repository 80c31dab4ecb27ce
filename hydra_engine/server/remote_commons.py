"""The `Commons` of a front worker: the truth is in another process.

Costs no round trip for what every request needs: a generation is announced together with its submission, bytes of
bodies come out of a small store that was granted before, and counts are sent without an answer. Does not know HTTP.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import msgspec

from hydra_engine.observe.request_metrics import Outcomes
from hydra_engine.server import relay_wire as wire
from hydra_engine.server.commons import BodyLease
from hydra_engine.server.context import Lifecycle, Scope
from hydra_engine.server.relay_client import RelayClient
from hydra_engine.server.remote_engine import GENERATION

_MAX_ACCEPT_CHARS = 1000  # of a header, as far as it matters


class RemoteCommons:
    """`lifecycle` is this process's own: it drains when the engine's process says so. `asks_for_rate`: requests are
    counted before their bodies are read."""

    def __init__(self, client: RelayClient, *, asks_for_rate: bool, spare_bytes: int) -> None:
        self.lifecycle = Lifecycle()
        self._client = client
        self._asks_for_rate = asks_for_rate
        self._store = BodyStore(client, spare_bytes)
        self._lags: list[float] = []
        client.on_state = self._on_state
        if client.state is not None:
            self._on_state(client.state)

    def _on_state(self, state: wire.State) -> None:
        self.lifecycle.draining = state.draining

    # ---- who may come in

    async def count(self, client: str) -> None:
        if self._asks_for_rate:
            await self._client.ask_raw(wire.CountRequest(client))

    @contextmanager
    def lease(self) -> Iterator[BodyLease]:
        lease = _RemoteLease(self._store)
        try:
            yield lease
        finally:
            self._store.put_back(lease.held)

    @asynccontextmanager
    async def generation(self, client: str, tenant: str, ids: Sequence[str], num_answers: int) -> AsyncIterator[None]:
        relay, number = self._client, self._client.next_number()
        async with Scope() as scope:
            with self.lifecycle.running(scope):
                relay.generations[number] = scope
                relay.link.send(wire.Open(number, client, tenant, tuple(ids), num_answers))
                outside = GENERATION.set(number)
                try:
                    yield
                finally:
                    GENERATION.reset(outside)
                    del relay.generations[number]
                    relay.link.send(wire.Close(number))

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        taking = self._client.put(self._client.next_number(), wire.TakeSeat())
        try:
            await asyncio.shield(taking)
            yield
        finally:
            taking.add_done_callback(self._leave_seat)

    def _leave_seat(self, taking: asyncio.Future[msgspec.Raw]) -> None:
        """Whoever left before there was an answer may have got one of the seats all the same."""
        if not taking.cancelled() and taking.exception() is None:
            self._client.link.send(wire.LeaveSeat())

    # ---- who is in

    async def end(self, tenant: str, one: str) -> int:
        return await self._client.ask(wire.EndRequests(tenant, one), int)

    async def num_running(self) -> int:
        return await self._client.ask(wire.NumRunning(), int)

    # ---- what is counted

    def answered(self, route: str, status: int, client: str | None, *, method: str, seconds: float) -> None:
        self._counts().answered.append((route, status, client, method, seconds))

    def generated(self, num_choices: int, most_tokens: int) -> None:
        self._counts().generated.append((num_choices, most_tokens))

    def rejected(self, code: str | None) -> None:
        self._counts().rejected.append(code)

    def _counts(self) -> wire.Counted:
        """What leaves at the end of this turn."""
        counted = self._client.link.tail
        if type(counted) is not wire.Counted:
            counted = wire.Counted([], [], [])
            self._client.link.send(counted)
        return counted

    def lagged(self, seconds: float) -> None:
        self._lags.append(seconds)

    def beat(self) -> None:
        """Call it at intervals."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        lags, self._lags = self._lags, []
        self._client.link.send(wire.Beat(lags, used.ru_utime + used.ru_stime))

    async def outcomes(self) -> Outcomes:
        return await self._client.ask(wire.GetOutcomes(), Outcomes)

    async def metrics_page(self, accept: str) -> tuple[bytes, str]:
        plain = accept.encode("ascii", "replace").decode()[:_MAX_ACCEPT_CHARS]
        return await self._client.ask(wire.MetricsPage(plain), tuple[bytes, str])


class BodyStore:
    """Bytes that were granted for bodies and are not in use: at most twice `spare_bytes`, so that little is kept from
    other processes."""

    def __init__(self, client: RelayClient, spare_bytes: int) -> None:
        self._client = client
        self._spare_bytes = spare_bytes
        self._left = 0

    async def fits(self, num_bytes: int) -> bool:
        if num_bytes <= self._left:
            return True
        return await self._client.ask(wire.Fits(num_bytes - self._left), bool)

    async def take(self, num_bytes: int) -> bool:
        while num_bytes > self._left:
            missing = num_bytes - self._left
            question = wire.Grant(missing, missing + self._spare_bytes)
            asking = self._client.put(self._client.next_number(), question)
            asking.add_done_callback(self._add)  # also where nobody waits for it any more
            if not msgspec.msgpack.decode(await asyncio.shield(asking), type=int):
                return False
        self._left -= num_bytes
        return True

    def _add(self, asking: asyncio.Future[msgspec.Raw]) -> None:
        if not asking.cancelled() and asking.exception() is None:
            self.put_back(msgspec.msgpack.decode(asking.result(), type=int), keep=True)

    def put_back(self, num_bytes: int, *, keep: bool = False) -> None:
        self._left += num_bytes
        if not keep and self._left > 2 * self._spare_bytes:
            surplus = self._left - self._spare_bytes
            self._left -= surplus
            self._client.link.send(wire.GiveBack(surplus))


class _RemoteLease:
    def __init__(self, store: BodyStore) -> None:
        self.held = 0
        self._store = store

    async def fits(self, num_bytes: int) -> bool:
        return await self._store.fits(num_bytes)

    async def take(self, num_bytes: int) -> bool:
        if not await self._store.take(num_bytes):
            return False
        self.held += num_bytes
        return True
