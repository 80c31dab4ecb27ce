"""The decode child: `hydra_engine.preprocess.sandbox.image_child FD` turns files into the tiles of views.

A decoder that crashes, loops or exhausts memory ends this process and nothing else. Does not know where files come
from.
"""

from __future__ import annotations

import resource

import msgspec
from PIL import Image

from hydra_engine.errors import InvalidImage
from hydra_engine.models.specs.base import VideoInfo, View
from hydra_engine.preprocess.media.images import Container, decode, num_bytes, render_into
from hydra_engine.preprocess.sandbox.child_loop import Memory, limit, serve

MEMORY_BYTES = 1 << 30  # of address space; a WebP of 40 million pixels with transparency needs nine tenths of it
CPU_SECONDS = 5  # per picture; the largest take one
MAX_CPU_SECONDS = 60  # for several pictures


class ImageJob(msgspec.Struct, frozen=True, array_like=True, tag="picture"):
    container: Container
    views: tuple[View, ...]
    resample: str


class FramesJob(msgspec.Struct, frozen=True, array_like=True, tag="frames"):
    """A request for views of several pictures; `View.source` is an index into `containers`."""

    containers: tuple[Container, ...]
    views: tuple[View, ...]
    resample: str


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


class Decoded(msgspec.Struct):
    """The answer to a job: pixels in shared memory, or `video` for a probe."""

    is_broken: bool = False
    video: VideoInfo | None = None


def main() -> None:
    Image.init()
    limit_memory(MEMORY_BYTES)
    serve(msgspec.msgpack.Decoder(ImageJob | FramesJob), lambda: answer, cpu_seconds)


def limit_memory(address_space: int) -> None:
    """Limits memory to `address_space` bytes, and forbids writing files."""
    limit(resource.RLIMIT_AS, address_space)
    limit(resource.RLIMIT_FSIZE, 0)


def answer(job: ImageJob | FramesJob, memory: Memory) -> Decoded:
    try:
        render_into(map(decode, containers(job)), job.views, job.resample, memory[: num_bytes(job.views)])
    except (InvalidImage, MemoryError):
        return Decoded(is_broken=True)
    return Decoded()


def cpu_seconds(job: ImageJob | FramesJob) -> float:
    return min(CPU_SECONDS * len(containers(job)), MAX_CPU_SECONDS)


def containers(job: ImageJob | FramesJob) -> tuple[Container, ...]:
    return (job.container,) if isinstance(job, ImageJob) else job.containers


if __name__ == "__main__":
    main()
