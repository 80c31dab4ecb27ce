"""pydantic-ai: agents over chat, over responses and over Anthropic's messages."""

from __future__ import annotations

from typing import Any, Literal

from tests.campaigns.clients.checks import PICTURE, PICTURE_QUESTION, QUESTION, Check, Target

PACKAGES = ("pydantic-ai-slim", "openai")


def checks(target: Target) -> dict[str, Check]:
    from pydantic import BaseModel
    from pydantic_ai import Agent, BinaryContent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=target.v1, api_key=target.api_key)
    chat = OpenAIChatModel(target.model, provider=provider)
    settings: Any = {"temperature": 0}

    class Weather(BaseModel):
        city: Literal["Rome", "Oslo"]
        days: Literal[1, 2, 3]

    async def run() -> str:
        result = await Agent(chat, model_settings=settings).run(QUESTION)
        assert result.usage and result.response.finish_reason == "stop"
        return target.is_answer(result.output)

    async def run_stream() -> str:
        async with Agent(chat, model_settings=settings).run_stream(QUESTION) as result:
            return target.is_answer("".join([text async for text in result.stream_text(delta=True)]))

    async def picture() -> str:
        shown = BinaryContent(PICTURE.read_bytes(), media_type="image/png")
        return target.is_picture_answer(
            (await Agent(chat, model_settings=settings).run([shown, PICTURE_QUESTION])).output
        )

    async def native_output() -> str:
        agent = Agent(chat, output_type=NativeOutput(Weather), model_settings=settings)
        return repr((await agent.run(QUESTION)).output)

    async def tool_output() -> str:
        agent = Agent(chat, output_type=ToolOutput(Weather), model_settings=settings)
        return repr((await agent.run(QUESTION)).output)

    async def responses() -> str:
        agent = Agent(OpenAIResponsesModel(target.model, provider=provider), model_settings=settings)
        return target.is_answer((await agent.run(QUESTION)).output)

    async def responses_stream() -> str:
        agent = Agent(OpenAIResponsesModel(target.model, provider=provider), model_settings=settings)
        async with agent.run_stream(QUESTION) as result:
            return target.is_answer("".join([text async for text in result.stream_text(delta=True)]))

    async def anthropic() -> str:
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        of_anthropic = AnthropicProvider(base_url=target.base_url, api_key=target.api_key)
        agent = Agent(AnthropicModel(target.model, provider=of_anthropic), model_settings=settings)
        return target.is_answer((await agent.run(QUESTION)).output)

    named = [run, run_stream, picture, native_output, tool_output, responses, responses_stream, anthropic]
    return {check.__name__: check for check in named}
