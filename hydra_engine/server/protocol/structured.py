"""The fields that ask for structured output, OpenAI's, vLLM's and SGLang's, as one `Grammar`.

Bounded here in size; whether a grammar can be used is the engine's business. Does not know what else a request holds.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from hydra_engine.core.grammar import MAX_GRAMMAR_CHARS, Grammar
from hydra_engine.errors import InvalidRequest

MAX_CHOICES = 4096
MAX_PATTERN_CHARS = 256

GrammarText = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
Choices = Annotated[
    list[Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)]], Meta(min_length=1, max_length=MAX_CHOICES)
]
_NULL = msgspec.Raw(b"null")
SchemaName = Annotated[str, Meta(min_length=1, max_length=128)]


def no_schema() -> msgspec.Raw:
    """The default of a field that is not optional: `Raw | None` would take nothing but null."""
    return _NULL


class NamedSchema(msgspec.Struct, frozen=True):
    """Output always keeps to the schema; `strict` changes nothing."""

    schema: msgspec.Raw
    name: SchemaName | None = None
    description: GrammarText | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """`value` is the schema of a `json_object` in TGI's form, into which huggingface_hub turns a `json_schema`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    value: msgspec.Raw = msgspec.field(default_factory=no_schema)


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As vLLM takes it. A schema may be JSON or its text."""

    json: msgspec.Raw = msgspec.field(default_factory=no_schema)
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    disable_fallback: bool | None = None  # there is nothing else to fall back on
    disable_any_whitespace: bool | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: Annotated[str, Meta(min_length=1, max_length=MAX_PATTERN_CHARS)] | None = None
    structural_tag: None = None


class StructuredFields(msgspec.Struct, frozen=True, kw_only=True):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = msgspec.field(default_factory=no_schema)
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    regex: GrammarText | None = None
    json_schema: GrammarText | None = None
    ebnf: GrammarText | None = None


def grammar_of(fields: StructuredFields) -> Grammar | None:
    """None where nothing is asked for. Raises InvalidRequest for a wrong one, and for more than one."""
    grammars = [
        *_of_response_format(fields.response_format),
        *_of_structured_outputs(fields.structured_outputs),
        *_of_schema(fields.guided_json, "guided_json"),
        *_of_text("regex", fields.guided_regex, "guided_regex"),
        *_of_choices(fields.guided_choice, "guided_choice"),
        *_of_rules(fields.guided_grammar, "guided_grammar"),
        *_of_text("regex", fields.regex, "regex"),
        *_of_text("json_schema", fields.json_schema, "json_schema"),
        *_of_text("ebnf", fields.ebnf, "ebnf"),
    ]
    if len(grammars) > 1:
        names = " and ".join(grammar.param for grammar in grammars[:2])
        raise InvalidRequest(f"output can have one form only; leave out one of {names}", param=grammars[1].param)
    return grammars[0] if grammars else None


def _of_response_format(field: ResponseFormat | None) -> list[Grammar]:
    if field is None or field.type == "text":
        return []
    if field.type == "json_object":
        schema = _of_schema(field.value, "response_format.value")
        return schema or [Grammar("json_object", param="response_format")]
    if field.json_schema is None:
        raise InvalidRequest("response_format.json_schema is required", param="response_format.json_schema")
    return [schema_grammar(field.json_schema.schema, "response_format.json_schema.schema")]


def _of_structured_outputs(field: StructuredOutputs | None) -> list[Grammar]:
    if field is None:
        return []
    some_json = [
        *_of_schema(field.json, "structured_outputs.json"),
        *([Grammar("json_object", param="structured_outputs.json_object")] if field.json_object else []),
    ]
    return [
        *(_with_white_space(grammar, field) for grammar in some_json),
        *_of_text("regex", field.regex, "structured_outputs.regex"),
        *_of_choices(field.choice, "structured_outputs.choice"),
        *_of_rules(field.grammar, "structured_outputs.grammar"),
    ]


def _with_white_space(grammar: Grammar, field: StructuredOutputs) -> Grammar:
    """The white space that is asked for, written into the schema without reading it."""
    if field.disable_any_whitespace:
        options = '{"whitespace_flexible": false, "whitespace_pattern": null}'
    elif field.whitespace_pattern is not None:
        options = json.dumps({"whitespace_pattern": field.whitespace_pattern})
    else:
        return grammar
    head, brace, rest = (grammar.source or '{"type": "object"}').partition("{")
    if head.strip() or not brace:
        return grammar  # no schema, as who compiles it will say
    comma = "" if rest.lstrip().startswith("}") else ","
    return Grammar("json_schema", f'{{"x-guidance": {options}{comma}{rest}', grammar.param)


def _of_schema(raw: msgspec.Raw, param: str) -> list[Grammar]:
    """From JSON, or from a string that holds it; null is none."""
    text = bytes(raw).decode()
    if text.startswith('"'):
        text = msgspec.json.decode(text, type=str)
    return [] if text == "null" else [Grammar("json_schema", text, param)]


def schema_grammar(schema: msgspec.Raw, param: str) -> Grammar:
    """Of a schema that there has to be. Raises InvalidRequest, naming `param`."""
    grammars = _of_schema(schema, param)
    if not grammars:
        raise InvalidRequest(f"{param} is required", param=param)
    if not grammars[0].source.lstrip().startswith("{"):
        raise InvalidRequest(f"{param} must be a JSON object", param=param)
    return grammars[0]


def _of_text(kind: str, source: str | None, param: str) -> list[Grammar]:
    return [] if source is None else [Grammar(kind, source, param)]


def _of_choices(choices: list[str] | None, param: str) -> list[Grammar]:
    return [] if choices is None else [Grammar("choice", json.dumps(choices, ensure_ascii=False), param)]


def _of_rules(source: str | None, param: str) -> list[Grammar]:
    """Lark's form, or that with `::=`."""
    return _of_text("ebnf" if source is not None and "::=" in source else "lark", source, param)
