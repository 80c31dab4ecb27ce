"""A device that works behind the call: steps are launched before the ones before them were read, and what becomes of a
row is the same as if they had not been."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from hydra_engine.backend.base import Backend
from hydra_engine.core.grammar import Grammar
from hydra_engine.core.request import Request
from hydra_engine.core.sampling import TokenRules
from hydra_engine.errors import BackendError, ErrorInfo
from hydra_engine.models.layers.decoder import LanguageInput
from hydra_engine.worker.language.sampler import SamplingState
from hydra_engine.worker.vision.gate import LaneGate
from tests.faults.points import FaultPoints
from tests.virtual_clock import VirtualClock
from tests.worker.fakes import NAN_TOKEN, FakeModel, Rig, Row, make_request, outcomes_of
from tests.worker.late import LateDevice
from tests.worker.test_ahead import all_kinds, expected_of

EARLIER = "an earlier step of this request failed"


def make_rig(device: LateDevice, model: FakeModel | None = None, **options: Any) -> Rig:
    model = model or FakeModel()
    backend = Backend(device, model.ops, torch.float32, 1)
    return Rig(model, backend=backend, faults=FaultPoints(), asynchronous=True, **options)


@pytest.fixture
def device() -> LateDevice:
    return LateDevice()


@pytest.fixture
def rig(device: LateDevice) -> Iterator[Rig]:
    rig = make_rig(device)
    yield rig
    device.working.set()
    rig.worker.close()


def prefill(rig: Rig, *requests: Request) -> list[Row]:
    return [rig.row(request, 0, request.prompt_token_ids, 0) for request in requests]


def decodes(rig: Rig, count: int, *requests: Request) -> list[Row]:
    """Decode rows after `count` tokens, of which the last one has not been read."""
    return [rig.row(request, request.num_prompt + count - 1, [-1], count) for request in requests]


def row_of(rows: Sequence[Row], request: Request) -> int:
    """Index of the request's row in a plan with rows of one kind."""
    return [row.request_id for row in rows].index(request.id)


def wait_until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


def errors(result: Any) -> dict[int, ErrorInfo]:
    return dict(result.failures)


def test_steps_are_launched_before_the_first_one_was_read(rig: Rig, device: LateDevice) -> None:
    requests = [make_request(1, range(3, 9)), make_request(2, [30, 31], temperature=1.0, seed=5, top_p=0.9, top_k=20)]
    for request in requests:
        rig.add(request)
    device.working.clear()
    rows = [prefill(rig, *requests), *(decodes(rig, count, *requests) for count in range(1, 6))]
    steps = [rig.submit(*row) for row in rows]
    wait_until(lambda: len(rig.model.row_counts) == 6, "later steps wait for the first")
    assert rig.worker.poll() == []
    device.working.set()
    results = [rig.wait(step) for step in steps]
    tokens = [[o.token_id for o in outcomes_of(row, result)] for row, result in zip(rows, results, strict=True)]
    assert list(zip(*tokens, strict=True)) == [tuple(t[:6]) for t in expected_of(requests)]
    for before, after in pairwise(results):
        assert after.started_s == before.ended_s  # it was launched long before


def test_a_step_is_timed_from_its_launch_where_nothing_ran_before_it(rig: Rig) -> None:
    request = make_request(1, [5, 6])
    rig.add(request)
    first = rig.wait(rig.submit(*prefill(rig, request)))
    time.sleep(0.02)
    second = rig.wait(rig.submit(*decodes(rig, 1, request)))
    assert second.started_s - first.ended_s >= 0.02 and second.ended_s >= second.started_s


SPECIAL: list[dict[str, Any]] = [
    {"logprobs": 2, "presence_penalty": 1.0, "min_tokens": 3},
    {"logit_bias": {3: 2.0}, "allowed_token_ids": (3, 4, 5), "temperature": 1.0, "seed": 4},
    {"repetition_penalty": 0.5, "frequency_penalty": -1.0, "logprobs": 0},
    {"rules": TokenRules(never=(3, 5, 9), not_first=(4, 6)), "temperature": 1.0, "seed": 5},
    {"rules": TokenRules(not_first=tuple(range(2, 12)))},
]


