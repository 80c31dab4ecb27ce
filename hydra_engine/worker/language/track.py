"""The language lane of a worker: its thread, the form that its steps take, and the graphs that are replayed there.

Steps are over when they return, or run behind their launch; then one more thread waits for their results, in order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from hydra_engine.backend.base import Backend, PagedCache, StateCache
from hydra_engine.backend.cpu.lanes import ThreadLane
from hydra_engine.backend.device import Lane
from hydra_engine.clock import Clock
from hydra_engine.config import EngineConfig
from hydra_engine.core.plans import LanguagePlan, LanguageResult
from hydra_engine.models.specs.base import ModelSpec
from hydra_engine.worker.faults import FaultPoints
from hydra_engine.worker.language.asynchronous_step import AsynchronousStep
from hydra_engine.worker.language.device_slot_table import DeviceSlotTable
from hydra_engine.worker.language.graphs import DecodeGraphs, default_sizes
from hydra_engine.worker.language.lane import LanguageLane
from hydra_engine.worker.language.slot_table import SlotTable
from hydra_engine.worker.language.states import StateTable
from hydra_engine.worker.language.step import StepParts, SynchronousStep
from hydra_engine.worker.ports import Gate, Guard, Job, ServedModel, WorkerRequest
from hydra_engine.worker.warm_up import warm_language

logger = logging.getLogger(__name__)


class LanguageTrack:
    """`asynchronous`: steps are launched before the one before was read, and decodes may be replayed."""

    captures, size_option = "decode steps", "cuda_graph_sizes"

    def __init__(
        self,
        model: ServedModel,
        backend: Backend,
        spec: ModelSpec,
        kv_cache: PagedCache,
        image_cache: PagedCache | None,
        states: StateCache | None,
        config: EngineConfig,
        clock: Clock,
        faults: FaultPoints,
        gate: Gate,
        run: Guard,
        *,
        asynchronous: bool,
    ) -> None:
        self.graphs: DecodeGraphs | None = None
        self._readers: Lane | None = None  # where results are waited for
        self._run = run
        ops, device = backend.ops, backend.device
        num_seq_slots, max_model_len = config.scheduler.max_num_seqs, config.max_model_len or spec.max_model_len
        step = partial(warm_language, model, ops, spec.language, kv_cache, image_cache, states, device.torch_device)
        self._warm_up = partial(step, max_model_len=max_model_len, samples=asynchronous)
        table = None if states is None else StateTable(states)
        multimodal = spec.language.rope_sections is not None
        parts = StepParts(model, ops, device, kv_cache, image_cache, faults, table, multimodal)
        if asynchronous:
            slots = DeviceSlotTable(num_seq_slots, device.torch_device)
            if model.can_be_captured and not config.enforce_eager:
                self.graphs = DecodeGraphs(parts, slots, _graph_sizes(config), max_model_len)
            launched = AsynchronousStep(parts, slots, self.graphs)
            self._runner = LanguageLane(launched, slots, device, clock, ahead=True, gate=gate)
            self._readers = ThreadLane("results", 1)
        else:
            known = SlotTable(num_seq_slots)
            self._runner = LanguageLane(SynchronousStep(parts, known, gate), known, device, clock, ahead=False)
        self.lane = device.lane("language")

    def submit(
        self, plan: LanguagePlan, records: Sequence[WorkerRequest], deliver: Callable[[LanguageResult], None]
    ) -> None:
        """`records[i]` belongs to `plan.chunks[i]`."""
        self.lane.submit(partial(self._run, partial(self._step, plan, records, deliver)))

    def _step(
        self, plan: LanguagePlan, records: Sequence[WorkerRequest], deliver: Callable[[LanguageResult], None]
    ) -> None:
        pending = self._runner.launch(plan, records)
        if self._readers is None:
            deliver(pending.result())
        else:
            self._readers.submit(partial(self._run, lambda: deliver(pending.result())))

    @property
    def warm_up_jobs(self) -> list[Job]:
        return [partial(self._warm_up, decode=decode) for decode in (False, True)]

    def close(self) -> None:
        """Waits for the steps that were submitted, and for their results."""
        self.lane.close()
        if self._readers is not None:
            self._readers.close()


def _graph_sizes(config: EngineConfig) -> tuple[int, ...]:
    """Of graphs; none is larger than a step can be."""
    most = config.scheduler.max_num_seqs
    if not config.cuda_graph_sizes:
        return default_sizes(most)
    fitting = tuple(size for size in config.cuda_graph_sizes if size <= most)
    if len(fitting) < len(config.cuda_graph_sizes):
        logger.warning("cuda_graph_sizes above max_num_seqs (%d) are left out: no step is as large", most)
    return fitting or (most,)
