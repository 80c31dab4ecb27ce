"""The fetch child, `launch.command(THIS) FD`: fetches pictures and videos from their hosts, many at once.

Hosts' answers are read only here, so they cost this process time and not the server's event loop. The parent decides
which addresses may be dialled, for every hop of a redirect. Does not know names or clients.
"""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import ssl
import sys
from functools import partial

import h11
import msgspec

from hydra_engine.core.processes.launch import bind_to_parent
from hydra_engine.preprocess.sandbox.bounded_http import PIECE_BYTES, Failed, Get, get
from hydra_engine.preprocess.sandbox.child_loop import limit
from hydra_engine.preprocess.sandbox.containment import forbid_calls, give_up_privileges

MAX_MESSAGE_BYTES = PIECE_BYTES + 4096  # no message in either direction is longer
MEMORY_BYTES = 1 << 30  # of address space

# Raised by a hostile host: errors of the socket and TLS, which are OSErrors, and of HTTP.
_FETCH_ERRORS = (OSError, h11.ProtocolError, ValueError)


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """The start of a fetch under a new `number`; pieces and an end answer it."""

    number: int
    get: Get


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """The request to end a fetch whose caller has gone."""

    number: int


class Piece(msgspec.Struct, frozen=True, array_like=True, tag="piece"):
    number: int
    data: bytes


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """The end of a fetch: the body is complete (no field set), `location` must be fetched instead, or it failed: `why`
    is "connection", "wasteful", "status" (see `status`), "compressed", "large" or "stopped"."""

    number: int
    location: str | None = None
    why: str | None = None
    status: int = 0


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The child takes requests now. `uncontained`: why system calls are not forbidden to it."""

    uncontained: str | None = None


ToChild = Ask | Stop
FromChild = Piece | Ended | Ready


def main() -> None:
    bind_to_parent()
    give_up_privileges()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # draining is the parent's business; its end closes the socket
    for what, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_AS, MEMORY_BYTES)):
        limit(what, most)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        context = client_context()
        uncontained = forbid_calls(network=True)
        asyncio.run(serve(connection, context, Ready(uncontained=uncontained)))


def client_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


async def serve(connection: socket.socket, context: ssl.SSLContext, ready: Ready) -> None:
    """Serves until the parent has gone. `connection` preserves message boundaries. An invalid message ends the
    process."""
    connection.setblocking(False)
    loop, decoder, sending = asyncio.get_running_loop(), msgspec.msgpack.Decoder(ToChild), asyncio.Lock()
    tasks: dict[int, asyncio.Task[None]] = {}

    async def send(message: FromChild) -> None:
        async with sending:
            await loop.sock_sendall(connection, msgspec.msgpack.encode(message))

    async def answer(ask: Ask) -> None:
        async def hand_over(data: bytes) -> None:
            await send(Piece(ask.number, data))

        try:
            ended = Ended(ask.number, await get(ask.get, context, hand_over))
        except Failed as error:
            ended = Ended(ask.number, why=error.why, status=error.status)
        except _FETCH_ERRORS:
            ended = Ended(ask.number, why="connection")
        await send(ended)

    async with asyncio.TaskGroup() as group:

        def on_done(number: int, task: asyncio.Task[None]) -> None:
            tasks.pop(number)
            if task.cancelled() and not connection_ended:
                group.create_task(send(Ended(number, why="stopped")))

        connection_ended = False
        await send(ready)
        try:
            while data := await loop.sock_recv(connection, MAX_MESSAGE_BYTES):
                message = decoder.decode(data)
                if isinstance(message, Ask):
                    task = tasks[message.number] = group.create_task(answer(message))
                    task.add_done_callback(partial(on_done, message.number))
                elif message.number in tasks:
                    tasks[message.number].cancel()
        finally:
            connection_ended = True
        for task in tasks.values():
            task.cancel()


if __name__ == "__main__":
    main()
