"""The interface to llguidance: compiles a grammar for a tokenizer file, and tells which tokens may come next.

Used where a grammar is checked (a child of the frontend process) and where it is enforced (an instance), so that both
compile the same thing under the same limits. llguidance is imported with the first grammar. Does not know requests,
time limits or processes.
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
from hydra_engine.guidance.reasons import reason_of, rephrase
from hydra_engine.guidance.sources import source_of
from hydra_engine.guidance.tokens import load_tokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

_STATE = "\n<state>\n"  # precedes llguidance's internal state in an error text
_LEXER_COST = re.compile(r'"lexer_cost": (\d+)')
_NO_TOKEN = (1 << 31) - 1
# Measured over 40 kinds of grammars with mallinfo2: at most 6.9 bytes per unit of the lexer cost if that dominates, and
# at most 375 per character, or 34 if the grammar is one expression.
_MIN_BYTES, _BYTES_PER_COST = 128 << 10, 8
_BYTES_PER_CHAR, _BYTES_PER_CHAR_ALONE = 400, 48
_UNKNOWN_BYTES = 64 << 20

TokenMask = npt.NDArray[np.bool_]  # [vocabulary of the tokenizer]


class GrammarError(Exception):
    """Raised if a grammar cannot be compiled or followed, or a tokenizer cannot be used.

    The text is one bounded line, the second half of a sentence.
    """


def is_installed() -> bool:
    return find_spec("llguidance") is not None


class Guide:
    """A compiler of grammars for one tokenizer. Loading takes about a second for 150,000 tokens."""

    def __init__(self, tokenizer_file: Path, eos_token_ids: Sequence[int]) -> None:
        """Loads the tokenizer. Raises GrammarError if llguidance cannot read it."""
        try:
            self._tokenizer, self._special_tokens = load_tokens(tokenizer_file, sorted(eos_token_ids))
        except ValueError:
            raise GrammarError("this model's tokenizer cannot be used for them") from None
        self._limits = _limits()

    def compile(self, grammar: Grammar) -> Matcher:
        """Compiles a grammar. Raises GrammarError."""
        from llguidance import LLMatcher

        try:
            source = source_of(grammar, self._special_tokens)
        except ValueError as error:
            raise GrammarError(rephrase(str(error))) from None
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        is_alone = grammar.kind in ("regex", "choice") and grammar.calls is None
        num_bytes = _MIN_BYTES + len(source) * (_BYTES_PER_CHAR_ALONE if is_alone else _BYTES_PER_CHAR)
        return Matcher(matcher, self._tokenizer.eos_tokens, num_bytes)


class Matcher:
    """A position in a compiled grammar, advanced by tokens. Not thread-safe."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: Sequence[int], rule_bytes: int) -> None:
        """Wraps a compiled grammar. rule_bytes: upper bound of its memory without the lexer."""
        self._matcher = matcher
        self._eos_token_ids = list(eos_token_ids)
        self._rule_bytes = rule_bytes
        self._check()

    def copy(self) -> Matcher:
        """Another matcher at the same position. Copies share the compiled grammar."""
        return Matcher(self._matcher.deep_copy(), self._eos_token_ids, self._rule_bytes)

    def num_bytes(self) -> int:
        """An upper bound of the compiled grammar's memory in bytes.

        Computed from the size of the grammar and llguidance's lexer cost, which only its error texts contain.
        """
        probe = self._matcher.deep_copy()
        probe.compute_bitmask()
        probe.consume_tokens([_NO_TOKEN])
        counted = _LEXER_COST.search(probe.get_error())
        lexer_bytes = _UNKNOWN_BYTES if counted is None else _BYTES_PER_COST * int(counted[1])
        return self._rule_bytes + lexer_bytes

    def allowed(self) -> TokenMask:
        """Tokens that may come next, [vocabulary] bool; end-of-sequence if and only if the text is complete. Raises
        GrammarError if the limits do not allow to compute it."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        mask: TokenMask = np.unpackbits(bits, bitorder="little").astype(np.bool_)
        mask[self._eos_token_ids] = self._matcher.is_accepting()
        return mask

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advances by these tokens. Raises GrammarError, now and at every later call, if the grammar does not allow
        them."""
        self._matcher.consume_tokens(list(token_ids))
        self._check()

    def end_token_mask(self) -> TokenMask:
        """A mask of the end-of-sequence tokens alone, [largest id + 1] bool."""
        mask: TokenMask = np.zeros(max(self._eos_token_ids) + 1, dtype=np.bool_)
        mask[self._eos_token_ids] = True
        return mask

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(reason_of(self._matcher.get_error().partition(_STATE)[0]))


def _limits() -> LLParserLimits:
    """Limits of one compilation and of one step. llguidance's default max_lexer_states would allow hundreds of
    megabytes."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=1000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=True,
    )
