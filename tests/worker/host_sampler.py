"""A sampler of single rows in numpy and float64: the oracle of the devices' sampling.

The rules are those of worker/language/sampler.py. A seed's tokens are what users have kept: this file does not change.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hydra_engine.core.results import TokenLogprobs
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.worker.language.sampler import (
    MAX_NUMBER,
    Ids,
    Logits,
    SamplingState,
    Scores,
    TokenHistory,
    allowed_tokens,
    token_logprobs,
)

_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's step
_MASK = (1 << 64) - 1


class Sample(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None = None


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


def uniform(seed: int, counter: int) -> float:
    """A number in [0, 1) with 53 bits: output number `counter` of a splitmix64 generator started from the mixed seed.
    The seed counts modulo 2^64."""
    return (_mix64(seed_state(seed) + (counter + 1) * _GOLDEN & _MASK) >> 11) * 2.0**-53


def seed_state(seed: int) -> int:
    """Start state of this seed's generator, 64 bits."""
    return _mix64(seed & _MASK)


def draw_number(seed: int, counter: int) -> float:
    """`uniform` rounded to the float32 that devices draw with, still below 1."""
    return min(float(np.float32(uniform(seed, counter))), MAX_NUMBER)


def _mix64(value: int) -> int:
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
