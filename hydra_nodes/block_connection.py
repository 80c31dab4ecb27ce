"""`BlockConnection`: messages over a connection after its handshake, straight from and into the memory of blocks.

Each message has a MAC, under a key of its session and direction and over its number and all that it says, or lies in
TLS. Sockets block, with time limits of the kernel for one call. Does not know what the messages mean.
"""

from __future__ import annotations

import hmac
import select
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from hydra_engine.core.plans import BlockIds
from hydra_engine.transfer.network import Rows
from hydra_nodes.links import set_options
from hydra_nodes.macs import Mac, MacKind
from hydra_nodes.session import Layer, Session, SessionError

# Bytes of one system call at most. A call that sends costs a wake-up of the other side besides its bytes; the receiver
# sleeps until all bytes of its own call are there.
BATCH_BYTES = 1 << 20
LAST_BYTES = 1 << 18  # of the last calls that receive a message
_FEW_BYTES = 1 << 13  # are received by one call, without a wait before
_TLS_BYTES = 1 << 18  # of one call that receives
_MAX_VIEWS = 512  # of one system call; the kernel's limit is 1024
_TIME = struct.Struct("@ll")

T = TypeVar("T")


class ConnectionEnded(Exception):
    """The connection has ended or cannot be trusted; the message says why."""


class NotAuthentic(ConnectionEnded):
    """A message was altered on its way."""


def block_views(rows: Rows, blocks: BlockIds) -> list[memoryview]:
    """Views of the blocks, in order; blocks that follow each other are one view. Raises ValueError for a block that is
    not in `rows`."""
    ids = blocks.tolist()  # numpy would take longer for a few
    if not ids:
        return []
    if min(ids) < 0 or max(ids) >= len(rows):
        raise ValueError(f"blocks: expected 0 to {len(rows) - 1}, got {min(ids)} to {max(ids)}")
    cuts = [before + 1 for before in (blocks[1:] - blocks[:-1] != 1).nonzero()[0].tolist()]
    runs = zip([0, *cuts], [*cuts, len(ids)], strict=True)
    flat, size = rows.reshape(-1).data, rows.shape[1]
    return [flat[ids[begin] * size : (ids[begin] + end - begin) * size] for begin, end in runs]


