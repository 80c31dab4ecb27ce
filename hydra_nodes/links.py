"""Connections to other nodes, besides their sessions: TCP options, and for a connection between two
instances a codec that does its handshake on the way (`LinkCodec`), since its thread must not wait for it."""

from __future__ import annotations

import socket
from collections.abc import Callable

from hydra_engine.clock import Clock
from hydra_engine.cluster import channel
from hydra_nodes.session import PING_S, Greeting, Handshake, Layer, Session, check_peer

MakeLayer = Callable[[bool], Layer]  # (True for the server's side) -> TLS of one connection

LINK = "instance to instance"
CHANNEL = "frontend to instance"
_PROBES = 3


def set_options(sock: socket.socket, fence_s: float) -> None:
    """Makes TCP send small messages at once and end the connection once the other machine has not answered for about
    `fence_s`, with or without data on the way."""
    period_s = max(1, round(fence_s / (_PROBES + 1)))
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, period_s),
        (socket.TCP_KEEPINTVL, period_s),
        (socket.TCP_KEEPCNT, _PROBES),
        (socket.TCP_USER_TIMEOUT, round(fence_s * 1e3)),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class LinkCodec:
    """A `channel.Codec` that begins with a handshake; what is sealed before its end is sent after it."""

    ping_s = PING_S

    def __init__(self, handshake: Handshake, peer: channel.Connect, fence_s: float) -> None:
        self._handshake = handshake
        self._peer = peer
        self._fence_s = fence_s
        self._session: Session | None = None
        self._waiting = bytearray()

    def seal(self, data: bytes | bytearray | memoryview) -> bytes:
        if self._session is not None:
            return self._session.seal(data)
        self._waiting += data
        return b""

    def open(self, data: bytes | bytearray | memoryview) -> bytes:
        if self._session is not None:
            return self._session.open(data)
        self._handshake.receive(data)
        session = self._handshake.session
        if session is None:
            return b""
        check_peer(session.greeting, self._peer.name, self._peer.incarnation)
        session.set_fence(self._fence_s)
        self._session, self.ping_s = session, session.ping_s
        return session.open(b"")

    def take_outgoing(self) -> bytes:
        outgoing = self._handshake.take_outgoing()
        if self._session is not None:
            waiting, self._waiting = self._waiting, bytearray()
            outgoing += self._session.seal(waiting) + self._session.take_outgoing()
        return outgoing


class LinkMaker:
    """Makes the codecs of an instance's connections to its peers (a `peers.MakeCodec`); None for a peer on this node.
    `greeting`: this instance. Of two instances, the one whose name sorts first is the client."""

    def __init__(
        self,
        secret: bytes,
        greeting: Greeting,
        fence_s: float,
        make_layer: MakeLayer | None,
        clock: Clock | None = None,
    ) -> None:
        self._secret = secret
        self._greeting = greeting
        self._fence_s = fence_s
        self._make_layer = make_layer
        self._clock = clock

    def __call__(self, sock: socket.socket, peer: channel.Connect) -> channel.Codec | None:
        if sock.family == socket.AF_UNIX:
            return None
        set_options(sock, self._fence_s)
        is_server = self._greeting.name > peer.name
        layer = self._make_layer(is_server) if self._make_layer is not None else None

        def answer(theirs: Greeting) -> Greeting:
            check_peer(theirs, peer.name, peer.incarnation)
            return self._greeting

        greeting = None if is_server else self._greeting
        handshake = Handshake(
            self._secret, greeting=greeting, answer=answer if is_server else None, layer=layer, clock=self._clock
        )
        return LinkCodec(handshake, peer, self._fence_s)
