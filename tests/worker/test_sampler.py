"""The sampler against a slow, literal reading of what each parameter means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.backend.base import SamplingTensors
from hydra_engine.backend.cpu.ops import NativeOps
from hydra_engine.core.grammar import Grammar
from hydra_engine.core.sampling import SamplingParams, TokenRules
from hydra_engine.errors import HydraError, InvalidRequest
from hydra_engine.worker.language.sampler import (
    NO_FAST_PATH,
    Logits,
    SamplingState,
    SpecialTensors,
    TokenHistory,
    finite_rows,
    logprobs_of,
    sample_special,
    token_logprobs,
)
from hydra_engine.worker.language.slot_table import SlotTable
from tests.examples import examples
from tests.worker import host_sampler
from tests.worker.fakes import make_request
from tests.worker.host_sampler import Sample, draw, filtered, uniform


def literal_probabilities(logits: list[float], params: SamplingParams) -> list[float]:
    """temperature, top_k (ties stay), top_p of what is left, min_p; one token at a time."""
    scaled = [x / params.temperature for x in logits]
    if params.top_k > 0:
        bound = sorted(scaled, reverse=True)[min(params.top_k, len(scaled)) - 1]
        scaled = [x if x >= bound else -math.inf for x in scaled]
    largest = max(scaled)
    weights = [math.exp(x - largest) for x in scaled]
    total = math.fsum(weights)
    probabilities = [w / total for w in weights]
    if params.top_p < 1:
        kept, mass = set(), 0.0
        for token in sorted(range(len(weights)), key=lambda t: (-probabilities[t], t)):
            if kept and mass >= params.top_p:
                break
            kept.add(token)
            mass += probabilities[token]
        probabilities = [p if t in kept else 0.0 for t, p in enumerate(probabilities)]
    bound = params.min_p * max(probabilities)
    probabilities = [p if p >= bound else 0.0 for p in probabilities]
    total = math.fsum(probabilities)
    return [p / total for p in probabilities]


def actual_probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    ids, weights = filtered(logits.astype(np.float64), params)
    dense = np.zeros(logits.size)
    dense[np.arange(logits.size) if ids is None else ids] = weights
    return dense / dense.sum()


def sampling_state_of(
    seed: int = 0, prompt: tuple[int, ...] = (1, 3), output: tuple[int, ...] = (), **params: object
) -> SamplingState:
    sampling_state = SamplingState.from_request(make_request(1, prompt, seed=seed, **params))
    if sampling_state.history is not None:
        sampling_state.history.record(len(prompt), output)
    return sampling_state


def sample_row(logits: Logits, state: SamplingState, num_generated: int) -> Sample:
    """Samples a row as a step does whose only row it is, and holds the oracle's answer against it."""
    table, slots, vocabulary = SlotTable(1), np.zeros(1, dtype=np.int64), logits.size
    table.sampling.assign(0, state)
    table.specials.assign(0, state)
    recounts = table.specials.recounts(slots, vocabulary)
    if recounts is not None:
        table.recount(*(torch.from_numpy(array) for array in recounts), vocabulary)
    special = table.specials.arrays(slots, slots, np.array([num_generated]), 1, vocabulary)
    if special.failures:
        with pytest.raises(HydraError) as caught:
            host_sampler.sample_row(logits, state, num_generated)
        assert caught.value.info() == special.failures[0][1]
        raise caught.value
    packed, *lists = (torch.from_numpy(array) for array in special[:4])
    draws = SamplingTensors(*(torch.from_numpy(x) for x in table.sampling.arrays(slots, np.array([num_generated]))))
    tensors, counts = SpecialTensors.from_packed(packed, 1, *lists), table.counts(vocabulary)
    found = sample_special(NativeOps(), torch.from_numpy(np.array(logits)[None]), draws, tensors, counts)
    token, num_top = int(found.tokens[0]), int(special.num_top[0])
    scores = None if num_top < 0 else logprobs_of(token, num_top, found.numbers[0].numpy(), found.places[0].numpy())
    expected = host_sampler.sample_row(logits, state, num_generated)
    assert bool(found.finite[0]) and token == expected.token_id and (scores is None) == (expected.logprobs is None)
    return Sample(token, scores)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_k": -1},
    {"top_p": 0.0},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 8, "top_p": 0.7},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_filters_keep_the_tokens_and_the_mass_that_the_words_say(params: dict[str, float]) -> None:
    for seed in range(5):
        logits = np.random.default_rng(seed).normal(size=61).astype(np.float32) * 2
        sampling = SamplingParams(**{"temperature": 1.0, **params})
        expected = literal_probabilities(logits.tolist(), sampling)
        np.testing.assert_allclose(actual_probabilities(logits, sampling), expected, rtol=1e-9, atol=1e-15)


