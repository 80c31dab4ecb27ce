"""Connections beyond what there is room for: idle ones make room, probes of health always get through, and a server
without descriptors waits quietly."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import AsyncIterator

import pytest

from hydra_engine.server import state
from hydra_engine.server.http import listening
from hydra_engine.server.http.listening import Acceptor
from hydra_engine.server.state import PLACES, Places, max_connections
from tests.server.conftest import Serve, Served, until

PROBE = b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n"
BUSY = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
)

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def small(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Served:
    """A server with eight places and two spare ones."""
    monkeypatch.setattr(state, "MAX_CONNECTIONS", 8)
    return await serve()


@pytest.fixture
async def pairs() -> AsyncIterator[list[Pair]]:
    opened: list[Pair] = []
    yield opened
    for _, writer in opened:
        writer.transport.abort()


async def open_some(served: Served, pairs: list[Pair], count: int, data: bytes = b"") -> list[Pair]:
    added = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(data)
        added.append((reader, writer))
    pairs += added
    return added


async def status_of(served: Served, raw: bytes) -> int:
    """0: the connection was closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(raw)
    try:
        answer = await asyncio.wait_for(reader.read(100), 20)
    except ConnectionError:
        answer = b""
    writer.transport.abort()
    return int(answer.split()[1]) if answer else 0


async def is_closed(pair: Pair) -> bool:
    try:
        return await asyncio.wait_for(pair[0].read(1), 0.2) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize("sent", [b"", b"GET / HT", PROBE], ids=["silent", "half a line", "kept alive"])
async def test_the_longest_idle_make_room(small: Served, pairs: list[Pair], sent: bytes) -> None:
    idle = await open_some(small, pairs, 8, sent)
    if sent == PROBE:
        for reader, _ in idle:
            await reader.readuntil(b"}")
    await until(lambda: len(small.app[PLACES]._open) == 8)
    assert [await status_of(small, PROBE) for _ in range(3)] == [200] * 3
    await until(lambda: len(small.app[PLACES]._open) <= 7)
    assert await is_closed(idle[0]) and not await is_closed(idle[-1])


async def test_busy_ones_are_left_alone_and_probes_get_through(
    small: Served, pairs: list[Pair], caplog: pytest.LogCaptureFixture
) -> None:
    busy = await open_some(small, pairs, 8, BUSY)
    await until(lambda: not small.app[PLACES]._idle)
    for _ in range(5):
        assert [await status_of(small, PROBE), await status_of(small, PROBE.replace(b"livez", b"health"))] == [200] * 2
        assert await status_of(small, PROBE.replace(b"livez", b"v1/models")) == 503
        assert await status_of(small, BUSY) == 503
    assert not any([await is_closed(pair) for pair in busy[:3]])
    assert sum("8 connections are open" in record.getMessage() for record in caplog.records) == 1
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    busy[0][1].write(b" " * 99)
    await until(lambda: len(small.app[PLACES]._idle) == 1)
    assert await status_of(small, PROBE.replace(b"livez", b"v1/models")) == 200, "the one that is idle makes room"


async def test_spare_places_are_few(small: Served, pairs: list[Pair]) -> None:
    await open_some(small, pairs, 8, BUSY)
    await until(lambda: not small.app[PLACES]._idle)
    spare = await open_some(small, pairs, 6)
    await until(lambda: len(small.app[PLACES]._open) <= 10)
    assert await status_of(small, PROBE) == 200
    assert len(small.app[PLACES]._open) <= 10 and await is_closed(spare[0])


class Occupant:
    def __init__(self) -> None:
        self.has_left = False

    def close_at_once(self) -> None:
        self.has_left = True


def test_places_are_counted_whatever_happens() -> None:
    places = Places(4)
    occupants = [Occupant() for _ in range(6)]
    for occupant in occupants[:4]:
        places.add(occupant)
        places.mark_busy(occupant)
    places.add(occupants[4])
    places.add(occupants[5])
    assert places.is_spare(occupants[5]) and occupants[4].has_left, (
        "the spare one that was idle makes room for the next"
    )
    places.mark_idle(occupants[2])
    assert places.close_idle(9) == 2 and occupants[2].has_left and occupants[5].has_left
    places.mark_idle(occupants[2])  # its answer ends while it is being closed
    for occupant in occupants:
        places.discard(occupant)
    assert not places._open and not places._idle and not places._spare


class NoDescriptors:
    """A listening socket whose `accept` fails so many times."""

    def __init__(self, sock: socket.socket, error: int, times: int) -> None:
        self._sock, self._error, self.left, self.num_failed = sock, error, times, 0

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> tuple[socket.socket, object]:
        if self.left:
            self.left -= 1
            self.num_failed += 1
            raise OSError(self._error, "Too many open files")
        return self._sock.accept()

    def close(self) -> None:
        self._sock.close()


@pytest.mark.parametrize("error", [errno.EMFILE, errno.ENFILE])
async def test_without_descriptors_it_waits_and_says_so_once(
    error: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "_WAIT_S", 0.001)
    places, idle, made = Places(8), Occupant(), asyncio.Event()

    class Made(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.set()
            transport.close()

    places.add(idle)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.setblocking(False)
        failing = NoDescriptors(sock, error, 30)
        acceptor = Acceptor([failing], Made, places)  # type: ignore[list-item]
        acceptor.start()
        _, writer = await asyncio.open_connection(*sock.getsockname())
        await asyncio.wait_for(made.wait(), 20)
        writer.close()
        acceptor.close()
    assert failing.num_failed == 30 and idle.has_left, "idle ones make room for descriptors too"
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["new connections wait: too many open files; idle ones are closed to make room"]


@pytest.mark.parametrize(
    ("limit", "most"),
    [(16, 5), (64, 21), (300, 100), (1024, 768), (4352, 4096), (1 << 20, 4096), (resource.RLIM_INFINITY, 4096)],
)
def test_descriptors_are_kept_for_others(monkeypatch: pytest.MonkeyPatch, limit: int, most: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert max_connections() == most
