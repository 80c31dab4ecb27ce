"""An instance's connections to all others. The supervisor makes them and passes them in through the control socket.

A thread of this module receives, flushes, introduces and closes. The instance's thread sends directly, so that a
message waits for no other thread unless its peer is slow. Sockets never block, and backlogs are bounded. A peer that
is gone, does not read or sends invalid frames loses its connection and is reported with one sentence; the supervisor
makes a new connection. Does not know what transfer messages mean.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

from hydra_engine.clock import Clock, MonotonicClock
from hydra_engine.cluster import channel
from hydra_engine.cluster.channel import DescriptorError, close_all, receive_with, send_with
from hydra_engine.core.pools import Exports
from hydra_engine.instance.ports import FromPeer, PeerDown, PeerUp
from hydra_engine.transfer.messages import TRANSFER_VERSION, Hello, TransferMessage

MAX_DESCRIPTORS = 8  # of one Hello: the pools, their staging pools and the control words
_RECEIVE_BYTES = 1 << 18


class LinkError(Exception):
    """The connection has failed; the message says why."""


class PeerLink:
    """A connection to one peer. `name` and `incarnation`: the peer that the supervisor has announced. `codec`: of a
    connection to another machine, over which no descriptors come."""

    def __init__(
        self,
        sock: socket.socket,
        promised: channel.Connect,
        max_queued_bytes: int,
        codec: channel.Codec | None = None,
    ) -> None:
        sock.setblocking(False)
        self.name = promised.name
        self.incarnation = promised.incarnation
        self.introduced = False
        self.problem = ""  # set by `send`: to be closed
        self._sock = sock
        self._codec = codec
        self._reader = channel.FrameReader(channel.MAX_PEER_FRAME_BYTES)
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
        """Reads once and emits the complete messages. Raises LinkError; nothing is emitted after that."""
        try:
            data = self._read()
        except BlockingIOError:
            return
        except (OSError, DescriptorError) as error:
            raise LinkError(str(error)) from error
        if not data:
            raise LinkError("the other side has closed the connection")
        try:
            if self._codec is not None:
                data = self._codec.open(data)
                self._send_outgoing(self._codec)
            for body in self._reader.read_frames(data):
                message = channel.decode_to_peer(body)
                if not self.introduced:
                    emit(self._accept(message))
                elif isinstance(message, Hello):
                    raise LinkError("introduced itself twice")
                else:
                    emit(FromPeer(self.name, self.incarnation, message))
        except channel.WireError as error:
            if self._codec is not None:
                with contextlib.suppress(channel.WireError):
                    self._send_outgoing(self._codec)  # which may say why
            raise LinkError(str(error)) from error

    def _read(self) -> bytes:
        if self.introduced or self._codec is not None:
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
        if self._codec is None and _named_by(message.exports) != set(range(len(self._received))):
            raise LinkError(f"its {len(self._received)} descriptors are not those that its exports name")
        descriptors, self._received = self._received, ()
        self.introduced = True
        self._idle_ticks = 0
        return PeerUp(self.name, self.incarnation, message.exports, descriptors)

    # ---- out

    def send_hello(self, hello: Hello, descriptors: Sequence[int]) -> None:
        """Sends the first frame, with the descriptors on its first byte; none over a codec. Raises LinkError."""
        data = memoryview(channel.encode_to_peer([hello]))
        if self._codec is not None:
            self.send(data)
            self.keep_alive()
            return
        with self._lock:
            try:
                num_sent = send_with(self._sock, data, descriptors)
            except OSError as error:
                raise LinkError(f"cannot be greeted: {error}") from error
            self._queue(data[num_sent:])

    def send(self, data: bytes | bytearray | memoryview) -> bool:
        """Sends or queues all of `data` without blocking; drops it if the connection is closed or has a problem.
        Returns True if the flushing thread has something to do."""
        with self._lock:
            if self._closed or self.problem:
                return False
            try:
                return self._send(memoryview(data if self._codec is None else self._codec.seal(data)))
            except channel.WireError as error:
                self.problem = str(error)
                return True

    def _send(self, left: memoryview) -> bool:
        if not self._backlog and left:
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

    def keep_alive(self) -> None:
        """Sends what the codec has to send of its own. Raises LinkError, also for a peer that has been silent for too
        long. Does nothing without a codec."""
        if self._codec is not None:
            try:
                self._send_outgoing(self._codec)
            except channel.WireError as error:
                raise LinkError(str(error)) from error

    def _send_outgoing(self, codec: channel.Codec) -> None:
        with self._lock:
            self._send(memoryview(codec.take_outgoing()))

    def fail(self, problem: str) -> None:
        with self._lock:
            self.problem = self.problem or problem

    def flush(self) -> None:
        """Sends the backlog as far as the socket takes it. Raises LinkError."""
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
    def ping_s(self) -> float | None:
        """Seconds between two calls of `keep_alive`; None: it need not be called."""
        return None if self._codec is None else self._codec.ping_s

    @property
    def is_waiting(self) -> bool:
        """True while the peer has to introduce itself or to read."""
        return not self.introduced or self.has_backlog

    def tick(self, max_ticks: int) -> None:
        """Raises LinkError after `max_ticks` calls in a row without progress. Counts calls instead of seconds, so that
        a pause of this process does not count against the peer."""
        self._idle_ticks = self._idle_ticks + 1 if self.is_waiting else 0
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
    pools = (*exports.pools, *exports.staging)
    return {exports.words} | {pool.descriptor for pool in pools if pool.descriptor >= 0}


logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 32 << 20
PATIENCE_S = 10.0

# (connected socket, the peer that the supervisor has announced) -> None for a peer on this machine
MakeCodec = Callable[[socket.socket, channel.Connect], channel.Codec | None]
_TICKS = 10  # in PATIENCE_S
_CONNECT_BYTES = 4096


class PeerSockets:
    """A `PeerPort` that owns `control`. Its thread calls `wake` whenever `drain` has something; all methods are for the
    instance's thread. A PeerDown may come for a peer without a PeerUp."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        control: socket.socket,
        wake: Callable[[], None],
        *,
        patience_s: float = PATIENCE_S,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        clock: Clock | None = None,
        make_codec: MakeCodec | None = None,
    ) -> None:
        self._name = name
        self._incarnation = incarnation
        self._control = control
        self._wake = wake
        self._tick_s = patience_s / _TICKS
        self._max_queued_bytes = max_queued_bytes
        self._clock = clock or MonotonicClock()
        self._make_codec = make_codec
        self._hello: Hello | None = None
        self._descriptors: tuple[int, ...] = ()
        self._links: dict[str, PeerLink] = {}  # of the thread, as is the selector
        self._events: deque[tuple[PeerLink, PeerUp | PeerDown | FromPeer]] = deque()
        self._taken: dict[str, PeerLink] = {}  # whose PeerUp has been drained, and no PeerDown
        self._selector = selectors.DefaultSelector()
        self._bell, self._ringer = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._must_look = False  # after connections that were not served

    def start(self, exports: Exports, descriptors: Sequence[int]) -> None:
        """Starts the thread, which introduces this instance to every peer that the supervisor has connected or will
        connect. The descriptors stay the caller's; copies are kept until `close`."""
        self._hello = Hello(TRANSFER_VERSION, self._name, self._incarnation, exports)
        self._descriptors = tuple(os.dup(descriptor) for descriptor in descriptors)
        for sock in (self._control, self._bell, self._ringer):
            sock.setblocking(False)
        for sock in (self._control, self._bell):
            self._selector.register(sock, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)
        self._thread.start()

    # ---- the instance's thread

    def drain(self) -> list[PeerUp | PeerDown | FromPeer]:
        drained: list[PeerUp | PeerDown | FromPeer] = []
        while self._events:
            link, event = self._events.popleft()
            if isinstance(event, PeerUp):
                self._taken[event.name] = link
            elif isinstance(event, PeerDown) and self._taken.get(event.name) is link:
                del self._taken[event.name]
            drained.append(event)
        return drained

    def send(self, name: str, messages: Sequence[TransferMessage]) -> None:
        """Sends over the connection whose PeerUp was drained last, so that messages for an incarnation of a peer never
        reach a later one."""
        link = self._taken.get(name)
        if link is None:
            return
        try:
            data = channel.encode_to_peer(messages)
        except channel.WireError as error:
            link.fail(str(error))
            self._ring()
        else:
            if link.send(data):
                self._ring()

    def close(self) -> None:
        """Ends all connections and the thread. Closes the descriptors of PeerUps that were not drained. Idempotent."""
        self._closing = True
        if self._thread is not None:
            self._ring()
            self._thread.join()
            self._thread = None
        for _, event in self._events:
            if isinstance(event, PeerUp):
                close_all(event.descriptors)
        self._events.clear()
        close_all(self._descriptors)
        self._descriptors = ()
        self._selector.close()
        for sock in (self._control, self._bell, self._ringer):
            sock.close()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._ringer.send(b"\0")

    # ---- the thread

    def _run(self) -> None:
        """Serves what can be read or written. All connections are looked after when that is due, and after a ring,
        which does not say whose: with hundreds of peers to do so for each message would take more than the message."""
        try:
            looked_s = ticked_s = self._clock.now()
            patience_s: float | None = None
            while not self._closing:
                self._must_look = False
                served = [self._serve(key.fileobj, mask) for key, mask in self._selector.select(patience_s)]
                now = self._clock.now()
                is_due = now - ticked_s >= self._tick_s
                if is_due:
                    ticked_s = now
                if is_due or self._must_look or (patience_s is not None and now - looked_s >= patience_s):
                    looked_s = now
                    for link in list(self._links.values()):
                        self._look_after(link, is_due)
                    patience_s = self._patience_s()
                    continue
                for link in filter(None, served):
                    if self._links.get(link.name) is link:
                        self._look_after(link, is_due)
                        if link.is_waiting:
                            patience_s = self._tick_s if patience_s is None else min(patience_s, self._tick_s)
        finally:
            for link in list(self._links.values()):
                self._drop(link, "this instance has ended its connections")

    def _patience_s(self) -> float | None:
        """Returns seconds until all connections have to be looked after again; None: until something comes. Half of
        the time between two pings: a look that comes a moment early must not leave one out."""
        pings = [0.5 * ping_s for link in self._links.values() if (ping_s := link.ping_s) is not None]
        waits = [self._tick_s] if any(link.is_waiting for link in self._links.values()) else []
        return min([*pings, *waits], default=None)

    def _serve(self, source: object, mask: int) -> PeerLink | None:
        """Returns the connection that was served, if it was one."""
        if source is self._control:
            self._must_look = True
            self._take_connection()
        elif source is self._bell:
            self._must_look = True
            with contextlib.suppress(BlockingIOError):
                self._bell.recv(4096)
        elif isinstance(source, PeerLink) and self._links.get(source.name) is source:
            try:
                if mask & selectors.EVENT_WRITE:
                    source.flush()
                if mask & selectors.EVENT_READ:
                    source.receive(lambda event: self._events.append((source, event)))
                    self._wake()
            except LinkError as error:
                self._drop(source, str(error))
            return source
        return None

    def _look_after(self, link: PeerLink, is_due: bool) -> None:
        """Drops a link that has a problem or, at a tick that `is_due`, makes no progress; else selects it for writing
        while it has a backlog."""
        try:
            if link.problem:
                raise LinkError(link.problem)
            link.keep_alive()
            if is_due:
                link.tick(_TICKS)
        except LinkError as error:
            self._drop(link, str(error))
            return
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_backlog else 0)
        if self._selector.get_key(link).events != interest:
            self._selector.modify(link, interest)

    def _take_connection(self) -> None:
        """Reads one datagram of the control socket. An unreadable one is dropped, since the supervisor tries again."""
        try:
            datagram, descriptors = receive_with(self._control, _CONNECT_BYTES, 1)
        except BlockingIOError:
            return
        except DescriptorError as error:
            logger.error("a connection to another instance is refused: %s", error)
            return
        if not datagram:  # the frontend is gone, and this process goes when its channel says so
            self._selector.unregister(self._control)
            return
        try:
            promised = channel.decode_connect(datagram)
            if len(descriptors) != 1:
                raise channel.WireError("a connection must come with one descriptor")
            sock = socket.socket(fileno=descriptors[0])
        except (channel.WireError, OSError) as error:
            close_all(descriptors)
            logger.error("a connection to another instance is refused: %s", error)
            return
        codec = self._make_codec(sock, promised) if self._make_codec is not None else None
        self._open(PeerLink(sock, promised, self._max_queued_bytes, codec))

    def _open(self, link: PeerLink) -> None:
        if (old := self._links.get(link.name)) is not None:
            self._drop(old, "replaced by a new connection")
        assert self._hello is not None
        self._links[link.name] = link
        self._selector.register(link, selectors.EVENT_READ)
        try:
            link.send_hello(self._hello, self._descriptors)
        except LinkError as error:
            self._drop(link, str(error))

    def _drop(self, link: PeerLink, problem: str) -> None:
        del self._links[link.name]
        self._selector.unregister(link)
        link.close()
        self._events.append((link, PeerDown(link.name, link.incarnation, problem)))
        self._wake()