def test_steps_with_special_rows_wait_for_nothing(rig: Rig, device: LateDevice) -> None:
    """Tokens that nobody has read are counted by penalties."""
    requests = [make_request(1, [5, 6]), *(make_request(i, [7, i], **kind) for i, kind in enumerate(SPECIAL, 2))]
    for request in requests:
        rig.add(request)
    device.working.clear()
    rows = [prefill(rig, *requests), *(decodes(rig, count, *requests) for count in range(1, 6))]
    steps = [rig.submit(*row) for row in rows]
    wait_until(lambda: len(rig.model.row_counts) == 6, "later steps wait for the first")
    device.working.set()
    found = [outcomes_of(row, rig.wait(step)) for row, step in zip(rows, steps, strict=True)]
    tokens = [[outcome.token_id for outcome in outcomes] for outcomes in found]
    assert list(zip(*tokens, strict=True)) == [tuple(t[:6]) for t in expected_of(requests)]
    asked = [[outcome.logprobs is not None for outcome in outcomes] for outcomes in found]
    assert asked == [[False, True, False, True, False, False]] * 6


def test_no_logits_come_to_the_host(rig: Rig, device: LateDevice) -> None:
    """Tokens alone without log probabilities, and a few numbers of each row with them."""
    requests = all_kinds()
    for request in requests:
        rig.add(request)
    seen: list[list[tuple[int, ...]]] = []
    fetch = device.fetch
    device.fetch = lambda tensors: (seen.append([tuple(t.shape) for t in tensors]), fetch(tensors))[1]  # type: ignore
    rig.language(*prefill(rig, *requests))
    plain = [request for request in requests if request.sampling.logprobs is None]
    rig.language(*decodes(rig, 1, *plain))
    assert seen == [[(8,), (8,), (5, 23), (5, 21)], [(6,), (6,)]], "5 of 8 rows are special"


def test_a_row_without_a_token_to_choose_from_fails_alone(rig: Rig, device: LateDevice) -> None:
    """Steps that were launched for it meanwhile have no effect."""
    plain, strict = make_request(1, [5, 6]), make_request(2, [7, 8], allowed_token_ids=(2,), min_tokens=3)
    for request in (plain, strict):
        rig.add(request)
    rows = [prefill(rig, strict, plain), *(decodes(rig, count, strict, plain) for count in range(1, 4))]
    device.working.clear()
    steps = [rig.submit(*row) for row in rows]
    wait_until(lambda: len(rig.model.row_counts) == 4, "steps are not launched")
    device.working.set()
    results = [rig.wait(step) for step in steps]
    row = [row_of(rows[0], strict), *(row_of(some, strict) for some in rows[1:])]
    assert [[*errors(result)] for result in results] == [[index] for index in row]
    assert errors(results[0])[row[0]].param == "min_tokens"
    assert all(errors(result)[index].message == EARLIER for result, index in zip(results[1:], row[1:], strict=True))
    assert [int(result.token_ids[1]) for result in results] == expected_of([plain])[0][:4]


class Alternately:
    """A grammar that goes on with one of two tokens that depend on the last one."""

    max_mask_s = 0.0

    def prepare(self, output_ids: Sequence[int]) -> None:
        raise AssertionError("cheap masks are computed behind the forward")

    def allowed(self, output_ids: Sequence[int]) -> Any:
        last = output_ids[-1] if output_ids else 0
        mask = np.zeros(97, dtype=np.bool_)
        mask[[(7 * last + 3) % 89, (11 * last + 5) % 89]] = True
        return mask


def test_a_grammar_waits_for_its_last_token_behind_the_forward(rig: Rig, device: LateDevice) -> None:
    """Other rows of the step wait with it, but for no more than that."""
    grammar = Grammar("regex", "a*")
    plain, bound = make_request(1, [5, 6]), make_request(2, [7, 8], grammar=grammar, temperature=1.0, seed=3)
    for request in (plain, bound):
        rig.add(request)
    state = SamplingState.from_request(bound, Alternately())
    rig.worker._requests[bound.id] = replace(rig.worker._requests[bound.id], sampling_state=state)
    rows = [prefill(rig, plain, bound), *(decodes(rig, count, plain, bound) for count in range(1, 5))]
    device.working.clear()
    steps = [rig.submit(*row) for row in rows]
    wait_until(lambda: len(rig.model.row_counts) == 2, "the second step is not launched before the first was read")
    time.sleep(0.02)
    assert len(rig.model.row_counts) == 2, "a mask was made without the token before"
    device.working.set()
    tokens = [[o.token_id for o in outcomes_of(row, rig.wait(step))] for row, step in zip(rows, steps, strict=True)]
    found = [*zip(*tokens, strict=True)]
    assert found == [tuple(t[:5]) for t in expected_of([plain, bound], constraints={2: Alternately()})]


