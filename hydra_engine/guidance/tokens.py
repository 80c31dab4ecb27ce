"""A model's tokens in llguidance's format, with forced text tokenised as plain text.

A tokenizer makes a special token of each text that spells one. Text that a grammar forces is meant as text, `<s>` in
HTML for example, so it is made of other tokens here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class PlainTokenizer:
    """Tokenises forced text without special tokens, for llguidance's `TokenizerWrapper`."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, file: Path, eos_token_ids: Sequence[int]) -> None:
        """Loads the tokenizer. Raises ValueError if llguidance cannot read it."""
        from llguidance import LLTokenizer

        base = LLTokenizer(str(file))
        decode = base.decode_bytes
        self._base = base
        self._pieces = {id: decode([id]) for id in range(base.vocab_size) if base.is_special_token(id)}
        self.eos_token_ids = [id for id in eos_token_ids if id < base.vocab_size]
        if not self.eos_token_ids:
            raise ValueError("none of these end-of-sequence tokens is in the vocabulary")
        self.eos_token_id = self.eos_token_ids[0]
        self.special_token_ids = [*self._pieces]
        # An id without a name is spelled by its number; no text contains it.
        self.tokens = [
            b"" if (content := decode([id])) == b"<[%d]>" % id and id not in self._pieces else content
            for id in range(base.vocab_size)
        ]
        self.specials = {content.decode(): id for id, content in self._pieces.items() if content}

    def __call__(self, text: str) -> list[int]:
        ids = self._base.tokenize_str(text)
        if self._pieces.keys().isdisjoint(ids):
            return ids
        plain: list[int] = []
        for id in ids:
            plain += self._base.greedy_tokenize(self._pieces[id].decode()) if id in self._pieces else [id]
        # Some special tokens remove the white space around them.
        return plain if self._base.decode_bytes(plain) == text.encode() else self._base.greedy_tokenize(text)


def load_tokens(file: Path, eos_token_ids: Sequence[int]) -> tuple[LLTokenizer, dict[str, int]]:
    """Returns (tokenizer, special tokens by text). Ids that the tokenizer does not have end nothing. Raises ValueError
    if llguidance cannot read it."""
    from llguidance import LLTokenizer

    plain = PlainTokenizer(file, eos_token_ids)
    tokenizer = LLTokenizer(plain, eos_token=plain.eos_token_ids)  # type: ignore[arg-type]
    plain.tokens.clear()  # the tokenizer has copied them
    return tokenizer, plain.specials
