"""Legacy completions, models, tokenize and detokenize."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.conftest import Served
from tests.server.test_chat import client_of


async def test_openai_client_whole(served: Served) -> None:
    async with client_of(served) as client:
        answer = await client.completions.create(model="stub", prompt="a b c", max_tokens=2, logprobs=1)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == ("a b", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.to_dict() == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -0.5],
        "tokens": ["a", " b"],
        "top_logprobs": [{"a": -0.5}, {" b": -0.5}],
    }
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion"
    assert answer.usage is not None and answer.usage.total_tokens == 5
    assert served.engine.submissions[0].raw


async def test_openai_client_stream(served: Served) -> None:
    async with client_of(served) as client:
        stream = await client.completions.create(
            model="stub", prompt="a b", stream=True, logprobs=0, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert [chunk.choices[0].text for chunk in chunks[:-1]] == ["a", " b", ""]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, None, "stop"]
    offsets = [chunk.choices[0].logprobs.text_offset for chunk in chunks[:2] if chunk.choices[0].logprobs]
    assert offsets == [[0], [1]]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_stream_has_one_closing_chunk(served: Served) -> None:
    async with served.post("/v1/completions", {"prompt": "a", "stream": True}) as response:
        events = (await response.text()).split("\n\n")
    assert [json.loads(event[6:])["choices"][0] for event in events[:2]] == [
        {"index": 0, "text": "a", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop", "stop_reason": None},
    ]
    assert events[2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize(
    ("prompt", "submitted"),
    [("a b", "a b"), (["a b"], "a b"), ([5, 6], [5, 6]), ([[5, 6]], [5, 6])],
)
async def test_prompt_forms(served: Served, prompt: Any, submitted: Any) -> None:
    async with served.post("/v1/completions", {"prompt": prompt}) as response:
        assert response.status == 200
    assert served.engine.submissions[0].prompt == submitted
    assert served.engine.submissions[0].sampling.max_tokens == 16


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [1, "a"], [], [-1], [1 << 31], [True], None, {}])
async def test_prompts_that_are_refused(served: Served, prompt: Any) -> None:
    async with served.post("/v1/completions", {"prompt": prompt}) as response:
        error = (await response.json())["error"]
    assert response.status == 400
    assert error["param"].startswith("prompt")


@pytest.mark.parametrize("field", [{"echo": True}, {"suffix": "x"}, {"best_of": 2}, {"n": 2}])
async def test_what_is_not_built_is_refused_by_name(served: Served, field: dict[str, Any]) -> None:
    async with served.post("/v1/completions", {"prompt": "a", **field}) as response:
        error = (await response.json())["error"]
    assert response.status == 400
    assert error["param"] == next(iter(field)) and "not supported" in error["message"]


async def test_models(served: Served) -> None:
    async with client_of(served) as client:
        listed = await client.models.list()
        one = await client.models.retrieve("stub")
    assert [model.id for model in listed.data] == ["stub"]
    assert one.to_dict() == {
        "id": "stub",
        "object": "model",
        "created": served.engine.created,
        "owned_by": "hydra-engine",
        "root": "stub",
        "parent": None,
        "max_model_len": 4096,
    }


async def test_model_names_may_hold_slashes(serve: Any) -> None:
    served = await serve(served_model_name="org/name-7b")
    async with served.get("/v1/models/org/name-7b") as response:
        assert (await response.json())["id"] == "org/name-7b"
    async with served.get("/v1/models/org/other") as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["param"]) == (404, "model_not_found", "model")


async def test_tokenize_and_back(served: Served) -> None:
    async with served.post("/tokenize", {"model": "stub", "prompt": "abc"}) as response:
        tokens = await response.json()
    assert tokens == {"count": 3, "max_model_len": 4096, "tokens": [97, 98, 99], "token_strs": None}
    async with served.post("/detokenize", {"tokens": tokens["tokens"]}) as response:
        assert await response.json() == {"prompt": "abc"}
    async with served.post("/tokenize", {"messages": [{"role": "user", "content": "ab"}]}) as response:
        assert (await response.json())["tokens"] == [97, 98]
    async with served.post("/detokenize", {"tokens": [1000]}) as response:
        assert response.status == 400
    async with served.post("/tokenize", {}) as response:
        assert response.status == 400
