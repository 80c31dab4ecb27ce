"""Picture hosts that do what they should not, and the resolver that names them:
`python -m tests.campaigns.siege.hosts`.

The path of a URL says what its answer is (`ANSWERS`); port 443 is a TLS server that never ends its greeting. Any name
below `.test` is the host's first address, some are something else (`_ADDRESSES`), and below `.silent.test` no question
is answered. `GET /counts` says how often each path was asked. Run it in a network of its own (`networks.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import cast

from PIL import Image

HOST = "203.0.113.1"  # names and hostile answers
GOOD_HOST = "203.0.113.2"  # the same server under another address
SERVER = "203.0.113.100"
PORT = 80
TLS_PORT = 443
DNS_PORT = 53

_HEAD = b"HTTP/1.1 200 OK\r\n"
_CHUNKED = _HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
_PIECES = 4096  # of what is repeated, in one write
_SEGMENTS = 64  # in one turn of the loop

_Pieces = AsyncIterator[bytes]


def picture() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (40, 41), (200, 30, 60)).save(buffer, "PNG")
    return buffer.getvalue()


async def _good() -> _Pieces:
    body = picture()
    yield _HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


def _repeated(head: bytes, piece: bytes) -> Callable[[], _Pieces]:
    async def pieces() -> _Pieces:
        yield head
        while True:
            yield piece * _PIECES

    return pieces


def _segments(head: bytes, piece: bytes) -> Callable[[], _Pieces]:
    """Sends each piece as a segment, as fast as they are read."""

    async def pieces() -> _Pieces:
        yield head
        while True:
            for _ in range(_SEGMENTS):
                yield piece
            await asyncio.sleep(0)

    return pieces


async def _drip() -> _Pieces:
    yield _HEAD + b"Content-Length: 100000\r\n\r\n"
    while True:
        yield b"x"
        await asyncio.sleep(1)


async def _hold() -> _Pieces:
    await asyncio.Event().wait()
    yield b""


async def _redirect() -> _Pieces:
    yield b"HTTP/1.1 302 Found\r\nLocation: /redirects\r\nContent-Length: 0\r\n\r\n"


async def _heavy_redirect() -> _Pieces:
    yield b"HTTP/1.1 302 Found\r\nLocation: /heavy-redirect\r\nContent-Length: 1000000000\r\n\r\n"
    while True:
        yield bytes(1 << 16)


ANSWERS: dict[str, Callable[[], _Pieces]] = {
    "/good": _good,
    "/chunks": _repeated(_CHUNKED, b"1\r\nx\r\n"),
    "/empty-lines": _repeated(b"", b"\r\n"),
    "/continue": _repeated(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "/early-hints": _repeated(b"", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"),
    "/headers": _repeated(_HEAD, b"a: b\r\n"),
    "/long-header": _repeated(_HEAD + b"a: ", b"xxxxxxxx"),
    "/trailers": _repeated(_CHUNKED + b"0\r\n", b"a: b\r\n"),
    "/extensions": _repeated(_CHUNKED, b"1;" + b"a=b;" * 1000 + b"\r\nx\r\n"),
    "/long-extension": _repeated(_CHUNKED + b"1;", b"a=b;"),
    "/segments": _segments(_HEAD + b"Content-Length: 20000000\r\n\r\n", b"x"),
    "/header-segments": _segments(_HEAD + b"a: ", b"x"),
    "/chunk-segments": _segments(_CHUNKED, b"1\r\nx\r\n"),
    "/endless": _repeated(_HEAD + b"\r\n", bytes(16)),
    "/drip": _drip,
    "/hold": _hold,
    "/redirects": _redirect,
    "/heavy-redirect": _heavy_redirect,
}


class Host:
    """A server that plays all hosts."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode("ascii", "replace").partition("?")[0]
            if path == "/counts":
                writer.write(_HEAD + b"Connection: close\r\n\r\n" + json.dumps(self.counts).encode())
            else:
                self.counts[path] += 1
                await _send(reader, writer, ANSWERS.get(path, _good)())
        with contextlib.suppress(OSError):
            writer.close()
            await writer.wait_closed()

    async def greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Records of TLS with one byte each, of a greeting that has no end."""
        self.counts["tls"] += 1
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            await reader.read(1 << 16)
            await _send(reader, writer, _greeting())
            writer.close()


async def _greeting() -> _Pieces:
    for byte in itertools.chain(b"\x02\x00\x4e\x00\x03\x03", itertools.repeat(1)):
        yield b"\x16\x03\x03\x00\x01" + bytes([byte])


async def _send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pieces: _Pieces) -> None:
    """Sends all of them, or as many as there are before the client leaves."""
    both = asyncio.create_task(_write(writer, pieces)), asyncio.create_task(reader.read())
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    for task in both:
        task.cancel()
    await asyncio.gather(*both, return_exceptions=True)


async def _write(writer: asyncio.StreamWriter, pieces: _Pieces) -> None:
    async for piece in pieces:
        writer.write(piece)
        await writer.drain()


# ---- names

_ADDRESSES: dict[str, list[str]] = {
    "good.test": [GOOD_HOST],
    "mixed.test": [HOST, "127.0.0.1"],
    "loopback.test": ["127.0.0.1"],
    "own.test": [SERVER],
    "many.test": [f"203.0.113.{last}" for last in range(1, 29)],
}


class Resolver(asyncio.DatagramProtocol):
    """Answers questions for IPv4 addresses; `rebind.test` is public the first time and loopback the next."""

    def __init__(self) -> None:
        self._rebinding = itertools.cycle(([HOST], ["127.0.0.1"]))
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        assert self._transport is not None
        with contextlib.suppress(struct.error, IndexError, UnicodeDecodeError):
            answer = self._answer(data)
            if answer is not None:
                self._transport.sendto(answer, address)

    def _answer(self, data: bytes) -> bytes | None:
        labels, at = [], 12
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode("ascii"))
            at += 1 + data[at]
        question = data[12 : at + 5]
        (kind,) = struct.unpack(">H", data[at + 1 : at + 3])
        name = ".".join(labels).lower()
        if name.endswith(".silent.test"):
            return None
        found = self._addresses(name) if kind == 1 else []
        flags = 0x8180 if name.endswith("test") else 0x8183
        head = data[:2] + struct.pack(">HHHHH", flags, 1, len(found), 0, 0)
        record = struct.pack(">HHHIH", 0xC00C, 1, 1, 0, 4)
        return head + question + b"".join(record + socket.inet_aton(one) for one in found)

    def _addresses(self, name: str) -> list[str]:
        if name == "rebind.test":
            return next(self._rebinding)
        return _ADDRESSES.get(name, [HOST] if name.endswith(".test") else [])


async def serve(address: str = "0.0.0.0", port: int = PORT, tls_port: int = TLS_PORT, dns_port: int = DNS_PORT) -> None:
    host, loop = Host(), asyncio.get_running_loop()
    await loop.create_datagram_endpoint(Resolver, (address, dns_port))
    await asyncio.start_server(host.answer, address, port, backlog=1024)
    await asyncio.start_server(host.greet, address, tls_port, backlog=1024)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve())
