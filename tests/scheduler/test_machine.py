"""Random interleavings of all calls that the contract allows: plans stay in flight for any time, aborts hit anywhere.

The books are checked after every call, tokens against the model without caches, what is reused against an oracle that
knows no hash, and in the end everything must finish. Prompts come from few texts and few pictures, so that much of what
is asked for is there already, or has just been evicted.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hydra_engine.core.request import Slo
from tests.examples import examples
from tests.scheduler.sim import BROKEN, Img, make_request, next_turn, rows_of
from tests.scheduler.stepper import Stepper

KV_SIZE = 4
MAX_BLOCKS = 18  # that a request may need; the smallest pool has as many
OWN = st.builds(Img, st.integers(1, 12), st.integers(1, 30), whole=st.booleans())
SHARED = st.sampled_from([Img(5, name="a"), Img(8, 20, name="b"), Img(12, 30, name="c"), Img(7, name="d", whole=True)])
PARTS = st.lists(st.one_of(st.integers(1, 9), st.sampled_from([4, 8]), OWN, SHARED, SHARED), max_size=4)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        kv_blocks=st.integers(MAX_BLOCKS, 40),
        image_blocks=st.integers(3, 10),
        token_budget=st.integers(2, 24),
        max_num_seqs=st.integers(1, 6),
        max_bypass=st.integers(1, 3),
        reuse=st.sampled_from([True, True, True, False]),
        look_ahead=st.booleans(),
        vision_plans=st.sampled_from([1, 2]),
        ttft_slo=st.sampled_from([None, 0.05]),
        tpot_slo=st.sampled_from([None, 0.015]),
        num_snapshots=st.sampled_from([None, None, 0, 1, 3, 20]),
    )
    def start(self, **sizes) -> None:
        self.stepper = Stepper(image_budget=32, **sizes)
        self.count = 0
        self.languages = []  # in flight, the first one runs
        self.most = 2 if sizes["look_ahead"] else 1
        self.visions = []
        self.dropped = set()  # steps that the lane may drop, also if a request needs them again
        self.max_visions = sizes["vision_plans"]

    @rule(
        parts=PARTS,
        max_new=st.integers(1, 12),
        eos=st.integers(0, 100),
        source=st.sampled_from([None, 0, 0, 1]),
        salt=st.sampled_from(["", "", "", "s"]),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        tpot_s=st.sampled_from([None, None, 0.005]),
        held_for=st.sampled_from(["", "", "", "grammar"]),
    )
    def add(
        self,
        parts,
        max_new: int,
        eos: int,
        source: int | None,
        salt: str,
        priority: int,
        tpot_s: float | None,
        held_for: str,
    ) -> None:
        self.count += 1
        request = make_request(self.count, *parts, 1, max_new=max_new, eos=range(eos), source=source, salt=salt)
        self.stepper.submit(replace(request, priority=priority, slo=Slo(tpot_s=tpot_s)), held_for=held_for)

    @precondition(lambda self: self.stepper.finished)
    @rule(data=st.data(), more=st.integers(1, 6), max_new=st.integers(1, 8))
    def say_more(self, data, more: int, max_new: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.stepper.finished)))
        turn = next_turn(self.count + 1, self.stepper.requests[number], self.stepper.tokens[number], more, max_new)
        if turn.num_prompt + turn.max_new_tokens <= MAX_BLOCKS * KV_SIZE:
            self.count += 1
            self.stepper.submit(turn)

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def abort(self, data) -> None:
        self.stepper.abort(data.draw(st.integers(1, self.count)))
        self.dropped |= {plan.step_id for plan in self.visions if self.stepper.scheduler.may_drop(plan)}

    @precondition(lambda self: self.count)
    @rule(data=st.data(), failed=st.sampled_from([False, False, True]))
    def release(self, data, failed: bool) -> None:
        """Releases a request that is held or not, for the first time or again."""
        self.stepper.release(data.draw(st.integers(1, self.count)), BROKEN if failed else None)

    @rule(kv=st.booleans(), images=st.booleans())
    def reset_caches(self, kv: bool, images: bool) -> None:
        self.stepper.reset(kv=kv, images=images)

    @precondition(lambda self: len(self.languages) < self.most)
    @rule()
    def plan_language(self) -> None:
        preempted = self.stepper.scheduler.status().num_preemptions
        live = [s for s in self.stepper.scheduler._requests.states.values() if s.ending is None]
        oldest = min(live, key=lambda s: s.order, default=None)
        before = oldest.num_preemptions if oldest else 0
        plan = self.stepper.plan_language()
        if self.languages:
            assert self.stepper.scheduler.status().num_preemptions == preempted, "preempted while a step runs"
        if plan is not None:
            self.languages.append(plan)
        assert oldest is None or oldest.num_preemptions == before, "the oldest request was preempted"

    @precondition(lambda self: self.languages)
    @rule(data=st.data())
    def end_language(self, data) -> None:
        plan = self.languages.pop(0)
        ids = [row.request_id for row in rows_of(plan)]
        bad = data.draw(st.sets(st.sampled_from(ids), max_size=1)) if data.draw(st.integers(0, 9)) == 0 else ()
        self.stepper.end_language(plan, bad=bad, took_s=0.01)

    @rule()
    def plan_vision(self) -> None:
        plan = self.stepper.plan_vision()
        if plan is not None:
            self.visions.append(plan)
            assert plan.num_patches <= 32 and len(self.visions) <= self.max_visions
            items = [item for vision in self.visions for item in vision.items]
            if self.stepper.reuse:
                keys = [self._key(item) for item in items]
                assert len(keys) == len(set(keys)), "a picture is encoded twice at a time"
            blocks = [block for item in items for block in item.block_ids.tolist()]
            assert len(blocks) == len(set(blocks)), "two pictures are written to a block"

    def _key(self, item) -> tuple[str, bytes]:
        return self.stepper.requests[item.request_id].cache_salt, item.digest

    @precondition(lambda self: self.visions)
    @rule(data=st.data())
    def end_vision(self, data) -> None:
        plan = self.visions.pop(0)
        ids = [item.request_id for item in plan.items]
        bad = data.draw(st.sets(st.sampled_from(ids), max_size=1)) if data.draw(st.integers(0, 9)) == 0 else ()
        if plan.step_id in self.dropped and data.draw(st.booleans()):
            bad = ids
        self.stepper.end_vision(plan, bad=bad, took_s=0.01)

    def teardown(self) -> None:
        if not hasattr(self, "stepper"):
            return
        for plan in self.languages:
            self.stepper.end_language(plan)
        for plan in self.visions:
            self.stepper.end_vision(plan)
        for number in range(1, self.count + 1):
            self.stepper.release(number)
        self.stepper.finish_all()
        assert self.stepper.finished.keys() == set(range(1, self.count + 1)), "every request ends exactly once"


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=examples(40), stateful_step_count=50, deadline=None)
