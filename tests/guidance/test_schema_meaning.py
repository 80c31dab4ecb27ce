"""Schemas mean the same here as in JSON Schema: numbers by their digits, references in every form, names of properties
that are keywords too. What cannot be kept is refused with a sentence that names it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hydra_engine.core.grammar import Grammar
from hydra_engine.core.schemas.numbers import LongFloat, read_float, schema_text
from hydra_engine.guidance.guide import GrammarError
from tests.guidance.grammar_texts import DEMO, Texts

EXACT = 1 << 53  # up to here a double has every integer
LONG = 1 << 63


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts(DEMO, {})


def accepts(texts: Texts, schema: Any, text: object) -> bool:
    source = schema if isinstance(schema, str) else json.dumps(schema)
    return texts.accepts(Grammar("json_schema", source), str(text))


def refusal(texts: Texts, schema: Any) -> str:
    source = schema if isinstance(schema, str) else json.dumps(schema)
    with pytest.raises(GrammarError) as caught:
        texts.guide.compile(Grammar("json_schema", source))
    return str(caught.value)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer", "minimum": 1 - EXACT, "maximum": EXACT - 1},
         (5, 12, -123456, 1 - EXACT, EXACT - 1), (EXACT, -EXACT, "1e3")),
        ({"type": "integer", "exclusiveMinimum": -EXACT, "exclusiveMaximum": EXACT},
         (0, 1 - EXACT, EXACT - 1), (EXACT, -EXACT)),
        ({"type": "integer", "minimum": -LONG, "maximum": LONG - 1},
         (0, 1024 - LONG, LONG - 1), (LONG, -LONG - 1, LONG * 10)),
        ({"type": "integer", "minimum": 0, "exclusiveMaximum": 2 * LONG}, (0, LONG - 1), (-1, 2 * LONG)),
        ({"type": ["integer", "null"], "minimum": 1 << 62, "maximum": LONG - 1},
         (1 << 62, (1 << 62) + 1, "null"), ((1 << 62) - 1, LONG)),
        ({"type": "number", "minimum": 0.1, "maximum": EXACT + 2}, (0.1, 0.5, EXACT + 2), (0.05, EXACT + 3)),
        ({"const": EXACT}, (EXACT,), (EXACT + 1,)),
        ({"enum": [EXACT + 2, LONG - 1, 10**20]}, (EXACT + 2, LONG - 1, 10**20), (EXACT + 1, LONG)),
        ('{"enum": [1.0, 1e3, 0.1000, 1.50e-3, 1e22]}', (1, 1000, 0.1, 0.0015, 10**22), (2, 0.2)),
        ('{"type": "string", "minLength": 2.0, "maxLength": 1e1}', ('"ab"', '"abcdefghij"'), ('"a"', '"abcdefghijk"')),
        ('{"default": 1e400, "examples": [12345678901234567890], "const": 1}', (1,), (2,)),
        ({"allOf": [{"type": "integer", "multipleOf": 6}, {"multipleOf": 4}]}, (12, 24), (4, 6)),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else None,
)  # fmt: skip
def test_numbers_are_what_was_written(
    texts: Texts, schema: Any, right: tuple[Any, ...], wrong: tuple[Any, ...]
) -> None:
    for number in right:
        assert accepts(texts, schema, number), number
    for number in wrong:
        assert not accepts(texts, schema, number), number


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"const": EXACT + 1},
         "const 9007199254740993 would not be kept exactly, as numbers here are doubles; write the string "
         '"9007199254740993" or 9007199254740992'),
        ({"enum": ["a", 1790000000000000001]}, "enum 1790000000000000001"),
        ({"const": -EXACT - 1}, "const -9007199254740993"),
        ({"const": LONG}, "const 9223372036854775808"),
        ({"const": -LONG}, "const -9223372036854775808"),
        ({"const": 1 << 70}, "const 1180591620717411303424"),
        ({"const": 10**400}, "const 1000000000"),
        ('{"const": 123456789.123456789}', "or 123456789.12345679"),
        ('{"enum": [1e400]}', 'write the string "1e+400"'),
        ('{"const": [{"a": 0.10000000000000001}]}', "0.10000000000000001"),
        ({"type": "integer", "minimum": 1790000000000000001, "maximum": 1790000000000000001}, "minimum 17900000"),
        ({"type": "integer", "minimum": LONG, "maximum": LONG + 5}, "minimum 9223372036854775808"),
        ({"type": "integer", "minimum": 2 * LONG}, "minimum 18446744073709551616"),
        ({"type": "integer", "maximum": -2 * LONG}, "maximum -18446744073709551616"),
        ({"type": "integer", "minimum": 1 << 62}, "minimum 4611686018427387904 needs a maximum beside it"),
        ({"type": "integer", "exclusiveMinimum": EXACT}, "exclusiveMinimum 9007199254740992"),
        ({"type": "integer", "exclusiveMaximum": EXACT + 2}, "exclusiveMaximum 9007199254740994"),
        ({"type": "number", "maximum": 1 << 62}, "maximum 4611686018427387904"),
        ({"maximum": 10**30}, "maximum 1000000000"),
        ({"type": "integer", "multipleOf": 1 << 33}, "multipleOf 8589934592"),
        ('{"type": "number", "multipleOf": 0.1000000000000000001}', "multipleOf 0.1000000000000000001"),
        ({"allOf": [{"type": "integer", "multipleOf": 65537}, {"multipleOf": 65539}]},
         "multipleOf 65537 and 65539 cannot hold together"),
        ({"properties": {"a": {"items": {"anyOf": [{"const": EXACT + 1}]}}}}, "const 9007199254740993"),
        ({"properties": {"default": {"const": EXACT + 1}, "enum": True}}, "const 9007199254740993"),
        ({"$ref": "#/components/X", "components": {"X": {"const": EXACT + 1}}}, "const 9007199254740993"),
        ('{"const": NaN}', "NaN is no number of JSON"),
        ('{"x-unknown": 1e400, "const": 1}', "the number 1e+400 is out of range"),
        ('{"const": 1e99999999999999999999}', "is out of range"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_numbers_that_would_be_others_are_refused(texts: Texts, schema: Any, named: str) -> None:
    words = refusal(texts, schema)
    assert named in words and len(words) <= 200


X = {"enum": ["a", "b"]}
CLOSED = {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"v": {"$ref": "#/$defs/X"}}, "$defs": {"X": X}},
        {"properties": {"v": {"$ref": "#/$defs/~0 %25~1"}}, "$defs": {"~ %/": X}},
        {"$id": "https://a.example/s", "properties": {"v": {"$ref": "https://a.example/s#/$defs/X"}},
         "$defs": {"X": X}},
        {"$id": "https://a.example/s", "properties": {"v": {"$ref": "s#x"}}, "$defs": {"X": X | {"$anchor": "x"}}},
        {"properties": {"v": {"$ref": "#x"}}, "$defs": {"X": X | {"$anchor": "x"}}},
        {"$id": "https://a.example/s", "properties": {"v": {"$ref": "/x"}}, "$defs": {"X": X | {"$id": "x"}}},
        {"properties": {"v": {"$ref": "urn:x"}}, "$defs": {"X": X | {"$id": "urn:x"}}},
        {"properties": {"v": {"$ref": "urn:y#/$defs/X"}}, "$defs": {"Y": {"$id": "urn:y", "$defs": {"X": X}}}},
        {"properties": {"v": {"$ref": "#/$defs/Y"}},
         "$defs": {"X": True, "Y": {"$id": "urn:y", "$ref": "#/$defs/X", "$defs": {"X": X}}}},
        {"properties": {"v": {"$ref": "#/properties/l/anyOf/1"}, "l": {"anyOf": [{"type": "null"}, X]}}},
        {"properties": {"v": {"$ref": "#/components/X"}}, "components": {"X": X}},
    ],
    ids=lambda schema: json.dumps(schema)[:60],
)  # fmt: skip
def test_references_of_every_form(texts: Texts, schema: dict[str, Any]) -> None:
    closed = schema | CLOSED | {"required": ["v"]}
    assert accepts(texts, closed, '{"v":"b"}') and not accepts(texts, closed, '{"v":"c"}')
    other_order = dict(reversed(closed.items()))
    assert accepts(texts, other_order, '{"v":"b"}') and not accepts(texts, other_order, '{"v":"c"}')


@pytest.mark.parametrize("reference", ["https://b.example/x", "other.json#/a", "#nowhere", "file:///etc/passwd"])
def test_references_to_elsewhere_are_refused(texts: Texts, reference: str) -> None:
    words = refusal(texts, {"properties": {"v": {"$ref": reference}}})
    assert reference in words and ("leads out of the schema" in words or "no $anchor" in words)


KEYWORDS = ("default", "enum", "const", "examples", "pattern", "patternProperties", "properties", "$ref", "$defs")


@pytest.mark.parametrize("name", KEYWORDS)
def test_properties_with_the_names_of_keywords(texts: Texts, name: str) -> None:
    schema = CLOSED | {"properties": {name: {"$ref": "#/$defs/X"}}, "required": [name], "$defs": {"X": X}}
    for form in (schema, CLOSED | {"properties": {"a": schema}, "$defs": schema["$defs"], "required": ["a"]}):
        text = json.dumps({name: "b"} if form is schema else {"a": {name: "b"}}, separators=(",", ":"))
        assert accepts(texts, form, text) and not accepts(texts, form, text.replace('"b"', '"c"'))
    single = CLOSED | {"properties": {name: {"type": "string", "pattern": "^a\\"}}}
    assert "ends in a single backslash" in refusal(texts, single)
    # In values nothing is a keyword.
    value = {name: {"pattern": "\\", "$ref": "nowhere"}}
    assert accepts(texts, {"const": value}, json.dumps(value, separators=(",", ":")))


def test_digits_of_parsed_schemas_are_written_again() -> None:
    assert type(read_float("0.1")) is float and type(read_float("0.10000000000000000000")) is float
    long = read_float("123456789.123456789")
    assert isinstance(long, LongFloat) and long == 123456789.12345679
    schema = {"enum": [long, 1 << 80, 1.5, True, None, "é", {"a": [-(1 << 63) - 1]}]}
    assert schema_text(schema) == (
        '{"enum":[123456789.123456789,1208925819614629174706176,1.5,true,null,"é",{"a":[-9223372036854775809]}]}'
    )
    with pytest.raises(ValueError, match="out of range"):
        read_float("1e400")


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ({"not": {}, "if": {}}, 'these keywords of its schema are not supported: "if", "not"'),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]},
         "oneOf is supported only where no value can fit two of its branches; use anyOf, or branches that differ by a "
         "const"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "no value fits the schema: incompatible types"),
        ({"minimum": "5"}, 'minimum must be a number, not "5"'),
        ({"type": "string", "minLength": -1}, "minLength must be a whole number that is not negative, not -1"),
        ({"required": "a"}, 'required must be of the type array, not "a"'),
        ({"type": "string", "format": "idn-email"},
         "the format idn-email is not supported; leave it out, or use a pattern"),
        ({"type": "integer", "multipleOf": 0}, "multipleOf must be greater than 0"),
        ({"x-guidance": {"foo": 1}}, "x-guidance has the unknown field `foo`"),
        ({"x-guidance": 5}, "x-guidance must be an object"),
        (Grammar("regex", r"a\bb"), "look-around is not supported, nor are \\b and, inside of the expression, ^ and $"),
        (Grammar("lark", 'start: "a'), "line 1, column 10: nothing in Lark's form begins like this"),
        (Grammar("lark", "start: <|foo|>"), 'line 1, column 8: unknown special token: "<|foo|>"'),
        (Grammar("lark", "start: <[99999]>"), "this model has no token of such an id"),
    ],
    ids=str,
)  # fmt: skip
def test_reasons_are_sentences(texts: Texts, grammar: Any, words: str) -> None:
    with pytest.raises(GrammarError) as caught:
        texts.guide.compile(grammar if isinstance(grammar, Grammar) else Grammar("json_schema", grammar))
    assert str(caught.value) == words
