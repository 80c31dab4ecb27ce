"""Legacy completions, models, tokenize and detokenize."""

from __future__ import annotations

import asyncio
import contextlib
import json
from datetime import datetime
from typing import Any

import pytest

from hydra_engine.errors import RequestFailed
from tests.server.conftest import Served, until
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
    [
        ("a b", ["a b"]),
        (["a b"], ["a b"]),
        ([5, 6], [[5, 6]]),
        ([[5, 6]], [[5, 6]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
async def test_prompt_forms(served: Served, prompt: Any, submitted: Any) -> None:
    async with served.post("/v1/completions", {"prompt": prompt}) as response:
        assert response.status == 200
        assert [choice["index"] for choice in (await response.json())["choices"]] == list(range(len(submitted)))
    assert [submission.prompt for submission in served.engine.submissions] == submitted
    assert served.engine.submissions[0].sampling.max_tokens == 16


@pytest.mark.parametrize(
    "prompt", [[1, "a"], [[1], 2], [], [-1], [1 << 31], [[-1]], [True], [None], ["a"] * 129, None, {}]
)
async def test_prompts_that_are_refused(served: Served, prompt: Any) -> None:
    async with served.post("/v1/completions", {"prompt": prompt}) as response:
        error = (await response.json())["error"]
    assert response.status == 400
    assert error["param"].startswith("prompt")
    assert not served.engine.submissions


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"xtc_probability": 0.5}, "xtc_probability", "leave it out or send 0"),
        ({"enable_thinking": True}, "enable_thinking", "; leave it out"),
        ({"input_ids": [1]}, "input_ids", "use prompt"),
        ({"best_of": 2}, "best_of", "must equal n"),
        ({"best_of": 2, "n": 3}, "best_of", "must equal n"),
        ({"n": 65}, "n", "64"),
        ({"prompt": ["a"] * 128, "n": 5}, "n", "fewer prompts"),
        ({"max_tokens": 0}, "max_tokens", "echo: true"),
        ({"logprobs": 21}, "logprobs", "20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "0"),
    ],
)
async def test_fields_that_are_refused(served: Served, fields: dict[str, Any], param: str, words: str) -> None:
    async with served.post("/v1/completions", {"prompt": "a", **fields}) as response:
        error = (await response.json())["error"]
    assert response.status == 400
    assert error["param"] == param and words in error["message"]
    assert not served.engine.submissions


async def test_answers_of_all_prompts_are_in_order(served: Served) -> None:
    async with client_of(served) as client:
        answer = await client.completions.create(model="stub", prompt=["a b c", "x y"], n=2, best_of=2, max_tokens=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "a b"),
        (1, "b c"),
        (2, "x y"),
        (3, "y x"),
    ]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length", "stop", "stop"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 8), "each prompt counts once"
    assert [submission.sampling.n for submission in served.engine.submissions] == [2, 2]
    first, second = (submission.request_id for submission in served.engine.submissions)
    assert (first, second) == (f"{answer.id}-0", f"{answer.id}-1")
    assert not served.engine.cancelled


async def test_a_stream_mixes_answers_by_index(served: Served) -> None:
    served.engine.token_s = 0.01
    async with client_of(served) as client:
        options: dict[str, Any] = {"include_usage": True, "continuous_usage_stats": True}
        stream = await client.completions.create(
            model="stub", prompt=["a b c", "x y"], n=2, stream=True, stream_options=options
        )
        chunks = [chunk async for chunk in stream]
    texts, ends = [""] * 4, [0] * 4
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        assert not ends[choice.index], "nothing comes behind an answer's end"
        texts[choice.index] += choice.text
        ends[choice.index] += choice.finish_reason is not None
    assert (texts, ends) == (["a b c", "b c a", "x y", "y x"], [1, 1, 1, 1])
    indices = [chunk.choices[0].index for chunk in chunks[:-1]]
    assert indices != sorted(indices)
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (5, 10)
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert counts == sorted(counts) and counts[-1] == 10


