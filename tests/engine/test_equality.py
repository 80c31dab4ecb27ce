"""Same request, same tokens: alone or together, whatever the chunks, the pressure on the caches, or the channel."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from hydra_engine import Engine, SamplingParams
from hydra_engine.backend.cpu.ops import SamplingOps
from hydra_engine.core.outputs import Result
from tests.engine.conftest import EngineFactory, assert_at_rest, picture

Case = dict[str, Any]

CASES: list[Case] = [
    {"prompt": "What is this?", "images": None},
    {"prompt": "One picture.", "images": 1},
    {"prompt": "Say something about three pictures, and take your time.", "images": 3},
    {"prompt": "x", "images": None},
    {"prompt": "Two of them: compare.", "images": 2},
    {"prompt": "A long text without any picture in it, " * 6, "images": None},
]


def pictures_of(case: Case, index: int) -> list[Any] | None:
    return None if case["images"] is None else [picture(100 * index + i) for i in range(case["images"])]


def sampling_of(index: int, tokens: int = 24) -> SamplingParams:
    """Greedy and seeded requests, half each."""
    if index % 2 == 0:
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return SamplingParams(temperature=1.0, seed=index, top_p=0.9, max_tokens=tokens, ignore_eos=True)


def alone(engine: Engine) -> list[tuple[int, ...]]:
    golden = []
    for index, case in enumerate(CASES):
        result = engine.generate(case["prompt"], pictures_of(case, index), sampling=sampling_of(index))
        golden.append(result.token_ids)
    return golden


def together(engine: Engine) -> list[Result]:
    handles = [
        engine.submit(case["prompt"], pictures_of(case, index), sampling=sampling_of(index))
        for index, case in enumerate(CASES)
    ]
    return [handle.result(120) for handle in handles]


@pytest.fixture(scope="module")
def golden(tiny_model: Path) -> list[tuple[int, ...]]:
    with Engine(tiny_model, threads=1, block_size=4, num_kv_blocks=512, token_budget=512) as engine:
        return alone(engine)


@pytest.mark.quick("[{}]", "processes", "'token_budget': 5}")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"token_budget": 5},
        {"token_budget": 512, "block_size": 16},
        {"threads": 2},
        {"image_budget": 1},
        {"max_num_seqs": 2},
        {"processes": True},
        {"look_ahead": True},
    ],
    ids=str,
)
def test_together_equals_alone(
    make_engine: EngineFactory, golden: list[tuple[int, ...]], options: dict[str, Any]
) -> None:
    engine = make_engine(**options)
    assert engine.summary.deterministic
    assert [r.token_ids for r in together(engine)] == golden


def test_preemption_loses_nothing(make_engine: EngineFactory, golden: list[tuple[int, ...]]) -> None:
    # Room for the largest request and little more: the six cannot all stay.
    engine = make_engine(num_kv_blocks=80, max_model_len=300, token_budget=64)
    results = together(engine)
    assert [r.token_ids for r in results] == golden
    assert_at_rest(engine)


def test_preempted_requests_say_so(make_engine: EngineFactory) -> None:
    engine = make_engine(num_kv_blocks=24, block_size=4, token_budget=64, max_model_len=80)
    sampling = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    prompt = [40, 41, 42]  # ids reach the instance together, texts one by one
    expected = engine.generate(prompt, sampling=sampling).token_ids
    results = [h.result(120) for h in [engine.submit(prompt, sampling=sampling) for _ in range(6)]]
    assert all(r.token_ids == expected for r in results)
    assert sum(r.metrics.num_preemptions for r in results) > 0


def test_greedy_tokens_equal_transformers(make_engine: EngineFactory, tiny_model: Path) -> None:
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    processor = AutoProcessor.from_pretrained(tiny_model)
    model = LlavaForConditionalGeneration.from_pretrained(tiny_model, dtype=torch.float32).eval()
    engine = make_engine()
    for index, case in enumerate(CASES):
        images = pictures_of(case, index)
        content = [{"type": "image"}] * (case["images"] or 0) + [{"type": "text", "text": case["prompt"]}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = processor(images=images, text=text, return_tensors="pt")
        with torch.inference_mode():
            output = model.generate(**inputs, do_sample=False, max_new_tokens=64, min_new_tokens=64, eos_token_id=None)
        theirs = output[0, inputs["input_ids"].shape[1] :].tolist()
        ours = engine.generate(case["prompt"], images, temperature=0, max_tokens=64, ignore_eos=True)
        assert list(ours.token_ids) == theirs, f"case {index}"
        assert ours.usage.prompt_tokens == inputs["input_ids"].shape[1]


PENALISED: dict[str, Any] = {
    **{"temperature": 0, "max_tokens": 24, "ignore_eos": True},
    **{"repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 1},
}


PROMPTS = [[40 + i, 41, 42] * 4 for i in range(4)]  # ids reach the instance together


@pytest.fixture(scope="module")
def penalised(engine_of_module: Engine) -> list[tuple[int, ...]]:
    """The tokens of each prompt alone."""
    return [engine_of_module.generate(prompt, **PENALISED).token_ids for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize("token_budget", range(5, 10))
def test_penalties_count_what_was_generated_before_a_preemption(
    make_engine: EngineFactory, penalised: list[tuple[int, ...]], token_budget: int
) -> None:
    """Penalties hold also where the latest token is planned as a decode, since the budget ended the chunk before it."""
    engine = make_engine(num_kv_blocks=20, token_budget=token_budget, max_model_len=64)
    results = engine.generate(PROMPTS, **PENALISED)
    assert [result.token_ids for result in results] == penalised
    assert sum(result.metrics.num_preemptions for result in results) > 0


def test_a_row_that_runs_out_of_memory_counts_its_token_once(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step is run again, with the penalties of the first time."""
    engine = make_engine()
    prompt = [40, 41, 42] * 4
    golden = engine.generate(prompt, **PENALISED).token_ids
    score_tokens, calls = SamplingOps.score_tokens, itertools.count(1)

    def short_of_memory(*given: Any) -> Any:
        if next(calls) % 3 == 2:
            raise torch.OutOfMemoryError("as a test wants it")
        return score_tokens(*given)

    monkeypatch.setattr(SamplingOps, "score_tokens", staticmethod(short_of_memory))
    assert engine.generate(prompt, **PENALISED).token_ids == golden
    assert next(calls) > len(golden) + 1, "nothing was run again"
