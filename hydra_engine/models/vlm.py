"""A vision-language model, or the half of it that an instance's role needs.

`encode` fills the image cache, `forward` reads it and fills the KV cache; nothing else connects the two, so they may
run on different lanes or in different processes. Callers run both under `torch.inference_mode()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from hydra_engine.backend.base import Ops, PagedCache
from hydra_engine.models.inputs import LanguageInput, VisionInput
from hydra_engine.models.layers.decoder import Decoder
from hydra_engine.models.layers.vision_packing import Packing, TowerInput, tower_input
from hydra_engine.models.loading.parameters import Demands, Renames, Scope


class Vision(Protocol):
    """Tower and projector: a batch of spans to the rows of the image cache, [M, C] for each of the cache's planes.

    `pack` and `cut` make of the batch what the call computes from. A call does nothing but launch ops and look at
    shapes, so in a room, whose size all shapes follow from, it can be captured.
    """

    weight_names: tuple[str, ...]  # how the canonical names of its weights begin
    renames: Renames  # of all weights of the model
    num_slices: int  # pieces, not of one length, in which an encode with whole layers is computed between checkpoints
    granule: int  # patches that every room is a multiple of
    num_values: int  # bytes of a patch

    def __init__(self, scope: Scope, spec: Any) -> None: ...

    def reserve(self, room: int) -> None:
        """Keeps what calls for rooms up to this one read besides their inputs at one address."""
        ...

    def pack(self, batch: VisionInput, room: int = 0) -> Packing | None:
        """With padding up to `room` patches, 0: without. None where the batch does not fit."""
        ...

    def cut(self, pixels: Sequence[Tensor], patches: Tensor) -> None:
        """uint8 [pictures, height, width, 3] per item -> `patches`, those of one item behind another in the tower's
        order: uint8 [P, num_values] contiguous."""
        ...

    def __call__(self, inputs: TowerInput, /) -> tuple[Tensor, ...]: ...


class VisionLanguageModel:
    """Ready once every slot is filled, which `build.load_model` does. `unneeded`: how names begin of tensors that may
    be in the checkpoint and are not read."""

    deterministic = True  # as far as its ops are: it computes nothing else that depends on a row's neighbours
    can_be_captured = True  # as far as its ops can

    def __init__(self, ops: Ops, demands: Demands, *, vision: Vision | None, decoder: Decoder | None) -> None:
        self._ops, self._decoder, self.holders = ops, decoder, demands.holders
        self.slots, self.unneeded = demands.slots, tuple(demands.unneeded)
        self.tower = vision  # what `encode` runs
        self.num_slices = 0 if vision is None else vision.num_slices
        self.notes: tuple[str, ...] = ()  # what a user should know of its weights, a sentence each

    @property
    def weights_bytes(self) -> int:
        return sum(holder.nbytes for holder in self.holders)

    def reserve_positions(self, end: int) -> None:
        """Forwards whose `position_end` is no more than this read what they need of positions at one address."""
        if self._decoder is not None:
            self._decoder.reserve_positions(end)

    def encode(self, batch: VisionInput, image_cache: PagedCache) -> None:
        """Writes the features of all spans to `batch.slots`."""
        if self.tower is None:
            raise ValueError("encode: expected a model with a vision tower, got one without")
        packing = self.tower.pack(batch)
        assert packing is not None, "without a room everything fits"
        inputs = tower_input(packing, batch, self.tower.cut, self.tower.num_values)
        for plane, features in enumerate(self.tower(inputs)):
            self._ops.write_cache(image_cache, plane, (features.unsqueeze(1),), batch.slots)

    def forward(self, batch: LanguageInput, kv_cache: PagedCache, image_cache: PagedCache | None = None) -> Tensor:
        """[B', V] float32: the logits of `batch.logit_rows`, in their order; good until the next call."""
        if self._decoder is None:
            raise ValueError("forward: expected a model with a decoder, got one without")
        return self._decoder(batch, kv_cache, image_cache)