@settings(max_examples=examples(150), deadline=None)
@given(
    logits=st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=12),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([0.0, 0.31, 0.77, 1.0]),
    min_p=st.sampled_from([0.0, 0.13, 0.6]),
)
def test_filters_agree_with_the_literal_reading_when_many_logits_tie(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    actual = actual_probabilities(np.asarray(logits), params)
    np.testing.assert_allclose(actual, literal_probabilities(logits, params), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.3, "top_p": 0.9}, {"top_k": 7, "min_p": 0.05}], ids=str)
def test_samples_follow_the_probabilities(params: dict[str, float]) -> None:
    """Chi-square over the counters of one seed; the bound is the 99.99 % quantile by Wilson and Hilferty."""
    draws = 20_000
    logits = np.random.default_rng(3).normal(size=24) * 0.8
    sampling = SamplingParams(**{"temperature": 1.0, **params})
    expected = np.asarray(literal_probabilities(logits.tolist(), sampling)) * draws
    counts = np.bincount([draw(logits, sampling, uniform(11, i)) for i in range(draws)], minlength=24)
    assert counts[expected == 0].sum() == 0
    assert expected[expected > 0].min() > 5 and np.count_nonzero(expected) > 4
    possible = expected > 0
    statistic = ((counts[possible] - expected[possible]) ** 2 / expected[possible]).sum()
    freedom = np.count_nonzero(possible) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < bound


def test_the_random_numbers_are_fixed_for_ever_and_evenly_spread() -> None:
    # Changing these changes every seeded answer that users have kept.
    assert uniform(0, 0) == 0.8833108082136426
    assert uniform(42, 7) == 0.15289334222649975
    assert uniform(-1, 3) == uniform((1 << 64) - 1, 3) == 0.02857293647511372
    by_counter = [uniform(9, i) for i in range(4096)]
    by_seed = [uniform(i, 0) for i in range(4096)]
    for numbers in (by_counter, by_seed):
        assert min(numbers) >= 0 and max(numbers) < 1
        counts = np.histogram(numbers, bins=16, range=(0, 1))[0]
        assert ((counts - 256) ** 2 / 256).sum() < 45  # 99.99 % quantile of 15 degrees
    assert abs(np.corrcoef(by_counter[1:], by_counter[:-1])[0, 1]) < 0.06


def test_the_nucleus_stops_as_soon_as_its_mass_is_reached() -> None:
    params = SamplingParams(temperature=1.0, top_p=0.5)
    assert actual_probabilities(np.zeros(4), params).tolist() == [0.5, 0.5, 0.0, 0.0]


def test_a_draw_at_either_end_is_a_token_with_mass() -> None:
    logits = np.array([-np.inf, 0.0, 1.0, -1e9])
    params = SamplingParams(temperature=1.0)
    assert draw(logits, params, 0.0) == 1
    assert draw(logits, params, 1 - 2**-53) == 2


def test_a_tiny_temperature_is_greedy_and_never_overflows() -> None:
    logits = normal(1, 50) * 1e4
    for temperature in (5e-324, 1e-300, 1e-6):
        token = sample_row(logits, sampling_state_of(temperature=temperature), 0).token_id
        assert token == int(logits.argmax())


