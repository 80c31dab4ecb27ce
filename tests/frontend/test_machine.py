"""Requests end exactly once in any order of messages, deaths, silences and cancels, with the model's tokens, each of
them once; and when all have ended nobody holds anything."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hydra_engine.core.outputs import Departure, FinishReason
from hydra_engine.frontend.request import Phase
from tests.examples import examples
from tests.frontend.played import Played
from tests.frontend.rig import Rig, token
from tests.frontend.test_router import status

TOPOLOGIES = ("EPD", "2EPD", "EP+D", "ED+P", "2E+P+D", "E+2P+2D", "ED+PD", "ED+2PD", "EP+E+D", "ED+P+PD+E")
picks = st.integers(0, 1 << 16)


class ClusterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.max_new: dict[int, int] = {}
        self.frozen: set[str] = set()
        self.down: set[str] = set()

    @initialize(topology=st.sampled_from(TOPOLOGIES), attempts=st.sampled_from([2, 100]))
    def start(self, topology: str, attempts: int) -> None:
        self.rig = Rig(topology, prefills_at_once=False, max_attempts=attempts, recovery_s=5.0)
        self.played = {name: Played(name) for name in self.rig.roles}
        self.names = sorted(self.played)
        self.submit([[], [3], [2, 5], [4, 4, 4]], 60)
        self.submit([[], [3], [2, 5]], 2)
        self.work_goes_on(attempts, 40)

    # ---- helpers

    def deliver_to_instances(self) -> None:
        for name, messages in self.rig.sent.items():
            if name in self.played:
                self.played[name].inbox.extend(messages)
            messages.clear()

    def reachable(self, one: Played) -> dict[str, Played]:
        pairs = self.rig.dispatcher.instances[one.name].pairs
        return {name: self.played[name] for name in pairs if name in self.played}

    def take_out(self, name: str) -> None:
        self.rig.dispatcher.on_message(name, self.played[name].outbox.popleft(), self.rig.now)

    def running(self) -> list[str]:
        return [name for name in self.names if name in self.played and name not in self.frozen]

    # ---- what happens

    @rule(
        pictures=st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=4),
        max_new=st.sampled_from([1, 2, 5, 60]),
    )
    def submit(self, pictures: list[list[int]], max_new: int) -> None:
        for images in pictures:
            number = len(self.max_new) + 1
            self.max_new[number] = max_new
            self.rig.submit(number, images=images, max_new=max_new)

    @rule(seed=picks, steps=st.sampled_from([10, 40, 120]))
    def work_goes_on(self, seed: int, steps: int) -> None:
        """Advances: an instance takes a message or does some work, or the frontend reads one of its messages."""
        choose = random.Random(seed)
        for _ in range(steps):
            self.one_step(choose)
        self.deliver_to_instances()

    def one_step(self, choose: random.Random) -> None:
        self.deliver_to_instances()
        moves: list[Callable[[], object]] = []
        for name in self.running():
            one = self.played[name]
            if one.inbox:
                moves.append(one.receive)
            if one.outbox:
                moves.append(partial(self.take_out, name))
            if work := [*one.parts, *one.jobs]:
                moves.append(partial(one.work, choose.choice(work), self.reachable(one)))
        if moves:
            choose.choice(moves)()

    @rule(pick=picks, reason=st.sampled_from([Departure.RETURNED, Departure.WITHDRAWN]))
    def part_leaves(self, pick: int, reason: Departure) -> None:
        names = [name for name in self.running() if self.played[name].parts or self.played[name].jobs]
        if not names:
            return
        one = self.played[names[pick % len(names)]]
        if reason is Departure.RETURNED:
            numbers = [number for number, part in one.parts.items() if part.decodes]
        else:
            numbers = [number for number, part in one.parts.items() if part.offered] + list(one.jobs)
        if numbers:
            one.end(numbers[pick % len(numbers)], reason)

    @rule(pick=picks)
    def features_are_lost(self, pick: int) -> None:
        parts = [
            part
            for name in self.running()
            for part in self.played[name].parts.values()
            if part.asked and not part.tokens[len(part.request.generated_token_ids) :]
        ]
        if parts:
            part = parts[pick % len(parts)]
            part.missing.add(pick % len(part.request.images))
            part.asked = False

    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        if self.max_new:
            self.rig.handles[1 + pick % len(self.max_new)].cancel()

    @rule(pick=picks, heard=st.integers(0, 5), restarts=st.sampled_from([True, True, True, False]))
    def die(self, pick: int, heard: int, restarts: bool) -> None:
        names = [name for name in self.names if name in self.played]
        if len(names) < 2 and not restarts:
            return
        if names:
            self.kill(names[pick % len(names)], heard, restarts)

    def kill(self, name: str, heard: int, restarts: bool) -> None:
        """The first messages of its outbox had been written."""
        for _ in range(min(heard, len(self.played[name].outbox))):
            self.take_out(name)
        del self.played[name]
        self.frozen.discard(name)
        self.rig.down(name, restarts=restarts)
        if restarts:
            self.down.add(name)

    @rule(pick=picks)
    def fall_silent(self, pick: int) -> None:
        if names := self.running():
            name = names[pick % len(names)]
            self.frozen.add(name)
            self.rig.silent(name)

    @rule(pick=picks)
    def recover(self, pick: int) -> None:
        """Brings back an instance that is down or silent."""
        absent = sorted(self.down | self.frozen)
        if not absent:
            return
        name = absent[pick % len(absent)]
        if name in self.frozen:
            self.frozen.discard(name)
            self.rig.silent(name, False)
        else:
            self.down.discard(name)
            self.played[name] = Played(name)
            self.rig.up(name)

    @precondition(lambda self: len(self.played) > 1)
    @rule(pick=picks, up=st.booleans())
    def pair_changes(self, pick: int, up: bool) -> None:
        one, other = self.names[pick % len(self.names)], self.names[(pick // 7) % len(self.names)]
        if one != other and one in self.played and other in self.played:
            self.rig.dispatcher.on_pair(one, other, up, self.rig.now)

    @rule(seconds=st.sampled_from([0.1, 0.6, 3.0]), busy=st.booleans(), spared=picks)
    def time_passes(self, seconds: float, busy: bool, spared: int = 0) -> None:
        """Busy: all that do not encode, but for one perhaps."""
        for index, (name, instance) in enumerate(self.rig.dispatcher.instances.items()):
            if instance.usable:
                idle = not busy or "e" in name or index == spared % (2 * len(self.names))
                full = {} if idle else {"num_running": 60, "num_waiting": 9, "kv_blocks_used": 90}
                self.rig.dispatcher.instances[name].status = status(**full)
        self.rig.wait(seconds)

    # ---- what always holds

    @invariant()
    def nobody_ends_twice_and_loads_are_sane(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.deliver_to_instances()
        ended = [age for age, _ in self.rig.results]
        assert len(ended) == len(set(ended))
        assert set(ended) | set(self.rig.dispatcher.requests) == set(self.max_new)
        for in_flight in self.rig.dispatcher.requests.values():
            phase, attempt = in_flight.phase, in_flight.attempt
            assert (attempt is None) == (phase is Phase.WAITING)
            assert in_flight.running or in_flight.deadline_s is not None, "nothing ends this"
            assert phase is not Phase.PREFILLING or not in_flight.is_prefilled
            if phase is Phase.DECODING:
                assert attempt.complete and in_flight.is_prefilled and attempt.decoder in attempt.instances
        for instance in self.rig.dispatcher.instances.values():
            assert min(instance.prefill_tokens, instance.decodes, instance.decode_tokens, instance.patches) >= 0
        for age, result in self.rig.results:
            assert result.token_ids == tuple(token(age, i) for i in range(len(result.token_ids)))
            if result.finish_reason is FinishReason.LENGTH:
                assert len(result.token_ids) == self.max_new[age]
            elif result.finish_reason is FinishReason.ERROR:
                code = getattr(result.error, "code", None)
                assert code in ("instance_lost", "request_poisoned", "internal_error"), result.error
                assert code != "internal_error" or "moved between" in str(result.error), result.error

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        while self.down | self.frozen:
            self.recover(0)
        for one in self.names:
            for other in self.names:
                if one < other and one in self.played and other in self.played:
                    self.rig.dispatcher.on_pair(one, other, True, self.rig.now)
        choose = random.Random(len(self.max_new))
        for turn in range(200_000):
            self.deliver_to_instances()
            if not self.rig.dispatcher.requests and all(one.idle for one in self.played.values()):
                break
            self.one_step(choose)
            if turn % 50 == 49:
                self.time_passes(0.3, busy=bool(choose.randrange(4)))
        self.nobody_ends_twice_and_loads_are_sane()
        held = {name: (list(one.parts), list(one.jobs)) for name, one in self.played.items() if not one.idle}
        assert not held and not self.rig.dispatcher.requests, (held, self.rig.dispatcher.requests)
        self.rig.assert_at_rest()
        for name in self.played:
            assert not self.rig.dispatcher.instances[name].stale
        for handle in self.rig.handles.values():
            assert handle.done


def run(**options: Any) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    chosen = settings(deadline=None, suppress_health_check=checks, **options)
    run_state_machine_as_test(ClusterMachine, settings=chosen)


def test_each_request_ends_once_whatever_happens() -> None:
    run(max_examples=examples(200), stateful_step_count=25)


@pytest.mark.slow
def test_each_request_ends_once_whatever_happens_for_longer() -> None:
    run(max_examples=600, stateful_step_count=50)
