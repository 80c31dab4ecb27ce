"""What the user may ask of a model's spec besides what its directory says, and of lanes that compete for cores."""

from __future__ import annotations

from dataclasses import dataclass

# By `--lane-priority`: how far a lane's threads step back when both have work and cores are few, as nice values.
# Measured in docs/benchmarks-serving.md.
NICENESS: dict[str, dict[str, int]] = {
    "throughput": {"language": 5},
    "balanced": {},
    "latency": {"vision": 10},
}


@dataclass(frozen=True, slots=True)
class SpecOptions:
    """`model_impl` is "auto" or "native" (the engine's own models), or "transformers" (its modules inside our stages).
    `min_pixels` and `max_pixels` replace the processor's, for families with dynamic resolution. `quantization` is
    "auto" (as the weights are stored), the method that the checkpoint must have, or what unquantised weights become."""

    model_impl: str = "auto"
    trust_remote_code: bool = False
    min_pixels: int | None = None
    max_pixels: int | None = None
    quantization: str = "auto"
