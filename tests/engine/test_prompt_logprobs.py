"""Log probabilities of prompt tokens equal transformers', however the prompt was chunked and on every topology."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hydra_engine import Engine
from hydra_engine.core.logprobs import TextLogprob
from hydra_engine.core.outputs import Result
from hydra_engine.models.layers import decoder
from hydra_transformers import model as generic
from tests.engine.conftest import EngineFactory, assert_at_rest, picture
from tests.engine.test_hybrid import HYBRID
from tests.engine.test_reuse import images_encoded, stages
from tools.miniatures import make_tiny

Scores = Sequence[TextLogprob | None]
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "prompt_logprobs": 3}
CASES: list[tuple[str, int]] = [
    ("What is this?", 0),
    ("One picture.", 1),
    ("Two of them, and some text behind them: compare.", 2),
    ("A long text without any picture in it, " * 3, 0),
]


def pictures(index: int) -> list[Any] | None:
    return [picture(10 * index + i) for i in range(CASES[index][1])] or None


def scored(engine: Engine, index: int, **options: Any) -> Result:
    result: Result = engine.generate(CASES[index][0], pictures(index), **(OPTIONS | options))
    return result


def alone(engine: Engine) -> list[tuple[Scores | None, tuple[int, ...]]]:
    found = [scored(engine, index) for index in range(len(CASES))]
    return [(result.prompt_logprobs, result.token_ids) for result in found]


def together(engine: Engine) -> list[tuple[Scores | None, tuple[int, ...]]]:
    handles = [engine.submit(text, pictures(index), **OPTIONS) for index, (text, _) in enumerate(CASES)]
    return [(result.prompt_logprobs, result.token_ids) for result in (handle.result(60) for handle in handles)]


@pytest.fixture(scope="module")
def golden(tiny_model: Path) -> list[tuple[Scores | None, tuple[int, ...]]]:
    with Engine(tiny_model, threads=1, block_size=4, num_kv_blocks=512, token_budget=512) as engine:
        return alone(engine)


def assert_right(result: Result, logits: torch.Tensor) -> None:
    """`logits` [P, V] of the whole prompt."""
    told = result.prompt_logprobs
    assert told is not None and len(told) == len(result.prompt_token_ids) == len(logits)
    assert told[0] is None
    expected = logits.double().log_softmax(-1)
    for position, entry in enumerate(told[1:], start=1):
        row, token = expected[position - 1], result.prompt_token_ids[position]
        assert entry is not None and entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert abs(entry.rank - 1 - int((row > row[token]).sum())) <= 1  # a tie in the last digits
        best = row.topk(3)
        assert [one.logprob for one in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert entry.top[0][0] == int(best.indices[0])


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"model_impl": "transformers"}, marks=pytest.mark.slow)], ids=["own", "generic"]
)
def test_scores_are_those_of_transformers(
    make_engine: EngineFactory, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Placeholders of pictures are scored like all tokens, as vLLM does. The head sees a few rows at a time."""
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    for module in (decoder, generic):
        monkeypatch.setattr(module, "SCORED_ROWS", 9)
    processor = AutoProcessor.from_pretrained(tiny_model)
    model = LlavaForConditionalGeneration.from_pretrained(tiny_model, dtype=torch.float32).eval()
    engine = make_engine(**options)
    for index, (prompt, num_images) in enumerate(CASES):
        content = [{"type": "image"}] * num_images + [{"type": "text", "text": prompt}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = processor(images=pictures(index), text=text, return_tensors="pt")
        with torch.inference_mode():
            logits = model(**inputs).logits[0]
        result = scored(engine, index)
        assert result.prompt_token_ids == tuple(inputs["input_ids"][0].tolist())
        assert_right(result, logits)


@pytest.mark.parametrize(
    "options",
    [
        {"token_budget": 5},
        {"token_budget": 24, "look_ahead": True},
        {"block_size": 16, "prefix_caching": False},
        {"num_kv_blocks": 46, "max_model_len": 180},
        {"topology": "E+P+D", "token_budget": 24},
    ],
    ids=str,
)
@pytest.mark.slow
def test_nothing_changes_a_score(
    make_engine: EngineFactory, golden: list[tuple[Scores | None, tuple[int, ...]]], options: dict[str, Any]
) -> None:
    engine = make_engine(**options)
    assert together(engine) == golden
    assert together(engine) == golden, "with what the caches hold"
    assert_at_rest(engine)


@pytest.mark.slow
def test_hybrid_decoders_score_in_any_chunks(make_engine: EngineFactory, tmp_path: Path) -> None:
    text = {**HYBRID, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    make_tiny("minicpmv4_6", tmp_path, seed=7, text_type="qwen3_5_text", text=text)
    whole, cut = (make_engine(model=tmp_path, token_budget=budget) for budget in (512, 7))
    assert together(cut) == alone(whole)


@pytest.mark.slow
def test_a_prompt_is_scored_in_spite_of_what_is_cached(
    make_engine: EngineFactory, golden: list[tuple[Scores | None, tuple[int, ...]]]
) -> None:
    engine = make_engine()
    plain = scored(engine, 1, prompt_logprobs=None)
    again = scored(engine, 1)
    after = scored(engine, 1, prompt_logprobs=None)
    assert plain.prompt_logprobs is None and plain.prompt_token_ids == again.prompt_token_ids
    assert (again.prompt_logprobs, again.token_ids) == golden[1]
    assert again.usage.cached_tokens == 0 and "cached" not in stages(again)
    assert again.usage.cached_images == 1, "features are found"
    assert after.usage.cached_tokens > 0 and after.token_ids == plain.token_ids
    assert images_encoded(engine) == 1


def test_scores_without_alternatives_and_of_the_shortest_prompt(make_engine: EngineFactory) -> None:
    engine = make_engine()
    result = engine.generate([35, 36, 37], raw=True, **(OPTIONS | {"prompt_logprobs": 0}))
    assert [entry and (entry.token_id, entry.top) for entry in result.prompt_logprobs] == [None, (36, ()), (37, ())]
    assert engine.generate([35], raw=True, **OPTIONS).prompt_logprobs == (None,)


def test_several_answers_share_the_scores_of_one_prefill(
    make_engine: EngineFactory, golden: list[tuple[Scores | None, tuple[int, ...]]]
) -> None:
    engine = make_engine()
    handle = engine.submit(CASES[1][0], pictures(1), n=3, **OPTIONS)
    result = handle.result(30)
    scores = golden[1][0]
    assert [answer.prompt_logprobs for answer in (result, *result.choices)] == [scores] * 4
    assert [piece.prompt_logprobs for piece in handle if piece.prompt_token_ids] == [scores] * 3
    assert [answer.usage.cached_tokens > 0 for answer in result.choices] == [False, True, True]


def test_a_preempted_request_says_the_same_again(
    make_engine: EngineFactory, golden: list[tuple[Scores | None, tuple[int, ...]]]
) -> None:
    engine = make_engine(num_kv_blocks=46, max_model_len=180, token_budget=24)
    long = [engine.submit([40], temperature=0, max_tokens=100, ignore_eos=True) for _ in range(2)]
    handles = [engine.submit(CASES[3][0], **(OPTIONS | {"max_tokens": 40})) for _ in range(2)]
    results = [handle.result(60) for handle in handles]
    assert [result.prompt_logprobs for result in results] == [golden[3][0]] * 2
    assert sum(result.metrics.num_preemptions for result in (*results, *(one.result(60) for one in long))) > 0
