"""Sampling of video frames for the Qwen-VL families: which frames, their size, and their times.

The numbers are those of the families' video processors. Does not know towers or prompts.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from hydra_engine.core.options import SpecOptions
from hydra_engine.errors import CheckpointError, InvalidImage
from hydra_engine.models.qwen_vl.geometry_spec import PixelLimits, max_image_tokens, pixel_limits, smart_resize
from hydra_engine.models.specs.base import VideoInfo
from hydra_engine.models.specs.fields import Fields
from hydra_engine.models.specs.geometry import check_frames, check_picture

FRAMES = PixelLimits(128 * 28 * 28, 768 * 28 * 28)  # of each frame: the processor class's of Qwen2-VL
ALL_FRAMES = PixelLimits(128 * 32 * 32, 768 * 32 * 32)  # of all frames together: the processor class's of Qwen3-VL
DEFAULT_FPS = 2.0  # the models' authors' rate; the processor's class has none


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """Frame sampling of Qwen2-VL and Qwen2.5-VL: `num_frames`, or as many as `fps` gives between `min_frames` and
    `max_frames`, evenly spread, in multiples of `depth`. Unless `always`, a video without more frames than that keeps
    all of them, even an odd number."""

    depth: int  # frames of one temporal patch
    fps: float
    num_frames: int | None
    min_frames: int
    max_frames: int
    always: bool
    limits: PixelLimits
    total_tokens: int | None  # all frames together have at most 0.9 of the pixels of this many tokens; None: no bound

    def choose_frames(self, video: VideoInfo) -> tuple[int, ...]:
        """Returns ascending indices of frames. Raises InvalidImage for a video without frames or with an impossible
        frame rate."""
        total = video.num_frames
        check_frames(total, video.fps)
        count = self._count(video)
        if count < 1 or (not self.always and self._takes_all(video)):
            return tuple(range(total))
        step = total / count
        return tuple(min(int(as_float32(index * step)), total - 1) for index in range(count))

    def frame_limits(self, num_frames: int, factor: int) -> PixelLimits:
        """Pixel limits of each of `num_frames` chosen frames; `factor` is the side of a token in pixels."""
        if self.total_tokens is None:
            return self.limits
        share = int(self.total_tokens * factor * factor * 0.9) * self.depth // num_frames
        most = max(min(self.limits.max_pixels, share), int(self.limits.min_pixels * 1.05))
        return PixelLimits(self.limits.min_pixels, most)

    def _takes_all(self, video: VideoInfo) -> bool:
        if self.num_frames is not None:
            return video.num_frames <= self.num_frames
        return video.num_frames <= self.max_frames and (
            video.fps <= self.fps or video.num_frames <= max(self.min_frames, self.depth)
        )

    def _count(self, video: VideoInfo) -> int:
        """Number of frames, a multiple of `depth`; 0 for a shorter video."""
        total = video.num_frames
        if self.num_frames is not None:
            return min(round(self.num_frames / self.depth), total // self.depth) * self.depth
        target = max(total / video.fps * self.fps, self.min_frames)
        return math.floor(min(target, self.max_frames, total) / self.depth) * self.depth


def as_float32(number: float) -> float:
    """Rounds to the nearest float32, as in the processors' tensors."""
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


def frame_counts(settings: Fields, depth: int) -> tuple[int, int]:
    """Returns (min_frames, max_frames) of a video."""
    min_frames, max_frames = settings.integer("min_frames", 4), settings.integer("max_frames", 768)
    if max_frames < max(min_frames, depth):
        raise settings.wrong_value("max_frames", f"at least min_frames, {min_frames}, and a temporal patch, {depth}")
    return min_frames, max_frames


