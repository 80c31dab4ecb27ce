"""The parent's side of the fetch child: starts it, sends it requests, passes on its answers, ends it if it does not
answer.

There is one child for all fetches. If it is killed or does not answer, no host is at fault: callers get ChildLost and
may ask the next child. Does not trust its answers. Does not know what is fetched or which hosts are allowed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import subprocess
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from hydra_engine.core.processes.launch import command, parent_variable
from hydra_engine.core.units import describe_exit
from hydra_engine.errors import EngineClosed, RequestError, Unavailable
from hydra_engine.preprocess.sandbox.bounded_http import Get
from hydra_engine.preprocess.sandbox.child_host import environment, warn_uncontained
from hydra_engine.preprocess.sandbox.fetch_child import (
    MAX_MESSAGE_BYTES,
    Ask,
    Ended,
    FromChild,
    Piece,
    Ready,
    Stop,
    ToChild,
)

logger = logging.getLogger(__name__)

_MODULE = "hydra_engine.preprocess.sandbox.fetch_child"
_INHERITED = ("SSL_CERT_FILE", "SSL_CERT_DIR")  # the certificates that the operator trusts
_MESSAGES_A_TURN = 4  # of the loop

Take = Callable[[bytes], None]


class ChildLost(Exception):
    """Raised if the fetch child has ended before the fetch has, and the fetch is not known to be the cause."""


@dataclass(slots=True)
class _Fetch:
    ended: asyncio.Future[Ended]
    take: Take | None  # None: the caller has gone
    patience: asyncio.TimerHandle | None = None  # runs from `Stop` to the child's answer


class FetchProcess:
    """The fetch child and the parent's end of its socket. Use it on one event loop, whose thread must live as long as
    the child."""

    def __init__(self, answer_seconds: float) -> None:
        """`answer_seconds`: the child is ended if it takes longer to stop a fetch."""
        self._answer_seconds = answer_seconds
        self._decoder = msgspec.msgpack.Decoder(FromChild)
        self._numbers = itertools.count()
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._fetches: dict[int, _Fetch] = {}
        self._outgoing: deque[bytes] = deque()

    def start(self) -> None:
        """Starts the child, if there is none, without waiting for it. Raises Unavailable."""
        if self._closed:
            raise _engine_closed()
        if self._connection is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self._process = _spawn(theirs)
            except OSError as error:
                ours.close()
                raise Unavailable(
                    "no process to fetch pictures and videos could be started; try again later"
                ) from error
        ours.setblocking(False)
        self._connection = ours
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(ours, self._receive, ours)

    async def wait_until_ready(self) -> None:
        """Starts the child if needed and waits for it. Raises ChildLost or Unavailable."""
        self.start()
        await asyncio.shield(self._ready)

    async def get(self, get: Get, seconds: float, take: Take) -> Ended:
        """Returns how the fetch ended, "stopped" after `seconds`. `take` receives the body in pieces, and may raise a
        RequestError, which ends the fetch; so does cancellation. Raises ChildLost or Unavailable."""
        await self.wait_until_ready()
        number = next(self._numbers)
        fetch = self._fetches[number] = _Fetch(self._loop.create_future(), take)
        self._send(Ask(number, get))
        try:
            try:
                async with asyncio.timeout(seconds):
                    return await asyncio.shield(fetch.ended)
            except TimeoutError:
                self._stop(number)
                return await asyncio.shield(fetch.ended)
        finally:
            if not fetch.ended.done():
                fetch.take = None
                self._stop(number)

    def close(self) -> None:
        """Ends the child now; callers that wait for it get EngineClosed. Call it on the loop."""
        self._closed = True
        if self._connection is not None:
            self._end(_engine_closed())

    def _stop(self, number: int) -> None:
        fetch = self._fetches[number]
        if fetch.patience is None:
            fetch.patience = self._loop.call_later(self._answer_seconds, self._lose, "does not answer")
            self._send(Stop(number))

    def _send(self, message: ToChild) -> None:
        self._outgoing.append(msgspec.msgpack.encode(message))
        if len(self._outgoing) == 1:
            self._flush()

    def _flush(self) -> None:
        connection = self._connection
        assert connection is not None
        try:
            while self._outgoing:
                connection.send(self._outgoing[0])
                self._outgoing.popleft()
        except BlockingIOError:
            self._loop.add_writer(connection, self._flush)
            return
        except OSError:
            self._outgoing.clear()  # the child has gone, which `_receive` reports
        self._loop.remove_writer(connection)

    def _receive(self, connection: socket.socket) -> None:
        """Handles up to `_MESSAGES_A_TURN` messages."""
        for _ in range(_MESSAGES_A_TURN):
            try:
                data = connection.recv(MAX_MESSAGE_BYTES)
                message = self._decoder.decode(data) if data else None
            except BlockingIOError:
                return
            except (OSError, msgspec.MsgspecError):
                self._lose("sent what cannot be read")
                return
            if message is None:
                self._lose(None)
                return
            self._heed(message)

    def _heed(self, message: FromChild) -> None:
        if isinstance(message, Ready):
            if message.uncontained is not None:
                warn_uncontained(message.uncontained)
            if not self._ready.done():
                self._ready.set_result(None)
            return
        fetch = self._fetches.get(message.number)
        if fetch is None:
            return
        if isinstance(message, Piece):
            if fetch.take is not None:
                try:
                    fetch.take(message.data)
                except RequestError as error:
                    fetch.ended.set_exception(error)
                    fetch.take = None
                    self._stop(message.number)
            return
        del self._fetches[message.number]
        if fetch.patience is not None:
            fetch.patience.cancel()
        if fetch.take is not None:
            fetch.ended.set_result(message)

    def _lose(self, why: str | None) -> None:
        """Ends a child that has ended (`why` None) or misbehaves."""
        assert self._process is not None
        status = self._end(ChildLost())
        logger.warning("the process that fetches pictures and videos %s", why or describe_exit(status))

    def _end(self, error: Exception) -> int:
        """Ends the child in whatever state; the next fetch starts another. Returns its exit status."""
        process, connection = self._process, self._connection
        assert process is not None and connection is not None
        self._process = self._connection = None
        self._loop.remove_reader(connection)
        self._loop.remove_writer(connection)
        connection.close()
        process.kill()
        status = process.wait()
        fetches, self._fetches, self._outgoing = self._fetches, {}, deque()
        for fetch in fetches.values():
            if fetch.patience is not None:
                fetch.patience.cancel()
            if fetch.take is not None:
                fetch.ended.set_exception(error)
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # retrieved here, since there may be no waiter
        return status


def _spawn(theirs: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*command(_MODULE), str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**environment(_INHERITED), **parent_variable()},
        start_new_session=True,  # a terminal's Ctrl-C is the parent's business
    )


def _engine_closed() -> EngineClosed:
    return EngineClosed("the engine was closed before the request was read")
