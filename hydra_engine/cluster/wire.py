"""Frames between the frontend process and an instance, and between instances: a 4-byte little-endian length, then one
msgpack-encoded message.

No pickle, nothing that listens: frames travel over inherited socketpairs only. A frame that is too long or does not
decode closes its channel. Each kind of channel has a decoder of its own, so that a peer cannot speak for the frontend.
A descriptor that arrives with a frame is close-on-exec from the start, and is closed when its message is refused. Does
not know threads.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import TypeVar

import msgspec

from hydra_engine.config import EngineConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import Role, role_of
from hydra_engine.core.messages import Submit, ToFrontend, ToInstance
from hydra_engine.core.request import Request
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.instance.ports import InstanceContext
from hydra_engine.transfer.messages import Hello, TransferMessage

MAX_FRAME_BYTES = 256 << 20
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
    """Requests that differ only in id, seed and age, such as the samples of one prompt: their common part is sent
    once."""

    first: Submit
    others: list[tuple[RequestId, int, int]]  # id, seed, age

    def expand(self) -> Iterator[Submit]:
        yield self.first
        for number, seed, age in self.others:
            request = replace(self.first.request, id=number, seed=seed, age=age)
            yield msgspec.structs.replace(self.first, request=request)


class WireError(Exception):
    """A frame that is too long or cannot be decoded."""


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


def encode_to_instance(messages: Iterable[ToInstance]) -> bytearray:
    return encode_frames(_joined(messages))


def _joined(messages: Iterable[ToInstance]) -> Iterator[ToInstance | Alike]:
    """Yields the messages in order, with consecutive alike requests joined."""
    first: Submit | None = None
    others: list[tuple[RequestId, int, int]] = []
    for message in messages:
        if first is not None and isinstance(message, Submit) and _are_alike(first, message):
            others.append((message.request.id, message.request.seed, message.request.age))
            continue
        if first is not None:
            yield Alike(first, others) if others else first
        first, others = (message, []) if isinstance(message, Submit) else (None, [])
        if first is None:
            yield message
    if first is not None:
        yield Alike(first, others) if others else first


_COMMON = tuple(field.name for field in fields(Request) if field.name not in ("id", "seed", "age"))


def _are_alike(one: Submit, other: Submit) -> bool:
    """True if only id, seed and age may differ. Long values are compared by identity; equal copies are sent twice."""
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


def messages_to_instance(bodies: Iterable[bytes]) -> list[ToInstance]:
    """Decodes the messages of `encode_to_instance`; skips `Start`."""
    messages: list[ToInstance] = []
    for message in map(decode_to_instance, bodies):
        if isinstance(message, Alike):
            messages += message.expand()
        elif not isinstance(message, Start):
            messages.append(message)
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