def test_greedy_takes_the_lowest_id_among_ties() -> None:
    logits = np.zeros(40_000, np.float32)
    logits[[7, 31_000]] = 5.0
    assert sample_row(logits, sampling_state_of(logprobs=0), 0).token_id == 7


def test_finite_rows_tells_nan_and_infinity_from_large_numbers() -> None:
    logits = np.zeros((5, 33), np.float32)
    logits[1, 4] = float("nan")
    logits[2, 5] = float("inf")
    logits[3, 6] = float("-inf")
    logits[4] = 3e38  # finite, though its sum is not
    assert finite_rows(logits).tolist() == [True, False, False, False, True]


def test_penalties_follow_the_formulas() -> None:
    logits = np.float32([2.0, -1.0, 0.5, 3.0, -2.0, 1.0, 2.5])
    settings = {"repetition_penalty": 1.5, "presence_penalty": 0.25, "frequency_penalty": 0.5, "top_k": 7}
    sampling_state = sampling_state_of(prompt=(1, 3, 3), output=(0, 0, 4), temperature=1.0, **settings)
    expected = [
        2.0 / 1.5 - 2 * 0.5 - 0.25,  # twice in the output
        -1.0 * 1.5,  # in the prompt only: repetition, nothing else
        0.5,
        3.0 / 1.5,
        -2.0 * 1.5 - 0.5 - 0.25,
        1.0,
        2.5,
    ]
    weights = np.exp(np.asarray(expected))
    cumulative = np.cumsum(weights / weights.sum())
    for counter in range(200):
        token = sample_row(logits, sampling_state, counter).token_id
        assert token == int(np.searchsorted(cumulative, uniform(0, counter), side="right"))


def test_penalties_ignore_prompt_ids_beyond_the_logits() -> None:
    sampling_state = sampling_state_of(prompt=(1, 5000), repetition_penalty=2.0)
    assert sample_row(np.float32([1.0, 1.5, 0.0]), sampling_state, 0).token_id == 0


def test_history_counts_each_position_once() -> None:
    history = TokenHistory((5, 6, 7))
    history.record(0, (5, 6))
    history.record(2, (7,))
    history.record(3, (9,))
    history.record(3, (9,))  # the step ran again
    history.record(0, (5, 6, 7, 9, 9))  # preempted and prefilled again, with one token more
    history.record(5, (4,))
    assert history.output_counts == {9: 2, 4: 1}
    assert history.prompt_ids.tolist() == [5, 6, 7]


def test_the_sampler_counts_tokens_of_earlier_attempts_as_output() -> None:
    request = replace(make_request(1, range(5), frequency_penalty=1.0), generated_token_ids=(7, 8, 7))
    history = SamplingState.from_request(request).history
    assert history is not None and history.output_counts == {7: 2, 8: 1}
    history.record(0, (*request.prompt_token_ids, 7, 8, 7, 9))
    assert history.output_counts == {7: 2, 8: 1, 9: 1}, "prefilled again, they count once"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_masks_every_token_that_would_end_the_request(temperature: float) -> None:
    logits = np.float32([0.0, 1.0, 9.0, 8.0, 2.0])  # 2 ends (eos), 3 is a stop token
    sampling_state = sampling_state_of(temperature=temperature, min_tokens=3, stop_token_ids=(3, 4000))
    early = {sample_row(logits, sampling_state, n).token_id for n in range(3)}
    assert early <= {0, 1, 4} and (temperature > 0 or early == {4})
    late = {sample_row(logits, sampling_state, n).token_id for n in range(3, 40)}
    assert late & {2, 3}
    at_the_limit = sampling_state_of(min_tokens=3, stop_token_ids=(3,), logprobs=0)
    assert [sample_row(logits, at_the_limit, n).token_id for n in (2, 3)] == [4, 2]
    assert sampling_state.fast_path_from == 3


