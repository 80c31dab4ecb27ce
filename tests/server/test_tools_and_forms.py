"""Tools beside a form of the output: where the model may choose, it calls a tool or answers in the form; where a call
must come, the form has nothing to say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hydra_engine.core.grammar import Grammar
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.tools.tool_calls import ToolUse, collect
from tests.guidance.grammar_texts import Texts
from tests.guidance.test_guidance import FORMS, KINDS_OF_MARKS, guide_with
from tests.server.test_tool_parsers import TOOLS, tool

CALLS = {
    "hermes": [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        '<tool_call>{"arguments":{"city":"</tool_call>"},"name":"weather"}</tool_call>',
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=city>\n<b>\n{\n</parameter>\n</function>\n</tool_call>",
    ],
    "json": [
        '{"name": "weather", "parameters": {"city": "Paris"}}',
        '[{"name": "weather", "arguments": {"city": "x"}}]',
    ],
}
WRONG = {
    "hermes": [
        '<tool_call>{"name": "cook", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "clock"',
        "<tool_call>",
    ],
    "qwen3_coder": ["<tool_call>\n<function=cook>\n</function>\n</tool_call>", "<tool_call>\n</tool_call>"],
    "json": ['{"name": "cook", "parameters": {}}', '{"name": "clock", "parameters": []}', "[]"],
}


@pytest.fixture(scope="module", params=KINDS_OF_MARKS)
def texts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return guide_with(tmp_path_factory.mktemp("tokenizers"), special=request.param)


def chosen(form: Grammar, dialect: str, *, parallel: bool = True, mode: str = "auto", name: str = "") -> SamplingParams:
    use = ToolUse(tuple(TOOLS), mode, name, parallel=parallel, dialect=dialect)
    return use.sampling(SamplingParams(grammar=form))


@pytest.mark.quick("text-hermes", "text-json")
@pytest.mark.parametrize("dialect", CALLS)
def test_a_call_or_the_form(texts: Texts, dialect: str) -> None:
    use = ToolUse(tuple(TOOLS), "auto", dialect=dialect)
    for form, right, wrong in FORMS:
        sampling = chosen(form, dialect)
        assert sampling.grammar is not None and sampling.grammar.param == form.param
        for grammar, before in (
            (sampling.grammar, ""),
            (sampling.grammar.after_reasoning("<think>", "</think>", opened=True), "a <tool_call>?</think>\n\n"),
        ):
            assert texts.accepts(grammar, before + right) and not texts.accepts(grammar, before + wrong)
            for call in CALLS[dialect]:
                assert texts.accepts(grammar, before + call), (form.kind, call)
                assert not texts.accepts(grammar, before + call + "x")
            for call in WRONG[dialect]:
                if form.kind != "json_object" or dialect != "json":  # which are objects too
                    assert not texts.accepts(grammar, before + call), (form.kind, call)
    for call in CALLS[dialect]:  # the parser reads what the grammar lets through
        parser = use.parser()
        assert parser is not None
        answer = collect(parser.parse(call) + parser.finish())
        assert answer.text == "" and [one.name for one in answer.calls] == ["weather"]


@pytest.mark.parametrize("dialect", CALLS)
def test_several_calls(texts: Texts, dialect: str) -> None:
    first = second = CALLS[dialect][0]
    both = f"[{first}, {second}]" if dialect == "json" else f"{first}\n{second}"
    several, single = (chosen(FORMS[0][0], dialect, parallel=parallel).grammar for parallel in (True, False))
    assert several is not None and single is not None
    assert texts.accepts(several, both) and texts.accepts(several, first)
    assert not texts.accepts(single, both) and texts.accepts(single, first)


@pytest.mark.parametrize("dialect", ["hermes", "json"])
def test_arguments_fit_their_schema_as_far_as_it_can_be_enforced(texts: Texts, dialect: str) -> None:
    def accepts(arguments: str, parameters: dict[str, Any], more: int = 0) -> bool:
        tools = [tool("f", parameters=parameters), *(tool(f"f{n}" + "x" * 50, parameters={}) for n in range(more))]
        grammar = ToolUse(tuple(tools), "auto", dialect=dialect).sampling(SamplingParams(grammar=FORMS[2][0])).grammar
        assert grammar is not None
        call = f'{{"name": "f", "arguments": {arguments}}}'
        return texts.accepts(grammar, f"<tool_call>{call}</tool_call>" if dialect == "hermes" else call)

    known = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}}
    assert accepts('{"n":7}', known) and accepts("{}", known)
    assert not accepts('{"n":10}', known) and not accepts('{"m":1}', known)
    assert accepts('{"n":10}', known, more=127)  # too large together
    unknown = {
        "type": "object",
        "properties": {"n": {"type": "array", "uniqueItems": True, "description": "x" * 70_000}},
    }
    assert accepts('{"n":[1,1]}', unknown) and not accepts('{"n":1}', unknown)


def test_white_space_that_a_schema_asks_for(texts: Texts) -> None:
    """Calls that begin like the form are accepted too."""
    source = json.dumps({"type": "object", "properties": {"a": {}}, "x-guidance": {"whitespace_pattern": "[ \n]{0,9}"}})
    for dialect, calls in CALLS.items():
        grammar = chosen(Grammar("json_schema", source), dialect).grammar
        assert grammar is not None
        assert texts.accepts(grammar, '{\n  "a": 1\n}') and all(texts.accepts(grammar, call) for call in calls)


def test_a_form_that_has_calls_in_it_holds_alone() -> None:
    for dialect in ("hermes", "qwen3_coder"):
        for kind, source in (
            ("choice", json.dumps([CALLS[dialect][0], "no"])),
            ("regex", r"\<tool_call\>.*"),
            ("lark", 'start: "<tool_call>" /.*/'),
        ):
            form = Grammar(kind, source)
            assert chosen(form, dialect).grammar == form
    in_a_schema = Grammar("json_schema", {"const": "<tool_call>"})
    assert chosen(in_a_schema, "hermes").grammar != in_a_schema


def test_where_calls_are_not_read_the_model_cannot_choose() -> None:
    form = Grammar("regex", "a", "regex")
    with pytest.raises(InvalidRequest, match=r"does not read calls of this model.* start the server with") as caught:
        chosen(form, "none")
    assert (caught.value.param, caught.value.code) == ("regex", "unsupported_parameter")
    assert chosen(form, "none", mode="none").grammar == form
    assert ToolUse(dialect="none", mode="auto").sampling(SamplingParams(grammar=form)).grammar == form


@pytest.mark.parametrize(("mode", "name"), [("required", ""), ("named", "clock")])
def test_a_call_that_must_come_has_no_other_form(mode: str, name: str) -> None:
    use = ToolUse(tuple(TOOLS), mode, name, dialect="hermes")
    assert chosen(Grammar("json_object"), "hermes", mode=mode, name=name).grammar == use.grammar()
