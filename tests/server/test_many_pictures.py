"""An agent's conversation with the demo model over HTTP: a picture for each turn, and all of them again in the next."""

from __future__ import annotations

import io
from typing import Any

import openai
import pytest
from PIL import Image

from hydra_engine import Engine
from hydra_engine.config import ServerConfig
from hydra_engine.server.app import build_app
from hydra_engine.server.http.listening import listen
from tests.server.test_families import data_url

TOKENS = 9  # of a picture


def screenshot(number: int) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), (number % 256, number // 256, 7)).save(buffer, "PNG")
    return {"type": "image_url", "image_url": {"url": data_url("image/png", buffer)}}


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["EPD", "E+P+D"])
async def test_a_picture_for_each_turn_and_a_hundred_at_once(topology: str) -> None:
    """Has an image cache of two pictures."""
    with Engine("demo", topology=topology, threads=1, num_image_blocks=2) as engine:
        listening = await listen(build_app(engine, ServerConfig()), "127.0.0.1", 0)
        async with openai.AsyncOpenAI(base_url=f"{listening.url}/v1", api_key="any", max_retries=0) as client:
            ask: Any = client.chat.completions.create
            given: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 4}
            messages: list[dict[str, Any]] = []
            for turn in range(1, 11):
                messages.append({"role": "user", "content": [screenshot(2 * turn), screenshot(2 * turn + 1)]})
                answer = await ask(messages=messages, **given)
                assert answer.usage.prompt_tokens_details.to_dict()["image_tokens"] == 2 * turn * TOKENS
                assert answer.usage.prompt_tokens_details.cached_tokens > (turn - 2) * 2 * TOKENS
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            content = [screenshot(number) for number in range(100)]
            answer = await ask(messages=[{"role": "user", "content": content}], **given)
            assert answer.usage.prompt_tokens_details.to_dict()["image_tokens"] == 100 * TOKENS
            with pytest.raises(openai.BadRequestError, match=r"501 images; at most 500 are allowed \(--max-images\)"):
                await ask(messages=[{"role": "user", "content": content[:1] * 501}], **given)
        await listening.close()
