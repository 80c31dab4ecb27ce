"""Reasoning and calls of the demo model with a template in the manner of Qwen3.5, through the official clients. What it
writes is prescribed by a choice of one text.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from hydra_engine import Engine
from hydra_engine.config import ServerConfig
from hydra_engine.server.app import build_app
from hydra_engine.server.http.listening import Listening, listen
from tests.server.test_function_blocks import call
from tests.server.test_tools_elsewhere import FUNCTIONS, INPUT_TOOLS, QUESTION

TEMPLATE = Path(__file__).parents[1] / "templates" / "qwen35.jinja"
THOUGHT = f"Perhaps {call('clock')}, no."
TEXT = f"{THOUGHT}\n</think>\n\nSo.\n{call('weather', city='Rome')}"


def writes(text: str, **more: Any) -> dict[str, Any]:
    return {"extra_body": {"structured_outputs": {"choice": [text]}, **more}}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("demo", threads=1, chat_template=str(TEMPLATE)) as engine:
        yield engine


@pytest.fixture
async def server(engine: Engine) -> AsyncIterator[Listening]:
    listening = await listen(build_app(engine, ServerConfig()), "127.0.0.1", 0)
    yield listening
    await listening.close()


@pytest.fixture
async def client(server: Listening) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


async def test_chat(client: openai.AsyncOpenAI) -> None:
    tools = [
        {"type": "function", "function": {"name": tool["name"], "parameters": tool["parameters"]}} for tool in FUNCTIONS
    ]
    given: Any = {"model": "demo", "messages": QUESTION, "tools": tools, "logprobs": True, **writes(TEXT)}
    whole = (await client.chat.completions.create(**given)).choices[0]
    message: Any = whole.message
    assert (message.reasoning, message.content, whole.finish_reason) == (THOUGHT, "So.\n", "tool_calls")
    assert [(one.function.name, one.function.arguments) for one in message.tool_calls] == [
        ("weather", '{"city": "Rome"}')
    ]
    chunks: Any = [chunk.choices[0] async for chunk in await client.chat.completions.create(**given, stream=True)]
    deltas = [chunk.delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == THOUGHT
    assert "".join(delta.content or "" for delta in deltas) == "So.\n"
    arguments = [one.function.arguments for delta in deltas for one in delta.tool_calls or ()]
    assert "".join(arguments) == '{"city": "Rome"}'
    assert whole.logprobs is not None and whole.logprobs.content is not None
    streamed = [entry.token for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    assert streamed == [entry.token for entry in whole.logprobs.content] and "".join(streamed).startswith(TEXT)


@pytest.mark.slow
async def test_responses_and_messages(client: openai.AsyncOpenAI, server: Listening) -> None:
    async with client.responses.stream(model="demo", input="x", tools=FUNCTIONS, **writes(TEXT)) as stream:
        async for _ in stream:
            pass
        response: Any = await stream.get_final_response()
    reasoning, said, called = response.output
    assert (reasoning.content[0].text, said.content[0].text) == (THOUGHT, "So.\n")
    assert called.arguments == '{"city": "Rome"}'
    given: Any = {"model": "demo", "max_tokens": 500, "messages": QUESTION, "tools": INPUT_TOOLS}
    async with (
        anthropic.AsyncAnthropic(base_url=server.url, api_key="any", max_retries=0) as other,
        other.messages.stream(**given, **writes(TEXT)) as events,
    ):
        streamed: Any = await events.get_final_message()
        whole: Any = await other.messages.create(**given, **writes(TEXT))
    for answer in (streamed, whole):
        thinking, text, used = answer.content
        assert (thinking.thinking, text.text, used.input) == (THOUGHT, "So.\n", {"city": "Rome"})
        assert answer.stop_reason == "tool_use"


async def test_a_form_begins_behind_the_reasoning(client: openai.AsyncOpenAI) -> None:
    ask: Any = client.chat.completions.create
    given: Any = {"model": "demo", "messages": QUESTION, "max_tokens": 30, **writes("yes")}
    choice = (await ask(**given)).choices[0]  # it does not come to its answer
    assert (choice.message.content, choice.finish_reason) == (None, "length") and choice.message.reasoning
    choice = (await ask(**given, reasoning_effort="none")).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("yes", "stop")


async def test_a_stop_string_inside_a_call(client: openai.AsyncOpenAI) -> None:
    text = f"</think>{call('weather', city='Rome END')}"
    given: Any = {"model": "demo", "input": "x", "tools": FUNCTIONS, **writes(text, stop=["END"])}
    response: Any = await client.responses.create(**given)
    assert (response.status, response.output[-1].status, response.output[-1].arguments) == (
        *("incomplete", "incomplete"),
        '{"city": "Rome ',
    )
