"""Channels between processes: the frames in which messages travel, and both ends of a channel between the frontend and
one instance.

A frame is a 4-byte little-endian length, then one msgpack-encoded message. No pickle, nothing that listens: frames
travel over inherited socketpairs, also between instances (`peers.py`), or over inherited connections to other machines,
each through a `Codec`, of which the engine has none. A frame that is too long or does not decode
closes its channel. Each kind of channel has a decoder of its own, so that a peer cannot speak for the frontend. A
descriptor that arrives with a frame is close-on-exec from the start, and is closed when its message is refused.

The ends exist in memory (`local_channel`, the embedded default), and over a socketpair (`FrontendSocket` in the
frontend process, `InstanceSocket` in the instance process). The frontend's end runs on an asyncio loop, the instance's
end on a thread that waits for one event. Does not know what the messages mean.
"""

from __future__ import annotations

import array
import asyncio
import logging
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Protocol, TypeVar

import msgspec

from hydra_engine import log
from hydra_engine.cluster.known_pixels import KnownPixels
from hydra_engine.config import EngineConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import Role, role_of
from hydra_engine.core.messages import Submit, ToFrontend, ToInstance
from hydra_engine.core.prompting import MAX_PIXEL_BYTES
from hydra_engine.core.request import Request
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.instance.ports import InstanceContext
from hydra_engine.transfer.messages import Hello, TransferMessage

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = MAX_PIXEL_BYTES + (24 << 20)
MAX_PEER_FRAME_BYTES = 16 << 20  # peers name blocks and never send pixels
_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size
_INT_BYTES = array.array("i").itemsize
# Not every platform has the flag; there Python's default for new descriptors has to do.
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)

M = TypeVar("M")


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first frame of a channel, from the supervisor to a new instance process."""

    version: int
    name: str
    role: str
    config: EngineConfig  # with the device of this instance, and the limits of all
    incarnation: int = 0
    neighbours: tuple[str, ...] = ()  # names of all instances on the same device, which divide its memory among them
    has_peers: bool = False  # caches lie in memory that other instances can map

    def known_pixels(self) -> KnownPixels:
        """Returns what one end of this channel keeps: a quarter of the frontend's cache of pixels."""
        return KnownPixels(self.config.media.pixel_cache_mib << 18)

    @property
    def context(self) -> InstanceContext:
        neighbours = tuple(map(role_of, self.neighbours))
        named = zip(self.neighbours, neighbours, strict=True)
        configs = tuple(self.config.for_instance(name, role) for name, role in named)
        return InstanceContext(Role.parse(self.role), self.incarnation, neighbours, configs, self.has_peers)


class Connect(msgspec.Struct, frozen=True, tag=True):
    """A connection from the supervisor: one datagram over the control socket with one descriptor, a stream to the
    instance `name` of this incarnation. Replaces an older one."""

    name: str
    incarnation: int


class Alike(msgspec.Struct, frozen=True, tag=True):
    """Requests that differ only in id, seed and arrival index, such as the samples of one prompt: their common part is
    sent once."""

    first: Submit
    others: list[tuple[RequestId, int, int]]  # id, seed, arrival index

    def expand(self) -> Iterator[Submit]:
        yield self.first
        for number, seed, arrival_index in self.others:
            request = replace(self.first.request, id=number, seed=seed, arrival_index=arrival_index)
            yield msgspec.structs.replace(self.first, request=request)


class WireError(Exception):
    """A frame that is too long or cannot be decoded, or that is not authentic."""


_encoder = msgspec.msgpack.Encoder()
_to_frontend = msgspec.msgpack.Decoder(ToFrontend)
_to_instance = msgspec.msgpack.Decoder(Start | Alike | ToInstance)
_to_peer = msgspec.msgpack.Decoder(Hello | TransferMessage)
_connect = msgspec.msgpack.Decoder(Connect)


