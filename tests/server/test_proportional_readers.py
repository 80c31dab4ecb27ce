"""Readers of a growing text take time in proportion to it, whatever it contains."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from hydra_engine.preprocess.text.tokenizer import StopMatcher
from hydra_engine.server.tools.reasoning import ReasoningParser
from hydra_engine.server.tools.tool_parsers import THINKING, ForcedCall, HermesParser, JsonParser, PlainText

NAMES = frozenset({"f"})
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
BLOCK = "<tool_call>\n<function=f>"


def reasoning(*, opened: bool) -> ReasoningParser:
    return ReasoningParser(PlainText(), THINKING, opened=opened)


# What reads, what comes first, and what comes again and again.
CASES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "space": (lambda: HermesParser(NAMES), "", " "),
    "space behind a call": (lambda: HermesParser(NAMES), CALL, " "),
    "marks begun": (lambda: HermesParser(NAMES), "", "<"),
    "calls begun": (lambda: HermesParser(NAMES), "", '<tool_call>{"name'),
    "space in a call": (lambda: HermesParser(NAMES), "<tool_call>{", " "),
    "a string in a call": (lambda: HermesParser(NAMES), '<tool_call>{"name": "', "\\\\"),
    "space before parameters": (lambda: HermesParser(NAMES), BLOCK, " "),
    "space between parameters": (lambda: HermesParser(NAMES), BLOCK + "<parameter=p>1</parameter>", "\n"),
    "line breaks of a value": (lambda: HermesParser(NAMES), BLOCK + "<parameter=p>", "\r\n"),
    "marks of a value": (lambda: HermesParser(NAMES), BLOCK + "<parameter=p>", "</parameter>x<"),
    "bare blocks": (lambda: HermesParser(NAMES, bare=True), "", "<function=f> "),
    "space before objects": (lambda: JsonParser(NAMES), "", " "),
    "space between objects": (lambda: JsonParser(NAMES), '[{"name": "f"}', ",\n"),
    "a forced call": (lambda: ForcedCall("f"), "{", " "),
    "space before reasoning": (lambda: reasoning(opened=False), "", " "),
    "space where reasoning begins": (lambda: reasoning(opened=True), "", "<think> "),
    "space in reasoning": (lambda: reasoning(opened=True), "So", " "),
    "marks of reasoning": (lambda: reasoning(opened=True), "So", " </think"),
    "space behind reasoning": (lambda: reasoning(opened=True), "So</think>", " "),
    "stop strings": (lambda: StopMatcher(["a" * 255 + "b", "ab"]), "", "a"),
}
SIZES = 4_000, 32_000


def cpu_s(make: Callable[[], Any], before: str, again: str, size: int, *, whole: bool) -> float:
    reader = make()
    text = before + again * (size // len(again))
    read = reader.match if isinstance(reader, StopMatcher) else reader.parse
    begun_s = time.thread_time()
    for piece in [text] if whole else text:
        read(piece)
    return time.thread_time() - begun_s


@pytest.mark.quick("pieces-space]", "pieces-space before parameters", "pieces-space in reasoning")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("whole", [False, True], ids=["pieces", "whole"])
def test_eight_times_the_text_takes_less_than_24_times_as_long(case: str, *, whole: bool) -> None:
    few, many = SIZES
    min_s = min(cpu_s(*CASES[case], few, whole=whole) for _ in range(3))
    max_s = min(cpu_s(*CASES[case], many, whole=whole) for _ in range(2))
    assert max_s < 24 * min_s + 0.005
