"""Reports of several instances as one: gauges and counters summed, ledgers added up.

Counters of an instance that has died are kept, so that sums never go back. Does not know how reports arrive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import BudgetReport, LedgerReport, StageReport, Status, TransferReport

_COUNTERS = (
    *("num_preemptions", "language_steps", "vision_steps", "language_busy_s", "vision_busy_s"),
    *("prompt_tokens", "generation_tokens", "images_encoded"),
)
_GAUGES = (
    *("num_running", "num_waiting", "num_encoding", "kv_blocks_used", "kv_blocks_total", "image_blocks_used"),
    *("image_blocks_total", "progress", "num_handing_over", "num_arriving", "num_decoding"),
)
_TRANSFER_GAUGES = ("offers", "pulls")
_BUDGET_COUNTERS = ("decode_steps", "late_steps", "stretched_steps", "full_steps")
_LEDGER_SUMS = (
    *("num_requests", "kv_blocks_held", "kv_blocks_total", "image_blocks_held", "image_blocks_total"),
    *("pixel_bytes", "state_slots_held", "state_slots_total", "offers", "pulls"),
)


class StatusTable:
    """The latest report of each instance that is up, and what those that are gone have counted."""

    def __init__(self) -> None:
        self._latest: dict[str, Status] = {}
        self._gone: list[Status] = []  # at most one: their sum
        self._stages: dict[str, dict[RequestId, StageReport]] = {}

    def put(self, name: str, status: Status) -> None:
        self._latest[name] = status
        self._stages[name] = {report.request_id: report for report in status.stages}

    def stage(self, name: str, number: RequestId, since_s: float) -> StageReport | None:
        """The latest report of instance `name` about a request, if it came since then."""
        status = self._latest.get(name)
        return None if status is None or status.time_s < since_s else self._stages[name].get(number)

    def gone(self, name: str) -> None:
        status = self._latest.pop(name, None)
        self._stages.pop(name, None)
        if status is not None:
            counted = msgspec.structs.replace(
                status,
                **dict.fromkeys(_GAUGES, 0),
                transfer=msgspec.structs.replace(status.transfer, **dict.fromkeys(_TRANSFER_GAUGES, 0)),
            )
            self._gone = [_sum_of([*self._gone, counted])]

    @property
    def latest(self) -> dict[str, Status]:
        return dict(self._latest)

    def total(self) -> Status | None:
        """None before the first report."""
        reports = [*self._latest.values(), *self._gone]
        return _sum_of(reports) if reports else None


def _sum_of(reports: Sequence[Status]) -> Status:
    if len(reports) == 1:
        return reports[0]
    sums = {name: sum(getattr(report, name) for report in reports) for name in (*_COUNTERS, *_GAUGES)}
    return Status(
        time_s=max(report.time_s for report in reports),
        **sums,
        budget=_budget_of([report.budget for report in reports]),
        transfer=_transfer_of([report.transfer for report in reports]),
    )


def _budget_of(budgets: Sequence[BudgetReport]) -> BudgetReport:
    """Limits of the instance that decodes most, steps of all; `limit_used` is weighted by full steps."""
    busiest = max(budgets, key=lambda budget: budget.decode_steps)
    sums = {name: sum(getattr(budget, name) for budget in budgets) for name in _BUDGET_COUNTERS}
    used = sum(budget.limit_used * budget.full_steps for budget in budgets)
    return msgspec.structs.replace(busiest, **sums, limit_used=used / max(sums["full_steps"], 1))


def _transfer_of(transfers: Sequence[TransferReport]) -> TransferReport:
    names = TransferReport.__struct_fields__
    return TransferReport(**{name: sum(getattr(transfer, name) for transfer in transfers) for name in names})


def ledger_of(query_id: int, reports: Mapping[str, LedgerReport]) -> LedgerReport:
    """One instance's report as it is; of several, sums, with the names of those that hold and complain."""
    if len(reports) == 1:
        return next(iter(reports.values()))
    return LedgerReport(
        query_id=query_id,
        **{name: sum(getattr(report, name) for report in reports.values()) for name in _LEDGER_SUMS},
        holders=tuple(f"{name}: {holder}" for name, report in reports.items() for holder in report.holders),
        problems=tuple(f"{name}: {problem}" for name, report in reports.items() for problem in report.problems),
    )
