"""One connection of this instance to another: the introduction, whole messages in, a bounded backlog out.

The socket never blocks. One thread receives, flushes and closes; `send` may be called by another. What is wrong with a
connection is a sentence in `LinkError` or `problem`; the owner closes it then. Does not know other connections.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

from hydra_engine.cluster import wire
from hydra_engine.cluster.descriptors import DescriptorError, close_all, receive_with, send_with
from hydra_engine.core.pools import Exports
from hydra_engine.instance.ports import FromPeer, PeerUp
from hydra_engine.transfer.messages import TRANSFER_VERSION, Hello

MAX_DESCRIPTORS = 8  # of one Hello: the pools and the control words
_RECEIVE_BYTES = 1 << 18


class LinkError(Exception):
    """The connection cannot be used any more; the text says why."""


class PeerLink:
    """`name` and `incarnation` are whom the supervisor has promised at the other end."""

    def __init__(self, sock: socket.socket, promised: wire.Connect, max_queued_bytes: int) -> None:
        sock.setblocking(False)
        self.name = promised.name
        self.incarnation = promised.incarnation
        self.introduced = False
        self.problem = ""  # set by `send`: to be closed
        self._sock = sock
        self._reader = wire.FrameReader(wire.MAX_PEER_FRAME_BYTES)
        self._received: tuple[int, ...] = ()  # descriptors that wait for the rest of their Hello
        self._max_queued_bytes = max_queued_bytes
        self._lock = threading.Lock()  # of the three below; held for system calls that do not block
        self._backlog: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._closed = False
        self._idle_ticks = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    # ---- in

    def receive(self, emit: Callable[[PeerUp | FromPeer], None]) -> None:
        """One read of what has arrived. Raises LinkError; nothing is emitted after that."""
        try:
            data = self._read()
        except BlockingIOError:
            return
        except (OSError, DescriptorError) as error:
            raise LinkError(str(error)) from error
        if not data:
            raise LinkError("the other side has closed the connection")
        try:
            for body in self._reader.feed(data):
                message = wire.decode_to_peer(body)
                if not self.introduced:
                    emit(self._accept(message))
                elif isinstance(message, Hello):
                    raise LinkError("introduced itself twice")
                else:
                    emit(FromPeer(self.name, self.incarnation, message))
        except wire.WireError as error:
            raise LinkError(str(error)) from error

    def _read(self) -> bytes:
        if self.introduced:
            return self._sock.recv(_RECEIVE_BYTES)  # the kernel closes descriptors that come uninvited
        data, descriptors = receive_with(self._sock, _RECEIVE_BYTES, MAX_DESCRIPTORS)
        if self._received and descriptors:
            close_all(descriptors)
            raise DescriptorError("sent descriptors twice")
        self._received = self._received or descriptors
        return data

    def _accept(self, message: object) -> PeerUp:
        if not isinstance(message, Hello):
            raise LinkError("did not introduce itself")
        if message.version != TRANSFER_VERSION:
            raise LinkError(f"speaks transfer version {message.version}, not {TRANSFER_VERSION}")
        if (message.name, message.incarnation) != (self.name, self.incarnation):
            raise LinkError(
                f"is instance {message.name[:40]!r} in life {message.incarnation}, not {self.name!r} in life "
                f"{self.incarnation}"
            )
        if _named_by(message.exports) != set(range(len(self._received))):
            raise LinkError(f"its {len(self._received)} descriptors are not those that its exports name")
        descriptors, self._received = self._received, ()
        self.introduced = True
        self._idle_ticks = 0
        return PeerUp(self.name, self.incarnation, message.exports, descriptors)

    # ---- out

    def introduce(self, hello: Hello, descriptors: Sequence[int]) -> None:
        """The first frame; the descriptors go with its first byte. Raises LinkError."""
        data = memoryview(wire.encode_to_peer([hello]))
        with self._lock:
            try:
                num_sent = send_with(self._sock, data, descriptors)
            except OSError as error:
                raise LinkError(f"cannot be greeted: {error}") from error
            self._queue(data[num_sent:])

    def send(self, data: bytes) -> bool:
        """Takes all of it, never blocks; dropped once the connection is closed or has a problem. True: something is
        left to do for the thread that flushes."""
        with self._lock:
            if self._closed or self.problem:
                return False
            left = memoryview(data)
            if not self._backlog:
                try:
                    left = left[self._sock.send(left) :]
                except BlockingIOError:
                    pass
                except OSError as error:
                    self.problem = str(error)
                    return True
            self._queue(left)
            if self._queued_bytes > self._max_queued_bytes:
                self.problem = f"does not read: {self._queued_bytes} bytes wait for it"
            return self._queued_bytes > 0

    def give_up(self, problem: str) -> None:
        with self._lock:
            self.problem = self.problem or problem

    def flush(self) -> None:
        """Raises LinkError."""
        with self._lock:
            while self._backlog:
                try:
                    num_sent = self._sock.send(self._backlog[0])
                except BlockingIOError:
                    return
                except OSError as error:
                    raise LinkError(str(error)) from error
                self._idle_ticks = 0
                self._queued_bytes -= num_sent
                rest = self._backlog.popleft()[num_sent:]
                if rest:
                    self._backlog.appendleft(rest)

    def _queue(self, data: memoryview) -> None:
        if data:
            self._backlog.append(data)
            self._queued_bytes += len(data)

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    # ---- patience

    @property
    def waits(self) -> bool:
        """For the peer: to introduce itself, or to read."""
        return not self.introduced or self.has_backlog

    def tick(self, max_ticks: int) -> None:
        """Raises LinkError after so many calls in a row without progress. Calls are counted and not seconds, so that a
        pause of this process is not held against the peer."""
        self._idle_ticks = self._idle_ticks + 1 if self.waits else 0
        if self._idle_ticks > max_ticks:
            raise LinkError("does not read" if self.introduced else "does not introduce itself")

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._sock.close()
        close_all(self._received)
        self._received = ()


def _named_by(exports: Exports) -> set[int]:
    return {exports.words} | {pool.descriptor for pool in exports.pools if pool.descriptor >= 0}