def batches(
    views: Sequence[memoryview], max_bytes: int = BATCH_BYTES, last_bytes: int = BATCH_BYTES
) -> Iterator[list[memoryview]]:
    """Cuts views into lists of at most `max_bytes`, in order. Towards the end a list has half of what is left, but not
    less than `last_bytes`: the receiver takes them while the others are on their way."""
    batch: list[memoryview] = []
    num_bytes, left = 0, sum(map(len, views))
    limit = min(max(left // 2, last_bytes), max_bytes)
    for view in views:
        while len(view):
            part = view[: limit - num_bytes]
            view = view[len(part) :]
            batch.append(part)
            num_bytes += len(part)
            if num_bytes == limit or len(batch) == _MAX_VIEWS:
                yield batch
                left -= num_bytes
                limit = min(max(left // 2, last_bytes), max_bytes)
                batch, num_bytes = [], 0
    if batch:
        yield batch


class BlockConnection:
    """Owns the socket. `layer`: TLS, in which messages have no tag. One thread at a time, but for `close`."""

    def __init__(
        self,
        sock: socket.socket,
        session: Session,
        layer: Layer | None,
        mac: MacKind,
        *,
        is_client: bool,
        patience_s: float,
    ) -> None:
        self._tag_bytes = mac.tag_bytes if layer is None else 0
        self._sock = sock
        self._layer = layer
        self._mac = mac
        self._patience_s = patience_s
        self._unwrapped = memoryview(session.open(b""))  # received in TLS, not taken yet
        requests, answers = session.derive_key("requests for blocks"), session.derive_key("answers with blocks")
        self._sending, self._receiving = (requests, answers) if is_client else (answers, requests)
        self._num_sent = self._num_received = 0  # messages
        self._poll = select.poll()  # descriptors may be larger than `select` takes
        self._poll.register(sock, select.POLLIN)
        self._woken_bytes = 1  # the kernel wakes this side when so many have come
        set_options(sock, patience_s)  # or a thread would wait for ever for a node that has lost its power
        seconds, rest = divmod(patience_s, 1.0)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(int(seconds), int(rest * 1e6)))

    # ---- out

    def begin_sending(self, *, alone: bool = False) -> Mac | None:
        """Returns the MAC of the present outgoing message; None in TLS. `alone`: of its other form, see `blocks.py`."""
        return self._mac.begin(self._sending, 2 * self._num_sent + alone) if self._layer is None else None

    def send(self, views: Sequence[bytes | memoryview], mac: Mac | None, *, more: bool = True) -> None:
        """Sends buffers, at most one batch and two more. `more`: something follows at once. Raises ConnectionEnded."""
        sent = views if self._layer is None else [self._layer.wrap(b"".join(views))]
        waiting = [memoryview(view) for view in sent if len(view)]
        flags = socket.MSG_MORE if more else 0
        while waiting:
            _skip(waiting, self._call(lambda: self._sock.sendmsg(waiting, (), flags)))
        if mac is not None:  # while the other side receives them
            for view in views:
                mac.update(view)

    def end_sending(self, last: Sequence[bytes | memoryview], mac: Mac | None) -> None:
        """Sends the end of a message, and its tag."""
        if mac is not None:
            for view in last:
                mac.update(view)
            last = [*last, mac.digest()]
        self.send(last, None, more=False)
        self._num_sent += 1

    # ---- in

    def begin_receiving(self, *, alone: bool = False) -> Mac | None:
        return self._mac.begin(self._receiving, 2 * self._num_received + alone) if self._layer is None else None

    def receive(self, views: Sequence[memoryview], mac: Mac | None) -> None:
        """Fills buffers, at most one batch. Raises ConnectionEnded."""
        waiting = [view for view in views if len(view)]
        while waiting:
            _skip(waiting, self._receive_some(waiting))
        if mac is not None:
            for view in views:
                mac.update(view)

    def receive_bytes(self, num_bytes: int, mac: Mac | None) -> bytes:
        data = bytearray(num_bytes)
        self.receive([memoryview(data)], mac)
        return bytes(data)

    def receive_last(self, num_bytes: int) -> tuple[bytes, bytes]:
        """Receives the last bytes of a message and its tag; `end_receiving` must follow."""
        data = self.receive_bytes(num_bytes + self._tag_bytes, None)
        return data[:num_bytes], data[num_bytes:]

    def end_receiving(self, mac: Mac | None, last: bytes, tag: bytes) -> None:
        """Raises ConnectionEnded unless the message is authentic."""
        if mac is not None:
            mac.update(last)
            if not hmac.compare_digest(mac.digest(), tag):
                raise NotAuthentic("a message is not authentic: it was altered on its way")
        self._num_received += 1

    def wait_for_message(self) -> None:
        """Waits, as long as it takes, for the first byte of a message or the end of the connection."""
        if not self._unwrapped:
            self._wait_for(1, None)

    @property
    def is_stale(self) -> bool:
        """True if the connection has ended at rest, or something came that nobody has asked for."""
        return self._wait_for(1, 0.0) and (self._layer is None or not self._has_bytes())

    def _wait_for(self, num_bytes: int, limit_s: float | None) -> bool:
        """Waits until so many bytes have come, or as many as the kernel has room for, or the connection has ended.
        Returns False if that takes longer than `limit_s`."""
        self._wake_at(num_bytes)
        return bool(self._poll.poll(None if limit_s is None else limit_s * 1e3))

    def _wake_at(self, num_bytes: int) -> None:
        if num_bytes != self._woken_bytes:
            self._call(lambda: self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes))
            self._woken_bytes = num_bytes

    def _has_bytes(self) -> bool:
        try:
            return self._sock.recv(1, socket.MSG_PEEK) != b""
        except OSError:
            return False

    def _receive_some(self, waiting: list[memoryview]) -> int:
        if self._layer is None:
            num_bytes = sum(map(len, waiting))
            flags = socket.MSG_WAITALL
            if num_bytes < _FEW_BYTES:
                self._wake_at(1)
            else:
                self._wait_for(num_bytes, self._patience_s)  # over a slow link, fewer may be there afterwards
                flags = socket.MSG_DONTWAIT
            num_bytes = self._call(lambda: self._sock.recvmsg_into(waiting, 0, flags)[0])
        else:
            while not self._unwrapped and (data := self._call(lambda: self._sock.recv(_TLS_BYTES))):
                self._unwrapped = memoryview(self._unwrap(self._layer, data))
            num_bytes = min(len(self._unwrapped), len(waiting[0]))
            waiting[0][:num_bytes] = self._unwrapped[:num_bytes]
            self._unwrapped = self._unwrapped[num_bytes:]
        if not num_bytes:
            raise ConnectionEnded("the connection ended")
        return num_bytes

    def _unwrap(self, layer: Layer, data: bytes) -> bytes:
        try:
            return layer.unwrap(data)
        except SessionError as error:
            raise ConnectionEnded(str(error)) from error

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except BlockingIOError as error:  # of a time limit
            raise ConnectionEnded(f"nothing has moved for {self._patience_s:g} s") from error
        except OSError as error:
            raise ConnectionEnded(error.strerror or str(error)) from error


def end_socket(sock: socket.socket) -> None:
    """Ends a connection or a listener, also for a thread that waits for it."""
    with suppress(OSError):  # it has ended already
        sock.shutdown(socket.SHUT_RDWR)


def _skip(waiting: list[memoryview], num_bytes: int) -> None:
    """Removes the first `num_bytes` of the buffers."""
    while waiting and num_bytes >= len(waiting[0]):
        num_bytes -= len(waiting.pop(0))
    if waiting:
        waiting[0] = waiting[0][num_bytes:]
