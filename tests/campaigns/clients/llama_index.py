"""llama-index-llms-openai-like."""

from __future__ import annotations

from typing import Literal

from tests.campaigns.clients.checks import PICTURE, PICTURE_QUESTION, QUESTION, Check, Target

PACKAGES = ("llama-index-llms-openai-like", "llama-index-core", "openai")


def checks(target: Target) -> dict[str, Check]:
    from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
    from llama_index.llms.openai_like import OpenAILike
    from pydantic import BaseModel

    llm = OpenAILike(
        model=target.model,
        api_base=target.v1,
        api_key=target.api_key,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        temperature=0,
        context_window=target.get("/v1/models")["data"][0]["max_model_len"],
        max_retries=0,
    )

    class Weather(BaseModel):
        city: Literal["Rome", "Oslo"]
        days: Literal[1, 2, 3]

    def chat() -> str:
        return target.is_answer(llm.chat([ChatMessage(QUESTION)]).message.content)

    def complete() -> str:
        return target.is_answer(llm.complete(QUESTION).text)

    def stream_chat() -> str:
        return target.is_answer("".join(part.delta or "" for part in llm.stream_chat([ChatMessage(QUESTION)])))

    async def achat() -> str:
        return target.is_answer((await llm.achat([ChatMessage(QUESTION)])).message.content)

    def picture() -> str:
        blocks = [ImageBlock(path=PICTURE), TextBlock(text=PICTURE_QUESTION)]
        return target.is_picture_answer(llm.chat([ChatMessage(role="user", blocks=blocks)]).message.content)

    def structured() -> str:
        return repr(llm.as_structured_llm(Weather).complete(QUESTION).raw)

    return {check.__name__: check for check in [chat, complete, stream_chat, achat, picture, structured]}
