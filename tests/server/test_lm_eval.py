"""Requests of lm-eval's `local-completions` for log-likelihoods, and its reading of answers, with the real engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from operator import itemgetter
from typing import Any

import aiohttp
import pytest
import torch

from hydra_engine.config import EngineConfig, ServerConfig, config_from_options
from hydra_engine.engine import Engine
from hydra_engine.server.app import build_app
from hydra_engine.server.http.listening import listen

QUESTION = [{"role": "user", "content": "What is two plus three?"}]
PAIRS = [  # of these the first is what the model says
    (QUESTION, "Two plus three is five."),
    (QUESTION, "Two plus three is six."),
    ([{"role": "user", "content": "What is one plus one?"}], "Blue"),
]


@pytest.fixture
async def url() -> AsyncIterator[str]:
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "token_budget": 16}
    engine = Engine.create_unstarted(config_from_options("demo", options))
    await engine.astart(progress=False)
    listening = await listen(build_app(engine, ServerConfig()), "127.0.0.1", 0)
    yield listening.url
    assert (await engine.aledger()).at_rest
    await listening.close()
    await engine.aclose()


def requests() -> list[tuple[list[int], int]]:
    """(context and continuation, tokens of the context)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(EngineConfig().model_path)
    found = []
    for messages, continuation in PAIRS:
        context = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        context_ids = tokenizer.encode(context, add_special_tokens=False)
        found.append((context_ids + tokenizer.encode(continuation, add_special_tokens=False), len(context_ids)))
    return found


def read(answer: dict[str, Any], context_lengths: list[int]) -> list[tuple[float, bool]]:
    """(log-likelihood, whether the continuation is what greedy sampling gives), as lm-eval reads them."""
    found = []
    choices = sorted(answer["choices"], key=itemgetter("index"))
    for choice, begin in zip(choices, context_lengths, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][begin:-1]
        best = choice["logprobs"]["top_logprobs"][begin:-1]
        greedy = all(logprob == max(top.values()) for logprob, top in zip(logprobs, best, strict=True))
        found.append((sum(logprobs), greedy))
    return found


def expected() -> list[tuple[float, bool]]:
    from transformers import LlavaForConditionalGeneration

    model = LlavaForConditionalGeneration.from_pretrained(EngineConfig().model_path, dtype=torch.float32).eval()
    found = []
    for ids, begin in requests():
        with torch.inference_mode():
            logprobs = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        rows, wanted = logprobs[begin - 1 : -1], torch.tensor(ids[begin:])
        total = rows.gather(1, wanted[:, None]).sum().item()
        found.append((total, bool((rows.argmax(1) == wanted).all())))
    return found


async def test_log_likelihoods_are_those_of_transformers(url: str) -> None:
    right = expected()
    assert [greedy for _, greedy in right] == [True, False, False]
    for batch in (1, len(PAIRS)):
        told = await likelihoods(url, requests(), batch)
        assert [greedy for _, greedy in told] == [greedy for _, greedy in right]
        assert [total for total, _ in told] == pytest.approx([total for total, _ in right], abs=1e-3)


async def likelihoods(url: str, asked: list[tuple[list[int], int]], batch: int) -> list[tuple[float, bool]]:
    found = []
    async with aiohttp.ClientSession() as http:
        for begin in range(0, len(asked), batch):
            part = asked[begin : begin + batch]
            body = {
                "model": "demo",
                "prompt": [ids for ids, _ in part],
                "temperature": 0,
                "max_tokens": 1,
                "logprobs": 1,
                "seed": 1234,
                "echo": True,
            }
            async with http.post(f"{url}/v1/completions", json=body) as response:
                assert response.status == 200
                answer = await response.json()
            counts = [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]]
            assert counts == [len(ids) + 1 for ids, _ in part]
            found += read(answer, [length for _, length in part])
    return found
