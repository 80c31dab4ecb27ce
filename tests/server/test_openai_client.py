"""OpenAI's own client, synchronous and asynchronous, over what it can do with this server.

Here is what needs the real model to mean something, and what the client does by itself (parsing into classes, raw
answers, retries, timeouts, leaving). Elsewhere, with the client:

    chat: whole, streamed, log probabilities, errors       test_chat
    completions, models, token ids                         test_completions
    responses: whole, streamed, formats, log probabilities test_responses
    tools, streamed calls, several answers                 test_tools
    json_schema, regex, choice, biases                     test_structured
    limits and priorities in extra_body                    test_limits
    a client's share (429), overload (503)                 test_admission
    right answers to pictures, ending by id, SIGTERM       test_served
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from hydra_engine import errors
from hydra_engine.core.call import GenerationCall
from tests.server.conftest import Serve, until
from tests.server.conftest import Served as Stub
from tests.server.stub import StubEngine
from tests.server.test_chat import client_of
from tests.server.test_served import QUESTIONS, Served, at_rest, content_of

SUM: Any = [{"role": "user", "content": "What is two plus three?"}]
PICTURE: Any = [{"role": "user", "content": content_of(QUESTIONS[0])}]


class Shape(pydantic.BaseModel):
    colour: Literal["red", "green", "blue"]
    count: int = pydantic.Field(ge=0, le=9)


@pytest.fixture(scope="module")
def real() -> Iterator[Served]:
    server = Served()
    yield server
    server.end()


@pytest.fixture
def client(real: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def aclient(real: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


DRAWN: Any = {"temperature": 1, "seed": 4, "max_tokens": 300}


# ---- the real model, synchronously


def test_a_stream_with_usage(client: openai.OpenAI) -> None:
    options: Any = {"model": "demo", "messages": PICTURE, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content == QUESTIONS[0]["answer"]
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage is not None and whole.usage is not None and chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert whole.usage.prompt_tokens > 12  # the picture's tokens among them


def test_several_answers_and_seeds(client: openai.OpenAI) -> None:
    options: Any = {"model": "demo", "messages": SUM, "temperature": 1.5, "max_tokens": 8}
    several = client.chat.completions.create(**options, n=3, seed=5)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    for index, choice in enumerate(several.choices):
        alone = client.chat.completions.create(**options, seed=5 + index)
        assert alone.choices[0].message.content == choice.message.content


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=SUM, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content or []
    assert len(entries) == 4
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    for entry in entries:
        assert entry.top_logprobs[0].token == entry.token and entry.top_logprobs[0].logprob == entry.logprob <= 0
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )
    completion = client.completions.create(model="demo", prompt="What is", temperature=0, max_tokens=3, logprobs=2)
    told = completion.choices[0].logprobs
    assert told is not None and len(told.tokens or ()) == 3 and "".join(told.tokens or ()) == completion.choices[0].text


def test_biases_stops_and_limits(real: Served, client: openai.OpenAI) -> None:
    options: Any = {"model": "demo", "messages": SUM, "temperature": 0}
    answer = client.chat.completions.create(**options, logprobs=True)
    text = answer.choices[0].message.content or ""
    stopped = client.chat.completions.create(**options, stop=[" is"])
    assert stopped.choices[0].message.content == text.partition(" is")[0]
    assert stopped.choices[0].finish_reason == "stop"
    limited = client.chat.completions.create(**options, max_completion_tokens=2)
    assert (limited.choices[0].finish_reason, limited.usage and limited.usage.completion_tokens) == ("length", 2)
    assert answer.choices[0].logprobs is not None
    first = (answer.choices[0].logprobs.content or [])[0].token
    ids = client.post("../tokenize", body={"prompt": first, "add_special_tokens": False}, cast_to=dict[str, Any])
    [token] = ids["tokens"]
    biased = client.chat.completions.create(**options, logit_bias={str(token): -100}, max_tokens=1)
    assert biased.choices[0].message.content != first


def test_answers_as_classes(client: openai.OpenAI) -> None:
    """The answer is an instance, whatever the model would have said."""
    completion = client.chat.completions.parse(model="demo", messages=PICTURE, response_format=Shape, **DRAWN)
    assert isinstance(completion.choices[0].message.parsed, Shape)
    response = client.responses.parse(
        model="demo", input="Which shape?", text_format=Shape, temperature=1, extra_body={"seed": 4}
    )
    assert isinstance(response.output_parsed, Shape)
    with client.chat.completions.stream(model="demo", messages=SUM, response_format=Shape, **DRAWN) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Shape)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="demo", messages=SUM, response_format=Shape, max_tokens=3)


@pytest.mark.parametrize("detail", ["auto", "low", "high"])
def test_detail_of_a_picture(client: openai.OpenAI, detail: str) -> None:
    parts = content_of(QUESTIONS[0])
    parts[0]["image_url"]["detail"] = detail
    messages: Any = [{"role": "user", "content": parts}]
    answer = client.chat.completions.create(model="demo", messages=messages, temperature=0)
    assert answer.choices[0].message.content == QUESTIONS[0]["answer"]


def test_raw_answers_and_headers(client: openai.OpenAI) -> None:
    options: Any = {"model": "demo", "messages": SUM, "temperature": 0}
    raw = client.chat.completions.with_raw_response.create(**options, extra_headers={"X-Request-Id": "mine-1"})
    assert raw.headers["x-request-id"] == "mine-1" and raw.status_code == 200
    assert raw.parse().id == "chatcmpl-mine-1" and raw.parse()._request_id == "mine-1"
    with client.chat.completions.with_streaming_response.create(**options, stream=True) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream") and lines[-1] == "data: [DONE]"
    assert client.models.with_raw_response.retrieve("demo").parse().id == "demo"


# ---- the real model, asynchronously


async def test_many_at_once(aclient: openai.AsyncOpenAI) -> None:
    """Answers are their own: chat, a stream, a completion and a response."""

    async def streamed(question: dict[str, Any]) -> str:
        messages: Any = [{"role": "user", "content": content_of(question)}]
        stream = await aclient.chat.completions.create(model="demo", messages=messages, temperature=0, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def responded() -> str:
        async with aclient.responses.stream(model="demo", input=SUM[0]["content"], temperature=0) as stream:
            return (await stream.get_final_response()).output_text

    *texts, response = await asyncio.gather(*map(streamed, QUESTIONS), responded())
    models = await aclient.models.list()
    assert texts == [question["answer"] for question in QUESTIONS]
    assert response == "Two plus three is five." and [model.id for model in models.data] == ["demo"]


async def test_answers_as_classes_asynchronously(aclient: openai.AsyncOpenAI) -> None:
    completion = await aclient.chat.completions.parse(model="demo", messages=SUM, response_format=Shape, **DRAWN)
    assert isinstance(completion.choices[0].message.parsed, Shape)
    raw = await aclient.completions.with_raw_response.create(model="demo", prompt="What is", max_tokens=2, n=2)
    assert len(raw.parse().choices) == 2 and raw.headers["x-request-id"]


async def test_leaving_a_stream(real: Served, aclient: openai.AsyncOpenAI) -> None:
    """The client closes the stream, cancels its task, or has a timeout."""
    options: Any = {"model": "demo", "messages": SUM, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    stream = await aclient.chat.completions.create(**options, stream=True)
    async for _ in stream:
        break
    await stream.close()
    task = asyncio.create_task(aclient.chat.completions.create(**options))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(openai.APITimeoutError):
        await aclient.with_options(timeout=0.1).chat.completions.create(**options)
    await asyncio.to_thread(at_rest, real)
    assert (await asyncio.to_thread(real.get, "/load"))["server_load"] == 0


# ---- errors, and what the client does about them

ERRORS: list[tuple[Exception, type[openai.APIStatusError], int, str]] = [
    (errors.InvalidRequest("no"), openai.BadRequestError, 400, ""),
    (errors.InvalidImage("no"), openai.BadRequestError, 400, "image_decode_failed"),
    (errors.NotFound("no"), openai.NotFoundError, 404, "not_found"),
    (errors.Unavailable("no"), openai.InternalServerError, 503, "overloaded"),
    (errors.RateLimited("no"), openai.RateLimitError, 429, "rate_limit_exceeded"),
    (ValueError("no"), openai.InternalServerError, 500, "internal_error"),
]


async def in_both(stub: Stub, call: Callable[[Any], Any], **options: Any) -> list[Any]:
    """Results or errors of `call` with the asynchronous and the synchronous client."""

    settings: dict[str, Any] = {"api_key": "any", "max_retries": 0, **options}

    def synchronous() -> Any:
        with openai.OpenAI(base_url=stub.url + "/v1", **settings) as client:
            return call(client)

    async def asynchronous() -> Any:
        async with openai.AsyncOpenAI(base_url=stub.url + "/v1", **settings) as client:
            return await call(client)

    found = []
    for run in (asynchronous, lambda: asyncio.to_thread(synchronous)):
        waiting: Awaitable[Any] = run()
        try:
            found.append(await waiting)
        except openai.OpenAIError as error:
            found.append(error)
    return found


def ask(client: Any) -> Any:
    return client.chat.completions.create(model="stub", messages=[{"role": "user", "content": "one two"}])


@pytest.mark.parametrize(
    ("error", "kind", "status", "code"), ERRORS, ids=lambda value: getattr(value, "__name__", None)
)
async def test_errors_are_the_clients_own(
    serve: Serve, error: Exception, kind: type[openai.APIStatusError], status: int, code: str
) -> None:
    stub = await serve()
    stub.engine.refusal = error
    for found in await in_both(stub, ask):
        assert type(found) is kind and found.status_code == status and (found.code or "") == code
        assert found.request_id and isinstance(found.body, dict) and found.body["type"]


async def test_keys_and_sizes(serve: Serve) -> None:
    stub = await serve(api_key=("sesame",), max_body_bytes=2000)
    for found in await in_both(stub, ask):
        assert isinstance(found, openai.AuthenticationError) and found.code == "invalid_api_key"
    for found in await in_both(stub, ask, api_key="sesame"):
        assert found.choices[0].message.content == "one two"

    def long(client: Any) -> Any:
        return client.completions.create(model="stub", prompt="x" * 5000)

    for found in await in_both(stub, long, api_key="sesame"):
        assert isinstance(found, openai.APIStatusError)
        assert (found.status_code, found.code) == (413, "payload_too_large")


def refusing(stub: Stub, refusals: list[errors.HydraError]) -> list[float]:
    """The engine refuses so often, in this way. The times of all tries."""
    tries: list[float] = []
    submit = StubEngine.add_request

    async def add_request(call: GenerationCall) -> Any:
        tries.append(time.monotonic())
        if len(tries) <= len(refusals):
            raise refusals[len(tries) - 1]
        return await submit(stub.engine, call)

    stub.engine.add_request = add_request  # type: ignore[method-assign]
    return tries


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [errors.Unavailable("no", retry_after_s=1), errors.RateLimited("no", retry_after_s=1)]
)
async def test_retries_wait_as_long_as_they_are_told(serve: Serve, error: errors.HydraError) -> None:
    """The first try is refused; the second one comes after Retry-After and not before."""
    stub = await serve()
    tries = refusing(stub, [error])
    async with client_of(stub).with_options(max_retries=2) as client:
        answer = await ask(client)
    assert answer.choices[0].message.content == "one two"
    assert tries[-1] - tries[0] >= 0.9


@pytest.mark.slow
async def test_what_must_not_be_tried_again_is_not(serve: Serve) -> None:
    stub = await serve()
    for error, tries in ((errors.InvalidRequest("no"), 1), (errors.RequestFailed("no", code="numerical_error"), 3)):
        seen = refusing(stub, [error] * 5)
        async with client_of(stub).with_options(max_retries=2) as client:
            with pytest.raises(openai.APIStatusError):
                await ask(client)
        assert len(seen) == tries, error


async def test_timeouts_cancel(serve: Serve) -> None:
    stub = await serve()
    stub.engine.prefill_s = 600
    for found in await in_both(stub, ask, timeout=0.3):
        assert isinstance(found, openai.APITimeoutError)
    await until(lambda: len(stub.engine.cancelled) == 2 and stub.lifecycle.num_running == 0)


async def test_nobody_listens() -> None:
    async with openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="any", max_retries=0) as client:
        with pytest.raises(openai.APIConnectionError):
            await ask(client)
