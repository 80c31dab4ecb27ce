"""Attention that is not plain, through transformers' modules and our caches: windows, chunks, capped scores, sinks.

Text models, because they are where transformers has all of these; the adapter treats decoders alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hydra_engine import Engine
from hydra_engine.backend.base import Backend
from hydra_engine.backend.select import create_backend
from hydra_engine.errors import ConfigError
from hydra_transformers.attention import MaskRule, Step
from tests.models.generic_pair import Pair
from tools.miniatures.base import TEXT, TinyFamily, make_checkpoint

TEXT_OF_MANY_TOKENS = "<s>The quick brown fox jumps over the lazy dog, and so on.<|end|>"
MODELS: dict[str, Mapping[str, Any]] = {
    "mistral": {"sliding_window": 16},
    "gemma2": {
        "sliding_window": 16,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0,
    },
    "gpt_oss": {"sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": None},
    "llama4_text": {"attention_chunk_size": 16, "num_local_experts": 2},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
}
MIXTURES = ("gpt_oss", "llama4_text")  # their experts' products are transformers' own


def text_only(model_type: str, fields: Mapping[str, Any]) -> TinyFamily:
    return TinyFamily(
        lambda text, vision, overrides: transformers.AutoConfig.for_model(model_type, **{**TEXT, **fields}),
        lambda directory, config, tokenizer: tokenizer.save_pretrained(directory),
        with_images=False,
    )


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("text")
    for name, fields in MODELS.items():
        options: dict[str, Any] = {"text": {}, "vision": {}, "overrides": {}, "max_shard_size": "1GB"}
        make_checkpoint(text_only(name, fields), root / name, seed=3, dtype="float32", **options)
    return {name: root / name for name in MODELS}


@pytest.mark.quick("native-gpt_oss")
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens_match(name: str, directories: Mapping[str, Path], backend: Backend) -> None:
    pair = Pair(directories[name], backend)
    prompt = pair.prompt(TEXT_OF_MANY_TOKENS)
    logits = pair.driver.run(pair.request(prompt), [])
    assert (logits - pair.logits(prompt)).abs().max() <= 1e-4
    assert pair.driver.generate(pair.request(prompt), 24, [20]) == pair.generate(prompt, 24)
    assert pair.driver.model.deterministic == (name not in MIXTURES)
    if name not in MIXTURES:
        for chunks in ([1] * len(prompt.token_ids), [7, 9, 1, 30], [16, 16]):
            pair.driver.reset()
            assert torch.equal(pair.driver.run(pair.request(prompt), chunks), logits), chunks


@pytest.mark.slow
def test_a_mixture_needs_the_flag_that_its_sentence_names(directories: Mapping[str, Path]) -> None:
    options: dict[str, Any] = {"model_impl": "transformers", "threads": 1, "num_kv_blocks": 64}
    with pytest.raises(ConfigError, match=r"GptOssForCausalLM computes .* give deterministic=False to run it"):
        Engine(directories["gpt_oss"], **options)
    with Engine(directories["gpt_oss"], deterministic=False, **options) as engine:
        assert not engine.summary.deterministic and engine.generate("Hello", max_tokens=2).token_ids


def test_only_tokens_whose_window_slides_leave_the_paged_kernel(directories: Mapping[str, Path]) -> None:
    """The token's position decides: neighbours and chunks do not change its kernel."""
    pair = Pair(directories["mistral"], create_backend("cpu", torch.float32, backend="reference", threads=1))
    rule = MaskRule(lambda batch, head, query, key: (key <= query) & (key > query - 16))
    request = pair.driver.request(range(6, 46))
    begun, seen = [], []
    for count in (10, 1, 20, 9):
        work = [(pair.driver.request([6, 7, 8]), 3), (request, count)]
        batch = batch_of(pair, work)
        step = Step(pair.driver.backend.ops, pair.driver.kv_cache, batch, sees_itself=False)
        (chosen,) = step.selections(rule, all_tokens=False) or [None]
        places = [] if chosen is None else (chosen.tokens - 3 + request.num_computed - count).tolist()
        assert all(token >= 3 for token in ([] if chosen is None else chosen.tokens.tolist()))
        seen += places
        begun += [] if chosen is None else chosen.counts.tolist()
    assert seen == list(range(16, 40)) and set(begun) == {16}


def batch_of(pair: Pair, work: list[tuple[Any, int]]) -> Any:
    """The input of a step, as the driver makes it."""
    kept: list[Any] = []
    forward = pair.driver.model.forward

    def keep(batch: Any, *caches: Any) -> torch.Tensor:
        kept.append(batch)
        return forward(batch, *caches)

    pair.driver.model.forward = keep
    try:
        pair.driver.step(work)
    finally:
        del pair.driver.model.forward
    return kept[0]
