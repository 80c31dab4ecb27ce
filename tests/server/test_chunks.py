"""Events from ready-made bytes are, byte for byte, what encoding the structs gives."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from hydra_engine.core import outputs
from hydra_engine.core.logprobs import TextLogprob
from hydra_engine.core.outputs import Piece
from hydra_engine.server.generate import Identity
from hydra_engine.server.http.answers import TextEvents, event
from hydra_engine.server.openai.chat import ChatAnswer
from hydra_engine.server.openai.completions import CompletionAnswer
from hydra_engine.server.protocol.chat import ChatChunk, ChatChunkChoice, ChatCompletionRequest, ChatDelta
from hydra_engine.server.protocol.common import Usage, usage_of
from hydra_engine.server.protocol.completions import CompletionRequest
from hydra_engine.server.tools.tool_calls import ToolUse
from tests.examples import examples

IDENTITY = Identity('chatcmpl-"1":1,\\', 1, 'a "model" of 1:2')
CHAT = {"messages": [{"role": "user", "content": "a"}], "stream": True}
USAGES = {
    "none": {},
    "last": {"stream_options": {"include_usage": True}},
    "running": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
}
texts = st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=6)


PROMPT = outputs.Usage(7, 0, 4, 0, 1)


def answers(kind: str, usage: str) -> tuple[Any, Any]:
    """Two of the same: one goes the short way, one the long one."""
    pair = []
    for _ in range(2):
        if kind == "chat":
            answer: Any = ChatAnswer(msgspec.convert(CHAT | USAGES[usage], ChatCompletionRequest), IDENTITY, ToolUse())
        else:
            body = {"prompt": "a", "stream": True, **USAGES[usage]}
            answer = CompletionAnswer(msgspec.convert(body, CompletionRequest), IDENTITY, [])
        answer.prompt = PROMPT
        answer.events(Piece("begun", (1,)))
        pair.append(answer)
    return pair[0], pair[1]


@pytest.mark.parametrize("usage", USAGES)
@pytest.mark.parametrize("kind", ["chat", "completions"])
@settings(max_examples=examples(60), deadline=None)
@given(texts=texts)
def test_the_short_way_writes_what_the_long_way_writes(kind: str, usage: str, texts: list[str]) -> None:
    short, long = answers(kind, usage)
    for text in texts:
        piece = Piece(text, (5, 6))
        assert short.text_event(piece) == long.events(piece)


@settings(max_examples=examples(60), deadline=None)
@given(texts=texts, counts=st.lists(st.integers(0, 2**40), min_size=6, max_size=6))
def test_each_choice_has_bytes_of_its_own(texts: list[str], counts: list[int]) -> None:
    def make(index: int, text: str, usage: Any) -> ChatChunk:
        choice = ChatChunkChoice(index, ChatDelta(content=text))
        return ChatChunk("1", "chunk", 2, "12", "1", [choice], usage)

    ready = TextEvents(make)
    for index, (text, count) in enumerate(zip(texts, counts, strict=False)):
        usages: list[Usage | Any] = [UNSET, None, usage_of(outputs.Usage(count, 0), index)]
        for usage in usages:
            assert ready.event(index, text, usage) == event(msgspec.json.encode(make(index, text, usage)))


def test_what_is_more_than_text_takes_the_long_way() -> None:
    logprob = TextLogprob(1, "a", -0.5, 1, raw=b"a")
    for kind in ("chat", "completions"):
        answer, _ = answers(kind, "running")
        assert answer.text_event(Piece("a", (1,), (logprob,))) is None
    fresh = ChatAnswer(msgspec.convert(CHAT, ChatCompletionRequest), IDENTITY, ToolUse())
    assert fresh.text_event(Piece("a", (1,))) is None, "the role comes first"
