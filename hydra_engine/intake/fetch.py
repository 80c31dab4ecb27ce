"""The one place that opens what a user names: URLs, data URLs and files.

`classify` decides what a reference is and whether it may be opened, before anything is; `MediaFetcher` reads URLs and
`read_local` the rest. A host is resolved once, every address must be allowed, and those addresses are the ones dialled.
The machine's own addresses are not, public ones included: what listens there may trust whoever is on this machine.
Does not know pictures or videos beyond their limits; errors never quote what was fetched.
"""

from __future__ import annotations

import asyncio
import binascii
import ipaddress
import os
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import aiohttp
import numpy as np
from aiohttp.abc import AbstractResolver, ResolveResult
from PIL import Image
from yarl import URL

from hydra_engine.config import MediaConfig
from hydra_engine.core.byte_budget import Lease
from hydra_engine.errors import InvalidImage, InvalidRequest, MediaFetchFailed, MediaForbidden, Unavailable
from hydra_engine.intake.addresses import IPAddress, is_port_for_media, is_public, literal

MAX_REDIRECTS = 3
MAX_FETCHES = 256  # at once; what they may hold together is `max_fetched_bytes`
MAX_FETCHES_OF_HOST = 32  # at once, so that one slow host does not keep others from being asked
MAX_LOOKUPS = 32  # of host names at once; each has a thread while the resolver takes its time
MAX_URL_CHARS = 8192

_CHUNK_BYTES = 1 << 16
_BASE64_SLICE = 1 << 20  # a multiple of 4
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "hydra-engine"}
# What reaching a hostile host raises: aiohttp's own errors, the socket's and TLS's (OSError), broken URLs.
_FETCH_ERRORS = (aiohttp.ClientError, OSError, ValueError, asyncio.IncompleteReadError)

_lookups = ThreadPoolExecutor(MAX_LOOKUPS, thread_name_prefix="intake-names")

Resolve = Callable[[str, int], Awaitable[list[str]]]  # host, port -> addresses


@dataclass(frozen=True, slots=True)
class RemoteFile:
    url: URL
    kind: str  # "image" or "video", here and below: which limits hold, and what messages call it


@dataclass(frozen=True, slots=True)
class DataUrl:
    text: str
    kind: str


@dataclass(frozen=True, slots=True)
class LocalFile:
    path: str
    below: str | None  # the file's real path must lie in this folder
    kind: str


@dataclass(frozen=True, slots=True)
class InMemory:
    value: Any  # bytes, a Pillow image, an array or a tensor


Source = RemoteFile | DataUrl | LocalFile | InMemory


def classify(value: Any, config: MediaConfig, kind: str = "image") -> Source:
    """What a reference is. Cheap and without I/O. Raises MediaForbidden or InvalidRequest."""
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str):
        return _classify_text(value, config, kind)
    if isinstance(value, bytes | bytearray | memoryview):
        return InMemory(bytes(value))
    is_picture = isinstance(value, Image.Image | np.ndarray) or callable(getattr(value, "numpy", None))
    if is_picture and kind == "image":
        return InMemory(value)
    if kind == "video":
        raise InvalidRequest("a video must be a URL, a data URL, a path, bytes or a list of pictures")
    raise InvalidRequest("an image must be a URL, a data URL, a path, bytes, a Pillow image or an array")


def read_local(source: DataUrl | LocalFile | InMemory, config: MediaConfig) -> Any:
    """Blocking. Bytes of an encoded image or video, or the object in memory as it is."""
    match source:
        case DataUrl():
            return _read_data_url(source, config)
        case LocalFile():
            return _read_file(source, config)
        case InMemory():
            return source.value


def _classify_text(text: str, config: MediaConfig, kind: str) -> Source:
    scheme, colon, _ = text[:8].lower().partition(":")
    scheme = scheme if colon else ""
    if scheme == "data":
        return DataUrl(text, kind)
    if scheme in ("http", "https"):
        return RemoteFile(_checked_url(text, config, kind), kind)
    if scheme == "file":
        return _classify_file_url(text, config, kind)
    if config.local_files and "://" not in text[:64]:
        return LocalFile(text, None, kind)
    raise MediaForbidden(f"{kind}s are accepted as http, https or data URLs")


def _classify_file_url(text: str, config: MediaConfig, kind: str) -> LocalFile:
    rest = text[5:]
    if rest.startswith("//"):
        host, slash, rest = rest[2:].partition("/")
        rest = slash + rest
        if host not in ("", "localhost"):
            raise MediaForbidden("file URLs must not name a host")
    if config.local_files:
        return LocalFile(unquote(rest), None, kind)
    if config.allowed_media_path is None:
        raise MediaForbidden("file URLs are not allowed; see --allowed-media-path")
    return LocalFile(unquote(rest), config.allowed_media_path, kind)


