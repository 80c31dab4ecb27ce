"""Encodes, captured for some numbers of patches and replayed: from the bytes of patches to features in the image cache.

A replay reads its inputs at fixed addresses: one send brings all integers that follow from the pictures' sizes, and
each picture is cut into patches, one after another, in one copy. An encode of fewer patches than its graph is padded
with separate pictures, whose features go to slot -1: they attend to themselves only, and their pixels are bytes, which
are always finite. If encodes pause, each is a sequence of graphs of some layers with a checkpoint between two of them;
otherwise it is one graph. Does not know requests.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain
from math import ceil, inf

import numpy as np
import torch
from torch import Tensor

from hydra_engine.backend.base import Backend, PagedCache
from hydra_engine.backend.device import Cut, Graph
from hydra_engine.config import EngineConfig
from hydra_engine.core.plans import Int64s
from hydra_engine.models.implementation import ServedModel
from hydra_engine.models.layers.vision import Packing, Slices, TowerInput, VisionInput, no_checkpoint
from hydra_engine.models.vlm import Vision

logger = logging.getLogger(__name__)

# Unless sizes are given. Beyond, a GPU has more to do than its launches take, and padding costs more than they do.
CAPTURED_PATCHES = 4096
_SMALL, _STEP = (64, 128), 256

# What one of the graphs of an encode that pauses should take: the share of the limit that vision gets beside every step
# in any case, so that it fits there. From half a millisecond on its launch (20 us, while the one before it runs) and
# the gap behind it (a few us) vanish; two milliseconds are short beside a decode step of a large model, and longer
# graphs would save nothing more.
PIECE_SHARE = 0.05
SHORTEST_PIECE_S, LONGEST_PIECE_S = 0.5e-3, 2e-3


def piece_seconds(tpot_limit_s: float | None) -> float:
    """Target seconds of one captured piece of an encode; infinite without a limit, since encodes never pause then."""
    return inf if tpot_limit_s is None else min(LONGEST_PIECE_S, max(SHORTEST_PIECE_S, PIECE_SHARE * tpot_limit_s))


def captured_sizes(config: EngineConfig, granule: int, largest: int) -> tuple[int, ...]:
    """Patches of the graphs to capture: ascending multiples of `granule`, as configured (rounded up) or by default up
    to CAPTURED_PATCHES. `largest`: patches of the largest encode, a multiple too. Configured sizes above it are skipped
    with a warning; if none is left, the one size is `largest`."""
    given = config.encoder_cuda_graph_sizes
    most = largest if given else max(min(largest, CAPTURED_PATCHES) // granule, 1) * granule
    wanted = {-(-size // granule) * granule for size in given or (*_SMALL, *range(_STEP, most, _STEP), most)}
    fitting = tuple(sorted(size for size in wanted if size <= most))
    if given and len(fitting) < len(wanted):
        logger.warning("encoder_cuda_graph_sizes above the largest encode (%d patches) are left out", most)
    return fitting or (most,)


def max_captured(config: EngineConfig, largest: int) -> int:
    """Approximate patches of the largest graph, before the tower is known; 0: none is captured. `largest`: patches of
    the largest encode."""
    if config.enforce_eager:
        return 0
    return min(largest, max(config.encoder_cuda_graph_sizes, default=CAPTURED_PATCHES))


def encode_graphs(
    model: ServedModel, backend: Backend, cache: PagedCache, config: EngineConfig, largest: int, *, pauses: bool
) -> tuple[EncodeGraphs | None, str]:
    """Returns (the graphs to capture, ""), or (None, the reason for the user); no reason if `enforce_eager` is set.
    `largest`: patches of the largest encode. `pauses`: encodes wait for language steps."""
    tower = model.tower
    if config.enforce_eager:
        return None, ""
    if tower is None:
        return None, "pictures are encoded launch by launch: what this model's tower does is transformers' own"
    piece_s = piece_seconds(config.scheduler.tpot_slo if pauses else None)
    return EncodeGraphs(tower, backend, cache, captured_sizes(config, tower.granule, largest), piece_s), ""


class EncodeGraphs:
    """The captured encodes by partition and size in patches. `sizes` ascend and are multiples of the tower's granule.
    `piece_s`: target seconds of one graph; infinite: an encode is one graph. Only the lane's thread calls `prepare`,
    `capture` and `replay`, and `replay` in inference mode."""

    def __init__(
        self, tower: Vision, backend: Backend, cache: PagedCache, sizes: Sequence[int], piece_s: float = inf
    ) -> None:
        self.sizes = tuple(sizes)
        self.num_bytes = 0  # of device memory that graphs took
        self._tower = tower
        self._ops, self._device = backend.ops, backend.device
        self._cache = cache
        self._piece_s = piece_s
        self._seconds: dict[int, float] = {}  # of a patch, by partition, in the largest encode
        self._captured: dict[tuple[int, int], tuple[Graph, ...]] = {}  # by partition and size

    # ---- capture

    def prepare(self) -> None:
        """Allocates the input buffers, before the first capture. If the ops cannot plan attention without reading the
        bounds, nothing is captured: `sizes` becomes empty."""
        with torch.inference_mode():
            try:
                self._ops.plan_packed(self._integers[:1].to(torch.int32), 0)
            except ValueError as error:
                logger.info("encodes are not captured: %s", error)
                self.sizes = ()
            else:
                self._tower.reserve(self._patches.shape[0])

    @property
    def capture_order(self) -> list[tuple[int, int]]:
        """(partition, size) of all graphs, per partition the largest first, whose memory the smaller ones reuse."""
        return [
            (partition, size) for partition in range(self._device.partitions.count) for size in reversed(self.sizes)
        ]

    def capture(self, partition: int, size: int) -> None:
        """Captures one encode and replays it once; no encode may be in flight, and the largest size of a partition
        comes first. Graphs whose padding gives features that are not finite are dropped."""
        with torch.inference_mode(), self._device.partitions.use(partition):
            packing = self._blank(size)
            self._send(packing, np.zeros(0, dtype=np.int64))
            features: list[Tensor] = []
            every = self._layers_of_piece(partition, packing)

            def launch(cut: Cut) -> None:
                self._launch(packing, features, no_checkpoint if every is None else _EveryNth(every, cut))

            graphs = self._device.capture_pieces(launch)
            for graph in graphs:
                graph.replay()
            finite = all(bool(torch.isfinite(plane).all()) for plane in features)
            features.clear()  # the graph keeps what it launches; the next one may take the memory
        self.num_bytes += sum(graph.num_bytes for graph in graphs)
        if finite:
            self._captured[partition, size] = graphs
        else:
            logger.warning("encodes of %d patches are not replayed: padding has features that are not finite", size)

    def _layers_of_piece(self, partition: int, packing: Packing) -> int | None:
        """Number of checkpoints per graph; None: the encode is one graph. Follows from the seconds of a patch in the
        partition's first encode, the largest, which is launched op by op: once to compile, then measured. At most half
        of the measured time is that of launches."""
        if self._piece_s == inf:
            return None
        checkpoints = _EveryNth(1, no_checkpoint)
        if partition not in self._seconds:
            self._launch(packing, [])
            begun = self._device.mark()
            self._launch(packing, [], checkpoints)
            ended = self._device.mark()
            ended.wait()
            self._seconds[partition] = ended.seconds_since(begun) / packing.num_patches
            self._num_checkpoints = checkpoints.count
        num_pieces = ceil(self._seconds[partition] * packing.num_patches / self._piece_s)
        return None if num_pieces <= 1 else ceil((self._num_checkpoints + 1) / num_pieces)

    def _launch(self, packing: Packing, features: list[Tensor], checkpoint: Callable[[], None] = no_checkpoint) -> None:
        """Encodes what the input buffers hold, calling `checkpoint` before each layer and after the last; writes the
        features to the cache. `features` become the planes, [num_features, C] each."""
        lengths = [len(integers) for integers in chain(packing.indices, packing.bounds)]
        *integers, slots = self._integers[: sum(lengths) + packing.num_features].split([*lengths, packing.num_features])
        split = len(packing.indices)
        planned = zip(integers[split:], packing.longest, strict=True)
        inputs = TowerInput(
            patches=self._patches[: packing.num_patches],
            indices=tuple(integers[:split]),
            segments=tuple(self._ops.plan_packed(bounds.to(torch.int32), longest) for bounds, longest in planned),
            end=packing.end,
            slices=Slices(checkpoint),
        )
        features[:] = self._tower(inputs)
        for plane, rows in enumerate(features):
            self._ops.write_cache(self._cache, plane, (rows.unsqueeze(1),), slots)

    @cached_property
    def _patches(self) -> Tensor:
        """Input buffer of the patches' pixels, one row of bytes per patch."""
        shape = (self.sizes[-1], self._tower.num_values)
        return torch.zeros(shape, dtype=torch.uint8, device=self._device.torch_device)

    @cached_property
    def _integers(self) -> Tensor:
        """Input buffer of a packing's indices, bounds and feature slots, in this order."""
        packing = self._blank(self.sizes[-1])
        count = sum(map(len, chain(packing.indices, packing.bounds))) + packing.num_features
        return torch.zeros(count, dtype=torch.int64, device=self._device.torch_device)

    def _blank(self, size: int) -> Packing:
        """A packing of padding only."""
        packing = self._tower.pack(VisionInput((), (), (), torch.zeros(0, dtype=torch.int64)), size)
        assert packing is not None, "a size has room for padding alone"
        return packing

    # ---- replay

    @property
    def largest(self) -> int:
        """Patches of the largest captured encode; 0: there is none."""
        return max((size for _, size in self._captured), default=0)

    @property
    def num_graphs(self) -> int:
        """Number of graphs, over all partitions."""
        return sum(map(len, self._captured.values()))

    @property
    def num_pieces(self) -> int:
        """Number of graphs of the largest captured encode on the whole device."""
        return len(self._captured.get((0, self.largest), ()))

    def replay(self, batch: VisionInput, slots: Int64s, num_patches: int) -> bool:
        """Writes the features of the batch to `slots`. Returns False, and launches nothing, if no graph fits.
        `num_patches`: patches of the batch. Calls `batch.checkpoint` between two graphs."""
        index = bisect_left(self.sizes, num_patches)
        if index == len(self.sizes):
            return False
        size = self.sizes[index]
        graphs = self._captured.get((self._device.partitions.current(), size), ())
        packing = self._tower.pack(batch, size) if graphs else None
        if packing is None:
            return False
        self._send(packing, slots)
        self._tower.cut(batch.pixels, self._patches[:num_patches])
        for index, graph in enumerate(graphs):
            if index:
                batch.checkpoint()
            graph.replay()
        return True

    def _send(self, packing: Packing, slots: Int64s) -> None:
        """Sends a packing's integers to their input buffer. Features of padding, beyond `slots`, get slot -1."""
        unread = np.full(packing.num_features - len(slots), -1, dtype=np.int64)
        integers = np.concatenate((*packing.indices, *packing.bounds, slots, unread))
        self._integers[: len(integers)].copy_(self._device.send((integers,))[0])


class _EveryNth:
    """A checkpoint that calls `then` on every n-th call."""

    def __init__(self, n: int, then: Callable[[], None]) -> None:
        self.count = 0
        self._n, self._then = n, then

    def __call__(self) -> None:
        self.count += 1
        if self.count % self._n == 0:
            self._then()
