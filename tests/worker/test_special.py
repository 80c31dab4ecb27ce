"""Special rows: what is sent for them, and what a device makes of it: the host sampler's result for each row alone,
whatever is mixed in a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.backend.base import Ops, SamplingTensors
from hydra_engine.backend.reference.ops import ReferenceOps
from hydra_engine.errors import InvalidRequest
from hydra_engine.worker.language.sampler import (
    SampledRows,
    SamplingState,
    SlotSpecials,
    SpecialArrays,
    SpecialTensors,
    logprobs_of,
    sample_special,
    special_columns,
)
from hydra_engine.worker.language.slot_table import SlotTable
from tests.examples import examples
from tests.worker.fakes import make_request
from tests.worker.host_sampler import sample_row

OPS: Ops = ReferenceOps()
SLOTS = 7


def asked(vocabulary: int) -> st.SearchStrategy[dict[str, Any]]:
    """Numbers that float32 holds exactly, since the host's parameters are float64."""
    ids = st.integers(0, vocabulary + 1)
    kinds = {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.75]),
        "top_k": st.sampled_from([0, 1, 3, 50]),
        "top_p": st.sampled_from([1.0, 0.5, 0.875]),
        "min_p": st.sampled_from([0.0, 0.03125]),
        "logprobs": st.sampled_from([None, 0, 1, 5, 20]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.7, 10.0]),
        "presence_penalty": st.sampled_from([0.0, 0.4, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.7, -1.1]),
        "min_tokens": st.sampled_from([0, 2]),
        "logit_bias": st.lists(st.tuples(ids, st.sampled_from([-100.0, -0.3, 1.7, 100.0])), max_size=4),
        "allowed_token_ids": st.one_of(st.just(()), st.lists(ids, min_size=1, max_size=9).map(tuple)),
        "stop_token_ids": st.lists(ids, max_size=2).map(tuple),
    }
    return st.fixed_dictionaries({}, optional=kinds)


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, list[tuple[dict[str, Any], list[int], list[int]]], int]:
    """(vocabulary, (parameters, prompt, output) of each row, seed)"""
    vocabulary = draw(st.sampled_from([5, 31, 33, 97]))
    tokens = st.lists(st.integers(0, vocabulary - 1), max_size=6)
    prompts = st.lists(st.integers(0, vocabulary + 2), min_size=1, max_size=6)  # with placeholders of images
    rows = draw(st.lists(st.tuples(asked(vocabulary), prompts, tokens), min_size=1, max_size=SLOTS - 1))
    return vocabulary, rows, draw(st.integers(0, 1 << 30))


@settings(max_examples=examples(80), deadline=None)
@given(steps())
def test_rows_are_the_hosts(step: tuple[int, list[tuple[dict[str, Any], list[int], list[int]]], int]) -> None:
    vocabulary, rows, seed = step
    rng = np.random.default_rng(seed)
    logits = (np.round(rng.normal(0, 6, (len(rows), vocabulary))) / 2).astype(np.float32)
    broken = rng.random(len(rows)) < 0.15
    logits[broken, rng.integers(0, vocabulary)] = rng.choice([np.nan, np.inf, -np.inf])
    table, slots = SlotTable(SLOTS, torch.device("cpu")), rng.permutation(SLOTS)[: len(rows)]
    states = []
    for (kind, prompt, output), slot in zip(rows, slots.tolist(), strict=True):
        request = make_request(slot, prompt, seed=seed + slot, **kind)
        states.append(SamplingState.from_request(request))
        if states[-1].history is not None:
            states[-1].history.record(len(prompt), output)
        table.sampling.assign(slot, states[-1])
        table.specials.assign(slot, states[-1])
    counts = np.array([len(output) for _, _, output in rows])
    found, failed, num_top = sampled(table, logits, slots, counts)
    for row, state in enumerate(states):
        if broken[row]:
            assert not found.finite[row]
            continue
        assert found.finite[row]
        try:
            wanted = sample_row(logits[row], state, int(counts[row]))
        except InvalidRequest:
            assert row in failed
            continue
        assert row not in failed and int(found.tokens[row]) == wanted.token_id
        assert (num_top[row] >= 0) == (wanted.logprobs is not None)
        if wanted.logprobs is not None:
            scores = logprobs_of(
                wanted.token_id, int(num_top[row]), found.numbers[row].numpy(), found.places[row].numpy()
            )
            assert (scores.rank, [i for i, _ in scores.top]) == (
                wanted.logprobs.rank,
                [i for i, _ in wanted.logprobs.top],
            )
            assert scores.logprob == pytest.approx(wanted.logprobs.logprob, rel=1e-6, abs=1e-6)
            assert [x for _, x in scores.top] == pytest.approx([x for _, x in wanted.logprobs.top], rel=1e-6, abs=1e-6)


def sampled(
    table: SlotTable, logits: np.ndarray, slots: np.ndarray, counts: np.ndarray
) -> tuple[SampledRows, set[int], np.ndarray]:
    """(rows, which of them have no token, their `num_top`): as a step of prompts that end."""
    size, vocabulary = logits.shape
    recounts = table.specials.recounts(slots, vocabulary)
    if recounts is not None:
        table.recount(*(torch.from_numpy(array) for array in recounts), vocabulary)
    special = table.specials.arrays(np.arange(size), slots, counts, size, vocabulary)
    packed, *lists = (torch.from_numpy(array) for array in special[:4])
    draws = SamplingTensors(*(torch.from_numpy(column) for column in table.sampling.arrays(slots, counts)))
    tensors = SpecialTensors.from_packed(packed, size, *lists)
    found = sample_special(OPS, torch.from_numpy(logits), draws, tensors, table.counts(vocabulary))
    table.count(torch.from_numpy(slots), found.tokens, tensors.columns.increments, vocabulary)
    return found, {row for row, _ in special.failures}, special.num_top


