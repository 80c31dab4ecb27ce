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
from hydra_engine.core.call import ImagePart, MediaPart, VideoPart
from hydra_engine.core.fairness.byte_budget import ByteBudget
from hydra_engine.core.ids import ImageDigest
from hydra_engine.core.media import PixelPayload
from hydra_engine.core.outputs import StageSpan
from hydra_engine.core.prompting import AS_CONFIGURED, PixelBudget
from hydra_engine.errors import InvalidRequest
from hydra_engine.models.specs.base import MediaPlan, ModelSpec, VideoInfo, VisionSpec
from hydra_engine.models.specs.geometry import no_videos
from hydra_engine.models.transformers_adapter.spec import ONE_PICTURE
from hydra_engine.preprocess.media import images, videos
from hydra_engine.preprocess.media.fetch import MediaFetcher, Resolve
from hydra_engine.preprocess.media.payloads import (
    PixelCache,
    content_of_file,
    content_of_frames,
    content_of_image,
    payloads_of,
    plan_digest,
)
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

MAX_WAITING = 4096  # half of them of one client
DEFAULT_FPS = 2.0  # of frames that come without; what Qwen's models sample videos at

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Media:
    """One picture or video, ready: `plan` says what takes its placeholder's place, `payloads` belong to its items."""

    kind: str  # "image" or "video"
    size: tuple[int, int]  # (width, height) of the upright source
    plan: MediaPlan
    payloads: tuple[PixelPayload, ...]
    video: VideoInfo | None = None  # where it is one
    spans: tuple[StageSpan, ...] = ()  # fetch, preprocess


@dataclass(frozen=True, slots=True)
class Frames:
    """A video that came as a list of pictures."""

    pictures: tuple[DataUrl | LocalFile | InMemory, ...]
    fps: float


