"""Grammars of each dialect's calls, for models that may choose between a call and an answer of a constrained form.

JSON arguments follow the function's schema where that can be enforced: unsupported keywords are ignored, and so are
schemas that are too large together. Does not know how calls are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hydra_engine.core.grammar import MAX_GRAMMAR_CHARS, Calls, Grammar
from hydra_engine.core.schemas.numbers import schema_text
from hydra_engine.server.tools.function_blocks import FUNCTION, PARAMETER
from hydra_engine.server.tools.tool_parsers import CLOSING, OPENING
from hydra_engine.server.tools.tool_schemas import parameters_schema

_TEXTS = frozenset({"choice", "regex", "lark", "ebnf"})  # grammars that can describe calls too
_MAX_SCHEMA_CHARS = MAX_GRAMMAR_CHARS // 2  # for calls; the other half is for the answer's form
_SPACE = r"space: /[ \t\r\n]{0,16}/"


def calls_of(dialect: str, tools: Sequence[Mapping[str, Any]], parallel: bool) -> Calls | None:
    """The grammar of the dialect's calls; None if its calls are not read. Raises InvalidRequest."""
    if dialect == "json":
        many = r'start: @call | "[" space @call (space "," space @call)* space "]"'
        one = r'start: @call | "[" space @call space "]"'
        call = _one_call(tools, ("name", "parameters"), ("name", "arguments"))
        return Calls(f"{many if parallel else one}\n{_SPACE}", call)
    start = "start: marked (space marked)*" if parallel else "start: marked"
    if dialect == "hermes":
        rules = [start, "marked: opening space @call space closing", _SPACE]
        return Calls("\n".join(rules), _one_call(tools, ("name", "arguments"), ("arguments", "name")), OPENING, CLOSING)
    if dialect == "qwen3_coder":
        rules = [
            start,
            "marked: opening space function space closing",
            f'function: "{FUNCTION}" name ">" space (parameter space)* "</function>"',
            f"name: {' | '.join(json.dumps(tool['function']['name']) for tool in tools)}",
            f'parameter: "{PARAMETER}" /[^<>\\n]{{1,256}}/ ">" value',
            'value[suffix="</parameter>"]: /(?s:.)*/',
            _SPACE,
        ]
        return Calls("\n".join(rules), "", OPENING, CLOSING)
    return None


def describes_calls(form: Grammar, dialect: str) -> bool:
    """True if the grammar contains the marks of calls, so that it describes calls itself."""
    marks = {"hermes": (OPENING,), "qwen3_coder": (OPENING, FUNCTION)}.get(dialect, ())
    return form.kind in _TEXTS and any(mark in form.source.replace("\\", "") for mark in marks)


def _one_call(tools: Sequence[Mapping[str, Any]], *orders: tuple[str, str]) -> str:
    """The schema of a call, with `name` and the arguments' key in one of these orders."""
    names = [tool["function"]["name"] for tool in tools]
    of_any_arguments = _any_of([({"enum": names}, {"type": "object"})], orders, {})
    definitions, num_chars = {}, 0
    for index, tool in enumerate(tools):
        schema = definitions[f"tool{index}"] = parameters_schema(tool, f"/$defs/tool{index}")
        num_chars += len(schema_text(schema))
        if num_chars > _MAX_SCHEMA_CHARS:
            return of_any_arguments
    pairs: list[tuple[Any, Any]] = [({"const": name}, {"$ref": f"#/$defs/tool{i}"}) for i, name in enumerate(names)]
    text = _any_of(pairs, orders, definitions)
    return text if len(text) <= _MAX_SCHEMA_CHARS else of_any_arguments


def _any_of(pairs: list[tuple[Any, Any]], orders: tuple[tuple[str, str], ...], definitions: dict[str, Any]) -> str:
    calls = []
    for name, arguments in pairs:
        for order in orders:
            properties = {key: name if key == "name" else arguments for key in order}
            closed = {"required": [*order], "additionalProperties": False}
            calls.append({"type": "object", "properties": properties, **closed})
    return schema_text({"anyOf": calls, "$defs": definitions, "x-guidance": {"lenient": True}})
