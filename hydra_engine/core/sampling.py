"""Sampling parameters of a request, checked, and the token rules and defaults of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from types import UnionType
from typing import Any, NamedTuple

from hydra_engine.core.grammar import Grammar
from hydra_engine.errors import InvalidRequest

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_TOKENS_LIMIT = 1 << 20
MAX_CHOICES = 64
MAX_BIASED_TOKENS = 1024
MAX_ALLOWED_TOKENS = 1 << 16
MAX_LISTED_TOKENS = 1 << 20  # entries of logit_bias and allowed_token_ids, over all answers of one request


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The sampling parameters of a request, with the names and meanings of the OpenAI API and vLLM.

        >>> SamplingParams(temperature=0.0, max_tokens=20)
        >>> SamplingParams(temperature=0.7, top_p=0.9, seed=1, n=4, stop=("END",))

    - temperature: 0 to 2, default 1.0. 0 is greedy.
    - top_p, min_p: 0 to 1, defaults 1.0 and 0.0 (off). top_k: 0 or -1 (off) or the number of tokens, default 0.
    - seed: a 64-bit integer; with a seed the text depends on the request alone. None (default) or -1: the engine draws
        one.
    - max_tokens: 1 to 1,048,576. None (default): the model's default or, without one, the rest of the context.
    - min_tokens: the fewest tokens before the text may end, stop strings included, default 0; at most max_tokens. A
        grammar that allows nothing more ends it earlier.
    - stop: at most 16 strings that end the text, removed from it unless `include_stop_str_in_output`.
    - stop_token_ids: at most 64 token ids that end the text. ignore_eos: do not end at the model's own, default False;
        with a grammar these are then sampled, and end the text, only if the grammar allows no other token.
    - repetition_penalty: 0.01 to 10, default 1.0 (off). presence_penalty, frequency_penalty: -2 to 2, default 0.0.
    - logprobs: 0 to 20, log probabilities of the chosen token and of that many best ones. None (default): none.
    - prompt_logprobs: the same for the tokens of the prompt.
    - skip_special_tokens: leave special tokens out of the text, default True.
    - n: 1 to 64 answers to the prompt, which is prefilled once; answer i samples with seed + i. Default 1.
    - logit_bias: values from -100 to 100 that are added to logits, by token id: a mapping or pairs, at most 1024.
    - allowed_token_ids: the only tokens that may be sampled, at most 65,536; empty (default): all.
    - grammar: the language that the output must be in, a `Grammar`. None (default): any text.

    None for a list is an empty one. Raises `InvalidRequest`, naming the field, for a wrong type, a number out of range
    and too many entries.
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
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _listed("stop", self.stop))
        for name in ("stop_token_ids", "allowed_token_ids"):
            token_ids = _listed(name, getattr(self, name))
            _check_ids(name, token_ids)
            object.__setattr__(self, name, tuple(dict.fromkeys(token_ids)))
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))
        for name, kind, words in _KINDS:
            if not isinstance(value := getattr(self, name), kind):
                raise InvalidRequest(f"{name} must be {words}, not {type(value).__name__}", param=name)
        for name, low, high in _RANGES:
            _check_range(name, getattr(self, name), low, high)
        self._check_stops()
        self._check_tokens()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens must not exceed max_tokens", param="min_tokens")

    def _check_stops(self) -> None:
        """Raises InvalidRequest for invalid or too many stop strings or stop token ids."""
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequest(f"at most {MAX_STOPS} stop strings are allowed", param="stop")
        if any(not isinstance(s, str) or not s or len(s) > MAX_STOP_CHARS for s in self.stop):
            raise InvalidRequest(f"each stop string must have 1 to {MAX_STOP_CHARS} characters", param="stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids are allowed", param="stop_token_ids")

    def _check_tokens(self) -> None:
        """Raises InvalidRequest for invalid or too many entries of `logit_bias` and `allowed_token_ids`."""
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise InvalidRequest(f"logit_bias may name at most {MAX_BIASED_TOKENS} tokens", param="logit_bias")
        _check_ids("logit_bias token ids", [token for token, _ in self.logit_bias])
        for _, value in self.logit_bias:
            _check_range("logit_bias", value, -100.0, 100.0)
        if len(self.allowed_token_ids) > MAX_ALLOWED_TOKENS:
            raise InvalidRequest(
                f"at most {MAX_ALLOWED_TOKENS} allowed_token_ids are allowed", param="allowed_token_ids"
            )
        self.check_answers(self.n, "n")

    def check_answers(self, num_answers: int, fields: str) -> None:
        """Raises InvalidRequest if `num_answers` answers, each with its own copy of `allowed_token_ids` and
        `logit_bias`, have more than `MAX_LISTED_TOKENS` entries together. `fields`: names of the fields that set the
        number of answers, for the message."""
        num_each = len(self.allowed_token_ids) + len(self.logit_bias)
        if num_answers * num_each > MAX_LISTED_TOKENS:
            raise InvalidRequest(
                f"allowed_token_ids and logit_bias name {num_each} tokens for each of {num_answers} answers; at most "
                f"{MAX_LISTED_TOKENS} are taken in all: name fewer, or lower {fields}",
                param="allowed_token_ids",
            )

    def for_one_answer(self, *, scores_prompt: bool) -> SamplingParams:
        """A copy with `n` = 1 for one of the `n` answers, without `prompt_logprobs` unless `scores_prompt`. The seed is
        unchanged: the caller gives each answer its own."""
        one = copy(self)  # fields are checked already
        object.__setattr__(one, "n", 1)
        if not scores_prompt:
            object.__setattr__(one, "prompt_logprobs", None)
        return one

    def with_fields(self, **given: Any) -> SamplingParams:
        """The parameters of a request that gives these fields, with this object as the defaults. Raises InvalidRequest.

        The default of `max_tokens` is replaced by None: the preprocessor applies it, limited by the context. The
        default of `min_tokens` is lowered to a smaller `max_tokens` of the request.
        """
        max_tokens = given.get("max_tokens")
        if isinstance(max_tokens, int) and "min_tokens" not in given:
            given["min_tokens"] = min(max_tokens, self.min_tokens)
        return replace(self, **({"max_tokens": None} | given))

    @property
    def non_default_fields(self) -> dict[str, Any]:
        """Values of the fields that differ from the defaults of this class, by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    @property
    def greedy(self) -> bool:
        """True if the token with the largest logit is chosen: temperature 0."""
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        """True if a repetition, presence or frequency penalty is on."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_history(self) -> bool:
        """True if the choice of a token depends on which tokens came before: with penalties or a grammar."""
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
_KINDS: tuple[tuple[str, type | UnionType, str], ...] = (
    ("ignore_eos", bool, "True or False"),
    ("skip_special_tokens", bool, "True or False"),
    ("include_stop_str_in_output", bool, "True or False"),
    ("grammar", Grammar | None, "Grammar(...)"),
)
_MAX_TOKEN_ID = (1 << 31) - 1
_OPTIONAL = frozenset({"seed", "max_tokens", "logprobs", "prompt_logprobs"})


def _listed(name: str, values: Any) -> tuple[Any, ...]:
    """The entries of a list; none for None, which is vLLM's default. Raises InvalidRequest for anything but a list."""
    if values is None:
        return ()
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise InvalidRequest(f"{name} must be a list, not {type(values).__name__}", param=name)
    return tuple(values)


