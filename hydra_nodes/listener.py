"""`Listener`: where instances on other nodes connect with the frontend. Each is authenticated and must be expected."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

import msgspec

from hydra_engine.clock import MonotonicClock
from hydra_engine.cluster.channel import FrontendSocket
from hydra_engine.errors import ResourceError
from hydra_nodes.links import MakeLayer, set_options
from hydra_nodes.session import Greeting, Handshake, Session, SessionError, check_agreement

logger = logging.getLogger(__name__)

MAX_STRANGERS = 64  # connections whose handshake is not over, besides one for each instance that is expected
STRANGER_S = 30.0  # for a handshake: the agent connects before it starts a process, which imports first
_RECEIVE_BYTES = 1 << 16
_BACKLOG = 128
_RETRY_S = 0.1


class Listener:
    """Runs on the loop that called `open`. `greeting`: this node; instances have to agree with it."""

    def __init__(
        self, sock: socket.socket, secret: bytes, greeting: Greeting, fence_s: float, make_layer: MakeLayer | None
    ) -> None:
        self._sock = sock
        self._secret = secret
        self._greeting = greeting
        self._fence_s = fence_s
        self._make_layer = make_layer
        self._clock = MonotonicClock()
        self._logged_s = float("-inf")
        self._expected: dict[tuple[str, int], asyncio.Future[FrontendSocket]] = {}
        self._strangers: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept(), name="listener")
        # No sooner: until then the loop watches its number, and would take the next socket with it for this one.
        self._accepting.add_done_callback(lambda _: self._sock.close())

    @classmethod
    async def open(
        cls,
        host: str,
        secret: bytes,
        greeting: Greeting,
        *,
        port: int = 0,
        fence_s: float = 10.0,
        make_layer: MakeLayer | None = None,
    ) -> Listener:
        """Listens at an address of this node, and nowhere else. Raises ResourceError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            sock = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            where = f"{host}:{port}" if port else host
            raise ResourceError(
                f"node {greeting.node!r} cannot listen for instances at {where} ({error.strerror or error}); "
                "give it an address of its own and a free port"
            ) from error
        sock.setblocking(False)
        return cls(sock, secret, greeting, fence_s, make_layer)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._sock.getsockname()[:2]
        return host, port

    def expect(self, name: str, incarnation: int) -> asyncio.Future[FrontendSocket]:
        """Returns a future with the frontend's end of the instance's channel, once it has connected; or with the
        SessionError by which it was refused. Cancel it to expect it no longer."""
        key = name, incarnation
        expected = self._expected[key] = asyncio.get_running_loop().create_future()
        expected.add_done_callback(lambda _: self._expected.pop(key, None))
        return expected

    def close(self) -> None:
        """Ends handshakes and cancels what is expected; ends that have been handed out stay."""
        self._accepting.cancel()
        for task in self._strangers:
            task.cancel()
        for expected in list(self._expected.values()):
            expected.cancel()

    async def _accept(self) -> None:
        while True:
            try:
                sock, (host, *_) = await asyncio.get_running_loop().sock_accept(self._sock)
            except OSError as error:  # such as too many open files: others may end soon
                logger.error("cannot take a connection of an instance: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            if len(self._strangers) >= MAX_STRANGERS + len(self._expected):  # those connect long before they speak
                sock.close()
                continue
            task = asyncio.create_task(self._admit(sock, host))
            self._strangers.add(task)
            task.add_done_callback(self._strangers.discard)

    async def _admit(self, sock: socket.socket, host: str) -> None:
        """Hands the connection to whoever expects it, or closes it."""
        with contextlib.ExitStack() as refused:
            refused.callback(sock.close)
            sock.setblocking(False)
            try:
                session = await self._shake_hands(sock)
            except (SessionError, OSError) as error:
                self._log_refusal(host, error)
                return
            set_options(sock, self._fence_s)
            refused.pop_all()
            end = await FrontendSocket.open(sock, session)
            expected = self._expected.get((session.greeting.name, session.greeting.incarnation))
            if expected is None or expected.done():  # since the handshake began
                end.close()
            else:
                expected.set_result(end)

    def _log_refusal(self, host: str, error: SessionError | OSError) -> None:
        """Logs one line a second at most: strangers may come as often as they like."""
        now_s = self._clock.now()
        if now_s - self._logged_s >= 1.0:
            self._logged_s = now_s
            logger.error("a connection from %s is refused: %s", host, error)

    async def _shake_hands(self, sock: socket.socket) -> Session:
        """Raises SessionError and OSError."""
        loop = asyncio.get_running_loop()
        layer = self._make_layer(True) if self._make_layer is not None else None
        handshake = Handshake(self._secret, answer=self._answer, layer=layer)
        try:
            async with asyncio.timeout(STRANGER_S):
                while handshake.session is None:
                    data = await loop.sock_recv(sock, _RECEIVE_BYTES)
                    if not data:
                        raise SessionError("it ended during its handshake")
                    try:
                        handshake.receive(data)
                    finally:
                        if outgoing := handshake.take_outgoing():
                            await loop.sock_sendall(sock, outgoing)
        except TimeoutError as error:
            raise SessionError(f"it did not introduce itself within {STRANGER_S:g} s") from error
        return handshake.session

    def _answer(self, theirs: Greeting) -> Greeting:
        """Raises SessionError for an instance that is not expected. One that is and does not agree has failed."""
        expected = self._expected.get((theirs.name, theirs.incarnation))
        if expected is None or expected.done():
            raise SessionError(
                f"node {self._greeting.node!r} does not expect instance {theirs.name[:40]!r} of node "
                f"{theirs.node[:60]!r} in life {theirs.incarnation}"
            )
        ours = msgspec.structs.replace(self._greeting, name=theirs.name, incarnation=theirs.incarnation)
        try:
            check_agreement(ours, theirs)
        except SessionError as error:
            expected.set_exception(error)
            raise
        return ours
