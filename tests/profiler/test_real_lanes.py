"""Measuring on the real lanes of miniatures: every kind of model, within a few seconds, and nothing left behind."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hydra_engine.config import CacheConfig, EngineConfig, SchedulerConfig
from hydra_engine.core.plans import LanguageLoad, VisionLoad
from hydra_engine.instance.compute_stack import build_worker
from hydra_engine.instance.hooks import make_gate, profile_instance, step_times
from hydra_engine.profiler.store import problem_of
from tools.miniatures import make_tiny

HYBRID = {"num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
# What is made of each family besides its defaults.
MODELS: dict[str, dict[str, Any]] = {
    "llava": {},
    "qwen2_vl": {},
    "qwen3_vl": {},
    "qwen3_5": {},
    "minicpmv4_6": {
        "text_type": "qwen3_5_text",
        "text": {**HYBRID, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    },
    "smolvlm": {},
}


def silent(what: str, done: int, total: int) -> None:
    pass


def config_for(family: str, folder: Path, **scheduler: int) -> EngineConfig:
    make_tiny(family, folder / "model", seed=3, **MODELS[family])
    return EngineConfig(
        model=str(folder / "model"),
        threads=1,
        max_model_len=256,
        model_impl="transformers" if family == "smolvlm" else "auto",
        deterministic=family != "smolvlm",
        profile_dir=str(folder / "profiles"),
        scheduler=SchedulerConfig(**({"max_num_seqs": 4, "token_budget": 64} | scheduler)),
        cache=CacheConfig(block_size=8),
    )


@pytest.mark.parametrize("family", [pytest.param(m, marks=() if m == "llava" else pytest.mark.slow) for m in MODELS])
def test_every_kind_of_model_is_measured(family: str, tmp_path: Path) -> None:
    config = config_for(family, tmp_path)
    found = profile_instance(config, silent, fresh=True, deadline_s=3.0)
    profile, surface = found.profile, found.surface
    assert problem_of(profile) is None and found.file.exists()
    assert profile.samples.language  # how many more there are depends on the machine
    small, large = LanguageLoad(1, 32), LanguageLoad(0, 0, 64, 64 * 65 / 2, 1)
    assert 0 < surface.language_s(small) < 1.0 and surface.language_s(large) > 0
    assert surface.vision_s(VisionLoad(4096, 4096.0**2)) > 0
    estimated = any("estimated" in note for note in found.notes)
    assert estimated == (not profile.samples.vision)
    assert family != "smolvlm" or estimated
    again = profile_instance(config, silent, fresh=False, deadline_s=3.0)
    assert again.source == "saved profile" and again.surface == surface


@pytest.mark.slow
def test_measuring_leaves_a_worker_as_it_was(tmp_path: Path) -> None:
    """Checks that nothing is registered or in flight, caches are finite and progress is reported under its own name."""
    config, wake = config_for("llava", tmp_path), threading.Event()
    told: list[tuple[str, int, int]] = []
    with torch.inference_mode():
        parts = build_worker(config, wake, lambda *progress: told.append(progress), make_gate=make_gate)
        try:
            step_times(parts, wake, lambda *progress: told.append(progress), fresh=True, deadline_s=1.0)
            assert parts.worker.pixel_bytes == 0 and parts.worker.poll() == []
            assert bool(torch.isfinite(parts.kv_cache.data).all())
        finally:
            parts.worker.close()
    assert {what for what, _, _ in told} == {"weights", "warm-up", "step times"}
    assert told[-1][1] == told[-1][2]
