"""The loader of pictures and videos: references are checked, fetched, opened, decoded and turned into payloads.

Cheap checks of all references come first; then all media of a request are opened, and too large a request ends there.
Clients take turns at worker threads, and at decoders that run one at a time before they take a thread; untrusted media
are decoded in child processes, once per content. Does not know prompts, tokens or requests.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from hydra_engine.clock import Clock
from hydra_engine.config import MediaConfig
from hydra_engine.core.call import ImagePart, MediaPart, VideoPart
from hydra_engine.core.fairness import ByteBudget, Lease, Turns, WorkerPool
from hydra_engine.core.messages import PixelPayload
from hydra_engine.core.outputs import StageSpan
from hydra_engine.core.processes.preloaded import Preloaded
from hydra_engine.core.prompting import AS_CONFIGURED, MediaLimits, PixelBudget
from hydra_engine.errors import HydraError, InvalidRequest, from_info
from hydra_engine.models.specs.base import MediaPlan, ModelSpec, VideoInfo, no_videos
from hydra_engine.preprocess.media.fetch import MediaFetcher, Resolve
from hydra_engine.preprocess.media.opening import Decoders, Frames, Opened, Opener, Payloads, decodes_videos
from hydra_engine.preprocess.media.sources import InMemory, RemoteFile, Source, classify, with_path_in_errors
from hydra_engine.preprocess.sandbox.processor import ImageProcessor, ProcessedPicture

MAX_WAITING = 4096  # jobs; one client may have half
DEFAULT_FPS = 2.0  # for frames without a rate; Qwen's models sample videos at this

_LARGE_PIXELS = 12_000_000  # from this size one picture at a time, which bounds memory for any number of threads
# Of one request: the others do not count as waiting for a place among all fetches, which has a limit.
_FETCHES_AT_ONCE = 16
_MAX_OPENED_BYTES = 64 << 20  # of opened media that wait; beyond this a medium is opened again in its turn

T = TypeVar("T")
Planned = tuple[str, MediaPlan]  # (kind, plan) of a picture or video


@dataclass(frozen=True, slots=True)
class Media:
    """A picture or video, ready: `plan` is what replaces its placeholder, `payloads` belong to the plan's items."""

    kind: str  # "image" or "video"
    size: tuple[int, int]  # (width, height) of the upright source
    plan: MediaPlan
    payloads: tuple[PixelPayload, ...]
    video: VideoInfo | None = None  # None for a picture
    spans: tuple[StageSpan, ...] = ()  # fetch, preprocess


@dataclass(frozen=True, slots=True)
class _Asker:
    """The request that media are loaded for."""

    client: str
    salt: str
    turn: asyncio.Semaphore  # so that one request does not fill the common queue
    fetches: asyncio.Semaphore
    check: Callable[[Sequence[Planned]], object] | None


@dataclass(slots=True)
class _Loading:
    """A picture or video that is being loaded."""

    part: MediaPart
    source: Source | Frames | None  # None: no longer needed
    budget: PixelBudget
    fetch_lease: Lease  # holds the fetched bytes until they are decoded
    opened_lease: Lease
    spans: tuple[StageSpan, ...] = ()
    turns: Turns | None = None
    opened: Opened | None = None  # kept while `opened_lease` has room for its bytes
    num_pixels: int = 0  # of an encoded picture, by its header
    media: Media | None = None


@dataclass(frozen=True, slots=True)
class _Work:
    payloads: Payloads | Future[Payloads]
    started_s: float
    ended_s: float


def media_limits(spec: ModelSpec, limits: MediaConfig) -> MediaLimits:
    if spec.vision is None or spec.image_token_id is None:
        return MediaLimits()
    max_images = 1 if spec.one_picture_because else limits.images_of_request
    max_videos = limits.max_videos if spec.video_token_id is not None and decodes_videos() else 0
    return MediaLimits(max_images, limits.max_image_bytes, max_videos, limits.max_video_bytes)


