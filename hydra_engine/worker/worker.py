"""The worker: keeps what plans do not carry, hands plans to its lanes, collects results.

Threads: one instance thread calls the public methods; each lane runs its steps in order in its own thread. The request
registry belongs to the instance thread; a plan takes the records of its images and chunks with it when it is submitted,
so lanes read no shared table. Plans queue in their lane, and a decode may stand for a token that the plan before it
samples. Results cross back through a deque (atomic append and popleft). Nothing joins the lanes. Where the device works
behind the call, one more thread waits for the language lane's results, in their order, while the lane launches what
comes next. Does not decide what to run, when a request ends, or which block holds what.

With peers there is a third lane, which copies their blocks into our caches (`exchange.py`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

from hydra_engine.backend.base import Backend, PagedCache, StateCache
from hydra_engine.backend.device import Lane
from hydra_engine.backend.lanes import ThreadLane
from hydra_engine.clock import Clock
from hydra_engine.config import EngineConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.core.media import PixelPayload
from hydra_engine.core.plans import LanguagePlan, LanguageResult, PullJob, PullResult, VisionPlan, VisionResult
from hydra_engine.core.pools import Exports, PoolKind
from hydra_engine.core.request import Request
from hydra_engine.core.roles import EPD, Role
from hydra_engine.errors import BackendError
from hydra_engine.specs.base import ModelSpec, VisionSpec
from hydra_engine.worker.boundary import attempt
from hydra_engine.worker.constraints import Constraints
from hydra_engine.worker.decode_graphs import DecodeGraphs
from hydra_engine.worker.encode_graphs import EncodeGraphs, encode_graphs
from hydra_engine.worker.exchange import Exchange
from hydra_engine.worker.faults import FaultPoints
from hydra_engine.worker.gate import LaneGate
from hydra_engine.worker.language_form import asynchronous_lane, synchronous_lane
from hydra_engine.worker.language_lane import LanguageLane
from hydra_engine.worker.language_step import StepParts
from hydra_engine.worker.ports import ServedModel, WorkerRequest
from hydra_engine.worker.positions import PromptPositions
from hydra_engine.worker.sampler import Recipe
from hydra_engine.worker.states import StateTable
from hydra_engine.worker.vision_lane import VisionLane
from hydra_engine.worker.warm_up import warm_language, warm_vision
from hydra_engine.worker.working_memory import image_budget, largest_encode

logger = logging.getLogger(__name__)

PIECE_ROWS = 64  # rows of a layer between two places where an encode can pause; whole layers without a limit

Result = VisionResult | LanguageResult | PullResult


class Worker:
    """`WorkerPort` over one backend. The role says which lanes exist; a plan for the other is a bug of the caller.
    `shared`: there are peers. They can map those caches that lie in memory made for it (`PagedCache.memory`).
    `asynchronous`: language steps are launched before the one before was read, and steps of both lanes may
    be replayed; None: where the device works so."""

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
        faults: FaultPoints | None = None,
        states: StateCache | None = None,
        gate: LaneGate | None = None,
        shared: bool = False,
        asynchronous: bool | None = None,
    ) -> None:
        self._model = model
        self._backend = backend
        self._spec = spec
        self._kv_cache = kv_cache
        self._image_cache = image_cache
        self._states = states
        self._slicing = config.scheduler.vision_slicing
        self._max_model_len = config.max_model_len or spec.max_model_len
        self._constraints = Constraints(config.model_path)
        self._wake = wake
        self._requests: dict[RequestId, WorkerRequest] = {}
        self._pixel_bytes = 0
        self._results: deque[Result] = deque()
        self.faults = faults if faults is not None else FaultPoints()
        caches = _by_kind(image_cache, kv_cache)
        self._exchange = Exchange(backend, caches, clock, self.faults, self._run) if shared else None
        self._vision: tuple[Lane, VisionLane] | None = None
        self._language: tuple[Lane, LanguageLane] | None = None
        self._readers: Lane | None = None  # where results are waited for
        self._graphs: DecodeGraphs | None = None
        self._encode_graphs: EncodeGraphs | None = None
        self.notes: tuple[str, ...] = ()  # what a user should know of how steps are run, a sentence each
        self._broken: Exception | None = None  # what ended a lane; nothing can be computed any more
        vision = spec.vision if role.needs_vision and image_cache is not None else None
        if gate is None and vision is not None and role.needs_language:
            gate = LaneGate(clock, slicing=config.scheduler.vision_slicing)
        self._gate = gate
        self._piece_rows = PIECE_ROWS if config.scheduler.slices_layers and gate is not None else 0
        asynchronous = backend.device.asynchronous if asynchronous is None else asynchronous
        if vision is not None and image_cache is not None:
            if asynchronous:
                self._encode_graphs = self._graphs_of_encodes(vision, image_cache, config)
            pieces = gate, self._piece_rows, self._encode_graphs
            encoder = VisionLane(model, backend, image_cache, clock, self.faults, *pieces)
            self._vision = backend.device.lane("vision"), encoder
        if role.needs_language and kv_cache is not None:
            decoder = self._language_lane(kv_cache, config, clock, asynchronous=asynchronous)
            self._language = backend.device.lane("language"), decoder

    def _graphs_of_encodes(self, vision: VisionSpec, cache: PagedCache, config: EngineConfig) -> EncodeGraphs | None:
        """Those that are to be captured; leaves a note where there are none and nobody asked for that."""
        model, pauses = self._model, self._piece_rows > 0
        largest = 0 if model.tower is None else largest_encode(vision, image_budget(config, vision)).num_patches
        graphs, reason = encode_graphs(model, self._backend, cache, config, largest, pauses=pauses)
        self.notes = (reason,) if reason else ()
        return graphs

    def _language_lane(
        self, kv_cache: PagedCache, config: EngineConfig, clock: Clock, *, asynchronous: bool
    ) -> LanguageLane:
        """With the graphs of decodes and the readers of results, where steps run behind their launch."""
        parts = StepParts(
            self._model,
            self._backend.ops,
            self._backend.device,
            kv_cache,
            self._image_cache,
            self.faults,
            None if self._states is None else StateTable(self._states),
            multimodal_rope=self._spec.language.rope_sections is not None,
        )
        if not asynchronous:
            return synchronous_lane(parts, config, clock, self._gate)
        runner, self._graphs = asynchronous_lane(parts, config, clock, self._gate, self._max_model_len)
        self._readers = ThreadLane("results", 1)
        return runner

    # ---- requests

    def add_request(self, request: Request, pixels: Sequence[PixelPayload]) -> None:
        assert request.id not in self._requests, "request id added twice"
        by_digest = {payload.digest: payload for payload in pixels}
        # Encode jobs for other instances have pictures and no prompt.
        has_positions = self._spec.language.rope_sections is not None and request.num_prompt > 0
        record = WorkerRequest(
            request,
            Recipe.of(request, self._constraints.of(request)),
            by_digest,
            sum(len(payload.data) for payload in by_digest.values()),
            PromptPositions.of_request(request) if has_positions else None,
        )
        self._requests[request.id] = record
        self._pixel_bytes += record.pixel_bytes

    def remove_request(self, request_id: RequestId) -> None:
        assert request_id in self._requests, "unknown request id removed"
        self._pixel_bytes -= self._requests.pop(request_id).pixel_bytes

    @property
    def pixel_bytes(self) -> int:
        return self._pixel_bytes

    @property
    def num_slices(self) -> int:
        """About how many pieces the largest encode is computed in, between which it can wait; 0: it cannot wait."""
        vision = self._spec.vision
        if self._gate is None or vision is None or not self._slicing:
            return 0
        pieces = vision.max_patches_per_image // self._piece_rows if self._piece_rows else 1
        return self._model.num_slices * max(1, pieces)

    # ---- steps

    def submit_vision(self, plan: VisionPlan) -> None:
        assert self._vision is not None, "this worker has no vision lane"
        lane, runner = self._vision
        records = [self._requests[item.request_id] for item in plan.items]
        lane.submit(partial(self._run, lambda: self._deliver(runner.run(plan, records))))

    def submit_language(self, plan: LanguagePlan) -> None:
        assert self._language is not None, "this worker has no language lane"
        lane, runner = self._language
        records = [self._requests[chunk.request_id] for chunk in plan.chunks]
        readers = self._readers
        if readers is None:
            lane.submit(partial(self._run, lambda: self._deliver(runner.run(plan, records))))
        else:
            lane.submit(partial(self._run, lambda: self._launch(readers, runner, plan, records)))

    def _launch(
        self, readers: Lane, runner: LanguageLane, plan: LanguagePlan, records: Sequence[WorkerRequest]
    ) -> None:
        pending = runner.launch(plan, records)
        readers.submit(partial(self._run, lambda: self._deliver(pending.result())))

    def _run(self, job: Callable[[], None]) -> None:
        """In a lane's thread. What raises here is no request's fault: the device failed, or the lane has a bug. It ends
        the lane, and the worker with the next `poll`, for what is in flight never comes back."""
        try:
            job()
        except Exception as error:  # broad on purpose: whatever ends a lane, nobody is to wait for it in vain
            if self._broken is None:  # what follows from the first failure says less
                self._broken = error
            self._wake()
            raise

    def submit_pull(self, job: PullJob) -> None:
        self._with_peers.submit(job, self._deliver)

    def poll(self) -> list[Result]:
        """Raises what ended a lane, BackendError if the device failed: what is in flight never comes back, and nobody
        can tell which request it was."""
        if self._broken is not None:
            raise self._broken
        results: list[Result] = []
        while self._results:  # one consumer: what is there stays there until it is taken here
            results.append(self._results.popleft())
        return results

    def _deliver(self, result: Result) -> None:
        self._results.append(result)
        self._wake()

    # ---- peers

    @property
    def _with_peers(self) -> Exchange:
        assert self._exchange is not None, "this worker was made without peers"
        return self._exchange

    def exports(self) -> tuple[Exports, tuple[int, ...]]:
        return self._with_peers.exports()

    def set_word(self, slot: int, word: int) -> None:
        self._with_peers.set_word(slot, word)

    def checksums(self, pool: str, blocks: Sequence[int]) -> tuple[int, ...]:
        return self._with_peers.checksums(pool, blocks)

    def open_peer(self, name: str, exports: Exports, descriptors: Sequence[int]) -> None:
        """The descriptors are closed in any case. A name can be opened again once it was closed."""
        self._with_peers.open(name, exports, descriptors)

    def close_peer(self, name: str) -> None:
        self._with_peers.close(name)

    # ---- start and end

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Runs tiny steps in the lanes' own threads and waits for them. Raises BackendError if one fails."""
        jobs: list[tuple[Lane, Callable[[], None]]] = []
        device = self._backend.device.torch_device
        if self._vision is not None and self._image_cache is not None and self._spec.vision is not None:
            encode = partial(warm_vision, self._model, self._spec.vision, self._image_cache, device)
            jobs.append((self._vision[0], encode))
        if self._language is not None and self._kv_cache is not None:
            ops, language = self._backend.ops, self._spec.language
            caches = self._kv_cache, self._image_cache, self._states
            step = partial(warm_language, self._model, ops, language, *caches, device)
            sizes = partial(step, max_model_len=self._max_model_len, draws=self._readers is not None)
            for decode in (False, True):
                jobs.append((self._language[0], partial(sizes, decode=decode)))
        progress(0, len(jobs))
        for done, (lane, job) in enumerate(jobs, start=1):
            if _failed(lane, "warm-up", job):
                raise BackendError("the model cannot run its warm-up steps on this backend; the log says why")
            progress(done, len(jobs))

    def capture_graphs(self, progress: Callable[[int, int], None]) -> None:
        """After the warm-up, where steps are to be replayed: progress is not called where they are not. Raises
        BackendError."""
        kinds = (
            (self._language, self._graphs, "decode steps", "cuda_graph_sizes"),
            (self._vision, self._encode_graphs, "encodes", "encoder_cuda_graph_sizes"),
        )
        jobs: list[tuple[Lane, Callable[[], None], str, str]] = []
        for track, graphs, what, option in kinds:
            if track is not None and graphs is not None:
                _capture(track[0], graphs.prepare, what, option)
                jobs += [(track[0], partial(graphs.capture, *wanted), what, option) for wanted in graphs.wanted]
        for done, job in enumerate(jobs, start=1):
            _capture(*job)
            progress(done, len(jobs))

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Rows of the decode steps that are captured, ascending; none before `capture_graphs`, or without graphs."""
        return () if self._graphs is None else self._graphs.captured_sizes

    @property
    def graph_bytes(self) -> int:
        """What captured steps took of the device's memory."""
        return sum(graphs.num_bytes for graphs in (self._graphs, self._encode_graphs) if graphs is not None)

    @property
    def captured_patches(self) -> int:
        """Of the largest encode that is replayed; 0: none is."""
        return 0 if self._encode_graphs is None else self._encode_graphs.largest

    def close(self) -> None:
        """Waits for the steps that were submitted; their results can still be polled. Peers keep what they have mapped
        of ours."""
        if self._gate is not None:
            self._gate.close()
        for track in (self._vision, self._language):
            if track is not None:
                track[0].close()
        if self._readers is not None:
            self._readers.close()
        if self._exchange is not None:
            self._exchange.end()
        self._constraints.close()


def _by_kind(image_cache: PagedCache | None, kv_cache: PagedCache | None) -> dict[PoolKind, PagedCache]:
    caches = {PoolKind.FEATURES: image_cache, PoolKind.KV: kv_cache}
    return {kind: cache for kind, cache in caches.items() if cache is not None and cache.num_blocks}


def _capture(lane: Lane, job: Callable[[], None], what: str, option: str) -> None:
    if _failed(lane, "graph capture", job):
        raise BackendError(
            f"{what} cannot be captured on this backend; the log says why, enforce_eager does without, and where "
            f"memory is missing fewer {option} take less of it"
        )


def _failed(lane: Lane, what: str, job: Callable[[], None]) -> bool:
    """Runs the job in the lane and waits for it."""
    answers: SimpleQueue[bool] = SimpleQueue()

    def run() -> None:
        try:
            answers.put(attempt(what, job) is not None)
        except BackendError as error:
            logger.error("%s: %s", what, error)
            answers.put(True)

    lane.submit(run)
    return answers.get()
