"""A cost surface for tests."""

from __future__ import annotations

from hydra_engine.core.cost import CostSurface, Curve


def make_surface(**changes) -> CostSurface:
    """A small GPU-like machine: a step of one row takes 5 ms, 512 tokens of prefill 30 ms, an image of 1024 patches
    12 ms; side by side both lanes are slowed."""
    values = {
        "rows": Curve((1, 16, 64, 256, 1024), (0.005, 0.0052, 0.007, 0.018, 0.066)),
        "per_key_s": 4e-8,
        "per_pair_s": 2e-10,
        "per_chunk_s": 5e-5,
        "patches": Curve((64, 256, 1024, 4096), (0.004, 0.005, 0.012, 0.042)),
        "per_patch_pair_s": 1e-10,
        "decode_slowdown": 1.35,
        "prefill_slowdown": 1.6,
        "vision_slowdown": 1.5,
    }
    return CostSurface(**(values | changes))
