"""`TcpBlocks`: the engine's `BlockNetwork` over TCP.

A target keeps one connection to each source that it reads from. After the handshake of `session.py` it sends requests:
a pool, block ids, a control word and the value that it should hold. The source answers with the bytes of the blocks,
from its pool straight into the socket, and then with the word, loaded after kernel and MAC have taken the last byte.
The target receives them straight into its own blocks. If the word has changed meanwhile, so may have the bytes between
the socket and their MAC: then the MAC of the answer is of another form, which leaves them out.

A source serves each target in a thread. It holds the ids of one request and no copy of a block, so a slow target costs
a thread and a socket's buffer. Does not know offers, devices, or when a block is free.
"""

from __future__ import annotations

import logging
import math
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from hydra_engine.clock import Clock, MonotonicClock
from hydra_engine.core.plans import BlockIds
from hydra_engine.core.pools import PoolKind
from hydra_engine.errors import ResourceError, TransferError
from hydra_engine.transfer.network import Rows
from hydra_nodes.block_connection import (
    LAST_BYTES,
    BlockConnection,
    ConnectionEnded,
    NotAuthentic,
    batches,
    block_views,
    end_socket,
)
from hydra_nodes.macs import Mac, MacKind, best_mac
from hydra_nodes.session import Greeting, Layer, Session, SessionError, handshake_client, handshake_server

logger = logging.getLogger(__name__)

PURPOSE = "blocks"
PATIENCE_S = 5.0  # without any byte of a message that has begun
DIAL_S = 2.0
MAX_CONNECTIONS = 128
MAX_STRANGERS = 16  # connections whose handshake is not over
MAX_BLOCKS = 1 << 16  # of one request
FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 2.0  # before connecting again
_LIFE_BYTES = 16

_KINDS = tuple(PoolKind)
_REQUEST = struct.Struct("<16sBIIQ")  # life, kind, number of blocks, slot, word; then the ids, little-endian int32
_ANSWER = struct.Struct(
    "<BH61x"
)  # status, bytes of the reason that follows; the kernel copies faster to a line's begin
_WORD = struct.Struct("<Q")
_BYTES, _WORD_ALONE, _REFUSED = range(3)

MakeLayer = Callable[[bool], Layer]  # (True for the server's side) -> TLS of one connection


class _Request(NamedTuple):
    life: bytes
    kind: PoolKind
    blocks: BlockIds
    slot: int
    word: int


