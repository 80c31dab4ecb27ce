"""Calls as Qwen3-Coder and Qwen3.5 write them, read out of texts that are cut anywhere."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.server.tools.function_blocks import as_json, types_of
from hydra_engine.server.tools.tool_calls import ToolUse, dialect_of
from hydra_engine.server.tools.tool_objects import CallArguments, Content
from tests.server.test_tool_parsers import CLOCK, PARIS, read, shown, tool

WRITE = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "content": {"type": "string"},
        "lines": {"type": "integer"},
        "ratio": {"type": "number"},
        "force": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "more": {"$ref": "#/$defs/More"},
        "mode": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "size": {"type": ["integer", "string"]},
        "level": {"enum": [1, 2]},
    },
    "$defs": {"More": {"type": "object"}},
}
TOOLS = (
    tool("write", parameters=WRITE),
    tool("clock"),
    tool("weather", parameters={"type": "object", "properties": {"city": {"type": "string"}}}),
)
USE = ToolUse(TOOLS, "auto", dialect="qwen3_coder")


def call(name: str, /, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def read_with(use: ToolUse, pieces: list[str]) -> tuple[str, list[tuple[str, str]], bool]:
    parser = use.parser()
    assert parser is not None
    text, calls = shown(read(parser, pieces))
    return text, calls, parser.is_cut


EXAMPLE = call("write", path="a.py", content="1")
CASES: list[tuple[str, str, list[tuple[str, dict[str, Any]]]]] = [
    (call("clock"), "", [("clock", {})]),
    (f"Let me see.\n{call('clock')}\nDone.", "Let me see.\n\nDone.", [("clock", {})]),
    (
        call("write", path="a.py") + "\n" + call("clock"),
        "",
        [("write", {"path": "a.py"}), ("clock", {})],
    ),
    # Values by their types; strings stay strings, with their line breaks and quotes.
    (call("write", path="42"), "", [("write", {"path": "42"})]),
    (call("write", path="null"), "", [("write", {"path": "null"})]),
    (
        call("write", content='\nprint("a\\n")\n\n\ttab é\n'),
        "",
        [("write", {"content": '\nprint("a\\n")\n\n\ttab é\n'})],
    ),
    (call("write", content=""), "", [("write", {"content": ""})]),
    (
        call("write", lines="3", ratio="0.5", force="True", tags='["a", "b"]', more='{"k": [1, null]}', level="2"),
        "",
        [
            (
                "write",
                {"lines": 3, "ratio": 0.5, "force": True, "tags": ["a", "b"], "more": {"k": [1, None]}, "level": 2},
            )
        ],
    ),
    (call("write", tags="['a', 'b']", more="{'k': True}"), "", [("write", {"tags": ["a", "b"], "more": {"k": True}})]),
    (call("write", mode="null", size="3"), "", [("write", {"mode": None, "size": 3})]),
    (call("write", mode="fast", size="3 GB"), "", [("write", {"mode": "fast", "size": "3 GB"})]),
    (call("write", lines="many", ratio="NaN"), "", [("write", {"lines": "many", "ratio": "NaN"})]),
    (call("write", other="7"), "", [("write", {"other": "7"})]),
    # Marks inside values.
    (call("write", content=EXAMPLE), "", [("write", {"content": EXAMPLE})]),
    (call("write", content=PARIS), "", [("write", {"content": PARIS})]),
    (
        call("write", content="a </parameter> b </function> c <parameter=x> <function=clock> </tool_call>\n<"),
        "",
        [("write", {"content": "a </parameter> b </function> c <parameter=x> <function=clock> </tool_call>\n<"})],
    ),
    (call("write", content="</param"), "", [("write", {"content": "</param"})]),
    # Ends that are missing, and other ways to lay it out.
    (
        "<tool_call>\n<function=write>\n<parameter=path>\na\n<parameter=lines>\n3\n</function>\n</tool_call>",
        "",
        [("write", {"path": "a", "lines": 3})],
    ),
    (
        "<tool_call><function=write><parameter=path>a b</parameter></function></tool_call>",
        "",
        [("write", {"path": "a b"})],
    ),
    (call("write", path="a").replace("\n", "\r\n"), "", [("write", {"path": "a"})]),
    ("<function=write>\n<parameter=path>\na\n</parameter>\n</function>", "", [("write", {"path": "a"})]),
    ("<tool_call>\n<function=clock>\n</tool_call> So.", "", []),
    (
        "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n</tool_call>So.",
        "So.",
        [("write", {"path": "a"})],
    ),
    ("<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n</function>", "", [("write", {"path": "a"})]),
    ("<tool_call>\n<function=write>\n<parameter=path>\na\n</function>", "", [("write", {"path": "a"})]),
    (PARIS, "", [("weather", {"city": "Paris"})]),  # the other format between the same marks
    (f"<tool_call>\n{call('clock')}", "<tool_call>\n", [("clock", {})]),
]
NONE = [  # nothing is called, and all of it is content
    call("cook", a="1"),
    "The tag <function=clock> is how a call begins, <parameter=p> follows.",
    "<tool_call>\n<function=clo",
    "<tool_call>\n<function=clock>\n",
    "<tool_call>\n<function=\nclock>\n</function></tool_call>",
    f"<think>{call('clock')}</think> no <think> {call('clock')}",
    "<tool_call> and </tool_call>",
]


@pytest.mark.parametrize(("text", "content", "calls"), CASES)
def test_calls_do_not_depend_on_where_the_text_is_cut(
    text: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    whole = read_with(USE, [text])
    if calls:
        assert (whole[0], [(name, json.loads(arguments)) for name, arguments in whole[1]]) == (content, calls)
        assert not whole[2]
    else:
        assert whole == (text, [], False)
    assert read_with(USE, list(text)) == whole
    for cut in range(1, len(text)):
        assert read_with(USE, [text[:cut], text[cut:]]) == whole, cut


@pytest.mark.parametrize("text", NONE)
def test_what_is_no_call_is_content(text: str) -> None:
    for cut in range(len(text)):
        assert read_with(USE, [text[:cut], text[cut:]]) == (text, [], False)


def test_a_call_that_ends_anywhere_is_cut_or_content() -> None:
    """The beginning of an answer is content until a parameter shows that it is a call, and whole from the end of the
    function on."""
    text = call("write", path="a", lines="3")
    known, end = text.index("<parameter=") + len("<parameter="), text.index("</function>") + len("</function>")
    for size in range(1, len(text) + 1):
        content, calls, is_cut = read_with(USE, [text[:size]])
        if size < known:
            assert (content, calls, is_cut) == (text[:size], [], False)
            continue
        assert content == "" and is_cut == (size < end)
        [(name, arguments)] = calls
        assert name == "write" and '{"path": "a", "lines": 3}'.startswith(arguments)
        assert (arguments == '{"path": "a", "lines": 3}') == (size >= end)
    one = ToolUse(TOOLS, "auto", parallel=False, dialect="qwen3_coder")
    assert read_with(one, [call("clock") + text[:60]]) == ("", [("clock", "{}")], False)  # the cut one was not wanted


def test_strings_are_sent_as_they_grow() -> None:
    parser = USE.parser()
    assert parser is not None
    assert parser.parse("Sure. <tool_call>\n<function=write>\n") == [Content("Sure. ")]
    assert parser.parse("<parameter=content>\nfirst")[1:] == [CallArguments(0, '{"content": "first')]
    assert parser.parse(' "line"\n') == [CallArguments(0, ' \\"line\\"')]  # the break may belong to the mark
    assert parser.parse("sec") == [CallArguments(0, "\\nsec")]
    assert parser.parse("ond\n</parameter>\n<parameter=lines>\n1") == [CallArguments(0, 'ond", "lines": ')]
    assert parser.parse("2\n</parameter>\n</function>") == [CallArguments(0, "12}")]


def test_the_template_says_which_format_it_is() -> None:
    coder = "{{ '<tool_call>\\n<function=' + name + '>\\n' }}"
    assert dialect_of("auto", coder) == "qwen3_coder" and dialect_of("auto", "<tool_call>") == "hermes"
    assert dialect_of("qwen3_xml", None) == "qwen3_coder" and dialect_of("hermes", coder) == "hermes"
    # The marks are the same, so neither parser shows the other's calls as text.
    for dialect in ("hermes", "qwen3_coder"):
        use = ToolUse(TOOLS, "auto", dialect=dialect)
        assert [name for name, _ in read_with(use, [EXAMPLE + CLOCK])[1]] == ["write", "clock"]


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=write>", "<function=clock>", "</function>", "<function="),
    *("<parameter=path>", "<parameter=lines>", "<parameter=x>", "</parameter>", "<parameter="),
    *("<think>", "</think>", "\n", " ", "a", "3", '"', "<", "</", '{"name": "clock", "arguments": {"a": "b"}}'),
]


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=20), st.integers(0, 1 << 30))
def test_no_text_is_lost_and_no_cut_matters(parts: list[str], seed: int) -> None:
    text, rng = "".join(parts), random.Random(seed)
    whole = read_with(USE, [text])
    pieces, begin = [], 0
    while begin < len(text):
        end = begin + rng.randint(1, 9)
        pieces.append(text[begin:end])
        begin = end
    assert read_with(USE, pieces) == whole
    if not whole[1]:
        assert whole[0] == text
    for place, (_, arguments) in enumerate(whole[1]):
        if not whole[2] or place < len(whole[1]) - 1:
            assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "integer"}, " 7 ", "7"),
        ({"type": "integer"}, "9007199254740993", "9007199254740993"),
        ({"type": "boolean"}, "FALSE", "false"),
        ({"type": "null"}, "None", "null"),
        ({"type": ["string", "null"]}, "None", '"None"'),
        ({"const": 5}, "5", "5"),
        ({"enum": ["5", "6"]}, "5", '"5"'),
        ({"oneOf": [{"type": "object"}, {"type": "string"}]}, '{"a": 1}', '{"a": 1}'),
        ({"oneOf": [{"type": "object"}, {"type": "string"}]}, "5", '"5"'),
        ({"allOf": [{"$ref": "#/$defs/a~1b"}]}, "5", "5"),
        ({"$ref": "#/$defs/loop"}, "5", '"5"'),
        ({"type": "object"}, "{1: [" * 5000, json.dumps("{1: [" * 5000)),
        ({"type": "number"}, "Infinity", '"Infinity"'),
        ({}, "5", '"5"'),
        (True, "5", '"5"'),
    ],
)
def test_values_by_their_types(schema: Any, text: str, value: str) -> None:
    root = {"$defs": {"a/b": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert as_json(text, types_of(schema, root)) == value
