"""Conversations and pictures of any legal shape, through the real preprocessor to the real demo model.

Each is answered, or refused with a code of the table; counts of tokens agree with /tokenize and with Anthropic's
count.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from hydra_engine.config import EngineConfig, MediaConfig, ServerConfig
from hydra_engine.engine import Engine
from hydra_engine.errors import CODES
from hydra_engine.server.app import build_app
from hydra_engine.server.http.listening import listen

FORMATS = {  # with the modes that can be written
    "PNG": ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"],
    "JPEG": ["L", "RGB", "CMYK"],
    "WEBP": ["RGB", "RGBA"],
    "GIF": ["L", "P", "RGB"],
    "BMP": ["1", "L", "P", "RGB"],
}


def fuzz(max_examples: int) -> Any:
    return settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


class Server:
    """The demo model on a socket, and a client for it, on one loop that the tests run by hand."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.runner = runner
        self.seen: Counter[str] = Counter()
        runner.run(self._start())

    async def _start(self) -> None:
        config = EngineConfig(model="demo", threads=1, media=MediaConfig(max_images=16))
        self.engine = Engine.create_unstarted(config)
        await self.engine.astart(progress=False)
        self.listening = await listen(build_app(self.engine, ServerConfig()), "127.0.0.1", 0)
        self.http = aiohttp.ClientSession(self.listening.url)

    async def close(self) -> None:
        await self.http.close()
        await self.listening.close()
        await self.engine.aclose()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        async def post() -> tuple[int, Any]:
            data = json.dumps(body).encode()
            async with self.http.post(path, data=data, headers={"Content-Type": "application/json"}) as response:
                return response.status, await response.json()

        return self.runner.run(post())

    def chat(self, messages: list[Any]) -> Any | None:
        """The usage; None when it is refused with a code."""
        status, answer = self.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, "temperature": 0})
        if status == 200:
            self.seen["200"] += 1
            return answer["usage"]
        assert status == 400 and answer["error"]["code"] in CODES | {None}, (status, answer)
        assert answer["error"]["param"], answer
        self.seen[str(answer["error"]["code"])] += 1
        return None


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with asyncio.Runner() as runner:
        server = Server(runner)
        yield server
        report = runner.run(server.engine.aledger())
        assert report.at_rest, report
        runner.run(server.close())


# ---- text

characters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
texts = st.text(characters, max_size=30) | st.sampled_from(
    ["", " ", "\n", "<image>", "<|im_end|>", "<s>", "\u200d", "é" * 40]
)
parts = st.lists(texts.map(lambda text: {"type": "text", "text": text}), min_size=1, max_size=4)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant"]), "content": texts | parts},
        optional={"name": st.just("somebody")},
    ),
    min_size=1,
    max_size=6,
)


def test_conversations_of_any_shape(server: Server) -> None:
    @fuzz(120)
    @given(messages)
    def check(asked: list[Any]) -> None:
        usage = server.chat(asked)
        status, told = server.post("/tokenize", {"messages": asked})
        if usage is None:
            return
        assert status == 200 and told["count"] == usage["prompt_tokens"] == len(told["tokens"])
        assert usage["prompt_tokens_details"]["image_tokens"] == 0

    before = server.seen["200"]
    check()
    assert server.seen["200"] - before > 40, server.seen


@pytest.mark.slow
@fuzz(60)
@given(text=st.text(characters, min_size=1, max_size=60))
def test_texts_come_back(server: Server, text: str) -> None:
    status, told = server.post("/tokenize", {"prompt": text, "add_special_tokens": False})
    if status == 400:  # it names the token of a picture, or is nothing after all
        assert told["error"]["param"] == "prompt"
        return
    status, back = server.post("/detokenize", {"tokens": told["tokens"]})
    assert status == 200 and told["count"] == len(told["tokens"])
    assume(not any(special in text for special in "<>"))
    assert back["prompt"] == text
    status, answer = server.post("/v1/completions", {"prompt": told["tokens"], "max_tokens": 1})
    assert status == (200 if told["tokens"] else 400)
    assert not told["tokens"] or answer["usage"]["prompt_tokens"] == told["count"]


# ---- pictures


@st.composite
def pictures(draw: st.DrawFn) -> str:
    """Pictures as data URLs, of any format, mode and odd size."""
    format = draw(st.sampled_from(sorted(FORMATS)))
    mode = draw(st.sampled_from(FORMATS[format]))
    side = st.integers(1, 70) | st.sampled_from([1, 1, 13, 14, 15, 27, 28, 29, 31, 199, 200, 201, 336, 639])
    size = (draw(side), draw(side))
    image = Image.effect_noise(size, 60) if mode != "1" else Image.new("1", size, draw(st.integers(0, 1)))
    image = image.convert("I").convert(mode) if mode == "I;16" else image.convert("RGB").convert(mode)
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = draw(st.integers(0, 9))  # orientations, and two that are none
    image.save(buffer, format, **({"exif": exif} if format in ("JPEG", "WEBP", "PNG") else {}))
    data = base64.b64encode(buffer.getvalue()).decode()
    return f"data:image/{format.lower()};base64,{data}"


@st.composite
def illustrated(draw: st.DrawFn) -> list[Any]:
    """Texts and up to 17 pictures in any order; one more than the server takes."""
    some = draw(st.lists(pictures(), min_size=1, max_size=3))
    urls = some * draw(st.sampled_from([1, 1, 1, 2, 5, 17]))
    detail: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
        [{}, {"detail": "low"}, {"detail": "high"}, {"detail": None}]
    )
    content: list[Any] = [{"type": "image_url", "image_url": {"url": url} | draw(detail)} for url in urls[:17]]
    for text in draw(st.lists(texts, max_size=3)):
        content.insert(draw(st.integers(0, len(content))), {"type": "text", "text": text})
    return content


@pytest.mark.slow
def test_pictures_of_any_shape(server: Server) -> None:
    @fuzz(60)
    @given(illustrated())
    def check(content: list[Any]) -> None:
        asked = [{"role": "user", "content": content}]
        usage = server.chat(asked)
        if usage is None:
            return
        num_pictures = sum(part["type"] == "image_url" for part in content)
        status, told = server.post("/tokenize", {"messages": asked})
        image_tokens = usage["prompt_tokens_details"]["image_tokens"]
        assert status == 200 and image_tokens >= num_pictures
        assert told["count"] == usage["prompt_tokens"] == len(told["tokens"])
        if not all("detail" not in part.get("image_url", {}) for part in content):
            return
        blocks = [part if part["type"] == "text" else block_of(part["image_url"]["url"]) for part in content]
        status, counted = server.post("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": blocks}]})
        if status == 200:  # it knows four types of pictures
            assert counted["input_tokens"] == usage["prompt_tokens"]

    before = server.seen.copy()
    check()
    found = server.seen - before
    assert found["200"] > 20 and found["too_many_images"], found


def block_of(url: str) -> dict[str, Any]:
    head, _, data = url.partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": head.removeprefix("data:"), "data": data}}
