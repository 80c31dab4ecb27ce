"""Steps that are submitted before the one before them has come back: the same tokens, whatever happens in between."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch

from hydra_engine.core.request import Request
from hydra_engine.models.layers.decoder import LanguageInput
from hydra_engine.worker.language.sampler import Constraint, SamplingState
from hydra_engine.worker.vision.gate import LaneGate
from tests.faults.points import FaultPoints
from tests.virtual_clock import VirtualClock
from tests.worker.fakes import (
    NAN_TOKEN,
    POISON_TOKEN,
    Decode,
    FakeModel,
    Rig,
    fake_logits,
    fake_spec,
    make_request,
    outcomes_of,
)
from tests.worker.host_sampler import sample_row


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(faults=FaultPoints(), asynchronous=request.param)
    yield rig
    rig.worker.close()


def all_kinds() -> list[Request]:
    """Plain rows and every reason not to be one; penalties of the kind that makes tokens come back, which shows."""
    return [
        make_request(1, range(3, 20)),
        make_request(2, range(30, 39), temperature=1.0, seed=5, top_p=0.9),
        make_request(3, [4, 4, 4], temperature=0.8, seed=6, presence_penalty=1.0, repetition_penalty=0.5),
        make_request(4, range(50, 61), temperature=1.5, seed=7, top_k=10, min_p=0.02, logprobs=3),
        make_request(5, [8], frequency_penalty=-2.0, presence_penalty=-2.0, min_tokens=6),
        make_request(6, [9, 10], min_tokens=4),
        make_request(7, [11, 12], logprobs=0),
        make_request(8, range(60, 75)),
    ]


def expected_of(requests: list[Request], steps: int = 8, constraints: Mapping[int, Constraint] = {}) -> list[list[int]]:
    """The fake model and the sampler one row at a time, without lanes, slots or caches."""
    found = []
    for request in requests:
        sampling_state, context = (
            SamplingState.from_request(request, constraints.get(request.id)),
            list(request.prompt_token_ids),
        )
        for count in range(steps):
            logits = fake_logits([float(t) for t in context]).numpy()
            context.append(sample_row(logits, sampling_state, count).token_id)
            if sampling_state.history is not None:
                sampling_state.history.record(len(context) - 1, context[-1:])
        found.append(context[request.num_prompt :])
    return found


def test_tokens_that_are_given_are_computed(rig: Rig) -> None:
    requests = all_kinds()
    for request in requests:
        rig.add(request)
    assert rig.generate(*requests) == expected_of(requests)


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_tokens_that_nobody_has_read_give_the_same_tokens(rig: Rig, chunk: int) -> None:
    requests = all_kinds()
    for request in requests:
        rig.add(request)
    assert rig.generate_ahead(*requests, chunk=chunk) == expected_of(requests)


def test_logprobs_are_the_same_too(rig: Rig) -> None:
    requests = [make_request(4, range(50, 61), logprobs=3), make_request(5, [6], temperature=1.0, seed=2, logprobs=0)]
    for request in requests:
        rig.add(request)
    contexts = [list(r.prompt_token_ids) for r in requests]
    rows = [[rig.row(r, 0, r.prompt_token_ids, 0) for r in requests]]
    rows += [[rig.row(r, r.num_prompt + i, [-1], i + 1) for r in requests] for i in range(5)]
    steps = [rig.submit(*row) for row in rows]
    for row, step in zip(rows, steps, strict=True):
        for context, outcome in zip(contexts, outcomes_of(row, rig.wait(step)), strict=True):
            raw = fake_logits([float(t) for t in context]).log_softmax(-1)
            assert outcome.logprobs is not None and outcome.logprobs.token_id == outcome.token_id
            assert outcome.logprobs.logprob == pytest.approx(float(raw[outcome.token_id]), abs=1e-5)
            context.append(outcome.token_id)


@pytest.mark.parametrize("number", range(5))
def test_a_step_that_raises_is_run_again_with_the_same_tokens(rig: Rig, number: int) -> None:
    """The forward has written everything when it raises; the rows' tokens and histories count once."""
    requests = all_kinds()
    for request in requests:
        rig.add(request)
    rig.model.broken_forwards = {number}
    assert rig.generate_ahead(*requests) == expected_of(requests)
    assert rig.model.row_counts == [8] * (number + 1) + [1] * 8 + [8] * (7 - number)


@pytest.mark.parametrize("bad_token", [POISON_TOKEN, NAN_TOKEN])
def test_a_row_that_failed_is_not_computed_again_and_harms_nobody(rig: Rig, bad_token: int) -> None:
    healthy = all_kinds()
    poison = make_request(90, [5, bad_token, 6], repetition_penalty=1.3)
    for request in (*healthy, poison):
        rig.add(request)
    tokens = rig.generate_ahead(poison, *healthy, steps=6)
    assert tokens == [[], *expected_of(healthy, steps=6)]
    first = [9] if bad_token == NAN_TOKEN else [9] + [1] * 9
    counts = rig.model.row_counts
    if bad_token == NAN_TOKEN and rig.worker._language._readers is not None:
        # What was launched before the first step had been read has the row in it.
        assert counts == sorted(counts, reverse=True) and {*counts} <= {9, 8}
    else:
        assert counts == first + [8] * 5


