"""Which frames of a video Qwen3-VL looks at, how large they become, and what the prompt says of their times.

Frames share one budget of pixels, so that a longer video has smaller ones. Does not know towers or prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hydra_engine.core.options import SpecOptions
from hydra_engine.errors import CheckpointError, InvalidImage
from hydra_engine.models.qwen_vl.frames_spec import frame_counts
from hydra_engine.models.qwen_vl.geometry_spec import MAX_ASPECT, PixelLimits, most_tokens, pixel_limits
from hydra_engine.models.specs.base import VideoInfo
from hydra_engine.models.specs.fields import Fields
from hydra_engine.models.specs.geometry import check_picture

FRAMES = PixelLimits(128 * 32 * 32, 768 * 32 * 32)  # the video processor class's, of all frames together


@dataclass(frozen=True, slots=True)
class TimedFrames:
    """As many frames as `fps` gives between `min_frames` and `max_frames`, evenly spread from the first to the last.

    `limits` are pixels of all of them together. `frame_pixels` is what the processor lets one frame have at most, where
    the limits leave it; `max_pixels` what the user does.
    """

    depth: int  # frames of one temporal patch
    fps: float
    min_frames: int
    max_frames: int
    limits: PixelLimits
    frame_pixels: int | None
    max_pixels: int | None

    def choose(self, video: VideoInfo) -> tuple[int, ...]:
        """Indices of frames, ascending; raises InvalidImage for a video that is too short."""
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
        """(width, height) of every frame, multiples of `factor`; the arithmetic is the processor's to the last bit."""
        check_picture(width, height)
        if min(width, height) < factor:
            grow = max(factor / height, factor / width)
            width, height = int(width * grow), int(height * grow)
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise InvalidImage(
                f"a frame of {width} x {height} pixels is too long; its sides may differ by a factor of {MAX_ASPECT}",
                code="image_aspect_ratio",
            )
        least, most = self._limits(num_frames)
        wide, high = round(width / factor) * factor, round(height / factor) * factor
        pixels = round(num_frames / self.depth) * self.depth * wide * high
        if pixels > most:
            shrink = math.sqrt(num_frames * height * width / most)
            wide = max(factor, math.floor(width / shrink / factor) * factor)
            high = max(factor, math.floor(height / shrink / factor) * factor)
        elif pixels < least:
            grow = math.sqrt(least / (num_frames * height * width))
            wide = math.ceil(width * grow / factor) * factor
            high = math.ceil(height * grow / factor) * factor
        return wide, high

    def seconds(self, frames: Sequence[int], fps: float) -> float:
        """The time of one temporal patch of source frames: halfway between its first and its last."""
        return (frames[0] / fps + frames[-1] / fps) / 2

    def most_tokens(self, factor: int) -> int:
        """No temporal patch has more: the fewer the frames, the larger they are."""
        least, most = self._limits(self.depth)
        return most_tokens(factor, PixelLimits(-(-least // self.depth), -(-most // self.depth)))

    def _limits(self, num_frames: int) -> PixelLimits:
        least, most = self.limits
        if self.frame_pixels is not None:
            most = max(min(self.frame_pixels, most // num_frames), int(least * 1.05)) * num_frames
        if self.max_pixels is not None:
            most = min(most, self.max_pixels * num_frames)
        return PixelLimits(min(least, most), most)


def timed_frames(settings: Fields, depth: int, factor: int, options: SpecOptions) -> TimedFrames:
    """From the settings of the video processor, or of the image processor where the directory has no other."""
    if "num_frames" in settings or not settings.flag("do_sample_frames", True):
        raise CheckpointError(f"{settings.where} must sample frames by fps, neither by num_frames nor not at all")
    min_frames, max_frames = frame_counts(settings, depth)
    capped = settings.flag("cap_pixels_per_frame", False)
    return TimedFrames(
        depth=depth,
        fps=settings.number("fps", 2.0),
        min_frames=min_frames,
        max_frames=max_frames,
        limits=pixel_limits(settings, FRAMES, SpecOptions()),
        frame_pixels=settings.integer("max_video_tokens", 768) * factor * factor if capped else None,
        max_pixels=options.max_pixels,
    )
