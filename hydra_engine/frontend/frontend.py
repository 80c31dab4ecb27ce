"""The core of the frontend process: start and end, a call's way through the preprocessor, and queries about the engine.

Everything here runs on one asyncio loop and never blocks it; `engine.py` gives it its public forms. Owns the
preprocessor and the links to the instances; `transitions.py` decides about admitted requests. Does not know HTTP and
never imports torch.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import replace
from importlib import import_module
from typing import Any

from hydra_engine.clock import Clock, MonotonicClock
from hydra_engine.cluster.launcher import Ahead
from hydra_engine.cluster.member import InstanceLink
from hydra_engine.cluster.spawn import INSTANCE, preload
from hydra_engine.cluster.supervisor import Supervisor
from hydra_engine.config import EngineConfig
from hydra_engine.core.call import GenerationCall
from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import InstanceState
from hydra_engine.core.messages import Loading, ResetCaches, ToFrontend, ToInstance
from hydra_engine.core.outputs import Result
from hydra_engine.core.processes.preloaded import CURRENT, Preloaded
from hydra_engine.core.reports import InstanceSummary, LedgerReport, Status
from hydra_engine.core.sampling import NO_DEFAULTS, GenerationDefaults
from hydra_engine.errors import EngineClosed, HydraError, InvalidRequest, RequestAborted, Unavailable, retry_after_s
from hydra_engine.frontend.choices import Choices
from hydra_engine.frontend.handle import Handle
from hydra_engine.frontend.progress import JointProgress, OnProgress
from hydra_engine.frontend.reports import LedgerQueries, StatusTable, Watch
from hydra_engine.frontend.request import ActiveRequest, activate, usage_of
from hydra_engine.frontend.routing.decode_stealing import DecodeStealing
from hydra_engine.frontend.routing.instances import missing_for_good
from hydra_engine.frontend.routing.placement import Placement, check_fits, plan_switches, switch_roles
from hydra_engine.frontend.routing.stand_ins import StandIns
from hydra_engine.frontend.transitions import RETRY_AFTER_S, Dispatcher, Report
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.models.specs.registry import load_spec, modules_to_preload
from hydra_engine.preprocess.media.media import MediaLoader
from hydra_engine.preprocess.preprocessor import Preprocessor
from hydra_engine.preprocess.sandbox.texts import SandboxedTexts
from hydra_engine.preprocess.text.template_files import NO_TEMPLATE
from hydra_engine.preprocess.text.writer import TextSpec
from hydra_engine.telemetry.trace import Activity, LiveRequest, TraceRing

logger = logging.getLogger(__name__)

TICK_S = 0.1  # how often the frontend looks for requests that have waited too long
EARLY_S = 2 * TICK_S  # deadlines that come within this have come, so that clients have been told by then
LEDGER_S = 5.0  # limit for all instances to answer


class Frontend:
    """The frontend of one engine: start it on a running loop, submit calls, close it. Also the supervisor's
    `ClusterListener`."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        processes: bool,
        defaults: GenerationDefaults = NO_DEFAULTS,
        clock: Clock | None = None,
        supervisor: Supervisor | None = None,
        ahead: Ahead | None = None,
        preloaded: Preloaded | None = None,
    ) -> None:
        """`preloaded`: what `spawn.preload` has started early; the frontend closes it."""
        self.config = config
        self.state = "loading"  # or ok, closed
        self.trace = TraceRing()
        self._defaults = defaults
        self._clock = clock or MonotonicClock()
        self._supervisor = supervisor or Supervisor(config, processes=processes, ahead=ahead)
        self._preloaded = preloaded
        self._links: dict[str, InstanceLink] = {}
        self._summaries: dict[str, InstanceSummary] = {}  # instances that are down included
        self._on_progress: OnProgress | None = None
        self._progress = JointProgress()
        self._preprocessor: Preprocessor | None = None
        self._placement = Placement()
        self._admitting = 0
        self._in_preprocess: dict[RequestId, tuple[str, LiveRequest]] = {}  # (client, request)
        self._finish_times: deque[float] = deque(maxlen=32)
        self._preprocess_tasks: dict[RequestId, asyncio.Task[None]] = {}
        self._next_id: Callable[[], RequestId] = map(RequestId, itertools.count(1)).__next__
        topology = config.parsed_topology
        roles = {name: spec.role for name, spec in zip(topology.names, topology.instances, strict=True)}
        self._dispatcher = Dispatcher(config, roles, send=self._send, next_id=self._next_id, report=self._report)
        self._stand_ins = StandIns(self._dispatcher.instances, self._supervisor.set_role)
        self._dispatcher.on_loss = self._stand_in
        self._stealing = DecodeStealing(config, self._dispatcher)
        self._choices = Choices(self._dispatcher, config.scheduler, self._clock, self._next_id)
        self.statuses = StatusTable()
        self._watch = Watch(self._dispatcher, self.statuses)
        self._queries = LedgerQueries()
        self.observers: list[Report] = []  # called with every request that ends
        self._switching = asyncio.Lock()
        self._ticker: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    # ---- start and end

    async def start(self, on_progress: OnProgress) -> None:
        """Returns when requests can be submitted."""
        try:
            await self._start(on_progress)
        except BaseException:
            self._end_preloaded()
            raise

    async def _load_spec(self) -> ModelSpec:
        """Loads the spec. What processes of another package's models import is imported meanwhile, once."""
        options, modules = self.config.spec_options, modules_to_preload(self.config.model_impl)
        if not modules:
            return await asyncio.to_thread(load_spec, self.config.model_path, options)
        self._supervisor.preloaded = self._preloaded = self._preloaded or preload(modules)
        if not self._supervisor.processes:
            await asyncio.to_thread(import_module, INSTANCE)
        context = copy_context()
        context.run(CURRENT.set, self._preloaded)
        spec = await self._loop.run_in_executor(None, context.run, load_spec, self.config.model_path, options)
        if spec.processor is None and not self._supervisor.processes:
            self._end_preloaded()
        return spec

    def _end_preloaded(self) -> None:
        if self._preloaded is not None:
            self._preloaded.close()
        self._preloaded = self._supervisor.preloaded = None

    async def _start(self, on_progress: OnProgress) -> None:
        """Returns when requests can be submitted. The tokenizer loads and the media decoders start while the instances
        read their weights."""
        path = self.config.model_path
        spec = await self._load_spec()
        self._placement = Placement(spec.vision is not None, nodes=self.config.cluster.launcher is not None)
        self._placement.check(self.config.topology)
        if spec.language.has_states:
            self._stealing.stop()
        self._on_progress = on_progress
        loader = MediaLoader(spec, self.config.media, self._clock, preloaded=self._preloaded)
        texts = SandboxedTexts(path, TextSpec.from_spec(spec), self.config.chat_template)
        beside = asyncio.gather(texts.start(), loader.warm_up())
        try:
            await self._supervisor.start(self)
            check_fits(self._summaries.values())
            tokenizer, _ = await beside
            self._preprocessor = Preprocessor(
                spec=spec,
                tokenizer=tokenizer,
                max_model_len=self.max_model_len,
                seed=self.config.seed,
                defaults=self._defaults,
                chat_template_path=self.config.chat_template,
                clock=self._clock,
                loader=loader,
                texts=texts,
            )
            if self._preprocessor.chat_template is None:
                logger.warning("%s; until then chat requests are refused, completions are not", NO_TEMPLATE)
        except BaseException:
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)
            loader.close()
            texts.close()
            await self._supervisor.stop()
            raise
        finally:
            self._on_progress = None
        texts.warm_up()
        self._ticker = asyncio.create_task(self._tick())
        self.state = "ok"

    async def close(self) -> None:
        """Fails the requests that still run and stops the instances. Idempotent."""
        if self.state == "closed":
            return
        self.state = "closed"
        if self._ticker is not None:
            self._ticker.cancel()
        error = EngineClosed("the engine was closed while this request ran")
        for in_flight in list(self._dispatcher.requests.values()):
            self._dispatcher.fail(in_flight, error, self._clock.now())
        self._queries.fail(error)
        await self._supervisor.stop()
        if self._preprocessor is not None:
            await self._preprocessor.close()
        self._end_preloaded()

    async def _tick(self) -> None:
        early_s = min(EARLY_S, self.config.cluster.recovery_s / 2)
        while True:
            await asyncio.sleep(TICK_S)
            self._update_stand_ins()
            self._dispatcher.tick(self._clock.now(), early_s)
            self._stealing.tick(self._clock.now())

    def _stand_in(self) -> bool:
        if self._switching.locked():
            return False
        loaded = {name: link.role for name, link in self._links.items()}
        return self._stand_ins.update(loaded, self._placement.stages)

    def _update_stand_ins(self) -> None:
        if self._stand_in():
            self._dispatcher.wake(self._clock.now())

    def _send(self, name: str, messages: Sequence[ToInstance]) -> None:
        self._links[name].end.send(messages)

    # ---- requests

    def open_handle(self, request_id: str | None = None) -> tuple[RequestId, Handle]:
        """Returns a new request number and a handle that can be cancelled before the request exists. Thread-safe."""
        number = self._next_id()
        return number, Handle(request_id or f"req-{number}", lambda: self.cancel(number))

    async def submit(self, number: RequestId, handle: Handle, call: GenerationCall) -> None:
        """Preprocesses the call and sends the request to the instances. Raises RequestError before anything is
        queued."""
        num_answers = call.sampling.n
        self._check_open(num_answers)
        if handle.cancelled:
            raise RequestAborted("the request was cancelled")
        arrival_s = self._clock.now()
        self._admitting += num_answers
        self._in_preprocess[number] = call.client, LiveRequest(handle.id, arrival_s, None, 0, "preprocess", "")
        try:
            prepared = await self.preprocessor.prepare(number, call, arrival_s=arrival_s)
            self._check_running()
        finally:
            self._admitting -= num_answers
            del self._in_preprocess[number]
        handle.prompt_usage = usage_of(prepared.request)
        if num_answers > 1:
            self._choices.submit(prepared, handle, self.preprocessor.tokenizer)
            return
        active = activate(prepared, handle, self.preprocessor.tokenizer, self.config.scheduler)
        self._dispatcher.submit(active, prepared.pixels, self._clock.now())

    async def submit_detached(self, number: RequestId, handle: Handle, call: GenerationCall) -> None:
        """Does what `submit` does, but passes errors to the handle's readers."""
        task = asyncio.current_task()
        assert task is not None
        self._preprocess_tasks[number] = task
        try:
            await self.submit(number, handle, call)
        except HydraError as error:
            handle.fail(error)
        except asyncio.CancelledError:
            handle.fail(RequestAborted("the request was cancelled"))
            raise
        finally:
            del self._preprocess_tasks[number]

    def cancel(self, number: RequestId) -> None:
        """Cancels a request. Thread-safe."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel, number)

    def _cancel(self, number: RequestId) -> None:
        if number in self._preprocess_tasks:
            self._preprocess_tasks[number].cancel()
        if not self._choices.cancel(number):
            self._dispatcher.cancel(number, self._clock.now())

    def _check_open(self, num_answers: int) -> None:
        self._check_running()
        limit = self.config.scheduler.max_queue
        if num_answers > limit:
            problem = f"n asks for {num_answers} answers, of which {limit} may run or wait here; ask for fewer"
            raise InvalidRequest(problem, param="n")
        if self.num_active + num_answers > limit:
            raise Unavailable(
                f"{self.num_active} requests are queued or running, the limit (max_queue) is {limit}; try again later",
                code="overloaded",
                retry_after_s=retry_after_s(limit, self._finish_times),
            )

    def _check_running(self) -> None:
        if self.state == "loading":
            raise Unavailable("the model is still loading", code="not_ready", retry_after_s=2)
        if self.state != "ok":
            raise EngineClosed("the engine is closed; make a new Engine")
        if self.lost:
            problem = "the engine processes have ended; the server must be restarted"
            raise Unavailable(problem, code="instance_lost", retry_after_s=RETRY_AFTER_S)

    def _report(self, active: ActiveRequest, result: Result) -> None:
        self._finish_times.append(self._clock.now())
        request = active.request
        self.trace.add(result.request_id, request.arrival_s, result.timeline, result.usage, request.client)
        for observer in self.observers:
            observer(active, result)

    @property
    def oldest_arrival_s(self) -> float:
        """Arrival of the oldest request that has not ended; infinite if there is none."""
        running = (in_flight.request.arrival_s for in_flight in self._dispatcher.requests.values())
        preparing = (request.arrival_s for _, request in self._in_preprocess.values())
        return min((*running, *preparing), default=math.inf)

    # ---- the supervisor's listener

    def on_progress(self, name: str, loading: Loading) -> None:
        if self._on_progress is not None:
            self._on_progress(self._progress.add(name, loading))

    def on_up(self, link: InstanceLink) -> None:
        self._links[link.name] = link
        self._summaries[link.name] = link.summary
        summary = link.summary
        self._stealing.on_up(link.name, summary.max_num_seqs)
        kv_tokens = summary.num_kv_blocks * summary.kv_block_size
        self._dispatcher.on_up(link.name, self._clock.now(), summary.max_num_seqs, kv_tokens)

    def on_down(self, name: str, reason: str, since_s: float, *, restarts: bool) -> None:
        if self.state == "closed":
            return
        self._links.pop(name, None)
        self.statuses.forget(name)
        self._watch.forget(name)
        self._queries.forget(name)
        self._dispatcher.on_down(name, self._clock.now(), restarts=restarts, since_s=since_s)

    def on_silent(self, name: str, since_s: float | None) -> None:
        self._dispatcher.on_silent(name, since_s, self._clock.now())

    def on_pair(self, one: str, other: str, up: bool) -> None:
        self._dispatcher.on_pair(one, other, up, self._clock.now())
        if up:
            self._update_stand_ins()

    def on_messages(self, name: str, messages: list[ToFrontend]) -> None:
        now = self._clock.now()
        with self._dispatcher.instances.gathered():
            for message in messages:
                match message:
                    case Status():
                        self.statuses.put(name, message)
                        self._watch.on_status(name, message)
                        self._dispatcher.instances.on_status(name, message)
                    case LedgerReport():
                        self._queries.answer(name, message)
                    case _:
                        self._dispatcher.on_message(name, message, now)

    # ---- queries

    @property
    def preprocessor(self) -> Preprocessor:
        if self._preprocessor is None:
            self._check_running()
        assert self._preprocessor is not None
        return self._preprocessor

    @property
    def num_active(self) -> int:
        """Requests that are admitted or being admitted; a request for several answers counts once per answer."""
        return len(self._dispatcher.requests) + self._choices.num_waiting + self._admitting

    @property
    def summaries(self) -> list[InstanceSummary]:
        """Start-up summaries in the order of the topology; the latest known one where an instance is down."""
        return [self._summaries[name] for name in self._dispatcher.instances if name in self._summaries]

    @property
    def max_model_len(self) -> int:
        """The longest request, in tokens, that every instance with prefill or decode can hold."""
        return min(summary.max_model_len for summary in self.summaries if set(summary.role) & {"P", "D"})

    @property
    def lost(self) -> bool:
        """True if no request can be served any more: every instance of some stage has failed and none is restarted."""
        return self.state == "ok" and missing_for_good(self._dispatcher.instances.values(), images=False) is not None

    def instances(self) -> tuple[InstanceState, ...]:
        states = self._supervisor.states()
        return tuple(self._watch.completed(state, self._summaries.get(state.name)) for state in states)

    def activity(self, since: int, limit: int, client: str | None) -> Activity:
        """The up to `limit` requests that ended after the first `since` ones, and the `limit` oldest that run; of one
        client, or of all if `client` is None."""
        number, finished = self.trace.added_since(since, limit, client)
        flying = (f for f in self._dispatcher.requests.values() if client in (None, f.request.client))
        running = (in_flight.live(self.statuses.stage) for in_flight in flying)
        preparing = (live for whose, live in self._in_preprocess.values() if client in (None, whose))
        return Activity(number, finished, list(itertools.islice(itertools.chain(running, preparing), limit)))

    def health(self) -> tuple[bool, str]:
        """Returns (True, "ok") if every stage is served and makes progress, else False and a word why: loading,
        draining, hung, instance_lost or closed."""
        if self.state != "ok":
            return False, self.state
        reason = self._watch.problem(self._clock.now(), images=self._placement.has_vision)
        return reason is None, reason or "ok"

    async def ledger(self) -> LedgerReport:
        """Returns the blocks and slots that all instances hold now. Raises TimeoutError after `LEDGER_S`."""
        self._check_running()
        async with asyncio.timeout(LEDGER_S):
            return await self._queries.ask(self._next_id(), {name: link.end for name, link in self._links.items()})

    async def reset_caches(self, *, kv: bool, images: bool) -> None:
        """Drops reusable KV (`kv`), or pictures and their features (`images`); running requests keep what they hold.
        Requests submitted after this has returned hit nothing older. Raises Unavailable if an instance does not
        answer."""
        self._check_running()
        if images:
            self.preprocessor.forget_pictures()
        for link in list(self._links.values()):
            link.end.send([ResetCaches(kv, images)])
        try:
            await self.ledger()  # an instance handles messages in order
        except TimeoutError:
            raise Unavailable("an instance has not answered; try again", code="not_ready") from None

    async def prompt_ids(self, call: GenerationCall) -> tuple[int, ...]:
        """Token ids of a call's prompt, image tokens included; opens its pictures. Raises RequestError as `submit`
        does."""
        self._check_open(1)
        self._admitting += 1
        try:
            return await self.preprocessor.prompt_ids(self._next_id(), call)
        finally:
            self._admitting -= 1

    def trace_events(self, seconds: float) -> list[dict[str, Any]]:
        """Trace events of requests that ended in the last `seconds`. Thread-safe."""
        return self.trace.events(since_s=self._clock.now() - seconds)

    # ---- roles at run time

    async def set_topology(self, text: str) -> None:
        """Switches the running instances to the roles of `text`, each after it has finished its work. Ends stand-ins.
        Raises ConfigError, before anything is changed, if that is impossible."""
        self._check_running()
        async with self._switching:
            self._placement.check(text)
            own = self._stand_ins.own_roles
            states = [replace(s, role=own[s.name].letters) if s.name in own else s for s in self.instances()]
            devices = {name: link.device for name, link in self._links.items()}
            groups = plan_switches(text, states, devices, self._placement.stages)
            self._stand_ins.end()
            set_role, check = self._supervisor.set_role, self._check_running
            for group in groups:
                await switch_roles(group, self._dispatcher, self._clock, set_role=set_role, check=check)
