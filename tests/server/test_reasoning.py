"""Reasoning taken out of texts that are cut anywhere, with calls behind it in every format, and what is read in a chat
template.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.core.grammar import Grammar
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.server.tools.reasoning import (
    Thinking,
    Wish,
    always_thinks,
    apply_wish,
    marks_of,
    place_of,
    switch_of,
)
from hydra_engine.server.tools.tool_calls import ToolUse, collect
from hydra_engine.server.tools.tool_objects import Content, Reasoning
from tests.server.test_function_blocks import TOOLS, call
from tests.server.test_tool_parsers import CLOCK, PARIS, read

THINKS = Thinking(known=True, reads=True)
OPENED = replace(THINKS, place="opened")
CODER = call("weather", city="Rome")
BARE = '{"name": "clock", "parameters": {}}'


def read_as(use: ToolUse, thinking: Thinking, pieces: Sequence[str]) -> tuple[str, str, list[tuple[str, str]], bool]:
    parser = use.parser(thinking)
    assert parser is not None
    answer = collect(read(parser, pieces))
    return answer.reasoning, answer.text, [(one.name, one.arguments) for one in answer.calls], parser.is_cut


def auto(dialect: str) -> ToolUse:
    return ToolUse(TOOLS, "auto", dialect=dialect)


ROME = [("weather", '{"city": "Rome"}')]
CASES: list[tuple[ToolUse, Thinking, str, tuple[str, str, list[tuple[str, str]]]]] = [
    (ToolUse(), THINKS, "<think>\nBecause.\n</think>\n\nIt is noon. ", ("Because.", "It is noon. ", [])),
    (ToolUse(), THINKS, "\n <think>a <b> </thin </think>b", ("a <b> </thin", "b", [])),
    (ToolUse(), THINKS, "<think>\n\n</think>\n\nNoon.", ("", "Noon.", [])),
    (ToolUse(), THINKS, " plain <think>a</think>", ("", " plain <think>a</think>", [])),
    (ToolUse(), THINKS, "<thin", ("", "<thin", [])),
    (ToolUse(), THINKS, "  ", ("", "  ", [])),
    (ToolUse(), THINKS, "<think>never closed </thi", ("never closed </thi", "", [])),
    (ToolUse(), THINKS, "<think>a</think>b<think>c</think>d", ("a", "b<think>c</think>d", [])),
    (ToolUse(), OPENED, "Because.\n</think>\n\nNoon.", ("Because.", "Noon.", [])),
    (ToolUse(), OPENED, "\n<think>\nBecause.</think>Noon.", ("Because.", "Noon.", [])),  # the mark once more
    (ToolUse(), OPENED, "no mark at all \n", ("no mark at all", "", [])),
    (ToolUse(), OPENED, "</think>Noon.", ("", "Noon.", [])),
    (ToolUse(), replace(OPENED, shown=False), "Because.</think>Noon.", ("", "Noon.", [])),
    (ToolUse(), replace(OPENED, streamed=False), "Because. Yes.</think>Noon.", ("Because. Yes.", "Noon.", [])),
    (ToolUse(), replace(THINKS, marks=("◁think▷", "◁/think▷")), "◁think▷a <b◁/think▷c", ("a <b", "c", [])),
    # Calls that are only thought about, and those behind the reasoning.
    (auto("hermes"), THINKS, f"<think>maybe {PARIS}, no</think>It is noon.", (f"maybe {PARIS}, no", "It is noon.", [])),
    (auto("hermes"), OPENED, f"{CLOCK} no </think>\n{PARIS}", (f"{CLOCK} no", "", [("weather", '{"city": "Paris"}')])),
    (auto("qwen3_coder"), OPENED, f"or {CODER}?\n</think>\n\nSo.\n{CODER}", (f"or {CODER}?", "So.\n", ROME)),
    (auto("qwen3_coder"), OPENED, CODER, (CODER, "", [])),
    (auto("json"), THINKS, f"<think>{BARE}</think>\n{BARE}", (BARE, "", [("clock", "{}")])),
    (auto("none"), OPENED, f"a</think>{PARIS}", ("a", PARIS, [])),
    (ToolUse(TOOLS, "required"), OPENED, f"a</think>\n[{BARE}]", ("a", "", [("clock", "{}")])),
    (ToolUse(TOOLS, "named", "weather"), OPENED, 'a</think>\n{"city": "Rome"}', ("a", "", ROME)),
    (ToolUse(TOOLS, "named", "weather"), OPENED, "a", ("a", "", [])),  # it did not come to the call
    # Later reasoning stays where it is, and calls nothing either.
    (auto("hermes"), THINKS, f"<think>a</think>b<think>{CLOCK}</think>c", ("a", f"b<think>{CLOCK}</think>c", [])),
    (auto("qwen3_coder"), THINKS, f"b <think>{CODER}", ("", f"b <think>{CODER}", [])),
]


@pytest.mark.parametrize(("use", "thinking", "text", "expected"), CASES)
def test_reasoning_does_not_depend_on_where_the_text_is_cut(
    use: ToolUse, thinking: Thinking, text: str, expected: tuple[str, str, list[tuple[str, str]]]
) -> None:
    expected = (*expected, False)  # type: ignore[assignment]
    assert read_as(use, thinking, [text]) == expected
    assert read_as(use, thinking, list(text)) == expected
    for cut in range(1, len(text)):
        assert read_as(use, thinking, [text[:cut], text[cut:]]) == expected, cut


FRAGMENTS = [
    *("<think>", "</think>", "</thi", "<", "\n", " ", "a", PARIS, CODER, BARE, "<tool_call>", "</tool_call>"),
    *('{"name": "clock", "arguments": {"a"', "<function=weather>\n<parameter=city>\n", "[", "]"),
]
USES = [
    ToolUse(),
    *(auto(dialect) for dialect in ("hermes", "qwen3_coder", "json", "none")),
    *(ToolUse(TOOLS, "required"), ToolUse(TOOLS, "named", "weather")),
]


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=12), st.integers(0, 1 << 30))
def test_no_cut_matters_for_any_format(parts: list[str], seed: int) -> None:
    text, rng = "".join(parts), random.Random(seed)
    pieces, begin = [], 0
    while begin < len(text):
        end = begin + rng.randint(1, 12)
        pieces.append(text[begin:end])
        begin = end
    for use in USES:
        for thinking in (THINKS, OPENED, replace(OPENED, reads=False), Thinking()):
            if use.parser(thinking) is not None:
                assert read_as(use, thinking, pieces) == read_as(use, thinking, [text])


def test_reasoning_and_answers_are_not_held_back_longer_than_they_must() -> None:
    parser = ToolUse().parser(OPENED)
    assert parser is not None
    assert parser.parse("I see ") == [Reasoning("I see")]
    assert parser.parse("<") == [] and parser.parse("/b") == [Reasoning(" </b")]
    assert parser.parse("</think>\n\nNo") == [Content("No")]
    assert parser.parse(" <think>") == [Content(" <think>")]


# ---- what is not read, and what a constraint begins behind


@pytest.mark.parametrize("dialect", ["hermes", "qwen3_coder", "json"])
def test_calls_in_reasoning_that_stays_in_the_text_call_nothing(dialect: str) -> None:
    calls = {"hermes": PARIS, "qwen3_coder": CODER, "json": BARE}
    unread, text = Thinking(place="opened"), f"{calls[dialect]} no</think> Noon."
    assert read_as(auto(dialect), unread, list(text)) == ("", text, [], False)
    assert len(read_as(auto(dialect), replace(unread, place="closed"), [calls[dialect]])[2]) == 1


def test_constraints_begin_behind_the_reasoning() -> None:
    asked = SamplingParams(grammar=Grammar("json_schema", '{"type": "object"}', "response_format"))
    for place in ("opened", "free", "closed"):
        params = replace(THINKS, place=place).sampling(asked)
        assert params.grammar is not None
        behind = params.grammar.reasoning
        assert (behind is None) == (place == "closed") and (behind is None or behind.opened == (place == "opened"))
        assert params.skip_special_tokens is False
    assert Thinking(place="opened").sampling(asked) == asked  # nobody takes the reasoning out of the text
    for source, describes_all in (('["yes", "no"]', False), ('["a</think>yes"]', True), ('["<think>a"]', True)):
        grammar = OPENED.sampling(SamplingParams(grammar=Grammar("choice", source))).grammar
        assert grammar is not None and (grammar.reasoning is None) == describes_all
    regex = OPENED.sampling(SamplingParams(grammar=Grammar("regex", r"[a-z]+<\/think>[0-9]+"))).grammar
    assert regex is not None and regex.reasoning is None


# ---- templates


QWEN3 = "{%- if enable_thinking is defined and enable_thinking is false -%}<think>\n\n</think>{%- endif -%}"
R1 = "<|assistant|><think>\n"
V3 = "{%- if not thinking is defined -%}{%- set thinking = false -%}{%- endif -%}</think>"


def test_marks_and_switches_are_read_in_the_template() -> None:
    assert marks_of("auto", QWEN3) == marks_of("qwen3", "plain") == marks_of("none", R1) == ("<think>", "</think>")
    assert marks_of("auto", "plain") is None and marks_of("auto", None) is None and marks_of("none", "plain") is None
    assert marks_of("auto", "x [THINK] y [/THINK]") == ("[THINK]", "[/THINK]")
    assert (switch_of(QWEN3), switch_of(V3), switch_of(R1)) == ("enable_thinking", "thinking", None)
    for words in (
        "{# thinking #}{{ 'thinking' }} thinking",
        "{{ message.thinking }}",
        "{% set ns = namespace(thinking=true) %}",
    ):
        assert switch_of(words) is None


def test_where_a_prompt_ends() -> None:
    marks = ("<think>", "</think>")
    ends = {"<|assistant|>": "free", R1: "opened", "<think>\n\n</think>\n\n": "closed", "</think>": "closed"}
    assert {end: place_of(end, marks, "auto") for end in ends} == ends
    assert place_of("<|assistant|>", marks, "deepseek_r1") == "opened"
    assert place_of("</think>", marks, "deepseek_r1") == "closed"


@pytest.mark.parametrize(
    ("template", "wish", "variables", "ignored"),
    [
        (QWEN3, Wish(), {}, ()),
        (QWEN3, Wish(False), {"enable_thinking": False}, ()),
        (QWEN3, Wish(effort="none"), {"enable_thinking": False}, ()),
        (QWEN3, Wish(effort="low"), {"enable_thinking": True}, ("reasoning_effort",)),
        (V3, Wish(effort="high"), {"thinking": True}, ("reasoning_effort",)),
        (V3, Wish(True, "low", "thinking"), {"thinking": True}, ("thinking",)),
        ("{{ reasoning_effort }}", Wish(effort="none"), {"reasoning_effort": "none"}, ()),
        ("{{ reasoning_effort }}", Wish(effort="low"), {"reasoning_effort": "low"}, ()),
        ("plain", Wish(effort="minimal"), {}, ("reasoning_effort",)),
        ("plain", Wish(False, param="thinking"), {}, ("thinking",)),
    ],
)
def test_wishes_become_variables(
    template: str, wish: Wish, variables: dict[str, Any], ignored: tuple[str, ...]
) -> None:
    assert apply_wish({"a": 1}, wish, template) == ({"a": 1} | variables, ignored)
    own = dict.fromkeys(variables, "mine")
    assert apply_wish(own, wish, template)[0] == own  # chat_template_kwargs go first


def test_a_model_that_always_thinks_cannot_be_told_not_to() -> None:
    problem = always_thinks(Wish(effort="none", param="reasoning.effort"), "opened", R1)
    assert problem is not None and problem.param == "reasoning.effort"
    for wish, place, template in (
        (Wish(effort="none"), "free", R1),
        (Wish(effort="none"), "opened", QWEN3),
        (Wish(effort="low"), "opened", R1),
        (Wish(False, required=False), "opened", R1),
        (Wish(), "opened", R1),
    ):
        assert always_thinks(wish, place, template) is None
