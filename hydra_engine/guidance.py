"""What llguidance is asked, in one place: a grammar and a tokenizer file to which tokens may come next.

Used where a grammar is checked (a child of the frontend process) and where it is enforced (an instance), so that both
compile the same thing under the same limits. llguidance is imported when the first grammar comes. Does not know
requests, time limits or processes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hydra_engine.core.grammar import Grammar, Reasoning

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

TokenMask = npt.NDArray[np.bool_]  # [vocabulary of the tokenizer]

TOO_COMPLEX = "it is too complex; make it smaller or less nested"
NO_TEXT = "no text is in it"

_MAX_REASON_CHARS = 200
# White space between two JSON tokens. With more a model that was not trained on JSON writes nothing else; a schema may
# ask for more ("x-guidance").
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": " ?"}
_LITERALS = frozenset({"enum", "const", "default", "examples"})  # of a schema: values, which hold no expressions
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
            source = _source(grammar, self._tokenizer)
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


def _source(grammar: Grammar, tokenizer: LLTokenizer) -> str:
    """In llguidance's form. Raises ValueError."""
    grammars = [_form(grammar)]
    if grammar.reasoning is not None:
        grammars = [{"lark_grammar": _behind(grammar.reasoning, tokenizer)}, grammars[0] | {"name": "form"}]
    return json.dumps({"grammars": grammars})


def _form(grammar: Grammar) -> dict[str, object]:
    """Without what may come before it. Raises ValueError."""
    match grammar.kind:
        case "json_object":
            return _of_schema('{"type": "object"}')
        case "json_schema":
            for pattern in _patterns(json.loads(grammar.source)):
                _check_end(pattern)
            return _of_schema(grammar.source)
        case "regex":
            _check_end(grammar.source)
            return _of_regex(grammar.source)
        case "choice":
            return _of_regex("(?:" + "|".join(map(_literal, json.loads(grammar.source))) + ")")
        case "ebnf":
            return {"lark_grammar": _from_ebnf(grammar.source)}
        case _:
            return {"lark_grammar": grammar.source}


def _of_schema(schema: str) -> dict[str, object]:
    from llguidance import LLMatcher

    (form,) = json.loads(LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_OPTIONS))["grammars"]
    return form


def _of_regex(expression: str) -> dict[str, object]:
    from llguidance import LLMatcher

    (form,) = json.loads(LLMatcher.grammar_from_regex(expression))["grammars"]
    return form


def _behind(reasoning: Reasoning, tokenizer: LLTokenizer) -> str:
    """Lark's form of reasoning and `@form` behind it."""
    end = _special_token(reasoning.end, tokenizer)
    if end is None:  # the first occurrence of the text
        thought = ["thought: free", f"free[lazy]: /(?s:.)*{_literal(reasoning.end)}/"]
    else:  # the token; tokens of text that spell it would be read as the end, so they may not come
        thought = [f"thought: FREE {end}", f"FREE: /(?s:.)*/ & ~/(?s:.)*{_literal(reasoning.end)}(?s:.)*/"]
    opening = _special_token(reasoning.start, tokenizer) or f"/{_literal(reasoning.start)}/"
    rules = [
        "start: thought space @form" if reasoning.opened else f"start: ({opening} thought space)? @form",
        *thought,
        r"space: /[ \t\r\n]{0,16}/",
    ]
    return "\n".join(rules)


def _special_token(text: str, tokenizer: LLTokenizer) -> str | None:
    """Lark's form of the special token of this text. None: it is text."""
    ids = tokenizer.tokenize_str(text, parse_special=True)
    return f"<[{ids[0]}]>" if len(ids) == 1 and tokenizer.is_special_token(ids[0]) else None


def _check_end(expression: str) -> None:
    """llguidance lets a backslash at the end escape what it writes behind the expression itself. Raises ValueError."""
    if (len(expression) - len(expression.rstrip("\\"))) % 2:
        raise ValueError("the regular expression ends in a single backslash, which escapes nothing; write two of them")


def _patterns(schema: object) -> Iterator[str]:
    """All regular expressions of a schema."""
    stack = [schema]
    while stack:
        one = stack.pop()
        if isinstance(one, list):
            stack += one
        elif isinstance(one, dict):
            if isinstance(pattern := one.get("pattern"), str):
                yield pattern
            if isinstance(by_pattern := one.get("patternProperties"), dict):
                yield from by_pattern
            stack += [value for name, value in one.items() if name not in _LITERALS]


def _literal(text: str) -> str:
    """A regular expression for this text alone."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _from_ebnf(source: str) -> str:
    """llama.cpp's and SGLang's form as Lark's. Raises ValueError."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(source)
    except Exception as error:  # noqa: BLE001 - the converter raises Exception itself, and others where text ends early
        raise ValueError(str(error) or "it ends too early") from None


def _reason(text: str) -> str:
    """llguidance's words as part of one line; what it shows of its own state stays out."""
    if _LIMIT_WORDS.search(text):
        return TOO_COMPLEX
    if text.startswith("NoExtension"):
        return NO_TEXT
    inner = _INNER_ERROR.search(text)  # what the parser of regular expressions says, below a drawing
    words = inner[1] if inner else text.partition("\n")[0]
    return words if len(words) <= _MAX_REASON_CHARS else words[: _MAX_REASON_CHARS - 3] + "..."