def test_a_failure_that_was_read_late_bars_what_was_launched_meanwhile(rig: Rig, device: LateDevice) -> None:
    healthy, poison = make_request(1, range(3, 9)), make_request(2, [5, NAN_TOKEN, 6])
    rig.add(healthy)
    rig.add(poison)
    device.working.clear()
    both = poison, healthy
    rows = [prefill(rig, *both), *(decodes(rig, count, *both) for count in range(1, 4))]
    steps = [rig.submit(*row) for row in rows]
    wait_until(lambda: len(rig.model.row_counts) == 4, "steps are not launched")
    device.working.set()
    results = [rig.wait(step) for step in steps]
    assert [list(errors(result)) for result in results] == [[0]] * 4
    assert errors(results[0])[0].code == "numerical_error"
    assert all(errors(result)[0].message == EARLIER for result in results[1:])
    assert [int(result.token_ids[1]) for result in results] == expected_of([healthy])[0][:4]
    assert errors(rig.wait(rig.submit(*decodes(rig, 4, *both))))[0].message == EARLIER
    assert rig.model.row_counts[-1] == 1, "a row that is known to have failed was computed"


def test_a_late_failure_does_not_reach_the_next_owner_of_the_slot(rig: Rig, device: LateDevice) -> None:
    poison, heir = make_request(1, [5, NAN_TOKEN]), make_request(2, [8, 9], temperature=1.0, seed=3)
    rig.add(poison)
    device.working.clear()
    steps = [rig.submit(*prefill(rig, poison)), rig.submit(*decodes(rig, 1, poison))]
    seq_slot = rig.seq_slots[poison.id]
    rig._free_seq_slots.append(seq_slot)  # it was aborted; its steps are in flight
    rig.add(heir)
    assert rig.seq_slots[heir.id] == seq_slot
    rows = [prefill(rig, heir), *(decodes(rig, count, heir) for count in range(1, 4))]
    steps += [rig.submit(*row) for row in rows]
    wait_until(lambda: len(rig.model.row_counts) == 6, "steps are not launched")
    device.working.set()
    results = [rig.wait(step) for step in steps]
    assert [bool(result.failures) for result in results] == [True, True, False, False, False, False]
    assert [int(result.token_ids[0]) for result in results[2:]] == expected_of([heir])[0][:4]


def test_a_request_that_begins_anew_is_not_barred_by_what_it_was(rig: Rig, device: LateDevice) -> None:
    request = make_request(1, [5, 6])
    rig.add(request)
    rig.language(*prefill(rig, request))
    rig.worker.faults.arm("eng.mid_step", "nan", "request=1 times=1")
    device.working.clear()
    steps = [rig.submit(*decodes(rig, 1, request)), rig.submit(*prefill(rig, request))]
    wait_until(lambda: len(rig.model.row_counts) == 3, "steps are not launched")
    device.working.set()
    assert rig.wait(steps[0]).failures and not rig.wait(steps[1]).failures


