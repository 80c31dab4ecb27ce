"""Logits -> token: biases, masks, filters, draws and logprobs, as the OpenAI API and vLLM's extras mean them.

Order: logprobs from the raw logits; logit_bias; repetition penalty (prompt and output), frequency and presence
penalties (output only); masks: allowed_token_ids or the model's own rules, the grammar, and min_tokens on tokens that
would end the request;
temperature, top_k, top_p, min_p; one draw.

A row's token depends on its own logits, its own request and its own counter alone. The random number is a fixed hash
of (seed, number of tokens generated before), and the draw inverts the cumulative distribution in vocabulary order in
float64, so the same request gets the same token whatever else is in the batch. Does not know plans, caches or torch:
logits are host arrays (one numpy pass over a step costs a tenth of handing it to torch's thread pool).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hydra_engine.core.plans import TokenLogprobs
from hydra_engine.core.request import Request
from hydra_engine.core.sampling import NO_RULES, SamplingParams, TokenRules
from hydra_engine.errors import InvalidRequest

Logits = npt.NDArray[np.float32]
Scores = npt.NDArray[np.float64]  # [V]
Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]  # [V]

NO_FAST_PATH = (1 << 63) - 1  # more tokens than anything generates

MAX_NUMBER = float(np.nextafter(np.float32(1), np.float32(0)))  # of a draw
GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's step

_MASK = (1 << 64) - 1
_MAX_PENDING = 8  # more than are in flight, so that reading the oldest is no wait


class TokenHistory:
    """The tokens of a request's prompt and output, for penalties and grammars. Records the rows of its steps; for
    tokens on a device, functions that fetch them. Only for the language lane's thread."""

    __slots__ = ("_next_position", "_pending", "is_broken", "output_counts", "output_ids", "prompt_ids")

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.is_broken = False  # a row failed: no token follows
        self._pending: deque[tuple[int, Callable[[], int]]] = deque()
        self.prompt_ids: Ids = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self.output_ids: list[int] = []  # in order
        self.output_counts: dict[int, int] = {}
        self._next_position = len(prompt_token_ids)

    def record(self, start: int, token_ids: Sequence[int]) -> None:
        """Records tokens at positions [start, start + len). Positions that were recorded before (a step run again, a
        preempted request that is prefilled again) are skipped."""
        end = start + len(token_ids)
        if end <= self._next_position:
            return
        for token in token_ids[max(self._next_position - start, 0) :]:
            self.output_ids.append(token)
            self.output_counts[token] = self.output_counts.get(token, 0) + 1
        self._next_position = end

    def expect(self, position: int, read: Callable[[], int]) -> None:
        """Announces a token at `position` that is still on the device. `read` waits for it and returns it; a negative
        one means that its row failed."""
        self._pending.append((position, read))
        if len(self._pending) > _MAX_PENDING:
            self._read_next()

    def resolve(self) -> None:
        """Waits for the expected tokens. Raises what `read` raises."""
        while self._pending:
            self._read_next()

    def _read_next(self) -> None:
        position, read = self._pending[0]
        token = read()
        self._pending.popleft()
        self.is_broken = self.is_broken or token < 0
        if not self.is_broken:
            self.record(position, (token,))


class Constraint(Protocol):
    """A grammar and the position of one request in it."""

    def allowed(self, output_ids: Sequence[int]) -> Mask:
        """Tokens that may follow the output, of those that the tokenizer knows; includes end-of-sequence if the text is
        complete. May be called again. Raises HydraError if the output violates the grammar."""
        ...

    def prepare(self, output_ids: Sequence[int]) -> None:
        """Computes the next result of `allowed` ahead. Raises the same errors."""
        ...

    @property
    def dearest_s(self) -> float:
        """The longest processor time, in seconds, that `allowed` has taken so far."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class SamplingState:
    """Sampling parameters and state of a request. `history`: None without penalties and grammar."""

    params: SamplingParams
    seed: int
    ending_ids: tuple[int, ...]  # tokens that would end the request: masked while min_tokens is not reached
    history: TokenHistory | None
    constraint: Constraint | None = None
    eos_ids: tuple[int, ...] = ()
    biases: tuple[Ids, Scores] | None = None  # token ids and what is added to their logits
    allowed_ids: Ids | None = None  # None: all
    rules: TokenRules = NO_RULES
    num_last: int = NO_FAST_PATH  # tokens before the last one that the request may generate

    @classmethod
    def from_request(cls, request: Request, constraint: Constraint | None = None) -> SamplingState:
        """The state of a request at its start or resumption. `constraint`: of its grammar, if it has one."""
        params = request.sampling
        history = TokenHistory(request.prompt_token_ids) if params.needs_history else None
        if history is not None:
            history.record(request.num_prompt, request.generated_token_ids)
        ending = tuple(sorted({*request.eos_token_ids, *params.stop_token_ids}))
        biases = None
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            biases = np.asarray(ids, dtype=np.int64), np.asarray(values, dtype=np.float64)
        allowed = np.asarray(params.allowed_token_ids, dtype=np.int64) if params.allowed_token_ids else None
        rules = request.rules if allowed is None else NO_RULES
        return cls(
            *(params, request.seed, ending, history, constraint, request.eos_token_ids, biases, allowed, rules),
            num_last=request.max_new_tokens - 1,
        )

    @property
    def fast_path_from(self) -> int:
        """Number of generated tokens from which on the token is the largest logit and nothing else is returned."""
        return self.device_path_from if self.params.greedy else NO_FAST_PATH

    @property
    def device_path_from(self) -> int:
        """Number of generated tokens from which on filters and a draw choose the token and nothing else is returned."""
        chosen = self.biases is not None or self.allowed_ids is not None or self.history is not None
        if self.params.logprobs is not None or chosen or self.rules.never or self.rules.last:
            return NO_FAST_PATH
        return max(self.params.min_tokens if self.ending_ids else 0, 1 if self.rules.not_first else 0)

    def unwanted(self, num_generated: int) -> tuple[int, ...]:
        """Token ids that must not be sampled next, by `min_tokens` and the model's rules."""
        early = self.ending_ids if num_generated < self.params.min_tokens else ()
        return (*early, *self.rules.never, *(self.rules.not_first if num_generated == 0 else ()))

    def forced(self, num_generated: int) -> tuple[int, ...]:
        """Tokens of which one must be the next; empty if any may be."""
        return self.rules.last if num_generated == self.num_last else ()


