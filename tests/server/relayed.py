"""The real application of a front worker behind a real relay over a socketpair, both ends on one loop, and the scripted
engine behind that: tests of endpoints run through it as they do without.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import aiohttp

from hydra_engine.config import ServerConfig
from hydra_engine.server import relay_wire as wire
from hydra_engine.server.admin import TopologySwitch
from hydra_engine.server.app import House, furnish, open_house
from hydra_engine.server.auth import Keys
from hydra_engine.server.front_workers import facts_of
from hydra_engine.server.listening import listen
from hydra_engine.server.relay import Relay
from hydra_engine.server.relay_client import RelayClient
from hydra_engine.server.relay_link import Link
from hydra_engine.server.remote_commons import RemoteCommons
from hydra_engine.server.remote_engine import RemoteEngine
from tests.server.conftest import Served
from tests.server.stub import StubEngine

SPARE_BYTES = 100


class Main:
    """What the engine's process has."""

    def __init__(self, engine: StubEngine, config: ServerConfig, **options: Any) -> None:
        self.engine = engine
        self.config = config
        self.house, self.commons, self.keys = open_house(engine, config, **options)
        self.switch = TopologySwitch(engine)
        self.links: list[Link[wire.ToMain]] = []
        self.relays: list[Relay] = []
        engine.add_observer(self.commons.metrics.observe)

    async def connect(self, sock: socket.socket) -> Relay:
        link = Link(wire.decode_to_main, wire.max_up_bytes(self.config))
        relay = Relay(
            self.engine,
            self.commons,
            self.switch,
            link,
            push_state=self.push,
            on_hello=lambda: None,
            on_beat=lambda _: None,
        )
        link.on_closed = relay.close
        await link.open(sock)
        self.links.append(link)
        self.relays.append(relay)
        return relay

    def push(self) -> None:
        loaded, state = facts_of(self.engine, draining=self.commons.lifecycle.draining)
        for link in self.links:
            if loaded is not None:
                link.send(loaded)
            link.send(state)
            link.flush()


class Worker:
    """What a front worker has. `close` leaves like one that is asked to, `kill` like one that dies."""

    def __init__(self, served: Served, link: Link[wire.ToWorker], relay: Relay, ticker: asyncio.Task[None]) -> None:
        self.served = served
        self.relay = relay
        self._link = link
        self._ticker = ticker

    async def close(self) -> None:
        self._ticker.cancel()
        await self.served.close()
        self._link.finish()
        await self.served.http.close()

    def kill(self) -> None:
        self._link.close()


async def start_worker(main: Main) -> Worker:
    ours, theirs = socket.socketpair()
    relay = await main.connect(ours)
    link = Link(wire.decode_to_worker, wire.MAX_DOWN_BYTES)
    link.on_closed = lambda: None
    client = RelayClient(link)
    await link.open(theirs)
    config = replace(main.config, api_key=(), api_key_file=None, admin_key=None)
    asks = config.requests_per_minute > 0
    commons = RemoteCommons(client, asks_for_rate=asks, spare_bytes=SPARE_BYTES)
    house = main.house
    inside = House(
        commons,
        Keys(main.keys.keys, main.keys.admin),
        house.secret,
        house.model_name,
        commons.lifecycle,
        house.debug_endpoints,
    )
    app = furnish(RemoteEngine(client, house.model_name, main.engine.created), config, inside)
    listening = await listen(app, "127.0.0.1", 0)
    changes = aiohttp.TraceConfig()

    async def push(*_: object) -> None:
        main.push()

    async def tick() -> None:
        while True:
            main.push()
            commons.beat()
            await asyncio.sleep(0.02)

    changes.on_request_start.append(push)
    http = aiohttp.ClientSession(auto_decompress=False, trace_configs=[changes])
    own = main.commons
    served = Served(main.engine, listening.url, http, own.lifecycle, own.bodies, app, listening.close)
    worker = Worker(served, link, relay, asyncio.create_task(tick()))
    while client.state is None:  # noqa: ASYNC110 - nothing else waits for it
        await asyncio.sleep(0)
    return worker


Serve = Callable[..., Awaitable[Served]]


def serving(closers: list[Callable[[], Awaitable[None]]]) -> Serve:
    """As the fixture `serve` of conftest.py."""

    async def start(*, debug_endpoints: bool = False, model_name: str | None = None, **options: Any) -> Served:
        main = Main(StubEngine(), ServerConfig(**options), debug_endpoints=debug_endpoints, model_name=model_name)
        worker = await start_worker(main)
        closers.append(worker.close)
        return worker.served

    return start
