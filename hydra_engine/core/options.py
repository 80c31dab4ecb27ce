"""Options of a model's spec besides its folder, and the priorities of lanes that compete for cores."""

from __future__ import annotations

from dataclasses import dataclass

# By `--lane-priority`: nice values of a lane's threads, which matter when both lanes have work and cores are few.
# Measured in docs/benchmarks-serving.md.
NICENESS: dict[str, dict[str, int]] = {
    "throughput": {"language": 5},
    "balanced": {},
    "latency": {"vision": 10},
}

# Values of `model_impl` for the engine's own models, and the entry points of other packages, whose names are others.
NATIVE = ("auto", "native")
MODEL_IMPLEMENTATIONS = "hydra_engine.model_implementations"
LAUNCHERS = "hydra_engine.launchers"


@dataclass(frozen=True, slots=True)
class SpecOptions:
    """Options for loading a model.

    `model_impl`: one of NATIVE (the engine's own models), or the name of another package's model implementation, such
    as "transformers". `min_pixels`, `max_pixels`: replace the processor's limits, for families with dynamic resolution.
    `quantization`: "auto" (as the weights are stored), the method that the checkpoint must have, or the method for
    unquantised weights.
    """

    model_impl: str = "auto"
    trust_remote_code: bool = False
    min_pixels: int | None = None
    max_pixels: int | None = None
    quantization: str = "auto"
