"""The two ends of a channel between the frontend and one instance, in two implementations.

They are: in memory (`local_channel`, the embedded default), and over an inherited Unix socketpair (`FrontendSocket` in
the frontend process, `InstanceSocket` in the instance process). The frontend's end runs on an asyncio loop, the
instance's end on a thread that waits for one event. Does not know what the messages mean.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from hydra_engine import log
from hydra_engine.cluster import wire
from hydra_engine.core.messages import ToFrontend, ToInstance

logger = logging.getLogger(__name__)

OnMessages = Callable[[list[ToFrontend]], None]
OnClosed = Callable[[], None]

EXIT_ORPHANED = 70
_RECEIVE_BYTES = 1 << 18


class FrontendEnd(Protocol):
    """The frontend's end. `on_messages` and `on_closed` run on the loop; `on_closed` once, after the last message."""

    def attach(self, on_messages: OnMessages, on_closed: OnClosed) -> None: ...

    def send(self, messages: Sequence[ToInstance]) -> None:
        """Sends without blocking. Messages to a closed channel are dropped (`on_closed` has been called)."""
        ...

    def close(self) -> None:
        """Closes at once: messages that the other side has not read may be lost."""
        ...


class _Inbox:
    """A queue of messages for an instance. `wake` is set when messages arrive."""

    def __init__(self) -> None:
        self._messages: deque[ToInstance] = deque()
        self.wake = threading.Event()

    def push(self, messages: Iterable[ToInstance]) -> None:
        self._messages.extend(messages)
        self.wake.set()

    def drain(self) -> list[ToInstance]:
        drained: list[ToInstance] = []
        while self._messages:
            drained.append(self._messages.popleft())
        return drained


class LocalInstanceEnd(_Inbox):
    """The inbox and outbox of an instance in the same process."""

    def __init__(self, frontend: LocalFrontendEnd, strict: bool) -> None:
        super().__init__()
        self._frontend = frontend
        self._strict = strict

    def send(self, messages: Sequence[ToFrontend]) -> None:
        if self._strict:
            messages = [wire.decode_to_frontend(wire.encode_frames([m])[wire.HEADER_BYTES :]) for m in messages]
        self._frontend.deliver(list(messages))

    def close(self) -> None:
        self._frontend.instance_gone()


class LocalFrontendEnd:
    def __init__(self, loop: asyncio.AbstractEventLoop, strict: bool) -> None:
        self._loop = loop
        self._strict = strict
        self._on_messages: OnMessages | None = None
        self._on_closed: OnClosed | None = None
        self._closed = False
        self.instance = LocalInstanceEnd(self, strict)

    def attach(self, on_messages: OnMessages, on_closed: OnClosed) -> None:
        self._on_messages, self._on_closed = on_messages, on_closed

    def send(self, messages: Sequence[ToInstance]) -> None:
        if self._strict:
            messages = wire.messages_to_instance(wire.FrameReader().read_frames(wire.encode_to_instance(messages)))
        self.instance.push(messages)

    def deliver(self, messages: list[ToFrontend]) -> None:
        """Passes messages to the loop. Called on the instance's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hand_over, messages)

    def _hand_over(self, messages: list[ToFrontend]) -> None:
        if self._on_messages is not None and not self._closed:
            self._on_messages(messages)

    def instance_gone(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._report_closed)

    def _report_closed(self) -> None:
        if self._on_closed is not None and not self._closed:
            self._closed = True
            self._on_closed()

    def close(self) -> None:
        self._closed = True


def local_channel(
    loop: asyncio.AbstractEventLoop, *, strict: bool = False
) -> tuple[LocalFrontendEnd, LocalInstanceEnd]:
    """Returns both ends of a channel in memory. `strict` passes every message through the codec, so that the two sides
    share no objects."""
    frontend = LocalFrontendEnd(loop, strict)
    return frontend, frontend.instance


class FrontendSocket(asyncio.Protocol):
    """The frontend's end of a socketpair, on the running loop."""

    def __init__(self) -> None:
        self._reader = wire.FrameReader()
        self._transport: asyncio.Transport | None = None
        self._on_messages: OnMessages | None = None
        self._on_closed: OnClosed | None = None

    @classmethod
    async def open(cls, sock: socket.socket) -> FrontendSocket:
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_unix_connection(cls, sock=sock)
        return protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def attach(self, on_messages: OnMessages, on_closed: OnClosed) -> None:
        self._on_messages, self._on_closed = on_messages, on_closed

    def data_received(self, data: bytes) -> None:
        try:
            messages = [wire.decode_to_frontend(body) for body in self._reader.read_frames(data)]
        except wire.WireError:
            logger.exception("closing the channel of an instance")
            self.close()
            return
        if messages and self._on_messages is not None:
            self._on_messages(messages)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._on_closed is not None:
            self._on_closed()

    def send_start(self, start: wire.Start) -> None:
        self._write(wire.encode_frames([start]))

    def send(self, messages: Sequence[ToInstance]) -> None:
        self._write(wire.encode_to_instance(messages))

    def _write(self, data: bytearray) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()  # a process that was stopped would never let a buffer drain


class InstanceSocket(_Inbox):
    """The instance's end of a socketpair: a thread reads, the instance's thread writes.

    End of file means that the frontend is gone. There is no recipient for results, so the reading thread ends the
    process at once, even during a step; an orphan lives for well under a second.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._sock = sock
        self._sock.setblocking(True)
        self._reader = wire.FrameReader()
        self._closing = False

    def receive_start(self) -> wire.Start:
        """Waits for the first frame and returns it; call it before `start_reading`. Raises EOFError if the frontend is
        gone, WireError if the frame is not `Start`."""
        while True:
            data = self._sock.recv(_RECEIVE_BYTES)
            if not data:
                raise EOFError("the frontend went away before it sent a configuration")
            for body in self._reader.read_frames(data):
                message = wire.decode_to_instance(body)
                if not isinstance(message, wire.Start):
                    raise wire.WireError("the first frame must be Start")
                return message

    def start_reading(self) -> None:
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                data = self._sock.recv(_RECEIVE_BYTES)
            except OSError:
                data = b""
            if not data:
                if not self._closing:
                    os._exit(EXIT_ORPHANED)
                return
            try:
                messages = wire.messages_to_instance(self._reader.read_frames(data))
            except wire.WireError:
                logger.exception("the frontend sent an unreadable frame")
                log.last_words()
                os._exit(EXIT_ORPHANED)
            self.push(messages)

    def send(self, messages: Sequence[ToFrontend]) -> None:
        try:
            self._sock.sendall(wire.encode_frames(messages))
        except (BrokenPipeError, ConnectionResetError):
            os._exit(EXIT_ORPHANED)

    def close(self) -> None:
        self._closing = True
        self._sock.close()
