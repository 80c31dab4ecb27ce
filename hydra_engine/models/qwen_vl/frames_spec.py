"""Which frames of a video Qwen2-VL and Qwen2.5-VL look at, and how many pixels each may have.

Known are the numbers of their video processor, by which frames are chosen and sized. Does not know patches or tokens.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from hydra_engine.core.options import SpecOptions
from hydra_engine.errors import CheckpointError
from hydra_engine.models.qwen_vl.geometry_spec import PixelLimits, pixel_limits
from hydra_engine.models.specs.base import VideoInfo
from hydra_engine.models.specs.fields import Fields
from hydra_engine.models.specs.geometry import check_frames

FRAMES = PixelLimits(128 * 28 * 28, 768 * 28 * 28)  # the processor class's, for patches of 14 pixels
DEFAULT_FPS = 2.0  # what the models' authors sample at; the processor's class itself names no rate


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """`num_frames`, or as many as `fps` gives between `min_frames` and `max_frames`, evenly spread, in multiples of
    `depth`. Unless `always`, a video without more frames than that keeps all of them, their number odd or even.
    """

    depth: int  # frames of one temporal patch
    fps: float
    num_frames: int | None
    min_frames: int
    max_frames: int
    always: bool
    limits: PixelLimits
    total_tokens: int | None  # the pixels of all frames stay below 0.9 of what so many tokens have; None: no bound

    def choose(self, video: VideoInfo) -> tuple[int, ...]:
        """Indices of frames, ascending; raises InvalidImage for a video that says impossible things of itself."""
        total = video.num_frames
        check_frames(total, video.fps)
        count = self._count(video)
        if count < 1 or (not self.always and self._takes_all(video)):
            return tuple(range(total))
        step = total / count
        return tuple(min(int(as_float32(index * step)), total - 1) for index in range(count))

    def frame_limits(self, num_frames: int, factor: int) -> PixelLimits:
        """Of each of so many chosen frames; `factor` is the width of a token in pixels."""
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
        """A multiple of `depth`; 0 for a video shorter than that."""
        total = video.num_frames
        if self.num_frames is not None:
            return min(round(self.num_frames / self.depth), total // self.depth) * self.depth
        target = max(total / video.fps * self.fps, self.min_frames)
        return math.floor(min(target, self.max_frames, total) / self.depth) * self.depth


def as_float32(number: float) -> float:
    """Rounded to the nearest float32, as the processors' tensors are."""
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


def frame_counts(settings: Fields, depth: int) -> tuple[int, int]:
    """(min_frames, max_frames) of a video."""
    min_frames, max_frames = settings.integer("min_frames", 4), settings.integer("max_frames", 768)
    if max_frames < max(min_frames, depth):
        raise settings.wrong("max_frames", f"at least min_frames, {min_frames}, and a temporal patch, {depth}")
    return min_frames, max_frames


def frame_sampling(settings: Fields, depth: int, options: SpecOptions) -> FrameSampling:
    """From the settings of the video processor, or of the image processor where the directory has no other."""
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
