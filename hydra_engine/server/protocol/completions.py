"""POST /v1/completions: its request and its answer, which is also the chunk of its stream, in OpenAI's field order.

Does not know how a request is run or when an answer is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hydra_engine.core.outputs import TextLogprob
from hydra_engine.core.request import MAX_CHOICES, MAX_LOGPROBS, MAX_TOKENS_LIMIT, SamplingParams
from hydra_engine.errors import InvalidRequest
from hydra_engine.server.protocol.common import Metrics, PromptLogprobs, Usage, finite
from hydra_engine.server.protocol.fields import MAX_PROMPT_TOKENS, SamplingFields, Text, TokenId, TokenIds, sampling_of

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of this endpoint
MAX_PROMPTS = 128
MAX_ANSWERS = 512  # of all prompts


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """`prompt` is a text or a list of token ids, or a list of these. With `echo` an answer begins with its prompt;
    `max_tokens` 0 then asks for nothing else."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "chat_template_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "add_generation_prompt": (),
        "continue_final_message": (False,),
    }

    prompt: Text | Annotated[list[TokenId | Text | TokenIds], Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)]
    max_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS_LIMIT)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    def sampling(self) -> SamplingParams:
        """What each prompt is asked for. Where only the prompt is wanted, a token is drawn that nobody sees."""
        if self.best_of is not None and self.best_of != self.num_each:
            raise InvalidRequest("best_of must equal n, or be left out: all answers are sent", param="best_of")
        max_tokens = self.max_tokens
        if max_tokens == 0:
            if not self.echo:
                raise InvalidRequest("max_tokens 0 needs echo: true, which sends the prompt back", param="max_tokens")
            max_tokens = 1
        elif max_tokens is None:
            max_tokens = max(DEFAULT_COMPLETION_TOKENS, self.min_tokens or 0)
        prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            prompt_logprobs = max(self.logprobs, prompt_logprobs or 0)
        return sampling_of(self, max_tokens=max_tokens, logprobs=self.logprobs, prompt_logprobs=prompt_logprobs)

    @property
    def num_each(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def num_choices(self) -> int:
        several = not isinstance(self.prompt, str) and not any(isinstance(item, int) for item in self.prompt)
        return self.num_each * (len(self.prompt) if several else 1)

    @property
    def only_prompt(self) -> bool:
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
            told = f"at most {MAX_ANSWERS} answers are given to one request; send fewer prompts or lower n"
            raise InvalidRequest(told, param="n")
        return [item for item in self.prompt if not isinstance(item, int)]


class TextLogprobs(msgspec.Struct, frozen=True):
    """Of a prompt's first token nothing is known but the text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TextChoice(msgspec.Struct, frozen=True):
    """The fields from `token_ids` on are vLLM's; they are there where they were asked for."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


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


def text_logprobs(
    entries: Sequence[TextLogprob | None],
    offset: int,
    *,
    num_top: int,
    as_ids: bool = False,
    first: tuple[int, str] = (0, ""),
) -> TextLogprobs:
    """`offset`: how many characters of the answer come before the first entry. Each entry has its `num_top` best tokens
    and itself. None stands for a prompt's first token, `first` as (id, text); `as_ids` names tokens by their ids."""

    def name(token_id: int, text: str) -> str:
        return f"token_id:{token_id}" if as_ids else text

    told = TextLogprobs([], [], [], [])
    for entry in entries:
        token_id, text = first if entry is None else (entry.token_id, entry.token)
        told.text_offset.append(offset)
        told.tokens.append(name(token_id, text))
        told.token_logprobs.append(None if entry is None else finite(entry.logprob))
        best: dict[str, float] = {}
        if entry is not None and num_top:
            itself = (entry.token_id, entry.token, entry.logprob)
            for other_id, other_text, logprob in (*entry.top[:num_top], itself):
                best.setdefault(name(other_id, other_text), finite(logprob))  # of equal texts the better one
        told.top_logprobs.append(None if entry is None else best)
        offset += len(text)
    return told
