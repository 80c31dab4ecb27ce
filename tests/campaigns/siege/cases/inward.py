"""Storms of little bytes, requests and sockets, most of them without a key."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from functools import partial

from tests.campaigns.siege import oracles
from tests.campaigns.siege.clients import CHAT
from tests.campaigns.siege.oracles import Finding
from tests.campaigns.siege.stage import Case, Stage

_SECONDS = 3.0
_CONNECTIONS = 16
_CHUNKS = b"1\r\nx\r\n" * 10_000
_EXTENSION = b"1;" + b"a" * 15_000 + b"\r\nx\r\n"
_LONG_EXTENSION = b"1;" + b"a" * 60_000 + b"\r\nx\r\n"
_PIPELINE = b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(100)) + b"\r\n"


def _head(key: str) -> bytes:
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    return (
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{authorization}"
        "Transfer-Encoding: chunked\r\n\r\n"
    ).encode()


async def _pour(port: int, head: bytes, data: bytes, seconds: float) -> None:
    """Sends as much as is taken, and reads and forgets what comes back. Connections that end are opened again."""
    deadline = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < deadline:
        with contextlib.suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            reading = asyncio.create_task(_forget(reader))
            try:
                async with asyncio.timeout_at(deadline):
                    writer.write(head)
                    while not reading.done():
                        writer.write(data)
                        await writer.drain()
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                writer.transport.abort()


async def _forget(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(1 << 16):
            pass


async def storm(key: str, data: bytes, stage: Stage) -> list[Finding]:
    head = b"" if data is _PIPELINE else _head(stage.server.keys.get(key, ""))
    streams = asyncio.create_task(stage.golden())
    pouring = [_pour(stage.server.port, head, data, _SECONDS) for _ in range(_CONNECTIONS)]
    await asyncio.gather(*pouring)
    return oracles.bystander(*await streams)


async def odd_http(stage: Stage) -> list[Finding]:
    """Requests that are no HTTP/1.1 get an answer in the API's form."""
    findings = []
    body = b'{"model":"demo","prompt":"x","max_tokens":1}'
    bob = stage.bob
    expect = await bob.ask(bob.wire("POST", "/v1/completions", body, {"Expect": "foo"}), within_s=20)
    old = await stage.server.client("").ask(b"GET /livez HTTP/0.9\r\nHost: localhost\r\n\r\n", within_s=30)
    extension = b"1;" + b"a" * 1_000_000 + b"\r\n{\r\n0\r\n\r\n"
    large = await bob.ask(_head(stage.server.keys["bob"]) + extension, within_s=30)
    for name, answer in {"Expect: foo": expect, "HTTP/0.9": old, "an extension of 1 MB": large}.items():
        if answer.status not in (0, 400, 417, 505) or (answer.status and b"application/json" not in answer.head):
            findings.append(Finding("blame", f"{name}: {answer.status} {answer.head[:200]!r}"))
    return findings


async def many_sockets(stage: Stage) -> list[Finding]:
    """4,200 idle ones without a key: probes of health still get through, and the log stays short. They end a hundred at
    a time: those that end at one moment cost one turn of the loop, some 30 us each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 14), hard))
    opened, findings = [], []
    try:
        for _ in range(42):
            opening = [asyncio.open_connection("127.0.0.1", stage.server.port) for _ in range(100)]
            done = await asyncio.gather(*opening, return_exceptions=True)
            opened += [one for one in done if not isinstance(one, BaseException)]
        for _ in range(3):
            try:
                answer = await stage.server.client("").get("/livez", within_s=20)
                if answer.status != 200:
                    findings.append(Finding("ends", f"/livez beside {len(opened)} sockets: {answer.status}"))
            except (OSError, TimeoutError) as error:
                findings.append(Finding("ends", f"/livez beside {len(opened)} sockets: {type(error).__name__}"))
    finally:
        for at in range(0, len(opened), 100):
            for _, writer in opened[at : at + 100]:
                writer.transport.abort()
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return findings


CASES = [
    Case("inward", "chunks without a key", partial(storm, "", _CHUNKS)),
    Case("inward", "chunks", partial(storm, "alice", _CHUNKS)),
    Case("inward", "extensions", partial(storm, "alice", _EXTENSION)),
    Case("inward", "long extensions without a key", partial(storm, "", _LONG_EXTENSION)),
    Case("inward", "pipelines", partial(storm, "", _PIPELINE)),
    Case("inward", "odd HTTP", odd_http),
    Case("inward", "4,200 sockets", many_sockets),
]
