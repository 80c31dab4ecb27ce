"""A vision-language model, or the half of it that an instance's role needs.

`encode` fills the image cache, `forward` reads it and fills the KV cache; they share nothing else, so they may run on
different lanes or in different processes. Callers run both under `torch.inference_mode()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from hydra_engine.backend.base import Ops, PagedCache
from hydra_engine.models.layers.decoder import Decoder, LanguageInput
from hydra_engine.models.layers.vision import Packing, TowerInput, VisionInput, tower_input
from hydra_engine.models.loading.parameters import Demands, Renames, Scope


class Vision(Protocol):
    """Tower and projector: from a batch of spans to rows of the image cache, [M, C] per plane.

    `pack` and `cut` prepare the inputs. A call only launches ops and reads shapes, so a batch padded to a capacity,
    which determines all shapes, can be captured as a graph."""

    weight_names: tuple[str, ...]  # how the canonical names of its weights begin
    renames: Renames  # of all weights of the model
    num_slices: int  # pieces, not of one length, in which an encode with whole layers is computed between checkpoints
    granule: int  # every capacity is a multiple of these patches
    num_values: int  # bytes of a patch

    def __init__(self, scope: Scope, spec: Any) -> None: ...

    def reserve(self, capacity: int) -> None:
        """Fixes the addresses of all tables that calls of up to `capacity` patches read besides their inputs."""
        ...

    def pack(self, batch: VisionInput, capacity: int = 0) -> Packing | None:
        """Packs a batch, padded to `capacity` patches (0: no padding). None if it does not fit."""
        ...

    def cut(self, pixels: Sequence[Tensor], patches: Tensor) -> None:
        """Cuts uint8 [pictures, height, width, 3] per item into `patches`, uint8 [P, num_values] contiguous, item after
        item, in the tower's order."""
        ...

    def __call__(self, inputs: TowerInput, /) -> tuple[Tensor, ...]: ...


class VisionLanguageModel:
    """A native model. It is ready after every slot is filled, which `build.load_model` does. `unneeded`: prefixes of
    tensor names that the checkpoint may have and that are not read."""

    deterministic = True  # if its ops are: nothing else depends on a row's neighbours
    can_be_captured = True  # if its ops can

    def __init__(self, ops: Ops, demands: Demands, *, vision: Vision | None, decoder: Decoder | None) -> None:
        self._ops, self._decoder, self.holders = ops, decoder, demands.holders
        self.slots, self.unneeded = demands.slots, tuple(demands.unneeded)
        self.tower = vision  # what `encode` runs
        self.num_slices = 0 if vision is None else vision.num_slices
        self.notes: tuple[str, ...] = ()  # sentences about its weights, for the user

    @property
    def weights_bytes(self) -> int:
        return sum(weight.nbytes for holder in self.holders for weight in holder.packed)

    def reserve_positions(self, end: int) -> None:
        """Fixes the addresses of the position tables for forwards with `position_end` up to `end`."""
        if self._decoder is not None:
            self._decoder.reserve_positions(end)

    def encode(self, batch: VisionInput, image_cache: PagedCache) -> None:
        """Writes the features of all spans to `batch.slots`. Raises ValueError if the model has no vision tower."""
        if self.tower is None:
            raise ValueError("encode: expected a model with a vision tower, got one without")
        packing = self.tower.pack(batch)
        assert packing is not None, "without a capacity everything fits"
        inputs = tower_input(packing, batch, self.tower.cut, self.tower.num_values)
        for plane, features in enumerate(self.tower(inputs)):
            self._ops.write_cache(image_cache, plane, (features.unsqueeze(1),), batch.slots)

    def forward(self, batch: LanguageInput, kv_cache: PagedCache, image_cache: PagedCache | None = None) -> Tensor:
        """Returns the logits of `batch.logit_rows`, [B', V] float32, valid until the next call. Raises ValueError if
        the model has no decoder."""
        if self._decoder is None:
            raise ValueError("forward: expected a model with a decoder, got one without")
        return self._decoder(batch, kv_cache, image_cache)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)
