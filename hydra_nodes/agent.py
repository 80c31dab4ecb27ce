"""The agent on a node for one instance of a topology: starts its process with a connection to the frontend, hands it
connections to other instances, ends it.

Asyncio, called from the frontend's process by whatever reaches nodes, such as Ray. No byte of a request passes through:
the process gets the connected sockets themselves. Who connects for an instance shows a ticket first, which the launcher
has given to both agents, so that nobody else takes the place of a peer; what follows is authenticated by the instances.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from hydra_engine.cluster import channel
from hydra_engine.cluster.children import remove_openmp_page
from hydra_engine.cluster.spawn import start_python
from hydra_engine.config import SECRET_VARIABLES
from hydra_engine.core.processes import launch
from hydra_engine.core.processes.preloaded import Process
from hydra_engine.core.units import describe_exit
from hydra_engine.errors import ConfigError
from hydra_nodes.tls import TlsFiles

COMMAND = launch.command("hydra_nodes.process")
CONNECT_S = 5.0  # for a connection to the frontend or to another instance
TICKET_BYTES = 16
TICKET_S = 0.5  # for who has connected to show it
_SECRETS = (*SECRET_VARIABLES, "RAY_AUTH_TOKEN")

Address = tuple[str, int]  # host and port; port 0: an abstract Unix socket of this name, on the same node


class AgentError(Exception):
    """The agent cannot do what it was asked for; the message says why, as the end of a sentence that begins with the
    instance's name."""


class _Life:
    """An incarnation of the instance."""

    def __init__(self, process: Process, control: socket.socket) -> None:
        self.process = process
        self.control = control
        self.exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._handle = os.pidfd_open(process.pid)
        asyncio.get_running_loop().add_reader(self._handle, self._reap)

    def _reap(self) -> None:
        code = self.process.poll()
        if code is not None:
            asyncio.get_running_loop().remove_reader(self._handle)
            os.close(self._handle)
            self.control.close()
            remove_openmp_page(self.process.pid)
            self.exited.set_result(describe_exit(code))


class NodeAgent:
    """The agent of an instance. It runs on one loop, in a thread that lives as long as the processes that it starts:
    the kernel ends them with it. `host`: the address of its node."""

    def __init__(self, node: str, command: Sequence[str] = COMMAND, host: str = "127.0.0.1") -> None:
        self._node = node
        self._host = host
        self._command = command
        self._lives: dict[int, _Life] = {}  # by incarnation; the latest alone may be alive
        self._accepting: set[asyncio.Task[None]] = set()

    async def host(self) -> str:
        return self._host

    async def start(self, name: str, incarnation: int, frontend: Address, order: bytes) -> None:
        """Starts the process of an incarnation, connected with the frontend; `order` is the first datagram of its
        control socket. An earlier one is killed first. Raises AgentError."""
        await self.end()
        try:
            sock = await _connect(frontend)
        except (OSError, TimeoutError) as error:
            host, port = frontend
            raise AgentError(
                f"cannot be started: node {self._node} does not reach the frontend at {host}:{port} ({_why(error)})"
            ) from error
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        with sock, theirs:
            try:
                control.send(order)
                process = start_python([*self._command, "--name", name], sock, theirs, hidden=_SECRETS)
            except OSError as error:
                control.close()
                raise AgentError(f"cannot be started on node {self._node}: {error.strerror}") from error
        self._lives = {incarnation: _Life(process, control)}

    async def wait(self, incarnation: int) -> str:
        """Waits for the end of the process. Returns how it ended, as the end of a sentence that begins with its
        name."""
        life = self._lives.get(incarnation)
        return "ended with what watched it on its node" if life is None else await asyncio.shield(life.exited)

    async def kill(self, incarnation: int) -> None:
        if (life := self._lives.get(incarnation)) is not None:
            with contextlib.suppress(ProcessLookupError):
                life.process.kill()

    async def end(self) -> None:
        """Kills the process, if there is one, and waits for its end."""
        for task in list(self._accepting):
            task.cancel()
        for incarnation, life in self._lives.items():
            await self.kill(incarnation)
            await life.exited

    async def listen(self, incarnation: int, peer: str, peer_incarnation: int, ticket: bytes, host: str) -> Address:
        """Opens a socket for a peer of the process; `host`: "" for one on this node. Returns its address at once. Who
        shows the ticket within `CONNECT_S` is handed over to the process. Raises AgentError."""
        life = self._life(incarnation)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET if host else socket.AF_UNIX
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setblocking(False)
        try:
            name = f"hydra-engine-{secrets.token_hex(8)}"
            listener.bind((host, 0) if host else f"\0{name}")
            listener.listen()
            address = (host, listener.getsockname()[1]) if host else (name, 0)
        except OSError as error:
            listener.close()
            raise AgentError(f"cannot listen on node {self._node}: {error.strerror}") from error
        task = asyncio.create_task(_accept(listener, life, channel.Connect(peer, peer_incarnation), ticket))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)
        return address

    async def dial(self, incarnation: int, peer: str, peer_incarnation: int, ticket: bytes, address: Address) -> None:
        """Connects the process with a peer whose agent listens. Raises AgentError."""
        life = self._life(incarnation)
        try:
            with await _connect(address) as sock:
                await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(sock, ticket), CONNECT_S)
                _hand_over(life, channel.Connect(peer, peer_incarnation), sock)
        except (OSError, TimeoutError) as error:
            raise AgentError(f"node {self._node} does not reach instance {peer} ({_why(error)})") from error

    async def find_tls_problem(self, folder: str) -> str:
        """Returns what is wrong with the certificates of this node, "" if nothing is."""
        try:
            TlsFiles(Path(folder))
        except ConfigError as error:
            return error.message
        return ""

    def _life(self, incarnation: int) -> _Life:
        life = self._lives.get(incarnation)
        if life is None or life.exited.done():
            raise AgentError(f"has ended on node {self._node}")
        return life


async def _accept(listener: socket.socket, life: _Life, peer: channel.Connect, ticket: bytes) -> None:
    """Hands over the first connection that shows the ticket. Without one, the supervisor tries again."""
    with listener, contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(CONNECT_S):
            while True:
                sock, _ = await asyncio.get_running_loop().sock_accept(listener)
                with sock:
                    if await _shows_ticket(sock, ticket):
                        _hand_over(life, peer, sock)
                        return


async def _shows_ticket(sock: socket.socket, ticket: bytes) -> bool:
    shown = b""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(TICKET_S):
            while len(shown) < len(ticket):
                data = await asyncio.get_running_loop().sock_recv(sock, len(ticket) - len(shown))
                if not data:
                    break
                shown += data
    return hmac.compare_digest(shown, ticket)


def _hand_over(life: _Life, peer: channel.Connect, sock: socket.socket) -> None:
    """Raises OSError."""
    if not life.exited.done():
        channel.send_with(life.control, channel.encode_connect(peer), [sock.fileno()])


async def _connect(address: Address) -> socket.socket:
    """Raises OSError or TimeoutError."""
    host, port = address
    network = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(network if port else socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if port:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().sock_connect(sock, address if port else f"\0{host}")
    except BaseException:
        sock.close()
        raise
    return sock


def _why(error: OSError | TimeoutError) -> str:
    return os.strerror(error.errno) if error.errno else f"no answer within {CONNECT_S:g} s"
