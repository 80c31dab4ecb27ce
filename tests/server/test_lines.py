"""Streams can be read by clients that cut lines as Python's `str.splitlines` does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hydra_engine.errors import RequestFailed
from hydra_engine.server.http.answers import ENTRIES
from tests.server.conftest import Served

SEPARATORS = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
PIECES = [f"a{character}é\N{PARROT}" for character in SEPARATORS]
QUESTION = [{"role": "user", "content": "a"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": QUESTION},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 20},
}


async def events_of(served: Served, path: str, **fields: Any) -> list[dict[str, Any]]:
    """Events as clients see them that split by `str.splitlines` (httpx, requests)."""
    async with served.post(path, {**ASKED[path], "stream": True, **fields}) as response:
        text = (await response.read()).decode()
    lines = text.splitlines()
    assert lines == text.split("\n")[: len(lines)]
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def texts_of(event: dict[str, Any]) -> str:
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    if event.get("type") == "content_block_delta":
        return str(event["delta"]["text"])
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in event.get("choices", ())
    )


@pytest.mark.parametrize("path", list(ASKED))
@pytest.mark.parametrize("logprobs", [False, True])
async def test_no_character_of_an_answer_ends_a_line(served: Served, path: str, logprobs: bool) -> None:
    """Events with log probabilities take the slow path."""
    served.engine.pieces = PIECES
    more = {"/v1/chat/completions": {"logprobs": True}, "/v1/completions": {"logprobs": 2}}.get(path, {})
    events = await events_of(served, path, **more if logprobs else {})
    assert "".join(map(texts_of, events)) == "".join(PIECES)


async def test_nor_one_of_a_long_list(served: Served) -> None:
    prompt = f"a{SEPARATORS * ENTRIES}b"
    events = await events_of(served, "/v1/completions", prompt=prompt, prompt_logprobs=1)
    [first] = [choice for event in events for choice in event["choices"] if "prompt_logprobs" in choice]
    assert first, events
    told = [next(iter(entry.values()))["decoded_token"] for entry in first["prompt_logprobs"][1:]]
    assert len(told) > ENTRIES and "".join(told) == prompt[1:]


@pytest.mark.parametrize("path", list(ASKED))
async def test_nor_one_of_an_error(served: Served, path: str) -> None:
    served.engine.error, served.engine.fail_after = RequestFailed(f"a{SEPARATORS}b"), 1
    served.engine.pieces = PIECES
    assert "error" in json.dumps((await events_of(served, path))[-1])
