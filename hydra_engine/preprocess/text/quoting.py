"""Tells control tokens that a text quotes from those that a chat template writes.

Marks are the control tokens that a template writes around texts, and placeholders of pictures and videos. A mark in a
conversation's text is hidden while the template is rendered; then the template's own marks get random spellings, and a
tokenizer that knows only these encodes the whole. So quoted marks become plain-text tokens, and the text around them
keeps its tokens. Does not know templates or messages.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from hydra_engine.preprocess.text.tokenizer import Tokenizer

_NONCE_DIGITS = 20


class Quoting:
    """Hides the control tokens of one template in texts. `marks` are tokens of the vocabulary. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, marks: Collection[str]) -> None:
        # Templates leave digits unchanged, whatever else they do with texts.
        nonce = str(10**_NONCE_DIGITS + secrets.randbelow(10**_NONCE_DIGITS))
        numbers = {mark: f"{nonce}{number:06}" for number, mark in enumerate(sorted(marks), 1)}
        self._hidden = {mark: f"{number}0" for mark, number in numbers.items()}
        self._own = {mark: f"{number}1" for mark, number in numbers.items()}
        self._border = f"{nonce}{0:06}0"
        self._shown = {hidden: mark for mark, hidden in self._hidden.items()} | {self._border: ""}
        self._marks, self._stand_ins = _any_of(marks), _any_of(self._shown)
        self._respelled = tokenizer.with_spellings(self._own)

    def quotes(self, texts: Sequence[str]) -> bool:
        """True if these texts hold a mark, also across adjacent texts, trimmed or not."""
        joined = {"".join(texts), "".join(text.strip() for text in texts)}
        return any(self._marks.search(text) for text in joined)

    def hide(self, value: Any) -> Any:
        """Returns plain JSON with the marks in its strings and names hidden."""
        if isinstance(value, str):
            return self._marks.sub(lambda found: self._hidden[found[0]], value)
        if isinstance(value, Mapping):
            return {self.hide(name): self.hide(inner) for name, inner in value.items()}
        return [self.hide(inner) for inner in value] if isinstance(value, list | tuple) else value

    def hide_each(self, texts: Sequence[str]) -> list[str]:
        """Hides marks in adjacent texts, also marks that they form together."""
        hidden: list[str] = [self.hide(text) for text in texts]
        return [self._with_border(text) for text in hidden] if self.quotes(hidden) else hidden

    def spell_rendered(self, text: str) -> str:
        """Returns a rendered conversation with its own marks spelled for `encode`, and the hidden ones shown."""
        return self._stand_ins.sub(lambda found: self._shown[found[0]], self.spell(text))

    def spell(self, text: str) -> str:
        """Returns the text of a template or processor with its marks in the random spellings that `encode` reads."""
        return self._marks.sub(lambda found: self._own[found[0]], text)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns token ids. Raises InvalidRequest if a quoted mark would become its token nevertheless."""
        return self._respelled.encode(text, add_special_tokens=add_special_tokens)

    def _with_border(self, text: str) -> str:
        """Inserts the border after the last non-space character, so that trimming keeps it."""
        end = len(text.rstrip())
        return f"{text[:end]}{self._border}{text[end:]}" if end else text


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern of these words, the longest first; matches nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or r"(?!)")
