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
    """A schema within a root schema, or the root. `pointer`: the JSON pointer to it from the root. Its references are
    relative to the nearest schema around it, or itself, that has an `$id`, else to the root: `base` is the full
    identifier of that one ("" for a root without), `base_pointer` the pointer to it."""

    schema: dict[str, Any]
    pointer: str
    base: str
    base_pointer: str


def schemas_of(root: dict[str, Any]) -> Iterator[Subschema]:
    """Yields the schema itself and, once each, all schemas within it that are the value of a keyword for schemas or the
    target of a JSON pointer in `$ref`. Excludes values (such as the entries of `enum`) and property names. Raises
    ValueError for an `$id` that is too long."""
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
    """Yields (JSON pointer relative to the schema, without the first slash; value) of each value under a keyword for
    schemas. Such a value need not be a schema: `items` may be a list."""
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, dict):
            yield from ((f"{name}/{_escape_key(key)}", inner) for key, inner in value.items())
        elif name in _LISTS and isinstance(value, list):
            yield from ((f"{name}/{index}", inner) for index, inner in enumerate(value))
        elif name in _ONE:
            yield name, value


def _escape_key(key: str) -> str:
    """The key escaped as one step of a JSON pointer in a URL fragment."""
    return quote(key.replace("~", "~0").replace("/", "~1"), safe=_SAFE_IN_POINTER)


def resolve_pointer(root: Any, pointer: str) -> Any:
    """The value at a JSON pointer that is escaped as in a URL fragment, without the "#"; None if there is none."""
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
    """A deep copy, without `$id` and `$anchor`, in which every `$ref` is a JSON pointer of a larger schema that has the
    copy at the pointer `place`. Raises ValueError for a reference that leads outside, for an unknown anchor, and for an
    identifier that is too long. Does not check that pointers lead to something."""
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
    """`urljoin` of both. Raises ValueError if they have more than MAX_ID_CHARS characters together."""
    if len(base) + len(reference) > MAX_ID_CHARS:
        raise ValueError(f"an $id or a reference to one has more than {MAX_ID_CHARS} characters")
    return urljoin(base, reference)


def _pointer_of(reference: str, base: str, named: dict[str, str], anchors: dict[tuple[str, str], str]) -> str:
    """The JSON pointer from the root that a reference relative to `base` stands for. `named`: pointers by identifier;
    `anchors`: by (identifier, anchor). Raises ValueError for an identifier or anchor that is in neither. Does not check
    that a pointer leads to something."""
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
    """False if `type`, `enum`, `const`, a branch or a `$ref` shows that the schema allows something other than objects,
    and for the schema `false`; else True, also without a type and deeper than _MAX_STEPS. References are pointers into
    `root`."""
    return _is_of_objects(schema, root, 0, set())


def _is_of_objects(schema: Any, root: dict[str, Any], depth: int, seen: set[int]) -> bool:
    """Implements `is_of_objects`. `seen`: ids of schemas that were checked, so that each is checked once, however many
    references lead to it."""
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
