"""A language that a request's output has to be in: JSON of a schema, a regular expression, one of some texts, a
grammar.

Only what it is, with bounds that hold before anybody compiles it. Does not know how it is compiled or enforced.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.errors import InvalidRequest

MAX_GRAMMAR_CHARS = 64 << 10
KINDS = ("json_object", "json_schema", "regex", "choice", "lark", "ebnf")


@dataclass(frozen=True, slots=True)
class Grammar:
    """`source`: for json_object nothing, for json_schema the schema as JSON text, for regex the expression, for choice
    a JSON list of texts, for lark the grammar, for ebnf rules with `::=`, one of them `root`. Raises `InvalidRequest`
    naming the field `param`."""

    kind: str
    source: str = ""
    param: str = "structured_outputs"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidRequest(f"a grammar must be one of {', '.join(KINDS)}", param=self.param)
        if not isinstance(self.source, str):
            raise InvalidRequest("a grammar's source must be text (for a schema or choices: JSON)", param=self.param)
        if len(self.source) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"the grammar has {len(self.source)} characters, at most {MAX_GRAMMAR_CHARS} are allowed",
                param=self.param,
            )