class MediaLoader:
    """The loader of one preprocessor; `load` runs on the loop, the work in threads and child processes."""

    def __init__(
        self,
        spec: ModelSpec,
        limits: MediaConfig,
        clock: Clock,
        resolve: Resolve | None = None,
        preloaded: Preloaded | None = None,
    ) -> None:
        self.media_limits = media_limits(spec, limits)
        self._spec = spec
        self._limits = limits
        self._clock = clock
        self._fetcher = MediaFetcher(limits, resolve)
        self._fetched = ByteBudget(limits.max_fetched_bytes)
        self._opened = ByteBudget(_MAX_OPENED_BYTES)
        self._decoders = Decoders()
        self._pixels = PixelCache(limits.pixel_cache_mib << 20)
        self._processor = None
        if spec.processor is not None:
            self._processor = ImageProcessor(spec.processor, limits.decode_workers, preloaded)
        self._opener = None if spec.vision is None else Opener(spec.vision, limits, self._decoders, self._processor)
        noun = "pictures and videos"
        self._workers = WorkerPool(
            "preprocess-image", num_workers=limits.decode_workers, max_waiting=MAX_WAITING, noun=noun
        )
        self._large = Turns("large pictures", num_slots=1, max_waiting=MAX_WAITING)

    async def warm_up(self) -> None:
        """Starts the processes that the first pictures need; returns before the decode children are ready."""
        if self._spec.vision is not None:
            self._fetcher.warm_up()
            await self._workers.run("", self._decoders.warm_up, self._limits.decode_workers)
        if self._processor is not None:
            await self._workers.run("", self._processor.warm_up)

    def forget_pictures(self) -> None:
        self._pixels.clear()

    def close(self) -> None:
        self._workers.close()
        self._decoders.close()
        self._fetcher.close()
        if self._processor is not None:
            self._processor.close()

    def resolve_sources(self, parts: Sequence[MediaPart]) -> list[Source | Frames]:
        """Checks counts and addresses and returns the sources; opens nothing. Raises InvalidRequest that names the
        reference."""
        if not parts:
            return []
        if self._spec.vision is None or self._spec.image_token_id is None:
            reason = f" here: {self._spec.no_images_because}" if self._spec.no_images_because else ""
            raise InvalidRequest(f"this model takes no images{reason}", param=parts[0].param)
        one_picture_because = self._spec.one_picture_because
        max_count = 1 if one_picture_because else self._limits.images_of_request
        for kind, most in (("image", max_count), ("video", self._limits.max_videos)):
            of_kind = [part for part in parts if part.kind == kind]
            if of_kind and kind == "video" and self._spec.video_token_id is None:
                error = no_videos()
                error.param = of_kind[0].param
                raise error
            if len(of_kind) > most:
                allowed = "is allowed" if most == 1 else "are allowed"
                is_models = one_picture_because and kind == "image"
                why = f": {one_picture_because}" if is_models else f" (--max-{kind}s)"
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
        check: Callable[[Sequence[Planned]], object] | None = None,
    ) -> list[Media]:
        """Returns the media in order, or raises the first error and cancels the rest. `sources` are the result of
        `resolve_sources`; `pixels` limits each picture beside its own detail. `check` raises if the plans are too
        large; a worker thread or the loop calls it before anything is decoded, unless only the model's own processor
        can tell the plans. The cache is separate for each salt, since decoding time would reveal other clients'
        pictures."""
        if not sources:
            return []
        check = check if self._processor is None else None
        asker = _Asker(
            client,
            cache_salt,
            asyncio.Semaphore(self._limits.decode_workers),
            asyncio.Semaphore(_FETCHES_AT_ONCE),
            check,
        )
        with ExitStack() as leases:
            items = [
                _Loading(
                    part,
                    source,
                    pixels.for_detail(part.detail) if isinstance(part, ImagePart) else pixels,
                    fetch_lease=leases.enter_context(self._fetched.lease(client)),
                    opened_lease=leases.enter_context(self._opened.lease()),
                )
                for part, source in zip(parts, sources, strict=True)
            ]
            if len(items) == 1:
                await self._open(items[0], asker, is_alone=True)
                return [await self._decode(items[0], asker)]
            plans = await _all_or_none([self._open(item, asker) for item in items])
            self._check_pixels(items)
            if check is not None:
                check(plans)
            return await _all_or_none([self._decode(item, asker) for item in items])

    async def _open(self, item: _Loading, asker: _Asker, *, is_alone: bool = False) -> Planned:
        with _blaming(item.part):
            if isinstance(item.source, RemoteFile):
                async with asker.fetches:
                    started_s = self._clock.now()
                    item.source = InMemory(await self._fetcher.fetch(item.source, item.fetch_lease))
                item.spans = (StageSpan("fetch", started_s, self._clock.now()),)
            async with asker.turn:
                opened, work = await self._workers.run(asker.client, self._open_in_thread, item, asker, is_alone)
            item.turns = self._turns_for(opened)
            item.num_pixels = opened.num_pixels if opened.kind == "image" else 0
            if work is not None:
                await self._finish(item, opened, work)
            elif item.opened_lease.reserve(opened.num_bytes):
                item.opened = opened
        return opened.kind, opened.plan

    def _check_pixels(self, items: Sequence[_Loading]) -> None:
        """Raises InvalidRequest, naming the first picture that is too many, for more encoded pixels than a request may
        have."""
        most = self._limits.pixels_of_request
        for item, num_pixels in zip(items, accumulate(item.num_pixels for item in items), strict=True):
            if num_pixels > most:
                raise InvalidRequest(
                    f"the pictures of the request have more than {most} pixels together; send fewer or smaller ones, "
                    "or serve with a larger --max-image-pixels",
                    code="image_too_large",
                    param=item.part.param,
                )

    async def _decode(self, item: _Loading, asker: _Asker) -> Media:
        if item.media is not None:
            return item.media
        with _blaming(item.part):
            async with asker.turn:
                opened, work = await self._workers.run(
                    asker.client, self._decode_in_thread, item, asker, turns=item.turns
                )
            return await self._finish(item, opened, work)

    def _open_in_thread(self, item: _Loading, asker: _Asker, is_alone: bool) -> tuple[Opened, _Work | None]:
        """Opens, and decodes at once what is cached or is the request's only medium and needs no further turn."""
        started_s = self._clock.now()
        opened = self._opened_from(item, asker)
        if is_alone and asker.check is not None:
            asker.check([(opened.kind, opened.plan)])
        made: Payloads | Future[Payloads] | None = self._pixels.get(opened.key)
        if made is None and is_alone and self._turns_for(opened) is None:
            made = self._made(item, opened)
        return opened, None if made is None else _Work(made, started_s, self._clock.now())

    def _decode_in_thread(self, item: _Loading, asker: _Asker) -> tuple[Opened, _Work]:
        started_s = self._clock.now()
        opened = item.opened or self._opened_from(item, asker)
        return opened, _Work(self._made(item, opened), started_s, self._clock.now())

    def _opened_from(self, item: _Loading, asker: _Asker) -> Opened:
        assert self._opener is not None and item.source is not None and not isinstance(item.source, RemoteFile)
        with with_path_in_errors(item.source):
            return self._opener.open(item.source, item.part.kind, item.budget, asker.salt)

    def _made(self, item: _Loading, opened: Opened) -> Payloads | Future[Payloads]:
        with with_path_in_errors(item.source):
            return self._pixels.get_or_make(opened.key, opened.make)

    def _turns_for(self, opened: Opened) -> Turns | None:
        """The turns that decoding needs besides a thread; None if it needs none."""
        return self._large if opened.num_pixels >= _LARGE_PIXELS else None

    async def _finish(self, item: _Loading, opened: Opened, work: _Work) -> Media:
        payloads, plan, ended_s = work.payloads, opened.plan, work.ended_s
        if isinstance(payloads, Future):
            with with_path_in_errors(item.source):
                payloads = await await_payloads(payloads)
            ended_s = self._clock.now()
        if isinstance(payloads[0], ProcessedPicture):  # the processor has made the plan
            plan = payloads[0].plan()
        span = StageSpan("preprocess", work.started_s, ended_s, tokens=plan.num_patches)
        item.media = Media(opened.kind, opened.size, plan, payloads, opened.video, (*item.spans, span))
        item.source = item.opened = None
        item.fetch_lease.release()
        item.opened_lease.release()
        return item.media


