"""The loader of pictures and videos: references are checked, fetched, decoded, and turned into payloads.

Cheap checks of all references come first, then everything is loaded at once, bounded by worker threads; decoding what
strangers send happens in a child process, once per content. Does not know prompts, tokens or requests.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from PIL import Image

from hydra_engine.clock import Clock
from hydra_engine.config import MediaConfig
from hydra_engine.core.byte_budget import ByteBudget
from hydra_engine.core.chat import ImagePart, MediaPart, VideoPart
from hydra_engine.core.ids import ImageDigest
from hydra_engine.core.media import PixelPayload
from hydra_engine.core.outputs import StageSpan
from hydra_engine.core.prompting import AS_CONFIGURED, PixelBudget
from hydra_engine.errors import InvalidRequest
from hydra_engine.models.specs.base import MediaPlan, ModelSpec, PreprocessSpec, VideoInfo, VideoPlan, VisionSpec
from hydra_engine.models.specs.geometry import no_videos
from hydra_engine.preprocess.media import images, videos
from hydra_engine.preprocess.media.fetch import MediaFetcher, Resolve
from hydra_engine.preprocess.media.payloads import content_of_file, content_of_image, payloads_of, plan_digest
from hydra_engine.preprocess.media.pixel_cache import PixelCache
from hydra_engine.preprocess.media.pixels import render
from hydra_engine.preprocess.media.sources import (
    DataUrl,
    InMemory,
    LocalFile,
    RemoteFile,
    Source,
    classify,
    naming,
    read_local,
)
from hydra_engine.preprocess.pool import WorkerPool
from hydra_engine.preprocess.sandbox.decoders import Decoders
from hydra_engine.preprocess.sandbox.image_child import FramesJob, ImageJob
from hydra_engine.preprocess.sandbox.processor import ImageProcessor, ProcessedPicture

MAX_WAITING = 2048
DEFAULT_FPS = 2.0  # of frames that come without; what Qwen's models sample videos at

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Media:
    """One picture or video, ready: `plan` says what takes its placeholder's place, `payloads` belong to its items."""

    kind: str  # "image" or "video"
    size: tuple[int, int]  # (width, height) of the upright source
    plan: MediaPlan
    payloads: tuple[PixelPayload, ...]
    spans: tuple[StageSpan, ...] = ()  # fetch, preprocess


@dataclass(frozen=True, slots=True)
class Frames:
    """A video that came as a list of pictures."""

    pictures: tuple[DataUrl | LocalFile | InMemory, ...]
    fps: float


