"""POST /v1/completions: its request and its answer, which is also the chunk of its stream, in OpenAI's field order.

Does not know how a request is run or when an answer is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hydra_engine.core.outputs import TextLogprob
from hydra_engine.core.request import MAX_LOGPROBS, SamplingParams
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.protocol.common import Metrics, Usage, finite
from hydra_engine.server.protocol.fields import MAX_PROMPT_TOKENS, SamplingFields, TokenId, TokenIds, sampling_of

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of this endpoint


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """`prompt` may be a list with one text or one list of token ids in it, as OpenAI's batch form."""

    prompt: str | Annotated[list[TokenId | str | TokenIds], Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    def sampling(self) -> SamplingParams:
        max_tokens = self.max_tokens
        if max_tokens is None:
            max_tokens = max(DEFAULT_COMPLETION_TOKENS, self.min_tokens or 0)
        return sampling_of(self, max_tokens=max_tokens, logprobs=self.logprobs)

    def one_prompt(self) -> str | list[int]:
        if isinstance(self.prompt, str):
            return self.prompt
        ids = [item for item in self.prompt if isinstance(item, int)]
        if len(ids) == len(self.prompt):
            return ids
        if len(self.prompt) > 1:
            raise InvalidRequest("several prompts in one request are not supported; send one each", param="prompt")
        only = self.prompt[0]
        assert not isinstance(only, int)
        return only


class TextLogprobs(msgspec.Struct, frozen=True):
    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class TextCompletion(msgspec.Struct, frozen=True):
    """Whole answer and chunk of a stream alike."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: Metrics | UnsetType = UNSET


def text_logprobs(entries: Sequence[TextLogprob], offset: int) -> TextLogprobs:
    """`offset`: how many characters of the answer come before the first entry."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.token)
    return TextLogprobs(
        text_offset=offsets,
        token_logprobs=[finite(entry.logprob) for entry in entries],
        tokens=[entry.token for entry in entries],
        top_logprobs=[{text: finite(logprob) for _, text, logprob in entry.top} for entry in entries],
    )
