"""Host name lookups, for which clients take turns.

The system's resolver may occupy a thread for any time, even after the lookup is abandoned, so a place is free again
when its thread is. Does not know which addresses are allowed.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from functools import partial

from hydra_engine.core.fairness import Turns
from hydra_engine.errors import Unavailable

MAX_WAITING = 16384  # lookups; one client may have half

Resolve = Callable[[str, int], Awaitable[list[str]]]  # host, port -> addresses


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
