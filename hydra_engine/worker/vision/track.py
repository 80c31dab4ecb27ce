"""The vision lane of a worker: its thread, what runs there, and the graphs that are replayed there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from hydra_engine.backend.base import Backend, PagedCache
from hydra_engine.clock import Clock
from hydra_engine.config import EngineConfig
from hydra_engine.core.plans import VisionPlan, VisionResult
from hydra_engine.models.specs.base import VisionSpec
from hydra_engine.worker.faults import FaultPoints
from hydra_engine.worker.memory.working import image_budget, largest_encode
from hydra_engine.worker.ports import Gate, Guard, Job, ServedModel, WorkerRequest
from hydra_engine.worker.vision.graphs import EncodeGraphs, encode_graphs
from hydra_engine.worker.vision.lane import VisionLane
from hydra_engine.worker.warm_up import warm_vision


class VisionTrack:
    """`piece_rows`: rows of a layer after which an encode can pause, where tokens have a limit; 0: whole layers.
    `note`: what a user should know of how encodes are run. `num_slices`: about how many pieces the largest encode
    is computed in, between which it can wait; 0: it cannot wait."""

    captures, size_option = "encodes", "encoder_cuda_graph_sizes"

    def __init__(
        self,
        model: ServedModel,
        backend: Backend,
        vision: VisionSpec,
        cache: PagedCache,
        config: EngineConfig,
        clock: Clock,
        faults: FaultPoints,
        gate: Gate,
        run: Guard,
        *,
        piece_rows: int,
        asynchronous: bool,
    ) -> None:
        self.graphs: EncodeGraphs | None = None
        self.note = ""
        self.num_slices = 0
        self._warm_up = partial(warm_vision, model, vision, cache, backend.device.torch_device)
        self._run = run
        if not (gate.can_hold and config.scheduler.slices_layers):
            piece_rows = 0
        if gate.can_hold:
            pieces = vision.max_patches_per_image // piece_rows if piece_rows else 1
            self.num_slices = model.num_slices * max(1, pieces)
        if asynchronous:
            largest = 0 if model.tower is None else largest_encode(vision, image_budget(config, vision)).num_patches
            self.graphs, self.note = encode_graphs(model, backend, cache, config, largest, pauses=piece_rows > 0)
        self._runner = VisionLane(model, backend, cache, clock, faults, gate, piece_rows, self.graphs)
        self.lane = backend.device.lane("vision")

    def submit(
        self, plan: VisionPlan, records: Sequence[WorkerRequest], deliver: Callable[[VisionResult], None]
    ) -> None:
        """`records[i]` belongs to `plan.items[i]`."""
        self.lane.submit(partial(self._run, lambda: deliver(self._runner.run(plan, records))))

    @property
    def warm_up_jobs(self) -> list[Job]:
        return [self._warm_up]

    def close(self) -> None:
        """Waits for the steps that were submitted."""
        self.lane.close()
