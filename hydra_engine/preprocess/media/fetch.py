"""The fetcher of pictures and videos: the one place that opens URLs which a user names.

A host is resolved once, every address must be allowed, and those addresses are the ones dialled. The machine's own
addresses are not, public ones included: what listens there may trust whoever is on this machine. Errors never quote
what was fetched.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from hydra_engine.config import MediaConfig
from hydra_engine.core.fairness.byte_budget import Lease
from hydra_engine.core.units import size
from hydra_engine.errors import MediaFetchFailed, Unavailable
from hydra_engine.preprocess.media.sources import (
    IPAddress,
    RemoteFile,
    checked_url,
    is_public,
    literal,
    max_bytes,
    private,
)

MAX_REDIRECTS = 3
MAX_FETCHES = 256  # at once; what they may hold together is `max_fetched_bytes`
MAX_FETCHES_OF_HOST = 32  # at once, so that one slow host does not keep others from being asked
MAX_LOOKUPS = 32  # of host names at once; each has a thread while the resolver takes its time

_CHUNK_BYTES = 1 << 16
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "hydra-engine"}
# What reaching a hostile host raises: aiohttp's own errors, the socket's and TLS's (OSError), broken URLs.
_FETCH_ERRORS = (aiohttp.ClientError, OSError, ValueError, asyncio.IncompleteReadError)

_lookups = ThreadPoolExecutor(MAX_LOOKUPS, thread_name_prefix="preprocess-names")

Resolve = Callable[[str, int], Awaitable[list[str]]]  # host, port -> addresses


def _is_own(address: IPAddress) -> bool:
    """Whether this machine would talk to itself; nothing is sent to find out."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))
            return ipaddress.ip_address(probe.getsockname()[0]) == address
    except OSError:  # no way there, so no way to ourselves
        return False


class MediaFetcher:
    """Reads RemoteFile sources. `resolve` can be replaced in tests."""

    def __init__(self, config: MediaConfig, resolve: Resolve | None = None) -> None:
        self._config = config
        self._resolve = resolve or _system_resolve
        self._slots = asyncio.Semaphore(MAX_FETCHES)
        self._slots_of_host: dict[str, tuple[asyncio.Semaphore, int]] = {}  # and how many hold or await one

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
        slots, num_turns = self._slots_of_host.get(host, (asyncio.Semaphore(MAX_FETCHES_OF_HOST), 0))
        self._slots_of_host[host] = slots, num_turns + 1
        async with AsyncExitStack() as held:
            held.callback(self._forget, host)
            async with asyncio.timeout(self._config.fetch_timeout_s):
                await held.enter_async_context(slots)
                await held.enter_async_context(self._slots)
            yield

    def _forget(self, host: str) -> None:
        slots, num_turns = self._slots_of_host.pop(host)
        if num_turns > 1:
            self._slots_of_host[host] = slots, num_turns - 1

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
                return checked_url(str(url.join(URL(location))), self._config, kind)
            if response.status != 200:
                raise MediaFetchFailed(f"the {kind}'s host answered with status {response.status}")
            return await self._body(response, kind, lease)

    async def _addresses(self, url: URL, kind: str) -> list[str]:
        assert url.raw_host is not None and url.port is not None
        if literal(url.raw_host) is not None:
            return self._checked([url.raw_host], kind)
        try:
            addresses = await self._resolve(url.raw_host, url.port)
        except (OSError, UnicodeError) as error:
            raise MediaFetchFailed(f"the {kind} URL's host name could not be resolved") from error
        if not addresses:
            raise MediaFetchFailed(f"the {kind} URL's host name could not be resolved")
        return self._checked(addresses, kind)

    def _checked(self, addresses: list[str], kind: str) -> list[str]:
        parsed = [ipaddress.ip_address(address) for address in addresses]
        if not self._config.allow_private_media and (not all(map(is_public, parsed)) or any(map(_is_own, parsed))):
            raise private(kind)
        return addresses

    async def _body(self, response: aiohttp.ClientResponse, kind: str, lease: Lease) -> bytes:
        most = max_bytes(self._config, kind)
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise MediaFetchFailed(f"the {kind}'s host sent a compressed answer that was not asked for")
        if (response.content_length or 0) > most:
            raise MediaFetchFailed(f"the fetched {kind} is larger than {size(most)}")
        body = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
            if len(body) + len(chunk) > most:
                raise MediaFetchFailed(f"the fetched {kind} is larger than {size(most)}")
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
    records = await asyncio.get_running_loop().run_in_executor(_lookups, look_up)
    return list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in records))
