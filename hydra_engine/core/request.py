"""A request as the engine accepts it: immutable, validated, made of token ids. Strings stay in the frontend process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from hydra_engine.core.grammar import Grammar
from hydra_engine.core.ids import RequestId
from hydra_engine.core.media import ImageItem
from hydra_engine.core.outputs import FinishReason
from hydra_engine.errors import InvalidRequest

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_TOKENS_LIMIT = 1 << 20
MAX_CHOICES = 64
MAX_BIASED_TOKENS = 1024
MAX_ALLOWED_TOKENS = 1 << 16
MAX_LISTED_TOKENS = 1 << 20  # of logit_bias and allowed_token_ids, in all answers of one request


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. Field names and meanings are those of the OpenAI API and of vLLM's extras.

    temperature 0 is greedy. `seed` None lets the engine draw one; with a seed the text depends on nothing but the
    request. `max_tokens` None means the model's default, and where it has none the rest of the context. `logprobs`
    None: none; k >= 0: the chosen token's and the k best ones'; `prompt_logprobs` the same for the tokens of the
    prompt. `stop` strings are matched on text in the frontend process and never appear in the output. `n` answers to
    one prompt, which is prefilled once; answer i draws with seed + i. `logit_bias` (token id -> what is added to its
    logit; a mapping or pairs), `allowed_token_ids` (empty: all) and `grammar` say which tokens may come. Raises
    `InvalidRequest` naming the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    n: int = 1
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        else:
            object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(dict.fromkeys(self.stop_token_ids)))
        object.__setattr__(self, "allowed_token_ids", tuple(dict.fromkeys(self.allowed_token_ids)))
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        object.__setattr__(self, "logit_bias", tuple((token, value) for token, value in pairs))
        for name, low, high in _RANGES:
            _check_range(name, getattr(self, name), low, high)
        self._check_stops()
        self._check_tokens()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens must not exceed max_tokens", param="min_tokens")

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequest(f"at most {MAX_STOPS} stop strings are allowed", param="stop")
        if any(not isinstance(s, str) or not s or len(s) > MAX_STOP_CHARS for s in self.stop):
            raise InvalidRequest(f"each stop string must have 1 to {MAX_STOP_CHARS} characters", param="stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids are allowed", param="stop_token_ids")
        _check_ids("stop_token_ids", self.stop_token_ids)

    def _check_tokens(self) -> None:
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise InvalidRequest(f"logit_bias may name at most {MAX_BIASED_TOKENS} tokens", param="logit_bias")
        _check_ids("logit_bias token ids", [token for token, _ in self.logit_bias])
        for _, value in self.logit_bias:
            _check_range("logit_bias", value, -100.0, 100.0)
        if len(self.allowed_token_ids) > MAX_ALLOWED_TOKENS:
            raise InvalidRequest(
                f"at most {MAX_ALLOWED_TOKENS} allowed_token_ids are allowed", param="allowed_token_ids"
            )
        _check_ids("allowed_token_ids", self.allowed_token_ids)
        self.check_answers(self.n, "n")

    def check_answers(self, num_answers: int, fields: str) -> None:
        """Raises InvalidRequest where the lists of tokens are too long for so many answers, each of which has them
        while it runs. `fields`: what says how many answers there are."""
        num_each = len(self.allowed_token_ids) + len(self.logit_bias)
        if num_answers * num_each > MAX_LISTED_TOKENS:
            raise InvalidRequest(
                f"allowed_token_ids and logit_bias name {num_each} tokens for each of {num_answers} answers; at most "
                f"{MAX_LISTED_TOKENS} are taken in all: name fewer, or lower {fields}",
                param="allowed_token_ids",
            )

    def of_one(self, *, scores_prompt: bool) -> SamplingParams:
        """The parameters of one of several answers."""
        one = copy(self)  # whose fields are checked
        object.__setattr__(one, "n", 1)
        if not scores_prompt:
            object.__setattr__(one, "prompt_logprobs", None)
        return one

    def asked(self, **given: Any) -> SamplingParams:
        """What a request that gives these fields is sampled with where this object holds the defaults. Of `max_tokens`
        the default stays out: it yields to what the context has room for, which the preprocessor knows; and that of
        `min_tokens` yields to a `max_tokens` that is given."""
        if (most := given.get("max_tokens")) is not None and "min_tokens" not in given and most < self.min_tokens:
            given["min_tokens"] = most
        return replace(self, **({"max_tokens": None} | given))

    @property
    def chosen(self) -> dict[str, Any]:
        """The fields that differ from the API's own defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_history(self) -> bool:
        """Penalties and grammars look at the tokens so far."""
        return self.penalises or self.grammar is not None