def frame_sampling(settings: Fields, depth: int, options: SpecOptions) -> FrameSampling:
    """Reads the settings of the video processor, or of the image processor if the directory has no other."""
    if "fps" in settings and "num_frames" in settings:
        raise CheckpointError(f"{settings.where} has both fps and num_frames; keep one of them")
    min_frames, max_frames = frame_counts(settings, depth)
    capped = settings.flag("cap_pixels_per_frame", False)
    return FrameSampling(
        depth=depth,
        fps=settings.number("fps", DEFAULT_FPS),
        num_frames=settings.integer("num_frames", at_least=depth) if "num_frames" in settings else None,
        min_frames=min_frames,
        max_frames=max_frames,
        always=settings.flag("do_sample_frames", False),
        limits=pixel_limits(settings, FRAMES, options),
        total_tokens=settings.integer("max_video_tokens", 128000) if capped else None,
    )


@dataclass(frozen=True, slots=True)
class TimedFrames:
    """Frame sampling of Qwen3-VL: as many frames as `fps` gives between `min_frames` and `max_frames`, evenly spread
    from the first to the last. All frames share one pixel budget, so frames of longer videos are smaller.

    `limits` are pixels of all frames together. `frame_pixels` is the processor's maximum for one frame, within the
    limits; `max_pixels` is the user's."""

    depth: int  # frames of one temporal patch
    fps: float
    min_frames: int
    max_frames: int
    limits: PixelLimits
    frame_pixels: int | None
    max_pixels: int | None

    def choose_frames(self, video: VideoInfo) -> tuple[int, ...]:
        """Returns ascending indices of frames. Raises InvalidImage for a video that is too short or has an impossible
        frame rate."""
        total = video.num_frames
        if total < self.depth:
            raise InvalidImage(f"the video has {total} frames; it needs at least {self.depth}")
        if not 0 < video.fps < math.inf:
            raise InvalidImage(f"the video has {video.fps:g} frames a second; give a rate above 0")
        target = int(min(total / video.fps * self.fps, self.max_frames))
        count = min(max(target, self.min_frames), total)
        step = (total - 1) / (count - 1) if count > 1 else 0.0
        return tuple(round(index * step) for index in range(count))

    def size(self, width: int, height: int, num_frames: int, factor: int) -> tuple[int, int]:
        """Returns (width, height) of every frame, multiples of `factor`, with the processor's arithmetic to the last
        bit."""
        check_picture(width, height)
        if min(width, height) < factor:
            grow = max(factor / height, factor / width)
            width, height = int(width * grow), int(height * grow)
        return smart_resize(width, height, factor, self._limits(num_frames), num_frames, self.depth)

    def seconds(self, frames: Sequence[int], fps: float) -> float:
        """Time of one temporal patch of source frames: the middle between its first and its last."""
        return (frames[0] / fps + frames[-1] / fps) / 2

    def max_image_tokens(self, factor: int) -> int:
        """Most tokens of any temporal patch: frames are largest when there are fewest."""
        least, most = self._limits(self.depth)
        return max_image_tokens(factor, PixelLimits(-(-least // self.depth), -(-most // self.depth)))

    def _limits(self, num_frames: int) -> PixelLimits:
        least, most = self.limits
        if self.frame_pixels is not None:
            most = max(min(self.frame_pixels, most // num_frames), int(least * 1.05)) * num_frames
        if self.max_pixels is not None:
            most = min(most, self.max_pixels * num_frames)
        return PixelLimits(min(least, most), most)


def timed_frames(settings: Fields, depth: int, factor: int, options: SpecOptions) -> TimedFrames:
    """Reads the settings of the video processor, or of the image processor if the directory has no other."""
    if "num_frames" in settings or not settings.flag("do_sample_frames", True):
        raise CheckpointError(f"{settings.where} must sample frames by fps, neither by num_frames nor not at all")
    min_frames, max_frames = frame_counts(settings, depth)
    capped = settings.flag("cap_pixels_per_frame", False)
    return TimedFrames(
        depth=depth,
        fps=settings.number("fps", 2.0),
        min_frames=min_frames,
        max_frames=max_frames,
        limits=pixel_limits(settings, ALL_FRAMES, SpecOptions()),
        frame_pixels=settings.integer("max_video_tokens", 768) * factor * factor if capped else None,
        max_pixels=options.max_pixels,
    )
