"""The openai package, any major version: chat, streams, tools, `parse`, completions, responses, pictures, errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from tests.campaigns.clients.checks import (
    PICTURE_QUESTION,
    QUESTION,
    WEATHER,
    WEATHER_SCHEMA,
    Check,
    Skip,
    Target,
    is_weather,
    raises,
)

PACKAGES = ("openai",)


def checks(target: Target) -> dict[str, Check]:
    import openai
    from pydantic import BaseModel

    client = openai.OpenAI(base_url=target.v1, api_key=target.api_key, max_retries=0, timeout=60)
    question: list[Any] = [{"role": "user", "content": QUESTION}]
    parts = [
        {"type": "image_url", "image_url": {"url": target.picture_url}},
        {"type": "text", "text": PICTURE_QUESTION},
    ]
    shown: list[Any] = [{"role": "user", "content": parts}]
    asked: dict[str, Any] = {"model": target.model, "temperature": 0}

    class Weather(BaseModel):
        city: Literal["Rome", "Oslo"]
        days: Literal[1, 2, 3]

    def models() -> str:
        [first, *_] = client.models.list().data
        assert client.models.retrieve(first.id).id == first.id
        return first.id

    def chat() -> str:
        answer = client.chat.completions.create(messages=question, **asked)
        assert answer.usage and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        return target.is_answer(answer.choices[0].message.content)

    def stream() -> str:
        options: Any = {"include_usage": True}
        chunks = list(client.chat.completions.create(messages=question, stream=True, stream_options=options, **asked))
        assert chunks[-1].usage and not chunks[-1].choices
        return target.is_answer("".join(c.choices[0].delta.content or "" for c in chunks[:-1]))

    def stream_helper() -> str:
        if not hasattr(client.chat.completions, "stream"):
            raise Skip("this version has no chat.completions.stream")
        with client.chat.completions.stream(messages=question, **asked) as events:
            return target.is_answer(events.get_final_completion().choices[0].message.content)

    def picture() -> str:
        answer = client.chat.completions.create(messages=shown, **asked)
        return target.is_picture_answer(answer.choices[0].message.content)

    async def asynchronous() -> str:
        async with openai.AsyncOpenAI(base_url=target.v1, api_key=target.api_key, max_retries=0) as other:
            chunks = await other.chat.completions.create(messages=shown, stream=True, **asked)
            return target.is_picture_answer("".join([c.choices[0].delta.content or "" async for c in chunks]))

    def choices() -> str:
        answer = client.chat.completions.create(messages=question, n=2, logprobs=True, top_logprobs=2, **asked)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert all(len(one.top_logprobs) >= 2 for one in answer.choices[1].logprobs.content)
        return f"{len(answer.choices)} choices"

    def parse() -> str:
        completions = (
            client.chat.completions if hasattr(client.chat.completions, "parse") else client.beta.chat.completions
        )
        answer = completions.parse(messages=question, response_format=Weather, **asked)
        return repr(answer.choices[0].message.parsed)

    def tools() -> str:
        options: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
        answer = client.chat.completions.create(messages=question, tools=[WEATHER], **options, **asked)
        [call] = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls" and call.function.name == "weather"
        return is_weather(call.function.arguments)

    def tools_history() -> str:
        options: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
        message = client.chat.completions.create(messages=question, tools=[WEATHER], **options, **asked)
        call = message.choices[0].message
        result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "sunny"}
        follow: list[Any] = [*question, call.model_dump(exclude_none=True), result]
        with knows_tools():
            last = client.chat.completions.create(messages=follow, tools=[WEATHER], max_tokens=20, **asked)
        return repr(last.choices[0].message.content)

    def tools_streamed() -> str:
        named: Any = {"type": "function", "function": {"name": "weather"}}
        chunks = client.chat.completions.create(
            messages=question, tools=[WEATHER], tool_choice=named, stream=True, **asked
        )
        calls = [call for c in chunks if c.choices for call in c.choices[0].delta.tool_calls or ()]
        assert calls[0].id and calls[0].function.name == "weather"
        return is_weather("".join(call.function.arguments or "" for call in calls))

    def tools_auto() -> str:
        with knows_tools():
            answer = client.chat.completions.create(messages=question, tools=[WEATHER], max_tokens=60, **asked)
        return f"finish_reason {answer.choices[0].finish_reason}"

    @contextmanager
    def knows_tools() -> Iterator[None]:
        try:
            yield
        except openai.BadRequestError as error:
            if error.code == "unsupported_parameter":
                raise Skip("the chat template of this model knows no tools") from error
            raise

    def completions() -> str:
        answer = client.completions.create(prompt=["One", "Two"], max_tokens=4, logprobs=1, echo=True, **asked)
        assert len(answer.choices) == 2 and answer.choices[0].logprobs.token_logprobs[0] is None
        chunks = client.completions.create(prompt="One", max_tokens=4, stream=True, **asked)
        return repr("".join(c.choices[0].text for c in chunks if c.choices))

    def responses() -> str:
        need_responses()
        answer = client.responses.create(input=QUESTION, **asked)
        with client.responses.stream(input=QUESTION, **asked) as events:
            assert events.get_final_response().output_text == answer.output_text
        return target.is_answer(answer.output_text)

    def responses_picture() -> str:
        need_responses()
        seen = [
            {"type": "input_image", "image_url": target.picture_url, "detail": "auto"},
            {"type": "input_text", "text": PICTURE_QUESTION},
        ]
        answer = client.responses.create(input=[{"role": "user", "content": seen}], **asked)
        return target.is_picture_answer(answer.output_text)

    def responses_parse() -> str:
        need_responses()
        return repr(client.responses.parse(input=QUESTION, text_format=Weather, **asked).output_parsed)

    def responses_tools() -> str:
        need_responses()
        tool: Any = {"type": "function", **WEATHER["function"]}
        for choice in ("required", {"type": "function", "name": "weather"}):
            options: Any = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False, **asked}
            [call] = client.responses.create(input=QUESTION, **options).output
            assert (call.type, call.name) == ("function_call", "weather")
            with client.responses.stream(input=QUESTION, **options) as events:
                [streamed] = events.get_final_response().output
            assert streamed.arguments == call.arguments
        return is_weather(call.arguments)

    def responses_tools_history() -> str:
        need_responses()
        tool: Any = {"type": "function", **WEATHER["function"]}
        call = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Rome"}'}
        result = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
        items: Any = [{"role": "user", "content": QUESTION}, call, result]
        with knows_tools():
            answer = client.responses.create(input=items, tools=[tool], max_output_tokens=60, **asked)
        return str(answer.status)

    def need_responses() -> None:
        if not hasattr(client, "responses"):
            raise Skip("this version has no responses")

    def json_schema_dict() -> str:
        form: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER_SCHEMA, "strict": True}}
        answer = client.chat.completions.create(messages=question, response_format=form, **asked)
        return is_weather(answer.choices[0].message.content or "")

    def raw_headers() -> str:
        raw = client.chat.completions.with_raw_response.create(messages=question, **asked)
        assert raw.headers["x-request-id"]
        return target.is_answer(raw.parse().choices[0].message.content)

    def errors() -> str:
        with raises(openai.NotFoundError):
            client.chat.completions.create(model="no-such-model", messages=question)
        with raises(openai.BadRequestError) as caught:
            client.chat.completions.create(messages=[{"role": "user", "content": "word " * 150_000}], **asked)
        assert caught[0].code == "context_length_exceeded"
        with raises(openai.BadRequestError) as caught:
            client.chat.completions.create(messages=question, model=target.model, temperature=9)
        assert caught[0].param == "temperature", caught[0].param
        return "404, context_length_exceeded, param"

    def wrong_key() -> str:
        target.need_keys()
        with raises(openai.AuthenticationError) as caught:
            client.with_options(api_key="wrong").models.list()
        return caught[0].code

    named = [models, chat, stream, stream_helper, picture, asynchronous, choices, parse, json_schema_dict, tools]
    named += [
        tools_history,
        tools_streamed,
        tools_auto,
        completions,
        responses,
        responses_picture,
        responses_parse,
        responses_tools,
        responses_tools_history,
        raw_headers,
    ]
    return {check.__name__: check for check in [*named, errors, wrong_key]}