def _checked_url(text: str, config: MediaConfig, kind: str) -> URL:
    """A URL whose host may be asked for as far as its spelling tells."""
    if len(text) > MAX_URL_CHARS:
        raise InvalidRequest(f"the {kind} URL may have at most {MAX_URL_CHARS} characters")
    try:
        return _check_url(URL(text), config, kind)
    except ValueError as error:
        raise InvalidRequest(f"the {kind} URL is malformed") from error


def _check_url(url: URL, config: MediaConfig, kind: str) -> URL:
    host = url.raw_host  # as it is resolved and dialled
    if url.scheme not in ("http", "https") or not host:
        raise MediaForbidden(f"{kind}s are fetched by http and https only")
    if url.user is not None or url.password is not None:
        raise MediaForbidden(f"{kind} URLs must not hold a user name or password")
    if config.allowed_media_domains and _plain(host) not in map(_plain, config.allowed_media_domains):
        raise MediaForbidden(f"{kind}s are not fetched from this host; see --allowed-media-domains")
    address = literal(host)
    if not config.allow_private_media:
        if not is_port_for_media(url.port or 0):
            raise MediaForbidden(f"{kind}s are fetched from ports 80, 443 and above 1023 only")
        if address is not None and not is_public(address):
            raise _private(kind)
    return url


def _plain(host: str) -> str:
    """Of equal names the same, however they are written."""
    try:
        return (URL.build(scheme="http", host=host).raw_host or "").lower().rstrip(".")
    except ValueError:
        return ""


