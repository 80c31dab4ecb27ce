"""Lookups of host names, which clients take in turn.

The system's resolver takes a thread for as long as it pleases, also when nobody waits any more, so a place is free
again when its thread is. Does not know which addresses may be asked.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from functools import partial

from hydra_engine.core.fairness.turns import Turns
from hydra_engine.errors import Unavailable

MAX_WAITING = 16384  # lookups, half of them of one client

Resolve = Callable[[str, int], Awaitable[list[str]]]  # host, port -> addresses


class Names:
    """`resolve` can be replaced in tests."""

    def __init__(self, max_lookups: int, resolve: Resolve | None = None) -> None:
        self._resolve = resolve or _system_resolve
        self._places = Turns("lookups of host names", num_places=max_lookups, max_waiting=MAX_WAITING, keeps_free=True)
        self._lookups: set[asyncio.Future[list[str]]] = set()

    async def start(self, client: str, host: str, port: int) -> asyncio.Future[list[str]]:
        """A lookup that has begun, after a wait for a place. Awaited by way of asyncio.shield it raises OSError or
        UnicodeError where the name has no address. Raises Unavailable where too many wait."""
        await self._places.take(client)
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        lookup = asyncio.ensure_future(self._resolve(host, port))
        self._lookups.add(lookup)

        def on_done(lookup: asyncio.Future[list[str]]) -> None:
            self._lookups.discard(lookup)
            self._places.give_back(client, loop.time() - begun_s)
            if not lookup.cancelled():
                lookup.exception()  # there may be nobody who waits

        lookup.add_done_callback(on_done)
        return lookup


async def _system_resolve(host: str, port: int) -> list[str]:
    """Resolves in a thread that neither the end of this process nor the loop waits for, not even for its begin: on
    a busy machine that takes long."""
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
    with contextlib.suppress(RuntimeError):  # the loop has ended, and with it whoever waited
        loop.call_soon_threadsafe(settle)


def _settle(found: asyncio.Future[list[str]], outcome: list[str] | Exception) -> None:
    if found.done():
        return
    if isinstance(outcome, Exception):
        found.set_exception(outcome)
    else:
        found.set_result(outcome)
