"""Opens pictures and videos without decoding them: size and format by a header or a probe, the plan that follows, and a
function that makes their pixels.

Blocking, for worker threads. Does not know turns or other requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from PIL import Image

from hydra_engine.config import MediaConfig
from hydra_engine.core.ids import ImageDigest
from hydra_engine.core.prompting import PixelBudget
from hydra_engine.errors import InvalidRequest
from hydra_engine.models.specs.base import MediaPlan, VideoInfo, VisionSpec
from hydra_engine.preprocess.media import images, videos
from hydra_engine.preprocess.media.images import render
from hydra_engine.preprocess.media.payloads import (
    Payloads,
    content_of_file,
    content_of_frames,
    content_of_image,
    payloads_of,
    plan_digest,
)
from hydra_engine.preprocess.media.sources import DataUrl, InMemory, LocalFile, read_local
from hydra_engine.preprocess.sandbox.decoders import Decoders
from hydra_engine.preprocess.sandbox.image_child import FramesJob, ImageJob
from hydra_engine.preprocess.sandbox.processor import ImageProcessor


@dataclass(frozen=True, slots=True)
class Frames:
    """A video given as a list of pictures."""

    pictures: tuple[DataUrl | LocalFile | InMemory, ...]
    fps: float


@dataclass(frozen=True, slots=True)
class Opened:
    """An opened picture or video. `make` decodes it (blocking); `key` identifies the result. Until then `num_bytes` of
    source are held; while decoding, a picture of `num_pixels`."""

    kind: str
    size: tuple[int, int]
    plan: MediaPlan
    key: bytes
    make: Callable[[], Payloads]
    num_bytes: int
    num_pixels: int = 0
    video: VideoInfo | None = None


class Opener:
    """An opener of media for one model. Thread-safe. Pictures go through `processor`, if there is one."""

    def __init__(
        self, vision: VisionSpec, limits: MediaConfig, decoders: Decoders, processor: ImageProcessor | None
    ) -> None:
        self._vision = vision
        self._limits = limits
        self._decoders = decoders
        self._processor = processor

    def open(
        self, source: DataUrl | LocalFile | InMemory | Frames, kind: str, budget: PixelBudget, salt: str
    ) -> Opened:
        """Opens one picture or video. Raises InvalidImage, InvalidRequest or Unavailable."""
        value = source if isinstance(source, Frames) else read_local(source, self._limits)
        if isinstance(value, Frames):
            return self._frames(value, salt)
        if kind == "video":
            return self._video(value, salt)
        if isinstance(value, bytes):
            return self._file(value, budget, salt)
        return self._picture(self._in_memory(value), budget, salt)

    def _file(self, data: bytes, budget: PixelBudget, salt: str) -> Opened:
        """Parses the header; a child process decodes the pixels. The plan's views, and so the budget, are part of every
        digest."""
        container = images.inspected(data, self._limits)
        size = images.upright_size(container)
        plan = self._vision.plan_image(*size, budget)
        pixels = partial(self._decoders.render, ImageJob(container, plan.views, self._vision.preprocess.resample))
        return self._opened(
            "image", size, plan, content_of_file(data), pixels, salt, len(container.data), num_pixels=size[0] * size[1]
        )

    def _picture(self, image: Image.Image, budget: PixelBudget, salt: str) -> Opened:
        plan = self._vision.plan_image(*image.size, budget)
        pixels = partial(render, [image], plan.views, self._vision.preprocess.resample)
        num_bytes = 3 * image.width * image.height
        return self._opened("image", image.size, plan, content_of_image(image), pixels, salt, num_bytes)

    def _video(self, data: bytes, salt: str) -> Opened:
        """Probes the video in a child process; this process parses nothing of the file."""
        info = videos.check_video(self._decoders.probe_video(videos.inspected(data, self._limits)), self._limits)
        video = self._vision.plan_video(info)
        job = videos.VideoJob(data, video.frames, video.media.views, self._vision.preprocess.resample)
        content = content_of_frames([content_of_file(data)], video.frames)
        pixels = partial(self._decoders.render, job)
        return self._opened("video", info[:2], video.media, content, pixels, salt, len(data), video=info)

    def _frames(self, frames: Frames, salt: str) -> Opened:
        values = [read_local(picture, self._limits) for picture in frames.pictures]
        are_files = [isinstance(value, bytes) for value in values]
        if any(are_files) and not all(are_files):
            raise InvalidRequest("the frames of a video must all be files or all be pictures in memory")
        pictures: list[Any] = [
            images.inspected(value, self._limits) if is_file else self._in_memory(value)
            for value, is_file in zip(values, are_files, strict=True)
        ]
        sizes = [images.upright_size(picture) if any(are_files) else picture.size for picture in pictures]
        info = videos.info_of_frames(sizes, frames.fps, self._limits)
        video, resample = self._vision.plan_video(info), self._vision.preprocess.resample
        chosen, views = [pictures[index] for index in video.frames], video.media.views
        if any(are_files):
            contents = [content_of_file(container.data) for container in chosen]
            pixels = partial(self._decoders.render, FramesJob(tuple(chosen), views, resample))
            num_bytes, num_pixels = sum(len(container.data) for container in chosen), info.width * info.height
        else:
            contents = [content_of_image(picture) for picture in chosen]
            pixels = partial(render, chosen, views, resample)
            num_bytes, num_pixels = 3 * info.width * info.height * len(chosen), 0
        content = content_of_frames(contents, video.frames)
        return self._opened("video", info[:2], video.media, content, pixels, salt, num_bytes, num_pixels, info)

    def _opened(
        self,
        kind: str,
        size: tuple[int, int],
        plan: MediaPlan,
        content: bytes,
        pixels: Callable[[], bytes],
        salt: str,
        num_bytes: int,
        num_pixels: int = 0,
        video: VideoInfo | None = None,
    ) -> Opened:
        spec, processor = self._vision.preprocess, self._processor
        digest = plan_digest(content, plan.views, spec)

        def make() -> Payloads:
            if kind == "image" and processor is not None:  # transformers runs the model's own processor
                return (processor.process(ImageDigest(digest), plan.views[0].canvas, pixels()),)
            return payloads_of(pixels(), content, plan, spec)

        return Opened(kind, size, plan, _key(digest, salt), make, num_bytes, num_pixels, video)

    def _in_memory(self, value: Any) -> Image.Image:
        from_memory = images.from_pil if isinstance(value, Image.Image) else images.from_array
        return from_memory(value, self._limits)


def _key(digest: bytes, salt: str) -> bytes:
    """The cache key for requests with this salt, whatever its length."""
    return hashlib.blake2b(digest + salt.encode("utf-8", "surrogatepass"), digest_size=32).digest()
