"""POST /v1/completions: its request and its answer, which is also the chunk of its stream, in OpenAI's field order.

Does not know how a request is run or when an answer is sent.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hydra_engine.core.logprobs import TextLogprob, without_candidates
from hydra_engine.core.sampling import MAX_CHOICES, MAX_LOGPROBS, MAX_TOKENS_LIMIT, SamplingParams
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.http.answers import Slices
from hydra_engine.server.protocol.common import CompletionHead, Metrics, PromptLogprobs, Usage, finite
from hydra_engine.server.protocol.fields import MAX_PROMPT_TOKENS, SamplingFields, Text, TokenId, TokenIds, sampling_of

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of this endpoint
MAX_PROMPTS = 128
MAX_ANSWERS = 512  # of all prompts together
_MAX_FIRST_BYTES = 1024  # bytes of a prompt's start that are compared with its first token


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """A request. `prompt` is a text or a list of token ids, or a list of these. With `echo` an answer begins with its
    prompt; with `max_tokens` 0 it is only the prompt."""

    prompt: Text | Annotated[list[TokenId | Text | TokenIds], Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)]
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS_LIMIT)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """The sampling of each prompt. If only the prompt is requested, one token is sampled and not sent. Raises
        InvalidRequest."""
        if self.best_of is not None and self.best_of != self.num_each:
            raise InvalidRequest("best_of must equal n, or be left out: all answers are sent", param="best_of")
        max_tokens = self.max_tokens
        if max_tokens == 0:
            if not self.echo:
                raise InvalidRequest("max_tokens 0 needs echo: true, which sends the prompt back", param="max_tokens")
            max_tokens = 1
        elif max_tokens is None and defaults.max_tokens is None:
            max_tokens = max(DEFAULT_COMPLETION_TOKENS, self.min_tokens or 0)
        prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            prompt_logprobs = max(self.logprobs, prompt_logprobs or 0)
        return sampling_of(
            self, defaults, max_tokens=max_tokens, logprobs=self.logprobs, prompt_logprobs=prompt_logprobs
        )

    @property
    def num_each(self) -> int:
        """Answers per prompt."""
        return self.n or 1

    @property
    def num_choices(self) -> int:
        several = not isinstance(self.prompt, str) and not any(isinstance(item, int) for item in self.prompt)
        return self.num_each * (len(self.prompt) if several else 1)

    @property
    def answer_fields(self) -> str:
        return "n or the number of prompts"

    @property
    def num_prompt_copies(self) -> int:
        return self.num_each

    @property
    def logprob_fields(self) -> tuple[str, ...]:
        return "prompt", "n", "max_tokens", "prompt_logprobs", "logprobs"

    @property
    def is_prompt_only(self) -> bool:
        return self.max_tokens == 0

    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [item for item in self.prompt if isinstance(item, int)]
        if len(ids) == len(self.prompt):
            return [ids]
        if ids:
            raise InvalidRequest(
                "prompt must be a text, a list of token ids, a list of texts or a list of lists of token ids",
                param="prompt",
            )
        if len(self.prompt) > MAX_PROMPTS:
            raise InvalidRequest(f"at most {MAX_PROMPTS} prompts are allowed in one request", param="prompt")
        if len(self.prompt) * self.num_each > MAX_ANSWERS:
            message = f"at most {MAX_ANSWERS} answers are given to one request; send fewer prompts or lower n"
            raise InvalidRequest(message, param="n")
        return [item for item in self.prompt if not isinstance(item, int)]


class TextLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of tokens; a prompt's first token has a text and no log probability."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TextChoice(msgspec.Struct, frozen=True):
    """An answer. The fields from `token_ids` on are vLLM's, present if requested."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class TextCompletion(CompletionHead, frozen=True):
    """A whole answer, or a chunk of a stream."""

    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: Metrics | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class Entries:
    """The log probabilities of consecutive tokens. None stands for a prompt's first token, whose id, name and bytes are
    `first`. `offset` is the position of their text, and advances as they are written."""

    entries: Sequence[TextLogprob | None]
    offset: TextOffset
    first: tuple[int, str, bytes] = (0, "", b"")

    def tokens(self) -> Iterator[tuple[int, str, bytes]]:
        for entry in without_candidates(self.entries):
            yield self.first if entry is None else (entry.token_id, entry.token, entry.raw)

    def offsets(self) -> Iterator[int]:
        return (self.offset.advance(raw) for _, _, raw in self.tokens())

    def logprobs(self) -> Iterator[float | None]:
        return (None if entry is None else finite(entry.logprob) for entry in without_candidates(self.entries))


def text_logprobs(parts: Sequence[Entries], slices: Slices, *, num_top: int, as_ids: bool = False) -> TextLogprobs:
    """Log probabilities in OpenAI's form: each entry has its `num_top` best tokens and itself. `as_ids` names tokens by
    their ids."""

    def name(token_id: int, text: str) -> str:
        return f"token_id:{token_id}" if as_ids else text

    def best(entry: TextLogprob | None) -> dict[str, float] | None:
        if entry is None:
            return None
        logprobs: dict[str, float] = {}
        if num_top:
            itself = (entry.token_id, entry.token, entry.logprob)
            for token_id, text, logprob in (*(other[:3] for other in entry.top[:num_top]), itself):
                logprobs.setdefault(name(token_id, text), finite(logprob))  # for equal texts the better one
        return logprobs

    count = sum(len(part.entries) for part in parts)
    each = chain.from_iterable
    return TextLogprobs(
        slices.defer(count, lambda: each(part.offsets() for part in parts)),
        slices.defer(count, lambda: each(part.logprobs() for part in parts)),
        slices.defer(count, lambda: (name(id, text) for id, text, _ in each(part.tokens() for part in parts))),
        slices.defer(count, lambda: map(best, each(part.entries for part in parts))),
    )


class TextOffset:
    """A counter of the characters before the next token. A token that continues a character has that character's
    offset."""

    def __init__(self, start: int = 0, beginning: str = "") -> None:
        """Starts at `start`. `beginning`: the text's first characters, if known; a tokenizer may add a token or a space
        before them, which does not count."""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = start
        self._beginning = beginning[:_MAX_FIRST_BYTES].encode("utf-8", "replace")

    def advance(self, raw: bytes) -> int:
        """Returns the offset of a token that adds these bytes."""
        offset = self._num_chars
        if self._beginning and raw:
            shown = next(
                place
                for place in range(len(raw) + 1)
                if self._beginning.startswith(raw[place : place + _MAX_FIRST_BYTES])
            )
            raw = raw[shown:]
            if raw:
                self._beginning = b""
        self._num_chars += len(self._utf8.decode(raw))
        return offset
