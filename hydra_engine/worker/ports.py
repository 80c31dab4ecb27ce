"""What the lanes ask of a model and of each other, as protocols, and the per-request record that they read.

Does not know model families, weights or how a forward pass is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Protocol

import numpy as np
from torch import Tensor

from hydra_engine.backend.base import PagedCache
from hydra_engine.core.ids import ImageDigest
from hydra_engine.core.media import PixelPayload
from hydra_engine.core.plans import Int64s
from hydra_engine.core.request import Request
from hydra_engine.models.inputs import LanguageInput, VisionInput
from hydra_engine.models.vlm import Vision
from hydra_engine.worker.language.sampler import SamplingState

Job = Callable[[], None]
Guard = Callable[[Job], None]  # runs a job in a lane's thread; what raises there ends the worker


class ServedModel(Protocol):
    """Both calls write only the slots that their input names, a slot of -1 not at all; so a call may be repeated."""

    @property
    def num_slices(self) -> int:
        """Pieces that an encode with whole layers is computed in, between which it can wait."""
        ...

    @property
    def can_be_captured(self) -> bool:
        """Whether a forward of decodes does nothing but launch ops and look at shapes."""
        ...

    @property
    def tower(self) -> Vision | None:
        """What an encode runs, where that can be captured."""
        ...

    def reserve_positions(self, end: int) -> None:
        """Of models that can be captured: forwards whose `position_end` is no more than this can be replayed."""
        ...

    def encode(self, inputs: VisionInput, image_cache: PagedCache, /) -> object:
        """Features of every image into its slots; what it returns is not looked at."""
        ...

    def forward(self, inputs: LanguageInput, kv_cache: PagedCache, image_cache: PagedCache | None, /) -> Tensor:
        """Logits [B', V] float32 of the rows in `inputs.logit_rows`. Those of `inputs.scored` are taken on the way."""
        ...


class Gate:
    """Where the vision lane waits for language steps on the same device. This one lets everything pass.

    The other one is `vision/gate.py`. The language lane calls `begin` and `end`, the vision lane all else.
    """

    can_hold = False  # whether the vision lane may have to wait at a checkpoint

    def begin(self, allowance_s: float = inf) -> None:
        """A language step starts, beside which vision may run for `allowance_s` seconds, 0 or more."""

    def end(self) -> float:
        """The step has ended, whatever became of it. Returns the seconds of vision that were computed beside it."""
        return 0.0

    def enter(self, num_patches: int = 0) -> None:
        """A vision step of so many patches starts; waits first if the language step that runs has no allowance left.
        `leave` must follow, in a finally."""

    def checkpoint(self) -> None:
        """Between two pieces of a vision step: waits while the language step that runs has no allowance left."""

    def leave(self) -> None:
        """The vision step has ended, whatever became of it."""

    def close(self) -> None:
        """Nothing waits from now on, whatever the allowance."""


NO_GATE = Gate()


@dataclass(frozen=True, slots=True, eq=False)
class WorkerRequest:
    """What the worker keeps of one request between `add_request` and `remove_request`.

    The registry that maps ids to these belongs to the instance thread. A plan carries the records of its images and
    chunks to the lane with it (taken when it is submitted), so a lane never reads the registry; decodes need none, for
    their slot has what they need. Everything in here is immutable but the history and the constraint of
    `sampling_state`, which only the language lane touches.
    """

    request: Request
    sampling_state: SamplingState
    pixels: Mapping[ImageDigest, PixelPayload]
    pixel_bytes: int
    rope: PromptPositions | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PromptPositions:
    """`prompt` is [3, num_prompt]; behind the prompt a token's position is its index plus `delta`."""

    prompt: Int64s
    delta: int

    @classmethod
    def of_request(cls, request: Request) -> PromptPositions:
        text_positions = np.arange(request.num_prompt, dtype=np.int64)
        prompt = np.broadcast_to(text_positions, (3, request.num_prompt)).copy()
        for image in request.images:
            rope = image.rope
            assert rope is not None, "an image span without positions"
            rows, columns = np.divmod(np.arange(image.num_tokens), rope.columns)
            prompt[0, image.start : image.end] = rope.time
            prompt[1, image.start : image.end] = rope.row + rows
            prompt[2, image.start : image.end] = rope.column + columns
            prompt[:, image.end :] = text_positions[image.end :] + rope.text_delta
        return cls(prompt, request.rope_delta)

    def of(self, start: int, count: int) -> Int64s:
        """[3, count]"""
        num_prompt, end = self.prompt.shape[1], start + count
        if end <= num_prompt:
            return self.prompt[:, start:end]
        begin = max(start, num_prompt)
        behind = np.arange(begin, end, dtype=np.int64) + self.delta
        return np.concatenate((self.prompt[:, start:num_prompt], np.broadcast_to(behind, (3, end - begin))), axis=1)
