"""Requests of a workload as preprocessing would make them: token ids without meaning and the spans of its pictures.

Ids are drawn from seeds, so that no cache helps by chance; what requests of a session share, and equal pictures, are
equal here too. The real engine can be given the same prompts (`placeholders`). Answers have a fixed length.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

import numpy as np

from hydra_engine.core.ids import ImageDigest, RequestId
from hydra_engine.core.messages import PixelPayload
from hydra_engine.core.request import ImageItem, Request, Slo
from hydra_engine.core.sampling import SamplingParams
from hydra_engine.errors import ConfigError
from hydra_engine.models.specs.base import MediaPlan, ModelSpec, VideoInfo
from hydra_planner.workload.file import WorkloadRequest

FROZEN = SamplingParams(temperature=0.0, ignore_eos=True)
_BEGINNING = 4  # tokens of a chat template before the pictures, which all requests share
_VOCABULARY = 4096  # so many ids are drawn from
_DRAWN = 1 << 16
_STRIDE = 40_503  # odd, so that keys begin in places of their own
_PIXEL_BYTES = 1  # a payload must not be empty; its bytes are not read


class RequestMaker:
    """`content` changes ids and pictures, not sizes; `slo` is that of every request. Raises ConfigError for what the
    model cannot take."""

    def __init__(self, spec: ModelSpec, content: int = 0, slo: Slo | None = None) -> None:
        self._spec = spec
        self._content = content
        self._slo = slo or Slo()
        taken = {spec.image_token_id, spec.placeholder_id, spec.video_token_id, *spec.eos_token_ids}
        free = [token for token in range(min(spec.language.vocab_size, _VOCABULARY)) if token not in taken]
        self._free = tuple(free)
        self._drawn = tuple(np.random.default_rng([content, 1]).choice(free, _DRAWN).tolist())
        self.beginning = self._free[:_BEGINNING]
        self._plans: dict[tuple[object, ...], MediaPlan] = {}
        self._latest: dict[int, tuple[int, ...]] = {}  # words of each session's latest request

    def words(self, row: WorkloadRequest, number: int) -> tuple[int, ...]:
        """The ids of its text but for the beginning. Of a session's requests they are made in order."""
        count = max(row.prompt_tokens - _BEGINNING, 1)
        shared = self._latest.get(row.session or 0, ())[: max(row.shared_tokens - _BEGINNING, 0)]
        words = (shared + self._ids(number, count - min(len(shared), count)))[:count]
        if row.session is not None:
            self._latest[row.session] = words
        return words

    def placeholders(self, row: WorkloadRequest, number: int) -> list[int]:
        """The prompt as a user of the real engine gives it: one placeholder for each picture."""
        placeholder = self._spec.placeholder_id
        assert placeholder is not None or not row.pictures, "a model with a vision tower has a placeholder"
        return [*self.beginning, *(placeholder or 0 for _ in row.pictures), *self.words(row, number)]

    def request(self, row: WorkloadRequest, number: int, arrival_s: float) -> tuple[Request, tuple[PixelPayload, ...]]:
        """Builds the request as the engine gets it, and payloads without pixels."""
        prompt = list(self.beginning)
        images: list[ImageItem] = []
        for source, (name, width, height, plan) in enumerate(self._media(row)):
            token_id = self._spec.image_token_id
            assert token_id is not None, "a model that takes pictures has a token for them"
            for place, part in enumerate(plan.parts):
                if isinstance(part, str):
                    prompt.append(self.beginning[0])
                    continue
                digest = blake2b(repr((self._content, name, place)).encode(), digest_size=32).digest()
                images.append(
                    ImageItem(
                        digest=ImageDigest(digest),
                        width=width,
                        height=height,
                        num_patches=part.num_patches,
                        num_tokens=part.num_tokens,
                        start=len(prompt),
                        grid=part.grid,
                        bidirectional=part.bidirectional,
                        source=source,
                    )
                )
                prompt += [token_id] * part.num_tokens
        request = Request(
            id=RequestId(number),
            prompt_token_ids=(*prompt, *self.words(row, number)),
            sampling=FROZEN,
            max_new_tokens=row.output_tokens,
            seed=number,
            arrival_s=arrival_s,
            images=tuple(images),
            eos_token_ids=self._spec.eos_token_ids,
            arrival_index=number,
            slo=self._slo,
        )
        return request, tuple(PixelPayload(image.digest, 1, 1, bytes(_PIXEL_BYTES)) for image in images)

    def _media(self, row: WorkloadRequest) -> Iterator[tuple[object, int, int, MediaPlan]]:
        for picture in row.pictures:
            size = (picture.width, picture.height)
            yield picture.number, *size, self._plan(size, None)
        for video in row.videos:
            info = VideoInfo(video.width, video.height, video.frames, video.fps)
            yield ("video", video.number), video.width, video.height, self._plan((video.width, video.height), info)

    def _plan(self, size: tuple[int, int], video: VideoInfo | None) -> MediaPlan:
        vision = self._spec.vision
        if vision is None:
            raise ConfigError("the workload has pictures, and the model has no vision tower", param="workload")
        key = video or size
        if key not in self._plans:
            self._plans[key] = vision.plan_image(*size) if video is None else vision.plan_video(video).media
        return self._plans[key]

    def _ids(self, key: int, count: int) -> tuple[int, ...]:
        """The first ones spell the key, so that no two keys begin alike; the others come from what was drawn, which is
        much faster than to draw them."""
        spelled: list[int] = []
        left = key
        while left or not spelled:
            left, digit = divmod(left, len(self._free))
            spelled.append(self._free[digit])
        start = key * _STRIDE % _DRAWN
        while len(spelled) < count:
            spelled += self._drawn[start : start + count - len(spelled)]
            start = 0
        return tuple(spelled[:count])
