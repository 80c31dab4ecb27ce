"""Encodes, captured for some numbers of patches and replayed: from the bytes of patches to features in the image cache.

A replay takes its inputs at fixed addresses: one send brings all integers that follow from the pictures' sizes, and
each picture's patches are copied beside those of the others. An encode of fewer patches than its graph is padded with
pictures of its own, whose features go to slot -1: they attend to themselves, and what they are made of is bytes, which
always are numbers. A graph runs as a whole; nothing waits inside. Does not know requests.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend.base import Backend, PagedCache
from hydra_engine.backend.device import Graph
from hydra_engine.config import EngineConfig
from hydra_engine.core.plans import Ints
from hydra_engine.models.inputs import VisionInput, go_on
from hydra_engine.models.layers.vision_packing import Packing, TowerInput
from hydra_engine.models.layers.vision_slices import Slices
from hydra_engine.models.vlm import Vision
from hydra_engine.worker.ports import ServedModel

logger = logging.getLogger(__name__)

# Unless sizes are given. Beyond, a GPU has more to do than its launches take, and padding costs more than they do.
CAPTURED_PATCHES = 4096
_SMALL, _STEP = (64, 128), 256


def captured_sizes(config: EngineConfig, granule: int, largest: int) -> tuple[int, ...]:
    """Ascending multiples of `granule`. `largest`: patches of the largest encode, a multiple too."""
    given = config.encoder_cuda_graph_sizes
    most = largest if given else max(min(largest, CAPTURED_PATCHES) // granule, 1) * granule
    wanted = {-(-size // granule) * granule for size in given or (*_SMALL, *range(_STEP, most, _STEP), most)}
    fitting = tuple(sorted(size for size in wanted if size <= most))
    if given and len(fitting) < len(wanted):
        logger.warning("encoder_cuda_graph_sizes above the largest encode (%d patches) are left out", most)
    return fitting or (most,)


def most_captured(config: EngineConfig, largest: int) -> int:
    """About the patches of the largest graph, before the tower is known; 0: none is captured."""
    if config.enforce_eager:
        return 0
    return min(largest, max(config.encoder_cuda_graph_sizes, default=CAPTURED_PATCHES))


def encode_graphs(
    model: ServedModel, backend: Backend, cache: PagedCache, config: EngineConfig, largest: int, *, pauses: bool
) -> tuple[EncodeGraphs | None, str]:
    """Those that are to be captured before the first encode, or None and why, unless that was asked for. `pauses`:
    encodes wait inside layers."""
    tower = model.tower
    if config.enforce_eager:
        return None, ""
    if tower is None:
        return None, "pictures are encoded launch by launch: what this model's tower does is transformers' own"
    if pauses:
        return None, "pictures are encoded launch by launch: with a limit between tokens they pause, and graphs do not"
    return EncodeGraphs(tower, backend, cache, captured_sizes(config, tower.granule, largest)), ""


class EncodeGraphs:
    """`sizes` ascend and are multiples of the tower's granule. `prepare`, `capture` and `replay` belong to the lane's
    thread; the caller of `replay` is in inference mode."""

    def __init__(self, tower: Vision, backend: Backend, cache: PagedCache, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.num_bytes = 0  # of device memory that graphs took
        self._tower = tower
        self._ops, self._device = backend.ops, backend.device
        self._cache = cache
        self._captured: dict[tuple[int, int], Graph] = {}  # by partition and size

    # ---- capture

    def prepare(self) -> None:
        """Before the first capture: makes what graphs read, and finds out whether the ops plan without contents."""
        with torch.inference_mode():
            try:
                self._ops.plan_packed(self._integers[:1].to(torch.int32), 0)
            except ValueError as error:
                logger.info("encodes are not captured: %s", error)
                self.sizes = ()
            else:
                self._tower.reserve(self._patches.shape[0])

    @property
    def wanted(self) -> list[tuple[int, int]]:
        """(partition, size) of all graphs, the largest first, whose memory the others use again."""
        return [
            (partition, size) for partition in range(self._device.partitions.count) for size in reversed(self.sizes)
        ]

    def capture(self, partition: int, size: int) -> None:
        """When no encode is in flight. A graph whose padding does not give finite features is not kept."""
        with torch.inference_mode(), self._device.partitions.at(partition):
            packing = self._blank(size)
            self._send(packing, np.zeros(0, dtype=np.int64))
            features: list[Tensor] = []
            graph = self._device.capture(partial(self._launch, packing, features))
            graph.replay()
            finite = all(bool(torch.isfinite(plane).all()) for plane in features)
            features.clear()  # the graph keeps what it launches; the next one may take the memory
        self.num_bytes += graph.num_bytes
        if finite:
            self._captured[partition, size] = graph
        else:
            logger.warning("encodes of %d patches are not replayed: padding has features that are not finite", size)

    def _launch(self, packing: Packing, features: list[Tensor]) -> None:
        lengths = [len(integers) for integers in chain(packing.indices, packing.bounds)]
        *integers, slots = self._integers[: sum(lengths) + packing.num_features].split([*lengths, packing.num_features])
        split = len(packing.indices)
        planned = zip(integers[split:], packing.longest, strict=True)
        inputs = TowerInput(
            patches=self._patches[: packing.num_patches],
            indices=tuple(integers[:split]),
            segments=tuple(self._ops.plan_packed(bounds.to(torch.int32), longest) for bounds, longest in planned),
            end=packing.end,
            slices=Slices(go_on),
        )
        features[:] = self._tower(inputs)
        for plane, rows in enumerate(features):
            self._ops.write_cache(self._cache, plane, (rows.unsqueeze(1),), slots)

    @cached_property
    def _patches(self) -> Tensor:
        shape = (self.sizes[-1], self._tower.num_values)
        return torch.zeros(shape, dtype=torch.uint8, device=self._device.torch_device)

    @cached_property
    def _integers(self) -> Tensor:
        """A packing's indices, then its bounds, then the slots of features."""
        packing = self._blank(self.sizes[-1])
        count = sum(map(len, chain(packing.indices, packing.bounds))) + packing.num_features
        return torch.zeros(count, dtype=torch.int64, device=self._device.torch_device)

    def _blank(self, size: int) -> Packing:
        """Padding alone."""
        packing = self._tower.pack(VisionInput((), (), (), torch.zeros(0, dtype=torch.int64)), size)
        assert packing is not None, "a size has room for padding alone"
        return packing

    # ---- replay

    @property
    def largest(self) -> int:
        """Patches of the largest graph; 0: there is none."""
        return max((size for _, size in self._captured), default=0)

    def replay(self, batch: VisionInput, slots: Ints, num_patches: int) -> bool:
        """Writes the features of all spans to `slots`, those of the batch; False, and nothing is done, where no graph
        fits. `num_patches` are those of the batch. A step's checkpoints are not called."""
        index = bisect_left(self.sizes, num_patches)
        if index == len(self.sizes):
            return False
        size = self.sizes[index]
        graph = self._captured.get((self._device.partitions.current(), size))
        packing = None if graph is None else self._tower.pack(batch, size)
        if graph is None or packing is None:
            return False
        self._send(packing, slots)
        begin = 0
        for patches in self._tower.cut(batch.pixels):
            end = begin + patches.shape[0]
            self._patches[begin:end].copy_(patches)
            begin = end
        assert begin == num_patches, "as many patches as the plan says"
        graph.replay()
        return True

    def _send(self, packing: Packing, slots: Ints) -> None:
        unread = np.full(packing.num_features - len(slots), -1, dtype=np.int64)
        integers = np.concatenate((*packing.indices, *packing.bounds, slots, unread))
        self._integers[: len(integers)].copy_(self._device.send((integers,))[0])
