"""Acceptance of connections: new ones are accepted while places are free, idle ones are closed to free places, and
places and file descriptors are reserved for health probes and for processes that restart.

Does not know what connections carry.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

from aiohttp import web

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
KEPT_DESCRIPTORS = 256  # reserved, not for connections; at most two thirds of all
SPARE_PLACES = 32  # above the limit, for health probes
_CLOSED_AT_ONCE = 16
_WAIT_S = 0.05  # until the next try, when there are no descriptors
_EPISODE_S = 60.0  # repeats within this are logged once
_NOT_NOW = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def max_connections() -> int:
    """The number of connections that the limit of open files allows."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, max(limit - KEPT_DESCRIPTORS, limit // 3)))


class Occupant(Protocol):
    def close_at_once(self) -> None:
        """Closes the connection at once."""
        ...


class Places:
    """The connections of a server. If all places are taken, a new connection replaces the one that has been idle for
    longest, or takes a spare place if all are busy."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.num_spare = min(SPARE_PLACES, max(1, limit // 4))
        self._open: set[Occupant] = set()
        self._spare: set[Occupant] = set()
        self._idle: OrderedDict[Occupant, None] = OrderedDict()  # wait for headers, longest idle first
        self._full = _Episode()

    def is_spare(self, occupant: object) -> bool:
        return occupant in self._spare

    def add(self, occupant: Occupant) -> None:
        self._open.add(occupant)
        if len(self._open) > self.limit:
            self._full.warn("%d connections are open, which is the limit: idle ones are closed", self.limit)
            self.close_idle(1)
            num_over = len(self._open) - self.limit
            if num_over > self.num_spare:
                self._remove(occupant)
                occupant.close_at_once()
                return
            if num_over > 0:
                self._spare.add(occupant)
        self._idle[occupant] = None

    def discard(self, occupant: Occupant) -> None:
        self._remove(occupant)

    def mark_idle(self, occupant: Occupant) -> None:
        """Marks a connection as idle: it waits for its client's next request."""
        if occupant in self._open:
            self._idle[occupant] = None

    def mark_busy(self, occupant: Occupant) -> None:
        self._idle.pop(occupant, None)

    def close_idle(self, limit: int) -> int:
        """Closes up to `limit` idle connections, the longest idle first; returns the number closed."""
        num_closed = 0
        while self._idle and num_closed < limit:
            occupant, _ = self._idle.popitem(last=False)
            self._remove(occupant)
            occupant.close_at_once()
            num_closed += 1
        return num_closed

    def _remove(self, occupant: Occupant) -> None:
        self._open.discard(occupant)
        self._spare.discard(occupant)
        self._idle.pop(occupant, None)


PLACES = web.AppKey("places", Places)


class Acceptor:
    """An acceptor of connections on listening sockets, which it owns."""

    def __init__(self, sockets: Iterable[socket.socket], make: Callable[[], asyncio.Protocol], places: Places) -> None:
        self.sockets = tuple(sockets)
        self._make = make
        self._places = places
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._short = _Episode()

    def start(self) -> None:
        self._pause = None
        for sock in self.sockets:
            self._loop.add_reader(sock, self._accept, sock)

    def close(self) -> None:
        """Stops accepting and closes the sockets. Idempotent."""
        if self._pause is not None:
            self._pause.cancel()
        for task in self._opening:
            task.cancel()
        for sock in self.sockets:
            if sock.fileno() >= 0:
                self._loop.remove_reader(sock)
            sock.close()

    def _accept(self, sock: socket.socket) -> None:
        for _ in range(self._places.num_spare):  # in one turn of the loop, so refused ones are closed by the next
            try:
                connection, _ = sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue  # its client has disconnected
            except OSError as error:
                if error.errno not in _NOT_NOW:
                    raise
                self._wait(error)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._open(connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, connection)
        except OSError as error:
            logger.debug("a connection ended before it began: %s", error)
            connection.close()

    def _wait(self, error: OSError) -> None:
        """Pauses accepting until there are descriptors again; new connections wait in the system's queue."""
        self._short.warn("new connections wait: %s; idle ones are closed to make room", (error.strerror or "").lower())
        for sock in self.sockets:
            self._loop.remove_reader(sock)
        self._places.close_idle(_CLOSED_AT_ONCE)
        self._pause = self._loop.call_later(_WAIT_S, self.start)


class _Episode:
    """A rate limit for a warning: repeats within 60 s of the last occurrence are not logged."""

    def __init__(self) -> None:
        self._latest_s = float("-inf")

    def warn(self, words: str, *values: object) -> None:
        now = time.monotonic()
        if now - self._latest_s > _EPISODE_S:
            logger.warning(words, *values)
        self._latest_s = now


async def bind(host: str, port: int, backlog: int) -> list[socket.socket]:
    """Opens sockets that listen on all addresses of the host. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                sock = socket.socket(family, kind, protocol)
            except OSError:
                continue  # the system has no such addresses
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            sock.listen(backlog)
            sock.setblocking(False)
        if not sockets:
            raise OSError(errno.EAFNOSUPPORT, "no address can be listened on")
    except OSError:
        for sock in sockets:
            sock.close()
        raise
    return sockets
