"""Limits of a language step that nobody has given, by the memory of a device that works behind the call."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hydra_engine.config import EngineConfig, SchedulerConfig
from hydra_engine.core.instances import EPD, Role
from hydra_engine.core.units import GIB
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.worker.memory.limits import filled_places, with_limits

H200 = int(0.9 * 140.4 * GIB)


def limits(model: str, own_bytes: int, role: Role = EPD, **given: int) -> tuple[int | None, int | None, str | None]:
    config = EngineConfig(model=model, scheduler=SchedulerConfig(**given))  # type: ignore[arg-type]
    spec = load_spec(config.model_path)
    found, reason = with_limits(config, spec, role, 2, own_bytes, None)
    return found.scheduler.token_budget, found.scheduler.max_num_seqs, reason


@pytest.mark.parametrize(
    ("model", "gib", "wanted"),
    [
        ("llava-1.5-7b", 140, (2048, 256)),
        ("llava-1.5-7b", 48, (2048, 128)),  # whose KV is large
        ("llava-1.5-7b", 24, (2048, 64)),
        ("llava-1.5-7b", 16, (512, 64)),  # graphs of steps with prompts count too
        ("llava-1.5-7b", 15, (512, 64)),
        ("qwen2-vl-7b", 140, (2048, 256)),
        ("qwen2-vl-7b", 32, (2048, 256)),
        ("qwen2-vl-7b", 24, (2048, 64)),  # whose logits are large
    ],
)
def test_limits_follow_from_memory(model: str, gib: int, wanted: tuple[int, int]) -> None:
    tokens, requests, reason = limits(model, int(0.9 * gib * GIB))
    assert (tokens, requests) == wanted
    assert reason == f"{tokens} tokens a language step and {requests} requests at once, from the device's memory"


def test_what_is_given_stays() -> None:
    assert limits("llava-1.5-7b", H200, token_budget=512, max_num_seqs=64) == (512, 64, None)
    assert limits("llava-1.5-7b", H200, token_budget=700) == (
        700,
        256,
        "256 requests at once, from the device's memory",
    )
    assert limits("llava-1.5-7b", H200, token_budget=24)[:2] == (24, 64), "no step has more rows than tokens"
    assert limits("llava-1.5-7b", 30 * GIB, max_num_seqs=300) == (
        2048,
        300,
        "2048 tokens a language step, from the device's memory",
    )


def test_an_instance_that_only_encodes_has_no_such_limits() -> None:
    assert limits("llava-1.5-7b", H200, Role.E) == (None, None, None)


def test_steps_are_as_long_as_their_tiles_fill_the_device() -> None:
    """Numbers for 2048 rows are in the notes of the benchmarks; a decoder of 1.5 billion needs more."""
    language = load_spec(EngineConfig(model="llava-1.5-7b").model_path).language
    qwen = load_spec(EngineConfig(model="qwen2-vl-7b").model_path).language
    assert [round(filled_places(language, rows), 2) for rows in (512, 2048)] == [0.67, 0.96]
    assert [round(filled_places(qwen, rows), 2) for rows in (512, 2048)] == [0.63, 0.92]
    mixture = load_spec(EngineConfig(model="qwen3-vl-30b-a3b").model_path).language
    assert [round(filled_places(mixture, rows), 2) for rows in (512, 2048)] == [0.82, 0.94]  # many small products
    small = {"hidden_size": 1536, "intermediate_size": 8960, "num_heads": 12, "num_kv_heads": 2}
    assert filled_places(replace(qwen, **small), 2048) < 0.9  # type: ignore[arg-type]
