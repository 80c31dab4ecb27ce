"""Lanes on a virtual clock whose steps take what a known cost surface says; each lane runs its plans in order."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hydra_engine.core.cost import CostSurface, Curve
from hydra_engine.core.ids import RequestId
from hydra_engine.core.messages import PixelPayload
from hydra_engine.core.plans import LanguageLoad, LanguagePlan, VisionLoad, VisionPlan
from hydra_engine.core.request import Request
from hydra_engine.core.results import LanguageResult, VisionResult
from hydra_engine.errors import ErrorInfo
from hydra_engine.models.specs.base import ItemPlan, MediaPlan, PreprocessSpec, VideoInfo, VideoPlan, View, no_videos
from hydra_engine.profiler.grid import Sizes
from tests.virtual_clock import VirtualClock

SURFACE = CostSurface(
    rows=Curve((1.0, 8.0, 64.0, 512.0), (0.010, 0.011, 0.025, 0.150)),
    per_key_s=4e-7,
    per_pair_s=2e-8,
    per_chunk_s=5e-4,
    per_decode_s=1e-4,
    patches=Curve((64.0, 256.0, 1024.0), (0.008, 0.020, 0.090)),
    per_patch_pair_s=1e-8,
    decode_slowdown=1.5,
    prefill_slowdown=2.0,
    vision_slowdown=1.25,
)
SIZES = Sizes(
    max_num_seqs=16,
    token_budget=256,
    image_budget=1024,
    max_model_len=2048,
    kv_tokens=16384,
    block_size=16,
    num_image_blocks=64,
    image_block_size=64,
)
FAILED = ErrorInfo("RequestFailed", "logits are not finite", code="numerical_error")


class SquareVision:
    """Pictures keep their size; a patch is 28 pixels wide and becomes one token."""

    preprocess = PreprocessSpec("bicubic", 1.0, (0, 0, 0), (1, 1, 1), "square")
    feature_size = 8
    num_planes = 1
    processor = None

    def __init__(self, max_side: int = 28 * 32) -> None:
        self._max_side = max_side

    @property
    def max_tokens_per_image(self) -> int:
        return (self._max_side // 28) ** 2

    max_tokens_per_item = max_patches_per_image = max_tokens_per_image

    def plan_image(self, width: int, height: int) -> MediaPlan:
        side = max(28, min(width, self._max_side) // 28 * 28)
        grid = side // 28
        item = ItemPlan(side, side, 1, grid * grid, grid * grid, (1, grid, grid), grid, grid)
        return MediaPlan((View.whole(side, side),), (item,))

    def plan_video(self, video: VideoInfo) -> VideoPlan:
        raise no_videos()

    def num_parameters(self) -> int:
        return 1000

    def flops(self, num_patches: int) -> int:
        return 2000 * num_patches


@dataclass
class _Step:
    """`begin_s` is the earliest until `end_s` is known."""

    result: LanguageResult | VisionResult
    begin_s: float
    alone_s: float
    slowdown: float
    end_s: float | None = None


class FakeLanes:
    """`noise`: how much longer a step may take, as a share; one in `burst_every` takes three times as long. `fails`:
    every row fails. A step beside which the other lane is busy when it begins takes its slowdown all along, by the
    partition that the latest language step has chosen."""

    def __init__(
        self, surface: CostSurface = SURFACE, *, noise: float = 0.0, burst_every: int = 0, fails: bool = False
    ) -> None:
        self.surface = surface
        self.clock = VirtualClock(100.0)
        self.wake = threading.Event()
        self.wake.set()
        self.requests: dict[RequestId, Request] = {}
        self.pixels: dict[RequestId, Sequence[PixelPayload]] = {}
        self.language_plans: list[LanguagePlan] = []
        self.vision_plans: list[VisionPlan] = []
        self._noise = noise
        self._burst_every = burst_every
        self._fails = fails
        self._rng = random.Random(1)
        self._steps = 0
        self._chosen = surface
        self._language: deque[_Step] = deque()  # the first one runs, or begins when somebody waits for it
        self._vision: deque[_Step] = deque()

    def add_request(self, request: Request, pixels: Sequence[PixelPayload]) -> None:
        assert request.id not in self.requests
        self.requests[request.id] = request
        self.pixels[request.id] = pixels

    def remove_request(self, request_id: RequestId) -> None:
        del self.requests[request_id]

    def submit_language(self, plan: LanguagePlan) -> None:
        assert all(int(request_id) in self.requests for request_id in plan.decodes.request_ids)
        assert all(chunk.request_id in self.requests for chunk in plan.chunks)
        self.language_plans.append(plan)
        load = plan.load
        failures = tuple((row, FAILED) for row in range(plan.num_rows)) if self._fails else ()
        result = LanguageResult(plan.step_id, 0.0, 0.0, np.zeros(plan.num_rows, np.int64), (), failures)
        if self.surface.splits:
            self._chosen = self.surface.for_partition(plan.partition)
        self._language.append(
            _Step(result, self.clock.now(), self.surface.language_s(load), self._chosen.slowdown(load))
        )

    def submit_vision(self, plan: VisionPlan) -> None:
        self.vision_plans.append(plan)
        load = VisionLoad(plan.num_patches, float(sum(item.num_patches**2 for item in plan.items)))
        result = VisionResult(plan.step_id, 0.0, 0.0, (None,) * len(plan.items))
        alone_s = self.surface.vision_s(load)
        self._vision.append(_Step(result, self.clock.now(), alone_s, self._chosen.vision_slowdown))

    @property
    def num_in_flight(self) -> int:
        return len(self._language) + len(self._vision)

    def poll(self) -> list[VisionResult | LanguageResult]:
        """Waits for the next result."""
        assert self.num_in_flight, "nothing was submitted"
        lanes = self._language, self._vision
        for lane, other in (lanes, lanes[::-1]):
            if lane and lane[0].end_s is None:
                lane[0].end_s = lane[0].begin_s + self._noisy(lane[0].alone_s * (lane[0].slowdown if other else 1.0))
        lane = min((lane for lane in lanes if lane), key=lambda lane: lane[0].end_s or 0.0)
        step = lane.popleft()
        assert step.end_s is not None
        if lane:  # it waited
            lane[0].begin_s = max(lane[0].begin_s, step.end_s)
        self.clock.advance(max(0.0, step.end_s - self.clock.now()))
        self.wake.set()
        return [replace(step.result, started_s=step.begin_s, ended_s=step.end_s)]

    def _noisy(self, seconds: float) -> float:
        self._steps += 1
        burst = 3.0 if self._burst_every and self._steps % self._burst_every == 0 else 1.0
        return seconds * burst * (1 + self._rng.random() * self._noise)


def decodes(count: int, context: int) -> LanguageLoad:
    return LanguageLoad(count, count * context)


def prompt(tokens: int, start: int = 0) -> LanguageLoad:
    return LanguageLoad(0, 0, tokens, tokens * start + tokens * (tokens + 1) / 2, 1)
