"""Sizes of pictures and videos of the Qwen-VL families: any size is kept, rounded to whole merge blocks between two
pixel counts; of a video, which frames are taken, their size and their times.

Reads the limits in their old layout (`min_pixels`, `max_pixels`) and their new one (`size`). The numbers of videos are
those of the families' video processors. Does not know towers or prompts.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hydra_engine.core.options import SpecOptions
from hydra_engine.core.prompting import AS_CONFIGURED, PixelBudget
from hydra_engine.errors import CheckpointError, ConfigError, InvalidImage
from hydra_engine.models.specs.base import ItemPlan, VideoInfo
from hydra_engine.models.specs.fields import Fields
from hydra_engine.models.specs.vision import check_frames, check_picture

MAX_ASPECT = 200
MAX_FRAMES = 64  # of one temporal patch


class PixelLimits(NamedTuple):
    """Wanted range of pixels of a resized picture or frame; very long ones may be outside."""

    min_pixels: int
    max_pixels: int


@dataclass(frozen=True, slots=True)
class PatchGeometry:
    """The geometry of patches. A patch is `patch_size` pixels wide and high and `temporal_patch_size` pictures deep;
    `merge_size` by `merge_size` patches make one token."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int

    @property
    def factor(self) -> int:
        """Side of a token in pixels; widths and heights are multiples of it."""
        return self.patch_size * self.merge_size

    @property
    def patch_values(self) -> int:
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        return self.merge_size**2

    def item(self, size: tuple[int, int], num_pictures: int = 1, *, time: int = 0, continues: bool = False) -> ItemPlan:
        """Plans one temporal patch of resized pictures; `size` is (width, height), multiples of `factor`."""
        width, height = size
        rows, columns = height // self.factor, width // self.factor
        return ItemPlan(
            width=width,
            height=height,
            num_pictures=num_pictures,
            num_patches=rows * columns * self.patches_per_token,
            num_tokens=rows * columns,
            grid=(1, height // self.patch_size, width // self.patch_size),
            rows=rows,
            columns=columns,
            time=time,
            continues=continues,
        )


PICTURES = PixelLimits(56 * 56, 1280 * 28 * 28)  # the picture processor class's


def smart_resize(
    width: int, height: int, factor: int, limits: PixelLimits, num_frames: int = 1, depth: int = 1
) -> tuple[int, int]:
    """Returns (width, height), each side rounded to the nearest multiple of `factor`, halves to even. If that violates
    the limits, both sides are first scaled by one factor and then rounded into them. The limits are for `num_frames`
    pictures of this size together; in the comparison their number is rounded to whole temporal patches of `depth`.

    The arithmetic is that of the families' processors to the last bit: float64, in this order."""
    check_picture(width, height)
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise InvalidImage(
            f"a picture of {width} x {height} pixels is too long; its sides may differ by a factor of {MAX_ASPECT}",
            code="image_aspect_ratio",
        )
    wide, high = round(width / factor) * factor, round(height / factor) * factor
    pixels = round(num_frames / depth) * depth * wide * high
    if pixels > limits.max_pixels:
        wide, high = _filling(width, height, factor, limits.max_pixels, num_frames)
    elif pixels < limits.min_pixels:
        grow = math.sqrt(limits.min_pixels / (num_frames * height * width))
        wide = math.ceil(width * grow / factor) * factor
        high = math.ceil(height * grow / factor) * factor
    return wide, high


def budgeted_size(width: int, height: int, factor: int, limits: PixelLimits, budget: PixelBudget) -> tuple[int, int]:
    """Applies `smart_resize` within limits and budget. A picture that rounding would enlarge beyond the budget is
    shrunk to it, so that `max_image_tokens` of the limits holds for every budget."""
    if budget == AS_CONFIGURED:
        return smart_resize(width, height, factor, limits)
    most = limits.max_pixels if budget.max_pixels is None else min(budget.max_pixels, limits.max_pixels)
    least = limits.min_pixels if budget.min_pixels is None else budget.min_pixels
    wide, high = smart_resize(width, height, factor, PixelLimits(min(least, most), most))
    if wide * high > most:
        wide, high = _filling(width, height, factor, most)
    return wide, high


def _filling(width: int, height: int, factor: int, pixels: int, num_frames: int = 1) -> tuple[int, int]:
    """Scales the picture to `pixels` in all frames together, keeping its shape, with both sides rounded down to whole
    blocks, at least one."""
    shrink = math.sqrt(num_frames * height * width / pixels)
    wide = max(factor, math.floor(width / shrink / factor) * factor)
    return wide, max(factor, math.floor(height / shrink / factor) * factor)


def max_image_tokens(factor: int, limits: PixelLimits) -> int:
    """Upper bound of the number of `factor` by `factor` blocks of any picture that `smart_resize` takes."""
    block = factor * factor
    # Shrunk: within the maximum, or one side stuck at one block and the other as long as the aspect allows.
    most = max(limits.max_pixels // block, math.isqrt(MAX_ASPECT * limits.max_pixels) // factor)
    # Grown: sides a, b with a * b = min_pixels, both rounded up; a may lie just above any multiple of the factor.
    most = max(most, math.isqrt(MAX_ASPECT * limits.min_pixels) // factor + 1)
    for rows in range(2, math.isqrt(limits.min_pixels) // factor + 3):
        most = max(most, rows * (limits.min_pixels // ((rows - 1) * block) + 1))
    return most


def pixel_limits(settings: Fields, default: PixelLimits, options: SpecOptions) -> PixelLimits:
    """Returns the user's limits, else `min_pixels` and `max_pixels`, else `shortest_edge` and `longest_edge` of `size`
    (pixel counts in spite of their names), else the default of the processor's class."""
    size = settings.section_if_present("size")
    least = _limit(settings, size, "min_pixels", "shortest_edge", default.min_pixels)
    most = _limit(settings, size, "max_pixels", "longest_edge", default.max_pixels)
    if least > most:
        raise CheckpointError(f"{settings.where} asks for pictures of at least {least} and at most {most} pixels")
    least = least if options.min_pixels is None else options.min_pixels
    most = most if options.max_pixels is None else options.max_pixels
    if not 1 <= least <= most:
        raise ConfigError(f"min_pixels {least} and max_pixels {most} contradict each other: give 1 <= min <= max")
    return PixelLimits(least, most)


def _limit(settings: Fields, size: Fields | None, name: str, edge: str, default: int) -> int:
    if name in settings:
        return settings.integer(name)
    return default if size is None else size.integer(edge)


def patch_geometry(tower: Fields, settings: Fields, patch_size: int) -> PatchGeometry:
    """Reads the tower's config and a processor's settings, which must agree; `patch_size` is the default of both."""
    geometry = PatchGeometry(
        patch_size=tower.integer("patch_size", patch_size),
        merge_size=tower.integer("spatial_merge_size", 2),
        temporal_patch_size=tower.integer("temporal_patch_size", 2, at_most=MAX_FRAMES),
    )
    for name, default in (("patch_size", patch_size), ("merge_size", 2), ("temporal_patch_size", 2)):
        expected = getattr(geometry, name)
        if settings.integer(name, default) != expected:
            raise settings.wrong_value(name, f"{expected}, as the vision tower has it")
    if tower.integer("in_channels", 3) != 3:
        raise tower.wrong_value("in_channels", "3 colours")
    return geometry


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
        """Maximum number of tokens of a temporal patch: frames are largest when there are fewest."""
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
