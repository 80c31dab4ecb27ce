"""A miniature of Qwen3.5 with a template in its manner: pictures, reasoning and calls in one conversation over HTTP.
What it writes is prescribed by a choice of one text.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import openai
import pytest

from hydra_engine import Engine
from hydra_engine.config import ServerConfig
from hydra_engine.server.app import build_app
from hydra_engine.server.http.listening import listen
from tests.models.families.base import picture
from tests.preprocess.published import CHECKPOINTS
from tests.server.test_families import data_url
from tests.server.test_function_blocks import call
from tests.server.test_tools_elsewhere import FUNCTIONS
from tools.miniatures import make_tiny
from tools.miniatures.base import IMAGE_TOKEN

THOUGHT = "A bus, red."
TEXT = f"{THOUGHT}\n</think>\n\nI ask.\n{call('weather', city='Rome')}"


@pytest.mark.slow
async def test_pictures_reasoning_and_calls_in_one_conversation(tmp_path: Path) -> None:
    make_tiny("qwen3_5", tmp_path, seed=3, text={"max_position_embeddings": 4096})
    template = tmp_path / "template.jinja"
    template.write_text(CHECKPOINTS["Qwen3.5"].template_text.replace("<|image_pad|>", IMAGE_TOKEN))
    buffer = io.BytesIO()
    picture((70, 50)).save(buffer, "PNG")
    content = [
        {"type": "text", "text": "Where is it?"},
        {"type": "image_url", "image_url": {"url": data_url("image/png", buffer)}},
    ]
    tools = [{"type": "function", "function": {"name": f["name"], "parameters": f["parameters"]}} for f in FUNCTIONS]
    asked: Any = {"model": "qwen3.5", "messages": [{"role": "user", "content": content}], "tools": tools}
    with Engine(tmp_path, threads=1, chat_template=str(template)) as engine:
        listening = await listen(build_app(engine, ServerConfig(served_model_name="qwen3.5")), "127.0.0.1", 0)
        async with openai.AsyncOpenAI(base_url=f"{listening.url}/v1", api_key="any", max_retries=0) as client:
            ask: Any = client.chat.completions.create
            given = {**asked, "extra_body": {"structured_outputs": {"choice": [TEXT]}}}
            whole = await ask(**given)
            message, reason = whole.choices[0].message, whole.choices[0].finish_reason
            assert (message.reasoning, message.content, reason) == (THOUGHT, "I ask.\n", "tool_calls")
            (found,) = message.tool_calls
            assert (found.function.name, found.function.arguments) == ("weather", '{"city": "Rome"}')
            deltas = [chunk.choices[0].delta async for chunk in await ask(**given, stream=True)]
            assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == THOUGHT
            assert "".join(delta.content or "" for delta in deltas) == "I ask.\n"
            parts = [one for delta in deltas for one in delta.tool_calls or ()]
            assert parts[0].function.name == "weather"
            assert "".join(one.function.arguments or "" for one in parts) == '{"city": "Rome"}'
            # The result goes back, without reasoning this time; the picture is not encoded again.
            turns = [*asked["messages"], message.to_dict(), {"role": "tool", "tool_call_id": found.id, "content": "22"}]
            off = {"structured_outputs": {"choice": ["Warm."]}, "chat_template_kwargs": {"enable_thinking": False}}
            last = await ask(**{**asked, "messages": turns, "extra_body": off})
            assert (last.choices[0].message.content, last.choices[0].finish_reason) == ("Warm.", "stop")
            assert getattr(last.choices[0].message, "reasoning", None) is None
            assert last.usage.prompt_tokens > whole.usage.prompt_tokens
            clock: Any = {"type": "function", "function": {"name": "clock"}}
            off = {"chat_template_kwargs": {"enable_thinking": False}}
            forced = await ask(**asked, tool_choice=clock, max_tokens=200, extra_body=off)
            assert forced.choices[0].message.tool_calls[0].function.name == "clock"
            odd = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=x)y"}}}
            function = {"type": "function", "function": {"name": "clock", "parameters": odd}}
            with pytest.raises(openai.BadRequestError) as refused:
                await ask(**{**asked, "tools": [function]}, tool_choice=clock)
            assert "the grammar cannot be used: look-around" in refused.value.message
        await listening.close()
