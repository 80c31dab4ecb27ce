"""A GET over HTTP/1.1 with bounds on the cost of an answer relative to its size.

Reads, TLS records, heads, header lines and chunks are steps; an answer has some steps and wire bytes for free, and more
of both only as its body grows. So small pieces, endless interim answers, headers or trailers end soon. Does not know
clients, or which addresses are allowed.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohappyeyeballs
import h11
import msgspec

T = TypeVar("T")

PIECE_BYTES = 64 << 10  # of a body, passed on at once
MAX_HEAD_BYTES = 32 << 10  # of one head, trailer or line
MAX_LOCATION_BYTES = 8192

_FREE_STEPS = 1024
_BYTES_PER_STEP = 128  # a segment of 536 bytes, a record in it and a chunk in that are three
_HEAD_STEPS = 16  # of a head, besides one for each of its lines
_FREE_BYTES = 128 << 10  # certificates, heads
_READ_BYTES = 64 << 10
_SMALL_BYTES = 4 << 10  # a read that brings less is followed by a pause, in which more may come
_UNPAUSED_READS = 64
_PAUSE_S = 0.01
_NEXT_ADDRESS_S = 0.25  # without a connection after this, the next address is tried concurrently
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class Get(msgspec.Struct, frozen=True, array_like=True):
    """A request for a file. Only `addresses` are dialled."""

    addresses: tuple[str, ...]
    port: int
    tls_name: str | None  # the certificate's host name; None for http
    host: str  # the header
    target: str
    accept: str
    max_bytes: int


class Failed(Exception):
    """Raised for an unusable answer: `why` is one of the kinds of fetch_child.Ended."""

    def __init__(self, why: str, status: int = 0) -> None:
        super().__init__(why)
        self.why = why
        self.status = status


class Costs:
    """The steps and bytes of one answer. Its methods raise Failed if they exceed the bounds."""

    def __init__(self) -> None:
        self.num_reads = 0
        self._num_steps = 0
        self._wire_bytes = 0
        self._body_bytes = 0

    def read(self, num_bytes: int) -> None:
        """Counts a read from the wire."""
        self.num_reads += 1
        self._wire_bytes += num_bytes
        if self._wire_bytes > _FREE_BYTES + self._body_bytes + self._body_bytes // 8:
            raise Failed("wasteful")
        self.step()

    def step(self, count: int = 1) -> None:
        self._num_steps += count
        if self._num_steps > _FREE_STEPS + self._body_bytes // _BYTES_PER_STEP:
            raise Failed("wasteful")

    def body(self, num_bytes: int) -> int:
        """Counts bytes of the body and returns their sum so far."""
        self._body_bytes += num_bytes
        self.step()
        return self._body_bytes


class Wire:
    """A connection, plain or with TLS. Reads nothing ahead."""

    def __init__(self, connection: socket.socket, costs: Costs) -> None:
        self._socket = connection
        self._costs = costs
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None

    async def start_tls(self, context: ssl.SSLContext, name: str) -> None:
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)
        await self._step(self._tls.do_handshake)

    async def read(self) -> bytes:
        """Returns some bytes, b"" at the end. A truncated body is found by its length or its chunks."""
        if self._tls is None:
            return await self._receive()
        tls = self._tls
        try:
            data = await self._step(lambda: tls.read(_READ_BYTES))
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return b""
        self._costs.step()
        return data

    async def write(self, data: bytes) -> None:
        tls = self._tls
        if tls is None:
            await self._send(data)
        else:
            await self._step(lambda: tls.write(data))

    async def _step(self, step: Callable[[], T]) -> T:
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                await self._flush()
                if data := await self._receive():
                    self._incoming.write(data)
                else:
                    self._incoming.write_eof()
            else:
                await self._flush()
                return result

    async def _flush(self) -> None:
        if data := self._outgoing.read():
            await self._send(data)

    async def _send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def _receive(self) -> bytes:
        data = await asyncio.get_running_loop().sock_recv(self._socket, _READ_BYTES)
        self._costs.read(len(data))
        is_small = len(data) < _SMALL_BYTES and self._costs.num_reads > _UNPAUSED_READS
        await asyncio.sleep(_PAUSE_S if is_small else 0)  # lets other tasks run
        return data


async def get(request: Get, context: ssl.SSLContext, hand_over: Callable[[bytes], Awaitable[None]]) -> str | None:
    """Passes the body to `hand_over` in pieces and returns None, or returns the target of a redirect. Raises Failed,
    OSError and h11's errors."""
    costs = Costs()
    connection = await aiohappyeyeballs.start_connection(
        [_address_info(address, request.port) for address in request.addresses], happy_eyeballs_delay=_NEXT_ADDRESS_S
    )
    with connection:
        wire = Wire(connection, costs)
        if request.tls_name is not None:
            await wire.start_tls(context, request.tls_name)
        http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        await wire.write(_head(http, request))
        response = await _response(http, wire, costs)
        headers = dict(response.headers)
        location = headers.get(b"location")
        if response.status_code in _REDIRECTS and location is not None:
            return location[: MAX_LOCATION_BYTES + 1].decode("utf-8", "replace")
        if response.status_code != 200:
            raise Failed("status", response.status_code)
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise Failed("compressed")
        if int(headers.get(b"content-length", 0)) > request.max_bytes:  # h11 has made sure that it is a number
            raise Failed("large")
        await _body(http, wire, costs, request.max_bytes, hand_over)
        return None


def _address_info(address: str, port: int) -> tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int]]:
    if ":" in address:
        return socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port, 0, 0)
    return socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port)


def _head(http: h11.Connection, request: Get) -> bytes:
    headers = [
        ("Host", request.host),
        ("Accept", request.accept),
        ("Accept-Encoding", "identity"),
        ("User-Agent", "hydra-engine"),
        ("Connection", "close"),
    ]
    head = http.send(h11.Request(method="GET", target=request.target, headers=headers))
    http.send(h11.EndOfMessage())
    assert head is not None
    return head


async def _response(http: h11.Connection, wire: Wire, costs: Costs) -> h11.Response:
    while True:
        event = await _event(http, wire)
        if isinstance(event, h11.InformationalResponse | h11.Response):
            costs.step(_HEAD_STEPS + len(event.headers))
        if isinstance(event, h11.Response):
            return event
        if not isinstance(event, h11.InformationalResponse) or event.status_code == 101:
            raise Failed("connection")


async def _body(
    http: h11.Connection, wire: Wire, costs: Costs, most: int, hand_over: Callable[[bytes], Awaitable[None]]
) -> None:
    piece = bytearray()
    while isinstance(event := await _event(http, wire), h11.Data):
        if costs.body(len(event.data)) > most:
            raise Failed("large")
        piece += event.data
        while len(piece) >= PIECE_BYTES:
            await hand_over(bytes(piece[:PIECE_BYTES]))
            del piece[:PIECE_BYTES]
    if piece:
        await hand_over(bytes(piece))


async def _event(http: h11.Connection, wire: Wire) -> object:
    while (event := http.next_event()) is h11.NEED_DATA:
        http.receive_data(await wire.read())
    return event
