"""A request as the engine accepts it: immutable, validated, made of token ids. Strings stay in the frontend process.

Its images are spans of the prompt: what the vision lane encodes at once is a picture, one tile of a picture, or one
temporal patch of a video, as the model family divides the user's media. Every span is called an image here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hydra_engine.core.ids import ImageDigest, RequestId
from hydra_engine.core.outputs import FinishReason
from hydra_engine.core.sampling import NO_RULES, SamplingParams, TokenRules


@dataclass(frozen=True, slots=True)
class RopeSpan:
    """Multimodal rotary positions of one span, for models that have them.

    Token i of the span has position (time, row + i // columns, column + i % columns). Text behind the span, up to the
    next one or the end of the prompt, has on all three axes its place in the prompt plus `text_delta`.
    """

    time: int
    row: int
    column: int
    columns: int
    text_delta: int


@dataclass(frozen=True, slots=True)
class ImageItem:
    """An image span of a prompt: prompt tokens [start, start + num_tokens) are placeholders for its features.

    `digest` covers everything that determines the features (source, part of it, identity of the processor), so equal
    digests mean equal features. `num_patches`: patches that the vision tower computes, the unit of the image budget.
    """

    digest: ImageDigest
    width: int  # pixels of the user's picture, upright
    height: int
    num_patches: int
    num_tokens: int
    start: int
    # (time, rows, columns) in patches of each picture that the tower gets, or as the family's spec defines it.
    grid: tuple[int, int, int]
    rope: RopeSpan | None = None
    bidirectional: bool = False  # its tokens attend to each other in both directions: no prefill chunk ends inside it
    source: int = 0  # index of its picture or video among the request's media

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency limits in seconds. None: no limit; in a caller's request: the engine's limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def with_defaults(self, ttft_s: float | None, tpot_s: float | None) -> Slo:
        """A copy with the given limits, in seconds, in place of None."""
        return Slo(
            self.ttft_s if self.ttft_s is not None else ttft_s,
            self.tpot_s if self.tpot_s is not None else tpot_s,
        )


@dataclass(frozen=True, slots=True)
class Resumed:
    """Facts about earlier attempts: times of the first and the latest token, the number of late gaps between them,
    and the kind of `DelayCause` for the time until the next attempt's first token."""

    first_token_s: float
    last_token_s: float
    late_gaps: int
    blame: str


@dataclass(frozen=True, slots=True)
class Request:
    """A request as an instance receives it. `prompt_token_ids` has placeholders where images are.

    `arrival_s`: the frontend's monotonic time. `slo`: the limits that apply, the request's own or the engine's.
    `max_new_tokens` and `seed` are resolved: never None, and prompt plus `max_new_tokens` fit the context.
    `rope_delta`: offset of multimodal rotary positions behind the prompt; 0 for other models.

    `id` names one attempt to serve a user's request; an attempt after a lost instance has a new id, so that late
    messages of the old one are not taken for the new one's. `arrival_index` is the same for all attempts: the
    request with the smaller one is older on every instance of the node. `generated_token_ids`: tokens sampled by
    earlier attempts; they count towards `max_new_tokens` and are prefilled behind the prompt.
    """

    id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_new_tokens: int
    seed: int
    arrival_s: float
    images: tuple[ImageItem, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    rules: TokenRules = NO_RULES
    slo: Slo = field(default_factory=Slo)
    cache_salt: str = ""
    client: str = ""  # the client's key, for fair turns
    rope_delta: int = 0
    priority: int = 0  # the smaller one goes first
    arrival_index: int = 0
    generated_token_ids: tuple[int, ...] = ()
    resumed: Resumed | None = None  # set if there are such tokens
    preempted: bool = False  # an earlier attempt was: this one starts only with free blocks for all it can need

    @property
    def num_prompt(self) -> int:
        """Number of prompt tokens, placeholders of images included."""
        return len(self.prompt_token_ids)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids of the tokens that end the request: `stop_token_ids` and end-of-sequence, the latter not with
        `ignore_eos` unless there is a grammar. A grammar allows end-of-sequence only where the text is complete, with
        `ignore_eos` only if nothing else is allowed."""
        ignores = self.sampling.ignore_eos and self.sampling.grammar is None
        return frozenset((*(() if ignores else self.eos_token_ids), *self.sampling.stop_token_ids))

    @property
    def max_total_tokens(self) -> int:
        """Maximum number of tokens of prompt and answer."""
        return len(self.prompt_token_ids) + self.max_new_tokens

    def finish_reason(self, num_generated: int, token_id: int) -> FinishReason | None:
        """Returns why token `token_id`, the `num_generated`th, ends the request (STOP or LENGTH); None if it does not.
        Stop strings are the frontend's."""
        if token_id in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_generated >= self.max_new_tokens else None

    @property
    def num_media(self) -> int:
        """Number of pictures and videos, as the user counts them."""
        return len({image.source for image in self.images})

    @property
    def num_image_tokens(self) -> int:
        return sum(image.num_tokens for image in self.images)
