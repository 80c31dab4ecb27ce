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
from hydra_engine.guidance.reasons import phrased, reason_of
from hydra_engine.guidance.sources import source_of
from hydra_engine.guidance.tokens import load_tokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

_STATE = "\n<state>\n"  # what errors tell behind it
_LEXER_COST = re.compile(r'"lexer_cost": (\d+)')
_NO_TOKEN = (1 << 31) - 1
# Measured over 40 kinds of grammars with mallinfo2: at most 6.9 bytes for a unit of the cost where that counts, and for
# a character at most 375, or 34 where the grammar is one expression.
_LEAST_BYTES, _BYTES_PER_COST = 128 << 10, 8
_BYTES_PER_CHAR, _BYTES_PER_CHAR_ALONE = 400, 48
_UNKNOWN_BYTES = 64 << 20

TokenMask = npt.NDArray[np.bool_]  # [vocabulary of the tokenizer]


class GrammarError(Exception):
    """A grammar cannot be compiled or followed, or a tokenizer not used. The text is one bounded line, the second half
    of a sentence."""


def is_installed() -> bool:
    return find_spec("llguidance") is not None


class Guide:
    """Compiles grammars for one tokenizer. Loading takes about a second for 150,000 tokens."""

    def __init__(self, tokenizer_file: Path, eos_token_ids: Sequence[int]) -> None:
        """Raises GrammarError for a tokenizer that llguidance cannot read."""
        try:
            self._tokenizer, self._special_tokens = load_tokens(tokenizer_file, sorted(eos_token_ids))
        except ValueError:
            raise GrammarError("this model's tokenizer cannot be used for them") from None
        self._limits = _limits()

    def compile(self, grammar: Grammar) -> Matcher:
        """Raises GrammarError."""
        from llguidance import LLMatcher

        try:
            source = source_of(grammar, self._special_tokens)
        except ValueError as error:
            raise GrammarError(phrased(str(error))) from None
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        is_alone = grammar.kind in ("regex", "choice") and grammar.calls is None
        num_bytes = _LEAST_BYTES + len(source) * (_BYTES_PER_CHAR_ALONE if is_alone else _BYTES_PER_CHAR)
        return Matcher(matcher, self._tokenizer.eos_tokens, num_bytes)


class Matcher:
    """A place in a grammar, which moves on with each token. Not for several threads at once."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: Sequence[int], rule_bytes: int) -> None:
        """`rule_bytes`: what has been compiled takes but for its lexer, or more."""
        self._matcher = matcher
        self._eos_token_ids = list(eos_token_ids)
        self._rule_bytes = rule_bytes
        self._check()

    def copy(self) -> Matcher:
        """Another one at the same place. Copies share what has been compiled."""
        return Matcher(self._matcher.deep_copy(), self._eos_token_ids, self._rule_bytes)

    def num_bytes(self) -> int:
        """The memory that what has been compiled takes, or more: by the size of the grammar, and by what llguidance
        counts while it makes a lexer of it, which only its errors tell."""
        probe = self._matcher.deep_copy()
        probe.compute_bitmask()
        probe.consume_tokens([_NO_TOKEN])
        counted = _LEXER_COST.search(probe.get_error())
        lexer_bytes = _UNKNOWN_BYTES if counted is None else _BYTES_PER_COST * int(counted[1])
        return self._rule_bytes + lexer_bytes

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
            raise GrammarError(reason_of(self._matcher.get_error().partition(_STATE)[0]))


def _limits() -> LLParserLimits:
    """Limits of one compilation and of one step; the default of max_lexer_states would be hundreds of megabytes."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=1000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=True,
    )
