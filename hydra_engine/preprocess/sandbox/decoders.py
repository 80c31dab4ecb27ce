"""Decoders of pictures and videos in child processes: jobs in, pixels out.

Does not trust a child's answers: errors about a file are in the parent's own words. Does not know formats or models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hydra_engine.core.processes import launch
from hydra_engine.errors import InvalidImage
from hydra_engine.models.specs.base import VideoInfo
from hydra_engine.preprocess.media.images import broken_image, broken_video, num_bytes
from hydra_engine.preprocess.sandbox.child_host import ChildDied, ChildHost
from hydra_engine.preprocess.sandbox.image_child import Decoded, FramesJob, ImageJob, ProbeJob, VideoJob

ANSWER_SECONDS = 30.0  # for a picture; the child's own limit is CPU time, this one ends a child that sleeps
VIDEO_ANSWER_SECONDS = 180.0

_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # stacks of more threads would count as memory
_COMMAND = launch.command("hydra_engine.preprocess.sandbox.image_child")
_VIDEO_COMMAND = launch.command("hydra_engine.preprocess.sandbox.video_child")

_FAILED = "its decoder failed"


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
        size = num_bytes(job.views)
        if isinstance(job, VideoJob):
            return _run(self.videos, job, self._video_answer_seconds, broken_video, size)[1]
        seconds = self._video_answer_seconds if isinstance(job, FramesJob) else self._answer_seconds
        return _run(self.pictures, job, seconds, broken_image, size)[1]

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
