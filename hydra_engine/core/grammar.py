"""The language that a request's output must be in: JSON of a schema, a regular expression, one of several texts, a
grammar.

Holds only the definition and bounds that are checked before any compilation. Does not know how a grammar is compiled or
enforced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydra_engine.errors import InvalidRequest

MAX_GRAMMAR_CHARS = 64 << 10
MAX_MARK_CHARS = 128
KINDS = ("json_object", "json_schema", "regex", "choice", "lark", "ebnf")


def check_size(num_chars: int, param: str) -> None:
    """Raises InvalidRequest, naming `param`, if a grammar has more than MAX_GRAMMAR_CHARS characters."""
    if num_chars > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"the grammar has {num_chars} characters, at most {MAX_GRAMMAR_CHARS} are allowed", param=param
        )


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning of a model before the output that a grammar constrains: any text between the marks `start` and
    `end`, or no reasoning and no marks. If `opened`, the prompt ends within the reasoning: the output continues it
    and must have `end`. A mark is a special token or text, as the model writes it.
    """

    start: str
    end: str
    opened: bool = False


@dataclass(frozen=True, slots=True)
class Calls:
    """Function calls in the format of a model. `source`: a Lark grammar that may use the rules `opening` and `closing`,
    which match these marks (each a special token or text), and `@call`, JSON that fits the JSON Schema `schema`. A
    rule whose field is empty is not defined."""

    source: str
    schema: str = ""
    opening: str = ""
    closing: str = ""


@dataclass(frozen=True, slots=True, init=False)
class Grammar:
    """The language that a request's output must be in.

        >>> Grammar("choice", ["yes", "no"])
        >>> Grammar("json_schema", {"type": "object", "properties": {"name": {"type": "string"}}})

    - kind, source: "json_object" with no source; "json_schema" with the schema (a dict, its JSON text, or a pydantic
        model); "regex" with the expression; "choice" with a list of texts or its JSON; "lark" with the grammar; "ebnf"
        with rules of `::=`, one of them named `root`. At most 65,536 characters, `calls` included.
    - param: the field that errors name, default "structured_outputs".
    - reasoning: reasoning that comes before the output. calls: function calls that may replace it. Default None.

    Raises `InvalidRequest`. The grammar itself is compiled later, by the instance that serves the request.
    """

    kind: str
    source: str  # text, whatever was passed
    param: str
    reasoning: Reasoning | None = None
    calls: Calls | None = None

    def __init__(
        self,
        kind: str,
        source: str | Mapping[str, Any] | Sequence[str] | type = "",
        param: str = "structured_outputs",
        reasoning: Reasoning | None = None,
        calls: Calls | None = None,
    ) -> None:
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "source", source if isinstance(source, str) else _as_json(kind, source, param))
        object.__setattr__(self, "param", param)
        object.__setattr__(self, "reasoning", reasoning)
        object.__setattr__(self, "calls", calls)
        self.__post_init__()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidRequest(f"a grammar must be one of {', '.join(KINDS)}", param=self.param)
        size = len(self.source) + (0 if self.calls is None else len(self.calls.source) + len(self.calls.schema))
        check_size(size, self.param)
        marks = () if self.reasoning is None else (self.reasoning.start, self.reasoning.end)
        if not all(1 <= len(mark) <= MAX_MARK_CHARS for mark in marks):
            raise InvalidRequest(f"marks of reasoning have 1 to {MAX_MARK_CHARS} characters", param=self.param)

    @property
    def language(self) -> tuple[str, str, Reasoning | None, Calls | None]:
        """The fields that define the language, without `param`: the key under which compiled grammars are shared."""
        return self.kind, self.source, self.reasoning, self.calls

    @property
    def without_calls(self) -> Grammar:
        """The grammar without `calls` and without `reasoning`."""
        return replace(self, reasoning=None, calls=None)

    def with_calls(self, calls: Calls) -> Grammar:
        """The grammar of outputs that are either these calls or in this grammar. Replaces earlier calls. Raises
        InvalidRequest if it is too long."""
        return replace(self, calls=calls)

    def after_reasoning(self, start: str, end: str, *, opened: bool) -> Grammar:
        """The grammar of reasoning with these fields of `Reasoning`, optional white space, then this grammar. Strips
        `start` and `end` of white space; raises InvalidRequest unless each keeps 1 to MAX_MARK_CHARS characters."""
        return replace(self, reasoning=Reasoning(start.strip(), end.strip(), opened))


def response_grammar(asked: object) -> Grammar | None:
    """The grammar of a `response_format`: an object as in the OpenAI API, or a pydantic model. None for None and for
    the type "text". Raises InvalidRequest for anything else."""
    if isinstance(asked, type):
        return Grammar("json_schema", asked, "response_format")
    match asked:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Grammar("json_object", param="response_format")
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return Grammar("json_schema", schema, "response_format.json_schema.schema")
        case {"type": "json_schema"}:
            param = "response_format.json_schema.schema"
            raise InvalidRequest(f"{param} is required", param=param)
    raise InvalidRequest(
        'response_format must be {"type": ...} with text, json_object or json_schema, or a pydantic model',
        param="response_format",
    )


def _as_json(kind: str, source: object, param: str) -> str:
    """JSON text of a source that is no text: a dict or pydantic model for "json_schema", a list or tuple for "choice".
    Raises InvalidRequest for other sources, and for values that `json.dumps` refuses."""
    make_schema = getattr(source, "model_json_schema", None)  # a pydantic model's, which need not be installed
    if kind == "json_schema" and isinstance(source, type) and callable(make_schema):
        source = make_schema()
    if (kind, type(source)) not in (("json_schema", dict), ("choice", list), ("choice", tuple)):
        needed = {
            "json_schema": "a schema must be a dict, JSON text or a pydantic model",
            "choice": "choices must be a list of texts, or its JSON",
        }
        raise InvalidRequest(needed.get(kind, "a grammar's source must be text"), param=param)
    try:
        return json.dumps(source, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequest("it must be plain JSON, and not nested deeply", param=param) from None
