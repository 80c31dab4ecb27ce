"""`Session`: one authenticated connection between two nodes of a deployment, without I/O of its own.

Both sides hold the secret of the deployment. The handshake is HMAC-SHA256 challenge and response: each side sends a
hello with 32 random bytes; HKDF (RFC 5869, with HMAC-SHA256) makes from the secret and both hellos one key for each
direction; the first record of each side, its `Greeting`, is authenticated by its key, which proves the secret and
that it is not a recording. The client proves first. A hello names its role, and the directions have different keys, so
that nothing sent can be reflected. Greetings hold what must agree; whoever refuses says why in a record of its own.

A record is a 1-byte kind, a 4-byte little-endian length, the payload, and HMAC-SHA256 of the record's number, kind,
length and payload (encrypt-then-MAC's order without encryption). Numbers count up in each direction and do not travel:
a record that is altered, replayed, left out or out of order ends the session. Nothing is decoded or passed on before
its MAC has been compared, and no more than one record is held for that. Payloads can be read on the way, unless a
`Layer` such as TLS (`tls.py`) lies below: then each record still has its MAC.

Pings tell both sides that the other lives, and carry its clock. Does not know what the payloads mean.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from hydra_engine.clock import Clock, MonotonicClock
from hydra_engine.cluster.channel import WireError

VERSION = 1
MIN_SECRET_BYTES = 16
MAX_RECORD_BYTES = 1 << 18
HANDSHAKE_S = 5.0  # for all of it
PING_S = 0.5  # between two pings, or a tenth of a short fence
_MAX_COUNTED_S = 1.0  # of the other's silence, between two pings
_MAX_GREETING_BYTES = 4096
_MAGIC = b"hydra-node"
_HELLO = struct.Struct("<10sHB32s")  # magic, version, role, nonce
_CLIENT, _SERVER = 1, 2
_HEADER = struct.Struct("<BI")  # kind, length of the payload
_NUMBER = struct.Struct("<Q")
_PING = struct.Struct("<d")  # clock of who asks
_PONG = struct.Struct("<dd")  # the same, and the clock of who answers
_TAG_BYTES = hashlib.sha256().digest_size
_DATA, _GREETING, _REFUSAL, _PINGED, _PONGED = range(5)
_MAX_WAITING_CONTROLS = 16
_RECEIVE_BYTES = 1 << 16


class SessionError(WireError):
    """The session cannot begin or has ended; the message is one sentence for the operator."""


class Greeting(msgspec.Struct, frozen=True):
    """Facts that a side says of itself. `purpose`: what the connection is for. `must_agree`: facts that are the same on
    all nodes of a deployment, such as versions, model, dtype and block sizes. `now_s`: the sender's clock."""

    purpose: str
    node: str
    name: str = ""  # the instance, and which of its lives
    incarnation: int = 0
    must_agree: dict[str, str] = {}
    now_s: float = 0.0


Answer = Callable[[Greeting], Greeting]  # a server's, to the client's; raises SessionError to refuse
ClockSample = tuple[float, float, float]  # sent on this side's clock, answered on the other's, received on this side's


def check_agreement(ours: Greeting, theirs: Greeting) -> None:
    """Raises SessionError with a sentence that names the other node and the first difference."""
    other = f"node {theirs.node[:60]!r}"
    if theirs.purpose != ours.purpose:
        raise SessionError(f"{other} wants a connection for {theirs.purpose[:40]!r}, which is for {ours.purpose!r}")
    for fact in sorted(ours.must_agree.keys() | theirs.must_agree.keys()):
        here, there = ours.must_agree.get(fact, "none"), theirs.must_agree.get(fact, "none")
        if here != there:
            raise SessionError(
                f"{other} has {fact[:40]} {there[:80]}, node {ours.node!r} has {here}: all nodes need the same"
            )


def check_peer(theirs: Greeting, name: str, incarnation: int) -> None:
    """Raises SessionError unless it is that incarnation of that instance."""
    if (theirs.name, theirs.incarnation) != (name, incarnation):
        raise SessionError(
            f"node {theirs.node[:60]!r} sends instance {theirs.name[:40]!r} in life {theirs.incarnation}, not {name!r} "
            f"in life {incarnation}"
        )