ECHOED = {
    "text_offset": [0, 1, 2, 3, 4],
    "token_logprobs": [None, -0.25, -0.5, -0.5, -0.5],
    "tokens": ["a", " ", "b", "97", " 32"],
    "top_logprobs": [None, {"!": -0.125, " ": -0.25}, {"c": -0.125, "b": -0.5}, {"97": -0.5}, {" 32": -0.5}],
}


async def test_echo_with_logprobs_as_openai_had_it(served: Served) -> None:
    body = {"prompt": "a b", "echo": True, "logprobs": 1, "max_tokens": 2}
    async with served.post("/v1/completions", body) as response:
        answer = await response.json()
    (choice,) = answer["choices"]
    assert choice["text"] == "a b97 32"
    assert choice["logprobs"] == ECHOED | {"text_offset": [0, 1, 2, 3, 5]}
    assert served.engine.submissions[0].sampling.prompt_logprobs == 1


@pytest.mark.parametrize("prompt", ["a b", [97, 32, 98]])
async def test_echo_of_the_prompt_alone(served: Served, prompt: Any) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0, "return_tokens_as_token_ids": True}
    async with served.post("/v1/completions", body) as response:
        answer = await response.json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a b", "length")
    assert choice["logprobs"] == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [None, -0.25, -0.5],
        "tokens": ["token_id:97", "token_id:32", "token_id:98"],
        "top_logprobs": [
            None,
            {"token_id:33": -0.125, "token_id:32": -0.25},
            {"token_id:99": -0.125, "token_id:98": -0.5},
        ],
    }
    assert answer["usage"]["completion_tokens"] == 0


async def test_echo_without_logprobs(served: Served) -> None:
    async with served.post("/v1/completions", {"prompt": ["a b", "c"], "echo": True}) as response:
        assert [choice["text"] for choice in (await response.json())["choices"]] == ["a ba b", "cc"]
    assert served.engine.submissions[0].sampling.prompt_logprobs is None


async def test_a_stream_echoes_before_each_answer(served: Served) -> None:
    body = {"prompt": "a b", "echo": True, "logprobs": 1, "max_tokens": 2, "n": 2, "stream": True}
    async with served.post("/v1/completions", body) as response:
        events = (await response.text()).split("\n\n")
    choices = [json.loads(event[6:])["choices"][0] for event in events[:-2]]
    texts = {index: [c["text"] for c in choices if c["index"] == index] for index in range(2)}
    assert texts == {0: ["a b", "97", " 32", ""], 1: ["a b", "32", " 98", ""]}
    told = [choice["logprobs"] for choice in choices if choice["index"] == 0 and choice["logprobs"]]
    joined = {name: [value for one in told for value in one[name]] for name in ECHOED}
    assert joined == ECHOED | {"text_offset": [0, 1, 2, 3, 5]}


async def test_prompt_logprobs_and_token_ids_in_vllms_form(served: Served) -> None:
    body = {"prompt": [97, 98], "prompt_logprobs": 2, "return_token_ids": True, "max_tokens": 1}
    async with served.post("/v1/completions", body) as response:
        (choice,) = (await response.json())["choices"]
    right = {"logprob": -0.25, "rank": 2, "decoded_token": "b"}
    assert choice["prompt_logprobs"] == [
        None,
        {"98": right, "99": {"logprob": -0.125, "rank": 1, "decoded_token": "c"}},
    ]
    assert (choice["prompt_token_ids"], choice["token_ids"], choice["logprobs"]) == ([97, 98], [0], None)
    async with served.post("/v1/completions", body | {"stream": True}) as response:
        events = (await response.text()).split("\n\n")
    chunks = [json.loads(event[6:])["choices"][0] for event in events[:-2]]
    assert chunks[0]["prompt_logprobs"] == choice["prompt_logprobs"] and chunks[0]["prompt_token_ids"] == [97, 98]
    assert [chunk.get("token_ids") for chunk in chunks[1:]] == [[0], None]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_bad_prompt_fails_the_request_before_it_streams(served: Served, stream: bool) -> None:
    served.engine.token_s = 600
    served.engine.bad_prompt = "bad"
    body = {"prompt": ["a b", "c", "bad"], "stream": stream}
    async with served.post("/v1/completions", body) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "prompt")
    submitted = [submission.request_id for submission in served.engine.submissions]
    await until(lambda: served.engine.cancelled == submitted[::-1])
    assert len(served.engine.cancelled) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_of_one_prompt_ends_the_others(served: Served, stream: bool) -> None:
    served.engine.token_s = 0.2
    served.engine.error, served.engine.fail_after, served.engine.fails_for = RequestFailed("it broke"), 1, "b c"
    async with served.post("/v1/completions", {"prompt": ["a " * 100, "b c"], "stream": stream}) as response:
        text = await response.text()
    assert response.status == (200 if stream else 500)
    assert "it broke" in text and "[DONE]" not in text
    await until(lambda: served.engine.cancelled == [served.engine.submissions[0].request_id])
    await until(lambda: not served.lifecycle.num_running)


