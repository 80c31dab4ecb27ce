"""Prompts in child processes: the same ids as without, and what a template or a tokenizer does there ends there."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hydra_engine.core.call import ChatMessage, ImagePart, TextPart, ToolCall
from hydra_engine.core.prompting import TemplateOptions
from hydra_engine.errors import CheckpointError, InvalidRequest, RequestFailed
from hydra_engine.preprocess.sandbox.texts import SandboxedTexts
from hydra_engine.preprocess.text.tokenizer import LONG_TEXT_CHARS, load_tokenizer
from hydra_engine.preprocess.text.writer import Prompt, TextSpec, Writer
from tests.preprocess.conftest import CHAT_TEMPLATE, SPECIALS

SPEC = TextSpec(SPECIALS.index("<image>"), None, SPECIALS.index("<image>"), (1,), None, True, None)
WORDS = "open sesame"
# As the child, with less time, so that nobody waits for what is to be ended.
HASTY = """
from hydra_engine.preprocess.sandbox import text_child
text_child.CPU_SECONDS = text_child.PROBE_CPU_SECONDS = 0.5
text_child.main()
"""

Make = Callable[..., Any]


@pytest.fixture
async def start(model_dir: Path, tmp_path: Path) -> AsyncIterator[Make]:
    started: list[SandboxedTexts] = []

    async def make(template: str | None = None, change: Callable[[Path], object] | None = None, **options: Any) -> Any:
        folder = tmp_path / "model"
        shutil.copytree(model_dir, folder)
        if template is not None:
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        if change is not None:
            change(folder)
        started.append(SandboxedTexts(folder, SPEC, **options))
        await started[-1].start()
        return started[-1]

    yield make
    for texts in started:
        texts.close()


def user(text: str, **options: Any) -> Prompt:
    return Prompt([], (ChatMessage("user", text, "messages[0]"),), num_chars=len(text), **options)


def prompts() -> list[Prompt]:
    call = ToolCall("probe", {"x": 1}, "call00001", "messages[1].tool_calls[0]")
    picture = ChatMessage("user", (ImagePart(object(), "messages[0]"), TextPart("What is this?")), "messages[0]")
    turns = (picture, ChatMessage("assistant", "A cat.", "messages[1]"), ChatMessage("user", "Sure?", "messages[2]"))
    tool = {"type": "function", "function": {"name": "probe"}}
    called = (turns[2], ChatMessage("assistant", "x", "messages[1]", (call,)))
    return [
        user("hello"),
        user("the end </s> of <|user|> it"),
        Prompt([], turns),
        Prompt([], turns, template=TemplateOptions(tools=(tool,), add_generation_prompt=False)),
        Prompt([], called[:1], template=TemplateOptions(variables={"depth": [1, {"a": "b"}]})),
        user("the cat " * 1000),
        Prompt([], text="raw </s> text \U0001f389", add_special_tokens=True),
        Prompt([], text=""),
    ]


async def test_ids_are_those_of_this_process(start: Make, model_dir: Path) -> None:
    texts, writer = await start(), Writer(load_tokenizer(model_dir), SPEC)
    for given, expected in zip(prompts(), prompts(), strict=True):
        assert await texts.encode("a", given) == writer.encode(expected)
    assert await texts.parts("a", ["<1.5 seconds>", "\n"]) == writer.parts(["<1.5 seconds>", "\n"])
    options = TemplateOptions()
    assert await texts.generation_prompt("a", options, "user") == writer.generation_prompt(options, "user") != ""


@pytest.mark.slow
async def test_the_tokenizer_that_comes_back_is_the_same(model_dir: Path, tokenizers: dict[str, Any]) -> None:
    texts = SandboxedTexts(model_dir, SPEC)
    try:
        tokenizer = await texts.start()
    finally:
        texts.close()
    expected = load_tokenizer(model_dir)
    ids = expected.encode("na\u00efve caf\u00e9 </s> \U0001f389 12345")
    for name in ("special_ids", "special_tokens", "vocab_size", "eos_ids", "bos_token", "chat_template", "file"):
        assert getattr(tokenizer, name) == getattr(expected, name), name
    assert tokenizer.encode("na\u00efve caf\u00e9 </s> \U0001f389 12345") == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected.decode(ids, skip_special_tokens=False)
    for kind, one in tokenizers.items():
        other = type(one).from_parts(one.parts(), model_dir)
        for id in range(one.vocab_size + 1):
            assert other.token_bytes(id) == one.token_bytes(id), (kind, id)


async def test_what_a_template_says_reaches_the_client(start: Make) -> None:
    texts = await start(
        CHAT_TEMPLATE + "{% if messages | length > 1 %}{{ raise_exception('only one turn') }}{% endif %}"
    )
    with pytest.raises(InvalidRequest, match="refused the messages: only one turn"):
        await texts.encode("a", prompts()[2])
    assert await texts.encode("a", user("hello"))


LATER = CHAT_TEMPLATE + "{% if messages[-1].content == '" + WORDS + "' %}COSTLY{% endif %}"
LOOPS = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4


MEMORY = ["{{ 'a' * 10**10 }}", "{{ [[1]] | tojson(indent=10**9) }}"]


@pytest.mark.slow
@pytest.mark.parametrize("costly", [*MEMORY, LOOPS])
async def test_a_prompt_that_takes_too_much_fails_alone(start: Make, costly: str) -> None:
    options = {} if costly in MEMORY else {"command": (sys.executable, "-c", HASTY)}
    texts = await start(LATER.replace("COSTLY", costly), **options)
    good, bad = (texts.encode(client, user(text)) for client, text in (("a", "hello"), ("b", WORDS)))
    failed, ids = await asyncio.gather(bad, good, return_exceptions=True)
    assert isinstance(failed, RequestFailed) and "other prompts are served" in str(failed), failed
    assert ids == await texts.encode("a", user("hello"))


@pytest.mark.slow
@pytest.mark.parametrize("template", [CHAT_TEMPLATE + MEMORY[0], "{{ messages[0].content * 100000 }}"])
async def test_what_takes_too_much_at_once_is_not_served(start: Make, template: str) -> None:
    with pytest.raises(CheckpointError, match="short conversation"):
        await start(template)


@pytest.mark.slow
async def test_what_never_ends_is_not_served(start: Make) -> None:
    with pytest.raises(CheckpointError, match="more time or memory for a short conversation"):
        await start(CHAT_TEMPLATE + LOOPS, command=(sys.executable, "-c", HASTY))


@pytest.mark.slow
async def test_a_child_that_somebody_kills_costs_nothing(start: Make) -> None:
    texts = await start()
    expected = await texts.encode("a", user("hello"))
    for pid in texts._short.host.pids():
        os.kill(pid, signal.SIGKILL)
    assert await texts.encode("a", user("hello")) == expected


@pytest.mark.slow
async def test_long_prompts_have_a_child_of_their_own(start: Make) -> None:
    texts = await start()
    (short,) = texts._short.host.pids()
    os.kill(short, signal.SIGSTOP)
    waiting = asyncio.ensure_future(texts.encode("a", user("hello")))
    try:
        assert await texts.encode("b", user("x" * LONG_TEXT_CHARS))
        assert not waiting.done()
    finally:
        with suppress(ProcessLookupError):  # it was ended because it was stopped
            os.kill(short, signal.SIGCONT)
    assert await waiting
