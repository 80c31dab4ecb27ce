"""Scores of prompt tokens from the logits before them, and requests whose logits are not finite."""

from __future__ import annotations

import math

import numpy as np
import torch

from hydra_engine.backend.cpu.device import CpuDevice
from hydra_engine.core.ids import RequestId, StepId
from hydra_engine.core.plans import ChunkRow, DecodeRows, LanguagePlan
from hydra_engine.core.request import Request
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.worker.language.sampler import SamplingState, token_logprobs
from hydra_engine.worker.language.step import PromptScoring, Samples
from hydra_engine.worker.ports import WorkerRequest

VOCABULARY = 8
DECODES = DecodeRows(*(np.arange(2, dtype=np.int64) for _ in range(5)), block_tables=np.zeros((2, 1), dtype=np.int32))


def record(number: int, prompt: tuple[int, ...], num_top: int | None) -> WorkerRequest:
    sampling = SamplingParams(prompt_logprobs=num_top)
    request = Request(RequestId(number), prompt, sampling, max_new_tokens=1, seed=0, arrival_s=0.0)
    return WorkerRequest(request, SamplingState.from_request(request), {}, 0)


def chunk(owner: WorkerRequest, start: int, end: int, *, scored: bool = True) -> ChunkRow:
    request = owner.request
    token_ids = request.prompt_token_ids[start:end]
    sample = end >= request.num_prompt
    return ChunkRow(request.id, 3, token_ids, start, np.zeros(4, np.int32), 4, sample, 0, scored=scored)


def step(*chunks: ChunkRow) -> LanguagePlan:
    return LanguagePlan(StepId(1), DECODES, chunks)


def logits(count: int) -> torch.Tensor:
    return torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(count))


def test_nothing_is_scored_unless_a_chunk_asks() -> None:
    owner = record(7, (1, 2, 3), 2)
    assert PromptScoring.from_plan(step(chunk(owner, 0, 3, scored=False)), [owner]) is None


def test_rows_score_the_tokens_behind_them_in_slices_of_any_size() -> None:
    first, plain, last = record(7, (1, 2, 3, 4, 5), 2), record(8, (6, 6), None), record(9, (5, 0, 3), 0)
    plan = step(chunk(first, 1, 4), chunk(plain, 0, 2, scored=False), chunk(last, 0, 3))
    scoring = PromptScoring.from_plan(plan, [first, plain, last])
    assert scoring is not None
    wanted = scoring.scored_rows(CpuDevice(1))
    assert wanted.rows.tolist() == [2, 3, 4, 7, 8], "behind two decodes; the last token of a prompt scores nothing"
    rows = logits(5)
    for part in rows.split(2):
        wanted.take(part)
    samples = Samples.none(plan.num_rows)
    scoring.put(samples)
    raw = rows.numpy().astype(np.float64)
    assert samples.scores == [
        (2, tuple(token_logprobs(raw[row], token, 2) for row, token in ((0, 3), (1, 4), (2, 5)))),
        (4, tuple(token_logprobs(raw[row], token, 0) for row, token in ((3, 0), (4, 3)))),
    ]
    assert samples.failures == []


def test_a_row_that_is_not_finite_fails_its_request_alone() -> None:
    sick, sound = record(7, (1, 2, 3), 1), record(9, (5, 0, 3), 1)
    plan = step(chunk(sick, 0, 3), chunk(sound, 0, 3))
    scoring = PromptScoring.from_plan(plan, [sick, sound])
    assert scoring is not None
    rows = logits(4)
    rows[1, 5] = math.nan
    scoring.scored_rows(CpuDevice(1)).take(rows)
    samples = Samples(np.array([4, 4, 6, 6]))
    scoring.put(samples)
    assert [(row, error.code) for row, error in samples.failures] == [(2, "numerical_error")]
    assert samples.token_ids.tolist() == [4, 4, -1, 6]
    assert [row for row, _ in samples.scores] == [3]


def test_a_placeholder_beyond_the_head_is_impossible() -> None:
    owner = record(7, (1, VOCABULARY + 5), 1)
    scoring = PromptScoring.from_plan(step(chunk(owner, 0, 2)), [owner])
    assert scoring is not None
    scoring.scored_rows(CpuDevice(1)).take(logits(1))
    samples = Samples.none(3)
    scoring.put(samples)
    ((_, (entry,)),) = samples.scores
    assert (entry.token_id, entry.logprob, entry.rank) == (VOCABULARY + 5, -math.inf, VOCABULARY + 1)
    assert entry.top == token_logprobs(logits(1)[0].numpy().astype(np.float64), 0, 1).top
