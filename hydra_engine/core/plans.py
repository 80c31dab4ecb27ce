"""What a scheduler asks of its lanes and what comes back. Frozen; block ids are chosen before, bytes touched after.

Shapes: a `BlockTable` array is int32 [capacity]; the first `num_blocks` entries are valid and do not change while a
plan that names them is in flight. Slot of token position p in a request: `block_ids[p // S] * S + p % S`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hydra_engine.core.ids import ImageDigest, RequestId, StepId
from hydra_engine.errors import ErrorInfo

BlockIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class EncodeItem:
    """Encode image `image_index` of a request into image-cache blocks, features in token order."""

    request_id: RequestId
    image_index: int
    digest: ImageDigest
    num_patches: int
    num_tokens: int
    block_ids: BlockIds  # [ceil(num_tokens / S_image)]


@dataclass(frozen=True, slots=True)
class VisionPlan:
    step_id: StepId
    items: tuple[EncodeItem, ...]

    @property
    def num_patches(self) -> int:
        return sum(item.num_patches for item in self.items)


@dataclass(frozen=True, slots=True, eq=False)
class ImageSlice:
    """Rows [row, row + count) of a chunk take features [offset, offset + count) of an image in the image cache."""

    row: int
    count: int
    offset: int
    block_ids: BlockIds


@dataclass(frozen=True, slots=True, eq=False)
class LanguageRow:
    """One request in a language step: compute KV for `token_ids` at positions [start, start + len(token_ids)).

    `num_context` after the step is `start + len(token_ids)`. `sample` asks for a token after the last position (always
    for a decode; for a prefill only in its last chunk). `num_generated` is how many tokens the request had sampled
    before this step: the sampler's counter.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    start: int
    block_ids: BlockIds  # [capacity], first num_blocks valid
    num_blocks: int
    sample: bool
    num_generated: int
    is_decode: bool
    images: tuple[ImageSlice, ...] = ()
    state_slot: int = -1  # of its recurrent state, for models that keep one


@dataclass(frozen=True, slots=True)
class LanguagePlan:
    """Decode rows come first, then prefill chunks."""

    step_id: StepId
    rows: tuple[LanguageRow, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def num_decodes(self) -> int:
        return sum(row.is_decode for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms under the model's distribution before temperature and filters (as OpenAI and vLLM)."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class EncodeOutcome:
    request_id: RequestId
    image_index: int
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class VisionResult:
    step_id: StepId
    started_s: float
    ended_s: float
    outcomes: tuple[EncodeOutcome, ...]


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """`token_id` is None when the row asked for no sample or failed."""

    request_id: RequestId
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    error: ErrorInfo | None = None


@dataclass(frozen=True, slots=True)
class LanguageResult:
    step_id: StepId
    started_s: float
    ended_s: float
    outcomes: tuple[RowOutcome, ...]
