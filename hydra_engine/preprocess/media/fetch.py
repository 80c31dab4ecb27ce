"""The fetcher of pictures and videos: the only place that decides which addresses are contacted for a user's URL.

A host is resolved once, every address must be allowed, and exactly those addresses are dialled, by a child process that
reads the answers. Clients take turns at lookups of names: the system's resolver may occupy a thread for any time, even
after the lookup is abandoned, so a place is free again when its thread is. The machine's own addresses are not allowed,
public ones included: services there may trust local clients. Errors never quote what was fetched.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial

from yarl import URL

from hydra_engine.config import MediaConfig
from hydra_engine.core.fairness import Lease, Turns
from hydra_engine.core.units import size
from hydra_engine.errors import InvalidRequest, MediaFetchFailed, MediaForbidden, Unavailable
from hydra_engine.preprocess.media.sources import (
    IPAddress,
    RemoteFile,
    checked_url,
    is_public,
    max_bytes,
    parse_address,
    private,
)
from hydra_engine.preprocess.sandbox.bounded_http import Get
from hydra_engine.preprocess.sandbox.fetch_child import Ended
from hydra_engine.preprocess.sandbox.fetch_process import ChildLost, FetchProcess

MAX_REDIRECTS = 3
# Limits at one time. A client may take as many places as it leaves free, so a client alone gets half.
MAX_FETCHES = 256  # their bodies together are limited by `max_fetched_bytes`
MAX_FETCHES_OF_HOST = 32  # of one client alone, per name; twice as many per address
MAX_LOOKUPS = 64  # of host names; each takes a thread
MAX_WAITING = 16384  # fetches, and lookups; one client may have half
MAX_ADDRESSES = 64  # per name
MAX_DIALLED = 8

Resolve = Callable[[str, int], Awaitable[list[str]]]  # host, port -> addresses


def _is_own(address: IPAddress) -> bool:
    """True if this machine would talk to itself; sends nothing."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))
            return ipaddress.ip_address(probe.getsockname()[0]) == address
    except OSError:  # no route, so not this machine
        return False


