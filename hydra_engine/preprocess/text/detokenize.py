"""Incremental detokenization: emits whole characters only, and finds stop strings across tokens.

The pieces of a request, joined, equal the decoding of all its tokens at once, up to a stop string. Amortised constant
time per token. Does not know end-of-sequence tokens, messages or sampling.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from hydra_engine.core.logprobs import FIRST, SILENT
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.preprocess.text.tokenizer import REPLACEMENT, Tokenizer, name_of

# A character has at most four bytes: more tokens than this that end in no character never complete one.
_MAX_HELD_TOKENS = 8


class IncrementalDetokenizer:
    """The detokenizer of one request. Emits nothing after `stop_string` is set.

    Text of the first `min_tokens - 1` tokens takes no part in a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self.stop_string: str | None = None
        self.at_start = True  # no token has added to the text
        self._skipped = tokenizer.special_ids if sampling.skip_special_tokens else frozenset()
        self.spelling = Spelling(tokenizer, self._skipped)
        self._decoder: _Decoder = _ByteDecoder(tokenizer) if tokenizer.is_byte_level else _WindowDecoder(tokenizer)
        self._stops = StopMatcher(sampling.stop) if sampling.stop else None
        self._include_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these tokens complete; empty while a character or a stop string may be incomplete."""
        return "".join([self.decode_one(token_id) for token_id in token_ids])

    def decode_one(self, token_id: int) -> str:
        self._num_tokens += 1
        if token_id in self._skipped or self.stop_string is not None:
            return ""
        self.at_start = False
        text = self._decoder.decode(token_id)
        return text if self._stops is None else self._matched(text)

    def flush(self) -> str:
        """Returns the text held back, at the end of the request. May complete a stop string."""
        if self.stop_string is not None:
            return ""
        text = self._matched(self._decoder.flush())
        if self._stops is not None and self.stop_string is None:
            text += self._stops.flush()
        return text

    def _matched(self, text: str) -> str:
        if self._stops is None or not text or self._num_tokens < self._min_tokens:
            return text
        certain, self.stop_string = self._stops.match(text)
        if self.stop_string is not None and self._include_stop:
            certain += self.stop_string
        return certain


class Spelling:
    """The spelling of tokens in lists of log probabilities: (name, bytes that it adds to the text)."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped

    def __call__(self, token_id: int, place: int) -> tuple[str, bytes]:
        """`place`: flags of `core/logprobs.py`."""
        tokenizer = self._tokenizer
        if place & SILENT or token_id in self._skipped:
            return tokenizer.token_text(token_id), b""
        raw = tokenizer.first_bytes(token_id) if place & FIRST else tokenizer.token_bytes(token_id)
        return name_of(raw), raw


class StopMatcher:
    """A search for the stop string that ends first, however the text is split into pieces (Knuth-Morris-Pratt)."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._fallbacks = [_borders(stop) for stop in stops]
        self._matched = [0] * len(stops)  # per stop: the number of its characters at the end of the text
        self._held = ""
        self._first_chars = frozenset(stop[0] for stop in stops)

    def match(self, text: str) -> tuple[str, str | None]:
        """Returns (text that is in no stop string, the stop string if one is complete)."""
        if not self._held and self._first_chars.isdisjoint(text):
            return text, None
        text = self._held + text
        for position in range(len(self._held), len(text)):
            stop = self._step(text[position])
            if stop is not None:
                self._held = ""
                return text[: position + 1 - len(stop)], stop
        certain = len(text) - max(self._matched)
        self._held = text[certain:]
        return text[:certain], None

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str | None:
        """Advances every stop by one character. Returns the longest one that is now complete."""
        complete: str | None = None
        for index, stop in enumerate(self._stops):
            length, fallback = self._matched[index], self._fallbacks[index]
            while length and stop[length] != char:
                length = fallback[length - 1]
            length += stop[length] == char
            self._matched[index] = length
            if length == len(stop) and (complete is None or len(stop) > len(complete)):
                complete = stop
        return complete


@lru_cache(256)  # shared by the answers to one request
def _borders(stop: str) -> list[int]:
    """The length, per prefix, of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    for end in range(1, len(stop)):
        length = borders[end - 1]
        while length and stop[length] != stop[end]:
            length = borders[length - 1]
        borders[end] = length + (stop[length] == stop[end])
    return borders


class _Decoder(Protocol):
    def decode(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _ByteDecoder:
    """A decoder for byte-level vocabularies: emits a character when its bytes are complete."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._whole_texts = tokenizer.whole_texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._between = True  # no character is incomplete

    def decode(self, token_id: int) -> str:
        if self._between and (whole := self._whole_texts[token_id]) is not None:
            return whole
        text = self._utf8.decode(self._bytes_of(token_id))
        self._between = not self._utf8.getstate()[0]
        return text

    def flush(self) -> str:
        self._between = True
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """A decoder for other vocabularies: decodes the newest tokens after the ones before them and takes the difference.

    `tokens[:context]` has been emitted and is kept because decoders treat the first token of a text differently.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._tokens: list[int] = []
        self._context = 0

    def decode(self, token_id: int) -> str:
        self._tokens.append(token_id)
        text = self._new_text()
        incomplete = not text or text.endswith(REPLACEMENT)
        if incomplete and len(self._tokens) - self._context < _MAX_HELD_TOKENS:
            return ""
        self._tokens = self._tokens[self._context :]
        self._context = len(self._tokens)
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._tokens.clear()
        self._context = 0
        return text

    def _new_text(self) -> str:
        before = self._decode(self._tokens[: self._context], skip_special_tokens=False)
        return self._decode(self._tokens, skip_special_tokens=False)[len(before) :]
