"""litellm: its `openai/` and `hosted_vllm/` providers and the classes that it gives our errors."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from tests.campaigns.clients.checks import (
    PICTURE_QUESTION,
    QUESTION,
    WEATHER,
    WEATHER_SCHEMA,
    Check,
    Target,
    is_weather,
    raises,
)

PACKAGES = ("litellm", "openai")


def checks(target: Target) -> dict[str, Check]:
    import litellm

    litellm.telemetry = False
    litellm.suppress_debug_info = True
    question = [{"role": "user", "content": QUESTION}]
    parts = [
        {"type": "image_url", "image_url": {"url": target.picture_url}},
        {"type": "text", "text": PICTURE_QUESTION},
    ]
    shown = [{"role": "user", "content": parts}]
    options: dict[str, Any] = {"api_base": target.v1, "api_key": target.api_key, "temperature": 0, "num_retries": 0}
    found: dict[str, Check] = {}
    for provider in ("openai", "hosted_vllm"):
        arguments = options | {"model": f"{provider}/{target.model}"}
        for check in _of_provider(target, litellm, arguments, question, shown):
            found[f"{provider} {check.__name__}"] = check

    def text_completion() -> str:
        answer = litellm.text_completion(
            prompt="One", max_tokens=4, **options, model=f"text-completion-openai/{target.model}"
        )
        return repr(answer.choices[0].text)

    def responses() -> str:
        answer = litellm.responses(input=QUESTION, **options, model=f"openai/{target.model}")
        return target.is_answer(answer.output[0].content[0].text)

    def anthropic_provider() -> str:
        arguments = options | {"api_base": target.base_url, "model": f"anthropic/{target.model}", "max_tokens": 50}
        return target.is_answer(litellm.completion(messages=question, **arguments).choices[0].message.content)

    return found | {check.__name__: check for check in [text_completion, responses, anthropic_provider]}


def _of_provider(target: Target, litellm: Any, asked: dict[str, Any], question: Any, shown: Any) -> list[Check]:
    def completion() -> str:
        answer = litellm.completion(messages=question, **asked)
        assert answer.usage.completion_tokens > 0 and answer.choices[0].finish_reason == "stop"
        return target.is_answer(answer.choices[0].message.content)

    def stream() -> str:
        chunks = list(
            litellm.completion(messages=question, stream=True, stream_options={"include_usage": True}, **asked)
        )
        assert any(getattr(chunk, "usage", None) for chunk in chunks)
        return target.is_answer("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))

    async def acompletion() -> str:
        chunks = await litellm.acompletion(messages=shown, stream=True, **asked)
        return target.is_picture_answer("".join([c.choices[0].delta.content or "" async for c in chunks if c.choices]))

    def picture() -> str:
        return target.is_picture_answer(litellm.completion(messages=shown, **asked).choices[0].message.content)

    def tools() -> str:
        tools = [deepcopy(WEATHER)]  # `hosted_vllm/` takes additionalProperties out of what it is given
        answer = litellm.completion(messages=question, tools=tools, tool_choice="required", **asked)
        return is_weather(answer.choices[0].message.tool_calls[0].function.arguments)

    def json_schema() -> str:
        form = {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER_SCHEMA}}
        return is_weather(
            litellm.completion(messages=question, response_format=form, **asked).choices[0].message.content
        )

    def context_window() -> str:
        with raises(litellm.ContextWindowExceededError):
            litellm.completion(messages=[{"role": "user", "content": "word " * 150_000}], **asked)
        return "ContextWindowExceededError"

    def unknown_model() -> str:
        provider = asked["model"].partition("/")[0]
        with raises(litellm.NotFoundError):
            litellm.completion(messages=question, **(asked | {"model": f"{provider}/no-such-model"}))
        return "NotFoundError"

    def wrong_key() -> str:
        target.need_keys()
        with raises(litellm.AuthenticationError):
            litellm.completion(messages=question, **(asked | {"api_key": "wrong"}))
        return "AuthenticationError"

    return [completion, stream, acompletion, picture, tools, json_schema, context_window, unknown_model, wrong_key]