def encode_frames(messages: Iterable[object], max_bytes: int = MAX_FRAME_BYTES) -> bytearray:
    frames = bytearray()
    for message in messages:
        start = len(frames)
        _encoder.encode_into(message, frames, start + HEADER_BYTES)
        length = len(frames) - start - HEADER_BYTES
        _check_length(length, max_bytes)
        _LENGTH.pack_into(frames, start, length)
    return frames


def encode_to_instance(messages: Iterable[ToInstance], known: KnownPixels | None = None) -> bytearray:
    """Encodes messages for `messages_to_instance`, without the pixels that the other end knows."""
    joined = _joined(messages)
    return encode_frames(joined if known is None else map(partial(_shortened, known), joined))


def _shortened(known: KnownPixels, message: ToInstance | Alike) -> ToInstance | Alike:
    if isinstance(message, Alike):
        return msgspec.structs.replace(message, first=known.shorten(message.first))
    return known.shorten(message)


def _joined(messages: Iterable[ToInstance]) -> Iterator[ToInstance | Alike]:
    """Yields the messages in order, with consecutive alike requests joined."""
    first: Submit | None = None
    others: list[tuple[RequestId, int, int]] = []
    for message in messages:
        if first is not None and isinstance(message, Submit) and _are_alike(first, message):
            others.append((message.request.id, message.request.seed, message.request.arrival_index))
            continue
        if first is not None:
            yield Alike(first, others) if others else first
        first, others = (message, []) if isinstance(message, Submit) else (None, [])
        if first is None:
            yield message
    if first is not None:
        yield Alike(first, others) if others else first


_COMMON = tuple(field.name for field in fields(Request) if field.name not in ("id", "seed", "arrival_index"))


def _are_alike(one: Submit, other: Submit) -> bool:
    """True if only id, seed and arrival index may differ. Long values are compared by identity; equal copies are sent
    twice."""
    if (one.stages, one.remote_images, one.source) != (other.stages, other.remote_images, other.source):
        return False
    return _is_same(one.pixels, other.pixels) and all(
        _is_same(getattr(one.request, name), getattr(other.request, name)) for name in _COMMON
    )


def _is_same(one: object, other: object) -> bool:
    return one is other or (not isinstance(one, tuple | SamplingParams) and one == other)


def encode_to_peer(messages: Iterable[Hello | TransferMessage]) -> bytearray:
    return encode_frames(messages, MAX_PEER_FRAME_BYTES)


def encode_connect(connect: Connect) -> bytes:
    """Encodes without a length prefix, for a datagram."""
    return _encoder.encode(connect)


def _check_length(length: int, max_bytes: int) -> None:
    if length > max_bytes:
        raise WireError(f"a frame of {length} bytes is over the limit of {max_bytes}")


def decode_to_frontend(body: bytes | bytearray | memoryview) -> ToFrontend:
    message: ToFrontend = _decode(_to_frontend, body, "frame from an instance")
    return message


def decode_to_instance(body: bytes | memoryview) -> Start | Alike | ToInstance:
    message: Start | Alike | ToInstance = _decode(_to_instance, body, "frame from the frontend")
    return message


def messages_to_instance(bodies: Iterable[bytes], known: KnownPixels | None = None) -> list[ToInstance]:
    """Decodes the messages of `encode_to_instance`; skips `Start`. Raises WireError, also if `known` lacks pixels."""
    known = known or KnownPixels(0)
    messages: list[ToInstance] = []
    for message in map(decode_to_instance, bodies):
        try:
            if isinstance(message, Alike):
                messages += msgspec.structs.replace(message, first=known.complete(message.first)).expand()
            elif not isinstance(message, Start):
                messages.append(known.complete(message))
        except KeyError as error:
            raise WireError("a request comes without pixels that were not sent before") from error
    return messages


def decode_to_peer(body: bytes | memoryview) -> Hello | TransferMessage:
    message: Hello | TransferMessage = _decode(_to_peer, body, "frame from a peer")
    return message


