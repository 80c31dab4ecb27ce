"""A worker that computes nothing and takes its time: `WorkerPort` and `TransferPort` over a simulated device.

Steps take what the cost surface says, slowed by what runs beside them; every row samples the same token. Pulls copy
nothing but take their share of the links, and their validity is decided as a real one's is: by the source's control
word, read after the copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from hydra_engine.core.ids import RequestId, StepId
from hydra_engine.core.messages import PixelPayload
from hydra_engine.core.plans import Int64s, LanguageLoad, LanguagePlan, VisionLoad, VisionPlan
from hydra_engine.core.pools import Exports, PoolKind
from hydra_engine.core.request import Request
from hydra_engine.core.results import LaneResult, LanguageResult, VisionResult
from hydra_engine.transfer.plans import PullJob, PullResult, StagingJob
from hydra_planner.simulator.agenda import Agenda
from hydra_planner.simulator.costs import Costs, Host
from hydra_planner.simulator.links import Links
from hydra_planner.simulator.machine import LANGUAGE, VISION, Job, Machine

TOKEN = 7
NUM_WORDS = 4096
EXPORTS = Exports(pools=(), words=0, num_words=NUM_WORDS)


@lru_cache(maxsize=4096)
def _tokens(num_decodes: int, samples: tuple[bool, ...]) -> Int64s:
    """Sampled tokens of the rows of a step, [B]. Must not be changed."""
    return np.array([TOKEN] * num_decodes + [TOKEN if sample else -1 for sample in samples], dtype=np.int64)


Start = Callable[[], None]


class _Lane:
    """Starts one job after the other. An idle lane needs a moment to begin."""

    def __init__(self, agenda: Agenda, delay_s: float) -> None:
        self._agenda = agenda
        self._delay_s = delay_s
        self._waiting: deque[Start] = deque()
        self._busy = False

    def submit(self, start: Start) -> None:
        if self._busy:
            self._waiting.append(start)
            return
        self._busy = True
        self._agenda.schedule_after(self._delay_s, start)

    def end_job(self) -> None:
        """The job that ran has ended."""
        if self._waiting:
            self._waiting.popleft()()
        else:
            self._busy = False


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Surroundings of an instance: its device, what shares it, its links and costs."""

    device: str
    machine: Machine
    links: Links
    costs: Costs
    host: Host
    niceness: Mapping[str, int]  # of each lane's threads


