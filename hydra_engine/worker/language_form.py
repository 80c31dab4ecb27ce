"""Which form the language lane takes: steps that are over when they return, or steps that run behind their launch.

Puts the parts together; does not run anything.
"""

from __future__ import annotations

import logging

from hydra_engine.clock import Clock
from hydra_engine.config import EngineConfig
from hydra_engine.worker.asynchronous_step import AsynchronousStep
from hydra_engine.worker.decode_graphs import DecodeGraphs, default_sizes
from hydra_engine.worker.device_seats import DeviceSeats
from hydra_engine.worker.gate import LaneGate
from hydra_engine.worker.language_lane import LanguageLane
from hydra_engine.worker.language_step import StepParts, SynchronousStep
from hydra_engine.worker.seats import Seats

logger = logging.getLogger(__name__)


def synchronous_lane(parts: StepParts, config: EngineConfig, clock: Clock, gate: LaneGate | None) -> LanguageLane:
    seats = Seats(config.scheduler.max_num_seqs)
    return LanguageLane(SynchronousStep(parts, seats, gate), seats, parts.device, clock, ahead=False)


def asynchronous_lane(
    parts: StepParts, config: EngineConfig, clock: Clock, gate: LaneGate | None, max_model_len: int
) -> tuple[LanguageLane, DecodeGraphs | None]:
    """With the graphs that are to be captured before the first step, if there are to be any."""
    seats = DeviceSeats(config.scheduler.max_num_seqs, parts.device.torch_device)
    graphs = None
    if parts.model.can_be_captured and not config.enforce_eager:
        graphs = DecodeGraphs(parts, seats, _sizes(config), max_model_len)
    step = AsynchronousStep(parts, seats, graphs)
    return LanguageLane(step, seats, parts.device, clock, ahead=True, gate=gate), graphs


def _sizes(config: EngineConfig) -> tuple[int, ...]:
    """Of graphs; none is larger than a step can be."""
    most = config.scheduler.max_num_seqs
    if not config.cuda_graph_sizes:
        return default_sizes(most)
    fitting = tuple(size for size in config.cuda_graph_sizes if size <= most)
    if len(fitting) < len(config.cuda_graph_sizes):
        logger.warning("cuda_graph_sizes above max_num_seqs (%d) are left out: no step is as large", most)
    return fitting or (most,)
