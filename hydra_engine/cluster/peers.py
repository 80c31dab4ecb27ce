"""An instance's connections to all others, which the supervisor makes and hands over through the control socket.

One thread of its own receives, greets and closes; the instance's thread sends directly, so that a message waits for no
other thread unless its peer is behind. A peer that is gone, stopped reading or talks nonsense loses its connection and
is reported; the supervisor makes a new one. Does not know what transfer messages mean.
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
from hydra_engine.cluster import wire
from hydra_engine.cluster.descriptors import DescriptorError, close_all, receive_with
from hydra_engine.cluster.peer_link import LinkError, PeerLink
from hydra_engine.core.pools import Exports
from hydra_engine.instance.ports import FromPeer, PeerDown, PeerUp
from hydra_engine.transfer.messages import TRANSFER_VERSION, Hello, TransferMessage

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 32 << 20
PATIENCE_S = 10.0
_TICKS = 10  # in PATIENCE_S
_CONNECT_BYTES = 4096


class PeerSockets:
    """A `PeerPort` that owns `control`. `wake` is called from its thread whenever `drain` has something; everything
    else is for the instance's thread. A PeerDown comes also for a peer that never got as far as PeerUp."""

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
    ) -> None:
        self._name = name
        self._incarnation = incarnation
        self._control = control
        self._wake = wake
        self._tick_s = patience_s / _TICKS
        self._max_queued_bytes = max_queued_bytes
        self._clock = clock or MonotonicClock()
        self._hello: Hello | None = None
        self._descriptors: tuple[int, ...] = ()
        self._links: dict[str, PeerLink] = {}  # of the thread, as is the selector
        self._events: deque[tuple[PeerLink, PeerUp | PeerDown | FromPeer]] = deque()
        self._taken: dict[str, PeerLink] = {}  # whose PeerUp has been drained, and no PeerDown
        self._selector = selectors.DefaultSelector()
        self._bell, self._ringer = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._closing = False

    def start(self, exports: Exports, descriptors: Sequence[int]) -> None:
        """Lets others in: introduces this instance to whom the supervisor connects it with, and to those that it has
        connected already. The descriptors stay the caller's; copies are kept until `close`."""
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
        """Goes over the connection whose PeerUp was drained last: what is meant for one life of a peer never reaches
        the next one."""
        link = self._taken.get(name)
        if link is None:
            return
        try:
            data = wire.encode_to_peer(messages)
        except wire.WireError as error:
            link.give_up(str(error))
            self._ring()
        else:
            if link.send(data):
                self._ring()

    def close(self) -> None:
        """Ends all connections and the thread; PeerUps that were not taken lose their descriptors. Idempotent."""
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
        try:
            ticked_s = self._clock.now()
            while not self._closing:
                waits = any(link.waits for link in self._links.values())
                for key, mask in self._selector.select(self._tick_s if waits else None):
                    self._serve(key.fileobj, mask)
                now = self._clock.now()
                is_due = now - ticked_s >= self._tick_s
                if is_due:
                    ticked_s = now
                for link in list(self._links.values()):
                    self._look_after(link, is_due)
        finally:
            for link in list(self._links.values()):
                self._drop(link, "this instance has ended its connections")

    def _serve(self, source: object, mask: int) -> None:
        if source is self._control:
            self._take_connection()
        elif source is self._bell:
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

    def _look_after(self, link: PeerLink, is_due: bool) -> None:
        try:
            if link.problem:
                raise LinkError(link.problem)
            if is_due:
                link.tick(_TICKS)
        except LinkError as error:
            self._drop(link, str(error))
            return
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_backlog else 0)
        if self._selector.get_key(link).events != interest:
            self._selector.modify(link, interest)

    def _take_connection(self) -> None:
        """One datagram of the control socket; what cannot be read is dropped, for the supervisor tries again."""
        try:
            datagram, descriptors = receive_with(self._control, _CONNECT_BYTES, 1)
        except BlockingIOError:
            return
        except DescriptorError as error:
            logger.error("a connection to another instance is refused: %s", error)
            return
        if not datagram:  # the front is gone, and this process goes when its channel says so
            self._selector.unregister(self._control)
            return
        try:
            promised = wire.decode_connect(datagram)
            if len(descriptors) != 1:
                raise wire.WireError("a connection must come with one descriptor")
            sock = socket.socket(fileno=descriptors[0])
        except (wire.WireError, OSError) as error:
            close_all(descriptors)
            logger.error("a connection to another instance is refused: %s", error)
            return
        self._open(PeerLink(sock, promised, self._max_queued_bytes))

    def _open(self, link: PeerLink) -> None:
        if (old := self._links.get(link.name)) is not None:
            self._drop(old, "replaced by a new connection")
        assert self._hello is not None
        self._links[link.name] = link
        self._selector.register(link, selectors.EVENT_READ)
        try:
            link.introduce(self._hello, self._descriptors)
        except LinkError as error:
            self._drop(link, str(error))

    def _drop(self, link: PeerLink, problem: str) -> None:
        del self._links[link.name]
        self._selector.unregister(link)
        link.close()
        self._events.append((link, PeerDown(link.name, link.incarnation, problem)))
        self._wake()
