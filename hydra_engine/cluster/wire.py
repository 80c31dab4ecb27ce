"""Frames between the front process and an instance, and between instances: a 4-byte little-endian length, then one
msgpack-encoded message.

No pickle, nothing that listens: frames travel over inherited socketpairs only. A frame that is too long or does not
decode closes its channel. Each kind of channel has a decoder of its own, so that a peer cannot speak for the front.
Does not know sockets or threads.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import msgspec

from hydra_engine.config import EngineConfig
from hydra_engine.core.messages import ToFront, ToInstance
from hydra_engine.core.roles import Role
from hydra_engine.instance.ports import InstanceContext
from hydra_engine.transfer.messages import Hello, TransferMessage

MAX_FRAME_BYTES = 256 << 20
MAX_PEER_FRAME_BYTES = 16 << 20  # peers name blocks and never send pixels
_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first frame of a channel, from the supervisor to a new instance process."""

    version: int
    name: str
    role: str
    config: EngineConfig  # of this instance: its own device
    incarnation: int = 0
    neighbours: tuple[str, ...] = ()  # roles of all instances on the same device, which divide its memory among them
    has_peers: bool = False  # caches lie in memory that other instances can map

    @property
    def context(self) -> InstanceContext:
        neighbours = tuple(Role.parse(letters) for letters in self.neighbours)
        return InstanceContext(Role.parse(self.role), self.incarnation, neighbours, self.has_peers)


class Connect(msgspec.Struct, frozen=True, tag=True):
    """A connection from the supervisor: over the control socket, one in a datagram, with one descriptor, a stream to
    the instance `name` in its life `incarnation`. Replaces an older one."""

    name: str
    incarnation: int


class WireError(Exception):
    """The other side sent something that is no frame of this version."""


_encoder = msgspec.msgpack.Encoder()
_to_front = msgspec.msgpack.Decoder(ToFront)
_to_instance = msgspec.msgpack.Decoder(Start | ToInstance)
_to_peer = msgspec.msgpack.Decoder(Hello | TransferMessage)
_connect = msgspec.msgpack.Decoder(Connect)


def encode_frames(messages: Iterable[object], max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    parts: list[bytes] = []
    for body in map(_encoder.encode, messages):
        _check_length(len(body), max_bytes)
        parts.append(_LENGTH.pack(len(body)))
        parts.append(body)
    return b"".join(parts)


def encode_to_peer(messages: Iterable[Hello | TransferMessage]) -> bytes:
    return encode_frames(messages, MAX_PEER_FRAME_BYTES)


def encode_connect(connect: Connect) -> bytes:
    """Without a length: it travels in a datagram."""
    return _encoder.encode(connect)


def _check_length(length: int, max_bytes: int) -> None:
    if length > max_bytes:
        raise WireError(f"a frame of {length} bytes is over the limit of {max_bytes}")


def decode_to_front(body: bytes | memoryview) -> ToFront:
    try:
        message: ToFront = _to_front.decode(body)
    except msgspec.DecodeError as error:
        raise WireError(f"unreadable frame from an instance: {error}") from error
    return message


def decode_to_instance(body: bytes | memoryview) -> Start | ToInstance:
    try:
        message: Start | ToInstance = _to_instance.decode(body)
    except msgspec.DecodeError as error:
        raise WireError(f"unreadable frame from the front: {error}") from error
    return message


def decode_to_peer(body: bytes | memoryview) -> Hello | TransferMessage:
    try:
        message: Hello | TransferMessage = _to_peer.decode(body)
    except msgspec.DecodeError as error:
        raise WireError(f"unreadable frame from a peer: {error}") from error
    return message


def decode_connect(datagram: bytes) -> Connect:
    try:
        return _connect.decode(datagram)
    except msgspec.DecodeError as error:
        raise WireError(f"unreadable datagram from the front: {error}") from error


class FrameReader:
    """Cuts a byte stream into frame bodies; keeps what is incomplete. Raises WireError for a frame over `max_bytes` as
    soon as its length is there."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> list[bytes]:
        self._buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= HEADER_BYTES:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            _check_length(length, self._max_bytes)
            end = start + HEADER_BYTES + length
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + HEADER_BYTES : end]))
            start = end
        del self._buffer[:start]
        return bodies
