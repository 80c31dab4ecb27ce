"""Generations that run, by the ids that their clients know, so that one can be ended by its id.

A client reaches its own requests only: those of its tenant. Does not know formats, or how a generation runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from aiohttp import web

from hydra_engine.errors import RequestAborted
from hydra_engine.server.admission import CLIENT_LIMITS, client_of
from hydra_engine.server.context import ANSWER_ID, LIFECYCLE, REQUEST_ID, TENANT, endable


class RunningRequests:
    """Scopes of running generations by (tenant, id). Ids are chosen by clients, so several may share one."""

    def __init__(self) -> None:
        self._scopes: dict[tuple[str, str], set[asyncio.Timeout]] = {}

    @asynccontextmanager
    async def running(self, tenant: str, ids: Iterable[str]) -> AsyncIterator[None]:
        """Raises RequestAborted inside, at whatever is waited for, when `end` names one of the ids."""
        keys = {(tenant, one) for one in ids}
        async with endable(RequestAborted("the request was ended by its id")) as scope:
            for key in keys:
                self._scopes.setdefault(key, set()).add(scope)
            try:
                yield
            finally:
                for key in keys:
                    self._scopes[key].discard(scope)
                    if not self._scopes[key]:
                        del self._scopes[key]

    def end(self, tenant: str, one: str) -> int:
        """How many were running and are not ending yet."""
        now = asyncio.get_running_loop().time()
        ending = [scope for scope in self._scopes.get((tenant, one), ()) if scope.when() is None]
        for scope in ending:
            scope.reschedule(now)
        return len(ending)


RUNNING = web.AppKey("running_requests", RunningRequests)


@asynccontextmanager
async def admitted(request: web.Request, num_answers: int) -> AsyncIterator[None]:
    """Where a generation runs: counted, refused while the server drains or its client has too many, ended by its id or
    by the end of a drain."""
    client = request.app[CLIENT_LIMITS].running(client_of(request), num_answers)
    ids = (request[ANSWER_ID], request[REQUEST_ID])
    running = request.app[RUNNING].running(request.get(TENANT, ""), ids)
    with client:
        async with request.app[LIFECYCLE].admit(), running:
            yield