def test_the_models_rules_of_tokens() -> None:
    """The model's rules bar tokens always, or at first, and force one at the end; `allowed_token_ids` replaces them."""
    logits = np.float32([0.0, 1.0, 2.0, 9.0, 8.0])
    rules = TokenRules(never=(3, 4000), not_first=(4,), last=(1,))
    counts = range(16)  # as many tokens as the request may have

    def tokens(**params: object) -> list[int]:
        state = sampling_state_of(**params)
        return [sample_row(logits, state, count).token_id for count in counts]

    assert tokens(rules=rules) == [2, *[4] * 14, 1]
    assert set(tokens(rules=rules, temperature=1.0, logit_bias={3: 100.0})) <= {0, 1, 2, 4}
    assert tokens(rules=rules, min_tokens=1)[0] == 1  # 2 would end it
    assert tokens(rules=rules, allowed_token_ids=(3,)) == [3] * 16
    with pytest.raises(InvalidRequest, match="min_tokens leaves no token"):
        tokens(rules=TokenRules(never=(0, 1, 3, 4)), min_tokens=1)


def test_min_tokens_that_leave_nothing_are_the_requests_own_error() -> None:
    sampling_state = sampling_state_of(min_tokens=1, stop_token_ids=(0, 1))
    with pytest.raises(InvalidRequest, match="min_tokens"):
        sample_row(np.zeros(3, np.float32), sampling_state, 0)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = normal(2, 100) * 4
    expected = [float(x) - math.log(math.fsum(math.exp(x) for x in logits.astype(float))) for x in logits]
    order = sorted(range(100), key=lambda t: (-float(logits[t]), t))
    sampling_state = sampling_state_of(
        temperature=1.7, top_k=3, repetition_penalty=1.3, logprobs=20, min_tokens=5, seed=4
    )
    for counter in range(10):
        result = sample_row(logits, sampling_state, counter).logprobs
        assert result is not None
        assert result.logprob == pytest.approx(float(expected[result.token_id]), abs=1e-12)
        assert result.rank == 1 + order.index(result.token_id)
        assert [t for t, _ in result.top] == order[:20]
        assert [p for _, p in result.top] == pytest.approx([float(expected[t]) for t in order[:20]], abs=1e-12)


def test_logprobs_zero_gives_the_token_only_and_more_than_the_vocabulary_gives_all() -> None:
    logits = np.float32([1.0, 3.0, 3.0])
    none = sample_row(logits, sampling_state_of(logprobs=0), 0).logprobs
    assert none is not None and none.top == () and (none.token_id, none.rank) == (1, 1)
    every = sample_row(logits, sampling_state_of(logprobs=20), 0).logprobs
    assert every is not None and [t for t, _ in every.top] == [1, 2, 0]


def test_a_token_does_not_depend_on_where_its_logits_lie() -> None:
    """Row alone, in a batch, strided, or at an odd address: the same bits."""
    batch = normal(3, 9, 1037) * 2
    sampling_state = sampling_state_of(temperature=0.9, top_p=0.95, logprobs=5, seed=77)
    for row in range(9):
        alone = sample_row(batch[row].copy(), sampling_state, row)
        strided = np.stack([batch[row], batch[row]], axis=1)[:, 0]
        shifted = np.concatenate([batch[row][:1], batch[row]])[1:]
        for other in (batch[row], strided, shifted):
            assert sample_row(other, sampling_state, row) == alone


# ---- biases and sets of tokens


def test_biases_are_added_before_temperature_and_leave_logprobs_alone() -> None:
    logits = normal(4, 20)
    sampling_state = sampling_state_of(temperature=0.5, logit_bias={7: 3.0, 9: -100.0, 500: 5.0}, logprobs=3)
    bent = logits.astype(np.float64)
    bent[7] += 3.0
    bent[9] -= 100.0
    for count in range(200):
        sample = sample_row(logits, sampling_state, count)
        assert sample.token_id == draw(bent, SamplingParams(temperature=0.5), uniform(0, count)) != 9
        assert sample.logprobs == token_logprobs(logits.astype(np.float64), sample.token_id, 3)
    assert sample_row(logits, sampling_state_of(logit_bias={7: 100.0}), 0).token_id == 7


