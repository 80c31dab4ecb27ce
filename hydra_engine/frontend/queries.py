"""Questions that are put to all instances at once, answered when the last one has answered or is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from hydra_engine.core.messages import LedgerReport
from hydra_engine.errors import HydraError
from hydra_engine.frontend.reports import ledger_of


@dataclass(slots=True)
class _Query:
    answer: asyncio.Future[LedgerReport]
    waits_for: set[str]
    reports: dict[str, LedgerReport] = field(default_factory=dict)


class LedgerQueries:
    """Used on the loop."""

    def __init__(self) -> None:
        self._open: dict[int, _Query] = {}

    def open(self, query_id: int, names: Iterable[str]) -> asyncio.Future[LedgerReport]:
        """The sum over `names`, of those that answer; an empty ledger where there are none."""
        query = _Query(asyncio.get_running_loop().create_future(), set(names))
        self._open[query_id] = query
        self._end_if_answered(query_id, query)
        return query.answer

    def answer(self, name: str, report: LedgerReport) -> None:
        query = self._open.get(report.query_id)
        if query is not None:
            query.reports[name] = report
            query.waits_for.discard(name)
            self._end_if_answered(report.query_id, query)

    def gone(self, name: str) -> None:
        """The instance will not answer."""
        for query_id, query in list(self._open.items()):
            query.waits_for.discard(name)
            self._end_if_answered(query_id, query)

    def fail(self, error: HydraError) -> None:
        for query in self._open.values():
            if not query.answer.done():
                query.answer.set_exception(error)
        self._open.clear()

    def _end_if_answered(self, query_id: int, query: _Query) -> None:
        if query.waits_for and not query.answer.done():
            return
        del self._open[query_id]
        if not query.answer.done():
            query.answer.set_result(ledger_of(query_id, dict(sorted(query.reports.items()))))
