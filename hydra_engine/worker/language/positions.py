"""Multimodal rotary positions of one request, from the spans of its prompt: once, when the request arrives.

The layout of a span is `core.media.RopeSpan`; text counts on all three axes alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hydra_engine.core.request import Request

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PromptPositions:
    """`prompt` is [3, num_prompt]; behind the prompt a token sits at its place plus `delta`."""

    prompt: Int64s
    delta: int

    @classmethod
    def of_request(cls, request: Request) -> PromptPositions:
        places = np.arange(request.num_prompt, dtype=np.int64)
        prompt = np.broadcast_to(places, (3, request.num_prompt)).copy()
        for image in request.images:
            rope = image.rope
            assert rope is not None, "an image span without positions"
            rows, columns = np.divmod(np.arange(image.num_tokens), rope.columns)
            prompt[0, image.start : image.end] = rope.time
            prompt[1, image.start : image.end] = rope.row + rows
            prompt[2, image.start : image.end] = rope.column + columns
            prompt[:, image.end :] = places[image.end :] + rope.text_delta
        return cls(prompt, request.rope_delta)

    def of(self, start: int, count: int) -> Int64s:
        """[3, count]"""
        num_prompt, end = self.prompt.shape[1], start + count
        if end <= num_prompt:
            return self.prompt[:, start:end]
        begin = max(start, num_prompt)
        behind = np.arange(begin, end, dtype=np.int64) + self.delta
        return np.concatenate((self.prompt[:, start:num_prompt], np.broadcast_to(behind, (3, end - begin))), axis=1)