class Layer(Protocol):
    """A protocol between a session and its socket, such as TLS. Raises SessionError."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def binding(self) -> bytes:
        """Bytes that both sides know and that differ for another pair of ends."""
        ...

    def wrap(self, data: bytes) -> bytes: ...

    def unwrap(self, data: bytes | bytearray | memoryview) -> bytes: ...

    def take_outgoing(self) -> bytes: ...


class _Direction:
    """The MACs of the records of one direction. Each call counts one record."""

    def __init__(self, key: bytes) -> None:
        self._begun = hmac.new(key, digestmod="sha256")
        self._number = 0

    def tag(self, header: bytes | memoryview, payload: bytes | memoryview) -> bytes:
        mac = self._begun.copy()
        mac.update(_NUMBER.pack(self._number))
        mac.update(header)
        mac.update(payload)
        self._number += 1
        return mac.digest()


class Session:
    """A session after its handshake. One thread at a time may send (`seal`, `take_outgoing`: what they return must
    reach the socket in the order of the calls), and one may receive (`open`)."""

    def __init__(self, keys: _Keys, theirs: Greeting, buffer: bytearray, layer: Layer | None, clock: Clock) -> None:
        self.greeting = theirs
        self.clock_samples: deque[ClockSample] = deque(maxlen=64)  # that `observe_clock` has not been there for
        self.observe_clock: Callable[[ClockSample], None] = self.clock_samples.append
        self._keys = keys
        self._reader = _RecordReader(keys.receiving, buffer)
        self._layer = layer
        self._clock = clock
        self._controls: deque[tuple[int, bytes]] = deque(maxlen=_MAX_WAITING_CONTROLS)
        self.ping_s = PING_S
        self._fence_s = 0.0
        self._pinged_s = float("-inf")
        self._silent_s = 0.0

    def derive_key(self, label: str) -> bytes:
        """Returns 32 bytes that only both ends of this session know, others for each label."""
        return self._keys.derive(f"exported {label}")

    def set_fence(self, fence_s: float) -> None:
        """Makes `take_outgoing` raise once nothing has come for `fence_s`, and sets `ping_s`. Without a fence, nothing
        is pinged."""
        self.ping_s = min(PING_S, fence_s / 10)
        self._fence_s = fence_s

    def seal(self, data: bytes | bytearray | memoryview) -> bytes:
        """Returns what to send for `data`, of any length."""
        view = memoryview(data)
        pieces: list[bytes | memoryview] = []
        for start in range(0, len(view), MAX_RECORD_BYTES):
            pieces += _seal(self._keys.sending, _DATA, view[start : start + MAX_RECORD_BYTES])
        return self._wrap(b"".join(pieces))

    def open(self, data: bytes | bytearray | memoryview) -> bytes:
        """Returns the payload that has become complete and is authentic. `open(b"")` returns what came with the end of
        the handshake. Raises SessionError; the session has then ended."""
        payloads: list[bytes] = []
        for kind, payload in self._reader.read(data if self._layer is None else self._layer.unwrap(data)):
            self._silent_s = 0.0
            if kind == _DATA:
                payloads.append(payload)
            else:
                self._receive_control(kind, payload)
        return payloads[0] if len(payloads) == 1 else b"".join(payloads)

    def take_outgoing(self) -> bytes:
        """Returns answers to pings, and a ping once it is due; call it after `open`, and every `ping_s`.
        Raises SessionError once the other side has been silent for too long. Between two pings only a second counts at
        most, so that a pause of this process does not count against the other."""
        if self._fence_s and (now := self._clock.now()) - self._pinged_s >= self.ping_s:
            self._silent_s += min(now - self._pinged_s, _MAX_COUNTED_S)
            self._pinged_s = now
            if self._silent_s > self._fence_s + _MAX_COUNTED_S:
                raise SessionError(f"node {self.greeting.node[:60]!r} has not been heard of for {self._fence_s:g} s")
            self._controls.append((_PINGED, _PING.pack(now)))
        pieces: list[bytes | memoryview] = []
        while self._controls:
            pieces += _seal(self._keys.sending, *self._controls.popleft())
        waiting = b"" if self._layer is None else self._layer.take_outgoing()
        return waiting + self._wrap(b"".join(pieces))

    def _wrap(self, data: bytes) -> bytes:
        return self._layer.wrap(data) if self._layer is not None and data else data

    def _receive_control(self, kind: int, payload: bytes) -> None:
        if kind == _PINGED and len(payload) == _PING.size:
            (asked_s,) = _PING.unpack(payload)
            self._controls.append((_PONGED, _PONG.pack(asked_s, self._clock.now())))
        elif kind == _PONGED and len(payload) == _PONG.size:
            asked_s, answered_s = _PONG.unpack(payload)
            self.observe_clock((asked_s, answered_s, self._clock.now()))
        else:
            raise SessionError(f"node {self.greeting.node[:60]!r} sent a record of an unknown kind")


class Handshake:
    """Handshake without I/O: pass on what comes to `receive`, send `take_outgoing`, until `session` is there. An end
    that has raised SessionError still has to send `take_outgoing`: the other's reason is in it."""

    def __init__(
        self,
        secret: bytes,
        *,
        greeting: Greeting | None = None,
        answer: Answer | None = None,
        layer: Layer | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Creates the client's side with `greeting`, the server's with `answer`. Raises SessionError for a short
        secret."""
        if len(secret) < MIN_SECRET_BYTES:
            raise SessionError(f"the secret of a deployment has at least {MIN_SECRET_BYTES} bytes, not {len(secret)}")
        self.session: Session | None = None
        self._secret = secret
        self._greeting = greeting
        self._answer = answer
        self._layer = layer
        self._clock = clock or MonotonicClock()
        self._hello = _HELLO.pack(_MAGIC, VERSION, _CLIENT if answer is None else _SERVER, os.urandom(32))
        self._keys: _Keys | None = None
        self._greetings: _RecordReader | None = None
        self._buffer = bytearray()
        self._outgoing = bytearray()
        self._greeted_s = 0.0
        self._began = False

    def take_outgoing(self) -> bytes:
        if self._answer is None and not self._began and (self._layer is None or self._layer.is_ready):
            self._began = True
            self._send(self._hello)
        waiting = b"" if self._layer is None else self._layer.take_outgoing()
        taken = bytes(self._outgoing) + waiting  # what has been wrapped is the older
        self._outgoing.clear()
        return taken

    def receive(self, data: bytes | bytearray | memoryview) -> None:
        """Raises SessionError; the handshake has then failed."""
        self._buffer += data if self._layer is None else self._layer.unwrap(data)
        if self._layer is not None and not self._layer.is_ready:
            return
        if self._keys is None and not self._receive_hello():
            return
        assert self._keys is not None and self._greetings is not None
        for kind, payload in self._greetings.read(b"", max_records=1):
            self._receive_greeting(self._keys, kind, payload)

    def _receive_hello(self) -> bool:
        """True once the other's hello is complete."""
        start = bytes(self._buffer[: _HELLO.size])
        if start[: len(_MAGIC)] != _MAGIC[: len(start)]:
            raise SessionError("the other side does not speak this protocol (or has TLS where this one has none)")
        if len(start) < _HELLO.size:
            return False
        _, version, role, _ = _HELLO.unpack(start)
        if version != VERSION:
            self._send(self._hello)  # for its own sentence
            raise SessionError(f"the other side speaks session version {version}, not {VERSION}: install the same")
        is_client = self._answer is None
        if role != (_SERVER if is_client else _CLIENT):
            raise SessionError("the other side has the same role: what was sent came back")
        del self._buffer[: _HELLO.size]
        hellos = (self._hello, start) if is_client else (start, self._hello)
        binding = b"" if self._layer is None else self._layer.binding
        self._keys = _Keys(self._secret, b"".join(hellos) + binding, is_client)
        self._greetings = _RecordReader(self._keys.receiving, self._buffer, _MAX_GREETING_BYTES)
        if is_client:
            assert self._greeting is not None
            self._greet(self._greeting)
        else:
            self._send(self._hello)
        return True

    def _greet(self, greeting: Greeting) -> None:
        assert self._keys is not None
        self._greeted_s = self._clock.now()
        payload = msgspec.msgpack.encode(msgspec.structs.replace(greeting, now_s=self._greeted_s))
        if len(payload) > _MAX_GREETING_BYTES:
            raise SessionError(f"a greeting of {len(payload)} bytes is over the limit of {_MAX_GREETING_BYTES}")
        self._send(b"".join(_seal(self._keys.sending, _GREETING, memoryview(payload))))

    def _receive_greeting(self, keys: _Keys, kind: int, payload: bytes) -> None:
        received_s = self._clock.now()
        if kind == _REFUSAL:
            raise SessionError(payload.decode("utf-8", "replace"))
        if kind != _GREETING:
            raise SessionError("the other side did not greet")
        try:
            theirs = msgspec.msgpack.decode(payload, type=Greeting)
        except msgspec.DecodeError as error:
            raise SessionError(f"the other side's greeting cannot be read: {error}") from error
        try:
            if self._answer is not None:
                self._greeting = self._answer(theirs)
            assert self._greeting is not None
            check_agreement(self._greeting, theirs)
        except SessionError as error:
            reason = str(error).encode()[:_MAX_GREETING_BYTES]
            self._send(b"".join(_seal(keys.sending, _REFUSAL, memoryview(reason))))
            raise
        session = Session(keys, theirs, self._buffer, self._layer, self._clock)
        if self._answer is not None:
            self._greet(self._greeting)
        else:
            session.clock_samples.append((self._greeted_s, theirs.now_s, received_s))
        self.session = session

    def _send(self, data: bytes) -> None:
        self._outgoing += data if self._layer is None else self._layer.wrap(data)


def handshake_client(
    sock: socket.socket,
    secret: bytes,
    greeting: Greeting,
    *,
    layer: Layer | None = None,
    clock: Clock | None = None,
    limit_s: float = HANDSHAKE_S,
) -> Session:
    """Introduces this side to a server on a connected socket, which blocks and has no time limit afterwards. Raises
    SessionError, also after `limit_s`; the caller closes the socket."""
    return _shake_hands(sock, Handshake(secret, greeting=greeting, layer=layer, clock=clock), limit_s)


def handshake_server(
    sock: socket.socket,
    secret: bytes,
    answer: Answer,
    *,
    layer: Layer | None = None,
    clock: Clock | None = None,
    limit_s: float = HANDSHAKE_S,
) -> Session:
    """Waits for a client's introduction, see `handshake_client`. `answer` is called with an authentic greeting."""
    return _shake_hands(sock, Handshake(secret, answer=answer, layer=layer, clock=clock), limit_s)


def _shake_hands(sock: socket.socket, handshake: Handshake, limit_s: float) -> Session:
    wall = MonotonicClock()
    deadline_s = wall.now() + limit_s
    try:
        while True:
            _send_before(sock, handshake.take_outgoing(), deadline_s, wall)
            if handshake.session is not None:
                sock.settimeout(None)
                return handshake.session
            sock.settimeout(max(deadline_s - wall.now(), 1e-3))
            data = sock.recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError
            if wall.now() > deadline_s:
                raise TimeoutError
            try:
                handshake.receive(data)
            except SessionError:
                _send_before(sock, handshake.take_outgoing(), deadline_s, wall)
                raise
    except TimeoutError as error:
        raise SessionError(f"the other side did not introduce itself within {limit_s:g} s") from error
    except ConnectionError as error:
        problem = "the other side ended the handshake: its secret differs, or it is another service"
        raise SessionError(problem) from error
    except OSError as error:
        raise SessionError(f"the connection broke during the handshake: {error.strerror or error}") from error


def _send_before(sock: socket.socket, data: bytes, deadline_s: float, clock: Clock) -> None:
    if data:
        sock.settimeout(max(deadline_s - clock.now(), 1e-3))
        sock.sendall(data)


# ---- records and keys


class _RecordReader:
    """A parser of the records of one direction, in `buffer`."""

    def __init__(self, direction: _Direction, buffer: bytearray, max_bytes: int = MAX_RECORD_BYTES) -> None:
        self._direction = direction
        self._buffer = buffer
        self._max_bytes = max_bytes  # of a payload
        self._broken = False

    def read(self, data: bytes | bytearray | memoryview, max_records: int | None = None) -> list[tuple[int, bytes]]:
        """Returns kind and payload of complete records, all of them authentic. Raises SessionError."""
        if self._broken:
            raise SessionError("the session has ended")
        self._buffer += data
        records: list[tuple[int, bytes]] = []
        start = 0
        with memoryview(self._buffer) as view:
            while len(view) - start >= _HEADER.size and len(records) != max_records:
                kind, length = _HEADER.unpack_from(view, start)
                if length > self._max_bytes:
                    self._broken = True
                    raise SessionError(f"a record of {length} bytes is over the limit of {self._max_bytes}")
                body, end = start + _HEADER.size, start + _HEADER.size + length
                if len(view) < end + _TAG_BYTES:
                    break
                expected = self._direction.tag(view[start:body], view[body:end])
                if not hmac.compare_digest(expected, view[end : end + _TAG_BYTES]):
                    self._broken = True
                    raise SessionError("a record is not authentic: the secret differs, or it was altered on its way")
                records.append((kind, bytes(view[body:end])))
                start = end + _TAG_BYTES
        del self._buffer[:start]
        return records


class _Keys:
    """The keys of a session, from the secret and all that both sides sent before their first record."""

    def __init__(self, secret: bytes, transcript: bytes, is_client: bool) -> None:
        self._prk = hmac.digest(hashlib.sha256(transcript).digest(), secret, "sha256")  # HKDF-Extract
        directions = _Direction(self.derive("client to server")), _Direction(self.derive("server to client"))
        self.sending, self.receiving = directions if is_client else directions[::-1]

    def derive(self, label: str) -> bytes:
        return hmac.digest(self._prk, f"hydra-node {label}".encode() + b"\x01", "sha256")  # HKDF-Expand, one block


def _seal(direction: _Direction, kind: int, payload: bytes | memoryview) -> list[bytes | memoryview]:
    header = _HEADER.pack(kind, len(payload))
    return [header, payload, direction.tag(header, payload)]
