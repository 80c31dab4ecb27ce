"""A JSON schema that an answer has to follow, as requests carry it. Does not know what schemas mean."""

from __future__ import annotations

import msgspec

from hydra_engine.core.grammar import Grammar
from hydra_engine.errors import InvalidRequest


def schema_grammar(schema: msgspec.Raw, param: str) -> Grammar:
    """Raises InvalidRequest, naming `param`, where it is no JSON object or too long."""
    source = bytes(schema).decode("utf-8")
    if not source.lstrip().startswith("{"):
        raise InvalidRequest(f"{param} must be a JSON object", param=param)
    return Grammar("json_schema", source, param)
