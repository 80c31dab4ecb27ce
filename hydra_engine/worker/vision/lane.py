"""The vision lane: a plan -> features in the image cache -> a result, and the lane's thread with its graphs.

The images of a step are built and sent to the device in one go. A picture that makes the tower raise, or whose features
are not finite, fails alone. With a gate the tower waits between its pieces while the running language step has no
allowance left. On an asynchronous device an encode is replayed if a graph fits, and the next is launched before it has
been computed; one more thread waits for the results, in order. Does not know where pixels come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hydra_engine.backend.base import Backend, PagedCache
from hydra_engine.backend.device import Device, Fetch
from hydra_engine.clock import Clock
from hydra_engine.config import EngineConfig
from hydra_engine.core.ids import StepId
from hydra_engine.core.messages import PixelPayload
from hydra_engine.core.plans import EncodeItem, Int64s, VisionPlan, slots_of
from hydra_engine.core.request import ImageItem
from hydra_engine.core.results import VisionResult
from hydra_engine.errors import ErrorInfo, RequestAborted
from hydra_engine.models.implementation import ServedModel
from hydra_engine.models.layers.vision import VisionInput
from hydra_engine.models.specs.base import VisionSpec
from hydra_engine.worker.blank_steps import warm_vision
from hydra_engine.worker.boundary import DROPPED, OUT_OF_MEMORY, not_finite, run_guarded_step
from hydra_engine.worker.memory.working import image_budget, largest_encode
from hydra_engine.worker.ports import Gate, Guard, Job, WorkerRequest
from hydra_engine.worker.vision.graphs import EncodeGraphs, encode_graphs


class Flag(NamedTuple):
    """The deferred check that one picture's features are finite. `place`: index in the fetched flags."""

    fetch: Fetch
    place: int

    def error(self) -> ErrorInfo | None:
        """Waits for the device. Returns the picture's error; None if its features are finite. Raises BackendError if
        the device failed."""
        (finite,) = self.fetch.result()
        return None if finite[self.place] else not_finite("image features")


class Encoding(NamedTuple):
    """A launched vision step. `outcomes[i]`: the error of `plan.items[i]`, or the check of its features."""

    plan: VisionPlan
    launched_s: float
    outcomes: tuple[ErrorInfo | Flag, ...]