def test_a_prefill_that_failed_in_its_middle_does_not_go_on(rig: Rig) -> None:
    healthy, poison = make_request(1, range(3, 15)), make_request(2, [5, 6, POISON_TOKEN, 7, 8, 9, 10])
    rig.add(healthy)
    rig.add(poison)
    assert rig.generate_ahead(poison, healthy, chunk=2) == [[], *expected_of([healthy])]


def test_a_slot_goes_on_with_its_next_request(rig: Rig) -> None:
    """The request before may have failed, and may have had any sampling state."""
    before = all_kinds()
    poison = make_request(90, [NAN_TOKEN], temperature=1.0, seed=3)
    for index, request in enumerate([poison, *before]):
        rig.add(request)
        rig.generate_ahead(request, steps=4)
        seq_slot = rig.seq_slots[request.id]
        rig.leave(request)
        following = replace(before[-index], id=100 + index)
        rig.add(following)
        assert rig.seq_slots[following.id] == seq_slot
        assert rig.generate_ahead(following) == expected_of([following])
        rig.leave(following)


def test_slots_are_handed_on_while_steps_of_others_are_in_flight(rig: Rig) -> None:
    long, first, second = (make_request(i, [10 + i, 20], temperature=1.0, seed=i) for i in (1, 2, 3))
    rig.add(long)
    rig.add(first)
    rows = [[rig.row(r, 0, r.prompt_token_ids, 0) for r in (long, first)]]
    rows += [[rig.row(r, 2 + i, [-1], 1 + i) for r in (long, first)] for i in range(2)]
    seq_slot = rig.seq_slots[first.id]
    rig._free_seq_slots.append(seq_slot)  # it gives way; nothing of it is planned from here on
    rig.add(second)
    rows.append([rig.row(long, 4, [-1], 3), rig.row(second, 0, second.prompt_token_ids, 0)])
    rows += [[rig.row(long, 5 + i, [-1], 4 + i), rig.row(second, 2 + i, [-1], 1 + i)] for i in range(3)]
    steps = [rig.submit(*row) for row in rows]
    found: dict[int, list[int | None]] = {long.id: [], first.id: [], second.id: []}
    for row, step in zip(rows, steps, strict=True):
        for outcome in outcomes_of(row, rig.wait(step)):
            found[outcome.request_id].append(outcome.token_id)
    expected = expected_of([long, first, second])
    assert found == {1: expected[0][:7], 2: expected[1][:3], 3: expected[2][:4]}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_request_that_moved_takes_its_history_along(rig: Rig, count: int) -> None:
    """A moved request continues as if it had stayed, although its last token was not computed before."""
    request = make_request(3, [4, 4, 4], frequency_penalty=-2.0, presence_penalty=-2.0)
    (expected,) = expected_of([request])
    rig.add(request)
    head = rig.generate_ahead(request, steps=count)[0]
    rig.move(request)
    tokens = [*request.prompt_token_ids, *head]
    rows = [rig.row(request, 0, tokens, count, decode=False)]
    rows += [rig.row(request, len(tokens) + i, [-1], count + 1 + i) for i in range(7 - count)]
    steps = [rig.submit(row) for row in rows]
    again = [outcomes_of([row], rig.wait(step))[0].token_id for row, step in zip(rows, steps, strict=True)]
    assert [*head, *again] == expected