class Sample(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None = None


# ---- whole steps


def finite_rows(logits: Logits) -> npt.NDArray[np.bool_]:
    """True for rows of [B, V] whose values are all finite, [B]."""
    finite: npt.NDArray[np.bool_] = np.isfinite(logits.max(axis=-1)) & np.isfinite(logits.min(axis=-1))
    return finite


def sample_row(logits: Logits, state: SamplingState, num_generated: int) -> Sample:
    """Samples a token from a row [V] of finite logits."""
    raw: Scores = logits.astype(np.float64)
    params = state.params
    scores = raw if num_generated >= state.fast_path_from else _adjusted(raw, state, num_generated)
    if params.greedy:
        token = int(scores.argmax())
    else:
        token = draw(scores, params, draw_number(state.seed, num_generated))
    if params.logprobs is None:
        return Sample(token)
    return Sample(token, token_logprobs(raw, token, params.logprobs))


# ---- biases, penalties and masks


def _adjusted(raw: Scores, state: SamplingState, num_generated: int) -> Scores:
    """A copy of `raw` with biases, penalties and masks applied."""
    scores, params = raw.copy(), state.params
    if state.biases is not None:
        ids, values = state.biases
        inside = ids < scores.size
        np.add.at(scores, ids[inside], values[inside])
    if state.history is not None and params.penalises:
        _penalise(scores, params, state.history)
    mask = allowed_tokens(state, num_generated, scores.size)
    if mask is not None:
        scores[~mask] = -np.inf
    return scores


def allowed_tokens(state: SamplingState, num_generated: int, size: int) -> Mask | None:
    """The mask [size] of allowed tokens, at least one of them; None: all. Raises InvalidRequest if none is left, and
    the errors of the grammar."""
    params = state.params
    if state.constraint is not None:
        return _in_grammar(state, state.constraint, num_generated, size)
    if forced := state.forced(num_generated):
        return _only(forced, size)
    unwanted = state.unwanted(num_generated)
    if state.allowed_ids is None and not unwanted:
        return None
    mask = _any_but(unwanted, size)
    if state.allowed_ids is not None:
        mask &= _only(state.allowed_ids, size)
    if not mask.any():
        name = "min_tokens" if num_generated < params.min_tokens else "allowed_token_ids"
        raise InvalidRequest(f"{name} leaves no token to choose from", param=name)
    return mask


def _in_grammar(state: SamplingState, constraint: Constraint, num_generated: int, size: int) -> Mask:
    """Mask [V] of tokens that the grammar and the other parameters allow. Those cannot forbid the end of a text that is
    complete and has no other continuation."""
    params, history = state.params, state.history
    assert history is not None and len(history.output_ids) == num_generated, "a row is sampled without its tokens"
    allowed = constraint.allowed(history.output_ids)
    mask = np.zeros(size, dtype=np.bool_)
    mask[: allowed.size] = allowed[:size]
    ending = mask & _only(state.eos_ids, size)
    if state.allowed_ids is not None:
        mask &= _only(state.allowed_ids, size)
    unwanted = state.unwanted(num_generated)
    if params.ignore_eos and num_generated >= params.min_tokens:
        unwanted += state.eos_ids
    for candidates in (mask & _any_but(unwanted, size), mask, ending):
        if candidates.any():
            return candidates
    if state.allowed_ids is not None:
        raise InvalidRequest("allowed_token_ids leaves no token that the grammar allows", param="allowed_token_ids")
    name = None if params.grammar is None else params.grammar.param
    raise InvalidRequest("no token of this model continues the text as the grammar demands", param=name)


def _only(token_ids: Sequence[int] | Ids, size: int) -> Mask:
    mask = np.zeros(size, dtype=np.bool_)
    ids = np.asarray(token_ids, dtype=np.int64)
    mask[ids[ids < size]] = True
    return mask


def _any_but(token_ids: Sequence[int], size: int) -> Mask:
    return ~_only(token_ids, size)


def _penalise(scores: Scores, params: SamplingParams, history: TokenHistory) -> None:
    counts = history.output_counts
    output: Ids = np.fromiter(counts.keys(), dtype=np.int64, count=len(counts))
    if params.repetition_penalty != 1.0:
        seen = np.union1d(history.prompt_ids, output)
        seen = seen[seen < scores.size]  # image placeholders may lie beyond the logits
        values = scores[seen]
        scores[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if counts:
        times = np.fromiter(counts.values(), dtype=np.float64, count=len(counts))
        scores[output] -= params.frequency_penalty * times + params.presence_penalty


# ---- draws


def uniform(seed: int, counter: int) -> float:
    """A number in [0, 1) with 53 bits: output number `counter` of a splitmix64 generator started from the mixed seed.
    The seed counts modulo 2^64."""
    return (mix64(seed_state(seed) + (counter + 1) * GOLDEN & _MASK) >> 11) * 2.0**-53


def seed_state(seed: int) -> int:
    """Start state of this seed's generator, 64 bits."""
    return mix64(seed & _MASK)


def draw_number(seed: int, counter: int) -> float:
    """`uniform` rounded to the float32 that devices draw with, still below 1."""
    return min(float(np.float32(uniform(seed, counter))), MAX_NUMBER)


def mix64(value: int) -> int:
    """splitmix64's finaliser: a bijection on 64 bits."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def draw(scores: Scores, params: SamplingParams, number: float) -> int:
    """The token at `number` in [0, 1) of the filtered distribution's cumulative sum, in vocabulary order."""
    ids, weights = filtered(scores, params)
    cumulative = np.cumsum(weights)
    # Rounding must not lift the mark to the total: beyond it there is no token.
    mark = min(number * cumulative[-1], float(np.nextafter(cumulative[-1], 0.0)))
    index = int(np.searchsorted(cumulative, mark, side="right"))
    return index if ids is None else int(ids[index])


def filtered(scores: Scores, params: SamplingParams) -> tuple[Ids | None, Scores]:
    """Applies temperature and filters. Returns (token ids ascending or None for all, weights): probabilities scaled so
    that the largest is 1."""
    ids: Ids | None = None
    with np.errstate(over="ignore"):  # a tiny temperature sends differences to -inf, which is right
        scaled = (scores - scores.max()) / params.temperature
    if 0 < params.top_k < scaled.size:
        # Ties with the k-th best stay, as in vLLM.
        threshold = np.partition(scaled, scaled.size - params.top_k)[scaled.size - params.top_k]
        ids = np.flatnonzero(scaled >= threshold)
        scaled = scaled[ids]
    weights: Scores = np.exp(scaled)
    if params.top_p < 1.0:
        kept = _nucleus(weights, params.top_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= params.min_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    return ids, weights


def _nucleus(weights: Scores, top_p: float) -> Ids:
    """Indices of the fewest largest weights whose sum reaches top_p of all, at least one; the lowest index on ties."""
    total = weights.sum()
    # Everything below this bound together weighs less than half of what may be left out: no need to sort it.
    head = weights[weights >= 0.5 * (1.0 - top_p) * total / weights.size]
    head = np.sort(head)[::-1]
    before = np.concatenate(([0.0], np.cumsum(head)[:-1]))
    num_kept = max(1, int(np.count_nonzero(before < top_p * total)))
    smallest = head[num_kept - 1]
    above = np.flatnonzero(weights > smallest)
    ties = np.flatnonzero(weights == smallest)[: num_kept - above.size]
    return np.sort(np.concatenate((above, ties)))


# ---- logprobs


def token_logprobs(raw: Scores, token: int, num_top: int) -> TokenLogprobs:
    """Log probabilities under the model's own distribution. Rank and top list order tokens by (logprob descending, id
    ascending)."""
    largest = raw.max()
    log_total = largest + np.log(np.exp(raw - largest).sum())
    value = raw[token]
    rank = 1 + int(np.count_nonzero(raw > value)) + int(np.count_nonzero(raw[:token] == value))
    top: tuple[tuple[int, float], ...] = ()
    if num_top > 0:
        num_top = min(num_top, raw.size)
        threshold = np.partition(raw, raw.size - num_top)[raw.size - num_top]
        candidates = np.flatnonzero(raw >= threshold)
        best = candidates[np.lexsort((candidates, -raw[candidates]))][:num_top]
        top = tuple((int(i), float(raw[i] - log_total)) for i in best)
    return TokenLogprobs(token, float(value - log_total), rank, top)