def _pairs(logit_bias: Any) -> tuple[tuple[int, float], ...]:
    pairs = _listed("logit_bias", logit_bias.items() if isinstance(logit_bias, Mapping) else logit_bias)
    try:
        return tuple((token, value) for token, value in pairs)
    except (TypeError, ValueError) as error:
        raise InvalidRequest("logit_bias must have a number for each token id", param="logit_bias") from error


def _check_ids(name: str, tokens: Sequence[int]) -> None:
    """Raises InvalidRequest unless all tokens are integers from 0 to `_MAX_TOKEN_ID`. Checks them one by one only to
    find the invalid one."""
    if tokens and (set(map(type, tokens)) != {int} or min(tokens) < 0 or max(tokens) > _MAX_TOKEN_ID):
        for token in tokens:
            _check_range(name, token, 0, _MAX_TOKEN_ID)


def _check_range(name: str, value: object, low: float, high: float) -> None:
    """Raises InvalidRequest unless `value` is a number from `low` to `high`, an integer for a field in `_INTEGERS`, or
    None for a field in `_OPTIONAL`."""
    if value is None and name in _OPTIONAL:
        return
    kind = "an integer" if name in _INTEGERS else "a number"
    accepted = int if name in _INTEGERS else (int, float)
    if isinstance(value, bool) or not isinstance(value, accepted) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be {kind} between {low} and {high}", param=name)


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Rules for token ids from the model's authors: those in `never` are not sampled, those in `not_first` not as the
    first token, and if `last` is not empty, an answer that reaches its `max_new_tokens` has one of those as its last
    token. They do not apply to a request with `allowed_token_ids`. Under a grammar `last` does not apply, nor do the
    others where the grammar allows no other token."""

    never: tuple[int, ...] = ()
    not_first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()


NO_RULES = TokenRules()


class GenerationDefaults(NamedTuple):
    """Defaults of a model besides its `SamplingParams`. `max_tokens` is raised to a request's `min_tokens` and limited
    by the rest of the context."""

    max_tokens: int | None = None
    rules: TokenRules = NO_RULES


NO_DEFAULTS = GenerationDefaults()
