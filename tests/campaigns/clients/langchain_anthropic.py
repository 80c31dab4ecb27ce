"""langchain-anthropic: ChatAnthropic against /v1/messages."""

from __future__ import annotations

from typing import Any

from tests.campaigns.clients.checks import PICTURE_QUESTION, QUESTION, Check, Target

PACKAGES = ("langchain-anthropic", "anthropic")


def checks(target: Target) -> dict[str, Check]:
    from langchain_anthropic import ChatAnthropic
    from langchain_core.messages import HumanMessage

    chat = ChatAnthropic(
        base_url=target.base_url, api_key=target.api_key, model=target.model, max_retries=0, max_tokens=100
    )
    # The package may leave temperature out for models that it does not know.
    greedy = chat.bind(extra_body={"temperature": 0})

    def invoke() -> str:
        answer = greedy.invoke(QUESTION)
        assert answer.usage_metadata and answer.usage_metadata["output_tokens"] > 0
        return target.is_answer(answer.text)

    def stream() -> str:
        return target.is_answer("".join(chunk.text for chunk in greedy.stream(QUESTION)))

    async def astream() -> str:
        return target.is_answer("".join([chunk.text async for chunk in greedy.astream(QUESTION)]))

    def picture() -> str:
        block: Any = {"type": "image", "base64": target.picture_base64, "mime_type": "image/png"}
        return target.is_picture_answer(greedy.invoke([HumanMessage([block, PICTURE_QUESTION])]).text)

    def count_tokens() -> str:
        return f"{chat.get_num_tokens_from_messages([HumanMessage(QUESTION)])} tokens"

    return {check.__name__: check for check in [invoke, stream, astream, picture, count_tokens]}