class SimulatedWorker:
    """`block_bytes` by pool. `wake` is called whenever a result has arrived."""

    def __init__(
        self,
        name: str,
        agenda: Agenda,
        around: Surroundings,
        block_bytes: Mapping[str, int],
        wake: Callable[[], None],
    ) -> None:
        self.words: dict[int, int] = {}
        self.peers: dict[str, SimulatedWorker] = {}
        self.alive = True
        self.num_requests = 0
        self.pixel_bytes = 0
        self._name = name
        self._agenda = agenda
        self._around = around
        self._costs = costs = around.costs
        self._block_bytes = block_bytes
        self._wake = wake
        self._results: list[LaneResult] = []
        self._pixels: dict[RequestId, int] = {}
        delay_s = costs.turn_s + costs.submit_s
        self._vision, self._language, self._transfer = (_Lane(agenda, delay_s) for _ in range(3))

    # ---- requests

    def add_request(self, request: Request, pixels: Sequence[PixelPayload]) -> None:
        assert request.id not in self._pixels, "a request was added twice"
        self._pixels[request.id] = sum(len(payload.data) for payload in pixels)
        self.pixel_bytes += self._pixels[request.id]
        self.num_requests += 1

    def remove_request(self, request_id: RequestId) -> None:
        self.pixel_bytes -= self._pixels.pop(request_id)

    # ---- steps

    def submit_vision(self, plan: VisionPlan) -> None:
        surface = self._costs.surface
        patches = [item.num_patches for item in plan.items]
        load = VisionLoad(sum(patches), float(sum(count * count for count in patches)))

        def done(job: Job) -> None:
            self._vision.end_job()
            self._deliver(VisionResult(plan.step_id, job.started_s, self._agenda.now_s, (None,) * len(plan.items)))

        job = self._job(VISION, surface.vision_s(load), done)
        self._vision.submit(lambda: self._run(job))

    def drop_vision(self, step_id: StepId) -> None:
        """Does nothing: requests of a simulation are not aborted."""

    def submit_language(self, plan: LanguagePlan) -> None:
        surface, load = self._costs.surface, plan.load
        alone_s = surface.language_s(load)
        decodes_s = surface.language_s(LanguageLoad(load.num_decodes, load.decode_context)) if load.num_decodes else 0.0
        prompts = 1.0 - decodes_s / alone_s if load.prefill_tokens and alone_s else 0.0
        tokens = _tokens(len(plan.decodes), tuple(chunk.sample for chunk in plan.chunks))

        def done(job: Job) -> None:
            ended_s = self._agenda.now_s
            self._language.end_job()
            self._deliver(LanguageResult(plan.step_id, job.started_s, ended_s, tokens, vision_s=job.vision_s))

        job = self._job(LANGUAGE, alone_s, done)
        job.prompts = prompts
        job.allowance_s = plan.vision_s
        self._language.submit(lambda: self._run(job))

    def _job(self, kind: str, alone_s: float, done: Callable[[Job], None]) -> Job:
        niceness = self._around.niceness.get(kind, 0)
        return Job(self._name, kind, alone_s, done, self._slowdown, threads=self._costs.threads, niceness=niceness)

    def _slowdown(self, job: Job, other: Job) -> float:
        """Time of a step of this instance beside `other` on the same device over its time alone."""
        costs, corun = self._costs, self._costs.corun
        if job.kind == other.kind == LANGUAGE and corun is not None:
            return corun.steps(job.prompts, other.prompts, costs.alike)
        if job.kind == other.kind:
            return costs.alike
        encode, step = (job, other) if job.kind == VISION else (other, job)
        if corun is not None:
            return corun.encode(encode.alone_s, step.alone_s, step.prompts)
        if job is encode:
            return costs.surface.vision_slowdown
        return (1 - step.prompts) * costs.surface.decode_slowdown + step.prompts * costs.surface.prefill_slowdown

    def _run(self, job: Job) -> None:
        if self.alive:
            self._around.machine.run(job)

    def submit_pull(self, job: PullJob) -> None:
        source = self.peers[job.peer]
        num_bytes = len(job.source_blocks) * self._block_bytes[job.pool]

        def start() -> None:
            started_s = self._agenda.now_s

            def done() -> None:
                valid = source.words.get(job.slot) == job.word
                self._transfer.end_job()
                self._deliver(PullResult(job.step_id, started_s, self._agenda.now_s, valid, num_bytes))

            self._agenda.schedule_after(self._around.host.pull_s, lambda: self._copy(source.device, num_bytes, done))

        self._transfer.submit(start)

    def _copy(self, source: str, num_bytes: int, done: Callable[[], None]) -> None:
        if self.alive:
            self._around.links.copy(source, self._around.device, num_bytes, done, self._name)

    @property
    def device(self) -> str:
        return self._around.device

    def _deliver(self, result: LaneResult) -> None:
        def arrive() -> None:
            self._results.append(result)
            self._wake()

        self._agenda.schedule_after(self._costs.collect_s, arrive)

    def poll(self) -> list[LaneResult]:
        results, self._results = self._results, []
        return results

    # ---- peers

    staging_blocks: Mapping[PoolKind, int] = MappingProxyType({})

    def submit_staging(self, job: StagingJob) -> None:
        raise AssertionError("all memory is mapped")

    def piece_blocks(self, peer: str, pool: str) -> int:
        return 0

    def exports(self) -> tuple[Exports, tuple[int, ...]]:
        return EXPORTS, ()

    def set_word(self, slot: int, word: int) -> None:
        self.words[slot] = word

    def checksums(self, pool: str, blocks: Sequence[int]) -> tuple[int, ...]:
        return (0,) * len(blocks)

    def open_peer(self, name: str, exports: Exports, descriptors: Sequence[int]) -> None:
        """Checks that the peer is connected: all workers are in this process."""
        assert name in self.peers

    def close_peer(self, name: str) -> None: ...

    def close(self) -> None: ...
