"""Calls of each dialect as a grammar, for models that may choose between a call and an answer in a form of its own.

Arguments are free, as they are where nothing constrains the output. Does not know how calls are read.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from hydra_engine.core.grammar import Calls, Grammar
from hydra_engine.server.tools.function_blocks import FUNCTION, PARAMETER
from hydra_engine.server.tools.tool_parsers import CLOSING, OPENING

_TEXTS = frozenset({"choice", "regex", "lark", "ebnf"})  # grammars that can describe calls too
_SPACE = r"space: /[ \t\r\n]{0,16}/"


def calls_of(dialect: str, names: Collection[str], parallel: bool) -> Calls | None:
    """None where calls of the dialect are not read."""
    if dialect == "json":
        call = _json_call(names, "parameters", "arguments")
        many = {"type": "array", "items": call, "minItems": 1} | ({} if parallel else {"maxItems": 1})
        return Calls("start: @call", json.dumps({"anyOf": [call, many]}))
    start = "start: marked (space marked)*" if parallel else "start: marked"
    if dialect == "hermes":
        rules = [start, "marked: opening space @call space closing", _SPACE]
        return Calls("\n".join(rules), json.dumps(_json_call(names, "arguments", "parameters")), OPENING, CLOSING)
    if dialect == "qwen3_coder":
        rules = [
            start,
            "marked: opening space function space closing",
            f'function: "{FUNCTION}" name ">" space (parameter space)* "</function>"',
            f"name: {' | '.join(map(json.dumps, names))}",
            f'parameter: "{PARAMETER}" /[^<>\\n]{{1,256}}/ ">" value',
            'value[suffix="</parameter>"]: /(?s:.)*/',
            _SPACE,
        ]
        return Calls("\n".join(rules), "", OPENING, CLOSING)
    return None


def describes_calls(form: Grammar, dialect: str) -> bool:
    """Whether it has marks of calls in it, so that it says itself when one comes."""
    marks = {"hermes": (OPENING,), "qwen3_coder": (OPENING, FUNCTION)}.get(dialect, ())
    return form.kind in _TEXTS and any(mark in form.source.replace("\\", "") for mark in marks)


def _json_call(names: Collection[str], *keys: str) -> dict[str, Any]:
    """With the name before the arguments, or behind them."""
    name, arguments = {"enum": [*names]}, {"type": "object"}
    return {
        "anyOf": [
            {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
            for key in keys
            for properties in ({"name": name, key: arguments}, {key: arguments, "name": name})
        ]
    }
