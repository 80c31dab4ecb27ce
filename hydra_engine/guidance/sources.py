"""Translates a grammar to llguidance's format.

Refuses, with a sentence, what llguidance would understand differently. Compiles nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from hydra_engine.core.grammar import Calls, Grammar, Reasoning
from hydra_engine.core.schemas.subschemas import schemas_of, with_pointers
from hydra_engine.guidance import numbers

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# White space between two JSON tokens. If more were allowed, a model that was not trained on JSON could write nothing
# else; a schema may allow more ("x-guidance").
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": " ?"}
_OPTIONS = "x-guidance"  # the keyword of a schema with such options
_ANNOTATIONS = ("default", "examples")  # keywords without effect, whose numbers need no check


def source_of(grammar: Grammar, special_tokens: Mapping[str, int]) -> str:
    """The grammar in llguidance's format, with calls and reasoning. Raises ValueError."""
    form = _form(grammar)
    if grammar.calls is None and grammar.reasoning is None:
        return json.dumps({"grammars": [form]})
    calls = [] if grammar.calls is None else _calls(grammar, grammar.calls, special_tokens)
    rules = ["answer: @calls | @form" if calls else "answer: @form"]
    rules += ["start: answer"] if grammar.reasoning is None else _reasoning(grammar.reasoning, special_tokens)
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, form | {"name": "form"}, *calls]})


def _form(grammar: Grammar) -> dict[str, object]:
    """The grammar of the output alone, without calls or reasoning. Raises ValueError."""
    match grammar.kind:
        case "json_object":
            return _of_schema('{"type": "object"}')
        case "json_schema":
            return _of_schema(grammar.source)
        case "regex":
            _check_end(grammar.source)
            return _of_regex(grammar.source)
        case "choice":
            return _of_regex("(?:" + "|".join(map(_literal, json.loads(grammar.source))) + ")")
        case "ebnf":
            return {"lark_grammar": _from_ebnf(grammar.source)}
        case _:
            return {"lark_grammar": grammar.source}


def _of_schema(text: str, options: Mapping[str, object] = MappingProxyType({})) -> dict[str, object]:
    """Translates a schema whose references, numbers and expressions llguidance understands as JSON Schema does.

    options: "x-guidance" of another schema in the same grammar, whose white space this one must share. Raises
    ValueError.
    """
    from llguidance import LLMatcher

    schema = with_pointers(numbers.parse(text))
    if not isinstance(schema.get(_OPTIONS, {}), dict):
        raise ValueError(f"{_OPTIONS} must be an object")
    if options:
        schema[_OPTIONS] = {**options, **schema.get(_OPTIONS, {})}
    schemas = [found.schema for found in schemas_of(schema)]
    for one in schemas:
        if isinstance(pattern := one.get("pattern"), str):
            _check_end(pattern)
        if isinstance(by_pattern := one.get("patternProperties"), dict):
            for pattern in by_pattern:
                _check_end(pattern)
        for name in _ANNOTATIONS:
            one.pop(name, None)
    numbers.normalise_numbers(schemas)
    return _only_form(LLMatcher.grammar_from_json_schema(numbers.write_schema(schema), defaults=_JSON_OPTIONS))


def _of_regex(expression: str) -> dict[str, object]:
    from llguidance import LLMatcher

    return _only_form(LLMatcher.grammar_from_regex(expression))


def _only_form(grammar: str) -> dict[str, object]:
    form: dict[str, object]
    (form,) = json.loads(grammar)["grammars"]
    return form


def _calls(grammar: Grammar, calls: Calls, special_tokens: Mapping[str, int]) -> list[dict[str, object]]:
    """The grammars named `calls` and `call`. Raises ValueError."""
    marks = {"opening": calls.opening, "closing": calls.closing}
    rules = [f"{rule}: {_mark(mark, special_tokens)}" for rule, mark in marks.items() if mark]
    grammars: list[dict[str, object]] = [{"lark_grammar": "\n".join([calls.source, *rules]), "name": "calls"}]
    if calls.schema:
        options = json.loads(grammar.source).get(_OPTIONS) if grammar.kind == "json_schema" else None
        grammars.append(_of_schema(calls.schema, options or {}) | {"name": "call"})
    return grammars


def _reasoning(reasoning: Reasoning, special_tokens: Mapping[str, int]) -> list[str]:
    """Lark rules: reasoning, then `answer`."""
    end = _special_token(reasoning.end, special_tokens)
    if end is None:  # ends at the first occurrence of the text
        thought = ["thought: free", f"free[lazy]: /(?s:.)*{_literal(reasoning.end)}/"]
    else:  # ends at the token; text tokens that spell it would be read as the end, so they are forbidden
        thought = [f"thought: FREE {end}", f"FREE: /(?s:.)*/ & ~/(?s:.)*{_literal(reasoning.end)}(?s:.)*/"]
    before = "thought space" if reasoning.opened else f"({_mark(reasoning.start, special_tokens)} thought space)?"
    return [f"start: {before} answer", *thought, r"space: /[ \t\r\n]{0,16}/"]


def _mark(text: str, special_tokens: Mapping[str, int]) -> str:
    """A special token or a text in Lark's syntax."""
    return _special_token(text, special_tokens) or f"/{_literal(text)}/"


def _special_token(text: str, special_tokens: Mapping[str, int]) -> str | None:
    """The special token with this text in Lark's syntax; None if it is plain text."""
    return f"<[{special_tokens[text]}]>" if text in special_tokens else None


def _check_end(expression: str) -> None:
    """Raises ValueError for an unescaped backslash at the end: llguidance would let it escape what it appends."""
    if (len(expression) - len(expression.rstrip("\\"))) % 2:
        raise ValueError("the regular expression ends in a single backslash, which escapes nothing; write two of them")


def _literal(text: str) -> str:
    """A regular expression that matches this text only."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _from_ebnf(source: str) -> str:
    """Converts llama.cpp's and SGLang's GBNF to Lark's syntax. Raises ValueError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(source)
    except Exception as error:  # noqa: BLE001 - the converter raises Exception itself, and others if text ends early
        raise ValueError(str(error) or "it ends too early") from None
