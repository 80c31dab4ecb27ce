"""Random schemas against a validator: no text that a grammar lets through breaks its schema, neither one that it was
asked about nor one that came of it."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from hydra_engine.core.grammar import Grammar
from hydra_engine.preprocess.sandbox.grammar_child import problem_of
from tests.guidance.grammar_texts import DEMO, EOS, Texts

NAMES = ("a", "b", "enum", "default", "$ref")
BOUNDS = (-(1 << 53) + 1, -1000, -12, -1, 0, 1, 7, 12, 99, 123456, (1 << 53) - 1)
PATTERNS = ("^a+$", "b", "^[ab]{2,3}$", "^(a|bb)*$", "\\d")
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 12, 13, 100, 123456, 0.5, 1.5, -12.25, (1 << 53) - 1, 1 << 53, "", "a", "aa", "ab",
    "b", "bb", "abab", "1", "é", "<s>", [], [1], ["a", "a"], [1, 2, 3], {}, {"a": 1}, {"a": "a", "b": None},
    {"enum": 1}, {"a": {"a": 1}}, {"default": [], "$ref": "a"},
)  # fmt: skip
MAX_TOKENS = 80


class Schemas:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def whole(self) -> dict[str, Any]:
        """A random schema with definitions before or after the references to them."""
        definitions = {name: self.schema(2) for name in ("x", "y")}
        schema = self.schema(3)
        return {"$defs": definitions, **schema} if self.draw.random() < 0.5 else {**schema, "$defs": definitions}

    def schema(self, depth: int) -> dict[str, Any]:
        kinds = ["null", "boolean", "integer", "number", "string", "values"]
        if depth > 0:
            kinds += ["array", "object", "object", "anyOf", "allOf", "reference"]
        made: dict[str, Any] = getattr(self, f"_{self.draw.choice(kinds)}")(depth)
        return made

    def _null(self, _depth: int) -> dict[str, Any]:
        return {"type": "null"}

    def _boolean(self, _depth: int) -> dict[str, Any]:
        return {"type": "boolean"}

    def _integer(self, _depth: int) -> dict[str, Any]:
        kind: Any = self.draw.choice(["integer", ["integer", "null"]])
        return self._bounds({"type": kind}, self.draw.choice([None, None, 1, 3, 7, 12]))

    def _number(self, _depth: int) -> dict[str, Any]:
        return self._bounds({"type": "number"}, self.draw.choice([None, None, 0.5, 0.25, 3]))

    def _bounds(self, schema: dict[str, Any], factor: float | None) -> dict[str, Any]:
        low, high = sorted(self.draw.sample(BOUNDS, 2))
        if self.draw.random() < 0.6:
            schema[self.draw.choice(["minimum", "exclusiveMinimum"])] = low
        if self.draw.random() < 0.6:
            schema[self.draw.choice(["maximum", "exclusiveMaximum"])] = high
        return schema | ({} if factor is None else {"multipleOf": factor})

    def _string(self, _depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string", "maxLength": self.draw.randint(1, 6)}
        if self.draw.random() < 0.4:
            schema["pattern"] = self.draw.choice(PATTERNS)
        if self.draw.random() < 0.3:
            schema["minLength"] = self.draw.randint(0, 3)
        return schema

    def _values(self, _depth: int) -> dict[str, Any]:
        if self.draw.random() < 0.5:
            return {"const": self.draw.choice(VALUES)}
        return {"enum": self.draw.sample(VALUES, self.draw.randint(1, 4))}

    def _array(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array", "items": self.schema(depth - 1), "maxItems": self.draw.randint(1, 3)}
        if self.draw.random() < 0.3:
            schema["prefixItems"] = [self.schema(depth - 1)]
        if self.draw.random() < 0.3:
            schema["minItems"] = 1
        return schema

    def _object(self, depth: int) -> dict[str, Any]:
        names = self.draw.sample(NAMES, self.draw.randint(0, 3))
        schema: dict[str, Any] = {"type": "object", "properties": {name: self.schema(depth - 1) for name in names}}
        if names and self.draw.random() < 0.7:
            schema["required"] = self.draw.sample(names, self.draw.randint(1, len(names)))
        if self.draw.random() < 0.8:
            schema["additionalProperties"] = False
        return schema

    def _anyOf(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.schema(depth - 1) for _ in range(self.draw.randint(1, 3))]}

    def _allOf(self, depth: int) -> dict[str, Any]:
        return {"allOf": [self.schema(depth - 1) for _ in range(2)]}

    def _reference(self, _depth: int) -> dict[str, Any]:
        return {"$ref": self.draw.choice(["#/$defs/x", "#/$defs/y"])}


def written(texts: Texts, grammar: Grammar, draw: random.Random) -> str | None:
    """A text of the grammar by tokens that are drawn; None if it does not end soon."""
    matcher, tokens = texts.guide.compile(grammar), []
    for _ in range(MAX_TOKENS):
        allowed = np.flatnonzero(matcher.allowed())
        if allowed[allowed == EOS].size and (allowed.size == 1 or draw.random() < 0.5):
            return bytes(texts.guide._tokenizer.decode_bytes(tokens)).decode()
        token = int(draw.choice(allowed[allowed != EOS]))
        matcher.accept([token])
        tokens.append(token)
    return None


def finite(text: str) -> float:
    """The number within finite bounds; the validator refuses infinite ones."""
    return max(-1e300, min(float(text), 1e300))


def run(texts: Texts, seeds: range) -> tuple[int, int]:
    """Numbers of pairs that were tried and of texts that grammars gave."""
    num_tried = num_written = 0
    for seed in seeds:
        schemas = Schemas(seed)
        schema = schemas.whole()
        grammar = Grammar("json_schema", schema)
        try:
            validator = jsonschema_rs.Draft202012Validator(schema)
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError):
            continue
        if problem_of(texts.guide, grammar) is not None:
            continue
        for value in schemas.draw.sample(VALUES, 12):
            text = json.dumps(value, ensure_ascii=False)
            num_tried += 1
            if texts.accepts(grammar, text):
                assert validator.is_valid(value), (seed, schema, text)
        for _ in range(3):
            came = written(texts, grammar, schemas.draw)
            if came is not None:
                num_written += 1
                assert validator.is_valid(json.loads(came, parse_float=finite)), (seed, schema, came)
    return num_tried, num_written


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts(DEMO, {})


def test_no_text_breaks_its_schema(texts: Texts) -> None:
    num_tried, num_written = run(texts, range(60))
    assert num_tried > 300 and num_written > 50


@pytest.mark.drawn
@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_no_text_breaks_its_schema_at_length(texts: Texts, part: int) -> None:
    num_tried, num_written = run(texts, range(1000 + 400 * part, 1400 + 400 * part))
    assert num_tried > 2000 and num_written > 300
