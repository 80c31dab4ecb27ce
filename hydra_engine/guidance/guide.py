"""The interface to llguidance: compiles a grammar for a tokenizer file, tells which tokens may come next, and words
llguidance's errors for the grammar's author.

Used where a grammar is checked (a child of the frontend process) and where it is enforced (an instance), so that both
compile the same thing under the same limits. A tokenizer makes a special token of each text that spells one; text that
a grammar forces is meant as text, `<s>` in HTML for example, so it is made of other tokens here. Reasons leave out
llguidance's internal state, and what this package adds around a grammar. llguidance is imported with the first grammar.
Does not know requests, time limits or processes.
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
    """Returns (tokenizer, special tokens by text). End-of-sequence ids that the tokenizer lacks are ignored. Raises
    ValueError if llguidance cannot read it."""
    from llguidance import LLTokenizer

    plain = PlainTokenizer(file, eos_token_ids)
    tokenizer = LLTokenizer(plain, eos_token=plain.eos_token_ids)  # type: ignore[arg-type]
    plain.tokens.clear()  # the tokenizer has copied them
    return tokenizer, plain.specials


TOO_COMPLEX = "it is too complex; make it smaller or less nested"
NO_TEXT = "no text fits it"
MAX_REASON_CHARS = 200

_INNER_ERROR = re.compile(r"^error: (.*)", re.MULTILINE)
# llguidance's words for a limit of its own that was reached.
_LIMIT_WORDS = re.compile(r"fuel|limits\.|too many|too large|too complex|current row has|lexer error:", re.IGNORECASE)
_NAMED = re.compile(r"Token range end|^Value ")  # exceptions, which name a number of the grammar
_PHRASES = [
    (re.compile(pattern, re.DOTALL), words)
    for pattern, words in (
        (r"^Unimplemented keys: \[(?P<keys>.*)\]", r"these keywords of its schema are not supported: \g<keys>"),
        (
            r"^oneOf constraints are not supported.*",
            "oneOf is supported only where no value can fit two of its branches; use anyOf, or branches that differ by "
            "a const",
        ),
        (r"^Unsatisfiable schema: ", "no value fits the schema: "),
        (r"^Expected f64 for '(\w+)', got (.*)", r"\1 must be a number, not \2"),
        (
            r"^Expected positive integer for '(\w+)', got (.*)",
            r"\1 must be a whole number that is not negative, not \2",
        ),
        (r"^Expected (\w+) for '(\w+)', got (.*)", r"\2 must be of the type \1, not \3"),
        (r"^Unknown format: (.*)", r"the format \1 is not supported; leave it out, or use a pattern"),
        (r"^patternProperty regexes (.*) are not disjoint", r"the patternProperties \1 could match the same name"),
        (r"^invalid multiple of", "multipleOf must be greater than 0"),
        (r"^unknown field (.*)", r"x-guidance has the unknown field \1"),
        (
            r".*lookarounds not supported yet.*",
            r"look-around is not supported, nor are \\b and, inside of the expression, ^ and $",
        ),
        (r".*Token range end too large.*", "this model has no token of such an id"),
        (r"^Value (.*) for '(.*)' is too large", r"\2 must be smaller than \1"),
        (r"^(?:at )?(\d+)\((\d+)\): lexer error", r"line \1, column \2: nothing in Lark's form begins like this"),
        (r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: "),
        (r"[;,] (?:following (?:special tokens )?are available|expected one of).*", ""),
    )
]


def reason_of(text: str) -> str:
    """The reason of an error of llguidance, whose message is `text`, in one line of bounded length."""
    if _LIMIT_WORDS.search(text) and not _NAMED.search(text):
        return TOO_COMPLEX
    if text.startswith("NoExtension"):
        return NO_TEXT
    inner = _INNER_ERROR.search(text)  # the regex parser's error, below its drawing
    return rephrase(inner[1] if inner else text)


def rephrase(text: str) -> str:
    words = text.partition("\n")[0]
    for pattern, phrase in _PHRASES:
        words = pattern.sub(phrase, words)
    return words if len(words) <= MAX_REASON_CHARS else words[: MAX_REASON_CHARS - 3] + "..."


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


def check(grammar: Grammar) -> None:
    """Checks what can be checked without a tokenizer. Raises GrammarError."""
    from llguidance import LLMatcher

    try:
        error = LLMatcher.validate_grammar(source_of(grammar, {}), limits=_limits())
    except ValueError as invalid:
        raise GrammarError(rephrase(str(invalid))) from None
    if error:
        raise GrammarError(reason_of(error))


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
