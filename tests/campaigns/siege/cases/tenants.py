"""Data of one API key does not reach another: bob asks every route of the OpenAPI document and of the page."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import Any

from tests.campaigns.siege import oracles
from tests.campaigns.siege.clients import CHAT, Answer
from tests.campaigns.siege.oracles import Finding
from tests.campaigns.siege.stage import Case, Stage

_ID = "siege-merger-ACME"
_WORDS = (_ID, "zanzibar-takeover", "sapphire-ledger", "obelisk-salt")
_PAGE = ("/", "/ui/events")


async def matrix(stage: Stage) -> list[Finding]:
    """Sends bob's requests for everything while alice has requests that run, that have ended and that wait."""
    alice, bob = stage.alice, stage.bob
    paths = json.loads((await bob.get("/openapi.json")).body)["paths"]
    body = {
        "messages": [{"role": "user", "content": _WORDS[1]}],
        "max_tokens": 1500,
        "ignore_eos": True,
        "user": _WORDS[2],
        "cache_salt": _WORDS[3],
    }
    wire = alice.wire("POST", CHAT, json.dumps(body | {"max_tokens": 2}).encode(), {"X-Request-Id": _ID + "-ended"})
    await alice.send(wire)
    wire = alice.wire("POST", CHAT, json.dumps(body).encode(), {"X-Request-Id": _ID + "-running"})
    running = asyncio.create_task(alice.send(wire))
    await asyncio.sleep(0.3)
    findings: list[Finding] = []
    asked = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    for method, path in [*asked, *(("GET", path) for path in _PAGE)]:
        answer = await _ask(bob, method, re.sub(r"\{model[^}]*\}", "demo", path).replace("{id}", _ID + "-running"))
        findings += oracles.secrets_in(answer.head + answer.body, _WORDS, f"bob's {method} {path}")
        findings += oracles.theirs([answer])
        findings += _labels(path, answer)
        if method == "DELETE" and answer.status != 404:
            findings.append(Finding("walls", f"bob's {method} {path} of alice's request: {answer.status}"))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return findings


async def own_delete(stage: Stage) -> list[Finding]:
    """A client can end its own request without a server error, and cannot end another client's."""
    alice, name = stage.alice, f"{_ID}-mine"
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1500, "ignore_eos": True}
    running = asyncio.create_task(
        alice.send(alice.wire("POST", CHAT, json.dumps(body).encode(), {"X-Request-Id": name}))
    )
    findings: list[Finding] = []
    for _ in range(100):
        await asyncio.sleep(0.05)
        answer = await alice.send(alice.wire("DELETE", f"/v1/requests/{name}"))
        if answer.status != 404:
            break
        other = await stage.bob.send(stage.bob.wire("DELETE", f"/v1/requests/{name}"))
        if other.status != 404:
            findings.append(Finding("walls", f"bob's DELETE of alice's request: {other.status}"))
    ended = await running
    if answer.status >= 300 or ended.status >= 500:
        findings.append(Finding("blame", f"alice's own DELETE: {answer.status}, of the request: {ended.status}"))
    return findings


async def _ask(client: Any, method: str, path: str) -> Answer:
    """Reads what comes within two seconds."""
    data = bytearray()
    reader, writer = await asyncio.open_connection("127.0.0.1", client._port)
    writer.write(client.wire(method, path, b"{}" if method == "POST" else None))
    with contextlib.suppress(TimeoutError, ConnectionError):
        async with asyncio.timeout(2):
            while read := await reader.read(1 << 16):
                data += read
    writer.transport.abort()
    head, _, body = bytes(data).partition(b"\r\n\r\n")
    return Answer(int(head[9:12]) if head.startswith(b"HTTP/1.") else 0, head, body)


def _labels(path: str, answer: Answer) -> list[Finding]:
    if path == "/metrics" and b'"alice"' in answer.body:
        return [Finding("walls", "bob's GET /metrics names alice")]
    return []


async def without_key(stage: Stage) -> list[Finding]:
    """Only what says that the server lives is open."""
    nobody, findings = stage.server.client(""), []
    paths = json.loads((await stage.bob.get("/openapi.json")).body)["paths"]
    for path, methods in paths.items():
        for method in methods:
            answer = await _ask(nobody, method.upper(), path)
            if answer.status < 400 and path not in ("/livez", "/health"):
                findings.append(Finding("walls", f"{method} {path} without a key: {answer.status}"))
    return findings


async def golden(stage: Stage) -> list[Finding]:
    """Four streams, each alone and together."""
    findings = []
    for index in range(4):
        findings += oracles.bystander(*await stage.golden(index))
    for streamed, right in await asyncio.gather(*(stage.golden(index % 4) for index in range(8))):
        findings += oracles.bystander(streamed, right)
    return findings


CASES = [
    Case("tenants", "golden", golden),
    Case("tenants", "matrix", matrix),
    Case("tenants", "own DELETE", own_delete),
    Case("tenants", "without key", without_key),
]
