"""A worker and an exchange with fault points.

The engine has none: the points are put around methods of its lanes once these are built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hydra_engine.backend.base import Ops, PagedCache
from hydra_engine.backend.device import Device
from hydra_engine.core.plans import EncodeItem, LanguagePlan
from hydra_engine.core.request import Request
from hydra_engine.errors import ErrorInfo
from hydra_engine.transfer.plans import StagingJob
from hydra_engine.worker.boundary import not_finite
from hydra_engine.worker.ports import WorkerRequest
from hydra_engine.worker.transfer import Exchange
from hydra_engine.worker.vision.lane import Flag
from hydra_engine.worker.worker import Worker
from tests.faults.points import (
    AFTER_COPY,
    AFTER_STAGING,
    BEFORE_COMPILE,
    BEFORE_LANGUAGE_STEP,
    BEFORE_VISION_STEP,
    MID_COPY,
    MID_LANGUAGE_STEP,
    FaultPoints,
)


class FaultyWorker(Worker):
    """A worker whose steps and compilations have fault points."""

    def __init__(self, *, faults: FaultPoints, **parts: Any) -> None:
        super().__init__(**parts)
        self.faults = faults
        make_faulty(self._constraints, faults)
        if self._vision is not None:
            _make_vision_faulty(self._vision, faults)
        if self._language is not None:
            _FaultyStep(self._language._step, faults)


def make_faulty(constraints: Any, faults: FaultPoints) -> None:
    """Adds the fault point of compilations to `Constraints`."""
    compile_one = constraints._compile

    def compile_faulty(request: Request) -> Any:
        faults.hit(BEFORE_COMPILE, [request])
        return compile_one(request)

    constraints._compile = compile_faulty


class _PoisonedFlag(Flag):
    """The features of a picture that count as not finite."""

    def error(self) -> ErrorInfo | None:
        super().error()
        return not_finite("image features")


def _make_vision_faulty(lane: Any, faults: FaultPoints) -> None:
    step = lane._step

    def faulty_step(items: Sequence[EncodeItem], records: Sequence[WorkerRequest]) -> tuple[Flag, ...]:
        poisoned = faults.hit(BEFORE_VISION_STEP, [record.request for record in records])
        flags = step(items, records)
        return tuple(
            _PoisonedFlag(*flag) if item.request_id in poisoned else flag
            for item, flag in zip(items, flags, strict=True)
        )

    lane._step = faulty_step


class _FaultyStep:
    """The fault points of a language step: before anything is computed, and behind the forward, whose KV is written. A
    step that may be hit there is not replayed."""

    def __init__(self, step: Any, faults: FaultPoints) -> None:
        self._step, self._faults = step, faults
        self._begin, step._begin = step._begin, self.begin
        self._forward, step._forward = step._forward, self.forward
        self._replay_of, step._replay_of = step._replay_of, self.replay_of

    def begin(self, plan: LanguagePlan, records: Sequence[WorkerRequest]) -> Any:
        self._plan = plan
        self._poisoned = self._faults.hit(BEFORE_LANGUAGE_STEP, self._requests())
        self._context = self._begin(plan, records)
        return self._context

    def replay_of(self, *inputs: Any) -> Any:
        if self._poisoned or self._faults.is_armed(MID_LANGUAGE_STEP):
            return None
        return self._replay_of(*inputs)

    def forward(self, *inputs: Any) -> Tensor:
        logits: Tensor = self._forward(*inputs)
        poisoned = self._poisoned | self._faults.hit(MID_LANGUAGE_STEP, self._requests())
        slots = self._context.sampling.seq_slots.tolist()
        rows = [row for row, slot in enumerate(slots) if self._step._slot_table.owners[slot] in poisoned]
        if rows:
            index = torch.tensor(rows).numpy()
            logits.index_fill_(0, self._step._parts.device.send((index,))[0], float("nan"))
        return logits

    def _requests(self) -> Any:
        return self._step._slot_table.requests(self._plan)


class FaultyExchange(Exchange):
    """An exchange whose copies have fault points."""

    def __init__(self, *parts: Any, faults: FaultPoints, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._runner._ops = _FaultyCopies(self._runner._ops, self._device, faults)  # type: ignore[assignment]
        self._staging.fill = _faulty_fill(self._staging, faults)  # type: ignore[method-assign]


class _FaultyCopies:
    """Ops whose copies of a peer's blocks are made in two halves if a fault is armed between them."""

    def __init__(self, ops: Ops, device: Device, faults: FaultPoints) -> None:
        self.ops, self._device, self._faults = ops, device, faults

    def copy_blocks(self, source: PagedCache, target: PagedCache, pairs: Tensor) -> None:
        half = (len(pairs) + 1) // 2 if self._faults.is_armed(MID_COPY) else 0
        if half:
            self.ops.copy_blocks(source, target, pairs[:half])
            self._device.finish()
            if self._faults.hit_copy(MID_COPY):
                flip_a_byte(target, pairs[:half, 1].tolist())
        self.ops.copy_blocks(source, target, pairs[half:])
        self._device.finish()
        if self._faults.hit_copy(AFTER_COPY):
            flip_a_byte(target, pairs[:, 1].tolist())


def _faulty_fill(staging: Any, faults: FaultPoints) -> Callable[..., None]:
    fill = staging.fill

    def faulty(job: StagingJob, ops: _FaultyCopies, device: Device) -> None:
        fill(job, ops.ops, device)
        if faults.hit_copy(AFTER_STAGING):
            flip_a_byte(staging._caches[job.pool], job.staging_blocks)

    return faulty


def flip_a_byte(cache: PagedCache, blocks: Sequence[int]) -> None:
    if blocks:
        cache.block_view(blocks[-1])[0] ^= 0xFF
