"""Cases and the stage on which they run: a warm server, two clients, what is right, and a seed.

The stage looks after what must hold after every case; a case returns what it found besides.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.campaigns.fuzz import golden_bodies
from tests.campaigns.siege import oracles
from tests.campaigns.siege.clients import CHAT, Client, Streamed
from tests.campaigns.siege.oracles import Finding
from tests.campaigns.siege.running import Server

CHILD_SECONDS = 8.0  # of a sandboxed child's job, on the stage
FETCH_SECONDS = 3.0


@dataclass(frozen=True)
class Case:
    """`alone`: it starts and ends servers of its own, or needs none."""

    group: str
    name: str
    run: Callable[[Stage], Awaitable[list[Finding]]]
    alone: bool = False
    growth_mib: float = oracles.MAX_GROWTH_MIB  # of a process

    @property
    def full_name(self) -> str:
        return f"{self.group}/{self.name}"


@dataclass
class Stage:
    seed: str
    name: str = ""
    point: Mapping[str, Any] = field(default_factory=dict)  # what a search found, for a case that takes it
    found: dict[str, Any] = field(default_factory=dict)  # the same, from the case
    skipped: list[str] = field(default_factory=list)
    seconds: float = 20.0  # that the case may take
    has_networks: bool = False  # there are hostile hosts, and no way out
    topology: str = "EP+D"
    _server: Server | None = None
    _golden: list[bytes] = field(default_factory=list)
    _tenants: dict[str, str] = field(default_factory=dict)

    @property
    def rng(self) -> random.Random:
        return random.Random(f"{self.seed}/{self.name}")

    @property
    def server(self) -> Server:
        assert self._server is not None
        return self._server

    @property
    def alice(self) -> Client:
        return self.server.client("alice")

    @property
    def bob(self) -> Client:
        return self.server.client("bob")

    @property
    def instances(self) -> tuple[int, ...]:
        return tuple(self.server.instances().values())

    @property
    def decoder(self) -> int:
        """The process of the instance that decodes."""
        return next(pid for name, pid in self.server.instances().items() if "d" in name)

    async def start(self) -> None:
        """A warm server, unless there is one that answers."""
        if self._server is not None:
            try:
                await self.server.state(within_s=20)
                if await self.server.wait_whole(60):
                    return
            except (TimeoutError, OSError, ValueError):
                pass
            self.server.kill()
            self._server = None
        options = [f"--child-seconds={CHILD_SECONDS:g}", *["--documentation-is-public"] * self.has_networks]
        server = Server(*options, "--fetch-timeout-s", f"{FETCH_SECONDS:g}", topology=self.topology)
        await asyncio.to_thread(server.wait_ready)
        self._server = server
        await server.wait_whole()
        self._tenants = {name: await self._tenant(name) for name in ("alice", "bob")}
        first = [await self.bob.stream(body) for body in golden_bodies()]
        self._golden = [streamed.told for streamed in first]
        warm = {
            "model": "demo",
            "max_tokens": 4,
            "guided_regex": "[a-z]{3}",
            "messages": [{"role": "user", "content": "x"}],
        }
        for client in (self.alice, self.bob):
            await client.post(CHAT, warm)
            await asyncio.gather(*(client.stream(body) for body in golden_bodies()))

    async def _tenant(self, name: str) -> str:
        tenant: str = json.loads((await self.server.client(name).get("/siege")).body)["client"]
        return tenant

    async def golden(self, index: int = 0, *, watched: bool = False, **options: Any) -> tuple[Streamed, bytes]:
        """Bob's stream, and what it is when nobody else is there."""
        body = golden_bodies()[index] | options
        streamed = await self.bob.stream(body, watched=self.instances if watched else ())
        return streamed, self._golden[index]

    async def begin(self) -> None:
        """Begins to count anew."""
        await self.server.state(reset=True)

    async def turns(self, *queues: str) -> list[Finding]:
        """Judges the turns of bob since `begin`, in all queues; `queues`: those that he must have gone through."""
        state = await self.server.state()
        return oracles.turn(map(tuple, state["events"]), self._tenants["bob"], queues)

    async def run(self, case: Case) -> list[Finding]:
        """The case, and what must hold behind every one."""
        self.name = case.full_name
        if case.alone:
            return await case.run(self)
        await self.start()
        await self.begin()
        before, log_before, server = oracles.footprints(self.server), self.server.log_bytes, self.server
        try:
            findings = await case.run(self)
        except (TimeoutError, OSError) as error:
            findings = [Finding("blame", f"the server was lost: {type(error).__name__}: {error}")]
        if self._server is not server:  # the case has ended it
            return findings
        try:
            state = await self.server.state()
        except (TimeoutError, OSError, ValueError) as error:
            return [*findings, Finding("lag", f"the loop does not answer: {type(error).__name__}")]
        findings += oracles.lag(state["lag_ms"], state["reference_ms"])
        findings += oracles.turn(map(tuple, state["events"]), self._tenants["bob"], ())
        findings += await oracles.footprint(self.server, before, log_before, growth_mib=case.growth_mib)
        findings += oracles.written(self.server)
        return list(dict.fromkeys(findings))

    def drop(self) -> Server:
        """The server is the case's from now on, which ends it."""
        server, self._server = self.server, None
        return server

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server = None


def draw(seed: str, names: list[str]) -> str:
    """Draws a name by the seed."""
    return sorted(names)[int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big") % len(names)]
