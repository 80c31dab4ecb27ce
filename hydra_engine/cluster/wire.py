"""Frames between the front process and an instance: a 4-byte little-endian length, then one msgpack-encoded message.

No pickle, nothing that listens: frames travel over inherited socketpairs only. A frame that is too long or does not
decode closes its channel. Does not know sockets or threads.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import msgspec

from hydra_engine.config import EngineConfig
from hydra_engine.core.messages import ToFront, ToInstance

MAX_FRAME_BYTES = 256 << 20
_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first frame of a channel, from the supervisor to a new instance process."""

    version: int
    name: str
    role: str
    config: EngineConfig  # of this instance: its own device
    incarnation: int = 0
    shares: int = 1  # instances on the same device, which divide its memory among them
    has_peers: bool = False  # caches lie in memory that other instances can map


class WireError(Exception):
    """The other side sent something that is no frame of this version."""


_encoder = msgspec.msgpack.Encoder()
_to_front = msgspec.msgpack.Decoder(ToFront)
_to_instance = msgspec.msgpack.Decoder(Start | ToInstance)


def encode_frames(messages: Iterable[object]) -> bytes:
    parts: list[bytes] = []
    for message in messages:
        body = _encoder.encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise WireError(f"a frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
        parts.append(_LENGTH.pack(len(body)))
        parts.append(body)
    return b"".join(parts)


def frame_length(header: bytes | bytearray | memoryview) -> int:
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise WireError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return int(length)


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


class FrameReader:
    """Cuts a byte stream into frame bodies; keeps what is incomplete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= HEADER_BYTES:
            length = frame_length(self._buffer[start : start + HEADER_BYTES])
            end = start + HEADER_BYTES + length
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + HEADER_BYTES : end]))
            start = end
        del self._buffer[:start]
        return bodies
