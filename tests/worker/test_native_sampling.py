"""The native sampling ops give the tokens and log probabilities of the sampler in sampler.py, to the last token: over
logits that the demo model computed and over random ones, with every parameter, row after row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hydra_engine.backend.base import SamplingTensors
from hydra_engine.backend.cpu.ops import NativeOps
from hydra_engine.errors import InvalidRequest
from hydra_engine.worker.language.sampler import SamplingState, SpecialTensors, logprobs_of, sample_special
from hydra_engine.worker.language.slot_table import SlotTable
from tests.worker.fakes import make_request
from tests.worker.host_sampler import sample_row
from tests.worker.test_real_model import make_rig, requests

DEMO = Path(__file__).parents[2] / "hydra_engine" / "demo" / "model"
ROWS = 250  # of a step


@pytest.fixture(scope="module")
def recorded() -> np.ndarray:
    """Logits of the demo model in some steps of several requests, [N, V]."""
    rig = make_rig(DEMO, "auto")
    rows: list[np.ndarray] = []
    forward = rig.model.forward

    def recording(*inputs: Any) -> torch.Tensor:
        logits: torch.Tensor = forward(*inputs)
        rows.append(logits.numpy().copy())
        return logits

    rig.model.forward = recording
    rig.generate(*requests(rig, 40))
    rig.worker.close()
    return np.concatenate(rows)


def random_parameters(rng: np.random.Generator, vocabulary: int) -> dict[str, Any]:
    """Random values of all parameters, also values that float32 cannot hold exactly."""
    ids = rng.integers(0, vocabulary + 2, 12).tolist()
    choices: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.1, 0.7, 1.0, round(2 * rng.random(), 3)]),
        "top_k": int(rng.choice([0, 1, 3, 40, 600])),
        "top_p": rng.choice([1.0, 0.9, 0.95, 0.1, max(rng.random(), 0.01)]),
        "min_p": rng.choice([0.0, 0.05, rng.random()]),
        "logprobs": [None, 0, 1, 5, 20][rng.integers(5)],
        "repetition_penalty": rng.choice([1.0, 1.1, 0.8]),
        "presence_penalty": rng.choice([0.0, 0.3, -1.1]),
        "frequency_penalty": rng.choice([0.0, 0.7, -0.2]),
        "min_tokens": int(rng.choice([0, 3])),
        "logit_bias": [(), tuple((token, float(rng.normal(0, 5))) for token in ids[:4])][rng.integers(2)],
        "allowed_token_ids": [(), tuple(ids)][int(rng.random() < 0.2)],
        "stop_token_ids": tuple(ids[:2]),
    }
    return {name: value for name, value in choices.items() if rng.random() < 0.6}


def check_step(logits: np.ndarray, rng: np.random.Generator) -> None:
    size, vocabulary = logits.shape
    table, slots = SlotTable(size, torch.device("cpu")), rng.permutation(size)
    states, counts = [], rng.integers(0, 6, size)
    for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
        prompt = rng.integers(0, vocabulary + 2, 8).tolist()
        parameters = random_parameters(rng, vocabulary)
        request = make_request(slot, prompt, seed=int(rng.integers(0, 1 << 40)), **parameters)
        states.append(SamplingState.from_request(request))
        if states[-1].history is not None:
            states[-1].history.record(len(prompt), rng.integers(0, vocabulary, count).tolist())
        table.sampling.assign(slot, states[-1])
        table.specials.assign(slot, states[-1])
    recounts = table.specials.recounts(slots, vocabulary)
    if recounts is not None:
        table.recount(*(torch.from_numpy(array) for array in recounts), vocabulary)
    special = table.specials.arrays(np.arange(size), slots, counts, size, vocabulary)
    packed, *lists = (torch.from_numpy(array) for array in special[:4])
    draws = SamplingTensors(*(torch.from_numpy(column) for column in table.sampling.arrays(slots, counts)))
    tensors = SpecialTensors.from_packed(packed, size, *lists)
    found = sample_special(NativeOps(), torch.from_numpy(logits), draws, tensors, table.counts(vocabulary))
    failed = {row for row, _ in special.failures}
    assert found.finite.all()
    for row, state in enumerate(states):
        try:
            wanted = sample_row(logits[row], state, int(counts[row]))
        except InvalidRequest:
            assert row in failed
            continue
        assert row not in failed and int(found.tokens[row]) == wanted.token_id, state.params
        if wanted.logprobs is not None:
            number, place = found.numbers[row].numpy(), found.places[row].numpy()
            scores = logprobs_of(wanted.token_id, int(special.num_top[row]), number, place)
            assert scores.rank == wanted.logprobs.rank
            assert scores.logprob == pytest.approx(wanted.logprobs.logprob, rel=1e-12, abs=1e-12)
            assert [token for token, _ in scores.top] == [token for token, _ in wanted.logprobs.top]
            assert [x for _, x in scores.top] == pytest.approx(
                [x for _, x in wanted.logprobs.top], rel=1e-12, abs=1e-12
            )


@pytest.mark.parametrize("seed", range(8))
def test_tokens_over_the_demo_models_logits_are_the_samplers(recorded: np.ndarray, seed: int) -> None:
    rng = np.random.default_rng(seed)
    check_step(recorded[rng.integers(0, len(recorded), ROWS)], rng)


@pytest.mark.parametrize("vocabulary", [2, 31, 33, 500, 4097])
def test_tokens_over_random_logits_are_the_samplers(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    check_step(rng.normal(0, rng.uniform(1, 8), (ROWS, vocabulary)).astype(np.float32), rng)


def test_tokens_of_a_large_vocabulary_are_the_samplers() -> None:
    rng = np.random.default_rng(3)
    check_step(rng.normal(0, 3, (24, 151_936)).astype(np.float32), rng)
