"""One end of the socketpair between the engine's process and a front worker: messages of one turn of the loop leave in
one write, and whoever fills the pipe faster than the other side reads is told so. Does not know what messages mean.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Generic, Self, TypeVar

import msgspec

from hydra_engine.cluster.wire import FrameReader, WireError, frames
from hydra_engine.server.relay_wire import MAX_DOWN_BYTES, encode

logger = logging.getLogger(__name__)

M = TypeVar("M")

_HIGH_BYTES = 256 << 10  # that wait to be read by the other side; above, this end is congested


class Link(asyncio.Protocol, Generic[M]):
    """On the running loop. `on_message` and `on_closed` (once, after the last message) are set before frames come.
    A frame that cannot be read closes it."""

    def __init__(self, decode: Callable[[bytes], M], max_bytes: int) -> None:
        self.on_message: Callable[[M], None]
        self.on_closed: Callable[[], None]
        self.congested = False
        self.tail: object = None  # the last message that waits for the end of this turn; it may still grow
        self._decode = decode
        self._reader = FrameReader(max_bytes)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiting: list[object] = []
        self._room = asyncio.Event()
        self._room.set()

    async def open(self, sock: socket.socket) -> Self:
        await self._loop.create_unix_connection(lambda: self, sock=sock)
        return self

    # ---- out

    def send(self, message: msgspec.Struct) -> None:
        """Never blocks; dropped once the other side has gone."""
        self._put(message)

    def send_encoded(self, body: bytes) -> None:
        self._put(body)

    def _put(self, message: object) -> None:
        if self._transport is None:
            return
        if not self._waiting:
            self._loop.call_soon(self.flush)
        self._waiting.append(message)
        self.tail = message

    def flush(self) -> None:
        """Now, not at the end of this turn."""
        waiting, self._waiting, self.tail = self._waiting, [], None
        if self._transport is None or not waiting:
            return
        try:
            bodies = [one if isinstance(one, bytes) else encode(one) for one in waiting]
            self._transport.write(frames(bodies, MAX_DOWN_BYTES))
        except (WireError, ValueError, TypeError, OverflowError, NotImplementedError):
            # A message that is lost would be waited for without end.
            logger.exception("a message cannot be sent to the other side; closing the channel")
            self.close()

    async def room(self) -> None:
        """Returns when the other side has read most of what was sent, or has gone."""
        await self._room.wait()

    # ---- the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(_HIGH_BYTES)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._reader.feed(data):
                self.on_message(self._decode(body))
        except WireError:
            logger.exception("closing the channel of a front worker")
            self.close()

    def pause_writing(self) -> None:
        self.congested = True
        self._room.clear()

    def resume_writing(self) -> None:
        self.congested = False
        self._room.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.resume_writing()
        self.on_closed()

    def finish(self) -> None:
        """Closes when the other side has read all."""
        if self._transport is not None:
            self.flush()
            self._transport.close()

    @property
    def is_closed(self) -> bool:
        return self._transport is None

    def close(self) -> None:
        """At once: what the other side has not read may be lost."""
        if self._transport is not None:
            self._transport.abort()
