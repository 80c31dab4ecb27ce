"""The scheduler and the fake lanes of `sim.py`, one call at a time: for tests that look at single plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from hydra_engine.cache.blocks import CacheManager
from hydra_engine.core.ids import RequestId
from hydra_engine.core.instances import EPD
from hydra_engine.core.messages import Finished, RequestMessage, Tokens
from hydra_engine.core.outputs import FinishReason, StageSpan
from hydra_engine.core.plans import LanguagePlan, VisionPlan
from hydra_engine.core.request import Request
from hydra_engine.core.results import VisionResult
from hydra_engine.core.state import RequestState
from hydra_engine.errors import ErrorInfo
from hydra_engine.scheduler.hooks import StepObserver
from hydra_engine.scheduler.scheduler import StageScheduler
from tests.scheduler.audit import check
from tests.scheduler.observer import step_observer
from tests.scheduler.prefix_oracle import PrefixOracle
from tests.scheduler.sim import (
    BROKEN,
    FakeLanes,
    Img,
    check_chunks,
    config,
    expected_tokens,
    fake_states,
    make_request,
    rows_of,
    tokens_of,
)


class Stepper:
    """Checks the books after every call. Time stands still unless `now` is set or a step takes some."""

    def __init__(
        self,
        *,
        kv_blocks: int = 64,
        image_blocks: int = 64,
        reuse: bool = True,
        scheduler=StageScheduler,
        observer: Callable[[], StepObserver] | None = step_observer,
        vision_plans: int = 1,
        num_snapshots: int | None = None,
        **changes,
    ) -> None:
        kv, images = CacheManager(kv_blocks, 4), CacheManager(image_blocks, 4)
        self.reuse = reuse
        self.config = config(**changes)
        self.lanes = FakeLanes(kv, images, fake_states(self.config, num_snapshots, kv))
        self.scheduler = scheduler(
            EPD,
            kv,
            images,
            self.config,
            instance="test",
            reuse=reuse,
            observer=observer and observer(),
            vision_plans=vision_plans,
            num_snapshots=num_snapshots,
        )
        self.now = 0.0
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.late: dict[int, list[StageSpan]] = defaultdict(list)
        self.finished: dict[int, Finished] = {}
        self.encodes: list[tuple[int, int]] = []  # (request, image) of all that have come back
        self.oracle = PrefixOracle(self.scheduler, reuse and num_snapshots != 0)

    def add(self, number: int, *parts: int | Img, **kwargs) -> Request:
        return self.submit(make_request(number, *parts, **kwargs))

    def submit(self, request: Request, *, held_for: str = "") -> Request:
        """Adds a request as the frontend sends it: with the configured limits where it has none."""
        request = replace(request, slo=request.slo.with_defaults(self.config.ttft_slo, self.config.tpot_slo))
        self.scheduler.add(request, self.now, held_for=held_for)
        self.requests[request.id] = request
        check(self.scheduler)
        self.oracle.look()
        return request

    def run(self, number: int, *parts: int | Img, **kwargs) -> None:
        """Runs a request, and all others, to the end."""
        self.add(number, *parts, **({"source": 0} | kwargs))
        self.finish_all()

    def hit(self, number: int) -> tuple[int, int]:
        """(tokens, images) that a finished request found in the caches."""
        return self.finished[number].cached_tokens, self.finished[number].cached_images

    def state(self, number: int) -> RequestState:
        return self.scheduler._requests.states[RequestId(number)]

    def abort(self, number: int) -> list[RequestMessage]:
        return self._collect(self.scheduler.abort(RequestId(number), self.now))

    def release(self, number: int, error: ErrorInfo | None = None) -> None:
        self._collect(self.scheduler.release_held(RequestId(number), self.now, error))

    def reset(self, *, kv: bool = True, images: bool = True) -> None:
        self.scheduler.reset_caches(kv=kv, images=images)
        check(self.scheduler)
        if kv:
            self.oracle.reset()

    def plan_language(self) -> LanguagePlan | None:
        plan = self.scheduler.plan_language(self.now)
        check(self.scheduler)
        if plan is not None and type(self.scheduler) is StageScheduler:
            check_chunks(plan, self.requests, self.config.max_step_tokens)
        self.oracle.look()
        return plan

    def plan_vision(self) -> VisionPlan | None:
        plan = self.scheduler.plan_vision(self.now)
        check(self.scheduler)
        return plan

    def end_language(self, plan: LanguagePlan, *, bad: Sequence[int] = (), took_s: float = 0.0) -> list[RequestMessage]:
        started_s, self.now = self.now, self.now + took_s
        result = self.lanes.compute(plan, started_s, self.now, lambda row: row.request_id in bad)
        self.oracle.language_ends(plan, [rows_of(plan)[row].request_id for row, _ in result.failures])
        return self._collect(self.scheduler.on_language(result, self.now))

    def end_vision(self, plan: VisionPlan, *, bad: Sequence[int] = (), took_s: float = 0.0) -> list[RequestMessage]:
        self.lanes.encode(plan)
        errors = [BROKEN if item.request_id in bad else None for item in plan.items]
        started_s, self.now = self.now, self.now + took_s
        result = VisionResult(plan.step_id, started_s, self.now, tuple(errors))
        self.encodes += [(int(item.request_id), item.image_index) for item in plan.items]
        return self._collect(self.scheduler.on_vision(result, self.now))

    def language(self, **kwargs) -> list[tuple[int, int]]:
        """Runs a language step; returns (request, tokens) of its rows, decodes by request."""
        plan = self.plan_language()
        if plan is None:
            return []
        rows = sorted((request_id, 1) for request_id in plan.decodes.request_ids.tolist())
        rows += [(int(chunk.request_id), len(chunk.token_ids)) for chunk in plan.chunks]
        self.end_language(plan, **kwargs)
        return rows

    def vision(self, **kwargs) -> list[tuple[int, int]]:
        """Runs a vision step; returns (request, image index) of its items."""
        plan = self.plan_vision()
        if plan is None:
            return []
        items = [(int(item.request_id), item.image_index) for item in plan.items]
        self.end_vision(plan, **kwargs)
        return items

    def _collect(self, events: list[RequestMessage]) -> list[RequestMessage]:
        for event in events:
            if isinstance(event, Finished):
                assert event.request_id not in self.finished, "a second end of a request"
                self.finished[event.request_id] = event
                continue
            if isinstance(event, Tokens):
                for number, gap in event.late.items():
                    self.late[number].append(gap)
            for request_id, position, token_id in tokens_of(event):
                assert request_id not in self.finished, "a token after the end of a request"
                assert position == len(self.tokens[request_id])
                self.tokens[request_id].append(token_id)
        check(self.scheduler)
        self.oracle.look()
        return events

    def finish_all(self, max_steps: int = 2000) -> None:
        """Runs both lanes until every request has ended, and compares the tokens of those without error."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.language(took_s=0.01)
            self.vision(took_s=0.01)
        assert not self.scheduler.has_work, f"stuck: {self.scheduler.ledger()}"
        assert not self.scheduler.ledger().holders
        for number, event in self.finished.items():
            expected = expected_tokens(self.requests[number])
            if event.reason in (FinishReason.ERROR, FinishReason.ABORT):
                expected = expected[: len(self.tokens[number])]
            assert self.tokens[number] == expected, f"request {number}: wrong tokens"