class MediaLoader:
    """One per preprocessor; `load` runs on the loop, the work in threads and child processes."""

    def __init__(self, spec: ModelSpec, limits: MediaConfig, clock: Clock, resolve: Resolve | None = None) -> None:
        self._spec = spec
        self._limits = limits
        self._clock = clock
        self._fetcher = MediaFetcher(limits, resolve)
        self._fetched = ByteBudget(limits.max_fetched_bytes)
        self._decoders = Decoders()
        self._pixels = PixelCache(limits.pixel_cache_mib << 20)
        self._processor = None if spec.processor is None else ImageProcessor(spec.processor)
        self._workers = WorkerPool(
            "preprocess-image", num_workers=limits.decode_workers, max_waiting=MAX_WAITING, of="pictures and videos"
        )

    async def warm_up(self) -> None:
        """Starts what the first pictures would otherwise wait for, and waits for none of the decode children."""
        if self._spec.vision is not None:
            await self._workers.run("", self._decoders.warm_up, self._limits.decode_workers)
        if self._processor is not None:
            await self._workers.run("", self._processor.warm_up)

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
            reason = f" here: {self._spec.no_images_because}" if self._spec.no_images_because else ""
            raise InvalidRequest(f"this model takes no images{reason}", param=parts[0].param)
        one_alone = self._spec.processor is not None and not self._spec.processor.joins
        most_images = 1 if one_alone else self._limits.max_images
        for kind, most in (("image", most_images), ("video", self._limits.max_videos)):
            of_kind = [part for part in parts if part.kind == kind]
            if of_kind and kind == "video" and self._spec.video_token_id is None:
                error = no_videos()
                error.param = of_kind[0].param
                raise error
            if len(of_kind) > most:
                allowed = "is allowed" if most == 1 else "are allowed"
                why = f": {ONE_PICTURE}" if one_alone and kind == "image" else ""
                raise InvalidRequest(
                    f"the request has {len(of_kind)} {kind}s; at most {most} {allowed}{why}",
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
        client: str = "",
    ) -> list[Media]:
        """In order; `sources` are what `check` returned, `pixels` what each picture may have beside its own detail. All
        or none: the first error ends the others. What was decoded under another salt is decoded again, or the time that
        it takes would tell whose pictures were here before."""
        if not sources:
            return []
        turn = asyncio.Semaphore(self._limits.decode_workers)  # one request does not fill the queue of all
        jobs = zip(parts, sources, strict=True)
        return await _all_or_none(
            [self._load(part, source, _budget(part, pixels), turn, cache_salt, client) for part, source in jobs]
        )

    async def _load(
        self,
        part: MediaPart,
        source: Source | Frames,
        budget: PixelBudget,
        turn: asyncio.Semaphore,
        salt: str,
        client: str,
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
                        media = await self._workers.run(client, self._decode, source, part.kind, budget, salt)
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
        plan = vision.plan_image(*size, budget)
        pixels = partial(self._decoders.render, ImageJob(container, plan.views, vision.preprocess.resample))
        return self._media("image", size, plan, content_of_file(data), pixels, salt, decoded=size[0] * size[1])

    def _from_picture(self, image: Image.Image, vision: VisionSpec, budget: PixelBudget, salt: str) -> Media:
        """A picture that is in memory already."""
        plan = vision.plan_image(*image.size, budget)
        pixels = partial(render, [image], plan.views, vision.preprocess.resample)
        return self._media("image", image.size, plan, content_of_image(image), pixels, salt)

    def _from_video(self, data: bytes, vision: VisionSpec, salt: str) -> Media:
        """Nothing of the file is parsed in this process."""
        info = videos.checked(self._decoders.probe_video(videos.inspected(data, self._limits)), self._limits)
        video = vision.plan_video(info)
        job = videos.VideoJob(data, video.frames, video.media.views, vision.preprocess.resample)
        content = content_of_frames([content_of_file(data)], video.frames)
        media = self._media("video", info[:2], video.media, content, partial(self._decoders.render, job), salt)
        return replace(media, video=info)

    def _from_frames(self, frames: Frames, vision: VisionSpec, salt: str) -> Media:
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
        video, resample = vision.plan_video(info), vision.preprocess.resample
        chosen, views = [pictures[index] for index in video.frames], video.media.views
        if any(are_files):
            contents = [content_of_file(container.data) for container in chosen]
            pixels = partial(self._decoders.render, FramesJob(tuple(chosen), views, resample))
        else:
            contents = [content_of_image(picture) for picture in chosen]
            pixels = partial(render, chosen, views, resample)
        content = content_of_frames(contents, video.frames)
        return replace(self._media("video", info[:2], video.media, content, pixels, salt), video=info)

    def _media(
        self,
        kind: str,
        size: tuple[int, int],
        plan: MediaPlan,
        content: bytes,
        pixels: Callable[[], bytes],
        salt: str,
        decoded: int = 0,
    ) -> Media:
        """What was made of this `content` under this plan and salt before, or is made of the `pixels` of its views.
        `decoded` pixels of a picture exist meanwhile."""
        assert self._spec.vision is not None
        spec = self._spec.vision.preprocess
        digest = plan_digest(content, plan.views, spec)

        def make() -> tuple[PixelPayload, ...]:
            with images.room_for(decoded):
                if kind == "image" and self._processor is not None:  # the model's own, which runs through transformers
                    return (self._processor.process(ImageDigest(digest), plan.views[0].canvas, pixels()),)
                return payloads_of(pixels(), content, plan, spec)

        payloads = self._pixels.get_or_make(_key(digest, salt), make)
        if isinstance(payloads[0], ProcessedPicture):  # what the processor makes of a picture is known now
            plan = payloads[0].plan()
        return Media(kind, size, plan, payloads)

    def _in_memory(self, value: Any) -> Image.Image:
        from_memory = images.from_pil if isinstance(value, Image.Image) else images.from_array
        return from_memory(value, self._limits)


def _budget(part: MediaPart, pixels: PixelBudget) -> PixelBudget:
    return pixels.at(part.detail) if isinstance(part, ImagePart) else pixels


def _key(digest: bytes, salt: str) -> bytes:
    """Of what is kept for requests with this salt; a salt needs no bound."""
    return hashlib.blake2b(digest + salt.encode("utf-8", "surrogatepass"), digest_size=32).digest()


async def _all_or_none(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; at the first error, or when cancelled, the others are cancelled and waited for."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