@contextmanager
def _blaming(part: MediaPart) -> Iterator[None]:
    """Sets an error's `param` to the part's position in the request."""
    try:
        yield
    except InvalidRequest as error:
        error.param = error.param or part.param
        raise


async def _all_or_none(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns all results in order; on an error, or if cancelled, cancels the other jobs and waits for them."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# ---- the cache of pixels


class PixelCache:
    """An LRU cache of processed pictures, bounded by the bytes of their pixels (0: off). Requests that need the same
    picture at the same time decode it once. Thread-safe; no thread waits for another's decoding. Never keeps a
    failure."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[bytes, Payloads] = OrderedDict()
        self._num_bytes = 0
        self._making: dict[bytes, Future[Payloads]] = {}
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def get(self, key: bytes) -> Payloads | None:
        with self._lock:
            return self._known(key)

    def get_or_make(self, key: bytes, make: Callable[[], Payloads]) -> Payloads | Future[Payloads]:
        """Returns the payloads, or a future for `await_payloads` if another thread is making them. An exception of
        `make` reaches all who wait for this key; the next call makes it again."""
        if self.max_bytes == 0:
            return make()
        with self._lock:
            known = self._known(key) or self._making.get(key)
            if known is not None:
                return known
            mine = self._making[key] = Future()
            mine.set_running_or_notify_cancel()  # so that a waiter cannot cancel it for others
        return self._make(key, mine, make)

    def clear(self) -> None:
        """Drops all entries; those being made are still added later."""
        with self._lock:
            self._entries.clear()
            self._num_bytes = 0

    def _known(self, key: bytes) -> Payloads | None:
        known = self._entries.get(key)
        if known is not None:
            self._entries.move_to_end(key)
        return known

    def _make(self, key: bytes, promise: Future[Payloads], make: Callable[[], Payloads]) -> Payloads:
        try:
            payloads = make()
        except BaseException as error:
            with self._lock:
                del self._making[key]
            promise.set_exception(_copy(error))
            raise
        with self._lock:
            del self._making[key]
            self._keep(key, payloads)
        promise.set_result(payloads)
        return payloads

    def _keep(self, key: bytes, payloads: Payloads) -> None:
        size = _size_of(payloads)
        if size > self.max_bytes:
            return
        self._entries[key] = payloads
        self._num_bytes += size
        while self._num_bytes > self.max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self._num_bytes -= _size_of(dropped)


async def await_payloads(promise: Future[Payloads]) -> Payloads:
    """Awaits payloads made in another thread."""
    try:
        return await asyncio.wrap_future(promise)
    except HydraError as error:
        raise _copy(error) from error


def _copy(error: BaseException) -> BaseException:
    """Copies a HydraError, since every request sets its own `param`."""
    return from_info(error.info()) if isinstance(error, HydraError) else error


def _size_of(payloads: Payloads) -> int:
    return sum(len(payload.data) for payload in payloads)
