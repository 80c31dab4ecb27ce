"""langchain-openai: ChatOpenAI and OpenAI as chains and agents use them."""

from __future__ import annotations

from typing import Any, Literal

from tests.campaigns.clients.checks import PICTURE_QUESTION, QUESTION, Check, Skip, Target, is_weather, raises

PACKAGES = ("langchain-openai", "langchain-core", "openai")


def checks(target: Target) -> dict[str, Check]:
    import openai
    from langchain_core.exceptions import ContextOverflowError
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAI
    from pydantic import BaseModel

    options: dict[str, Any] = {"base_url": target.v1, "model": target.model, "max_retries": 0, "temperature": 0}
    chat = ChatOpenAI(api_key=target.api_key, **options)
    parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": target.picture_url}},
        {"type": "text", "text": PICTURE_QUESTION},
    ]

    class Weather(BaseModel):
        """Tells the weather."""

        city: Literal["Rome", "Oslo"]
        days: Literal[1, 2, 3]

    @tool
    def weather(city: Literal["Rome", "Oslo"], days: Literal[1, 2, 3]) -> str:
        """Tells the weather."""
        return f"sunny in {city} for {days} days"

    def invoke() -> str:
        answer = chat.invoke(QUESTION)
        assert answer.usage_metadata and answer.usage_metadata["output_tokens"] > 0
        assert answer.response_metadata["finish_reason"] == "stop"
        return target.is_answer(answer.content)

    def stream() -> str:
        chunks = list(chat.stream(QUESTION, stream_usage=True))  # not by default where base_url is given
        total = chunks[0]
        for chunk in chunks[1:]:
            total += chunk
        assert total.usage_metadata and total.usage_metadata["total_tokens"] > 0
        return target.is_answer(total.content)

    async def astream() -> str:
        return target.is_answer("".join([chunk.content async for chunk in chat.astream(QUESTION)]))

    def batch() -> str:
        return target.is_answer(chat.batch([QUESTION] * 3)[2].content)

    def picture() -> str:
        return target.is_picture_answer(chat.invoke([HumanMessage(parts)]).content)

    def picture_in_standard_block() -> str:
        block = {"type": "image", "base64": target.picture_base64, "mime_type": "image/png"}
        return target.is_picture_answer(chat.invoke([HumanMessage([block, parts[1]])]).content)

    def logprobs() -> str:
        answer = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
        return f"{len(answer.response_metadata['logprobs']['content'])} tokens"

    def structured_json_schema() -> str:
        return repr(chat.with_structured_output(Weather, method="json_schema").invoke(QUESTION))

    def structured_json_schema_streamed() -> str:
        return repr(list(chat.with_structured_output(Weather, method="json_schema").stream(QUESTION))[-1])

    def structured_function_calling() -> str:
        return repr(chat.with_structured_output(Weather, method="function_calling").invoke(QUESTION))

    def bind_tools() -> str:
        answer = chat.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).invoke(QUESTION)
        [call] = answer.tool_calls
        assert isinstance(weather.invoke(call), ToolMessage)
        return is_weather(call["args"])

    def bind_tools_auto_and_history() -> str:
        forced = chat.bind_tools([weather], tool_choice="any", parallel_tool_calls=False).invoke(QUESTION)
        history = [HumanMessage(QUESTION), forced, weather.invoke(forced.tool_calls[0])]
        try:
            return repr(chat.bind_tools([weather]).bind(max_tokens=20).invoke(history).content)
        except openai.BadRequestError as error:
            if error.code == "unsupported_parameter":
                raise Skip("the chat template of this model knows no tools") from error
            raise

    def bind_tools_streamed() -> str:
        chunks = list(chat.bind_tools([weather], tool_choice="weather").stream(QUESTION))
        total = chunks[0]
        for chunk in chunks[1:]:
            total += chunk
        return is_weather(total.tool_calls[0]["args"])

    def responses_api() -> str:
        other = ChatOpenAI(api_key=target.api_key, use_responses_api=True, **options)
        return target.is_answer(other.invoke(QUESTION).text)

    def responses_api_streamed() -> str:
        other = ChatOpenAI(api_key=target.api_key, use_responses_api=True, **options)
        return target.is_answer("".join(chunk.text for chunk in other.stream(QUESTION)))

    def responses_api_picture() -> str:
        other = ChatOpenAI(api_key=target.api_key, use_responses_api=True, **options)
        return target.is_picture_answer(other.invoke([HumanMessage(parts)]).text)

    def responses_api_structured() -> str:
        other = ChatOpenAI(api_key=target.api_key, use_responses_api=True, **options)
        return repr(other.with_structured_output(Weather, method="json_schema").invoke(QUESTION))

    def completions() -> str:
        text = OpenAI(api_key=target.api_key, max_tokens=8, **options).invoke("One")
        return repr(text)

    def errors() -> str:
        with raises(ContextOverflowError):
            chat.invoke("word " * 150_000)
        with raises(openai.NotFoundError):
            ChatOpenAI(api_key=target.api_key, **(options | {"model": "no-such-model"})).invoke(QUESTION)
        return "ContextOverflowError, NotFoundError"

    def wrong_key() -> str:
        target.need_keys()
        with raises(openai.AuthenticationError):
            ChatOpenAI(api_key="wrong", **options).invoke(QUESTION)
        return "AuthenticationError"

    named = [invoke, stream, astream, batch, picture, picture_in_standard_block, logprobs, structured_json_schema]
    named += [structured_json_schema_streamed, structured_function_calling, bind_tools]
    named += [
        bind_tools_streamed,
        bind_tools_auto_and_history,
        responses_api,
        responses_api_streamed,
        responses_api_picture,
    ]
    named += [responses_api_structured, completions, errors, wrong_key]
    return {check.__name__: check for check in named}
