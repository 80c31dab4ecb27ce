"""Videos in the frontend process: formats and limits, and jobs for the decode child.

An untrusted file is recognised by its first bytes here and parsed in a child process only; the child's answer is
checked like any other input. A list of pictures is a video too. Does not know codecs or models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec

import msgspec

from hydra_engine.config import MediaConfig
from hydra_engine.core.units import size
from hydra_engine.errors import InvalidImage, InvalidRequest
from hydra_engine.models.specs.base import VideoInfo, View
from hydra_engine.preprocess.media.images import check_size

_MAX_FPS = 1000.0
_EBML = b"\x1a\x45\xdf\xa3"  # Matroska and WebM


class ProbeJob(msgspec.Struct, frozen=True, array_like=True, tag="probe"):
    """A request for a video's size, frame count and frame rate."""

    data: bytes


class VideoJob(msgspec.Struct, frozen=True, array_like=True, tag="video"):
    """A request for views of frames of a video: `View.source` is an index into `frames`, whose numbers never
    decrease."""

    data: bytes
    frames: tuple[int, ...]
    views: tuple[View, ...]
    resample: str


def inspected(data: bytes, limits: MediaConfig) -> bytes:
    """Returns the file if a child may parse it. Raises InvalidImage, and InvalidRequest if this server decodes no
    videos."""
    if len(data) > limits.max_video_bytes:
        raise InvalidImage(f"the video is larger than {size(limits.max_video_bytes)}", code="video_too_large")
    if not _is_known(data):
        raise InvalidImage(
            "the video has an unsupported format; supported: MP4, MOV, WEBM, MKV, AVI, GIF",
            code="unsupported_video_format",
        )
    if find_spec("av") is None:
        raise InvalidRequest(
            "this server decodes no video files; install PyAV (hydra-engine[video]) or send the frames as images",
            code="video_not_supported",
        )
    return data


def broken_video(reason: str) -> InvalidImage:
    return InvalidImage(f"the video cannot be decoded: {reason}", code="video_decode_failed")


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