def _is_own(address: IPAddress) -> bool:
    """Whether this machine would talk to itself; nothing is sent to find out."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))
            return ipaddress.ip_address(probe.getsockname()[0]) == address
    except OSError:  # no way there, so no way to ourselves
        return False


def _private(kind: str) -> MediaForbidden:
    return MediaForbidden(f"{kind}s are not fetched from private, local or reserved network addresses")


class MediaFetcher:
    """Reads RemoteFile sources. `resolve` can be replaced in tests."""

    def __init__(self, config: MediaConfig, resolve: Resolve | None = None) -> None:
        self._config = config
        self._resolve = resolve or _system_resolve
        self._slots = asyncio.Semaphore(MAX_FETCHES)
        self._slots_of_host: dict[str, tuple[asyncio.Semaphore, int]] = {}  # and how many want one

    async def fetch(self, source: RemoteFile, lease: Lease) -> bytes:
        """The body, whose bytes `lease` holds from now on. Raises MediaForbidden, MediaFetchFailed or, when too much is
        fetched already, Unavailable; after twice `fetch_timeout_s` at the latest."""
        try:
            async with self._turn(source):
                return await self._in_time(source, lease)
        except TimeoutError as error:
            raise _overloaded(source.kind) from error

    @asynccontextmanager
    async def _turn(self, source: RemoteFile) -> AsyncIterator[None]:
        """A place among all fetches and among those of this host. Raises TimeoutError."""
        host = source.url.raw_host or ""
        slots, wanted = self._slots_of_host.get(host, (asyncio.Semaphore(MAX_FETCHES_OF_HOST), 0))
        self._slots_of_host[host] = slots, wanted + 1
        async with AsyncExitStack() as held:
            held.callback(self._forget, host)
            async with asyncio.timeout(self._config.fetch_timeout_s):
                await held.enter_async_context(slots)
                await held.enter_async_context(self._slots)
            yield

    def _forget(self, host: str) -> None:
        slots, wanted = self._slots_of_host.pop(host)
        if wanted > 1:
            self._slots_of_host[host] = slots, wanted - 1

    async def _in_time(self, source: RemoteFile, lease: Lease) -> bytes:
        try:
            async with asyncio.timeout(self._config.fetch_timeout_s):
                return await self._follow(source.url, source.kind, lease)
        except TimeoutError as error:
            raise MediaFetchFailed(
                f"the {source.kind} could not be fetched within {self._config.fetch_timeout_s:g} seconds"
            ) from error
        except _FETCH_ERRORS as error:
            raise MediaFetchFailed(f"the {source.kind} could not be fetched: the connection failed") from error

    async def _follow(self, url: URL, kind: str, lease: Lease) -> bytes:
        for _ in range(1 + MAX_REDIRECTS):
            answer = await self._get(url, kind, lease)
            if isinstance(answer, bytes):
                return answer
            url = answer
        raise MediaFetchFailed(f"the {kind} could not be fetched: more than {MAX_REDIRECTS} redirects")

    async def _get(self, url: URL, kind: str, lease: Lease) -> bytes | URL:
        """The body, or where a redirect points to. A connection of its own, so no state is shared between hosts."""
        connector = aiohttp.TCPConnector(
            resolver=_Pinned(await self._addresses(url, kind)), use_dns_cache=False, force_close=True, limit=1
        )
        async with (
            aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=_HEADERS | {"Accept": f"{kind}/*"},
                auto_decompress=False,
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=None),  # the caller's timeout covers all hops
            ) as session,
            session.get(url, allow_redirects=False) as response,
        ):
            location = response.headers.get("Location")
            if response.status in _REDIRECTS and location is not None:
                return _checked_url(str(url.join(URL(location))), self._config, kind)
            if response.status != 200:
                raise MediaFetchFailed(f"the {kind}'s host answered with status {response.status}")
            return await self._body(response, kind, lease)

    async def _addresses(self, url: URL, kind: str) -> list[str]:
        assert url.raw_host is not None and url.port is not None
        if literal(url.raw_host) is not None:
            return self._checked([url.raw_host], kind)
        try:
            found = await self._resolve(url.raw_host, url.port)
        except (OSError, UnicodeError) as error:
            raise MediaFetchFailed(f"the {kind} URL's host name could not be resolved") from error
        if not found:
            raise MediaFetchFailed(f"the {kind} URL's host name could not be resolved")
        return self._checked(found, kind)

    def _checked(self, addresses: list[str], kind: str) -> list[str]:
        parsed = [ipaddress.ip_address(address) for address in addresses]
        if not self._config.allow_private_media and (not all(map(is_public, parsed)) or any(map(_is_own, parsed))):
            raise _private(kind)
        return addresses

    async def _body(self, response: aiohttp.ClientResponse, kind: str, lease: Lease) -> bytes:
        most = _max_bytes(self._config, kind)
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise MediaFetchFailed(f"the {kind}'s host sent a compressed answer that was not asked for")
        if (response.content_length or 0) > most:
            raise MediaFetchFailed(f"the fetched {kind} has more than {most} bytes")
        body = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            if len(body) + len(chunk) > most:
                raise MediaFetchFailed(f"the fetched {kind} has more than {most} bytes")
            if not lease.take(len(chunk)):
                raise _overloaded(kind)
            body += chunk
        return bytes(body)


def _overloaded(kind: str) -> Unavailable:
    return Unavailable(f"too many images and videos are being fetched; try again later or send the {kind} as data")


class _Pinned(AbstractResolver):
    """Answers with the addresses that were checked and never asks anybody."""

    def __init__(self, addresses: list[str]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self._addresses
        ]

    async def close(self) -> None:
        return None


async def _system_resolve(host: str, port: int) -> list[str]:
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_lookups, look_up)
    return list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found))


def _max_bytes(config: MediaConfig, kind: str) -> int:
    return config.max_video_bytes if kind == "video" else config.max_image_bytes


def _read_data_url(source: DataUrl, config: MediaConfig) -> bytes:
    kind, most = source.kind, _max_bytes(config, source.kind)
    head, comma, body = source.text.partition(",")
    media_type, *parameters = head[5:].split(";")
    if not comma or not parameters or parameters[-1].strip().lower() != "base64":
        raise InvalidImage(f"a data URL must have the form data:{kind}/...;base64,...")
    if media_type and not media_type.lower().startswith((f"{kind}/", "application/octet-stream")):
        raise InvalidImage(f"the data URL does not hold the data of the {kind}", code=f"unsupported_{kind}_format")
    if len(body) // 4 * 3 > most + 2:
        raise InvalidImage(f"the {kind} has more than {most} bytes", code=f"{kind}_too_large")
    try:
        return _strict_base64(body)
    except ValueError as error:
        raise InvalidImage("the data URL is not valid base64") from error


def _strict_base64(text: str) -> bytes:
    """In slices, because decoding holds the interpreter lock. Only the last slice may end in padding."""
    slices = [text[begin : begin + _BASE64_SLICE] for begin in range(0, len(text), _BASE64_SLICE)]
    decoded = [binascii.a2b_base64(part, strict_mode=True) for part in slices]
    if len(text) % 4 or any(part.endswith("=") for part in slices[:-1]):
        raise ValueError("wrong padding")
    return b"".join(decoded)


def _read_file(source: LocalFile, config: MediaConfig) -> bytes:
    kind, most = source.kind, _max_bytes(config, source.kind)
    try:
        path = source.path if source.below is None else os.path.realpath(source.path)
        _check_below(path, source.below)
        with open(path, "rb", opener=_open_without_waiting) as file:
            # A folder on the way may have been replaced by a link meanwhile.
            _check_below(os.path.realpath(f"/proc/self/fd/{file.fileno()}"), source.below)
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise MediaFetchFailed(f"the {kind} file is not a regular file")
            if status.st_size > most:
                raise InvalidImage(
                    f"the {kind} has {status.st_size} bytes; at most {most} are allowed", code=f"{kind}_too_large"
                )
            data = file.read(most + 1)
            if len(data) > most:  # it has grown, or is one of those that have no size
                raise InvalidImage(f"the {kind} has more than {most} bytes", code=f"{kind}_too_large")
            return data
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise MediaFetchFailed(f"the {kind} file cannot be opened") from error


def _open_without_waiting(path: str, flags: int) -> int:
    """Opening a pipe must not block."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def _check_below(path: str, folder: str | None) -> None:
    if folder is None:
        return
    root = os.path.realpath(folder)
    if os.path.commonpath((root, path)) != root:
        raise MediaForbidden("the file is outside the folder that media may be read from")