async def test_leaving_cancels_all_prompts(served: Served) -> None:
    served.engine.token_s = 600
    for stream in (True, False):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.3):
                body = {"prompt": ["a b", "c d"], "n": 2, "stream": stream}
                async with served.post("/v1/completions", body) as response:
                    await response.read()
    await until(lambda: len(served.engine.cancelled) == 4)


async def test_echo_of_ids_outside_the_vocabulary(served: Served) -> None:
    async with served.post("/v1/completions", {"prompt": [5, 2000], "echo": True}) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "prompt")


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
        "type": "model",
        "display_name": "stub",
        "created_at": one.to_dict()["created_at"],
    }
    created = datetime.fromisoformat(one.to_dict()["created_at"])
    assert created.timestamp() == served.engine.created
    assert (listed.to_dict()["first_id"], listed.to_dict()["has_more"]) == ("stub", False)


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
    async with served.post("/tokenize", {"prompt": "ab", "return_token_strs": True}) as response:
        assert (await response.json())["token_strs"] == ["<a>", "<b>"]
    async with served.post("/detokenize", {"tokens": tokens["tokens"]}) as response:
        assert await response.json() == {"prompt": "abc"}
    async with served.post("/tokenize", {"messages": [{"role": "user", "content": "ab"}]}) as response:
        assert (await response.json())["tokens"] == [97, 98]
    async with served.post("/detokenize", {"tokens": [1000]}) as response:
        assert response.status == 400
    async with served.post("/tokenize", {}) as response:
        assert response.status == 400


BIAS = dict.fromkeys(map(str, range(999)), 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [*range(3000)], "prompt": ["a"] * 100, "n": 4},
        {
            "allowed_token_ids": [*range(1500)],
            "logit_bias": {str(i): 1 for i in range(1000)},
            "prompt": ["a"] * 105,
            "n": 4,
        },
        {"allowed_token_ids": [*range(20_000)], "prompt": "a", "n": 64},
    ],
)
async def test_lists_of_tokens_times_answers_are_bounded(served: Served, fields: dict[str, Any]) -> None:
    async with served.post("/v1/completions", {"model": "stub", **fields}) as response:
        error = (await response.json())["error"]
        assert response.status == 400 and served.engine.submissions == []
    assert error["param"] == "allowed_token_ids" and "at most 1048576" in error["message"]
    again = {**fields, "allowed_token_ids": [1, 2] * 30_000, "max_tokens": 1}
    async with served.post("/v1/completions", {"model": "stub", **again}) as response:
        assert response.status == 200, await response.text()
    assert served.engine.submissions[0].sampling.allowed_token_ids == (1, 2), "repetitions count once"


async def test_others_have_a_turn_between_two_prompts(served: Served) -> None:
    seen = {0}

    async def turns() -> None:
        while len(served.engine.submissions) < 100:
            seen.add(len(served.engine.submissions))
            await asyncio.sleep(0)

    ticker = asyncio.create_task(turns())
    async with served.post("/v1/completions", {"model": "stub", "prompt": ["a"] * 100, "max_tokens": 1}) as response:
        assert response.status == 200
    await ticker
    assert seen == {*range(100)}
