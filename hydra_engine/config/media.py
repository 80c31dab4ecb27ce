"""The configuration of pictures and videos: sources that may be opened, and size limits."""

from __future__ import annotations

from dataclasses import dataclass

from hydra_engine.config.fields import opt, positive
from hydra_engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """Limits of pictures and videos, checked before bytes are read or pixels decoded."""

    max_images: int = opt(16, "most images of one request")
    max_image_bytes: int = opt(20 << 20, "most bytes of one encoded image")
    max_image_pixels: int = opt(40_000_000, "most pixels of one image, known from its header")
    max_aspect_ratio: float = opt(200.0, "longest side over shortest side of an image")
    max_videos: int = opt(1, "most videos of one request; 0: none")
    max_video_bytes: int = opt(64 << 20, "most bytes of one encoded video")
    max_video_frames: int = opt(7200, "most frames of one video, counted in its file")
    max_video_pixels: int = opt(4_000_000_000, "most pixels of all frames of one video together")
    fetch_timeout_s: float = opt(10.0, "total time to fetch one image by URL")
    max_fetched_bytes: int = opt(
        1 << 30,
        "most bytes of fetched images and videos that are not decoded yet, half of them for one client; above it 503",
    )
    allow_private_media: bool = opt(False, "also fetch images from private network addresses")
    allowed_media_domains: tuple[str, ...] = opt((), "fetch images from these hosts only")
    allowed_media_path: str | None = opt(
        None,
        "folder below which file:// images may be read by the server",
        aliases=("allowed-local-media-path",),
        kind="folder",
    )
    local_files: bool = opt(False, "open plain paths and file:// anywhere (the embedded engine; never the server)")
    decode_workers: int = opt(2, "threads that decode and resize images")
    pixel_cache_mib: int = opt(256, "memory for processed pixels, so that a repeated image is decoded once; 0: off")
    min_pixels: int | None = opt(None, "enlarge smaller images to this many pixels (models with dynamic resolution)")
    max_pixels: int | None = opt(None, "shrink larger images to this many pixels (models with dynamic resolution)")

    def __post_init__(self) -> None:
        positive(self, "max_images", "max_image_bytes", "max_image_pixels", "decode_workers")
        positive(self, "max_video_bytes", "max_video_frames", "max_video_pixels", "fetch_timeout_s")
        if self.max_fetched_bytes < 2 * max(self.max_image_bytes, self.max_video_bytes):
            raise ConfigError(
                "max_fetched_bytes must be at least twice max_image_bytes and max_video_bytes, for a client gets half",
                param="max_fetched_bytes",
            )
        if self.allowed_media_path is not None and not self.allowed_media_path.strip():
            raise ConfigError("allowed_media_path must name a folder", param="allowed_media_path")
        low, high = self.min_pixels, self.max_pixels
        if (low is not None and low < 1) or (high is not None and high < (low or 1)):
            raise ConfigError("min_pixels and max_pixels must be at least 1 and in order", param="max_pixels")
