"""Schemas of functions' parameters and of calls, which the output must fit if a call is forced.

Does not know requests, nor how schemas are enforced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hydra_engine.core.grammar import check_size
from hydra_engine.core.schemas.numbers import schema_text
from hydra_engine.core.schemas.subschemas import is_of_objects, schemas_of, with_pointers
from hydra_engine.errors import InvalidRequest

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