class VisionLane:
    """The lane that runs vision plans in order, in its own thread. `piece_rows`: rows of a layer after which an encode
    can pause, if there is a TPOT limit; 0: whole layers. CPU only: on an asynchronous device such small launches would
    take longer than their work. `run` wraps every job, in the lane's threads. `note`: for the user, why the model's
    encodes are never captured; else empty."""

    captures = "encodes"

    def __init__(
        self,
        model: ServedModel,
        backend: Backend,
        vision: VisionSpec,
        cache: PagedCache,
        config: EngineConfig,
        clock: Clock,
        gate: Gate,
        run: Guard,
        *,
        piece_rows: int,
        asynchronous: bool,
    ) -> None:
        self.graphs: EncodeGraphs | None = None
        self.note = ""
        self._model = model
        self._device = backend.device
        self._cache = cache
        self._clock = clock
        self._gate = gate
        self._warm_up = partial(warm_vision, model, vision, cache, backend.device.torch_device, whole=asynchronous)
        self._run = run
        slices_layers = gate.can_hold and config.scheduler.slices_layers and not asynchronous
        self._piece_rows = piece_rows if slices_layers else 0
        self._max_patches = vision.max_patches_per_image
        if asynchronous:
            largest = 0 if model.tower is None else largest_encode(vision, image_budget(config, vision)).num_patches
            self.graphs, self.note = encode_graphs(model, backend, cache, config, largest, pauses=gate.can_hold)
        # The thread that waits for results, and the end of the previous step: on the device a step begins when it is
        # launched or, if that is later, when the previous one ends.
        self._readers = backend.device.reader("vision results") if asynchronous else None
        self._ended_s = float("-inf")
        self._launching: StepId | None = None  # the step that the lane's thread launches
        self._dropped: tuple[StepId, ...] = ()  # the latest two; no more are in flight
        self.thread = backend.device.lane("vision")

    @property
    def max_plans(self) -> int:
        """The number of plans that may be in flight: 2 if launches are asynchronous, else 1."""
        return 1 if self._readers is None else 2

    def submit(
        self, plan: VisionPlan, records: Sequence[WorkerRequest], deliver: Callable[[VisionResult], None]
    ) -> None:
        """Queues a plan. `records[i]` belongs to `plan.items[i]`. `deliver` is called in one of the lane's threads. A
        request's content never ends the lane; a device failure (BackendError) does."""

        def step() -> None:
            encoding = self._launch(plan, records)
            if self._readers is None:
                deliver(self._read(encoding))
            else:
                self._readers.submit(partial(self._run, lambda: deliver(self._read(encoding))))

        self.thread.submit(partial(self._run, step))

    def drop(self, step_id: StepId) -> None:
        """Stops a submitted step before its next piece: all its items come back as DROPPED, once the device has
        computed what was launched. A step whose last piece is launched completes. Called by the thread that calls
        `submit`."""
        self._dropped = (*self._dropped[-1:], step_id)

    @property
    def num_slices(self) -> int:
        """Approximate number of pieces of the largest picture's encode, between which it can pause; 0: it never
        pauses."""
        if not self._gate.can_hold:
            return 0
        if self.graphs is not None and self.graphs.largest >= self._max_patches:
            return self.graphs.num_pieces
        return self._model.num_slices * (max(1, self._max_patches // self._piece_rows) if self._piece_rows else 1)

    @property
    def warm_up_jobs(self) -> list[Job]:
        """Dummy steps to run in the lane's thread: one encode."""
        return [self._warm_up]

    def close(self) -> None:
        """Waits for the submitted steps and their results."""
        self.thread.close()
        if self._readers is not None:
            self._readers.close()

    def _launch(self, plan: VisionPlan, records: Sequence[WorkerRequest]) -> Encoding:
        """Launches the plan's items, as a vision step at the gate, where it may wait."""
        launched_s = self._clock.now()
        self._launching = plan.step_id
        self._gate.enter(plan.num_patches)
        try:
            with torch.inference_mode():
                outcomes = self._outcomes(plan.items, records)
        finally:
            self._gate.leave()
        return Encoding(plan, launched_s, outcomes)

    def _read(self, encoding: Encoding) -> VisionResult:
        """Waits for the result. Steps are read in order. The times of the result include waits at the gate."""
        errors = tuple(outcome.error() if isinstance(outcome, Flag) else outcome for outcome in encoding.outcomes)
        started_s, self._ended_s = max(encoding.launched_s, self._ended_s), self._clock.now()
        return VisionResult(encoding.plan.step_id, started_s, self._ended_s, errors)

    def _outcomes(
        self, items: Sequence[EncodeItem], records: Sequence[WorkerRequest], *, alone: bool = False
    ) -> tuple[ErrorInfo | Flag, ...]:
        """Launches the items. A step that raises is run again picture by picture, so that only the faulty one fails; a
        single picture that ran out of memory is retried once, after memory has been released. `alone`: a retry of one
        item, which fails if it raises again. A dropped step is not run again. Returns an error or a pending check per
        item."""
        if not items:
            return ()
        flags = run_guarded_step(self._device, f"vision step of {len(items)}", partial(self._step, items, records))
        if not isinstance(flags, ErrorInfo):
            return flags
        if alone or flags == DROPPED or (len(items) == 1 and flags is not OUT_OF_MEMORY):
            return (flags,) * len(items)
        pairs = zip(items, records, strict=True)
        return tuple(found for item, record in pairs for found in self._outcomes((item,), (record,), alone=True))

    def _step(self, items: Sequence[EncodeItem], records: Sequence[WorkerRequest]) -> tuple[Flag, ...]:
        """Launches the encode of these items and the checks of their features. Raises what the model and the device
        raise, and RequestAborted if the step is dropped meanwhile."""
        self._check_needed()
        payloads = [record.pixels[item.digest] for item, record in zip(items, records, strict=True)]
        images = [record.request.images[item.image_index] for item, record in zip(items, records, strict=True)]
        slots = vision_slots(items, self._cache.block_size)
        inputs = vision_input(images, payloads, slots, self._device)
        inputs = replace(inputs, checkpoint=self._checkpoint, piece_rows=self._piece_rows)
        # Before the encode: the buffer that this is sent from is reusable once the copy is done.
        block_ids = self._device.send([item.block_ids.astype(np.int64) for item in items])
        num_patches = sum(item.num_patches for item in items)
        if self.graphs is None or not self.graphs.replay(inputs, slots, num_patches):
            self._model.encode(inputs, self._cache)
        extremes = [self._extremes(item, blocks) for item, blocks in zip(items, block_ids, strict=True)]
        fetch = self._device.fetch((torch.isfinite(torch.stack(extremes)).all(dim=1),))
        return tuple(Flag(fetch, place) for place in range(len(items)))

    def _checkpoint(self) -> None:
        """Waits at the gate between two pieces. Raises RequestAborted if the step was dropped."""
        self._gate.checkpoint()
        self._check_needed()

    def _check_needed(self) -> None:
        if self._launching in self._dropped:
            raise RequestAborted(DROPPED.message)

    def _extremes(self, item: EncodeItem, blocks: Tensor) -> Tensor:
        """Smallest and largest feature, [2]. Both are finite exactly if all features are."""
        features = self._cache.data[blocks]  # [n, planes, 1, S, 1, C]
        num_blocks, planes, _, block_size, _, width = features.shape
        rows = features.permute(1, 0, 3, 2, 4, 5).reshape(planes, num_blocks * block_size, width)[:, : item.num_tokens]
        return torch.stack(torch.aminmax(rows))


def vision_slots(items: Sequence[EncodeItem], block_size: int) -> Int64s:
    """Image cache slots of the features of all items, in order."""
    return np.concatenate([slots_of(item.block_ids, 0, item.num_tokens, block_size) for item in items])


def vision_input(
    images: Sequence[ImageItem],
    payloads: Sequence[PixelPayload],
    slots: Int64s,
    device: Device,
) -> VisionInput:
    """Builds the model's input and sends it to the device. `payloads[i]` belongs to `images[i]`; either all have pixels
    or all have named arrays. `slots` come from `vision_slots`."""
    plain = not payloads[0].arrays
    given = [{"pixels": _pictures(payload)} if plain else _arrays(payload) for payload in payloads]
    sent_slots, *sent = device.send((slots, *chain.from_iterable(arrays.values() for arrays in given)))
    values = iter(sent)
    arrays = tuple({name: next(values) for name in arrays} for arrays in given)
    return VisionInput(
        pixels=tuple(named["pixels"] for named in arrays) if plain else (),
        sources=tuple((image.width, image.height) for image in images),
        grids=tuple(image.grid for image in images),
        slots=sent_slots,
        arrays=() if plain else arrays,
        send=device.send,
    )


def _pictures(payload: PixelPayload) -> npt.NDArray[np.uint8]:
    """Pixels [pictures, height, width, 3]. Copied, because bytes are read-only."""
    flat = np.frombuffer(payload.data, dtype=np.uint8).copy()
    return flat.reshape(payload.count, payload.height, payload.width, 3)


def _arrays(payload: PixelPayload) -> dict[str, npt.NDArray[np.generic]]:
    """The payload's arrays by name. Copied, because bytes are read-only."""
    arrays, begin = {}, 0
    for layout in payload.arrays:
        dtype, count = np.dtype(layout.dtype), math.prod(layout.shape)
        values = np.frombuffer(payload.data, dtype=dtype, count=count, offset=begin).reshape(layout.shape)
        arrays[layout.name] = values.copy()
        begin += count * dtype.itemsize
    return arrays
