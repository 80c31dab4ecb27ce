"""huggingface_hub's InferenceClient with a URL of its own."""

from __future__ import annotations

from typing import Any

from tests.campaigns.clients.checks import (
    PICTURE_QUESTION,
    QUESTION,
    WEATHER,
    WEATHER_SCHEMA,
    Check,
    Target,
    is_weather,
)

PACKAGES = ("huggingface_hub",)


def checks(target: Target) -> dict[str, Check]:
    from huggingface_hub import AsyncInferenceClient, InferenceClient

    client = InferenceClient(base_url=target.v1, api_key=target.api_key, timeout=60)
    question: list[Any] = [{"role": "user", "content": QUESTION}]
    parts = [
        {"type": "image_url", "image_url": {"url": target.picture_url}},
        {"type": "text", "text": PICTURE_QUESTION},
    ]
    asked: dict[str, Any] = {"model": target.model, "temperature": 0}

    def chat() -> str:
        return target.is_answer(client.chat.completions.create(messages=question, **asked).choices[0].message.content)

    def stream() -> str:
        chunks = client.chat_completion(messages=question, stream=True, **asked)
        return target.is_answer("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))

    def picture() -> str:
        answer = client.chat_completion(messages=[{"role": "user", "content": parts}], **asked)
        return target.is_picture_answer(answer.choices[0].message.content)

    async def asynchronous() -> str:
        other = AsyncInferenceClient(base_url=target.v1, api_key=target.api_key)
        return target.is_answer((await other.chat_completion(messages=question, **asked)).choices[0].message.content)

    def json_schema() -> str:
        form: Any = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER_SCHEMA, "strict": True}}
        answer = client.chat_completion(messages=question, response_format=form, **asked)
        return is_weather(answer.choices[0].message.content or "")

    def tools() -> str:
        answer = client.chat_completion(messages=question, tools=[WEATHER], tool_choice="required", **asked)
        return is_weather(answer.choices[0].message.tool_calls[0].function.arguments)

    return {check.__name__: check for check in [chat, stream, picture, asynchronous, json_schema, tools]}
