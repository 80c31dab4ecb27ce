"""Bytes and open descriptors over a Unix socket.

A descriptor that arrives is close-on-exec from the first instant, and none is left open when a message is refused. Does
not know what the bytes mean.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterable, Sequence

_INT_BYTES = array.array("i").itemsize
# Not every platform has the flag; there Python's default for new descriptors has to do.
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class DescriptorError(Exception):
    """More descriptors came than belong here."""


def send_with(sock: socket.socket, data: bytes | memoryview, descriptors: Sequence[int]) -> int:
    """Returns how many bytes were taken; the descriptors go with the first one. Raises OSError, BlockingIOError too."""
    if not descriptors:
        return sock.send(data)
    return sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])


def receive_with(sock: socket.socket, num_bytes: int, max_descriptors: int) -> tuple[bytes, tuple[int, ...]]:
    """Data and descriptors of one datagram; the caller owns the descriptors. Raises DescriptorError, after closing what
    came, and OSError."""
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
