"""`NixlBlocks`: the engine's `BlockNetwork` over NIXL, which moves bytes by UCX. Not yet tried with RDMA.

A target reads the bytes of blocks from the pools of the source, which both sides have registered with NIXL. All else
goes over the authenticated connections of `TcpBlocks`, which serves the same pools: NIXL's addresses and keys are a
part of the endpoint, and each read ends with a request there that compares the control word, sent after the last byte
has come.

NIXL cannot take back a READ: one that was given up may still write. So bytes land in memory of this module, from which
they are copied. Memory whose READs were given up is kept, and not used, until NIXL says that all of them have ended.
"""

from __future__ import annotations

import base64
import fcntl
import ipaddress
import logging
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hydra_engine.core.plans import BlockIds
from hydra_engine.core.pools import PoolKind
from hydra_engine.core.units import size
from hydra_engine.errors import ConfigError, ResourceError, TransferError
from hydra_engine.transfer.network import RemoteBlocks, Rows
from hydra_nodes.block_connection import block_views
from hydra_nodes.blocks import TcpBlocks, TcpRemoteBlocks

logger = logging.getLogger(__name__)

AREA_BYTES = 1 << 20  # of a READ at most
NUM_AREAS = 8  # READs of one peer at once
MAX_LOST = 8  # landings with READs that have not ended
FIRST_PAUSE_S, LAST_PAUSE_S = 2e-5, 1e-4  # between two looks at a READ
LOOK_S = 0.01  # between two looks at the connection of the source
# NIXL's thread sleeps until something comes, and looks by itself after this time. Its public interface sets 0, which
# keeps a core busy.
WAKE_US = 10_000
# What fails is raised and said by this module. CUDA is named since NIXL refuses a list without it where there are GPUs.
_SETTINGS = {"UCX_HANDLE_ERRORS": "none", "UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}
_TRANSPORTS = {True: "ib,cuda_copy", False: "tcp,cuda_copy"}  # by whether it is RDMA
# Over TCP a source whose target dies would be aborted by UCX 1.23 in the other mode. This module looks at the source.
_ERROR_MODES = {True: "peer", False: "none"}
_INFINIBAND = Path("/sys/class/infiniband")
_GET_ADDRESS, _GET_MASK = 0x8915, 0x891B  # SIOCGIFADDR, SIOCGIFNETMASK
_NO_BLOCKS: BlockIds = np.empty(0, np.int32)


class _Offer(msgspec.Struct, frozen=True):
    """The part of an endpoint that is NIXL's. `pools`: address, number of blocks and bytes of a block. `rdma`: UCX has
    RDMA alone, else TCP alone."""

    agent: str
    metadata: bytes
    pools: dict[int, tuple[int, int, int]]
    num_words: int
    rdma: bool


def choose_network(tcp: TcpBlocks, host: str, *, asked: bool) -> TcpBlocks | NixlBlocks:
    """Returns NIXL above `tcp` where it was `asked` for or is installed on a node with RDMA, else `tcp`."""
    return NixlBlocks(tcp, host) if asked or (active_ports() and installed_version()) else tcp


def installed_version() -> str:
    """Returns NIXL's version, "" if it is not installed."""
    try:
        return metadata.version("nixl")
    except metadata.PackageNotFoundError:
        return ""


def active_ports(folder: Path = _INFINIBAND) -> list[str]:
    """Returns the RDMA ports of this node that are up, as UCX calls them."""
    states = sorted(folder.glob("*/ports/*/state"))
    return [f"{path.parts[-4]}:{path.parts[-2]}" for path in states if "ACTIVE" in path.read_text()]


def interface_of(host: str) -> str:
    """Returns the network interface in whose network the address is, "" if there is none."""
    address = ipaddress.ip_address(host)
    if address.version == 6:
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        return next((row[5] for row in rows if int(row[0], 16) == int(address)), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                own, mask = (
                    socket.inet_ntoa(fcntl.ioctl(sock, number, request)[20:24]) for number in (_GET_ADDRESS, _GET_MASK)
                )
            except OSError:  # it has no IPv4 address
                continue
            if address in ipaddress.ip_interface(f"{own}/{mask}").network:
                return name
    return ""


class NixlBlocks:
    """A `BlockNetwork` over NIXL where source and target have the same of RDMA and TCP below it, else over `tcp`.
    `host`: as of `tcp`. `ports`: RDMA ports to use; [] for TCP."""

    registers_pools = True

    def __init__(self, tcp: TcpBlocks, host: str, ports: Sequence[str] | None = None) -> None:
        self.tcp = tcp
        self._host = host
        self._ports = active_ports() if ports is None else ports
        self._lock = threading.Lock()  # of all below
        self._agent: Agent | None = None
        self._lost: list[Landing] = []
        self._had_room = True

    def serve(self, pools: Mapping[PoolKind, Rows], load_word: Callable[[int], int], num_words: int) -> str:
        """Raises ConfigError, too, if NIXL is not installed."""
        agent = self.agent
        if not self._ports:
            logger.warning("NIXL moves blocks over TCP, as no RDMA port is up; --transfer-backend tcp is faster")
        try:
            for rows in pools.values():
                agent.register(rows)
        except NixlFailed as error:
            raise ResourceError(f"node {self.tcp.greeting.node!r} cannot serve blocks over NIXL: {error}") from error
        described = {
            _KINDS.index(kind): (rows.ctypes.data, len(rows), rows.shape[1])
            for kind, rows in pools.items()
            if rows.size
        }
        offer = _Offer(agent.name, agent.metadata(), described, num_words, bool(self._ports))
        encoded = base64.urlsafe_b64encode(msgspec.msgpack.encode(offer)).decode()
        return f"{self.tcp.serve(pools, load_word, num_words)}/{encoded}"

    def open(self, peer: str, endpoint: str) -> RemoteBlocks:
        tcp = self.tcp.open(peer, endpoint)
        described = endpoint.split("/")[2:]
        if not described:
            return tcp
        try:
            offer = msgspec.msgpack.decode(base64.urlsafe_b64decode(described[0]), type=_Offer)
        except (ValueError, msgspec.DecodeError) as error:
            raise TransferError(
                f"instance {peer} serves its blocks over NIXL at {described[0][:80]!r}, which is no address"
            ) from error
        return _NixlRemoteBlocks(self, peer, tcp, offer) if offer.rdma == bool(self._ports) else tcp

    def close(self) -> None:
        self.tcp.close()
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is not None:
                agent.close()
            self._lost.clear()

    # ---- for the peers that are open

    @property
    def agent(self) -> Agent:
        with self._lock:
            if self._agent is None:
                node, has_rdma = self.tcp.greeting.node, bool(self._ports)
                self._agent = Agent(node, self._ports or [_required_interface(node, self._host)], has_rdma=has_rdma)
            return self._agent

    def has_room(self) -> bool:
        """Frees memory whose READs have ended since they were given up. Returns False if too much is left."""
        with self._lock:
            agent = self._agent
            for landing in list(self._lost):
                if agent is not None and landing.has_ended(agent):
                    self._lost.remove(landing)
                    landing.release(agent)
                    if landing.is_cut_off:  # else NIXL would not connect again
                        agent.unload(landing.peer)
            has_room = len(self._lost) < MAX_LOST
            if self._had_room and not has_room:
                logger.warning("too many reads over NIXL have not ended: blocks come over TCP until they have")
            self._had_room = has_room
            return has_room

    def free(self, landing: Landing) -> None:
        with self._lock:
            if self._agent is not None:
                landing.release(self._agent)

    def lose(self, landing: Landing) -> None:
        """Keeps memory until its READs have ended."""
        with self._lock:
            self._lost.append(landing)


def _required_interface(node: str, host: str) -> str:
    found = interface_of(host)
    if not found:
        raise ResourceError(f"node {node!r} has no network interface with the address {host}, which NIXL needs")
    return found


class NixlFailed(Exception):
    """A READ has failed or was given up; the message says why. `has_ended`: it writes nothing any more."""

    has_ended = False


class Agent:
    """NIXL's agent of an instance, and the memory that it knows. Any thread may call it."""

    def __init__(self, node: str, devices: Sequence[str], *, has_rdma: bool) -> None:
        """`devices`: RDMA ports or network interfaces; UCX listens on no other. Raises ConfigError if NIXL is not
        installed, ResourceError if it cannot be used."""
        chosen = {"UCX_TLS": _TRANSPORTS[has_rdma], "UCX_NET_DEVICES": ",".join(devices)}
        for name, value in (_SETTINGS | chosen).items():
            os.environ.setdefault(name, value)
        try:
            self._bindings: Any = import_module("nixl")._bindings
        except ImportError as error:
            raise ConfigError(
                f"node {node} cannot use NIXL, which --transfer-backend nixl needs ({error}); install it there with "
                "`pip install 'nixl>=1.5,<2'`, or leave the option out",
                param="transfer_backend",
            ) from error
        bindings = self._bindings
        self._errors = tuple(found for name in dir(bindings) if _is_error(found := getattr(bindings, name)))
        config = bindings.nixlAgentConfig()
        config.useProgThread, config.useListenThread = True, False
        config.syncMode, config.pthrDelay = bindings.NIXL_THREAD_SYNC_STRICT, WAKE_US
        self.name = f"{node}-{os.urandom(8).hex()}"
        self._memory: list[Any] = []
        try:
            self._agent: Any = bindings.nixlAgent(self.name, config)
            self._backend = self._agent.createBackend("UCX", {"ucx_error_handling_mode": _ERROR_MODES[has_rdma]})
        except self._errors as error:
            raise ResourceError(f"node {node} cannot use {', '.join(devices)} over NIXL ({error})") from error

    def close(self) -> None:
        """Ends the agent: nothing is read or written any more. Called once, last."""
        self._agent = None
        self._memory.clear()

    def register(self, rows: Rows) -> None:
        """Lets peers that know the metadata read the memory, and READs write it. Keeps it. Raises NixlFailed."""
        try:
            self._agent.registerMem(self._regions(rows), [self._backend])
        except self._errors as error:
            raise NixlFailed(f"{size(rows.nbytes)} of memory cannot be registered ({error})") from error
        self._memory.append(rows)

    def deregister(self, rows: Rows) -> None:
        self._agent.deregisterMem(self._regions(rows), [self._backend])
        self._memory = [kept for kept in self._memory if kept is not rows]

    def _regions(self, rows: Rows) -> Any:
        bindings = self._bindings
        return bindings.nixlRegDList(bindings.DRAM_SEG, [(rows.ctypes.data, rows.nbytes, 0, "")])

    def metadata(self) -> bytes:
        found: bytes = self._agent.getLocalMD()
        return found

    def load(self, metadata: bytes) -> None:
        """Makes another agent known, which may be known already. Raises NixlFailed."""
        try:
            self._agent.loadRemoteMD(metadata)
        except self._errors as error:
            raise NixlFailed(str(error)) from error

    def unload(self, name: str) -> None:
        try:
            self._agent.invalidateRemoteMD(name)
        except self._errors as error:
            logger.info("NIXL does not forget a peer: %s", error)

    def begin_read(self, name: str, near: Sequence[tuple[int, int]], far: Sequence[tuple[int, int]]) -> int:
        """Starts a READ of the peer's bytes, given by addresses and sizes. Returns its handle. Raises NixlFailed."""
        here, there = (self._descriptors(regions) for regions in (near, far))
        try:
            read = self._bindings.NIXL_READ
            handle: int = self._agent.createXferReq(read, here, there, name, b"", [self._backend])
            self._agent.postXferReq(handle, b"")
        except self._errors as error:
            raise NixlFailed(str(error)) from error
        return handle

    def _descriptors(self, regions: Sequence[tuple[int, int]]) -> Any:
        rows = np.zeros((len(regions), 3), np.uint64)
        rows[:, :2] = np.array(regions, np.uint64)
        return self._bindings.nixlXferDList(self._bindings.DRAM_SEG, rows)

    def is_done(self, handle: int) -> bool:
        """True if a READ has ended. Raises NixlFailed if it has failed."""
        try:
            status = self._agent.getXferStatus(handle)
        except self._errors as error:
            failed = NixlFailed(str(error))
            failed.has_ended = isinstance(error, self._bindings.nixlRemoteDisconnectError)
            raise failed from error
        if status == self._bindings.NIXL_IN_PROG:
            return False
        if status != self._bindings.NIXL_SUCCESS:
            raise NixlFailed(f"NIXL says {status}")
        return True

    def release(self, handle: int) -> None:
        """Forgets a READ that has ended."""
        try:
            self._agent.releaseXferReq(handle)
        except self._errors as error:
            logger.info("NIXL does not forget a read: %s", error)


def _is_error(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, Exception)


class Landing:
    """Memory into which READs of one peer write: areas that are filled in turn. `peer`: its agent. `reads`: handles of
    those whose bytes have not been taken, in order, and the bytes."""

    def __init__(self, agent: Agent, peer: str) -> None:
        """Raises NixlFailed."""
        self.peer = peer
        self.is_cut_off = False  # found by `has_ended`
        self._memory = np.empty((NUM_AREAS, AREA_BYTES), np.uint8)
        agent.register(self._memory)
        self.reads: deque[tuple[int, memoryview]] = deque()
        self._next = 0

    def begin(self, agent: Agent, regions: Sequence[tuple[int, int]]) -> None:
        """Starts to read regions of the peer, at most `AREA_BYTES`, while fewer than `NUM_AREAS` READs are there.
        Raises NixlFailed."""
        area = self._memory[self._next]
        self._next = (self._next + 1) % NUM_AREAS
        near, end = [], area.ctypes.data
        for _, num_bytes in regions:
            near.append((end, num_bytes))
            end += num_bytes
        handle = agent.begin_read(self.peer, near, regions)
        self.reads.append((handle, area.data[: end - area.ctypes.data]))

    def has_ended(self, agent: Agent) -> bool:
        """True if no READ writes here any more."""
        for handle, _ in self.reads:
            try:
                if not agent.is_done(handle):
                    return False
            except NixlFailed as error:
                if not error.has_ended:
                    return False
                self.is_cut_off = True
        return True

    def release(self, agent: Agent) -> None:
        while self.reads:
            agent.release(self.reads.popleft()[0])
        agent.deregister(self._memory)


class _NixlRemoteBlocks:
    """`RemoteBlocks` of one source. `tcp`: its pools over TCP, which this closes."""

    def __init__(self, network: NixlBlocks, peer: str, tcp: TcpRemoteBlocks, offer: _Offer) -> None:
        self._network = network
        self._peer = peer
        self._tcp = tcp
        self._offer = offer
        self._lock = threading.Lock()  # of the next
        self._is_reading = False
        self._closing = threading.Event()
        self._landing: Landing | None = None  # with the peer's agent loaded

    def read(
        self, kind: PoolKind, blocks: BlockIds, target: Rows, target_blocks: BlockIds, slot: int, word: int
    ) -> bool:
        views = block_views(target, target_blocks)
        with self._lock:
            self._is_reading = True
        try:
            if (
                not len(blocks)
                or not self._can_be_read(kind, blocks, target_blocks, slot)
                or not self._network.has_room()
            ):
                return self._tcp.read(kind, blocks, target, target_blocks, slot, word)
            still_holds = partial(self._tcp.read, kind, _NO_BLOCKS, target, _NO_BLOCKS, slot, word)
            # A source that has started again says so before its memory is read.
            if (self._tcp.has_ended or self._landing is None) and not still_holds():
                return False
            self._read_bytes(kind, blocks, views)
            return still_holds()
        finally:
            with self._lock:
                self._is_reading = False
                if self._closing.is_set():
                    self._release()

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            self._tcp.close()
            if not self._is_reading:
                self._release()

    def _can_be_read(self, kind: PoolKind, blocks: BlockIds, target_blocks: BlockIds, slot: int) -> bool:
        """False for a request that the source refuses, with its own sentence."""
        _, num_blocks, _ = self._offer.pools.get(_KINDS.index(kind), (0, 0, 0))
        are_there = len(blocks) == len(target_blocks) and 0 <= int(blocks.min()) <= int(blocks.max()) < num_blocks
        return are_there and 0 <= slot < self._offer.num_words

    def _read_bytes(self, kind: PoolKind, blocks: BlockIds, views: list[memoryview]) -> None:
        start, _, block_bytes = self._offer.pools[_KINDS.index(kind)]
        try:
            agent = self._network.agent
            if self._landing is None:
                self._landing = Landing(agent, self._offer.agent)
                agent.load(self._offer.metadata)
            waiting = deque(views)
            for regions in pieces(runs(blocks, start, block_bytes), AREA_BYTES):
                if len(self._landing.reads) == NUM_AREAS:
                    self._take(agent, self._landing, waiting)
                self._landing.begin(agent, regions)
            while self._landing.reads:
                self._take(agent, self._landing, waiting)
        except NixlFailed as error:
            self._give_up()
            reason = "the connection was closed here" if self._closing.is_set() else error
            raise TransferError(f"blocks of instance {self._peer} did not come over NIXL: {reason}") from error

    def _take(self, agent: Agent, landing: Landing, waiting: deque[memoryview]) -> None:
        """Waits for the earliest READ and copies its bytes to the targets."""
        handle, data = landing.reads[0]
        clock, patience_s = self._network.tcp.clock, self._network.tcp.patience_s
        looked_s = begun_s = clock.now()
        pause_s = FIRST_PAUSE_S
        while not agent.is_done(handle):
            if self._closing.wait(pause_s):
                raise NixlFailed("the connection was closed here")
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
            now = clock.now()
            if now - begun_s > patience_s:
                raise NixlFailed(f"nothing has moved for {patience_s:g} s")
            if now - looked_s > LOOK_S:
                if self._tcp.has_ended:
                    raise NixlFailed("the connection ended")
                looked_s = now
        landing.reads.popleft()
        agent.release(handle)
        scatter(data, waiting)

    def _give_up(self) -> None:
        """Leaves the READs to end by themselves; the next `read` begins anew."""
        landing, self._landing = self._landing, None
        if landing is not None:
            self._network.lose(landing)

    def _release(self) -> None:
        landing, self._landing = self._landing, None
        if landing is not None:
            self._network.free(landing)


_KINDS = tuple(PoolKind)


def runs(blocks: BlockIds, start: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields addresses and sizes of the blocks of a pool, in order; blocks that follow each other are one."""
    ids = blocks.tolist()
    begin = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or ids[end] != ids[end - 1] + 1:
            yield start + ids[begin] * block_bytes, (end - begin) * block_bytes
            begin = end


def pieces(regions: Iterator[tuple[int, int]], max_bytes: int) -> Iterator[list[tuple[int, int]]]:
    """Cuts regions into lists of at most `max_bytes`, in order."""
    piece: list[tuple[int, int]] = []
    left = max_bytes
    for address, num_bytes in regions:
        while num_bytes:
            part = min(num_bytes, left)
            piece.append((address, part))
            address, num_bytes, left = address + part, num_bytes - part, left - part
            if not left:
                yield piece
                piece, left = [], max_bytes
    if piece:
        yield piece


def scatter(data: memoryview, waiting: deque[memoryview]) -> None:
    """Copies bytes into the views, in order, and removes what is filled."""
    while data:
        view = waiting.popleft()
        part = min(len(view), len(data))
        view[:part] = data[:part]
        data = data[part:]
        if part < len(view):
            waiting.appendleft(view[part:])
