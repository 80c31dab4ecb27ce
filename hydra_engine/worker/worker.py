"""The worker: keeps the request state that plans do not carry, hands plans to its lanes, collects results.

Threads: one instance thread calls the public methods; each lane runs its steps in order in its own thread. The request
registry belongs to the instance thread; a plan takes the records of its images and chunks with it when it is submitted,
so lanes read no shared table. Plans queue in their lane, and a decode may stand for a token that the plan before it
samples. Results cross back through a deque (atomic append and popleft). Lanes do not wait for each other. On an
asynchronous device one more thread per lane waits for its results, in order, while the lane launches the next step.
Does not decide what to run, when a request ends, or which block holds what.

Two parts are plugged in by the caller: the gate at which encodes wait for language steps (`vision/gate.py`), and the
lane that copies blocks of other instances into the local caches (`transfer.py`), through `run_job` and `deliver`.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from hydra_engine.backend.base import Backend, PagedCache, StateCache
from hydra_engine.backend.device import Lane
from hydra_engine.clock import Clock
from hydra_engine.config import EngineConfig
from hydra_engine.core.ids import RequestId, StepId
from hydra_engine.core.instances import EPD, Role
from hydra_engine.core.messages import PixelPayload
from hydra_engine.core.plans import LanguagePlan, VisionPlan
from hydra_engine.core.request import Request
from hydra_engine.core.results import LaneResult
from hydra_engine.errors import BackendError, ErrorInfo
from hydra_engine.models.implementation import ServedModel
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.worker.boundary import OUT_OF_MEMORY, run_guarded_step
from hydra_engine.worker.language.constraints import Constraints
from hydra_engine.worker.language.graphs import StepGraphs
from hydra_engine.worker.language.lane import LanguageLane
from hydra_engine.worker.language.sampler import SamplingState
from hydra_engine.worker.memory.working import MIXED_GRAPH_BYTES, NOT_COUNTED, WorkingMemory
from hydra_engine.worker.ports import NO_GATE, Gate, Job, PromptPositions, WorkerRequest
from hydra_engine.worker.vision.graphs import EncodeGraphs
from hydra_engine.worker.vision.lane import VisionLane

logger = logging.getLogger(__name__)


class Worker:
    """The `WorkerPort` over one backend. `role` and the caches decide which lanes exist; a plan for a missing lane is a
    bug of the caller. `gate` pauses the vision lane for the language lane, if both are on the device. `wake` is called
    in any thread when a result arrives or a lane has ended. `asynchronous`: language steps are launched before the
    previous one is read, and graphs of both lanes may be captured and replayed; None: if the device is asynchronous.
    `working`: the memory reserved for steps, beside caches."""

    PIECE_ROWS = 64  # rows of a layer after which an encode can pause; without a TPOT limit whole layers

    def __init__(
        self,
        *,
        model: ServedModel,
        backend: Backend,
        spec: ModelSpec,
        kv_cache: PagedCache | None,
        image_cache: PagedCache | None,
        config: EngineConfig,
        clock: Clock,
        wake: Callable[[], None],
        role: Role = EPD,
        states: StateCache | None = None,
        gate: Gate = NO_GATE,
        asynchronous: bool | None = None,
        working: WorkingMemory = NOT_COUNTED,
    ) -> None:
        self._device = backend.device
        self._working = working
        self._multimodal = spec.language.rope_sections is not None
        self._wake = wake
        self._requests: dict[RequestId, WorkerRequest] = {}
        self._pixel_bytes = 0
        self._results: deque[LaneResult] = deque()
        self._left_out = Counter[str]()  # graphs that the device had no memory for
        self._broken: Exception | None = None  # what ended a lane; nothing can be computed any more
        self._constraints = Constraints(config.model_path, self.deliver)
        self._closing: list[Callable[[], None]] = []
        self._vision: VisionLane | None = None
        self._language: LanguageLane | None = None
        vision = spec.vision if role.needs_vision else None
        self._gate = gate if vision is not None and image_cache is not None and role.needs_language else NO_GATE
        asynchronous = backend.device.asynchronous if asynchronous is None else asynchronous
        lane = config, clock, self._gate, self.run_job
        if vision is not None and image_cache is not None:
            self._vision = VisionLane(
                model, backend, vision, image_cache, *lane, piece_rows=self.PIECE_ROWS, asynchronous=asynchronous
            )
        if role.needs_language and kv_cache is not None:
            self._language = LanguageLane(
                model,
                backend,
                spec,
                kv_cache,
                image_cache,
                states,
                *lane,
                asynchronous=asynchronous,
                captured_tokens=working.captured_tokens,
            )

    # ---- requests

    def add_request(self, request: Request, pixels: Sequence[PixelPayload]) -> str | None:
        """Registers a request. Returns "grammar" if it must be held until its grammar is compiled (`ReadyResult`), else
        None. Raises Unavailable, and registers nothing, if too many grammars wait."""
        assert request.id not in self._requests, "request id added twice"
        constraint = self._constraints.constraint_of(request)
        by_digest = {payload.digest: payload for payload in pixels}
        # Encode jobs for other instances have pictures and no prompt.
        has_positions = self._multimodal and request.num_prompt > 0
        record = WorkerRequest(
            request,
            SamplingState.from_request(request, constraint),
            by_digest,
            sum(len(payload.data) for payload in by_digest.values()),
            PromptPositions.from_request(request) if has_positions else None,
        )
        self._requests[request.id] = record
        self._pixel_bytes += record.pixel_bytes
        return None if constraint is None or constraint.is_ready else "grammar"

    def remove_request(self, request_id: RequestId) -> None:
        """Forgets a request that no plan in flight names. Asserts that it is registered."""
        assert request_id in self._requests, "unknown request id removed"
        self._pixel_bytes -= self._requests.pop(request_id).pixel_bytes
        self._constraints.forget(request_id)

    @property
    def pixel_bytes(self) -> int:
        """Bytes of the pixels of all registered requests."""
        return self._pixel_bytes

    @property
    def num_slices(self) -> int:
        """Approximate number of pieces of the largest picture's encode, between which it can pause; 0: it never
        pauses."""
        return 0 if self._vision is None else self._vision.num_slices

    @property
    def vision_plans(self) -> int:
        """The number of vision plans that may be in flight: 2 if the next is launched while one is computed."""
        return 1 if self._vision is None else self._vision.max_plans

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on how steps are run, e.g. which graphs are missing; one sentence each."""
        notes = [lane.note for lane in self._lanes if lane.note]
        notes += [
            f"{count} graphs of {captures} are left out, the device has no memory for them: such steps are launched op "
            "by op, which takes longer; smaller caches leave room"
            for captures, count in self._left_out.items()
        ]
        return tuple(notes)

    # ---- steps

    def submit_vision(self, plan: VisionPlan) -> None:
        """Queues the plan in the vision lane; `poll` returns its result. Asserts that the worker has the lane."""
        assert self._vision is not None, "this worker has no vision lane"
        self._vision.submit(plan, [self._requests[item.request_id] for item in plan.items], self.deliver)

    def drop_vision(self, step_id: StepId) -> None:
        """Stops a submitted vision step at its next checkpoint; its result has an error for every image. No effect
        without a checkpoint left."""
        assert self._vision is not None, "this worker has no vision lane"
        self._vision.drop(step_id)

    def submit_language(self, plan: LanguagePlan) -> None:
        """Queues the plan in the language lane; `poll` returns its result. Asserts that the worker has the lane."""
        assert self._language is not None, "this worker has no language lane"
        self._language.submit(plan, [self._requests[chunk.request_id] for chunk in plan.chunks], self.deliver)

    def run_job(self, job: Job) -> None:
        """Runs a job; called in a lane's thread. An exception is fatal (a device failure or a bug, not one request's
        fault): it is raised again, which ends the lane, and every later `poll` raises the first such exception."""
        try:
            job()
        except Exception as error:  # broad on purpose: whatever ends a lane must end the wait for it
            if self._broken is None:  # later failures follow from the first
                self._broken = error
            self._wake()
            raise

    def poll(self) -> list[LaneResult]:
        """Removes and returns the results that are ready. Raises the exception that ended a lane, BackendError if the
        device failed: plans in flight never return, and the request at fault is unknown."""
        if self._broken is not None:
            raise self._broken
        results: list[LaneResult] = []
        while self._results:  # this thread is the only consumer
            results.append(self._results.popleft())
        return results

    def deliver(self, result: LaneResult) -> None:
        """Queues a result and wakes the instance thread. Thread-safe."""
        self._results.append(result)
        self._wake()

    # ---- start and end

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Runs tiny steps in the lanes' threads and waits for them. Calls `progress(done, all)` at first and after
        each. Raises BackendError if one fails."""
        jobs = [(lane.thread, job) for lane in self._lanes for job in lane.warm_up_jobs]
        progress(0, len(jobs))
        for done, (thread, job) in enumerate(jobs, start=1):
            if self._in_lane(thread, "warm-up", job) is not None:
                raise BackendError("the model cannot run its warm-up steps on this backend; the log says why")
            progress(done, len(jobs))

    def capture_graphs(self, progress: Callable[[int, int], None]) -> None:
        """Captures the graphs of both lanes, if there are any, after the warm-up. Calls `progress(done, all)` after
        each. Graphs leave memory for the largest eager steps of both lanes and for the graphs that follow; one that
        does not fit beside it is skipped and counted in `notes`. Raises BackendError if a capture fails for another
        reason."""
        jobs: list[tuple[VisionLane | LanguageLane, EncodeGraphs | StepGraphs, tuple[int, int]]] = []
        for lane in reversed(self._lanes):
            if lane.graphs is not None:
                self._capture(lane, lane.graphs.prepare)
                jobs += [(lane, lane.graphs, graph) for graph in lane.graphs.capture_order]
        for done, (lane, graphs, graph) in enumerate(jobs, start=1):
            self._device.keep_free(self._working.activation_bytes + (len(jobs) - done) * MIXED_GRAPH_BYTES)
            if not self._capture(lane, partial(graphs.capture, *graph)):
                self._left_out[lane.captures] += 1
            progress(done, len(jobs))
        self._device.keep_free(0)
        self._device.trim()

    def _capture(self, lane: VisionLane | LanguageLane, job: Job) -> bool:
        """Runs a capture job in the lane. Returns False if the device is out of memory; raises BackendError if the job
        fails otherwise."""
        error = self._in_lane(lane.thread, "graph capture", job)
        if error is None or error is OUT_OF_MEMORY:
            return error is None
        raise BackendError(
            f"{lane.captures} cannot be captured on this backend; the log says why, enforce_eager does without"
        )

    def _in_lane(self, thread: Lane, what: str, job: Job) -> ErrorInfo | None:
        """Runs the job in the lane and waits for it. Returns its error, also that of a device failure; None if it
        succeeded."""
        answers: SimpleQueue[ErrorInfo | None] = SimpleQueue()

        def run() -> None:
            try:
                answers.put(run_guarded_step(self._device, what, job))
            except BackendError as error:
                logger.error("%s: %s", what, error)
                answers.put(error.info())

        thread.submit(run)
        return answers.get()

    @property
    def _lanes(self) -> list[VisionLane | LanguageLane]:
        """The lanes that this role has, vision first."""
        return [lane for lane in (self._vision, self._language) if lane is not None]

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Rows of the captured decode steps, ascending; empty before `capture_graphs`, or without graphs."""
        graphs = None if self._language is None else self._language.graphs
        return () if graphs is None else graphs.captured_sizes

    @property
    def captured_tokens(self) -> int:
        """Tokens of the largest captured step with prompts; 0: there is none."""
        graphs = None if self._language is None else self._language.graphs
        return 0 if graphs is None else graphs.captured_tokens

    @property
    def graph_bytes(self) -> int:
        """Bytes of device memory that the captured graphs, and the inputs of special rows, take."""
        return sum(lane.graphs.num_bytes for lane in self._lanes if lane.graphs is not None)

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs of both lanes."""
        return sum(lane.graphs.num_graphs for lane in self._lanes if lane.graphs is not None)

    @property
    def captured_patches(self) -> int:
        """Patches of the largest captured encode; 0: there is none."""
        graphs = None if self._vision is None else self._vision.graphs
        return 0 if graphs is None else graphs.largest

    def on_close(self, close: Callable[[], None]) -> None:
        """Registers a function that this worker's `close` calls after the lanes have ended."""
        self._closing.append(close)

    def close(self) -> None:
        """Waits for the steps that were submitted, calls the functions of `on_close`, and stops compiling grammars.
        Results can still be polled."""
        self._gate.close()
        for lane in self._lanes:
            lane.close()
        for close in self._closing:
            close()
        self._constraints.close()