def decode_connect(datagram: bytes) -> Connect:
    return _decode(_connect, datagram, "datagram from the frontend")


def _decode(decoder: msgspec.msgpack.Decoder[M], body: bytes | bytearray | memoryview, what: str) -> M:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise WireError(f"unreadable {what}: {error}") from error


class FrameReader:
    """A parser that cuts a byte stream into frame bodies and keeps incomplete frames. Raises WireError for a frame over
    `max_bytes` as soon as its length has arrived."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def read_frames(self, data: bytes | bytearray) -> list[bytes]:
        self._buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= HEADER_BYTES:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            _check_length(length, self._max_bytes)
            end = start + HEADER_BYTES + length
            if len(self._buffer) < end:
                break
            bodies.append(memoryview(self._buffer)[start + HEADER_BYTES : end].tobytes())
            start = end
        del self._buffer[:start]
        return bodies


class Codec(Protocol):
    """The bytes of frames on their way to and from another machine, such as an authenticated session. Raises WireError
    once the connection cannot be used any more. One thread at a time may call `seal` and `take_outgoing`, and what they
    return is sent in the order of the calls; one may call `open`."""

    ping_s: float  # between two calls of `take_outgoing`

    def seal(self, data: bytes | bytearray | memoryview) -> bytes: ...

    def open(self, data: bytes | bytearray | memoryview) -> bytes: ...

    def take_outgoing(self) -> bytes:
        """Returns bytes of the codec's own, such as answers to what has been opened. Raises WireError also for a peer
        that has been silent for too long."""
        ...


class DescriptorError(Exception):
    """The error that a message carried too many descriptors."""


def send_with(sock: socket.socket, data: bytes | memoryview, descriptors: Sequence[int]) -> int:
    """Returns the number of bytes sent; the descriptors go with the first. Raises OSError, BlockingIOError included."""
    if not descriptors:
        return sock.send(data)
    return sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])


def receive_with(sock: socket.socket, num_bytes: int, max_descriptors: int) -> tuple[bytes, tuple[int, ...]]:
    """Returns data and descriptors of one datagram; the caller owns the descriptors. Raises OSError, and
    DescriptorError after closing the received ones."""
    space = socket.CMSG_SPACE(max_descriptors * _INT_BYTES)
    data, ancillary, flags, _ = sock.recvmsg(num_bytes, space, _CLOSE_ON_EXEC)
    received = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received.frombytes(payload[: len(payload) - len(payload) % _INT_BYTES])
    if len(received) > max_descriptors or flags & getattr(socket, "MSG_CTRUNC", 0):
        close_all(received)
        raise DescriptorError(f"more than {max_descriptors} descriptors in one message")
    return data, tuple(received)


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


# ---- the ends of a channel

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
            messages = [decode_to_frontend(encode_frames([m])[HEADER_BYTES:]) for m in messages]
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
            messages = messages_to_instance(FrameReader().read_frames(encode_to_instance(messages)))
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
    """The frontend's end of a socketpair, or of a connection to another machine, on the running loop. Answers the
    codec's pings and sends none: the supervisor watches instances. `problem`: why this end closed the channel."""

    def __init__(self, codec: Codec | None = None) -> None:
        self.problem = ""
        self._codec = codec
        self._reader = FrameReader()
        self._known_pixels: KnownPixels | None = None
        self._transport: asyncio.Transport | None = None
        self._on_messages: OnMessages | None = None
        self._on_closed: OnClosed | None = None

    @classmethod
    async def open(cls, sock: socket.socket, codec: Codec | None = None) -> FrontendSocket:
        _, protocol = await asyncio.get_running_loop().create_connection(partial(cls, codec), sock=sock)
        return protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._codec is not None:
            self.data_received(b"")  # what came with the end of the codec's handshake

    def attach(self, on_messages: OnMessages, on_closed: OnClosed) -> None:
        self._on_messages, self._on_closed = on_messages, on_closed

    def data_received(self, data: bytes) -> None:
        try:
            if self._codec is not None:
                data = self._codec.open(data)
                self._write_sealed(self._codec.take_outgoing())
            messages = [decode_to_frontend(body) for body in self._reader.read_frames(data)]
        except WireError as error:
            self.problem = str(error)
            logger.error("closing the channel of an instance: %s", error)
            self.close()
            return
        if messages and self._on_messages is not None:
            self._on_messages(messages)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._on_closed is not None:
            self._on_closed()

    def send_start(self, start: Start) -> None:
        self._known_pixels = start.known_pixels()
        self._write(encode_frames([start]))

    def send(self, messages: Sequence[ToInstance]) -> None:
        known, self._known_pixels = self._known_pixels, None  # nothing is left out any more if this raises
        self._write(encode_to_instance(messages, known))
        self._known_pixels = known

    def _write(self, data: bytearray) -> None:
        self._write_sealed(data if self._codec is None else self._codec.seal(data))

    def _write_sealed(self, data: bytes | bytearray) -> None:
        if self._transport is not None and data:
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()  # a process that was stopped would never let a buffer drain


