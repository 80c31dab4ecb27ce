"""Work of the requests of a workload, and its seconds on a device among other requests like it.

No queue and no batch that does not fill. Does not know deployments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

from hydra_engine.core.cost import CostSurface
from hydra_engine.core.plans import LanguageLoad, VisionLoad
from hydra_engine.errors import ConfigError
from hydra_engine.models.specs.base import MediaPlan, ModelSpec, VideoInfo
from hydra_planner.workload.file import WorkloadRequest

# Steps in which a request shares launches and weights with others: requests encoded at once, tokens of prompts, and
# decodes (HeteroServe's batch on a datacenter device, section 5.3).
ENCODES, PREFILL_TOKENS, DECODES = 8, 2048, 64


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a request. `encoded`: patches of each span that is not in the image cache from an earlier request;
    `cached`: tokens at the beginning of its text that an earlier request of the session has computed."""

    text: int
    features: int
    output: int
    encoded: tuple[int, ...] = ()
    cached: int = 0

    @property
    def prompt(self) -> int:
        return self.text + self.features


@dataclass(frozen=True, slots=True)
class RequestSeconds:
    """Seconds of a request on a device, with other requests in the same steps."""

    vision: float
    prefill: float
    decode: float

    @property
    def language(self) -> float:
        return self.prefill + self.decode


def works(spec: ModelSpec, rows: Iterable[WorkloadRequest]) -> Iterator[Work]:
    """Yields the work of each row in order; each picture is encoded once. Text that a family writes around pictures is
    not counted. Raises ConfigError where nothing is known of what the model makes of pictures, or the family's errors
    for one that it cannot take."""
    seen: set[object] = set()
    vision = spec.vision

    @cache
    def plan(width: int, height: int, video: VideoInfo | None) -> MediaPlan:
        if vision is None:
            raise ConfigError("the workload has pictures, and the model has no vision tower", param="workload")
        if vision.processor is not None:
            raise ConfigError(
                "the workload has pictures, and only the model's own processor knows what they become; explain a model "
                "that has a native implementation",
                param="model",
            )
        return vision.plan_image(width, height) if video is None else vision.plan_video(video).media

    for row in rows:
        media: list[tuple[object, MediaPlan]] = [(p.number, plan(p.width, p.height, None)) for p in row.pictures]
        for video in row.videos:
            info = VideoInfo(video.width, video.height, video.frames, video.fps)
            media.append((("video", video.number), plan(video.width, video.height, info)))
        encoded: list[int] = []
        for number, planned in media:
            if number not in seen:
                seen.add(number)
                encoded += [item.num_patches for item in planned.items]
        features = sum(planned.num_tokens for _, planned in media)
        yield Work(row.prompt_tokens, features, row.output_tokens, tuple(encoded), row.shared_tokens)


def vision_seconds(surface: CostSurface, work: Work) -> float:
    """Seconds of the encodes of a request, in steps together with encodes of requests like it."""
    if not work.encoded:
        return 0.0
    pairs = sum(count * count for count in work.encoded)
    return surface.vision_s(VisionLoad(ENCODES * sum(work.encoded), float(ENCODES * pairs))) / ENCODES


def prefill_seconds(surface: CostSurface, work: Work) -> float:
    """Seconds to prefill what is not cached, one token at least, in steps of at least `PREFILL_TOKENS`."""
    start = min(work.cached, work.prompt - 1)
    count = work.prompt - start
    pairs = count * start + count * (count + 1) / 2
    others = -(-PREFILL_TOKENS // count)
    load = LanguageLoad(prefill_tokens=others * count, prefill_pairs=others * pairs, num_chunks=others)
    return surface.language_s(load) / others


def decode_seconds(surface: CostSurface, work: Work, batch: int = DECODES) -> float:
    """Seconds of all tokens but the first, which comes from the prefill, in steps of `batch` decodes."""
    steps = work.output - 1
    context = work.prompt + work.output // 2
    return steps * surface.language_s(LanguageLoad(batch, batch * context)) / batch
