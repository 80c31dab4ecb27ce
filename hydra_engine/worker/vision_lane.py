"""A vision plan -> features in the image cache -> a vision result.

Runs in the vision lane's thread. A picture that makes the tower raise, or whose features are not finite, fails alone.
With a gate the tower waits between its pieces when a language step has no more room for it. Does not know where pixels
come from, nor who else runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from hydra_engine.backend.base import Backend, PagedCache
from hydra_engine.clock import Clock
from hydra_engine.core.plans import EncodeItem, EncodeOutcome, VisionPlan, VisionResult
from hydra_engine.errors import ErrorInfo
from hydra_engine.worker.batches import vision_input
from hydra_engine.worker.boundary import attempt, not_finite
from hydra_engine.worker.faults import BEFORE_VISION_STEP, FaultPoints
from hydra_engine.worker.gate import LaneGate
from hydra_engine.worker.ports import ServedModel, WorkerRequest


class VisionLane:
    """`gate`: where a language lane runs on the same device. `piece_rows` is that of `VisionInput`."""

    def __init__(
        self,
        model: ServedModel,
        backend: Backend,
        image_cache: PagedCache,
        clock: Clock,
        faults: FaultPoints,
        gate: LaneGate | None = None,
        piece_rows: int = 0,
    ) -> None:
        self._model = model
        self._device = backend.device.torch_device
        self._cache = image_cache
        self._clock = clock
        self._faults = faults
        self._gate = gate
        self._piece_rows = piece_rows

    def run(self, plan: VisionPlan, records: Sequence[WorkerRequest]) -> VisionResult:
        """`records[i]` belongs to `plan.items[i]`. Never raises because of a request's content. The times of the result
        include waits at the gate."""
        started_s = self._clock.now()
        if self._gate is None:
            outcomes = self._all(plan.items, records)
        else:
            self._gate.enter()
            try:
                outcomes = self._all(plan.items, records)
            finally:
                self._gate.leave()
        return VisionResult(plan.step_id, started_s, self._clock.now(), outcomes)

    def _all(self, items: Sequence[EncodeItem], records: Sequence[WorkerRequest]) -> tuple[EncodeOutcome, ...]:
        with torch.inference_mode():
            return self._outcomes(items, records)

    def _outcomes(self, items: Sequence[EncodeItem], records: Sequence[WorkerRequest]) -> tuple[EncodeOutcome, ...]:
        """A step that raises is run again picture by picture, so that only the guilty one fails."""
        if not items:
            return ()
        outcomes = attempt(f"vision step of {len(items)}", partial(self._step, items, records))
        if not isinstance(outcomes, ErrorInfo):
            return outcomes
        if len(items) == 1:
            return (EncodeOutcome(items[0].request_id, items[0].image_index, outcomes),)
        pairs = zip(items, records, strict=True)
        return tuple(outcome for item, record in pairs for outcome in self._outcomes((item,), (record,)))

    def _step(self, items: Sequence[EncodeItem], records: Sequence[WorkerRequest]) -> tuple[EncodeOutcome, ...]:
        poisoned = self._faults.hit(BEFORE_VISION_STEP, [record.request for record in records])
        payloads = [record.pixels[item.digest] for item, record in zip(items, records, strict=True)]
        images = [record.request.images[item.image_index] for item, record in zip(items, records, strict=True)]
        inputs = vision_input(items, images, payloads, block_size=self._cache.block_size, device=self._device)
        if self._gate is not None:
            inputs = replace(inputs, checkpoint=self._gate.checkpoint, piece_rows=self._piece_rows)
        self._model.encode(inputs, self._cache)
        return tuple(self._checked(item, poisoned=item.request_id in poisoned) for item in items)

    def _checked(self, item: EncodeItem, *, poisoned: bool) -> EncodeOutcome:
        """Whether what the tower wrote for one picture is made of numbers."""
        blocks = torch.from_numpy(item.block_ids.astype("int64")).to(self._device)
        features = self._cache.data[blocks]  # [n, planes, 1, S, 1, C]
        num_blocks, planes, _, block_size, _, width = features.shape
        rows = features.permute(1, 0, 3, 2, 4, 5).reshape(planes, num_blocks * block_size, width)[:, : item.num_tokens]
        if poisoned or not bool(torch.isfinite(rows).all()):
            return EncodeOutcome(item.request_id, item.image_index, not_finite("image features"))
        return EncodeOutcome(item.request_id, item.image_index)
