"""Pictures from hosts that do what they should not, in a network of their own: the loop works little for what they
send, their slots and names are nobody else's, and nobody is led to this machine.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any

from tests.campaigns.siege import oracles
from tests.campaigns.siege.clients import CHAT, Answer, beside
from tests.campaigns.siege.hosts import SERVER
from tests.campaigns.siege.oracles import Finding
from tests.campaigns.siege.stage import Case, Stage

_OF_REQUEST, _MANY = 16, 100  # pictures
_numbers = itertools.count()


def _with_urls(urls: Iterable[str]) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": parts}]}


def _url(path: str, name: str = "") -> str:
    """A picture that nobody has asked for before."""
    number = next(_numbers)
    return f"http://{name or f'n{number}'}.test{path}?{number}"


async def answers(paths: tuple[str, ...], stage: Stage) -> list[Finding]:
    """Two requests of alice's with many pictures each; bob's stream beside."""
    asked = [_with_urls(_url(path) for path, _ in zip(itertools.cycle(paths), range(_MANY))) for _ in range(2)]
    async with beside((stage.alice.post(CHAT, body) for body in asked), 0.3) as others:
        findings = oracles.bystander(*await stage.golden(1))
        told = [await other for other in others]
    wrong = [f"{answer.status} {answer.code}" for answer in told if answer.status not in (400, 503)]
    return findings + oracles.theirs(told) + [Finding("blame", f"{paths}: {one}") for one in wrong]


async def tls(stage: Stage) -> list[Finding]:
    """A greeting that has no end, a byte a record."""
    body = _with_urls(f"https://n{next(_numbers)}.test/x" for _ in range(_MANY))
    return oracles.theirs([await stage.alice.post(CHAT, body)])


async def _good(stage: Stage, others: list[dict[str, Any]], queue: str) -> list[Finding]:
    """Bob's picture from a good host, beside alice's requests."""
    async with beside(stage.alice.post(CHAT, body) for body in others):
        answer = await stage.bob.post(CHAT, _with_urls([_url("/good", "good")]))
    findings = [] if answer.status == 200 else [Finding("turn", f"bob: {answer.status} {answer.body[:200]!r}")]
    return findings + await stage.turns(queue)


async def good(stage: Stage) -> list[Finding]:
    """Pictures from a host without fault are had."""
    told = [await stage.bob.post(CHAT, _with_urls([_url("/good", "good")])) for _ in range(3)]
    return [Finding("blame", f"bob: {one.status} {one.body[:200]!r}") for one in told if one.status != 200]


async def slots(stage: Stage) -> list[Finding]:
    """512 fetches that are held, of 20 names of one address."""
    names = [f"held{number}" for number in range(20)]
    return await _good(
        stage, [_with_urls(_url("/hold", names[i % 20]) for i in range(_OF_REQUEST)) for _ in range(32)], "fetch"
    )


async def lookups(stage: Stage) -> list[Finding]:
    """96 names that no resolver answers."""
    others = [
        _with_urls(f"http://n{next(_numbers)}.silent.test/x" for _ in range(_OF_REQUEST))
        for _ in range(96 // _OF_REQUEST)
    ]
    return await _good(stage, others, "look")


async def this_machine(stage: Stage) -> list[Finding]:
    """Names and redirects that lead to this machine: nobody connects to what listens there."""
    connections: list[str] = []

    def accepted(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(str(writer.get_extra_info("sockname")))
        writer.close()

    listening = [await asyncio.start_server(accepted, address, 80) for address in ("127.0.0.1", SERVER)]
    try:
        names = ("loopback", "own", "mixed", "rebind", "rebind", "rebind")
        urls = [_url("/x", name) for name in names] + ["http://127.0.0.1/x", f"http://{SERVER}/x", "http://[::1]/x"]
        told: list[Answer] = await asyncio.gather(*(stage.alice.post(CHAT, _with_urls([url])) for url in urls))
    finally:
        for server in listening:
            server.close()
    findings = [Finding("walls", f"a connection to {where}") for where in connections]
    return findings + oracles.theirs(told)


_STORMS = {
    "chunks": ("/chunks",),
    "interim answers": ("/continue", "/early-hints"),
    "headers": ("/headers", "/long-header", "/trailers", "/empty-lines"),
    "extensions": ("/extensions", "/long-extension"),
    "segments": ("/segments", "/header-segments", "/chunk-segments"),
    "slow": ("/drip", "/hold", "/endless", "/redirects", "/heavy-redirect"),
}
CASES = [
    *(Case("hosts", name, partial(answers, paths)) for name, paths in _STORMS.items()),
    Case("hosts", "good", good),
    Case("hosts", "TLS", tls),
    Case("hosts", "slots", slots),
    Case("hosts", "lookups", lookups),
    Case("hosts", "this machine", this_machine),
]