class TcpBlocks:
    """A `BlockNetwork` of one incarnation of an instance. `secret`, `greeting`: as of its other sessions. `host`: an
    address of this node that peers reach; it listens there only. `make_layer`: makes TLS for each connection."""

    registers_pools = False

    def __init__(
        self,
        secret: bytes,
        greeting: Greeting,
        host: str,
        *,
        make_layer: MakeLayer | None = None,
        mac: MacKind | None = None,
        clock: Clock | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.mac = mac or best_mac()
        self.patience_s = patience_s
        self.clock = clock or MonotonicClock()
        # Nodes that would not understand each other's messages refuse each other, with a sentence.
        kept = "tls" if make_layer is not None else self.mac.name
        facts = {**greeting.must_agree, "block authentication": kept}
        self.greeting = msgspec.structs.replace(greeting, purpose=PURPOSE, must_agree=facts)
        self._secret = secret
        self._host = host
        self._make_layer = make_layer
        self._source: _Source | None = None

    def serve(self, pools: Mapping[PoolKind, Rows], load_word: Callable[[int], int], num_words: int) -> str:
        assert self._source is None, "served twice"
        self._source = _Source(self, self._host, pools, load_word, num_words)
        return self._source.endpoint

    def open(self, peer: str, endpoint: str) -> TcpRemoteBlocks:
        try:
            address, life, *_ = endpoint.split("/")  # what may follow is of other networks
            host, port = address.rsplit(":", 1)
            return TcpRemoteBlocks(self, peer, (host.strip("[]"), int(port)), bytes.fromhex(life))
        except ValueError as error:
            raise TransferError(
                f"instance {peer} serves its blocks at {endpoint[:80]!r}, which is no address"
            ) from error

    def close(self) -> None:
        if self._source is not None:
            self._source.close()

    def connect(self, sock: socket.socket) -> tuple[BlockConnection, Greeting]:
        """Does the handshake of a connected socket. Raises SessionError."""
        layer = self._make_layer(False) if self._make_layer is not None else None
        session = handshake_client(sock, self._secret, self.greeting, layer=layer, limit_s=self.patience_s)
        return self._connection(sock, session, layer, is_client=True), session.greeting

    def accept(self, sock: socket.socket) -> tuple[BlockConnection, Greeting]:
        layer = self._make_layer(True) if self._make_layer is not None else None
        session = handshake_server(sock, self._secret, lambda _: self.greeting, layer=layer, limit_s=self.patience_s)
        return self._connection(sock, session, layer, is_client=False), session.greeting

    def _connection(
        self, sock: socket.socket, session: Session, layer: Layer | None, *, is_client: bool
    ) -> BlockConnection:
        return BlockConnection(sock, session, layer, self.mac, is_client=is_client, patience_s=self.patience_s)


# ---- the source


class _Source:
    """The listener of a source, and a thread for each connection."""

    def __init__(
        self,
        network: TcpBlocks,
        host: str,
        pools: Mapping[PoolKind, Rows],
        load_word: Callable[[int], int],
        num_words: int,
    ) -> None:
        self._network = network
        self._pools = dict(pools)
        self._load_word = load_word
        self._num_words = num_words
        self._life = secrets.token_bytes(_LIFE_BYTES)
        self._lock = threading.Lock()  # of the next three
        self._serving: dict[threading.Thread, socket.socket] = {}
        self._num_strangers = 0
        self._closing = threading.Event()
        try:
            self._listener = socket.create_server(
                (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=MAX_CONNECTIONS
            )
        except OSError as error:
            raise ResourceError(
                f"node {network.greeting.node!r} cannot listen at {host} ({error.strerror or error}); give it an "
                "address of its own that the other nodes reach"
            ) from error
        port = self._listener.getsockname()[1]
        self.endpoint = f"{f'[{host}]' if ':' in host else host}:{port}/{self._life.hex()}"
        self._acceptor = threading.Thread(target=self._accept, name="blocks", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        self._closing.set()
        end_socket(self._listener)
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            serving = dict(self._serving)
        for sock in serving.values():
            end_socket(sock)
        for thread in serving:
            thread.join()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.wait(0.1):  # no descriptors are left, for example
                    logger.warning("a connection for blocks cannot be taken: %s", error.strerror)
                continue
            thread = threading.Thread(target=self._serve, args=(sock,), name="blocks", daemon=True)
            with self._lock:
                has_room = len(self._serving) < MAX_CONNECTIONS and self._num_strangers < MAX_STRANGERS
                if has_room:
                    self._serving[thread] = sock
                    self._num_strangers += 1
            if has_room:
                thread.start()
            else:
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            try:
                connection, _ = self._network.accept(sock)
            finally:
                with self._lock:
                    self._num_strangers -= 1
            while True:
                connection.wait_for_message()
                self._answer(connection, _receive_request(connection))
        except (SessionError, ConnectionEnded, OSError) as error:
            is_attack = isinstance(error, SessionError | NotAuthentic)
            level = logging.WARNING if is_attack and not self._closing.is_set() else logging.INFO
            logger.log(level, "a connection for blocks has ended: %s", error)
        finally:
            with self._lock:
                del self._serving[threading.current_thread()]
            sock.close()

    def _answer(self, connection: BlockConnection, request: _Request) -> None:
        mac = connection.begin_sending()
        refusal = self._refusal(request)
        if refusal:
            connection.end_sending([_ANSWER.pack(_REFUSED, len(refusal)), refusal], mac)
            return
        word = self._load_word(request.slot)
        if word != request.word or not len(request.blocks):
            connection.end_sending([_ANSWER.pack(_WORD_ALONE, 0), _WORD.pack(word)], mac)
            return
        start = _ANSWER.pack(_BYTES, 0)
        first: list[bytes] = [start]
        for batch in batches(block_views(self._pools[request.kind], request.blocks)):
            connection.send([*first, *batch], mac)
            first = []
        # MAC and kernel have taken all bytes: a word that is still valid now was valid for each of them.
        if (word := self._load_word(request.slot)) != request.word:
            mac = _without_bytes(connection.begin_sending(alone=True), start)
        connection.end_sending([_WORD.pack(word)], mac)

    def _refusal(self, request: _Request) -> bytes:
        """The reason why a request cannot be answered; empty if it can."""
        name, pool = self._network.greeting.name, self._pools.get(request.kind)
        if request.life != self._life:
            return f"instance {name} has started again since it offered them".encode()
        if pool is None:
            return f"instance {name} lets nobody read its {request.kind} blocks".encode()
        ids = request.blocks.tolist()
        if ids and (min(ids) < 0 or max(ids) >= len(pool)):
            block = min(ids) if min(ids) < 0 else max(ids)
            return f"instance {name} has {len(pool)} {request.kind} blocks, not block {block}".encode()
        if request.slot >= self._num_words:
            return f"instance {name} has {self._num_words} control words, not word {request.slot}".encode()
        return b""


def _receive_request(connection: BlockConnection) -> _Request:
    mac = connection.begin_receiving()
    life, kind, num_blocks, slot, word = _REQUEST.unpack(connection.receive_bytes(_REQUEST.size, mac))
    if num_blocks > MAX_BLOCKS or kind >= len(_KINDS):
        raise NotAuthentic(f"a request for {num_blocks} blocks of pool {kind} was altered on its way")
    ids, tag = connection.receive_last(4 * num_blocks)
    connection.end_receiving(mac, ids, tag)
    return _Request(life, _KINDS[kind], np.frombuffer(ids, "<i4"), slot, word)


def _without_bytes(mac: Mac | None, start: bytes) -> Mac | None:
    """The other form of the MAC of an answer with bytes, up to its word."""
    if mac is not None:
        mac.update(start)
    return mac


# ---- the target


class TcpRemoteBlocks:
    """`RemoteBlocks` of one source, over a connection that is made at first use and again after a failure."""

    def __init__(self, network: TcpBlocks, peer: str, address: tuple[str, int], life: bytes) -> None:
        self._network = network
        self._peer = peer
        self._address = address
        self._life = life
        self._lock = threading.Lock()  # of the next three
        self._sock: socket.socket | None = None
        self._is_reading = False
        self._closing = threading.Event()
        self._connection: BlockConnection | None = None  # over the socket, after its handshake
        self._pause_s = 0.0
        self._due_s = -math.inf  # when to connect again; a clock may be below zero

    def read(
        self, kind: PoolKind, blocks: BlockIds, target: Rows, target_blocks: BlockIds, slot: int, word: int
    ) -> bool:
        if len(blocks) != len(target_blocks):
            raise ValueError(f"blocks: expected {len(target_blocks)}, got {len(blocks)}")
        with self._lock:
            self._is_reading = True
        try:
            for begin in range(0, max(len(blocks), 1), MAX_BLOCKS):
                end = begin + MAX_BLOCKS
                request = _Request(self._life, kind, blocks[begin:end], slot, word)
                if not self._read(request, block_views(target, target_blocks[begin:end])):
                    return False
            return True
        finally:
            with self._lock:
                self._is_reading = False
                if self._closing.is_set():
                    self._release()

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            if self._sock is not None:
                end_socket(self._sock)
                if not self._is_reading:
                    self._release()

    @property
    def has_ended(self) -> bool:
        """True if there is no connection, or it has ended. For the thread that reads."""
        return self._connection is None or self._connection.is_stale

    def _read(self, request: _Request, views: list[memoryview]) -> bool:
        try:
            connection = self._connected()
            is_valid, refusal = _ask(connection, request, views)
        except (ConnectionEnded, SessionError, OSError) as error:
            reason = "the connection was closed here" if self._closing.is_set() else error
            with self._lock:
                self._release()
            self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LAST_PAUSE_S)
            self._due_s = self._network.clock.now() + self._pause_s
            place = f"{self._address[0]} port {self._address[1]}"
            raise TransferError(f"blocks of instance {self._peer} did not come from {place}: {reason}") from error
        self._pause_s = 0.0
        if refusal:
            raise TransferError(f"blocks of instance {self._peer} did not come: {refusal}")
        return is_valid

    def _connected(self) -> BlockConnection:
        """Returns the connection, a new one if there is none or it has ended at rest. Raises SessionError, OSError."""
        if self._connection is not None and not self.has_ended:
            return self._connection
        self._closing.wait(max(self._due_s - self._network.clock.now(), 0.0))
        family, kind, protocol, _, address = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)[0]
        with self._lock:
            self._release()
            if self._closing.is_set():
                raise ConnectionEnded("it is closed")
            sock = self._sock = socket.socket(family, kind, protocol)
        sock.settimeout(DIAL_S)
        sock.connect(address)
        connection, source = self._network.connect(sock)
        if source.name != self._peer:
            raise ConnectionEnded(f"there is instance {source.name[:40]!r}")
        self._connection = connection
        return connection

    def _release(self) -> None:
        """Closes the socket. With the lock."""
        self._connection = None
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def _ask(connection: BlockConnection, request: _Request, views: list[memoryview]) -> tuple[bool, str]:
    """Sends a request and receives its answer into the views. Returns (True if the word still held, the reason of a
    refusal or nothing). Raises ConnectionEnded."""
    mac = connection.begin_sending()
    kind, ids = _KINDS.index(request.kind), request.blocks.astype("<i4").tobytes()
    start = _REQUEST.pack(request.life, kind, len(request.blocks), request.slot, request.word)
    connection.end_sending([start, ids], mac)
    mac = connection.begin_receiving()
    start = connection.receive_bytes(_ANSWER.size, mac)
    status, num_reason = _ANSWER.unpack(start)
    if status == _REFUSED:
        reason, tag = connection.receive_last(num_reason)
        connection.end_receiving(mac, reason, tag)
        return False, reason.decode("utf-8", "replace")
    for batch in batches(views, last_bytes=LAST_BYTES) if status == _BYTES else ():
        connection.receive(batch, mac)
    end, tag = connection.receive_last(_WORD.size)
    is_valid = _WORD.unpack(end)[0] == request.word
    if status == _BYTES and not is_valid:
        mac = _without_bytes(connection.begin_receiving(alone=True), start)
    connection.end_receiving(mac, end, tag)
    return is_valid and (status == _BYTES or not views), ""