def test_a_decode_that_goes_on_from_nothing_fails(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """The token of an earlier request in the slot is not used."""
    first, second = make_request(1, [5, 6]), make_request(2, [7, 8, 9, 10])
    rig.add(first)
    rig.language(*prefill(rig, first))
    rig._free_seq_slots.append(rig.seq_slots[first.id])
    rig.add(second)
    assert rig.language(rig.row(second, 0, [7, 8], 0))[0].error is None
    (outcome,) = rig.language(*decodes(rig, 1, second))
    assert outcome.error is not None and "was not sampled" in caplog.text


def test_a_device_that_failed_ends_the_instance(rig: Rig, device: LateDevice) -> None:
    request = make_request(1, [5, 6])
    rig.add(request)
    device.broken = True
    rig.submit(*prefill(rig, request))
    assert rig.woken.wait(30)
    with pytest.raises(BackendError, match="has failed"):
        rig.worker.poll()


# ---- memory


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("point", ["eng.before_step", "eng.mid_step"])
def test_only_the_request_for_which_there_is_no_memory_fails(point: str, asynchronous: bool) -> None:
    device = LateDevice()
    backend = Backend(device, FakeModel().ops, torch.float32, 1)
    rig = Rig(backend=backend, faults=FaultPoints(), asynchronous=asynchronous)
    requests = [make_request(1, [5, 6]), make_request(2, [7, 8], temperature=1.0, seed=4), make_request(3, [9, 10])]
    for request in requests:
        rig.add(request)
    expected = expected_of(requests)
    rig.worker.faults.arm(point, "oom", "token=8")
    outcomes = rig.language(*prefill(rig, *requests))
    assert [o.token_id for o in outcomes] == [expected[0][0], None, expected[2][0]]
    error = outcomes[1].error
    assert error is not None and error.kind == "Unavailable" and "memory" in error.message
    assert device.trims == 2  # for the step, and for the row alone
    rig.worker.faults.arm(point, "oom", "times=1")
    healthy = requests[0], requests[2]
    assert [o.token_id for o in rig.language(*decodes(rig, 1, *healthy))] == [expected[0][1], expected[2][1]]
    rig.worker.faults.arm(point, "oom", "times=1")
    (outcome,) = rig.language(*decodes(rig, 2, requests[0]))
    assert outcome.token_id == expected[0][2], "a row alone is not tried with the memory that was given back"
    rig.worker.close()


def test_what_a_failed_step_holds_is_free_when_memory_is_given_back(device: LateDevice) -> None:
    held: list[Any] = []
    alive: list[bool] = []

    class Full(FakeModel):
        def forward(self, inputs: LanguageInput, *caches: Any) -> torch.Tensor:
            if len(inputs.attention.num_context) > 1:
                scratch = torch.zeros(3)
                held.append(weakref.ref(scratch))
                raise torch.OutOfMemoryError("not so many")
            return super().forward(inputs, *caches)

    device.trim = lambda: alive.append(held[-1]() is not None)  # type: ignore[method-assign]
    rig = make_rig(device, Full())
    requests = [make_request(1, [5, 6]), make_request(2, [7, 8])]
    for request in requests:
        rig.add(request)
    assert all(o.error is None for o in rig.language(*prefill(rig, *requests)))
    assert alive == [False]
    rig.worker.close()


# ---- the vision lane beside steps


class RecordingGate(LaneGate):
    def __init__(self) -> None:
        super().__init__(VirtualClock())
        self.told: list[float | str] = []

    def begin(self, allowance_s: float = math.inf) -> None:
        self.told.append(allowance_s)
        super().begin(allowance_s)

    def end(self) -> float:
        self.told.append("end")
        super().end()
        return 0.5


def test_the_gate_is_told_of_whole_steps_one_after_the_other(device: LateDevice) -> None:
    gate = RecordingGate()
    rig = make_rig(device, gate=gate)
    request = make_request(1, [5, 6])
    rig.add(request)
    device.working.clear()
    steps = [rig.submit(*prefill(rig, request), vision_s=0.1), rig.submit(*decodes(rig, 1, request), vision_s=0.2)]
    wait_until(lambda: len(rig.model.row_counts) == 2, "steps are not launched")
    assert gate.told == [0.1]
    device.working.set()
    assert [rig.wait(step).vision_s for step in steps] == [0.5, 0.5]
    assert gate.told == [0.1, "end", 0.2, "end"]
    rig.worker.close()


def test_beside_a_step_on_a_part_of_the_device_vision_runs_all_along() -> None:
    """Vision ignores the step's allowance, which is for the undivided device, and runs on the plan's part."""
    device, chosen = LateDevice(num_partitions=3), list[int]()

    def choose(partition: int) -> None:
        chosen.append(partition)
        device.partitions.here = partition % 3

    device.partitions.set_partition = choose  # type: ignore[method-assign]
    gate = RecordingGate()
    rig = make_rig(device, gate=gate)
    request = make_request(1, [5, 6])
    rig.add(request)
    for rows, partition in ((prefill(rig, request), 2), (decodes(rig, 1, request), 0)):
        rig.wait(rig.submit(*rows, vision_s=0.1, partition=partition))
    assert chosen == [2, 0] and gate.told == [math.inf, "end", 0.1, "end"]
    rig.worker.close()


# ---- threads


def test_closing_waits_for_what_was_launched(device: LateDevice) -> None:
    rig = make_rig(device)
    request = make_request(1, [5, 6])
    rig.add(request)
    device.working.clear()
    for row in (prefill(rig, request), decodes(rig, 1, request)):
        rig.submit(*row)
    timer = threading.Timer(0.05, device.working.set)
    timer.start()
    rig.worker.close()
    timer.join()
    assert len(rig.worker.poll()) == 2
