"""What one client may ask for: answers at once, and requests a minute. Beyond it 429, while others are served.

A client is the holder of an API key; without keys it is the address at the other end of the connection, for IPv6 the
network of 64 bits that one customer usually has. Headers that name another address are not believed. Does not know
what is asked for; how many requests the engine takes in all is the engine's business (503).
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aiohttp import web

from hydra_engine.errors import RateLimited
from hydra_engine.server.context import TENANT

MAX_CLIENTS = 10_000  # remembered at once


@dataclass(slots=True)
class _Client:
    running: int  # answers that it waits for
    tokens: float  # requests that it may send now
    refilled_s: float


class ClientLimits:
    """0 turns a limit off. Both count what was let in; what was refused costs a client nothing."""

    def __init__(self, most_at_once: int, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_at_once = most_at_once
        self._per_minute = per_minute
        self._clock = clock
        self._clients: OrderedDict[str, _Client] = OrderedDict()  # the longest unseen first

    @property
    def num_known(self) -> int:
        return len(self._clients)

    def count(self, client: str) -> None:
        """One request has come. Raises RateLimited."""
        if not self._per_minute:
            return
        known = self._find(client)
        if known.tokens < 1:
            wait_s = max(1, math.ceil((1 - known.tokens) * 60 / self._per_minute))
            raise RateLimited(
                f"Rate limit reached: this client may send {self._per_minute} requests a minute. Please try again in "
                f"{wait_s} s.",
                retry_after_s=wait_s,
            )
        known.tokens -= 1

    @contextmanager
    def running(self, client: str, num_answers: int) -> Iterator[None]:
        """While they are waited for. Raises RateLimited."""
        if not self._most_at_once:
            yield
            return
        known = self._find(client)
        if known.running + num_answers > self._most_at_once:
            raise RateLimited(
                f"Rate limit reached: this client waits for {known.running} answers and asks for {num_answers} more; "
                f"at most {self._most_at_once} at once are allowed. Please wait for one of them.",
                retry_after_s=1,
            )
        known.running += num_answers
        try:
            yield
        finally:
            known.running -= num_answers

    def _find(self, name: str) -> _Client:
        """With its tokens up to date. An idle client is forgotten when there are too many; it starts anew then."""
        now = self._clock()
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client(0, self._per_minute, now)
            self._forget()
        self._clients.move_to_end(name)
        refill = (now - client.refilled_s) * self._per_minute / 60
        client.tokens = min(self._per_minute, client.tokens + refill)
        client.refilled_s = now
        return client

    def _forget(self) -> None:
        """The clients that wait for answers are as many as there are requests at most, which others bound."""
        while len(self._clients) > MAX_CLIENTS:
            idle = next((name for name, client in self._clients.items() if not client.running), None)
            if idle is None:
                return
            del self._clients[idle]


def client_of(request: web.Request) -> str:
    if tenant := request.get(TENANT, ""):
        return tenant
    try:
        address = ipaddress.ip_address((request.remote or "").partition("%")[0])
    except ValueError:
        return "unknown"
    if isinstance(address, ipaddress.IPv4Address) or address.ipv4_mapped is not None:
        return str(getattr(address, "ipv4_mapped", None) or address)
    return str(ipaddress.IPv6Network((address, 64), strict=False))
