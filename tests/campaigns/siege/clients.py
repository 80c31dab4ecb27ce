"""Clients of a server under siege. One request a connection, so that what a case sends is all that is on the wire."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.campaigns.fuzz import Answer as Exchanged
from tests.campaigns.fuzz import told_by
from tests.campaigns.siege.processes import cpu_s

CHAT = "/v1/chat/completions"
WAIT_S = 90.0

Headers = Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """`status` 0: the connection was closed without an answer; -1: none came in time."""

    status: int
    head: bytes = b""
    body: bytes = b""

    @property
    def code(self) -> str | None:
        """The code of an error."""
        with contextlib.suppress(ValueError, TypeError, KeyError):
            code: str | None = json.loads(self.body)["error"]["code"]
            return code
        return None


@dataclass
class Streamed:
    """The content of a stream, and the most processor time that instances took for a piece of it."""

    told: bytes = b""
    status: int = 0
    longest_cpu_s: float = 0.0
    num_pieces: int = 0
    ended: bool = False  # with [DONE]
    error: Any = None
    raw: bytes = field(default=b"", repr=False)


class Client:
    def __init__(self, port: int, key: str) -> None:
        self._port = port
        self._key = key

    def wire(self, method: str, path: str, body: bytes | None = None, headers: Headers | None = None) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close"]
        lines += [f"Authorization: Bearer {self._key}"] * bool(self._key)
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b"")

    async def get(self, path: str, *, within_s: float = WAIT_S) -> Answer:
        return await self.send(self.wire("GET", path), within_s=within_s)

    async def post(self, path: str, body: Any, *, within_s: float = WAIT_S, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.ask(self.wire("POST", path, data, headers), within_s=within_s)

    async def ask(self, wire: bytes, *, within_s: float = WAIT_S) -> Answer:
        """-1 where no answer comes in time, or nobody listens any more."""
        try:
            return await self.send(wire, within_s=within_s)
        except (TimeoutError, OSError):
            return Answer(-1)

    async def send(self, wire: bytes, *, within_s: float = WAIT_S) -> Answer:
        """The first answer. Raises TimeoutError, OSError where nobody listens."""
        data = bytearray()
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
            try:
                with contextlib.suppress(ConnectionError):
                    writer.write(wire)
                    while read := await reader.read(1 << 18):
                        data += read
            finally:
                writer.transport.abort()
        head, _, body = bytes(data).partition(b"\r\n\r\n")
        return Answer(int(head[9:12]) if head.startswith(b"HTTP/1.") else 0, head, body)

    async def stream(
        self, body: Mapping[str, Any], *, watched: Sequence[int] = (), within_s: float = WAIT_S
    ) -> Streamed:
        """`watched`: processes whose time counts. What comes in one read shares the time since the read before."""
        wire = self.wire("POST", CHAT, json.dumps({**body, "stream": True}).encode())
        result, used_s = Streamed(), _used_s(watched)
        try:
            async with asyncio.timeout(within_s):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 20)
                try:
                    with contextlib.suppress(ConnectionError):
                        writer.write(wire)
                        while read := await reader.read(1 << 16):
                            result.raw += read
                            pieces = read.count(b"data: {")
                            if pieces:
                                now_s = _used_s(watched)
                                result.longest_cpu_s = max(result.longest_cpu_s, (now_s - used_s) / pieces)
                                used_s = now_s
                            result.num_pieces += pieces
                finally:
                    writer.transport.abort()
        except TimeoutError:
            result.error = f"no end after {within_s:g} s"
        result.status = int(result.raw[9:12]) if result.raw.startswith(b"HTTP/1.") else 0
        result.told = told_by(Exchanged((result.status,), result.raw, 0.0, 0.0))
        result.ended = b"data: [DONE]" in result.raw
        return result


def _used_s(pids: Iterable[int]) -> float:
    return sum(map(cpu_s, pids))


Asked = list[asyncio.Task[Answer]]


@contextlib.asynccontextmanager
async def beside(
    asked: Iterable[Coroutine[Any, Any, Answer]], arrive_s: float = 0.7
) -> AsyncIterator[list[asyncio.Task[Answer]]]:
    """Requests that have had time to arrive; those that are not answered by the end are given up."""
    others = [asyncio.create_task(one) for one in asked]
    try:
        await asyncio.sleep(arrive_s)
        yield others
    finally:
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
