"""What llguidance is asked, in one place: a grammar and a tokenizer file to which tokens may come next.

Used where a grammar is checked (a child of the frontend process) and where it is enforced (an instance), so that both
compile the same thing under the same limits. llguidance is imported when the first grammar comes. Does not know
requests, time limits or processes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hydra_engine.core.grammar import Grammar
from hydra_engine.guidance.sources import source_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

TokenMask = npt.NDArray[np.bool_]  # [vocabulary of the tokenizer]

TOO_COMPLEX = "it is too complex; make it smaller or less nested"
NO_TEXT = "no text is in it"

_MAX_REASON_CHARS = 200
_INNER_ERROR = re.compile(r"^error: (.*)", re.MULTILINE)
# What llguidance says when a limit of its own is reached, in its own terms.
_LIMIT_WORDS = re.compile(r"fuel|limits\.|too many|too large|too complex|current row has|lexer error:", re.IGNORECASE)


class GrammarError(Exception):
    """A grammar cannot be compiled or followed, or a tokenizer not used. The text is one bounded line, the second half
    of a sentence."""


def is_installed() -> bool:
    return find_spec("llguidance") is not None


class Guide:
    """Compiles grammars for one tokenizer. Loading takes about a second for 150,000 tokens."""

    def __init__(self, tokenizer_file: Path, eos_token_ids: Sequence[int]) -> None:
        """Raises GrammarError for a tokenizer that llguidance cannot read."""
        self._tokenizer = _load(tokenizer_file, sorted(eos_token_ids))
        self._limits = _limits()

    def compile(self, grammar: Grammar) -> Matcher:
        """Raises GrammarError."""
        from llguidance import LLMatcher

        try:
            source = source_of(grammar, self._tokenizer)
        except ValueError as error:
            raise GrammarError(_reason(str(error))) from None
        return Matcher(LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits), self._tokenizer.eos_tokens)


class Matcher:
    """Where in a grammar a text is. Not for several threads at once."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = list(eos_token_ids)
        self._check()

    def copy(self) -> Matcher:
        """Another one at the same place."""
        return Matcher(self._matcher.deep_copy(), self._eos_token_ids)

    def allowed(self) -> TokenMask:
        """Which tokens may come next; end-of-sequence where the text is complete, and only there. Raises GrammarError
        where it cannot be computed within the limits."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        mask: TokenMask = np.unpackbits(bits, bitorder="little").astype(np.bool_)
        mask[self._eos_token_ids] = self._matcher.is_accepting()
        return mask

    def accept(self, token_ids: Sequence[int]) -> None:
        """The text goes on with these. Raises GrammarError, and then for ever, where they do not belong to it."""
        self._matcher.consume_tokens(list(token_ids))
        self._check()

    def ends(self) -> TokenMask:
        """The end-of-sequence tokens."""
        mask: TokenMask = np.zeros(max(self._eos_token_ids) + 1, dtype=np.bool_)
        mask[self._eos_token_ids] = True
        return mask

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(_reason(self._matcher.get_error()))


def _limits() -> LLParserLimits:
    """Of one compilation and of one step; the default of max_lexer_states would be hundreds of megabytes."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=1000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def _load(file: Path, eos_token_ids: list[int]) -> LLTokenizer:
    """Ids that the tokenizer does not have end nothing here."""
    from llguidance import LLTokenizer

    while eos_token_ids:
        try:
            return LLTokenizer(str(file), eos_token=eos_token_ids)
        except ValueError:
            eos_token_ids = eos_token_ids[:-1]
    raise GrammarError("this model's tokenizer cannot be used for them")


def _reason(text: str) -> str:
    """llguidance's words as part of one line; what it shows of its own state stays out."""
    if _LIMIT_WORDS.search(text):
        return TOO_COMPLEX
    if text.startswith("NoExtension"):
        return NO_TEXT
    inner = _INNER_ERROR.search(text)  # what the parser of regular expressions says, below a drawing
    words = inner[1] if inner else text.partition("\n")[0]
    return words if len(words) <= _MAX_REASON_CHARS else words[: _MAX_REASON_CHARS - 3] + "..."
