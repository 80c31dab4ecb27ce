"""Keys and values of int8: the same tokens however a prompt is cut, reused and handed over; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.mixed import Outcome, alone, mixture, together
from hydra_engine import Engine
from hydra_engine.backend.base import PagedCache
from hydra_engine.core.pools import PoolKind
from hydra_engine.errors import ConfigError
from hydra_engine.worker.transfer import layout_of
from tests.engine.conftest import EngineFactory, assert_at_rest
from tests.engine.test_topologies import differences
from tools.demo_training.scenes import held_out_questions

REQUESTS = mixture(32)


@pytest.fixture(scope="module")
def golden(tiny_model: Path) -> list[Outcome]:
    options: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 2048, "token_budget": 512}
    with Engine(tiny_model, threads=1, kv_cache_dtype="int8", **options) as engine:
        return alone(engine, REQUESTS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "options"),
    [
        ("EPD", {"token_budget": 24}),
        ("EP+D", {"token_budget": 24}),
        ("E+P+D", {"token_budget": 24, "check_transfers": True}),
        ("E+P+D", {"token_budget": 512, "prefix_caching": False}),
    ],
    ids=str,
)
def test_every_topology_and_chunking_gives_the_same_tokens(
    make_engine: EngineFactory, golden: list[Outcome], topology: str, options: dict[str, Any]
) -> None:
    """The second time with what the caches hold."""
    engine = make_engine(topology=topology, kv_cache_dtype="int8", **options)
    for _ in range(2):
        assert differences(REQUESTS, together(engine, REQUESTS), golden) == []
    assert_at_rest(engine)
    moved = sum(status.transfer.pulled for status in engine.statuses().values())
    assert (moved > 0) == (topology != "EPD")


def answers(count: int, **options: Any) -> tuple[list[str], list[str]]:
    """Answers of the demo model to held-out questions, and the right ones."""
    questions = held_out_questions(count, seed=2024)
    with Engine("demo", threads=1, **options) as engine:
        results = engine.generate(
            [q.text for q in questions], images=[q.image for q in questions], temperature=0, max_tokens=64
        )
        assert_at_rest(engine)
    return [result.text.strip() for result in results], [question.answer for question in questions]


@pytest.mark.slow
@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_the_demo_model_answers_as_without_quantization(count: int) -> None:
    exact, right = answers(count)
    found, _ = answers(count, kv_cache_dtype="int8")
    changed = sum(a != b for a, b in zip(exact, found, strict=True))
    correct = sum(a == b for a, b in zip(found, right, strict=True))
    print(f"{changed} of {count} answers changed, {correct} are right")
    assert changed <= 0.02 * count and correct >= 0.95 * count


def test_the_cache_holds_nearly_twice_as_many_tokens(tiny_model: Path) -> None:
    tokens = {}
    for name in ("auto", "int8"):
        with Engine(tiny_model, kv_cache_gib=0.01, kv_cache_dtype=name, dtype="bfloat16") as engine:
            summary = engine.summary
            tokens[name] = summary.num_kv_blocks
            assert summary.kv_cache_bytes <= 0.01 * (1 << 30)
            assert any("int8" in note for note in summary.notes) == (name == "int8")
    assert 1.6 < tokens["int8"] / tokens["auto"] < 2


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("fp8", "take int8"),
        ("fp8_e4m3", "take int8"),
        ("bf16", "the type of activations, float32"),
        ("int4", "kv_cache_dtype must be"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(tiny_model: Path, name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Engine(tiny_model, kv_cache_dtype=name, dtype="float32")


def test_the_type_of_activations_may_be_named(tiny_model: Path) -> None:
    with Engine(tiny_model, kv_cache_dtype="bf16", dtype="bfloat16") as engine:
        assert engine.generate([20, 21, 22], max_tokens=2).token_ids


def test_quantized_blocks_have_a_layout_of_their_own() -> None:
    shape = (2, 1, 2, 4, 1, 8)
    plain = PagedCache(torch.zeros(shape, dtype=torch.bfloat16))
    ours = PagedCache.quantized(torch.zeros(2 * 2 * 4 * 12, dtype=torch.uint8), shape, torch.bfloat16)
    assert not layout_of(PoolKind.KV, ours).agrees_with(layout_of(PoolKind.KV, plain))
