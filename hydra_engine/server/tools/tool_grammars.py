"""Schemas and grammars of tool calls, which the output must fit if a call is forced, or if the model may choose between
a call and an answer of a constrained form.

JSON arguments follow the function's schema where that can be enforced: unsupported keywords are ignored, and so are
schemas that are too large together. Does not know requests, how calls are read or how grammars are enforced.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hydra_engine.core.grammar import MAX_GRAMMAR_CHARS, Calls, Grammar, check_size
from hydra_engine.core.schemas.numbers import schema_text
from hydra_engine.core.schemas.subschemas import is_of_objects, schemas_of, with_pointers
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.tools.function_blocks import FUNCTION, PARAMETER
from hydra_engine.server.tools.tool_parsers import CLOSING, OPENING

# ---- schemas of parameters and of calls

# The schema of a function that declares no parameters.
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# Keywords through which a schema may allow properties that it does not list.
_ANNOTATIONS = ("title", "description", "examples", "default", "$comment")  # for readers of a schema
_ELSEWHERE = frozenset({"$ref", "anyOf", "oneOf", "allOf", "if", "dependentSchemas", "patternProperties"})


def check_parameters(parameters: Mapping[str, Any] | None, function: str, param: str) -> None:
    """Raises InvalidRequest if the schema allows values that are not objects."""
    if parameters is not None and not is_of_objects(_only_objects(parameters), dict(parameters)):
        raise InvalidRequest(
            f'the parameters of the function {function} must be an object: give a schema with "type": "object"',
            param=param,
        )


def parameters_schema(tool: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """The schema of a tool's arguments, at the JSON pointer `place` of a larger one. If it lists its parameters without
    allowing or forbidding others, others are forbidden: a function would not know them, and clients send such schemas
    of plain functions. Raises InvalidRequest."""
    function = tool["function"]
    if function.get("parameters") is None:
        return _NO_PARAMETERS
    try:
        schema = with_pointers(function["parameters"], place)
    except ValueError as error:
        raise InvalidRequest(f"the parameters of the function {function['name']}: {error}", param="tools") from None
    schema.pop("$schema", None)
    for found in schemas_of(schema):
        for name in _ANNOTATIONS:
            found.schema.pop(name, None)
    listed = "properties" in schema and not _ELSEWHERE & schema.keys()
    closed = {"additionalProperties": False} if listed else {}
    kind = {} if "$ref" in schema else {"type": "object"}
    return closed | kind | _only_objects(schema)


def _only_objects(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with `object` as its only type, if that is one of several."""
    kind = schema.get("type")
    return {**schema, "type": "object"} if isinstance(kind, list) and "object" in kind else {**schema}


def calls_schema(tools: Iterable[Mapping[str, Any]], parallel: bool) -> dict[str, Any]:
    """The schema of a list of calls, with each tool's schema among the definitions. Raises InvalidRequest as soon as
    the schemas are too long together for a grammar."""
    calls, definitions, num_chars = [], {}, 0
    for index, tool in enumerate(tools):
        place = f"/$defs/tool{index}"
        schema = definitions[f"tool{index}"] = parameters_schema(tool, place)
        num_chars += len(schema_text(schema))
        check_size(num_chars, "tools")
        properties = {"name": {"enum": [tool["function"]["name"]]}, "parameters": {"$ref": f"#{place}"}}
        calls.append(
            {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        )
    limits = {"minItems": 1} if parallel else {"minItems": 1, "maxItems": 1}
    return {"type": "array", **limits, "items": {"anyOf": calls}, "$defs": definitions}


# ---- grammars of each dialect's calls

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
