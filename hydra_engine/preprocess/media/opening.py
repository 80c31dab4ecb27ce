"""Opens pictures and videos and decodes them: size and format by a header or a probe, the plan that follows, and a
function that makes their payloads.

Untrusted files are decoded in child processes. A video is recognised by its first bytes here and parsed in a child
only; a child's answer is checked like any other input, and errors about a file are in the parent's own words. A list of
pictures is a video too. Payloads are uint8 pixels, one per span of features, which the tower normalises on its device.
A digest names the source and plan of the features, not the pixels: the compressed file is hashed, not its decoded form.
Blocking, for worker threads. Does not know turns or other requests.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from PIL import Image

from hydra_engine.config import MediaConfig
from hydra_engine.core.ids import ImageDigest
from hydra_engine.core.messages import PixelPayload
from hydra_engine.core.processes import launch
from hydra_engine.core.prompting import PixelBudget
from hydra_engine.core.units import size
from hydra_engine.errors import InvalidImage, InvalidRequest
from hydra_engine.models.specs.base import MediaPlan, PreprocessSpec, VideoInfo, View, VisionSpec
from hydra_engine.preprocess.media import images
from hydra_engine.preprocess.media.images import broken_image, broken_video, check_size, num_bytes, render
from hydra_engine.preprocess.media.sources import DataUrl, InMemory, LocalFile, read_local
from hydra_engine.preprocess.sandbox.child_host import ChildDied, ChildHost
from hydra_engine.preprocess.sandbox.image_child import Decoded, FramesJob, ImageJob, ProbeJob, VideoJob
from hydra_engine.preprocess.sandbox.processor import ImageProcessor

_MAX_FPS = 1000.0
_EBML = b"\x1a\x45\xdf\xa3"  # Matroska and WebM
_DIGEST_VERSION = b"hydra-image-2"

Payloads = tuple[PixelPayload, ...]

ANSWER_SECONDS = 30.0  # for a picture; the child's own limit is CPU time, this one ends a child that sleeps
VIDEO_ANSWER_SECONDS = 180.0

_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # stacks of more threads would count as memory
_COMMAND = launch.command("hydra_engine.preprocess.sandbox.image_child")
_VIDEO_COMMAND = launch.command("hydra_engine.preprocess.sandbox.video_child")

_FAILED = "its decoder failed"


@dataclass(frozen=True, slots=True)
class Frames:
    """A video given as a list of pictures."""

    pictures: tuple[DataUrl | LocalFile | InMemory, ...]
    fps: float


@dataclass(frozen=True, slots=True)
class Opened:
    """An opened picture or video. `make` decodes it (blocking); `key` identifies the result. `num_bytes` of source are
    held until it is decoded, and a picture of `num_pixels` meanwhile."""

    kind: str
    size: tuple[int, int]
    plan: MediaPlan
    key: bytes
    make: Callable[[], Payloads]
    num_bytes: int
    num_pixels: int = 0
    video: VideoInfo | None = None


class Opener:
    """Opens media for one model. Thread-safe. Pictures go through `processor`, if there is one."""

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
        info = check_video(self._decoders.probe_video(inspected_video(data, self._limits)), self._limits)
        video = self._vision.plan_video(info)
        job = VideoJob(data, video.frames, video.media.views, self._vision.preprocess.resample)
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
        info = info_of_frames(sizes, frames.fps, self._limits)
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


# ---- decoding


class Decoders:
    """The decode children, one of a kind per concurrent caller. Thread-safe. Videos have their own children, because
    their decoders need more memory and time than a picture may take."""

    def __init__(
        self,
        command: Sequence[str] = _COMMAND,
        answer_seconds: float = ANSWER_SECONDS,
        video_command: Sequence[str] = _VIDEO_COMMAND,
        video_answer_seconds: float = VIDEO_ANSWER_SECONDS,
    ) -> None:
        self.pictures = ChildHost("decode images", command, Decoded, variables=_ONE_THREAD)
        self.videos = ChildHost("decode videos", video_command, Decoded, variables=_ONE_THREAD)
        self._answer_seconds = answer_seconds
        self._video_answer_seconds = video_answer_seconds

    def render(self, job: ImageJob | FramesJob | VideoJob) -> bytes:
        """Returns the pixels of the job's views. Blocking. Raises InvalidImage, or Unavailable if no child can be
        started."""
        num_pixel_bytes = num_bytes(job.views)
        if isinstance(job, VideoJob):
            return _run(self.videos, job, self._video_answer_seconds, broken_video, num_pixel_bytes)[1]
        seconds = self._video_answer_seconds if isinstance(job, FramesJob) else self._answer_seconds
        return _run(self.pictures, job, seconds, broken_image, num_pixel_bytes)[1]

    def probe_video(self, data: bytes) -> VideoInfo:
        """Returns a video file's size, frames and rate, not checked against limits. Blocking. Raises as `render`
        does."""
        answer, _ = _run(self.videos, ProbeJob(data), self._video_answer_seconds, broken_video)
        if answer.video is None:
            raise broken_video(_FAILED)
        return answer.video

    def warm_up(self, num_children: int) -> None:
        """Starts children for pictures without waiting for them."""
        self.pictures.warm_up(num_children)

    def close(self) -> None:
        self.pictures.close()
        self.videos.close()


def _run(
    host: ChildHost[Decoded],
    job: object,
    seconds: float,
    broken: Callable[[str], InvalidImage],
    num_pixel_bytes: int = 0,
) -> tuple[Decoded, bytes]:
    try:
        answer, pixels = host.run(job, seconds, num_pixel_bytes)
    except ChildDied as error:
        raise broken(_FAILED) from error
    if answer.is_broken:
        raise broken("its data is damaged or incomplete")
    return answer, pixels


# ---- limits of videos


def decodes_videos() -> bool:
    """True if PyAV is installed."""
    return find_spec("av") is not None


def inspected_video(data: bytes, limits: MediaConfig) -> bytes:
    """Returns the file if a child may parse it. Raises InvalidImage, and InvalidRequest if this server decodes no
    videos."""
    if len(data) > limits.max_video_bytes:
        raise InvalidImage(f"the video is larger than {size(limits.max_video_bytes)}", code="video_too_large")
    if not _is_known(data):
        raise InvalidImage(
            "the video has an unsupported format; supported: MP4, MOV, WEBM, MKV, AVI, GIF",
            code="unsupported_video_format",
        )
    if not decodes_videos():
        raise InvalidRequest(
            "this server decodes no video files; install PyAV (pip install av) or send the frames as images",
            code="video_not_supported",
        )
    return data


def check_video(info: VideoInfo, limits: MediaConfig) -> VideoInfo:
    """Returns what a child has found in a file if it may be decoded. Raises InvalidImage."""
    if info.num_frames < 1 or not (math.isfinite(info.fps) and 0 < info.fps <= _MAX_FPS):
        raise broken_video("it has no frames or no frame rate")
    check_size(info.width, info.height, limits)
    _check_length(info, limits)
    return info


def info_of_frames(sizes: Sequence[tuple[int, int]], fps: float, limits: MediaConfig) -> VideoInfo:
    """Describes a video given as pictures of these upright sizes, at `fps`. Raises InvalidImage."""
    if not sizes:
        raise broken_video("it has no frames")
    if len(set(sizes)) > 1:
        raise InvalidImage("the frames of a video must all have the same size", code="video_decode_failed")
    info = VideoInfo(*sizes[0], num_frames=len(sizes), fps=fps)
    _check_length(info, limits)
    return info


def _check_length(info: VideoInfo, limits: MediaConfig) -> None:
    if info.num_frames > limits.max_video_frames:
        raise _too_large(f"{info.num_frames} frames; at most {limits.max_video_frames}")
    if info.num_frames * info.width * info.height > limits.max_video_pixels:
        raise _too_large(
            f"{info.num_frames} frames of {info.width} x {info.height} pixels; "
            f"at most {limits.max_video_pixels} pixels in total"
        )


def _too_large(what: str) -> InvalidImage:
    return InvalidImage(f"the video has {what} are allowed", code="video_too_large")


def _is_known(data: bytes) -> bool:
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return True
    return data.startswith((_EBML, b"GIF87a", b"GIF89a")) or (data.startswith(b"RIFF") and data[8:12] == b"AVI ")


# ---- payloads and their digests


def payloads_of(data: bytes, content: bytes, plan: MediaPlan, spec: PreprocessSpec) -> tuple[PixelPayload, ...]:
    """Returns one payload per item of the plan, in order. `data` is the result of `images.render` for the plan's
    views."""
    assert len(data) == num_bytes(plan.views)
    source = plan_digest(content, plan.views, spec)
    payloads = []
    begin = 0
    for index, item in enumerate(plan.items):
        end = begin + item.num_pictures * item.width * item.height * 3
        # Positions are included: KV depends on them, and KV blocks are keyed by these digests.
        place = (item.rows, item.columns, item.time, int(item.continues))
        geometry = struct.pack("<10q", index, item.width, item.height, *item.grid, *place)
        digest = ImageDigest(_digest((_DIGEST_VERSION, source, geometry, b"%d" % item.num_pictures)))
        payloads.append(PixelPayload(digest, item.width, item.height, data[begin:end], item.num_pictures))
        begin = end
    assert begin == len(data)
    return tuple(payloads)


def plan_digest(content: bytes, views: tuple[View, ...], spec: PreprocessSpec) -> bytes:
    """32 bytes that name all payloads of one source under one plan; also their cache key."""
    numbers = [number for v in views for number in (*v.resize, *v.canvas, *v.corner, *v.tile, v.source)]
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    return _digest((_DIGEST_VERSION, spec.identity.encode(), spec.resample.encode(), content, packed))


def content_of_file(data: bytes) -> bytes:
    """32 bytes that name an encoded picture."""
    return _digest((b"file", data))


def content_of_image(image: Image.Image) -> bytes:
    """32 bytes that name a decoded picture."""
    return _digest((b"image", image.mode.encode(), b"%d" % image.width, b"%d" % image.height, image.tobytes()))


def content_of_frames(contents: Sequence[bytes], frames: Sequence[int]) -> bytes:
    """32 bytes that name chosen frames of a video. `contents`: the file's digest, or one for each chosen picture."""
    return _digest((b"frames", b"".join(contents), struct.pack(f"<{len(frames)}q", *frames)))


def _digest(parts: Iterable[bytes]) -> bytes:
    """BLAKE2b-256 over every part with its length, so that no two tuples collide by concatenation."""
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