class InstanceSocket(_Inbox):
    """The instance's end of a socketpair, or of a connection to another machine: a thread reads, the instance's thread
    writes.

    End of file, or of the codec's patience, means that the frontend is gone. There is no recipient for results, so the
    reading thread ends the process at once, even during a step; an orphan lives for well under a second, or as long as
    the codec takes to miss a frontend that is cut off.
    """

    def __init__(self, sock: socket.socket, codec: Codec | None = None) -> None:
        super().__init__()
        self._sock = sock
        self._sock.setblocking(True)
        self._codec = codec
        self._sending = threading.Lock()  # with a codec, both threads write
        self._received = b"" if codec is None else codec.open(b"")
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._reader = FrameReader()
        self._known_pixels: KnownPixels | None = None
        self._closing = False

    def receive_start(self) -> Start:
        """Waits for the first frame and returns it; call it before `start_reading`. Raises EOFError if the frontend is
        gone, WireError if the frame is not `Start`."""
        while True:
            data, self._received = self._received or self._receive(), b""
            if not data:
                raise EOFError("the frontend went away before it sent a configuration")
            for body in self._reader.read_frames(data):
                message = decode_to_instance(body)
                if not isinstance(message, Start):
                    raise WireError("the first frame must be Start")
                self._known_pixels = message.known_pixels()
                return message

    def start_reading(self) -> None:
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def _read(self) -> None:
        while True:
            try:
                data = self._receive()
                messages = messages_to_instance(self._reader.read_frames(data), self._known_pixels)
            except OSError:
                data = b""
            except WireError as error:
                logger.error("the connection to the frontend cannot be used: %s", error)
                log.last_words()
                os._exit(EXIT_ORPHANED)
            if not data:
                if not self._closing:
                    os._exit(EXIT_ORPHANED)
                return
            self.push(messages)

    def _receive(self) -> bytes:
        """Waits for bytes of frames; returns b"" at the end of file. Raises OSError and WireError."""
        if self._codec is None:
            return self._sock.recv(_RECEIVE_BYTES)
        while True:
            data = b""
            if self._readable.poll(self._codec.ping_s * 1e3):
                data = self._sock.recv(_RECEIVE_BYTES)
                if not data:
                    return b""
                data = self._codec.open(data)
            with self._sending:
                if outgoing := self._codec.take_outgoing():
                    self._sock.sendall(outgoing)
            if data:
                return data

    def send(self, messages: Sequence[ToFrontend]) -> None:
        frames = encode_frames(messages)
        try:
            if self._codec is None:
                self._sock.sendall(frames)
            else:
                with self._sending:
                    self._sock.sendall(self._codec.seal(frames))
        except OSError:
            os._exit(EXIT_ORPHANED)

    def close(self) -> None:
        self._closing = True
        self._sock.close()