def test_counts_follow_what_is_sampled_and_begin_anew_with_the_slots_next_request() -> None:
    table = SlotTable(3, torch.device("cpu"))
    logits = np.zeros((1, 9), dtype=np.float32)
    logits[0, [4, 6]] = 2.0, 1.0
    slot, count = np.array([1]), np.array([0])

    def take(number: int, prompt: list[int], **kind: Any) -> None:
        state = SamplingState.from_request(make_request(number, prompt, **kind))
        table.sampling.assign(1, state)
        table.specials.assign(1, state)

    def drawn(*, prompt: bool) -> int:
        if not prompt:
            table.specials.recounts = lambda *_: None  # type: ignore[assignment,return-value,method-assign]
        return int(sampled(table, logits, slot, count)[0].tokens[0])

    take(1, [5, 8, 20], presence_penalty=1.5)
    recounts = table.specials.recounts
    assert [drawn(prompt=True), drawn(prompt=False), drawn(prompt=False)] == [4, 6, 4]
    assert table.counts(9)[1].tolist() == [0, 0, 0, 0, 4, 1, 2, 0, 1]
    table.specials.recounts = recounts  # type: ignore[method-assign]
    take(2, [5], frequency_penalty=2.0)
    assert drawn(prompt=True) == 4 and table.counts(9)[1].tolist() == [0, 0, 0, 0, 2, 1, 0, 0, 0]
    take(3, [6], logprobs=1)  # without penalties nothing is counted
    assert drawn(prompt=True) == 4 and table.counts(9)[1].tolist() == [0, 0, 0, 0, 2, 1, 0, 0, 0]


def test_masks_are_made_once_as_long_as_they_stay() -> None:
    specials = SlotSpecials(2)
    specials.assign(0, SamplingState.from_request(make_request(1, [5], allowed_token_ids=(2, 40), min_tokens=2)))
    found = []
    for count in (0, 1, 2, 3):
        made = specials.arrays(np.array([0]), np.array([0]), np.array([count]), 2, 41)
        assert special_columns(made.packed, 2, np.int32, np.float64).masked.tolist() == [0, -1]
        found.append(made.masks[0].view(np.uint32).tolist())
    assert found == [[0, 1 << 8], [0, 1 << 8], [1 << 2, 1 << 8], [1 << 2, 1 << 8]]
    kept = specials._masks[0]
    specials.arrays(np.array([0]), np.array([0]), np.array([4]), 1, 41)
    assert specials._masks[0] is kept
    specials.assign(0, SamplingState.from_request(make_request(2, [5])))
    assert specials.arrays(np.array([0]), np.array([0]), np.array([4]), 1, 41).masks.shape == (0, 2)


def test_arrays_are_made_once_as_long_as_rows_masks_and_requests_stay() -> None:
    specials = SlotSpecials(2)
    parameters: list[dict[str, Any]] = [{"presence_penalty": 1.0, "logit_bias": ((3, 1.0),)}, {"min_tokens": 3}]
    for slot, kind in enumerate(parameters):
        specials.assign(slot, SamplingState.from_request(make_request(slot, [5], stop_token_ids=(7,), **kind)))

    def made(rows: list[int], slots: list[int], count: int = 1) -> SpecialArrays:
        return specials.arrays(np.array(rows), np.array(slots), np.full(len(rows), count), 2, 41)

    first = made([0, 1], [0, 1])
    assert made([0, 1], [0, 1], 2) is first
    assert first.columns.masked.tolist() == [-1, 0] and first.columns.bias_ends.tolist() == [1, 1]
    swapped = made([1, 0], [0, 1], 1)
    assert swapped.columns.masked.tolist() == [0, -1] and swapped.columns.counted.tolist() == [-1, 0]
    assert made([0, 1], [0, 1], 3).columns.masked.tolist() == [-1, -1]
    alone = made([0], [0])
    assert alone.columns.bias_ends.tolist() == [1, 0] and made([0], [0], 2) is alone
    specials.assign(0, SamplingState.from_request(make_request(2, [5], logprobs=3)))
    assert not made([0], [0], 2).adjusts and made([0], [0], 2).columns.num_top.tolist() == [3, -1]


def test_a_history_reads_what_it_expects_in_order() -> None:
    history = SamplingState.from_request(make_request(1, [5, 6], presence_penalty=1.0)).history
    assert history is not None
    asked: list[int] = []

    def expect(position: int, token: int) -> None:
        history.expect(position, lambda: (asked.append(token), token)[1])  # type: ignore[func-returns-value]

    for index in range(10):
        expect(2 + index, 10 + index)
    assert asked == [10, 11], "more are kept than steps are in flight"
    history.record(2, (10, 11))  # a preempted request's chunk: nothing counts twice
    history.resolve()
    assert history.output_ids == [*range(10, 20)] and asked == history.output_ids
    expect(12, -1)
    expect(13, 7)
    history.resolve()
    assert history.is_broken and history.output_ids == [*range(10, 20)]