def test_biases_come_before_repetition_penalties() -> None:
    """The order is vLLM's: a bias that lifts a logit over zero makes the penalty a division."""
    logits = np.array([0.0, -1.0, 0.0, 1.5], dtype=np.float32)
    sampling_state = sampling_state_of(prompt=(1,), logit_bias={1: 4.0}, repetition_penalty=4.0)
    assert sample_row(logits, sampling_state, 0).token_id == 3  # 3 / 4, not -1 * 4 + 4 and not 3


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 4, "top_p": 0.9}], ids=str)
def test_only_allowed_tokens_come(params: dict[str, float]) -> None:
    sampling_state = sampling_state_of(allowed_token_ids=[2, 5, 11, 700], **params)
    found = {sample_row(normal(count, 20), sampling_state, count).token_id for count in range(300)}
    assert found == {2, 5, 11}
    assert sampling_state.fast_path_from == sampling_state_of(logit_bias={1: 0.5}).fast_path_from == NO_FAST_PATH


def test_allowed_tokens_and_min_tokens_may_leave_nothing() -> None:
    sampling_state = sampling_state_of(allowed_token_ids=[2], min_tokens=3)
    with pytest.raises(InvalidRequest, match="min_tokens leaves no token"):
        sample_row(normal(0, 20), sampling_state, 2)
    assert sample_row(normal(0, 20), sampling_state, 3).token_id == 2
    with pytest.raises(InvalidRequest, match="allowed_token_ids leaves no token") as caught:
        sample_row(normal(0, 20), sampling_state_of(allowed_token_ids=[99]), 0)
    assert caught.value.param == "allowed_token_ids"


class Scripted:
    """A grammar that allows these tokens, whatever came before; 2 ends."""

    def __init__(self, *token_ids: int) -> None:
        self.token_ids = token_ids

    def allowed(self, output_ids: Sequence[int]) -> np.ndarray:
        mask = np.zeros(12, dtype=np.bool_)  # shorter than the logits
        mask[list(self.token_ids)] = True
        return mask


@pytest.mark.parametrize(
    ("allowed", "params", "token"),
    [
        ((2, 5), {}, 5),
        ((2,), {"min_tokens": 9}, 2),
        ((2, 5), {"min_tokens": 9}, 5),
        ((2, 5), {"ignore_eos": True, "logit_bias": {2: 100}}, 5),
        ((2, 5), {"logit_bias": {2: 100}}, 2),
        ((2,), {"ignore_eos": True}, 2),
        ((5, 7), {"stop_token_ids": [5], "min_tokens": 9}, 7),
        ((5,), {"stop_token_ids": [5], "min_tokens": 9}, 5),
        ((2, 5, 7), {"allowed_token_ids": [7]}, 7),
        ((2, 5), {"allowed_token_ids": [9]}, 2),
    ],
    ids=str,
)
def test_a_grammar_goes_before_everything_else(allowed: tuple[int, ...], params: dict[str, Any], token: int) -> None:
    logits = np.zeros(20, dtype=np.float32)
    logits[[5, 15]] = 2.0, 9.0
    logits[2] = -5.0
    request = make_request(1, (1, 3), grammar=Grammar("json_object"), **params)
    assert sample_row(logits, SamplingState.from_request(request, Scripted(*allowed)), 0).token_id == token


def test_a_grammar_that_nothing_is_left_of() -> None:
    request = make_request(1, (1, 3), grammar=Grammar("json_object", param="regex"), allowed_token_ids=[9])
    with pytest.raises(InvalidRequest, match="no token that the grammar allows"):
        sample_row(normal(0, 20), SamplingState.from_request(request, Scripted(5)), 0)
    request = make_request(1, (1, 3), grammar=Grammar("json_object", param="regex"))
    with pytest.raises(InvalidRequest, match="no token of this model") as caught:
        sample_row(normal(0, 20), SamplingState.from_request(request, Scripted()), 0)
    assert caught.value.param == "regex"
