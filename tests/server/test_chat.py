"""Chat answers, whole and streamed, to the byte and through the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from hydra_engine import __version__
from hydra_engine.core.call import ImagePart
from tests.calls import plain
from tests.server.conftest import Served, chat_body


def client_of(served: Served, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0, **options)


async def test_whole_answer(served: Served) -> None:
    async with served.chat() as response:
        body = await response.json()
        assert response.status == 200
        assert response.headers["Content-Type"] == "application/json"
    assert body.pop("created") > 1_700_000_000
    assert body.pop("id") == f"chatcmpl-{response.headers['X-Request-Id']}"
    assert body == {
        "object": "chat.completion",
        "model": "stub",
        "system_fingerprint": f"hydra-{__version__}",
        "choices": [
            {
                "index": 0,
                "message": {"content": "one two three", "role": "assistant", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 0, "image_tokens": 0},
        },
    }


async def raw_stream(served: Served, **fields: Any) -> list[bytes]:
    async with served.chat(stream=True, **fields) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Accel-Buffering"] == "no"
        assert "Content-Length" not in response.headers
        body = await response.read()
    assert body.endswith(b"\n\n")
    return body[:-2].split(b"\n\n")


async def test_stream_to_the_byte(served: Served) -> None:
    events = await raw_stream(served, text="hi you", request_id="r1")
    created = json.loads(events[0][6:])["created"]

    def chunk(delta: str, finish: str = "null", tail: str = "") -> bytes:
        return (
            f'data: {{"id":"chatcmpl-r1","object":"chat.completion.chunk","created":{created},"model":"stub",'
            f'"system_fingerprint":"hydra-{__version__}","choices":[{{"index":0,"delta":{delta},"logprobs":null,'
            f'"finish_reason":{finish}{tail}}}]}}'
        ).encode()

    assert events == [
        chunk('{"role":"assistant","content":""}'),
        chunk('{"content":"hi"}'),
        chunk('{"content":" you"}'),
        chunk("{}", '"stop"', ',"stop_reason":null'),
        b"data: [DONE]",
    ]


async def test_usage_is_null_until_the_last_chunk(served: Served) -> None:
    *chunks, done = await raw_stream(served, stream_options={"include_usage": True})
    parsed = [json.loads(chunk[6:]) for chunk in chunks]
    assert done == b"data: [DONE]"
    assert [chunk["usage"] for chunk in parsed[:-1]] == [None] * (len(parsed) - 1)
    assert parsed[-1]["choices"] == []
    assert parsed[-1]["usage"]["total_tokens"] == 6
    assert parsed[-2]["choices"][0]["finish_reason"] == "stop"


async def test_usage_on_every_chunk(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = await raw_stream(served, stream_options=options)
    counts = [json.loads(chunk[6:])["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 1, 2, 3, 3, 3]
    assert all(json.loads(chunk[6:])["usage"]["prompt_tokens"] == 3 for chunk in chunks)


async def test_metrics_and_timeline_when_asked(served: Served) -> None:
    async with served.chat(return_metrics=True) as response:
        metrics = (await response.json())["metrics"]
    assert metrics["ttft_s"] == 0.2 and metrics["queue_s"] == 0.1 and metrics["cached_images"] == 0
    assert metrics["timeline"][1] == {
        "stage": "prefill",
        "start_s": 0.1,
        "end_s": 0.2,
        "instance": "epd0",
        "lane": "language",
        "batch": 3,
        "tokens": 3,
        "cause": None,
    }
    *chunks, _ = await raw_stream(served, return_metrics=True)
    with_metrics = [chunk for chunk in (json.loads(event[6:]) for event in chunks) if "metrics" in chunk]
    assert len(with_metrics) == 1
    assert with_metrics[0]["choices"][0]["finish_reason"] == "stop"


async def test_the_cache_salt_reaches_the_engine_and_an_empty_one_is_refused(served: Served) -> None:
    async with served.chat() as response:
        assert response.status == 200
    async with served.chat(cache_salt="tenant") as response:
        assert response.status == 200
    assert [submission.cache_salt for submission in served.engine.submissions] == ["", "tenant"]
    async with served.chat(cache_salt="") as response:
        assert response.status == 400 and (await response.json())["error"]["param"] == "cache_salt"


async def test_keep_alive_comments_while_nothing_happens(serve: Any) -> None:
    served = await serve(keepalive_s=0.05)
    served.engine.prefill_s = 0.18
    events = await raw_stream(served)
    comments = [event for event in events if event == b": keep-alive"]
    assert 2 <= len(comments) <= 3
    assert [event for event in events if event.startswith(b":")] == events[: len(comments)]


async def test_text_that_is_held_back_makes_no_chunk(served: Served) -> None:
    served.engine.answer = ""
    events = await raw_stream(served)
    assert [json.loads(event[6:])["choices"][0]["delta"] for event in events[:-1]] == [
        {"role": "assistant", "content": ""},
        {},
    ]


# ---- the official client


async def test_openai_client_whole(served: Served) -> None:
    async with client_of(served) as client:
        answer = await client.chat.completions.create(
            model="stub",
            messages=[
                {"role": "developer", "content": "be short"},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "what is it"},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}},
                    ],
                },
            ],
            max_completion_tokens=2,
            temperature=0,
            seed=7,
            stop=["x", "y"],
            logprobs=True,
            top_logprobs=2,
            user="me",
            n=1,
            tools=[],
            response_format={"type": "text"},
            extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True},
        )
    assert answer.choices[0].message.content == "what is"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.prompt_tokens == 19
    assert answer.usage.to_dict()["prompt_tokens_details"] == {"cached_tokens": 0, "image_tokens": 16}
    assert answer._request_id is not None and answer.id == f"chatcmpl-{answer._request_id}"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["what", " is"]
    assert logprobs.content[0].bytes == list(b"what")
    assert [top.token for top in logprobs.content[0].top_logprobs] == ["what", "alt1"]
    submitted = served.engine.submissions[0]
    assert [part.param for part in submitted.messages[1].media] == ["messages[1].content[1].image_url.url"]
    assert plain(submitted.messages) == [
        {"role": "system", "content": "be short"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what is it"},
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}},
            ],
        },
    ]
    sampling = submitted.sampling
    assert (sampling.temperature, sampling.seed, sampling.top_k, sampling.min_p) == (0, 7, 5, 0.1)
    assert (sampling.stop, sampling.ignore_eos, sampling.max_tokens, sampling.logprobs) == (("x", "y"), True, 2, 2)


async def test_openai_client_stream(served: Served) -> None:
    async with client_of(served) as client:
        stream = await client.chat.completions.create(
            model="stub",
            messages=[{"role": "user", "content": "a b c"}],
            stream=True,
            stream_options={"include_usage": True},
            logprobs=True,
        )
        chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert texts == ["", "a", " b", " c", None]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 3
    assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None, None, None, None, "stop"]
    logprobs = chunks[1].choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and logprobs.content[0].token == "a"


async def test_openai_client_reads_the_errors(served: Served) -> None:
    async with client_of(served) as client:
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.chat.completions.create(model="stub", messages=[{"role": "user", "content": "a"}], n=300)
        assert (wrong.value.param, wrong.value.type) == ("n", "invalid_request_error")
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "a"}])
        assert unknown.value.code == "model_not_found"


async def test_defaults_are_openai_s(served: Served) -> None:
    async with served.chat() as response:
        assert response.status == 200
    sampling = served.engine.submissions[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.logprobs) == (1.0, 1.0, None, None)


async def test_image_url_may_be_a_bare_string(served: Served) -> None:
    body = chat_body()
    body["messages"][0]["content"] = [{"type": "image_url", "image_url": "https://example.com/a.png"}]
    async with served.post("/v1/chat/completions", body) as response:
        assert response.status == 200
    picture = ImagePart("https://example.com/a.png", "messages[0].content[0].image_url", "auto")
    assert served.engine.submissions[0].messages[0].content == (picture,)


async def test_the_model_may_be_left_out(served: Served) -> None:
    body = chat_body()
    del body["model"]
    async with served.post("/v1/chat/completions", body) as response:
        assert (await response.json())["model"] == "stub"