class MediaFetcher:
    """The fetcher of RemoteFile sources. Tests replace `resolve`."""

    def __init__(self, config: MediaConfig, resolve: Resolve | None = None) -> None:
        self._config = config
        self._names = Names(MAX_LOOKUPS, resolve)
        self._slots = _places("fetches", MAX_FETCHES)
        self._slots_of_host: dict[str, tuple[Turns, int]] = {}  # (turns, fetches that hold or await a place)
        self._process = FetchProcess(answer_seconds=config.fetch_timeout_s / 2)

    def warm_up(self) -> None:
        """Starts the fetch process without waiting for it."""
        self._process.start()

    def close(self) -> None:
        self._process.close()

    async def fetch(self, source: RemoteFile, lease: Lease) -> bytes:
        """Returns the body; `lease` holds its bytes from now on, for its client. Raises MediaForbidden,
        MediaFetchFailed, or Unavailable if too much is being fetched; after 2 x `fetch_timeout_s` at the latest."""
        try:
            async with asyncio.timeout(2 * self._config.fetch_timeout_s):
                return await self._fetch(source, lease)
        except TimeoutError as error:
            raise _overloaded(source.kind) from error

    async def _fetch(self, source: RemoteFile, lease: Lease) -> bytes:
        fetching = _Fetching(source.kind, lease, self._config.fetch_timeout_s)
        url = source.url
        for _ in range(1 + MAX_REDIRECTS):
            answer = await self._get(url, fetching)
            if isinstance(answer, bytes):
                return answer
            url = answer
        raise MediaFetchFailed(f"the {source.kind} could not be fetched: more than {MAX_REDIRECTS} redirects")

    async def _get(self, url: URL, fetching: _Fetching) -> bytes | URL:
        """Returns the body, or the URL that a redirect points to. Uses a new connection, so no state is shared between
        hosts."""
        addresses = (await self._addresses(url, fetching))[:MAX_DIALLED]
        async with AsyncExitStack() as held:
            async with fetching.waiting():
                if url.raw_host not in addresses:
                    await held.enter_async_context(self._slot_of_host(url.raw_host or "", 1, fetching.client))
                for address in sorted(addresses):  # in one order, to prevent a deadlock
                    await held.enter_async_context(self._slot_of_host(address, 2, fetching.client))
                await held.enter_async_context(self._slots.slot(fetching.client))
            kind, most = fetching.kind, max_bytes(self._config, fetching.kind)
            body, ended = await self._ask(_question(url, addresses, kind, most), fetching)
        if ended.location is not None:
            return self._redirected(url, ended.location, kind)
        if ended.why is None:
            return b"".join(body)
        raise MediaFetchFailed(self._why(ended, fetching, most))

    def _redirected(self, url: URL, location: str, kind: str) -> URL:
        try:
            return checked_url(location, self._config, kind, redirected_by=url)
        except MediaForbidden:
            raise
        except InvalidRequest as error:
            raise MediaFetchFailed(f"the {kind}'s host redirects to a malformed URL") from error

    async def _ask(self, get: Get, fetching: _Fetching) -> tuple[list[bytes], Ended]:
        """Sends the request to the child, and once more to its successor if it is lost. A lost child's time does not
        count against the host."""
        for lost in (False, True):
            body: list[bytes] = []
            fetching.lease.release()

            def take(data: bytes, body: list[bytes] = body) -> None:
                if not fetching.lease.reserve(len(data)):
                    raise _overloaded(fetching.kind)
                body.append(data)

            try:
                async with fetching.waiting():
                    await self._process.wait_until_ready()
                with fetching.working() as left_s:
                    ended = await self._process.get(get, left_s, take)
            except ChildLost:
                continue
            if not (lost and ended.why == "stopped"):
                return body, ended
        raise Unavailable(f"the process that fetches {fetching.kind}s was stopped or killed; try again later")

    @asynccontextmanager
    async def _slot_of_host(self, host: str, weight: int, client: str) -> AsyncIterator[None]:
        """Holds a place among the fetches from this name or address; a client alone gets at most half of them."""
        num_slots = 2 * weight * MAX_FETCHES_OF_HOST
        slots, num_users = self._slots_of_host.get(host) or (_places("fetches from a host", num_slots), 0)
        self._slots_of_host[host] = slots, num_users + 1
        try:
            async with slots.slot(client):
                yield
        finally:
            slots, num_users = self._slots_of_host.pop(host)
            if num_users > 1:
                self._slots_of_host[host] = slots, num_users - 1

    def _why(self, ended: Ended, fetching: _Fetching, limit: int) -> str:
        kind = fetching.kind
        match ended.why:
            case "status":
                return f"the {kind}'s host answered with status {ended.status}"
            case "compressed":
                return f"the {kind}'s host sent a compressed answer that was not asked for"
            case "large":
                return f"the fetched {kind} is larger than {size(limit)}"
            case "stopped":
                return fetching.too_slow
            case "wasteful":
                return f"the {kind} could not be fetched: its host sends too little of it in too many pieces"
        return f"the {kind} could not be fetched: the connection failed"

    async def _addresses(self, url: URL, fetching: _Fetching) -> list[str]:
        assert url.raw_host is not None and url.port is not None
        kind = fetching.kind
        if parse_address(url.raw_host) is not None:
            return self._checked([url.raw_host], kind)
        async with fetching.waiting():
            lookup = await self._names.start(fetching.client, url.raw_host, url.port)
        try:
            with fetching.working() as left_s:
                async with asyncio.timeout(left_s):
                    addresses = await asyncio.shield(lookup)
        except TimeoutError as error:
            raise MediaFetchFailed(fetching.too_slow) from error
        except (OSError, UnicodeError) as error:
            raise MediaFetchFailed(f"the {kind} URL's host name could not be resolved") from error
        if not addresses:
            raise MediaFetchFailed(f"the {kind} URL's host name could not be resolved")
        if len(addresses) > MAX_ADDRESSES:
            raise MediaFetchFailed(f"the {kind} URL's host name has more than {MAX_ADDRESSES} addresses")
        return self._checked(addresses, kind)

    def _checked(self, addresses: list[str], kind: str) -> list[str]:
        parsed = [ipaddress.ip_address(address) for address in addresses]
        if not self._config.allow_private_media and (not all(map(is_public, parsed)) or any(map(_is_own, parsed))):
            raise private(kind)
        return addresses


