"""Many event streams over plain sockets in one thread: counts events and notes when each stream began.

Costs as little as it can, since it shares the machine with the server: once all streams have begun it looks every few
milliseconds instead of waiting for data, as waking a waiting reader would be a part of the server's every write, which
it is not where clients are on other machines. Does not read what events say.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_RECEIVE_BYTES = 1 << 16
_END = b"\n\n"
_LOOK_S = 0.004
_LAST = b"\r\n0\r\n\r\n"


@dataclass(slots=True)
class Stream:
    sock: socket.socket
    sent_s: float = 0.0
    first_s: float | None = None
    events: int = 0
    tail: bytes = field(default=b"")


def request_bytes(fields: dict[str, object]) -> bytes:
    body = json.dumps({"messages": [{"role": "user", "content": "What is in this picture?"}], **fields}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Streams:
    """The streams of a run. `run` returns when each has its last chunk."""

    def __init__(self, url: str, count: int, request: bytes) -> None:
        address = urlsplit(url)
        self.streams: list[Stream] = []
        self._selector = selectors.DefaultSelector()
        for _ in range(count):
            stream = Stream(socket.create_connection((address.hostname, address.port), timeout=10))
            stream.sock.setblocking(False)
            self._selector.register(stream.sock, selectors.EVENT_READ, stream)
            self.streams.append(stream)
        for stream in self.streams:
            stream.sent_s = time.perf_counter()
            stream.sock.send(request)

    @property
    def events(self) -> int:
        return sum(stream.events for stream in self.streams)

    def run(self, look: Callable[[], None], limit_s: float) -> None:
        """`look` is called after every batch of reads. Raises TimeoutError after `limit_s`."""
        left, begun, deadline_s = len(self.streams), False, time.perf_counter() + limit_s
        while left:
            if time.perf_counter() > deadline_s:
                raise TimeoutError(f"{left} streams have not ended in {limit_s:g} s")
            if begun:
                time.sleep(_LOOK_S)
            for key, _ in self._selector.select(0.0 if begun else 1.0):
                left -= self._read(key.data)
            begun = begun or all(stream.first_s is not None for stream in self.streams)
            look()
        for stream in self.streams:
            stream.sock.close()

    def check(self, num_tokens: int) -> None:
        """Checks that every stream has an event for each token, and as many others as every other stream."""
        counts = {stream.events for stream in self.streams}
        if len(counts) > 1 or min(counts) <= num_tokens:
            raise ValueError(f"streams of {num_tokens} tokens ended after {sorted(counts)} events")

    def _read(self, stream: Stream) -> bool:
        """Reads once; returns True if the stream has ended."""
        data = stream.sock.recv(_RECEIVE_BYTES)
        if stream.first_s is None:
            stream.first_s = time.perf_counter()
            if not data.startswith(b"HTTP/1.1 200"):
                raise ValueError(f"the server refused: {data[:300]!r}")
        seen = stream.tail + data
        stream.events += seen.count(_END) - stream.tail.count(_END)
        stream.tail = seen[-len(_LAST) :]
        if data and stream.tail != _LAST:
            return False
        self._selector.unregister(stream.sock)
        return True