class MediaLoader:
    """One per intake; `load` runs on the loop, the work in threads and child processes."""

    def __init__(self, spec: ModelSpec, limits: MediaConfig, clock: Clock, resolve: Resolve | None = None) -> None:
        self._spec = spec
        self._limits = limits
        self._clock = clock
        self._fetcher = MediaFetcher(limits, resolve)
        self._fetched = ByteBudget(limits.max_fetched_bytes)
        self._decoders = Decoders()
        self._pixels = PixelCache(limits.pixel_cache_mib << 20)
        self._processor = None if spec.processor is None else ImageProcessor(spec.processor)
        self._workers = WorkerPool("intake-image", num_workers=limits.decode_workers, max_waiting=MAX_WAITING)

    async def warm_up(self) -> None:
        """Starts what the first pictures would otherwise wait for, and waits for none of the decode children."""
        if self._spec.vision is not None:
            await self._workers.run(self._decoders.warm_up, self._limits.decode_workers)
        if self._processor is not None:
            await self._workers.run(self._processor.warm_up)

    def forget_pictures(self) -> None:
        """Pictures that come again are decoded again."""
        self._pixels.clear()

    def close(self) -> None:
        self._workers.close()
        self._decoders.close()
        if self._processor is not None:
            self._processor.close()

    def check(self, parts: Sequence[MediaPart]) -> list[Source | Frames]:
        """Counts and addresses, before anything is opened. Raises InvalidRequest naming the reference."""
        if not parts:
            return []
        if self._spec.vision is None or self._spec.image_token_id is None:
            raise InvalidRequest("this model takes no images", param=parts[0].param)
        for kind, most in (("image", self._limits.max_images), ("video", self._limits.max_videos)):
            of_kind = [part for part in parts if part.kind == kind]
            if of_kind and kind == "video" and self._spec.video_token_id is None:
                error = no_videos()
                error.param = of_kind[0].param
                raise error
            if len(of_kind) > most:
                raise InvalidRequest(
                    f"the request has {len(of_kind)} {kind}s; at most {most} are allowed",
                    code=f"too_many_{kind}s",
                    param=of_kind[most].param,
                )
        sources = []
        for part in parts:
            try:
                sources.append(self._classify(part))
            except InvalidRequest as error:
                error.param = error.param or part.param
                raise
        return sources

    def _classify(self, part: MediaPart) -> Source | Frames:
        is_array = getattr(part.source, "ndim", 0) == 4  # frames, height, width, channels
        if isinstance(part, VideoPart) and (is_array or isinstance(part.source, list | tuple)):
            if len(part.source) > self._limits.max_video_frames:
                raise InvalidRequest(
                    f"the video has {len(part.source)} frames; at most {self._limits.max_video_frames}",
                    code="video_too_large",
                )
            pictures = []
            for frame in part.source:
                picture = classify(frame, self._limits)
                if isinstance(picture, RemoteFile):
                    raise InvalidRequest("the frames of a video must come as data or files, not as URLs")
                pictures.append(picture)
            return Frames(tuple(pictures), part.fps or DEFAULT_FPS)
        return classify(part.source, self._limits, part.kind)

    async def load(
        self,
        parts: Sequence[MediaPart],
        sources: Sequence[Source | Frames],
        pixels: PixelBudget = AS_CONFIGURED,
        cache_salt: str = "",
    ) -> list[Media]:
        """In order; `sources` are what `check` returned, `pixels` what each picture may have beside its own detail. All
        or none: the first error ends the others. What was decoded under another salt is decoded again, or the time that
        it takes would tell whose pictures were here before."""
        if not sources:
            return []
        turn = asyncio.Semaphore(self._limits.decode_workers)  # one request does not fill the queue of all
        jobs = zip(parts, sources, strict=True)
        return await _all_or_none(
            [self._load(part, source, _budget(part, pixels), turn, cache_salt) for part, source in jobs]
        )

    async def _load(
        self, part: MediaPart, source: Source | Frames, budget: PixelBudget, turn: asyncio.Semaphore, salt: str
    ) -> Media:
        try:
            spans: tuple[StageSpan, ...] = ()
            with self._fetched.lease() as lease:  # of what was fetched, until it is decoded
                if isinstance(source, RemoteFile):
                    started_s = self._clock.now()
                    source = InMemory(await self._fetcher.fetch(source, lease))
                    spans = (StageSpan("fetch", started_s, self._clock.now()),)
                async with turn:
                    with naming(source):
                        media = await self._workers.run(self._decode, source, part.kind, budget, salt)
        except InvalidRequest as error:
            error.param = error.param or part.param
            raise
        return replace(media, spans=(*spans, *media.spans))

    def _decode(self, source: Source | Frames, kind: str, budget: PixelBudget, salt: str) -> Media:
        """In a worker thread: a source that needs no network, to pixels."""
        vision = self._spec.vision
        assert vision is not None and not isinstance(source, RemoteFile)
        started_s = self._clock.now()
        value = source if isinstance(source, Frames) else read_local(source, self._limits)
        if isinstance(value, Frames):
            media = self._from_frames(value, vision, salt)
        elif kind == "video":
            media = self._from_video(value, vision, salt)
        elif isinstance(value, bytes):
            media = self._from_file(value, vision, budget, salt)
        else:
            media = self._from_picture(self._in_memory(value), vision, budget, salt)
        span = StageSpan("preprocess", started_s, self._clock.now(), tokens=media.plan.num_patches)
        return replace(media, spans=(span,))

    def _from_file(self, data: bytes, vision: VisionSpec, budget: PixelBudget, salt: str) -> Media:
        """The header here, the pixels in a child process. The plan's views, and so the budget, are in every digest."""
        container = images.inspected(data, self._limits)
        size = images.upright_size(container)
        plan, spec, content = vision.plan_image(*size, budget), vision.preprocess, content_of_file(data)

        def make() -> tuple[PixelPayload, ...]:
            with images.room_for(container.width * container.height):
                pixels = self._decoders.render(ImageJob(container, plan.views, spec.resample))
                return self._payloads(pixels, content, plan, spec)

        payloads = self._pixels.get_or_make(_key(plan_digest(content, plan.views, spec), salt), make)
        return Media("image", size, _planned(plan, payloads), payloads)

    def _from_picture(self, image: Image.Image, vision: VisionSpec, budget: PixelBudget, salt: str) -> Media:
        """A picture that is in memory already."""
        plan, spec, content = vision.plan_image(*image.size, budget), vision.preprocess, content_of_image(image)

        def make() -> tuple[PixelPayload, ...]:
            return self._payloads(render([image], plan.views, spec.resample), content, plan, spec)

        payloads = self._pixels.get_or_make(_key(plan_digest(content, plan.views, spec), salt), make)
        return Media("image", image.size, _planned(plan, payloads), payloads)

    def _payloads(
        self, pixels: bytes, content: bytes, plan: MediaPlan, spec: PreprocessSpec
    ) -> tuple[PixelPayload, ...]:
        """Of one picture; models that run through transformers have a processor of their own."""
        if self._processor is None:
            return payloads_of(pixels, content, plan, spec)
        digest = ImageDigest(plan_digest(content, plan.views, spec))
        return (self._processor.process(digest, plan.views[0].canvas, pixels),)

    def _from_video(self, data: bytes, vision: VisionSpec, salt: str) -> Media:
        """Nothing of the file is parsed in this process."""
        info = videos.checked(self._decoders.probe_video(videos.inspected(data, self._limits)), self._limits)
        video = vision.plan_video(info)
        job = videos.VideoJob(data, video.frames, video.media.views, vision.preprocess.resample)
        return self._video(info, video, [content_of_file(data)], lambda: self._decoders.render(job), salt)

    def _from_frames(self, frames: Frames, vision: VisionSpec, salt: str) -> Media:
        values = [read_local(picture, self._limits) for picture in frames.pictures]
        if all(isinstance(value, bytes) for value in values):
            return self._from_frame_files(values, frames.fps, vision, salt)
        if any(isinstance(value, bytes) for value in values):
            raise InvalidRequest("the frames of a video must all be files or all be pictures in memory")
        pictures = [self._in_memory(value) for value in values]
        info = videos.info_of_frames([picture.size for picture in pictures], frames.fps, self._limits)
        video = vision.plan_video(info)
        chosen = [pictures[index] for index in video.frames]
        contents = [content_of_image(picture) for picture in chosen]
        make = partial(render, chosen, video.media.views, vision.preprocess.resample)
        return self._video(info, video, contents, make, salt)

    def _from_frame_files(self, files: Sequence[bytes], fps: float, vision: VisionSpec, salt: str) -> Media:
        containers = [images.inspected(data, self._limits) for data in files]
        info = videos.info_of_frames([images.upright_size(container) for container in containers], fps, self._limits)
        video = vision.plan_video(info)
        chosen = tuple(containers[index] for index in video.frames)
        job = FramesJob(chosen, video.media.views, vision.preprocess.resample)
        contents = [content_of_file(container.data) for container in chosen]
        return self._video(info, video, contents, lambda: self._decoders.render(job), salt)

    def _video(
        self, info: VideoInfo, video: VideoPlan, contents: Sequence[bytes], make_pixels: Callable[[], bytes], salt: str
    ) -> Media:
        assert self._spec.vision is not None
        plan, spec = video.media, self._spec.vision.preprocess
        content = videos.content_of_frames(contents, video.frames)
        payloads = self._pixels.get_or_make(
            _key(plan_digest(content, plan.views, spec), salt), lambda: payloads_of(make_pixels(), content, plan, spec)
        )
        return Media("video", (info.width, info.height), plan, payloads)

    def _in_memory(self, value: Any) -> Image.Image:
        from_memory = images.from_pil if isinstance(value, Image.Image) else images.from_array
        return from_memory(value, self._limits)


def _budget(part: MediaPart, pixels: PixelBudget) -> PixelBudget:
    return pixels.at(part.detail) if isinstance(part, ImagePart) else pixels


def _key(digest: bytes, salt: str) -> bytes:
    """Of what is kept for requests with this salt; a salt needs no bound."""
    return hashlib.blake2b(digest + salt.encode("utf-8", "surrogatepass"), digest_size=32).digest()


def _planned(plan: MediaPlan, payloads: Sequence[PixelPayload]) -> MediaPlan:
    """What a model's own processor makes of a picture is known once it has seen it."""
    return payloads[0].plan() if isinstance(payloads[0], ProcessedPicture) else plan


async def _all_or_none(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; at the first error, or when cancelled, the others are cancelled and waited for."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
