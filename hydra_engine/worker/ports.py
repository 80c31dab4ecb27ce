"""The protocols between the two lanes, and the per-request record that lanes read.

Does not know model families, weights or how a forward pass is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

import numpy as np

from hydra_engine.core.ids import ImageDigest
from hydra_engine.core.messages import PixelPayload
from hydra_engine.core.plans import Int64s
from hydra_engine.core.request import Request
from hydra_engine.worker.language.sampler import SamplingState

Job = Callable[[], None]
Guard = Callable[[Job], None]  # runs a job in a lane's thread; an exception there ends the worker


class Gate:
    """The gate at which the vision lane waits for language steps on the same device. This base class never waits.

    `vision/gate.py` has the gates that do. The language lane calls `begin` and `end`, the vision lane `enter`,
    `checkpoint` and `leave`; any thread may call `close`.
    """

    can_hold = False  # True if the vision lane may have to wait at a checkpoint

    def begin(self, allowance_s: float = inf) -> None:
        """Starts a language step, beside which vision may run for `allowance_s` seconds, 0 or more."""

    def end(self) -> float:
        """Ends the language step, successful or not. Returns the seconds of vision that ran beside it, 0 from a gate
        that does not count them."""
        return 0.0

    def enter(self, num_patches: int = 0) -> None:
        """Starts a vision step of `num_patches` patches; waits first if the running language step has no allowance
        left. `leave` must follow, in a finally."""

    def checkpoint(self) -> None:
        """Waits, between two pieces of a vision step, while the running language step has no allowance left."""

    def leave(self) -> None:
        """Ends the vision step, successful or not."""

    def close(self) -> None:
        """Opens the gate for good: no call waits from now on."""


NO_GATE = Gate()


@dataclass(frozen=True, slots=True, eq=False)
class WorkerRequest:
    """The worker's record of one request between `add_request` and `remove_request`.

    The registry that maps ids to records belongs to the instance thread. A plan goes to its lane with the records of
    its images and chunks, so a lane never reads the registry; decodes read the slot table instead. All fields are
    immutable except the history and the constraint of `sampling_state`, which only the language lane changes; the
    constraint is made ready elsewhere first.
    """

    request: Request
    sampling_state: SamplingState
    pixels: Mapping[ImageDigest, PixelPayload]
    pixel_bytes: int
    rope: PromptPositions | None = None  # None: positions are 1-D, or there is no prompt


@dataclass(frozen=True, slots=True, eq=False)
class PromptPositions:
    """The multimodal rotary positions of a request. `prompt` is [3, num_prompt]; after the prompt a token's position is
    its index plus `delta`."""

    prompt: Int64s
    delta: int

    @classmethod
    def from_request(cls, request: Request) -> PromptPositions:
        """Positions of the prompt: text counts up, and an image's tokens have its time and their rows and columns.
        Asserts that every image span has a position."""
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

    def slice(self, start: int, count: int) -> Int64s:
        """Positions [3, count] of the tokens from `start` on."""
        num_prompt, end = self.prompt.shape[1], start + count
        if end <= num_prompt:
            return self.prompt[:, start:end]
        begin = max(start, num_prompt)
        behind = np.arange(begin, end, dtype=np.int64) + self.delta
        return np.concatenate((self.prompt[:, start:num_prompt], np.broadcast_to(behind, (3, end - begin))), axis=1)
