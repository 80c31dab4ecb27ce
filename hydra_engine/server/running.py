"""Generations that run, by the ids that their clients know, so that one can be ended by its id.

A client reaches its own requests only: those of its tenant. Does not know formats, or how a generation runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from hydra_engine.errors import RequestAborted
from hydra_engine.server.context import Endable


class RunningRequests:
    """Running generations by (tenant, id). Ids are chosen by clients, so several may share one."""

    def __init__(self) -> None:
        self._scopes: dict[tuple[str, str], set[Endable]] = {}

    @contextmanager
    def running(self, tenant: str, ids: Iterable[str], scope: Endable) -> Iterator[None]:
        """`end` reaches it meanwhile under each of its ids."""
        keys = {(tenant, one) for one in ids}
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
        """How many were running and were not ending yet."""
        ending = [scope.end(_ended()) for scope in list(self._scopes.get((tenant, one), ()))]
        return sum(ending)


def _ended() -> RequestAborted:
    return RequestAborted("the request was ended by its id")