class _Fetching:
    """The state of one fetch over all its hops: the time left for waiting for others and for its own work."""

    def __init__(self, kind: str, lease: Lease, seconds: float) -> None:
        self.kind = kind
        self.client = lease.client or ""
        self.lease = lease
        self.too_slow = f"the {kind} could not be fetched within {seconds:g} seconds"
        self._waiting_s = self._working_s = seconds

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Counts the time inside as waiting. Raises Unavailable when that is used up."""
        begun_s = time.monotonic()
        try:
            async with asyncio.timeout(self._waiting_s):
                yield
        except TimeoutError as error:
            raise _overloaded(self.kind) from error
        finally:
            self._waiting_s -= time.monotonic() - begun_s

    @contextmanager
    def working(self) -> Iterator[float]:
        """Counts the time inside as work. Yields the seconds that are left."""
        begun_s = time.monotonic()
        try:
            yield self._working_s
        finally:
            self._working_s -= time.monotonic() - begun_s


def _places(name: str, num_slots: int) -> Turns:
    return Turns(name, num_slots=num_slots, max_waiting=MAX_WAITING, keeps_free=True)


def _question(url: URL, addresses: Sequence[str], kind: str, max_bytes: int) -> Get:
    assert url.raw_host is not None and url.port is not None
    return Get(
        addresses=tuple(addresses),
        port=url.port,
        tls_name=url.raw_host.rstrip(".") if url.scheme == "https" else None,
        host=url.host_port_subcomponent or "",
        target=url.raw_path_qs,
        accept=f"{kind}/*",
        max_bytes=max_bytes,
    )


def _overloaded(kind: str) -> Unavailable:
    return Unavailable(f"too many images and videos are being fetched; try again later or send the {kind} as data")


# ---- lookups of host names


class Names:
    """Lookups of host names, at most `max_lookups` at once. Tests replace `resolve`."""

    def __init__(self, max_lookups: int, resolve: Resolve | None = None) -> None:
        self._resolve = resolve or _system_resolve
        self._places = Turns("lookups of host names", num_slots=max_lookups, max_waiting=MAX_WAITING, keeps_free=True)
        self._lookups: set[asyncio.Future[list[str]]] = set()

    async def start(self, client: str, host: str, port: int) -> asyncio.Future[list[str]]:
        """Returns a started lookup, after waiting for a place. Await it through asyncio.shield; it raises OSError or
        UnicodeError if the name has no address. Raises Unavailable if too many lookups wait."""
        await self._places.acquire(client)
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        lookup = asyncio.ensure_future(self._resolve(host, port))
        self._lookups.add(lookup)

        def on_done(lookup: asyncio.Future[list[str]]) -> None:
            self._lookups.discard(lookup)
            self._places.release(client, loop.time() - begun_s)
            if not lookup.cancelled():
                lookup.exception()  # retrieved here, since the waiter may be gone

        lookup.add_done_callback(on_done)
        return lookup


async def _system_resolve(host: str, port: int) -> list[str]:
    """Resolves in a raw thread: neither the end of the process nor the loop waits for it, nor for its start, which
    takes long on a busy machine."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[list[str]] = loop.create_future()
    try:
        _thread.start_new_thread(_look_up, (host, port, loop, found))
    except RuntimeError as error:
        raise Unavailable("no thread to look a host name up could be started; try again later") from error
    return await found


def _look_up(host: str, port: int, loop: asyncio.AbstractEventLoop, found: asyncio.Future[list[str]]) -> None:
    settle: Callable[[], None]
    try:
        records = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        settle = partial(_settle, found, error)
    else:
        settle = partial(
            _settle, found, list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in records))
        )
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(settle)


def _settle(found: asyncio.Future[list[str]], outcome: list[str] | Exception) -> None:
    if found.done():
        return
    if isinstance(outcome, Exception):
        found.set_exception(outcome)
    else:
        found.set_result(outcome)
