"""Instances' reports on themselves: sums of gauges and counters, ledgers, and progress.

Counters of a dead instance are kept, so that sums never decrease. The supervisor checks that instances live; here, that
live ones make progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from hydra_engine.cluster.channel import FrontendEnd
from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import Condition, InstanceState
from hydra_engine.core.messages import QueryLedger
from hydra_engine.core.reports import BudgetReport, InstanceSummary, LedgerReport, StageReport, Status, TransferReport
from hydra_engine.errors import HydraError
from hydra_engine.frontend.routing.instances import missing_now
from hydra_engine.frontend.transitions import Dispatcher

_SILENT_S = 5.0  # without a report this long an instance hangs; it sends several a second
_STUCK_S = 120.0  # no lane has finished a step for this long although there is work

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
    """The latest report of each instance that is up, and the counters of those that are gone."""

    def __init__(self) -> None:
        self._latest: dict[str, Status] = {}
        self._gone: list[Status] = []  # at most one: their sum
        self._stages: dict[str, dict[RequestId, StageReport]] = {}

    def put(self, name: str, status: Status) -> None:
        self._latest[name] = status
        self._stages[name] = {report.request_id: report for report in status.stages}

    def stage(self, name: str, number: RequestId, since_s: float) -> StageReport | None:
        """The stage of a request in the latest report of instance `name`; None if that is older than `since_s`."""
        status = self._latest.get(name)
        return None if status is None or status.time_s < since_s else self._stages[name].get(number)

    def forget(self, name: str) -> None:
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
        """The sum over all instances; None before the first report."""
        reports = [*self._latest.values(), *self._gone]
        return _sum_of(reports) if reports else None


def _sum_of(reports: Sequence[Status]) -> Status:
    if len(reports) == 1:
        return reports[0]
    sums = {name: sum(getattr(report, name) for report in reports) for name in (*_COUNTERS, *_GAUGES)}
    transfers, names = [report.transfer for report in reports], TransferReport.__struct_fields__
    return Status(
        time_s=max(report.time_s for report in reports),
        **sums,
        budget=_budget_of([report.budget for report in reports]),
        transfer=TransferReport(**{name: sum(getattr(transfer, name) for transfer in transfers) for name in names}),
    )


def _budget_of(budgets: Sequence[BudgetReport]) -> BudgetReport:
    """The sum of all steps, with the limits of the instance that decodes most; `limit_used` is weighted by full
    steps."""
    busiest = max(budgets, key=lambda budget: budget.decode_steps)
    sums = {name: sum(getattr(budget, name) for budget in budgets) for name in _BUDGET_COUNTERS}
    used = sum(budget.limit_used * budget.full_steps for budget in budgets)
    return msgspec.structs.replace(busiest, **sums, limit_used=used / max(sums["full_steps"], 1))


def ledger_of(query_id: int, reports: Mapping[str, LedgerReport]) -> LedgerReport:
    """The only report unchanged, or the sum of several with instance names before holders and problems."""
    if len(reports) == 1:
        return next(iter(reports.values()))
    return LedgerReport(
        query_id=query_id,
        **{name: sum(getattr(report, name) for report in reports.values()) for name in _LEDGER_SUMS},
        holders=tuple(f"{name}: {holder}" for name, report in reports.items() for holder in report.holders),
        problems=tuple(f"{name}: {problem}" for name, report in reports.items() for problem in report.problems),
    )


class LedgerQueries:
    """Ledger queries to all instances; one ends when each instance has answered or is gone. Not thread-safe: for the
    loop."""

    def __init__(self) -> None:
        self._open: dict[int, dict[str, asyncio.Future[LedgerReport | None]]] = {}

    async def ask(self, query_id: int, ends: Mapping[str, FrontendEnd]) -> LedgerReport:
        """Returns the sum over the instances that answer; an empty ledger if none does."""
        loop = asyncio.get_running_loop()
        answers = self._open[query_id] = {name: loop.create_future() for name in sorted(ends)}
        try:
            for end in ends.values():
                end.send([QueryLedger(query_id)])
            reports = dict(zip(answers, await asyncio.gather(*answers.values()), strict=True))
        finally:
            del self._open[query_id]
        return ledger_of(query_id, {name: report for name, report in reports.items() if report is not None})

    def answer(self, name: str, report: LedgerReport) -> None:
        _resolve(self._open.get(report.query_id, {}).get(name), report)

    def forget(self, name: str) -> None:
        """Stops waiting for the instance, which will not answer."""
        for answers in self._open.values():
            _resolve(answers.get(name), None)

    def fail(self, error: HydraError) -> None:
        for answers in self._open.values():
            for answer in answers.values():
                if not answer.done():
                    answer.set_exception(error)


def _resolve(answer: asyncio.Future[LedgerReport | None] | None, report: LedgerReport | None) -> None:
    if answer is not None and not answer.done():
        answer.set_result(report)


class Watch:
    """The check that requests are served and make progress, from the table of instances and their reports."""

    def __init__(self, dispatcher: Dispatcher, statuses: StatusTable) -> None:
        self._dispatcher = dispatcher
        self._statuses = statuses
        self._last_step: dict[str, tuple[int, float]] = {}

    def on_status(self, name: str, status: Status) -> None:
        steps = status.language_steps + status.vision_steps
        busy = status.num_running + status.num_waiting + status.num_encoding > 0
        latest = self._last_step.get(name)
        if latest is None or steps != latest[0] or not busy:
            self._last_step[name] = (steps, status.time_s)

    def forget(self, name: str) -> None:
        self._last_step.pop(name, None)

    def completed(self, state: InstanceState, summary: InstanceSummary | None) -> InstanceState:
        """Returns the supervisor's state with the frontend's knowledge added: role, status, and DRAINING if it is being
        drained."""
        instance = self._dispatcher.instances[state.name]
        draining = state.condition is Condition.READY and instance.condition is Condition.DRAINING
        condition, role = instance.condition if draining else state.condition, instance.role.letters
        return replace(state, role=role, condition=condition, status=instance.status, summary=summary)

    def problem(self, now: float, *, images: bool) -> str | None:
        """Returns hung, draining or instance_lost, or None while every stage is served. `images`: encoding counts as a
        stage."""
        instances = self._dispatcher.instances.values()
        missing = missing_now(instances, images=images)
        if missing is None:
            hung = {name for name, status in self._statuses.latest.items() if self._hangs(name, status, now)}
            return "hung" if hung and missing_now(instances, images=images, without=hung) is not None else None
        conditions = {instance.condition for instance in instances if instance.serves(missing)}
        if Condition.DRAINING in conditions:
            return "draining"
        return "hung" if Condition.SILENT in conditions else "instance_lost"

    def _hangs(self, name: str, status: Status, now: float) -> bool:
        if now - status.time_s > _SILENT_S:
            return True
        steps, since_s = self._last_step.get(name, (0, now))
        return bool(steps) and now - since_s > _STUCK_S and self._dispatcher.holds_work(name)
