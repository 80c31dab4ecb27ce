"""The core of the front process: from a user's call to a Submit message, and from token messages back to the caller.

Everything here runs on one asyncio loop and never blocks it; `engine.py` gives it its public forms. Owns the requests
that are not finished, the links to the instances and the intake. Does not know HTTP and never imports torch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra_engine.clock import Clock, MonotonicClock
from hydra_engine.cluster.supervisor import InstanceLink, OnProgress, Supervisor
from hydra_engine.config import EngineConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import (
    Abort,
    Delta,
    Finished,
    InstanceSummary,
    LedgerReport,
    QueryLedger,
    SetFault,
    Status,
    Submit,
    ToFront,
    Tokens,
)
from hydra_engine.core.outputs import FinishReason, Result
from hydra_engine.core.plans import TokenLogprobs
from hydra_engine.core.request import SamplingParams, Slo
from hydra_engine.errors import EngineClosed, HydraError, RequestAborted, RequestFailed, Unavailable, from_info
from hydra_engine.front.active import ActiveRequest, usage_of
from hydra_engine.front.handle import Handle
from hydra_engine.intake.detokenize import IncrementalDetokenizer
from hydra_engine.intake.intake import Intake
from hydra_engine.intake.tokenizer import load_tokenizer
from hydra_engine.observe.trace import TraceRing
from hydra_engine.specs.registry import load_spec

logger = logging.getLogger(__name__)

Observer = Callable[[Result], None]

_SILENT_S = 5.0  # an instance reports several times a second; this long without a word is no progress
_STUCK_S = 120.0  # no lane finished a step for this long although there is work


@dataclass(frozen=True, slots=True)
class Call:
    """What a user asks for, as given: exactly one of `prompt` (text or token ids) and `messages`."""

    sampling: SamplingParams
    prompt: str | Sequence[int] | None = None
    messages: Sequence[dict[str, Any]] | None = None
    images: Any = None
    raw: bool = False
    slo: Slo = field(default_factory=Slo)
    cache_salt: str = ""
    priority: int = 0


class Front:
    """Start it on a running loop, submit, close. States: loading, ok, instance_lost, closed."""

    def __init__(
        self, config: EngineConfig, *, processes: bool, strict_channel: bool = False, clock: Clock | None = None
    ) -> None:
        self.config = config
        self.state = "loading"
        self.trace = TraceRing()
        self.summaries: list[InstanceSummary] = []
        self._clock = clock or MonotonicClock()
        self._supervisor = Supervisor(config, processes=processes, strict_channel=strict_channel)
        self._links: list[InstanceLink] = []
        self._intake: Intake | None = None
        self._active: dict[RequestId, ActiveRequest] = {}
        self._admitting = 0
        self._intake_tasks: dict[RequestId, asyncio.Task[None]] = {}
        self._ids = itertools.count(1)
        self._queries: dict[int, asyncio.Future[LedgerReport]] = {}
        self._observers: list[Observer] = []
        self._status: Status | None = None
        self._last_step: tuple[int, float] = (0, 0.0)
        self._loop = asyncio.get_running_loop()

    # ---- life

    async def start(self, on_progress: OnProgress) -> None:
        """Ready when this returns. The tokenizer loads while the instance reads its weights."""
        loop = asyncio.get_running_loop()
        spec = await loop.run_in_executor(None, load_spec, self.config.model_path, self.config.spec_options)
        tokenizer_job = loop.run_in_executor(None, load_tokenizer, self.config.model_path)
        try:
            self._links = await self._supervisor.start(on_progress, self._on_messages, self._on_lost)
        except BaseException:
            tokenizer_job.cancel()
            raise
        self.summaries = [link.summary for link in self._links]
        try:
            tokenizer = await tokenizer_job
        except BaseException:
            await self._supervisor.stop()
            raise
        self._intake = Intake(
            spec=spec,
            tokenizer=tokenizer,
            media=self.config.media,
            max_model_len=self.summaries[0].max_model_len,
            seed=self.config.seed,
            chat_template_path=self.config.chat_template,
            clock=self._clock,
        )
        await self._intake.warm_up()
        self.state = "ok"

    async def close(self) -> None:
        """Fails what still runs, stops the instances. Idempotent."""
        if self.state == "closed":
            return
        self.state = "closed"
        for active in list(self._active.values()):
            self._fail(active, None, EngineClosed("the engine was closed while this request ran"))
        await self._supervisor.stop()
        if self._intake is not None:
            await self._intake.close()

    # ---- requests

    def open_handle(self, request_id: str | None = None) -> tuple[RequestId, Handle]:
        """A handle that can be cancelled before the request exists. From any thread."""
        number = RequestId(next(self._ids))
        return number, Handle(request_id or f"req-{number}", lambda: self.cancel(number))

    async def submit(self, number: RequestId, handle: Handle, call: Call) -> None:
        """Intake, then the instance's queue. Raises RequestError before anything is queued."""
        self._check_open()
        if handle.cancelled:
            raise RequestAborted("the request was cancelled")
        arrival_s = self._clock.now()
        assert self._intake is not None
        self._admitting += 1
        try:
            prepared = await self._intake.prepare(
                number,
                prompt=call.prompt,
                messages=call.messages,
                images=call.images,
                sampling=call.sampling,
                raw=call.raw,
                slo=call.slo,
                arrival_s=arrival_s,
                cache_salt=call.cache_salt,
                priority=call.priority,
            )
            self._check_running()
        finally:
            self._admitting -= 1
        tokenizer = self._intake.tokenizer
        self._active[number] = ActiveRequest(
            prepared.request,
            handle,
            tokenizer,
            IncrementalDetokenizer(tokenizer, call.sampling),
            prepared.spans,
            self._limits_of(prepared.request.slo),
        )
        handle.prompt_usage = usage_of(prepared.request)
        self._links[0].end.send([Submit(prepared.request, prepared.pixels)])

    def _limits_of(self, own: Slo) -> Slo:
        """The latency limits that hold for a request: its own, otherwise the engine's."""
        engine = self.config.scheduler
        ttft_s = own.ttft_s if own.ttft_s is not None else engine.ttft_slo
        return Slo(ttft_s, own.tpot_s if own.tpot_s is not None else engine.tpot_slo)

    async def submit_detached(self, number: RequestId, handle: Handle, call: Call) -> None:
        """As `submit`, but what goes wrong is told to the handle's readers."""
        task = asyncio.current_task()
        assert task is not None
        self._intake_tasks[number] = task
        try:
            await self.submit(number, handle, call)
        except HydraError as error:
            handle.fail(error)
        except asyncio.CancelledError:
            handle.fail(RequestAborted("the request was cancelled"))
            raise
        finally:
            del self._intake_tasks[number]

    def cancel(self, number: RequestId) -> None:
        """From any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel, number)

    def _cancel(self, number: RequestId) -> None:
        if number in self._intake_tasks:
            self._intake_tasks[number].cancel()
        active = self._active.get(number)
        if active is not None and not active.closed:
            active.cancelled = True
            active.handle.fail(RequestAborted("the request was cancelled"))
            self._links[0].end.send([Abort(number)])

    def _check_open(self) -> None:
        self._check_running()
        limit = self.config.scheduler.max_queue
        if len(self._active) + self._admitting >= limit:
            raise Unavailable(f"{limit} requests are already queued or running; try again later", code="overloaded")

    def _check_running(self) -> None:
        match self.state:
            case "ok":
                return
            case "loading":
                raise Unavailable("the model is still loading", code="not_ready", retry_after_s=2)
            case "instance_lost":
                raise Unavailable("the engine process has ended; the server must be restarted", code="instance_lost")
            case _:
                raise EngineClosed("the engine is closed; make a new Engine")

    # ---- messages from the instances

    def _on_messages(self, messages: list[ToFront]) -> None:
        for message in messages:
            match message:
                case Tokens():
                    columns = message.request_ids, message.positions, message.token_ids
                    for number, position, token_id in zip(*columns, strict=True):
                        self._on_tokens(RequestId(number), position, (token_id,), message.time_s)
                case Delta():
                    number, tokens = message.request_id, message.token_ids
                    self._on_tokens(number, message.position, tokens, message.time_s, message.logprobs)
                case Finished():
                    self._on_finished(message)
                case Status():
                    self._on_status(message)
                case LedgerReport():
                    query = self._queries.pop(message.query_id, None)
                    if query is not None and not query.done():
                        query.set_result(message)
                case _:
                    logger.error("unexpected message %s", type(message).__name__)

    def _on_tokens(
        self,
        number: RequestId,
        position: int,
        token_ids: Sequence[int],
        time_s: float,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        active = self._active.get(number)
        if active is None:
            return
        piece = active.on_tokens(position, token_ids, time_s, logprobs)
        if piece is None:
            return
        active.handle.feed(piece)
        if active.stop_string is not None:
            self._links[0].end.send([Abort(number)])

    def _on_finished(self, finished: Finished) -> None:
        active = self._active.pop(finished.request_id, None)
        if active is None:
            return
        now = self._clock.now()
        reason = FinishReason(finished.reason)
        if active.cancelled:
            self._report(active, active.failed_result(finished, now, RequestAborted("the request was cancelled")))
        elif reason is FinishReason.ERROR or (reason is FinishReason.ABORT and active.stop_string is None):
            error = from_info(finished.error) if finished.error else RequestFailed("the request ended without a reason")
            self._fail(active, finished, error)
        else:
            piece = active.on_finished(finished, now)
            assert piece.result is not None
            active.handle.feed(piece)
            self._report(active, piece.result)

    def _fail(self, active: ActiveRequest, finished: Finished | None, error: HydraError) -> None:
        self._active.pop(active.request.id, None)
        if not active.handle.done:
            active.handle.fail(error)
        self._report(active, active.failed_result(finished, self._clock.now(), error))

    def _report(self, active: ActiveRequest, result: Result) -> None:
        self.trace.add(result.request_id, active.request.arrival_s, result.timeline)
        for observer in self._observers:
            observer(result)

    def _on_status(self, status: Status) -> None:
        steps = status.language_steps + status.vision_steps
        busy = status.num_running + status.num_waiting + status.num_encoding > 0
        if steps != self._last_step[0] or not busy:
            self._last_step = (steps, status.time_s)
        self._status = status

    def _on_lost(self, name: str) -> None:
        if self.state in ("closed",):
            return
        logger.error("instance %s ended unexpectedly", name)
        self.state = "instance_lost"
        error = Unavailable("the engine process that held this request ended", code="instance_lost", retry_after_s=5)
        for active in list(self._active.values()):
            self._fail(active, None, error)
        for query in self._queries.values():
            if not query.done():
                query.set_exception(error)
        self._queries.clear()

    # ---- what others may ask

    @property
    def intake(self) -> Intake:
        if self._intake is None:
            self._check_running()
        assert self._intake is not None
        return self._intake

    @property
    def num_active(self) -> int:
        return len(self._active) + self._admitting

    def add_observer(self, observer: Observer) -> None:
        self._observers.append(observer)

    def stats(self) -> Status | None:
        """The instance's latest report; None before the first."""
        return self._status

    def health(self) -> tuple[bool, str]:
        """(serving and making progress, one word why not)."""
        if self.state != "ok":
            return False, self.state
        now = self._clock.now()
        if self._status is not None and now - self._status.time_s > _SILENT_S:
            return False, "hung"
        if self._status is not None and self._last_step[1] and now - self._last_step[1] > _STUCK_S and self._active:
            return False, "hung"
        return True, "ok"

    async def ledger(self, timeout_s: float = 5.0) -> LedgerReport:
        """What the instance holds right now."""
        self._check_running()
        query_id = next(self._ids)
        future: asyncio.Future[LedgerReport] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = future
        self._links[0].end.send([QueryLedger(query_id)])
        return await asyncio.wait_for(future, timeout_s)

    def set_fault(self, point: str, action: str, argument: str = "") -> None:
        self._links[0].end.send([SetFault(point, action, argument)])
