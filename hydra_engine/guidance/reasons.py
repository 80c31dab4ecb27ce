"""Reasons why a grammar cannot be used: llguidance's errors as the second half of a sentence, for the grammar's author.

Leaves out llguidance's internal state, and what this package adds around a grammar.
"""

from __future__ import annotations

import re

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
    """The reason in one bounded line, of an error text of llguidance."""
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
