"""Hosts, names and neighbours that would take more than their share of the fetcher."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from hydra_engine.config import MediaConfig
from hydra_engine.core.fairness import ByteBudget
from hydra_engine.errors import EngineClosed, InvalidRequest, MediaFetchFailed, MediaForbidden, Unavailable
from hydra_engine.preprocess.media import fetch
from hydra_engine.preprocess.media.fetch import MediaFetcher
from hydra_engine.preprocess.media.sources import RemoteFile, classify
from hydra_engine.preprocess.sandbox import fetch_process
from hydra_engine.preprocess.sandbox.fetch_child import Piece
from tests.preprocess.conftest import CERTIFICATE

CONFIG = MediaConfig(allow_private_media=True)
HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = bytes(range(256)) * 1200  # five pieces

Write = Callable[[bytes], Awaitable[None]]
Answer = Callable[[Write], Awaitable[None]]


@asynccontextmanager
async def host(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Serves `answer` on a local port, which it yields; every write is a TCP segment."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def write(data: bytes) -> None:
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0)

        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), closing(writer):
            await reader.readuntil(b"\r\n\r\n")
            await answer(write)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def by_number(name: str, port: int) -> list[str]:
    return ["127.0.0.1"]


def remote(url: str, config: MediaConfig = CONFIG) -> RemoteFile:
    source = classify(url, config)
    assert isinstance(source, RemoteFile)
    return source


async def get(url: str, config: MediaConfig = CONFIG) -> bytes:
    with closing(MediaFetcher(config, by_number)) as fetcher:
        return await fetcher.fetch(remote(url, config), ByteBudget(1 << 30).lease())


def pieces(head: bytes, piece: bytes, at_once: int = 1, number: int = 1 << 30) -> Answer:
    async def answer(write: Write) -> None:
        await write(head)
        for _ in range(0, number, at_once):
            await write(piece * at_once)

    return answer


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%s\r\n%s\r\n" % (len(data), extension, data)


# ---- an answer costs so much for each byte that it brings

ENDLESS = {
    "chunks": pieces(CHUNKED, chunk(b"x"), 1000),
    "interim answers": pieces(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 100),
    "hints": pieces(b"", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n", 100),
    "extensions": pieces(CHUNKED, chunk(b"x", b";" + b"a=b;" * 1000), 10),
    "segments of chunks": pieces(CHUNKED, chunk(b"x")),
    "headers": pieces(HEAD, b"a: b\r\n", 1000),
    "a header": pieces(HEAD + b"a: ", b"x" * 1000, 10),
    "an extension": pieces(CHUNKED + b"1;", b"a=b;" * 1000, 10),
    "trailers": pieces(CHUNKED + b"0\r\n", b"a: b\r\n", 1000),
    "segments of a header": pieces(HEAD + b"a: ", b"x"),
    "empty lines": pieces(b"", b"\r\n", 1000),
}
WASTEFUL = ("chunks", "interim answers", "hints", "extensions", "segments of chunks")


@pytest.mark.usefixtures("fetch_child_here")
@pytest.mark.parametrize("name", ENDLESS)
async def test_an_answer_that_brings_little_for_what_it_costs_is_given_up(name: str) -> None:
    async with host(ENDLESS[name]) as port:
        with pytest.raises(MediaFetchFailed, match="too many pieces" if name in WASTEFUL else "pieces|connection"):
            await get(f"http://127.0.0.1:{port}/", MediaConfig(allow_private_media=True, fetch_timeout_s=100))


def chunked(size: int) -> Answer:
    parts = [BODY[at : at + size] for at in range(0, len(BODY), size)]

    async def answer(write: Write) -> None:
        await write(CHUNKED)
        for part in parts:
            await write(chunk(part))
        await write(b"0\r\nServer-Timing: a\r\n\r\n")

    return answer


def segmented(size: int) -> Answer:
    async def answer(write: Write) -> None:
        await write(HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY))
        for at in range(0, len(BODY), size):
            await write(BODY[at : at + size])

    return answer


PLAIN = {
    "small chunks, each a segment": chunked(512),
    "small segments": segmented(536),
    "large chunks": chunked(100_000),
    "until the end": pieces(HEAD + b"\r\n" + BODY, b"", number=0),
    "HTTP/1.0": pieces(b"HTTP/1.0 200 OK\r\n\r\n" + BODY, b"", number=0),
    "hints before": pieces(
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 3 + HEAD + b"\r\n" + BODY, b"", number=0
    ),
    "many headers": pieces(HEAD + b"Set-Cookie: a=bbbbbbbbbbbbbbbbbbb\r\n" * 100 + b"\r\n" + BODY, b"", number=0),
}


@pytest.mark.usefixtures("fetch_child_here")
@pytest.mark.parametrize("name", PLAIN)
async def test_pictures_of_ordinary_hosts_come_whole_and_in_few_messages(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_pieces, heed = 0, fetch_process.FetchProcess._heed

    def count(self: fetch_process.FetchProcess, message: fetch_process.FromChild) -> None:
        nonlocal num_pieces
        num_pieces += isinstance(message, Piece)
        heed(self, message)

    monkeypatch.setattr(fetch_process.FetchProcess, "_heed", count)
    async with host(PLAIN[name]) as port:
        assert await get(f"http://127.0.0.1:{port}/") == BODY
    assert num_pieces == 5  # whatever they came in


@pytest.mark.usefixtures("fetch_child_here")
async def test_tls_and_what_costs_much_in_it() -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(CERTIFICATE, CERTIFICATE.with_name("key.pem"))
    async with host(segmented(1400), tls) as port:
        assert await get(f"https://pictures.test.:{port}/") == BODY
        assert await get(f"https://127.0.0.1:{port}/") == BODY
        with pytest.raises(MediaFetchFailed, match="connection"):
            await get(f"https://other.test:{port}/")
    async with host(pieces(HEAD + b"\r\n", b"x"), tls) as port:
        with pytest.raises(MediaFetchFailed, match="too many pieces"):
            await get(f"https://pictures.test:{port}/")

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), closing(writer):
            while True:
                writer.write(b"\x16\x03\x03\x00\x01\x02")
                await writer.drain()
                await asyncio.sleep(0)

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        with pytest.raises(MediaFetchFailed, match=r"pieces|connection"):
            await get(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/")


async def test_names_with_many_addresses_and_endless_hosts() -> None:
    async def many(name: str, port: int) -> list[str]:
        return [f"8.8.{index // 250}.{index % 250}" for index in range(fetch.MAX_ADDRESSES + 1)]

    with (
        closing(MediaFetcher(MediaConfig(), many)) as fetcher,
        pytest.raises(MediaFetchFailed, match="more than 64 addresses"),
    ):
        await fetcher.fetch(remote("http://a.test/"), ByteBudget(1).lease())
    for host_name in ("é" * 4000, "é." * 2600, "ß" * 500):
        with pytest.raises(InvalidRequest, match="host has more than 320 bytes"):
            classify(f"http:/\t/{host_name}/a", MediaConfig())
    for host_name in ("bücher." * 10 + "test", "a." * 126 + "a"):
        assert isinstance(classify(f"http://{host_name}:8080/{'é' * 1000}", MediaConfig()), RemoteFile)


# ---- shares


@pytest.fixture
async def held(fetch_child_here: None) -> AsyncIterator[tuple[int, dict[str, int]]]:
    """A host that answers /good only, and what it was asked."""
    asked: dict[str, int] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), closing(writer):
            path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
            asked[path] = asked.get(path, 0) + 1
            if path == "/good":
                writer.write(HEAD + b"Content-Length: 4\r\n\r\ngood")
            else:
                await reader.read()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], asked


async def settled(what: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@asynccontextmanager
async def running(*jobs: Awaitable[object]) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_many_names_of_one_address_are_one_host(
    held: tuple[int, dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "MAX_FETCHES_OF_HOST", 2)
    port, asked = held
    budget = ByteBudget(1 << 30)
    with closing(MediaFetcher(CONFIG, by_number)) as fetcher:

        def ask(name: str, path: str, client: str) -> Awaitable[bytes]:
            return fetcher.fetch(remote(f"http://{name}.test:{port}{path}"), budget.lease(client))

        async with running(*(ask(f"n{index}", "/hold", "alice") for index in range(8))):
            await settled(lambda: asked.get("/hold") == 4)
            assert await ask("other", "/good", "bob") == b"good"
            assert asked == {"/hold": 4, "/good": 1}
        assert fetcher._slots_of_host == {}


async def test_a_client_leaves_slots_to_others(
    held: tuple[int, dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "MAX_FETCHES", 4)
    port, asked = held
    budget = ByteBudget(1 << 30)
    with closing(MediaFetcher(CONFIG, by_number)) as fetcher:
        slow = [remote(f"http://127.0.0.1:{port}/hold")] * 16
        async with running(*(fetcher.fetch(source, budget.lease("alice")) for source in slow)):
            await settled(lambda: asked.get("/hold") == 2)
            good = remote(f"http://127.0.0.1:{port}/good")
            assert await fetcher.fetch(good, budget.lease("bob")) == b"good"
            assert asked["/hold"] == 2


async def test_unanswered_names_keep_nobody_from_asking(
    held: tuple[int, dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places are given back when the resolver is done, not when the request has gone; waiting for one is our fault."""
    monkeypatch.setattr(fetch, "MAX_LOOKUPS", 4)
    port, _ = held
    asked, answered = [], asyncio.Event()

    async def resolve(name: str, port: int) -> list[str]:
        asked.append(name)
        if name.startswith("silent"):
            await answered.wait()
        return ["127.0.0.1"]

    budget = ByteBudget(1 << 30)
    config = MediaConfig(allow_private_media=True, fetch_timeout_s=0.2)
    with closing(MediaFetcher(config, resolve)) as fetcher:
        await fetcher._process.wait_until_ready()

        async def ask(name: str, client: str) -> object:
            try:
                return await fetcher.fetch(remote(f"http://{name}.test:{port}/good"), budget.lease(client))
            except (MediaFetchFailed, Unavailable) as error:
                return type(error)

        first = asyncio.gather(*(ask(f"silent{index}", "alice") for index in range(6)))
        await settled(lambda: len(asked) == 2)
        assert await ask("good", "bob") == b"good"
        told = await first
        assert told.count(MediaFetchFailed) == 2 and told.count(Unavailable) == 4  # its own two names, and no place
        assert await ask("more", "alice") is Unavailable  # two threads are held still
        assert await ask("good", "bob") == b"good"
        answered.set()
        await settled(lambda: fetcher._names._places._num_free == 4)
        assert await ask("good", "alice") == b"good"


