import asyncio
import base64
import gzip
import ipaddress
import os
import random
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from aiohttp import web
from PIL import Image

from hydra_engine.config import EngineConfig, MediaConfig
from hydra_engine.core.fairness import ByteBudget, Lease
from hydra_engine.errors import ConfigError, InvalidImage, InvalidRequest, MediaFetchFailed, MediaForbidden, Unavailable
from hydra_engine.preprocess.media import fetch, sources
from hydra_engine.preprocess.media.fetch import MediaFetcher
from hydra_engine.preprocess.media.sources import (
    DataUrl,
    InMemory,
    LocalFile,
    RemoteFile,
    classify,
    is_public,
    read_local,
)

pytestmark = pytest.mark.usefixtures("fetch_child_here")

BODY = b"\x89PNG not really"
Resolve = Callable[[str, int], Awaitable[list[str]]]


def a_lease(most: int = 1 << 30) -> Lease:
    return ByteBudget(most).lease()


# ---- addresses

PUBLIC = ["8.8.8.8", "1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"]
PRIVATE_TEXT = """
0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 100.64.0.1 100.127.255.254 127.0.0.1 127.255.255.254 169.254.0.1 169.254.169.254
172.16.0.1 172.31.255.255 192.0.0.1 192.0.2.1 192.168.0.1 192.168.255.255 198.18.0.1 198.51.100.1 203.0.113.1
224.0.0.1 224.0.1.1 239.255.255.250 240.0.0.1 255.255.255.255
:: ::1 ::2 ::7f00:1 ::ffff:0:0 ::ffff:10.0.0.1 ::ffff:127.0.0.1 ::ffff:169.254.169.254 ::ffff:192.168.1.1
64:ff9b::a00:1 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::7f00:1 64:ff9b:1::808:808
2002:7f00:1:: 2002:a00:1:: 2002:a9fe:a9fe:: 2001:0:4136:e378:8000:63bf:3fff:fdd2 2001:db8::1
2606:4700::5efe:7f00:1 2606:4700::200:5efe:a00:1
100::1 fc00::1 fd00:ec2::254 fe80::1 fe80::5efe:a00:1 fec0::1 ff02::1 ff0e::1 5f00::1 4000::1 1234::1 3fff::1
"""
PRIVATE = PRIVATE_TEXT.split()


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_in_every_wrapping(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


# ---- no internal address is reachable

NAMES = {f"name{index}.test": address for index, address in enumerate(PRIVATE)}
LITERALS = [f"[{address}]" if ":" in address else address for address in PRIVATE]
ODD_TEXT = """
127.1 127.0.1 2130706433 017700000001 0177.0.0.1 0x7f.0.0.1 0x7f000001 0x7F.1 10.1 0 0x0 1.2.3.4.5 127.0.0.1.
127.0.0.01 256.1.1.1 1.1.1.1. 00000010.0.0.1 [::ffff:127.1] [fe80::1%25eth0] [2606:4700::1%251] 0x
"""
ODD = ODD_TEXT.split()
SCHEMES = [
    "ftp://h/x",
    "gopher://h",
    "unix:///x",
    "file:///etc/passwd",
    "/etc/passwd",
    "jar:http://h",
    "x",
    "//h/x",
    "",
]
USERINFO = ["http://user@8.8.8.8/", "http://user:word@8.8.8.8/", "http://8.8.8.8:80@127.0.0.1/", "http://:@8.8.8.8/"]
BROKEN = [
    "http://",
    "http:///x",
    "http://[::1",
    "http://h:99999/",
    "https://h:port/",
    "http://exa mple/",
    "http:8.8.8.8",
]
NORMALISED = ["http://１２７.0.0.1/", "http://127。0。0。1/", "http://①②⑦.0.0.1/"]


@pytest.fixture
def connects(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The addresses to which sockets of this process connect."""
    seen: list[object] = []
    real = socket.socket.connect

    def connect(self: socket.socket, address: object) -> None:
        seen.append(address)
        real(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    return seen


async def by_table(host: str, port: int) -> list[str]:
    if host in NAMES:
        return [NAMES[host]]
    if host == "mixed.test":
        return ["8.8.8.8", "10.0.0.1"]
    raise socket.gaierror("not found")


def every_url() -> list[str]:
    hosts = [*LITERALS, *ODD, *NAMES, "mixed.test", "NAME3.TEST", "name3.test."]
    forms = ["http://{}/x.png", "https://{}:8443/x.png"]
    return [form.format(host) for host in hosts for form in forms] + SCHEMES + USERINFO + BROKEN + NORMALISED


async def test_no_url_reaches_an_internal_address(connects: list[object]) -> None:
    config, refused = MediaConfig(), 0
    fetcher = MediaFetcher(config, by_table)
    for url in every_url():
        with pytest.raises((MediaForbidden, InvalidRequest, MediaFetchFailed)) as caught:
            source = classify(url, config)
            assert isinstance(source, RemoteFile)
            await fetcher.fetch(source, a_lease())
        refused += 1
        assert len(caught.value.message) < 200 and "0x" not in caught.value.message
        assert not url or url == "x" or url not in caught.value.message
    assert refused > 250 and connects == []


def test_internal_names_and_literals_are_forbidden_not_merely_failing() -> None:
    for url in [f"http://{host}/" for host in (*LITERALS, *ODD)] + SCHEMES + USERINFO:
        with pytest.raises(MediaForbidden):
            classify(url, MediaConfig())


def test_ports_of_other_services_are_forbidden() -> None:
    for port in (0, 1, 22, 25, 79, 81, 110, 442, 444, 587, 993, 1023):
        with pytest.raises(MediaForbidden, match="ports"):
            classify(f"http://a.test:{port}/", MediaConfig())
    for port in (80, 443, 1024, 8080, 65535):
        assert isinstance(classify(f"https://a.test:{port}/", MediaConfig()), RemoteFile)
    assert isinstance(classify("http://10.0.0.1:22/", MediaConfig(allow_private_media=True)), RemoteFile)


def test_names_are_plain() -> None:
    for host in ("a b.test", "a%00b.test", "a\\@b.test", "a" * 254, "%31%32%37.0.0.1", "a,b.test", "a'b"):
        with pytest.raises((MediaForbidden, InvalidRequest)):
            classify(f"http://{host}/", MediaConfig())


def test_this_machines_own_addresses() -> None:
    for address, own in (("127.0.0.1", True), ("127.0.0.2", False), ("8.8.8.8", False), ("2606:4700::1111", False)):
        assert fetch._is_own(ipaddress.ip_address(address)) is own


def test_a_list_of_hosts_knows_every_spelling() -> None:
    config = MediaConfig(allowed_media_domains=("Bücher.example", "xn--fa-hia.de", "UPPER.test."))
    for url in ("http://xn--bcher-kva.example/", "http://BÜCHER.example/", "http://faß.de/", "http://upper.test/"):
        assert isinstance(classify(url, config), RemoteFile), url
    for url in ("http://fass.de/", "http://bucher.example/", "http://8.8.8.8/"):
        with pytest.raises(MediaForbidden):
            classify(url, config)


def test_only_listed_hosts_when_there_is_a_list() -> None:
    config = MediaConfig(allowed_media_domains=("pictures.test",))
    for url in ("http://pictures.test/a", "https://PICTURES.test:8444/a", "http://pictures.test./a"):
        assert isinstance(classify(url, config), RemoteFile)
    for url in (
        "http://x.pictures.test/",
        "http://pictures.test.evil.test/",
        "http://8.8.8.8/",
        "http://xpictures.test",
    ):
        with pytest.raises(MediaForbidden):
            classify(url, config)


# ---- hosts that answer


class Host:
    """A picture host on 127.0.0.1 that counts what it was asked."""

    def __init__(self) -> None:
        self.requests: list[web.Request] = []
        self.answer: Callable[[web.Request], Awaitable[web.StreamResponse]] = self._picture
        self.port = 0

    async def _picture(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=BODY)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        return await self.answer(request)

    def url(self, host: str = "pictures.test", path: str = "/a.png") -> str:
        return f"http://{host}:{self.port}{path}"


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    host = Host()
    runner = web.ServerRunner(web.Server(host.handle, handler_cancellation=True), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host.port = site._server.sockets[0].getsockname()[1]
    yield host
    await runner.cleanup()


@pytest.fixture
def one_open_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.1 counts as public; everything else stays what it is."""
    door = ipaddress.ip_address("127.0.0.1")
    for module in (sources, fetch):
        monkeypatch.setattr(module, "is_public", lambda address: address == door or is_public(address))
    monkeypatch.setattr(fetch, "_is_own", lambda address: False)


async def to_the_door(host: str, port: int) -> list[str]:
    return ["127.0.0.1"]


async def get(
    url: str, config: MediaConfig | None = None, resolve: Resolve = to_the_door, lease: Lease | None = None
) -> bytes:
    config = config or MediaConfig()
    source = classify(url, config)
    assert isinstance(source, RemoteFile)
    with closing(MediaFetcher(config, resolve)) as fetcher:
        return await fetcher.fetch(source, lease or a_lease())


async def test_a_picture_is_fetched_plainly(host: Host, one_open_door: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    assert await get(host.url()) == BODY
    headers = host.requests[0].headers
    assert headers["Accept-Encoding"] == "identity" and headers["Host"] == f"pictures.test:{host.port}"
    assert "Cookie" not in headers and "Authorization" not in headers


async def test_private_addresses_need_the_option(host: Host) -> None:
    with pytest.raises(MediaForbidden):
        await get(host.url())
    assert await get(host.url(), MediaConfig(allow_private_media=True)) == BODY
    assert await get(host.url("127.0.0.1"), MediaConfig(allow_private_media=True)) == BODY
    assert len(host.requests) == 2


async def test_a_public_address_of_this_machine_is_not_dialled(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.1 counts as public here, and it is this machine's own."""
    for module in (sources, fetch):
        monkeypatch.setattr(module, "is_public", lambda address: True)
    for name in ("inside.test", "127.0.0.1"):
        with pytest.raises(MediaForbidden):
            await get(host.url(name))
    assert host.requests == []


async def test_the_checked_address_is_the_one_dialled(host: Host, one_open_door: None, connects: list[object]) -> None:
    answers = [["127.0.0.1"], ["127.0.0.2"]]

    async def rebinding(name: str, port: int) -> list[str]:
        return answers.pop(0)

    assert await get(host.url(), resolve=rebinding) == BODY
    assert connects == [("127.0.0.1", host.port)] and len(answers) == 1


async def test_redirects_are_followed_three_times(host: Host, one_open_door: None) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        left = int(request.query["left"])
        if left == 0:
            return web.Response(body=BODY)
        return web.Response(status=302, headers={"Location": f"/next?left={left - 1}"})

    host.answer = answer
    assert await get(host.url(path="/?left=3")) == BODY
    with pytest.raises(MediaFetchFailed, match="redirects"):
        await get(host.url(path="/?left=4"))
    assert len(host.requests) == 8


async def test_every_hop_is_checked(host: Host, one_open_door: None, connects: list[object]) -> None:
    targets = [
        f"http://{name}:{host.port}/" for name in ("127.0.0.2", "[::1]", "2130706433", "inside.test", "u@h.test")
    ]
    targets += ["file:///etc/passwd", "ftp://127.0.0.1/", "//127.0.0.2/x", "http://[", "unix:/x"]

    async def resolve(name: str, port: int) -> list[str]:
        return ["10.0.0.1"] if name == "inside.test" else ["127.0.0.1"]

    for status, target in [(status, target) for target in targets for status in (301, 302, 303, 307, 308)]:

        async def answer(request: web.Request, status: int = status, target: str = target) -> web.StreamResponse:
            return web.Response(status=status, headers={"Location": target})

        host.answer = answer
        with pytest.raises((MediaForbidden, MediaFetchFailed, InvalidRequest)):
            await get(host.url(), resolve=resolve)
    assert set(connects) == {("127.0.0.1", host.port)}
    assert len(host.requests) == 5 * len(targets)


@pytest.mark.parametrize("status", [204, 206, 300, 304, 401, 404, 500])
async def test_other_answers_fail_without_quoting_them(host: Host, one_open_door: None, status: int) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text="" if status in (204, 304) else "secret words", reason="secret")

    host.answer = answer
    with pytest.raises(MediaFetchFailed, match=f"status {status}") as caught:
        await get(host.url())
    assert "secret" not in caught.value.message


async def test_bodies_are_cut_off_at_the_limit(host: Host, one_open_door: None) -> None:
    limit, sent = 100_000, 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while sent < 50_000_000:
            await response.write(b"x" * 10_000)
            sent += 10_000
        return response

    async def announced(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"x" * (limit + 1))

    async def fitting(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"x" * limit)

    config = MediaConfig(max_image_bytes=limit)
    for host.answer in (endless, announced):
        with pytest.raises(MediaFetchFailed, match=r"larger than 97\.7 KiB"):
            await get(host.url(), config)
    assert sent < 20_000_000
    host.answer = fitting
    assert len(await get(host.url(), config)) == limit


async def test_compressed_answers_are_not_inflated(host: Host, one_open_door: None) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=gzip.compress(b"\0" * 10_000_000), headers={"Content-Encoding": "gzip"})

    host.answer = answer
    with pytest.raises(MediaFetchFailed, match="compressed"):
        await get(host.url())


@pytest.mark.slow
async def test_slow_hosts_end_at_the_deadline(host: Host, one_open_door: None) -> None:
    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1200):
            await response.write(b"x")
            await asyncio.sleep(0.05)
        return response

    async def silent(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response()

    async def slow_names(name: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return ["127.0.0.1"]

    config = MediaConfig(fetch_timeout_s=0.2)
    for host.answer, resolve in ((drip, to_the_door), (silent, to_the_door), (silent, slow_names)):
        begin = time.monotonic()
        with pytest.raises(MediaFetchFailed, match=r"0\.2 seconds"):
            await get(host.url(), config, resolve)
        assert time.monotonic() - begin < 30


async def test_broken_hosts_are_a_failed_fetch(one_open_door: None) -> None:
    answers = [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nshort"]
    answers += [b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 50_000, b"HTTP/1.1 200 OK\r\nA: " + b"x" * 100_000 + b"\r\n\r\n"]
    answers += [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 302 OK\r\nLocation: http://[\r\n\r\n",
    ]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers[0])
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        while answers:
            with pytest.raises((MediaFetchFailed, InvalidRequest)) as caught:
                await get(f"http://pictures.test:{port}/", MediaConfig(fetch_timeout_s=2))
            assert len(caught.value.message) < 120
            answers.pop(0)
    with pytest.raises(MediaFetchFailed, match="connection"):  # nobody listens any more
        await get(f"http://pictures.test:{port}/")
    with pytest.raises(MediaFetchFailed, match="resolved"):
        await get("http://unknown.test/", resolve=by_table)


async def test_a_tls_error_is_a_failed_fetch(host: Host, one_open_door: None) -> None:
    with pytest.raises(MediaFetchFailed):
        await get(host.url().replace("http:", "https:"))


async def test_what_is_fetched_is_bounded_together(host: Host, one_open_door: None) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=b"x" * 600)

    host.answer = answer
    budget = ByteBudget(1000)
    first, second = budget.lease(), budget.lease()
    assert len(await get(host.url(), lease=first)) == 600
    with pytest.raises(Unavailable, match="too many images") as caught:
        await get(host.url(), lease=second)
    assert caught.value.retry_after_s and caught.value.code == "overloaded"
    second.release()
    assert budget.held == 600
    first.release()
    assert budget.held == 0 and len(await get(host.url(), lease=second)) == 600


async def test_one_slow_host_keeps_nobody_from_another(
    host: Host, one_open_door: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "MAX_FETCHES_OF_HOST", 2)

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.host.startswith("slow"):
            await asyncio.sleep(60)
        return web.Response(body=BODY)

    host.answer = answer
    config = MediaConfig(fetch_timeout_s=1.0)
    fetcher = MediaFetcher(config, to_the_door)
    fetcher.warm_up()

    async def ask(name: str) -> object:
        source = classify(host.url(name), config)
        assert isinstance(source, RemoteFile)
        try:
            return await fetcher.fetch(source, a_lease())
        except (MediaFetchFailed, Unavailable) as error:
            return type(error)

    slow = [asyncio.create_task(ask("slow.test")) for _ in range(6)]
    async with asyncio.timeout(30):
        while len(host.requests) < 2:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.001)
    assert await ask("quick.test") == BODY
    assert len(host.requests) == 3  # two of the slow host's
    found = await asyncio.gather(*slow)
    # Two at a time, and one without a turn in time gets an error that does not blame the host.
    assert found.count(MediaFetchFailed) >= 2 and set(found) <= {MediaFetchFailed, Unavailable}
    assert fetcher._slots_of_host == {}
    fetcher.close()


async def test_cancelling_a_fetch_closes_its_connection(host: Host, one_open_door: None) -> None:
    arrived, closed = asyncio.Event(), asyncio.Event()

    async def wait(request: web.Request) -> web.StreamResponse:
        arrived.set()
        try:
            await asyncio.sleep(600)
        finally:
            closed.set()
        return web.Response()

    host.answer = wait
    task = asyncio.create_task(get(host.url()))
    await arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(closed.wait(), 30)


# ---- data URLs


def data_url(body: str, head: str = "data:image/png;base64") -> str:
    return f"{head},{body}"


def open_data(text: str, config: MediaConfig | None = None) -> bytes:
    source = classify(text, config or MediaConfig())
    assert isinstance(source, DataUrl)
    return read_local(source, config or MediaConfig())


def wrapped(text: str, width: int, end: str) -> str:
    return end.join(text[begin : begin + width] for begin in range(0, len(text), width))


@pytest.mark.parametrize("num_bytes", [1000, 1001, 1002])  # padded by two, one and no =
def test_data_urls_are_read_as_browsers_do(num_bytes: int) -> None:
    body = random.Random(num_bytes).randbytes(num_bytes)
    good = base64.b64encode(body).decode()
    for head in (
        *("data:image/png;base64", "DATA:image/jpg;charset=x;BASE64", "data:;base64", "data:image/x ;base64"),
        *("data:image/jpeg;charset=utf-8;base64", "Data:IMAGE/JPEG;name=a.jpg;Base64", "data: image/png ; base64"),
    ):
        assert open_data(data_url(good, head)) == body, head
    forms = {
        "lines": wrapped(good, 76, "\n"),
        "lines of mail, and one at the end": wrapped(good, 76, "\r\n") + "\r\n",
        "white space": " \t" + wrapped(good, 5, " \f") + "\n",
        "no padding": good.rstrip("="),
        "no padding in lines": wrapped(good.rstrip("="), 64, "\n") + "\n",
        "alphabet for URLs": base64.urlsafe_b64encode(body).decode(),
        "alphabet for URLs, no padding": base64.urlsafe_b64encode(body).decode().rstrip("="),
        "percent": quote(good, safe=""),
        "percent in small letters": re.sub("%..", lambda found: found[0].lower(), quote(good, safe="")),
        "percent and lines": quote(wrapped(good, 76, "\r\n"), safe="/"),
    }
    for name, text in forms.items():
        assert open_data(data_url(text)) == body, name
    assert open_data(" \n" + data_url(good) + "\n") == body


def test_data_urls_that_are_not_base64_are_refused_with_a_reason() -> None:
    good = base64.b64encode(BODY).decode().rstrip("=")
    good = good[: len(good) // 4 * 4]
    odd, padding, length = "character {} of its data", "one or two = at its end only", "its end is missing"
    reasons = {
        "!!!!": odd.format(1),
        good + "!": odd.format(len(good) + 1),
        " " + good[:7] + "\\n": odd.format(9),
        "Zm%39v": odd.format(3),
        "Zm%": odd.format(3),
        "Zm9vé": odd.format(5),
        good + "\0": odd.format(len(good) + 1),
        good + "=": padding,
        "=====": padding,
        "QQ=": padding,
        "QQ==QQ": padding,
        "QQ==QQ==": padding,
        "QQ==\n\nQ": padding,
        "Q=Q=": padding,
        good + "Q": length,
        "Q": length,
    }
    for body, reason in reasons.items():
        with pytest.raises(InvalidImage) as caught:
            open_data(data_url(body))
        assert caught.value.code == "image_decode_failed" and reason in caught.value.message, body
        assert "base64" in caught.value.message and good[:6] not in caught.value.message
    with pytest.raises(InvalidImage, match="holds no data"):
        open_data(data_url(""))


def test_other_data_urls_are_refused() -> None:
    good = base64.b64encode(BODY).decode()
    for text in ("data:", "data:image/png;base64", "data:image/png,abc", "data:,", "data:image/png;base64;x,Zm9v"):
        with pytest.raises(InvalidImage):
            open_data(text)
    for head in ("data:text/html;base64", "data:application/pdf;base64", "data:video/mp4;base64"):
        with pytest.raises(InvalidImage) as caught:
            open_data(data_url(good, head))
        assert caught.value.code == "unsupported_image_format"


def test_data_urls_are_measured_before_they_are_decoded() -> None:
    config = MediaConfig(max_image_bytes=1000)
    assert len(open_data(data_url(base64.b64encode(b"x" * 1000).decode()), config)) == 1000
    assert open_data(data_url(base64.b64encode(b"x" * 3_000_001).decode())) == b"x" * 3_000_001
    for more in ("AAAA", " " * (1 << 20) + "A", "\n" * (2 << 20) + "AAAA"):
        with pytest.raises(InvalidImage):  # padding where the text is cut into slices
            open_data(data_url("A" * ((1 << 20) - 1) + "=" + more))
    large = random.Random(1).randbytes(3 << 20)
    assert open_data(data_url(wrapped(base64.b64encode(large).decode(), 76, "\r\n"))) == large
    assert len(open_data(data_url(wrapped(base64.b64encode(b"x" * 1000).decode(), 4, "\n")), config)) == 1000
    with pytest.raises(InvalidImage) as caught:
        open_data(data_url(wrapped(base64.b64encode(b"x" * 1010).decode(), 4, "\n")), config)
    assert caught.value.code == "image_too_large"
    with pytest.raises(InvalidImage) as caught:
        open_data(data_url("!" * 2000), config)
    assert caught.value.code == "image_too_large"


# ---- files and memory


def open_file(value: object, config: MediaConfig) -> bytes:
    source = classify(value, config)
    assert isinstance(source, LocalFile)
    return read_local(source, config)


def test_files_below_the_allowed_folder_only(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "inside2"
    (inside / "sub").mkdir(parents=True)
    outside.mkdir()
    (inside / "sub" / "a b.png").write_bytes(BODY)
    (outside / "secret.png").write_bytes(b"secret")
    (inside / "link.png").symlink_to(outside / "secret.png")
    (inside / "folder").symlink_to(outside)
    (inside / "good.png").symlink_to(inside / "sub" / "a b.png")
    os.mkfifo(inside / "pipe")
    config = MediaConfig(allowed_media_path=str(inside))
    for url in (
        f"file://{inside}/sub/a%20b.png",
        f"file://localhost{inside}/good.png",
        f"file:{inside}/sub/../good.png",
    ):
        assert open_file(url, config) == BODY
    for name in ("../inside2/secret.png", "link.png", "folder/secret.png", "..%2finside2/secret.png", ".."):
        with pytest.raises(MediaForbidden):
            open_file(f"file://{inside}/{name}", config)
    for name in ("missing.png", "pipe", "sub", "", "x" * 5000, "a%00b"):
        with pytest.raises((MediaFetchFailed, MediaForbidden)) as caught:
            open_file(f"file://{inside}/{name}", config)
        assert str(tmp_path) not in caught.value.message
    for value in (f"file://other{inside}/sub/a", str(inside / "good.png"), inside / "good.png", "file:///etc/passwd"):
        with pytest.raises(MediaForbidden):
            open_file(value, config)


def test_files_without_a_size_are_bounded_too() -> None:
    config = MediaConfig(allowed_media_path="/proc/self", max_image_bytes=100)
    url = f"file:///proc/{os.getpid()}/maps"
    assert os.stat(url.removeprefix("file://")).st_size == 0
    with pytest.raises(InvalidImage, match="larger than 100 B"):
        open_file(url, config)


def test_a_folder_that_is_nowhere_opens_nothing(tmp_path: Path) -> None:
    for folder in ("", " "):
        with pytest.raises(ConfigError):
            EngineConfig(media=MediaConfig(allowed_media_path=folder))
    (tmp_path / "a.png").write_bytes(BODY)
    with pytest.raises((MediaForbidden, MediaFetchFailed)):
        open_file(f"file://{tmp_path}/a.png", MediaConfig(allowed_media_path=str(tmp_path / "missing")))


def test_the_embedded_engine_opens_paths(tmp_path: Path) -> None:
    path = tmp_path / "data.png"
    path.write_bytes(BODY)
    config = MediaConfig(local_files=True, max_image_bytes=len(BODY))
    for value in (path, str(path), path.as_uri(), os.path.relpath(path)):
        assert open_file(value, config) == BODY
    with pytest.raises(InvalidImage) as caught:
        open_file(path, MediaConfig(local_files=True, max_image_bytes=3))
    assert caught.value.code == "image_too_large"
    for device in ("/dev/zero", str(tmp_path), "missing"):
        with pytest.raises(MediaFetchFailed):
            open_file(device, config)


def test_what_is_in_memory_is_taken_as_it_is() -> None:
    image, array = Image.new("RGB", (2, 2)), np.zeros((2, 2, 3), np.uint8)
    for value in (image, array, BODY):
        source = classify(value, MediaConfig())
        assert isinstance(source, InMemory) and read_local(source, MediaConfig()) is value
    assert read_local(InMemory(bytes(bytearray(BODY))), MediaConfig()) == BODY
    for wrong in (7, None, {}, [1], object(), 1.5):
        with pytest.raises(InvalidRequest, match="an image must be"):
            classify(wrong, MediaConfig())