def test_a_decode_in_a_slot_that_is_anothers_fails_and_leaves_the_owner_alone(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    owner, other = make_request(1, [5, 6]), make_request(2, [7, 8])
    rig.add(owner)
    rig.add(other)
    (expected,) = expected_of([owner])
    rows = [rig.row(owner, 0, owner.prompt_token_ids, 0), rig.row(other, 0, other.prompt_token_ids, 0)]
    assert rig.language(*rows)[0].token_id == expected[0]
    wrong = rig.row(other, 2, [-1], 1)
    assert isinstance(wrong, Decode)
    outcomes = rig.language(rig.row(owner, 2, [-1], 1), replace(wrong, seq_slot=rig.seq_slots[owner.id]))
    assert outcomes[0].token_id == expected[1] and outcomes[1].error is not None
    assert "not its request's" in caplog.text
    (outcome,) = rig.language(rig.row(owner, 3, [-1], 2))
    assert outcome.token_id == expected[2]


def test_injected_faults_find_the_requests_of_decodes(rig: Rig) -> None:
    requests = [make_request(1, [5, 6]), make_request(2, [7, 8]), make_request(3, [9, 10])]
    for request in requests:
        rig.add(request)
    expected = expected_of(requests)
    rig.generate_ahead(*requests, steps=2)
    for point, action in (("eng.mid_step", "nan"), ("eng.before_step", "raise")):
        rig.worker.faults.arm(point, action, "token=8")
        outcomes = rig.language(*(rig.row(r, 3, [-1], 2) for r in requests))
        assert [o.error is None for o in outcomes] == [True, False, True]
        assert [outcomes[i].token_id for i in (0, 2)] == [expected[0][2], expected[2][2]]
        rig.worker.faults.arm(point, "off")
        rig.language(rig.row(requests[1], 0, [7, 8], 0))  # begins anew
        rig.language(*(rig.row(r, 2, [t[0]], 1) for r, t in zip(requests, expected, strict=True)))  # one step back


def test_rows_in_another_order_than_their_slots(rig: Rig) -> None:
    requests = all_kinds()
    for request in requests:
        rig.add(request)
    expected = expected_of(requests)
    rng = np.random.default_rng(1)
    rows = [[rig.row(r, 0, r.prompt_token_ids, 0) for r in requests]]
    rows += [[rig.row(r, r.num_prompt + i, [-1], i + 1) for r in requests] for i in range(7)]
    for row in rows:
        rng.shuffle(row)
    steps = [rig.submit(*row) for row in rows]
    found: dict[int, list[int | None]] = {r.id: [] for r in requests}
    for row, step in zip(rows, steps, strict=True):
        for outcome in outcomes_of(row, rig.wait(step)):
            found[outcome.request_id].append(outcome.token_id)
    assert list(found.values()) == expected


# ---- multimodal rotary positions


class Watching(FakeModel):
    """A model that records positions, on which its tokens do not depend."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: list[list[list[int]]] = []

    def forward(self, inputs: LanguageInput, *caches: object) -> torch.Tensor:
        self.positions.append(inputs.positions.tolist())
        return super().forward(inputs, *caches)  # type: ignore[arg-type]


def test_multimodal_decodes_count_on_from_their_requests_own_delta() -> None:
    spec = fake_spec()
    spec = replace(spec, language=replace(spec.language, rope_sections=(1, 1, 1)))
    rig = Rig(Watching(), spec=spec)
    first = replace(make_request(1, [5, 6, 7]), rope_delta=-2)
    second = replace(make_request(2, [8, 9]), rope_delta=40)
    rig.add(first)
    rig.add(second)
    rig.generate_ahead(first, second, steps=3)
    rig.leave(second)
    third = make_request(3, [4])
    rig.add(third)
    rig.generate_ahead(third, steps=2)
    assert rig.model.positions == [
        [[0, 1, 2, 0, 1]] * 3,
        [[1, 42]] * 3,
        [[2, 43]] * 3,
        [[0]] * 3,
        [[1]] * 3,
    ]
    rig.worker.close()


# ---- the vision lane beside a step


class RecordingGate(LaneGate):
    """A gate that reports one second of vision beside every forward."""

    def __init__(self) -> None:
        super().__init__(VirtualClock())
        self.begun: list[float] = []
        self.running = False

    def begin(self, allowance_s: float = math.inf) -> None:
        assert not self.running
        self.begun.append(allowance_s)
        self.running = True

    def end(self) -> float:
        assert self.running
        self.running = False
        return 1.0


class InTheGate(FakeModel):
    gate: RecordingGate

    def forward(self, inputs: LanguageInput, *caches: object) -> torch.Tensor:
        assert self.gate.running
        return super().forward(inputs, *caches)  # type: ignore[arg-type]


def test_the_gate_is_told_of_every_step_and_ends_with_it() -> None:
    gate, model = RecordingGate(), InTheGate()
    model.gate = gate
    rig = Rig(model, gate=gate)
    healthy, poison = make_request(1, [5, 6]), make_request(2, [POISON_TOKEN])
    rig.add(healthy)
    rig.add(poison)
    row = rig.row(healthy, 0, [5, 6], 0)
    assert rig.wait(rig.submit(row, vision_s=0.25)).vision_s == 1.0
    assert rig.wait(rig.submit(row)).vision_s == 1.0
    assert gate.begun == [0.25, math.inf] and not gate.running
    result = rig.wait(rig.submit(row, rig.row(poison, 0, [POISON_TOKEN], 0), vision_s=1.5))
    assert [number for number, _ in result.failures] == [1]
    assert result.vision_s == 1.0  # of the step, whose rows ran together and then each of them alone
    assert gate.begun[2:] == [1.5] and not gate.running
    rig.worker.close()


def test_without_a_gate_nothing_runs_beside_a_step(rig: Rig) -> None:
    request = make_request(1, [5, 6])
    rig.add(request)
    assert rig.wait(rig.submit(rig.row(request, 0, [5, 6], 0), vision_s=0.5)).vision_s == 0.0


def test_poisoned_steps_log_the_row_that_failed_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Steps that were planned ahead of the failure log nothing."""
    poison = make_request(9, [POISON_TOKEN])
    rig.add(poison)
    with caplog.at_level(logging.ERROR):
        assert rig.generate_ahead(poison) == [[]]
    assert sum("failed" in record.message for record in caplog.records) == 1