async def test_the_resolver_has_its_thread_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()

    def getaddrinfo(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        let_go.wait(30)
        raise socket.gaierror("not found")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(fetch, "MAX_LOOKUPS", 4)
    with closing(MediaFetcher(MediaConfig(fetch_timeout_s=0.05))) as fetcher:
        for error in (MediaFetchFailed, MediaFetchFailed, Unavailable):
            with pytest.raises(error):
                await fetcher.fetch(remote("http://a.test/"), ByteBudget(1).lease("alice"))
        assert fetcher._names._places._num_free == 2
        let_go.set()
        await settled(lambda: fetcher._names._places._num_free == 4)


# ---- the child


async def test_the_child_is_contained_and_its_end_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYDRA_API_KEY", "sk-secret")
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    budget = ByteBudget(1 << 30)
    with closing(MediaFetcher(MediaConfig(allow_private_media=True, fetch_timeout_s=30), by_number)) as fetcher:
        fetcher.warm_up()
        async with host(segmented(65536)) as port:
            source = remote(f"http://127.0.0.1:{port}/")
            assert await fetcher.fetch(source, budget.lease()) == BODY
            assert fetcher._process._process is not None
            pid = fetcher._process._process.pid
            assert "NoNewPrivs:\t1" in Path(f"/proc/{pid}/status").read_text()  # noqa: ASYNC240
            os.kill(pid, signal.SIGKILL)
            assert await fetcher.fetch(source, budget.lease()) == BODY  # whether that was seen by now or not
            assert fetcher._process._process.pid != pid
        begun, killed = asyncio.Event(), []

        async def wait(write: Write) -> None:
            await write(HEAD + b"Content-Length: 70000\r\n\r\n" + bytes(66000))
            begun.set()
            await asyncio.sleep(60)

        async with host(wait) as port:
            lease = budget.lease()
            task = asyncio.create_task(fetcher.fetch(remote(f"http://127.0.0.1:{port}/"), lease))
            for _ in range(2):
                await settled(lambda: begun.is_set() and lease.held)
                begun.clear()
                process = fetcher._process._process
                killed.append(process.pid)
                os.kill(process.pid, signal.SIGKILL)
                await settled(lambda process=process: fetcher._process._process is not process)
            with pytest.raises(Unavailable, match="stopped or killed"):
                await task
            assert len(set(killed)) == 2
    with pytest.raises(EngineClosed):
        fetcher.warm_up()


@pytest.mark.slow
async def test_a_child_that_was_stopped_is_nobodys_fault() -> None:
    config = MediaConfig(allow_private_media=True, fetch_timeout_s=0.5)
    with closing(MediaFetcher(config, by_number)) as fetcher:
        await fetcher._process.wait_until_ready()
        process = fetcher._process._process
        os.kill(process.pid, signal.SIGSTOP)
        async with host(segmented(65536)) as port:
            with pytest.raises(Unavailable):
                await fetcher.fetch(remote(f"http://127.0.0.1:{port}/"), ByteBudget(1 << 30).lease())
        await settled(lambda: fetcher._process._process is not process)
        assert process.returncode == -signal.SIGKILL


@pytest.mark.usefixtures("fetch_child_here")
async def test_redirects_are_checked_and_their_bodies_are_not_read() -> None:
    async def answer(write: Write) -> None:
        await write(b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/\r\nContent-Length: 1000000000\r\n\r\n")
        while True:
            await write(bytes(65536))

    async with host(answer) as port:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fetch, "is_public", lambda address: True)
            patch.setattr(fetch, "_is_own", lambda address: False)
            with pytest.raises(MediaForbidden):
                await get(f"http://pictures.test:{port}/", MediaConfig())
