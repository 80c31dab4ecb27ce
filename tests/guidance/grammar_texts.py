"""Texts that a compiled grammar lets through, or not."""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path

from hydra_engine.core.grammar import Grammar
from hydra_engine.guidance.guide import Guide, Matcher

DEMO = Path(__file__).parents[2] / "hydra_engine" / "demo" / "model" / "tokenizer.json"
EOS = 2


class Texts:
    """Follows a grammar as a model would that wants to write a text: with the longest token that may come. Marks that
    are tokens of the tokenizer come as such."""

    def __init__(self, file: Path, marks: dict[str, int]) -> None:
        self.file = file
        self.guide = Guide(file, (EOS,))
        self.compiled: dict[Hashable, Matcher] = {}
        self.marks = marks
        tokenizer = json.loads(file.read_text())
        special = {token["id"] for token in tokenizer["added_tokens"]}
        decode = self.guide._tokenizer.decode_bytes
        self.vocabulary = [(decode([token]), token) for token in range(641) if token not in special]
        self.vocabulary += [(mark.encode(), token) for mark, token in marks.items()]
        self.vocabulary.sort(key=lambda entry: -len(entry[0]))

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """True if the grammar accepts the whole text."""
        if grammar.language not in self.compiled:
            self.compiled[grammar.language] = self.guide.compile(grammar)
        matcher, rest = self.compiled[grammar.language].copy(), text.encode()
        while rest:
            allowed = matcher.allowed()
            fitting = (entry for entry in self.vocabulary if allowed[entry[1]] and rest.startswith(entry[0]))
            content, token = next(fitting, (b"", EOS))
            if not content:
                return False
            matcher.accept([token])
            rest = rest[len(content) :]
        return bool(matcher.allowed()[EOS])
