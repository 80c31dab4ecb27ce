"""The worker under the real scheduler, always two steps ahead of what has been read, with caches that are too small."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hydra_engine.cache.blocks import CacheManager
from hydra_engine.config import SchedulerConfig
from hydra_engine.core.ids import FeatureKey, RequestId, StepId
from hydra_engine.core.instances import EPD
from hydra_engine.core.messages import Delta, Finished, RequestMessage, Tokens
from hydra_engine.core.outputs import FinishReason
from hydra_engine.core.plans import LanguagePlan
from hydra_engine.core.request import Request
from hydra_engine.scheduler.latency.attribution import StepHistory
from hydra_engine.scheduler.scheduler import StageScheduler
from hydra_engine.worker.language.constraints import MaskTurns
from hydra_engine.worker.language.slot_table import SlotTable, lacks_one_token
from tests.scheduler.audit import check
from tests.worker.fakes import BLOCK, NAN_TOKEN, POISON_TOKEN, Rig, make_request
from tests.worker.test_ahead import expected_of

MAX_SEQS = 5


def some_requests(rng: np.random.Generator, count: int) -> list[Request]:
    """Requests of all kinds; some cannot be computed, some share a beginning."""
    kinds: list[dict[str, float]] = [
        {},
        {},
        {"temperature": 1.0, "top_p": 0.9},
        {"frequency_penalty": -2.0, "presence_penalty": -2.0},
        {"min_tokens": 6},
        {"logprobs": 2},
    ]
    made = []
    for index in range(count):
        prompt = [*range(3, 3 + int(rng.integers(0, 14))), *rng.integers(20, 80, int(rng.integers(1, 20))).tolist()]
        if index % 7 == 3:
            prompt[int(rng.integers(len(prompt)))] = int(rng.choice([POISON_TOKEN, NAN_TOKEN]))
        request = make_request(index, prompt, seed=index, **kinds[int(rng.integers(len(kinds)))])
        made.append(replace(request, max_new_tokens=int(rng.integers(1, 15)), priority=int(rng.integers(2))))
    return made


class Loop:
    """The loop of an instance: a scheduler and a worker."""

    def __init__(self, rig: Rig, num_blocks: int) -> None:
        self.rig = rig
        kv: CacheManager[RequestId] = CacheManager(num_blocks, BLOCK)
        images: CacheManager[FeatureKey] = CacheManager(8, BLOCK)
        config = SchedulerConfig(max_num_seqs=MAX_SEQS, token_budget=13, look_ahead=True)
        self.scheduler = StageScheduler(EPD, kv, images, config, instance="test", observer=StepHistory())
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.in_flight: list[StepId] = []
        self.seq_slots: set[int] = set()
        self.max_in_flight = 0
        self.now = 0.0

    def add(self, request: Request) -> None:
        self.rig.worker.add_request(request, ())
        self.scheduler.add(request, self.now)
        self.tokens[request.id] = []

    def run_to_the_end(self) -> None:
        while self.scheduler.has_work:
            self.now += 0.01
            while (plan := self.scheduler.plan_language(self.now)) is not None:
                self._submit(plan)
            self.max_in_flight = max(self.max_in_flight, len(self.in_flight))
            assert self.in_flight, "work is left and nothing runs"
            result = self.rig.wait(self.in_flight.pop(0))
            self._take(self.scheduler.on_language(result, self.now))
            check(self.scheduler)

    def _submit(self, plan: LanguagePlan) -> None:
        self.seq_slots |= {*plan.decodes.seq_slots.tolist(), *(chunk.seq_slot for chunk in plan.chunks)}
        self.rig.worker.submit_language(plan)
        self.in_flight.append(plan.step_id)

    def _take(self, events: list[RequestMessage]) -> None:
        for event in events:
            if isinstance(event, Tokens):
                for request_id, token_id in zip(event.request_ids, event.token_ids, strict=True):
                    self.tokens[request_id].append(token_id)
            elif isinstance(event, Delta):
                assert event.logprobs[0].token_id == event.token_ids[0]
                self.tokens[event.request_id] += event.token_ids
            else:
                self.finished[event.request_id] = event
                self.rig.worker.remove_request(event.request_id)


@pytest.mark.quick("2-", "3-a")
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("seed", range(4))
def test_every_request_gets_its_own_tokens_whatever_is_planned_ahead(seed: int, asynchronous: bool) -> None:
    rng = np.random.default_rng(seed)
    rig = Rig(asynchronous=asynchronous)
    rig.worker.capture_graphs(lambda done, total: None)
    rig.model.broken_forwards = set(rng.integers(0, 150, 12).tolist())  # now and then a step does not come back
    loop = Loop(rig, num_blocks=16)
    requests = some_requests(rng, 36)
    for begin in range(0, len(requests), 12):
        for request in requests[begin : begin + 12]:
            loop.add(request)
        loop.run_to_the_end()
    rig.worker.close()
    assert loop.max_in_flight == 2 and loop.seq_slots <= set(range(MAX_SEQS))
    assert sum(event.num_preemptions for event in loop.finished.values()) > 0
    for request in requests:
        event, tokens = loop.finished[request.id], loop.tokens[request.id]
        if {POISON_TOKEN, NAN_TOKEN} & {*request.prompt_token_ids}:
            assert event.reason is FinishReason.ERROR and not tokens
            continue
        assert event.error is None and len(tokens) == event.num_generated
        assert tokens == expected_of([request], len(tokens))[0]
        assert tokens[-1] == 2 if event.reason is FinishReason.STOP else len(tokens) == request.max_new_tokens


@pytest.mark.quick("1-")
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("seed", range(1, 4))
def test_rows_may_be_deferred_at_any_time(seed: int, asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    num_deferred = [0, 0]  # in all, and because of a row before

    def deferrable(table: SlotTable, plan: LanguagePlan) -> list[int]:
        first = len(plan.decodes)
        return [*range(first), *(first + i for i, chunk in enumerate(plan.chunks) if lacks_one_token(chunk))]

    def choose(turns: MaskTurns, plan: LanguagePlan, rows: list[int]) -> list[int]:
        chosen = [row for row in rows if rng.random() < 0.4]
        num_deferred[0] += len(chosen)
        num_deferred[1] += len(turns._slot_table.after_deferred(plan))
        return chosen

    monkeypatch.setattr(SlotTable, "deferrable", deferrable)
    monkeypatch.setattr(MaskTurns, "choose", choose)
    rig = Rig(asynchronous=asynchronous)
    rig.worker.capture_graphs(lambda done, total: None)
    rig.model.broken_forwards = set(rng.integers(0, 150, 6).tolist())
    loop = Loop(rig, num_blocks=16)
    requests = some_requests(rng, 24)
    for request in requests:
        loop.add(request)
    loop.run_to_the_end()
    rig.worker.close()
    assert all(num_deferred) and loop.max_in_flight == 2
    for request in requests:
        tokens = loop.tokens[request.id]
        if loop.finished[request.id].error is None:
            assert tokens == expected_of([request], len(tokens))[0]
            assert tokens[-1] == 2 if loop.finished[request.id].reason is FinishReason.STOP else True
        else:
            assert {POISON_TOKEN, NAN_TOKEN} & {*request.prompt_token_ids} and not tokens
