"""The anthropic package: messages, streams, pictures, tools, `count_tokens`, structured output, classes of errors."""

from __future__ import annotations

from typing import Any

from tests.campaigns.clients.checks import (
    PICTURE_QUESTION,
    QUESTION,
    WEATHER_SCHEMA,
    Check,
    Skip,
    Target,
    is_weather,
    raises,
)

PACKAGES = ("anthropic",)


def checks(target: Target) -> dict[str, Check]:
    import anthropic

    client = anthropic.Anthropic(base_url=target.base_url, api_key=target.api_key, max_retries=0, timeout=60)
    greedy: dict[str, Any] = {"max_tokens": 100, "extra_body": {"temperature": 0}}
    question: list[Any] = [{"role": "user", "content": QUESTION}]
    source = {"type": "base64", "media_type": "image/png", "data": target.picture_base64}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": PICTURE_QUESTION}]
    shown: list[Any] = [{"role": "user", "content": blocks}]

    def messages() -> str:
        answer = client.messages.create(model=target.model, messages=question, **greedy)
        assert answer.stop_reason == "end_turn" and answer.usage.output_tokens > 0
        return target.is_answer(answer.content[0].text)

    def stream() -> str:
        with client.messages.stream(model=target.model, messages=question, **greedy) as events:
            text = "".join(events.text_stream)
            assert events.get_final_message().content[0].text == text
        return target.is_answer(text)

    def raw_stream() -> str:
        kinds = [e.type for e in client.messages.create(model=target.model, messages=question, stream=True, **greedy)]
        assert kinds[0] == "message_start" and kinds[-1] == "message_stop", kinds
        return f"{len(kinds)} events"

    def picture() -> str:
        answer = client.messages.create(model=target.model, messages=shown, **greedy)
        return target.is_picture_answer(answer.content[0].text)

    async def asynchronous() -> str:
        other = anthropic.AsyncAnthropic(base_url=target.base_url, api_key=target.api_key, max_retries=0)
        async with other, other.messages.stream(model=target.model, messages=shown, **greedy) as events:
            return target.is_picture_answer(await events.get_final_text())

    def system_and_stops() -> str:
        answer = client.messages.create(
            model=target.model,
            messages=question,
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            stop_sequences=["."],
            metadata={"user_id": "u"},
            **greedy,
        )
        return str(answer.stop_reason)

    def count_tokens() -> str:
        counted = client.messages.count_tokens(model=target.model, messages=shown).input_tokens
        usage = client.messages.create(model=target.model, messages=shown, **greedy).usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
        return f"{counted} tokens"

    def structured() -> str:
        options: Any = {
            "temperature": 0,
            "output_config": {"format": {"type": "json_schema", "schema": WEATHER_SCHEMA}},
        }
        answer = client.messages.create(model=target.model, messages=question, max_tokens=500, extra_body=options)
        return is_weather(answer.content[0].text)

    tool = {"name": "weather", "description": "Tells the weather.", "input_schema": WEATHER_SCHEMA}
    use: Any = {"tools": [tool], "max_tokens": 800, "extra_body": {"temperature": 0}}

    def tools() -> str:
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}):
            answer = client.messages.create(model=target.model, messages=question, tool_choice=choice, **use)
            assert answer.stop_reason == "tool_use", answer
            assert answer.content[-1].name == "weather"
        return is_weather(answer.content[-1].input)

    def tools_streamed() -> str:
        choice: Any = {"type": "tool", "name": "weather"}
        with client.messages.stream(model=target.model, messages=question, tool_choice=choice, **use) as events:
            return is_weather(events.get_final_message().content[-1].input)

    def tools_history() -> str:
        called = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome", "days": 1}}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}
        turns: list[Any] = [
            *question,
            {"role": "assistant", "content": [called]},
            {"role": "user", "content": [result]},
        ]
        try:
            answer = client.messages.create(model=target.model, messages=[*question, *turns], **use)
        except anthropic.BadRequestError as error:
            if "chat template" in str(error):
                raise Skip("the chat template of this model knows no tools") from error
            raise
        return str(answer.stop_reason)

    def models() -> str:
        return client.models.retrieve(target.model).id

    def errors() -> str:
        with raises(anthropic.NotFoundError):
            client.messages.create(model="no-such-model", messages=question, max_tokens=5)
        with raises(anthropic.BadRequestError, match="maximum context length"):
            long: Any = [{"role": "user", "content": "word " * 150_000}]
            client.messages.create(model=target.model, messages=long, max_tokens=5)
        return "NotFoundError, BadRequestError"

    def wrong_key() -> str:
        target.need_keys()
        with raises(anthropic.AuthenticationError):
            client.with_options(api_key="wrong").messages.create(model=target.model, messages=question, max_tokens=5)
        return "AuthenticationError"

    named = [messages, stream, raw_stream, picture, asynchronous, system_and_stops, count_tokens, structured]
    named += [tools, tools_streamed, tools_history, models]
    return {check.__name__: check for check in [*named, errors, wrong_key]}
