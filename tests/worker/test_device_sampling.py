"""Numbers and filters of all rows of a step at once are those that the host's sampler takes one by one."""

from __future__ import annotations

import numpy as np
import pytest

from hydra_engine.core.sampling import TokenRules
from hydra_engine.worker.language.sampler import (
    MAX_NUMBER,
    NO_FAST_PATH,
    SamplingState,
    SlotSampling,
    draw_numbers,
    seed_states,
)
from tests.worker.fakes import make_request
from tests.worker.host_sampler import draw_number, seed_state


def test_numbers_are_the_hosts() -> None:
    rng = np.random.default_rng(3)
    seeds = [0, 1, -1, 42, 1 << 63, (1 << 64) - 1, 1 << 70, *rng.integers(0, 1 << 62, 200).tolist()]
    counters = rng.integers(0, 1 << 20, len(seeds))
    counters[:5] = [0, 1, 2, 3, 1 << 40]
    assert seed_states(seeds).tolist() == [seed_state(seed) for seed in seeds]
    found = draw_numbers(seed_states(seeds), counters)
    assert found.dtype == np.float32
    assert found.tolist() == [draw_number(seed, count) for seed, count in zip(seeds, counters.tolist(), strict=True)]
    assert len({*found.tolist()}) > len(seeds) - 3


def test_a_number_never_reaches_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.worker.host_sampler.uniform", lambda seed, counter: 1 - 2.0**-53)
    assert draw_number(0, 0) == MAX_NUMBER < 1
    assert float(np.float32(MAX_NUMBER)) == MAX_NUMBER


def test_slots_keep_what_their_requests_ask_for() -> None:
    draws = SlotSampling(4)
    asked = [
        make_request(1, [5], temperature=0.75, top_k=3, top_p=0.5, min_p=0.25, seed=9),
        make_request(2, [5]),
        make_request(3, [5], temperature=1e-300, top_k=-1, seed=8),
    ]
    for seq_slot, request in zip((2, 0, 3), asked, strict=True):
        draws.assign(seq_slot, SamplingState.from_request(request))
    found = draws.arrays(np.array([3, 2, 0]), np.array([4, 5, 6]))
    assert found.temperatures[0] > 0 and found.temperatures[1:].tolist() == [0.75, 0.0]
    assert found.top_k.tolist() == [0, 3, 0] and found.top_k.dtype == np.int32
    assert found.top_p.tolist() == [1.0, 0.5, 1.0] and found.min_p.tolist() == [0.0, 0.25, 0.0]
    assert found.numbers.tolist()[:2] == [draw_number(8, 4), draw_number(9, 5)]
    assert not draws.arrays(np.array([0]), np.array([7])).numbers.any()  # nobody draws


@pytest.mark.parametrize(
    ("params", "fast_path_from"),
    [
        ({}, 0),
        ({"temperature": 0.7, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, 0),
        ({"temperature": 0.7, "min_tokens": 4}, 4),
        ({"min_tokens": 4}, 4),
        ({"logprobs": 0}, NO_FAST_PATH),
        ({"presence_penalty": 0.5}, NO_FAST_PATH),
        ({"repetition_penalty": 1.1}, NO_FAST_PATH),
        ({"logit_bias": {3: 1.0}}, NO_FAST_PATH),
        ({"allowed_token_ids": (3, 4)}, NO_FAST_PATH),
        ({"rules": TokenRules(never=(3,))}, NO_FAST_PATH),
        ({"rules": TokenRules(last=(3,))}, NO_FAST_PATH),
        ({"rules": TokenRules(not_first=(3,))}, 1),
        ({"rules": TokenRules(not_first=(3,)), "min_tokens": 4}, 4),
    ],
)
def test_what_needs_the_host_is_never_drawn_on_the_device(params: dict, fast_path_from: int) -> None:
    assert SamplingState.from_request(make_request(1, [5], **params)).fast_path_from == fast_path_from
