"""Calls read out of texts that are cut anywhere, and grammars of calls that must come."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from hydra_engine.errors import InvalidRequest
from hydra_engine.server.tools.tool_calls import ParsedCall, ToolUse, collect, dialect_of
from hydra_engine.server.tools.tool_objects import CallArguments, CallStart, Content, Event
from hydra_engine.server.tools.tool_parsers import ForcedCall, HermesParser, JsonParser, PlainText
from tests.examples import examples

NAMES = frozenset({"weather", "clock"})
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


TOOLS = [tool("weather", description="Tells it.", parameters=PARAMETERS), tool("clock")]


def read(parser: Any, pieces: Sequence[str]) -> list[Event]:
    return [event for piece in pieces for event in parser.parse(piece)] + parser.finish()


def shown(events: Sequence[Event]) -> tuple[str, list[tuple[str, str]]]:
    text, calls, _ = collect(events)
    return text, [(call.name, call.arguments) for call in calls]


PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
HERMES = [
    ("plain text, 1 < 2 <b>and <tool_ no call", None, []),
    ("  \n spaces stay ", None, []),
    ("   ", None, []),
    (PARIS, "", [("weather", '{"city": "Paris"}')]),
    (f"Let me see.\n{PARIS}\n{CLOCK}\n", "Let me see.\n", [("weather", '{"city": "Paris"}'), ("clock", "{}")]),
    (f"\n\n{PARIS}\n\nDone. ", "\n\nDone. ", [("weather", '{"city": "Paris"}')]),
    (PARIS + CLOCK, "", [("weather", '{"city": "Paris"}'), ("clock", "{}")]),
    (f"<{PARIS}", "<", [("weather", '{"city": "Paris"}')]),
    (f"<tool_call{CLOCK}", "<tool_call", [("clock", "{}")]),
    # The other order, arguments as text, no arguments, other fields, text that looks like the end.
    ('<tool_call>{"arguments": {"a": [1, {}]}, "name": "clock"}</tool_call>', "", [("clock", '{"a": [1, {}]}')]),
    ('<tool_call>{"name": "clock", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("clock", '{"a": 1}')]),
    ('<tool_call>{"name": "clock"}</tool_call>', "", [("clock", "{}")]),
    ('<tool_call>{"name": "clock", "parameters": {"a": 1}, "id": 5}</tool_call>', "", [("clock", '{"a": 1}')]),
    (
        '<tool_call>{"name": "clock", "arguments": {"a": "</tool_call> \\" {"}}</tool_call>.',
        ".",
        [("clock", '{"a": "</tool_call> \\" {"}')],
    ),
    ('<tool_call>{"name": "cl\\u006fck", "arguments": {}}</tool_call>', "", [("clock", "{}")]),
    # What is no call is content, all of it.
    ("<tool_call>\nI would call weather\n</tool_call>", None, []),
    ('<tool_call>{"name": "cook", "arguments": {"a": 1}}</tool_call>', None, []),
    ('<tool_call>{"arguments": {"a": 1}, "name": "cook"}</tool_call>', None, []),
    ('<tool_call>{"name": "clock", "arguments": 5}</tool_call>', None, []),
    ('<tool_call>{"name": "clock", "arguments": "no object"}</tool_call>', None, []),
    ('<tool_call>{"name": "clock", "note": 1, "arguments": {}}</tool_call>', None, []),
    ('<tool_call>{"name": clock, "arguments": {}}</tool_call>', None, []),
    ('<tool_call>{"arguments": {}}</tool_call>', None, []),
    ("<tool_call>{}</tool_call>", None, []),
    ("<tool_call>[]</tool_call>", None, []),
    ("<tool_call></tool_call>", None, []),
    ('<tool_call>{"name" "clock"}</tool_call>', None, []),
    ('<tool_call>{"name": "clock\n</tool_call> Sorry.', None, []),
    (f"<tool_call>oops {CLOCK}", "<tool_call>oops ", [("clock", "{}")]),
    # Cut off by the end of the text.
    ("text <tool_ca", None, []),
    ("<tool_call>", None, []),
    ('<tool_call>{"name": "clo', None, []),
    ('<tool_call>{"name": "clock", "argu', None, []),
    ('<tool_call>{"name": "clock", "arguments": {"a": "b', "", [("clock", '{"a": "b')]),
    ('<tool_call>{"name": "clock", "arguments": {"a": 1}', "", [("clock", '{"a": 1}')]),
    ('<tool_call>{"name": "clock", "arguments": {"a": 1}}\n</tool_', "", [("clock", '{"a": 1}')]),
    # Begun and then broken: arguments as they were written, and nothing else lost.
    ('<tool_call>{"name": "clock", "arguments": {"a": b}}</tool_call>!', "!", [("clock", '{"a": b}')]),
    ('<tool_call>{"name": "clock", "arguments": {"a": "x}}\n</tool_call>!', "!", [("clock", '{"a": "x}}\n')]),
    ('<tool_call>{"name": "clock", "arguments": {"a": "x\ny"}}</tool_call>!', "!", [("clock", '{"a": "x\ny"}')]),
    ('<tool_call>{"name": "clock", "arguments": {"a": [1}</tool_call>!', "!", [("clock", '{"a": [1}')]),
    ('<tool_call>{"name": "clock", "arguments": {}</tool_call>!', "!", [("clock", "{}")]),
    ('<tool_call>{"name": "clock", "arguments": {}} and so on', "and so on", [("clock", "{}")]),
    ('<tool_call>{"name": "clock", "arguments": {}} </tool_x', "</tool_x", [("clock", "{}")]),
    (
        f'<tool_call>{{"name": "clock", "arguments": {{}}}}\n{PARIS}',
        "",
        [("clock", "{}"), ("weather", '{"city": "Paris"}')],
    ),
]


@pytest.mark.parametrize(("text", "content", "calls"), HERMES)
def test_hermes_calls_do_not_depend_on_where_the_text_is_cut(
    text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    """`content` None: all of it."""
    expected = (text if content is None else content, calls)
    assert shown(read(HermesParser(NAMES), [text])) == expected
    assert shown(read(HermesParser(NAMES), list(text))) == expected
    for cut in range(1, len(text)):
        assert shown(read(HermesParser(NAMES), [text[:cut], text[cut:]])) == expected, cut


JSON = [
    ("hello", None, []),
    (" [1, 2]", None, []),
    ('{"temperature": 3}', None, []),
    ('{"name": "cook", "parameters": {}}', None, []),
    ('[{"name": "cook", "parameters": {}}]', None, []),
    ('{"name": "clock", "parameters": {"a": {"b": 1}}}', "", [("clock", '{"a": {"b": 1}}')]),
    ('\n{"type": "function", "name": "clock", "parameters": {}} ', "", [("clock", "{}")]),
    ('{"name": "clock", "parameters": {}}; {"name": "weather"}', "", [("clock", "{}"), ("weather", "{}")]),
    (
        '[ {"name": "clock", "parameters": {"a": 1}} ,\n{"name": "weather", "parameters": {}}]',
        "",
        [("clock", '{"a": 1}'), ("weather", "{}")],
    ),
    ('[{"name": "clock", "parameters": {"a": 1', "", [("clock", '{"a": 1')]),
    ('[{"name": "clo', None, []),
    ("[", None, []),
    ("", None, []),
    ('{"name": "clock", "parameters": {}} is what I call', "is what I call", [("clock", "{}")]),
    ('{"name": "clock", "parameters": {}} [', "[", [("clock", "{}")]),
]


@pytest.mark.parametrize(("text", "content", "calls"), JSON)
def test_bare_objects_do_not_depend_on_where_the_text_is_cut(
    text: str, content: str | None, calls: list[tuple[str, str]]
) -> None:
    expected = (text if content is None else content, calls)
    assert shown(read(JsonParser(NAMES), list(text))) == expected
    for cut in range(len(text) + 1):
        assert shown(read(JsonParser(NAMES), [text[:cut], text[cut:]])) == expected, cut


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<",
    "\n",
    " ",
    '{"name": "clock"',
    ', "arguments": ',
    '{"a": "b"}',
    "}",
    '"',
    "a",
]


@settings(max_examples=examples(150), deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14), st.integers(0, 1 << 30))
def test_no_text_is_lost_and_no_cut_matters(parts: list[str], seed: int) -> None:
    text, rng = "".join(parts), random.Random(seed)
    for kind in (HermesParser, JsonParser):
        whole = shown(read(kind(NAMES), [text]))
        pieces, begin = [], 0
        while begin < len(text):
            end = begin + rng.randint(1, 9)
            pieces.append(text[begin:end])
            begin = end
        events = read(kind(NAMES), pieces)
        assert shown(events) == whole
        if not whole[1]:
            assert whole[0] == text
        started = 0
        for event in events:  # a call's arguments come behind its start, in order
            started += isinstance(event, CallStart)
            assert not isinstance(event, CallArguments) or event.index == started - 1


def test_text_and_arguments_are_not_held_back_longer_than_they_must() -> None:
    parser = HermesParser(NAMES)
    assert parser.parse("Well, 2 ") == [Content("Well, 2 ")]
    assert parser.parse("<") == [] and parser.parse("tool") == []
    assert parser.parse("s") == [Content("<tools")]
    assert parser.parse('<tool_call>{"name": "clock", "argu') == []
    (start,) = parser.parse('ments": ')[:1] or parser.parse("{")[:1]
    assert isinstance(start, CallStart) and re.fullmatch(r"call_\w{24}", start.id)
    assert parser.parse('"a": "b') == [CallArguments(0, '"a": "b')]
    assert parser.parse(' c"}') == [CallArguments(0, ' c"}')]
    assert parser.parse("}</tool_call>") == [] and parser.finish() == []


@pytest.mark.slow
def test_a_long_text_takes_time_in_proportion() -> None:
    """Quadratic readers would take minutes for this."""
    text = '<tool_call>{"name": "clock", "arguments": {"a": "' + "x<" * 200_000 + '"}}</tool_call>' + "a <b " * 100_000
    content, calls = shown(read(HermesParser(NAMES), [text]))
    assert len(content) == 500_000 and len(calls[0][1]) == 400_000 + len('{"a": ""}')
    opened = "<tool_call>" * 30_000
    assert shown(read(HermesParser(NAMES), [opened])) == (opened, [])


def test_the_beginning_of_a_call_that_had_to_come_is_no_text() -> None:
    """Output was cut off before the name was complete, or after a whole call."""
    for text, calls in (('[{"name":"cl', []), ('[{"name": "clock", "parameters": {}}, {"name":"c', [("clock", "{}")])):
        assert shown(read(JsonParser(NAMES, required=True), list(text))) == ("", calls)
        assert shown(read(JsonParser(NAMES), list(text)))[0].endswith('{"name":"c' + ("l" if not calls else ""))


def test_at_most_one_call_where_several_are_not_wanted() -> None:
    for kind, text in (
        (HermesParser, f"{PARIS}\n{CLOCK} ok"),
        (JsonParser, '[{"name": "clock"}, {"name": "weather"}]'),
    ):
        assert len(shown(read(kind(NAMES), [text]))[1]) == 2
        assert len(shown(read(kind(NAMES, 1), list(text)))[1]) == 1
    assert shown(read(HermesParser(NAMES, 1), [f"{PARIS}\n{CLOCK} ok"]))[0] == " ok"


def test_other_parsers() -> None:
    assert shown(read(ForcedCall("f"), ['{"a"', ": 1}"])) == ("", [("f", '{"a": 1}')])
    assert shown(read(ForcedCall("f"), [])) == ("", [])
    assert shown(read(PlainText(), [PARIS])) == (PARIS, [])
    assert collect([CallStart(0, "call_1", "f")]) == ("", (ParsedCall("call_1", "f", ""),), "")


def test_the_dialect_is_the_template_s_unless_told() -> None:
    assert dialect_of("auto", "... <tool_call> ...") == "hermes"
    assert dialect_of("auto", "{{ tools }}") == dialect_of("auto", None) == "none"
    assert dialect_of("json", "<tool_call>") == "json"


# ---- calls that must come


def accepts(use: ToolUse, text: str) -> bool:
    grammar = use.grammar()
    assert grammar is not None and grammar.kind == "json_schema"
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(grammar.source))
    assert not matcher.get_error()
    return bool(matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting())


def test_required_calls_are_a_list_of_offered_ones() -> None:
    use = ToolUse(tuple(TOOLS), "required")
    paris = '{"name": "weather", "parameters": {"city": "Paris"}}'
    clock = '{"name": "clock", "parameters": {}}'
    assert accepts(use, f"[{paris}]") and accepts(use, f"[{clock}, {paris}]")
    for wrong in ("[]", clock, '[{"name": "weather", "parameters": {}}]', '[{"name": "cook", "parameters": {}}]'):
        assert not accepts(use, wrong)
    assert not accepts(use, '[{"name": "clock", "parameters": {"a": 1}}]')  # it takes none
    single = ToolUse(tuple(TOOLS), "required", parallel=False)
    assert accepts(single, f"[{clock}]") and not accepts(single, f"[{clock}, {paris}]")


def test_references_in_schemas_are_found() -> None:
    tree = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"left": {"$ref": "#"}, "value": {"$ref": "#/$defs/Value"}},
        "required": ["value"],
        "additionalProperties": False,
        "$defs": {"Value": {"type": "integer"}},
    }
    other = {
        "type": "object",
        "properties": {"value": {"$ref": "#/$defs/Value"}},
        "$defs": {"Value": {"type": "string"}},
    }
    use = ToolUse((tool("tree", parameters=tree), tool("other", parameters=other)), "required")
    assert accepts(use, '[{"name": "tree", "parameters": {"left": {"value": 1}, "value": 2}}]')
    assert accepts(use, '[{"name": "other", "parameters": {"value": "x"}}]')
    assert not accepts(use, '[{"name": "tree", "parameters": {"value": "x"}}]')
    named = ToolUse((tool("tree", parameters=tree),), "named", "tree")
    assert accepts(named, '{"left": {"value": 1}, "value": 2}') and not accepts(named, '{"value": "x"}')


def test_parameters_that_no_schema_names_are_none() -> None:
    """Clients that make schemas of functions do not close them, and a weak model would not find an end."""

    def named(**schema: Any) -> ToolUse:
        return ToolUse((tool("f", parameters=schema),), "named", "f")

    text = '{"city": "Paris", "other": 1}'
    assert not accepts(named(**PARAMETERS), text) and accepts(named(**PARAMETERS), '{"city": "Paris"}')
    assert not accepts(ToolUse(tuple(TOOLS), "required"), f'[{{"name": "weather", "parameters": {text}}}]')
    assert accepts(named(**PARAMETERS, additionalProperties=True), text)
    assert accepts(named(**PARAMETERS, allOf=[{"properties": {"other": {"type": "integer"}}}]), text)


def test_functions_take_objects() -> None:
    free = ToolUse((tool("f", parameters={}),), "named", "f")
    assert accepts(free, '{"any": ["thing"]}') and not accepts(free, '"text"')
    assert accepts(ToolUse((tool("f"),), "named", "f"), "{}")


def test_grammars_are_only_for_calls_that_must_come() -> None:
    assert ToolUse(tuple(TOOLS), "auto").grammar() is None and ToolUse(tuple(TOOLS)).grammar() is None
    with pytest.raises(InvalidRequest) as caught:
        large = tuple(tool(f"f{n}", parameters={"properties": {"x" * 1000: {}}}) for n in range(100))
        ToolUse(large, "required").grammar()
    assert caught.value.param == "tools"
