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
from hydra_engine.errors import BackendError, ErrorInfo
from hydra_engine.specs.base import ModelSpec
from hydra_engine.worker.boundary import attempt
from hydra_engine.worker.constraints import Constraints
from hydra_engine.worker.decode_graphs import DecodeGraphs
from hydra_engine.worker.exchange import Exchange
from hydra_engine.worker.faults import FaultPoints
from hydra_engine.worker.gate import LaneGate
from hydra_engine.worker.in_flight import Pending
from hydra_engine.worker.language_form import asynchronous_lane, synchronous_lane
from hydra_engine.worker.language_lane import LanguageLane
from hydra_engine.worker.language_step import StepParts
from hydra_engine.worker.ports import ServedModel, WorkerRequest
from hydra_engine.worker.positions import PromptPositions
from hydra_engine.worker.sampler import Recipe
from hydra_engine.worker.states import StateTable
from hydra_engine.worker.vision_lane import VisionLane
from hydra_engine.worker.warm_up import warm_language, warm_vision

PIECE_ROWS = 64  # rows of a layer between two places where an encode can pause; whole layers without a limit

Result = VisionResult | LanguageResult | PullResult


class Worker:
    """`WorkerPort` over one backend. The role says which lanes exist; a plan for the other is a bug of the caller.
    `shared`: there are peers. They can map those caches that lie in memory made for it (`PagedCache.memory`).
    `asynchronous`: language steps are launched before the one before was read; None: where the device works so."""

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
        self._exchange = Exchange(backend, caches, clock, self.faults) if shared else None
        self._vision: tuple[Lane, VisionLane] | None = None
        self._language: tuple[Lane, LanguageLane] | None = None
        self._readers: Lane | None = None  # where results are waited for
        self._graphs: DecodeGraphs | None = None
        self._broken: BackendError | None = None  # the device failed; nothing can be computed any more
        encodes = role.needs_vision and spec.vision is not None and image_cache is not None
        if gate is None and encodes and role.needs_language:
            gate = LaneGate(clock, slicing=config.scheduler.vision_slicing)
        self._gate = gate
        self._piece_rows = PIECE_ROWS if config.scheduler.slices_layers and gate is not None else 0
        device = backend.device
        if encodes and image_cache is not None:
            encoder = VisionLane(model, backend, image_cache, clock, self.faults, gate, self._piece_rows)
            self._vision = device.lane("vision"), encoder
        if role.needs_language and kv_cache is not None:
            table, has_axes = None if states is None else StateTable(states), spec.language.rope_sections is not None
            parts = StepParts(
                model, backend.ops, device, kv_cache, image_cache, self.faults, table, multimodal_rope=has_axes
            )
            if device.asynchronous if asynchronous is None else asynchronous:
                runner, self._graphs = asynchronous_lane(parts, config, clock, gate, self._max_model_len)
                self._readers = ThreadLane("results", 1)
            else:
                runner = synchronous_lane(parts, config, clock, gate)
            self._language = device.lane("language"), runner

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
        lane.submit(lambda: self._deliver(runner.run(plan, records)))

    def submit_language(self, plan: LanguagePlan) -> None:
        assert self._language is not None, "this worker has no language lane"
        lane, runner = self._language
        records = [self._requests[chunk.request_id] for chunk in plan.chunks]
        readers = self._readers
        if readers is None:
            lane.submit(lambda: self._deliver(runner.run(plan, records)))
        else:
            lane.submit(lambda: readers.submit(partial(self._read, runner.launch(plan, records))))

    def _read(self, pending: Pending) -> None:
        try:
            result = pending.result()
        except BackendError as error:
            self._broken = error
            self._wake()
            raise
        self._deliver(result)

    def submit_pull(self, job: PullJob) -> None:
        self._with_peers.submit(job, self._deliver)

    def poll(self) -> list[Result]:
        """Raises BackendError once the device has failed: what is in flight never comes back, and nobody can tell which
        request it was."""
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
        """After the warm-up, where decode steps are to be replayed: progress is not called where they are not. Raises
        BackendError."""
        graphs = self._graphs
        if graphs is None or self._language is None:
            return
        lane = self._language[0]
        self._capture(lane, graphs.prepare)
        wanted = graphs.wanted
        for done, (place, size) in enumerate(wanted, start=1):
            self._capture(lane, partial(graphs.capture, place, size))
            progress(done, len(wanted))

    def _capture(self, lane: Lane, job: Callable[[], None]) -> None:
        if _failed(lane, "graph capture", job):
            raise BackendError(
                "decode steps cannot be captured on this backend; the log says why, enforce_eager does without, and "
                "where memory is missing fewer cuda_graph_sizes take less of it"
            )

    @property
    def graph_bytes(self) -> int:
        """What captured steps took of the device's memory."""
        return 0 if self._graphs is None else self._graphs.num_bytes

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


def _failed(lane: Lane, what: str, job: Callable[[], None]) -> bool:
    """Runs the job in the lane and waits for it."""
    answers: SimpleQueue[ErrorInfo | None] = SimpleQueue()
    lane.submit(lambda: answers.put(attempt(what, job)))
    return answers.get() is not None