# name, lowest, highest; None is allowed where the default is None. ints must be ints, bools are not numbers.
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 2.0),
    ("top_p", 0.0, 1.0),
    ("top_k", -1, 1 << 20),
    ("min_p", 0.0, 1.0),
    ("seed", -(1 << 63), (1 << 64) - 1),
    ("max_tokens", 1, MAX_TOKENS_LIMIT),
    ("min_tokens", 0, MAX_TOKENS_LIMIT),
    ("repetition_penalty", 0.01, 10.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("logprobs", 0, MAX_LOGPROBS),
    ("n", 1, MAX_CHOICES),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
_INTEGERS = frozenset(
    {"top_k", "seed", "max_tokens", "min_tokens", "logprobs", "stop_token_ids"}
    | {"n", "prompt_logprobs", "allowed_token_ids", "logit_bias token ids"}
)
_MAX_TOKEN_ID = (1 << 31) - 1
_OPTIONAL = frozenset({"seed", "max_tokens", "logprobs", "prompt_logprobs"})


def _check_ids(name: str, tokens: Sequence[int]) -> None:
    """Each is looked at alone only where all together do not say that they are right."""
    if tokens and (set(map(type, tokens)) != {int} or min(tokens) < 0 or max(tokens) > _MAX_TOKEN_ID):
        for token in tokens:
            _check_range(name, token, 0, _MAX_TOKEN_ID)


def _check_range(name: str, value: object, low: float, high: float) -> None:
    if value is None and name in _OPTIONAL:
        return
    kind = "an integer" if name in _INTEGERS else "a number"
    accepted = int if name in _INTEGERS else (int, float)
    if isinstance(value, bool) or not isinstance(value, accepted) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be {kind} between {low} and {high}", param=name)


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What a model's authors say of single tokens, whoever asks: those that never come, those that do not come first,
    and those of which one comes last, where an answer reaches its `max_new_tokens`. A request that says by
    `allowed_token_ids` which tokens may come is asked alone."""

    never: tuple[int, ...] = ()
    not_first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()


NO_RULES = TokenRules()


class GenerationDefaults(NamedTuple):
    """What holds for requests besides their `SamplingParams`. `max_tokens` yields to the room of a context."""

    max_tokens: int | None = None
    rules: TokenRules = NO_RULES


NO_DEFAULTS = GenerationDefaults()


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency limits in seconds; None: no limit, or in what a caller asks for the engine's."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def with_defaults(self, ttft_s: float | None, tpot_s: float | None) -> Slo:
        """Its own limits, and these where it has none."""
        return Slo(
            self.ttft_s if self.ttft_s is not None else ttft_s,
            self.tpot_s if self.tpot_s is not None else tpot_s,
        )


@dataclass(frozen=True, slots=True)
class Resumed:
    """The tokens of earlier attempts: when the first and the latest came, how many gaps between them were late, and the
    kind of `DelayCause` for the time until the attempt that goes on behind them."""

    first_token_s: float
    last_token_s: float
    late_gaps: int
    blame: str


@dataclass(frozen=True, slots=True)
class Request:
    """Everything an instance needs to know. `prompt_token_ids` holds placeholders where images are.

    `arrival_s` is the frontend's monotonic stamp. `slo` has the limits that hold for it, its own or the engine's: an
    instance asks nowhere else. `max_new_tokens` is resolved: never None, prompt plus it fits the
    context. `seed` is resolved too. `rope_delta` is what multimodal rotary positions add to the place of a token behind
    the prompt; 0 elsewhere.

    `id` names one attempt to serve what a user asked for; an attempt that replaces a lost one has an id of its own, so
    nothing that an old one still sends is taken for the new one's. `age` stays: of two requests on one node the one
    with the smaller age is older everywhere. `generated_token_ids` are what earlier attempts have sampled; they count
    among the `max_new_tokens` and are prefilled behind the prompt.
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
    client: str = ""  # whose it is, for fair turns
    rope_delta: int = 0
    priority: int = 0  # the smaller one goes first
    age: int = 0
    generated_token_ids: tuple[int, ...] = ()
    resumed: Resumed | None = None  # where there are such tokens
    preempted: bool = False  # an earlier attempt ran out of blocks: this one starts only with room for all it can need

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end it. Under a grammar end-of-sequence comes only where the text is complete, and always ends:
        with `ignore_eos` when nothing else may come."""
        ignores = self.sampling.ignore_eos and self.sampling.grammar is None
        return frozenset((*(() if ignores else self.eos_token_ids), *self.sampling.stop_token_ids))

    @property
    def max_total_tokens(self) -> int:
        """The prompt and every token that it may generate."""
        return len(self.prompt_token_ids) + self.max_new_tokens

    def finish_reason(self, num_generated: int, token_id: int) -> FinishReason | None:
        """What its latest token, `token_id`, means for it when that is the `num_generated`th: None, that more come."""
        if token_id in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_generated >= self.max_new_tokens else None

    @property
    def num_media(self) -> int:
        """Pictures and videos, as the user counts them."""
        return len({image.source for image in self.images})

    @property
    def num_image_tokens(self) -> int:
        return sum(image.num_tokens for image in self.images)
