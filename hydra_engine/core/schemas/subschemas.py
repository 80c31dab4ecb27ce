"""Subschemas and references of JSON Schemas.

Does not know which schemas can be enforced, nor how.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urldefrag, urljoin

# Keywords whose value is a schema, a list of schemas, or an object of schemas by name. `items` may be a list too, and
# the values of `dependencies` lists of names.
_ONE = frozenset(
    {"additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"}
    | {"propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
)
_LISTS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_MAPS = frozenset({"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"})
_MAX_STEPS = 64
MAX_ID_CHARS = 1024  # of an identifier joined with those around it, and of a reference joined with that
_SAFE_IN_POINTER = "$~!'()*,;=:@"


class Subschema(NamedTuple):
    """A schema within another one: `pointer` is the JSON pointer to it, `base` and `base_pointer` are the identifier
    of, and the pointer to, the schema that its references are relative to."""

    schema: dict[str, Any]
    pointer: str
    base: str
    base_pointer: str


def schemas_of(root: dict[str, Any]) -> Iterator[Subschema]:
    """The schema itself and all schemas within it, found by keywords and references. Excludes values (such as the
    entries of `enum`) and property names. Raises ValueError for an identifier that is too long."""
    stack = [Subschema(root, "", "", "")]
    seen: set[int] = set()
    while stack:
        schema, pointer, base, base_pointer = stack.pop()
        if id(schema) in seen:
            continue
        seen.add(id(schema))
        if isinstance(own := schema.get("$id"), str) and not own.startswith("#"):
            base, base_pointer = urldefrag(_joined(base, own)).url, pointer
        yield Subschema(schema, pointer, base, base_pointer)
        inner = [(f"{pointer}/{path}", value) for path, value in _children(schema)]
        if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
            inner.append((base_pointer + reference[1:], resolve_pointer(root, base_pointer + reference[1:])))
        stack += [Subschema(value, place, base, base_pointer) for place, value in inner if isinstance(value, dict)]


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(relative JSON pointer, value) of everything that may be a schema directly within one."""
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict):
            yield from ((f"{name}/{_escape_key(key)}", inner) for key, inner in value.items())
        elif name in _LISTS and isinstance(value, list):
            yield from ((f"{name}/{index}", inner) for index, inner in enumerate(value))
        elif name in _ONE:
            yield name, value


def _escape_key(key: str) -> str:
    """A key as one step of a JSON pointer in a reference, escaped."""
    return quote(key.replace("~", "~0").replace("/", "~1"), safe=_SAFE_IN_POINTER)


def resolve_pointer(root: Any, pointer: str) -> Any:
    """The value at a JSON pointer of a reference; None if there is none."""
    value = root
    for step in pointer.split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def with_pointers(root: dict[str, Any], place: str = "") -> dict[str, Any]:
    """A copy in which every reference is a JSON pointer, with its root at the pointer `place` of a larger schema.
    Raises ValueError for a reference that leads outside, or to nothing."""
    root = copy.deepcopy(root)
    subschemas = list(schemas_of(root))
    named = {found.base: found.base_pointer for found in reversed(subschemas)}
    anchors = {
        (found.base, anchor): found.pointer
        for found in subschemas
        if isinstance(anchor := found.schema.get("$anchor"), str)
    }
    for found in subschemas:
        if isinstance(reference := found.schema.get("$ref"), str):
            found.schema["$ref"] = f"#{place}{_pointer_of(reference, found.base, named, anchors)}"
    for found in subschemas:
        found.schema.pop("$id", None)
        found.schema.pop("$anchor", None)
    return root


@lru_cache(256)
def _joined(base: str, reference: str) -> str:
    """`urljoin` of both. Raises ValueError if they are too long together."""
    if len(base) + len(reference) > MAX_ID_CHARS:
        raise ValueError(f"an $id or a reference to one has more than {MAX_ID_CHARS} characters")
    return urljoin(base, reference)


def _pointer_of(reference: str, base: str, named: dict[str, str], anchors: dict[tuple[str, str], str]) -> str:
    """The JSON pointer that a reference relative to `base` stands for. Raises ValueError if it leads outside, or to
    nothing."""
    target, fragment = urldefrag(reference)
    target = _joined(base, target) if target else base
    if target not in named:
        raise ValueError(
            f"the reference {reference[:80]!r} leads out of the schema; put what it means into $defs and refer to that "
            'as "#/$defs/NAME"'
        )
    if not fragment or fragment.startswith("/"):
        return named[target] + quote(unquote(fragment), safe=f"/{_SAFE_IN_POINTER}")
    if (target, fragment) not in anchors:
        raise ValueError(f"the schema has no $anchor for the reference {reference[:80]!r}")
    return anchors[target, fragment]


def is_of_objects(schema: Any, root: dict[str, Any]) -> bool:
    """True unless a keyword shows that the schema allows a value that is no object; a schema without a type passes."""
    return _is_of_objects(schema, root, 0, set())


def _is_of_objects(schema: Any, root: dict[str, Any], depth: int, seen: set[int]) -> bool:
    """`is_of_objects`, with each schema checked once, however many references lead to it."""
    if not isinstance(schema, dict) or depth > _MAX_STEPS:
        return schema is not False
    if id(schema) in seen:
        return True  # checked already: False would have ended the search
    seen.add(id(schema))
    if "type" in schema:
        return schema["type"] in ("object", ["object"])
    values = schema.get("enum", [schema.get("const", {})])
    if isinstance(values, list) and not all(isinstance(value, dict) for value in values):
        return False
    branches = [schema[name] for name in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(name), list)]
    inner = [one for several in branches for one in several]
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        inner.append(resolve_pointer(root, reference[1:]))
    return all(_is_of_objects(one, root, depth + 1, seen) for one in inner)
