"""Sampling parameters of a request, checked, and the token rules and defaults of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

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


def _parameter(
    default: Any, help: str, low: float | None = None, high: float | None = None, *, flag: bool = True
) -> Any:
    """Declares a parameter. `low`, `high`: bounds of a number. `flag`: commands have it as a flag."""
    return field(default=default, metadata={"help": help, "low": low, "high": high, "flag": flag})


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

    temperature: float = _parameter(1.0, "0: always the most likely token", 0.0, 2.0)
    top_p: float = _parameter(1.0, "sample from the smallest set of tokens with this total probability", 0.0, 1.0)
    top_k: int = _parameter(0, "sample from this many most likely tokens; 0: all", -1, 1 << 20)
    min_p: float = _parameter(0.0, "sample from tokens at least this likely relative to the most likely one", 0.0, 1.0)
    seed: int | None = _parameter(None, "same seed, same text", -(1 << 63), (1 << 64) - 1)
    max_tokens: int | None = _parameter(None, "most new tokens", 1, MAX_TOKENS_LIMIT)
    min_tokens: int = _parameter(0, "fewest new tokens before the text may end", 0, MAX_TOKENS_LIMIT)
    stop: tuple[str, ...] = _parameter((), "stop string; can be repeated")
    stop_token_ids: tuple[int, ...] = _parameter((), "token ids that end the text", flag=False)
    ignore_eos: bool = _parameter(False, "do not end at the model's end of a text")
    repetition_penalty: float = _parameter(1.0, "above 1: repeated tokens become less likely", 0.01, 10.0)
    presence_penalty: float = _parameter(0.0, "-2 to 2; lowers tokens that have occurred", -2.0, 2.0)
    frequency_penalty: float = _parameter(0.0, "-2 to 2; lowers tokens by how often they have occurred", -2.0, 2.0)
    logprobs: int | None = _parameter(None, "log probabilities of this many best tokens", 0, MAX_LOGPROBS, flag=False)
    skip_special_tokens: bool = _parameter(True, "leave special tokens out of the text", flag=False)
    include_stop_str_in_output: bool = _parameter(False, "keep the stop string in the text", flag=False)
    n: int = _parameter(1, "answers to the prompt", 1, MAX_CHOICES, flag=False)
    logit_bias: tuple[tuple[int, float], ...] = _parameter((), "added to logits, by token id", flag=False)
    allowed_token_ids: tuple[int, ...] = _parameter((), "the only tokens that may be sampled; empty: all", flag=False)
    prompt_logprobs: int | None = _parameter(
        None, "log probabilities of the prompt's tokens and of this many best ones", 0, MAX_LOGPROBS, flag=False
    )
    grammar: Grammar | None = field(
        default=None, metadata={"help": "the language that the output must be in", "flag": False}
    )

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


class Parameter(NamedTuple):
    """A field of SamplingParams. `kind` is int, float, bool, tuple or Grammar; None is a value if `optional`."""

    name: str
    kind: type
    default: Any
    help: str
    optional: bool
    low: float | None = None
    high: float | None = None
    flag: bool = True


def _parameters() -> Iterator[Parameter]:
    hints = get_type_hints(SamplingParams)
    for f in fields(SamplingParams):
        kinds = [kind for kind in (get_args(hints[f.name]) or (hints[f.name],)) if kind is not type(None)]
        optional = type(None) in get_args(hints[f.name])
        kind = get_origin(hints[f.name]) if not optional and get_origin(hints[f.name]) else kinds[0]
        yield Parameter(f.name, kind, f.default, optional=optional, **f.metadata)


PARAMETERS = {parameter.name: parameter for parameter in _parameters()}
# Bounds of numbers. ints must be ints, bools are not numbers.
_RANGES = tuple((p.name, p.low, p.high) for p in PARAMETERS.values() if p.low is not None and p.high is not None)
_INTEGERS = frozenset(p.name for p in PARAMETERS.values() if p.kind is int) | {
    *("stop_token_ids", "allowed_token_ids", "logit_bias token ids"),
}
_KINDS: tuple[tuple[str, type | UnionType, str], ...] = (
    *((p.name, bool, "True or False") for p in PARAMETERS.values() if p.kind is bool),
    ("grammar", Grammar | None, "Grammar(...)"),
)
_MAX_TOKEN_ID = (1 << 31) - 1
_OPTIONAL = frozenset(p.name for p in PARAMETERS.values() if p.optional)


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
