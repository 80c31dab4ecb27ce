"""The decode child for videos, with PyAV: `hydra_engine.preprocess.sandbox.video_child FD`.

Opens only listed containers and codecs, so a file cannot name another file or an address. Does not know which frames
are sampled.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import av
import msgspec
import numpy as np
from av.container import InputContainer
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from hydra_engine.errors import InvalidImage
from hydra_engine.models.specs.base import VideoInfo
from hydra_engine.preprocess.media.images import Pixels, broken_video, num_bytes, render_into, upright_pixels
from hydra_engine.preprocess.sandbox.child_loop import Memory, serve
from hydra_engine.preprocess.sandbox.image_child import Decoded, ProbeJob, VideoJob, limit_memory

MEMORY_BYTES = 3 << 30  # of address space: a decoder of large frames keeps up to 16 of them
CPU_SECONDS = 60  # per video

_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif"
_CODECS = (
    *("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg1video", "mpeg2video", "mpeg4", "msmpeg4v3", "h263"),
    *("theora", "prores", "mjpeg", "ffv1", "png", "gif", "rawvideo"),
)
_MAX_FRAME_PIXELS = 40_000_000
# A file may announce this many more frames than can be decoded, if it was cut between dependent frames. The last frame
# replaces them.
_MISSING_FRAMES = 2
_VP8_SHOWN = 0x10  # in a frame's first byte; frames without it are references only

_ERRORS = (InvalidImage, av.FFmpegError, ValueError, MemoryError)
# Counter-clockwise degrees to EXIF orientation.
_ORIENTATIONS = {0: 1, 90: 8, 180: 3, -180: 3, -90: 6}


class Opened(NamedTuple):
    container: InputContainer
    stream: VideoStream


def main() -> None:
    limit_memory(MEMORY_BYTES)
    serve(msgspec.msgpack.Decoder(ProbeJob | VideoJob), lambda: answer, lambda _job: CPU_SECONDS)


def answer(job: ProbeJob | VideoJob, memory: Memory) -> Decoded:
    try:
        if isinstance(job, ProbeJob):
            return Decoded(video=probe(job.data))
        render_into(frames(job.data, job.frames), job.views, job.resample, memory[: num_bytes(job.views)])
    except _ERRORS:
        return Decoded(is_broken=True)
    return Decoded()


def probe(data: bytes) -> VideoInfo:
    """Returns size and orientation from the first frame, and the number of frames by counting packets."""
    first: VideoFrame | None = None
    num_frames = num_left_out = 0
    with _open(data) as (container, stream):
        for packet in container.demux(stream):  # the last one is empty and flushes the decoder
            if first is None:
                first = next(iter(packet.decode()), None)
            if packet.size and _is_shown(packet):
                num_left_out += packet.is_discard
                num_frames += not packet.is_discard
        if first is None:
            raise broken_video("no frame can be decoded")
        announced = stream.frames if container.format.name.startswith("mov") else 0
        if num_frames + num_left_out < announced - _MISSING_FRAMES:
            raise broken_video("it ends too early")
        fps = stream.average_rate or stream.guessed_rate or 0
        width, height = first.width, first.height
        if _orientation(first) >= 5:
            width, height = height, width
        return VideoInfo(width, height, num_frames, float(fps))


def frames(data: bytes, indices: Sequence[int]) -> Iterator[Pixels]:
    """Yields the frames at `indices`, upright. Decodes from the first frame on, since positions are not known
    otherwise."""
    with _open(data) as (container, stream):
        decoded = container.decode(stream)
        index, frame, pixels = -1, None, None
        for number in indices:
            while index < number:
                following = next(decoded, None)
                if following is None:
                    break
                index, frame, pixels = index + 1, following, None
            if frame is None or number - index > _MISSING_FRAMES:
                raise broken_video("it ends too early")
            if pixels is None:
                pixels = upright_pixels(np.asarray(frame.to_ndarray(format="rgb24"), np.uint8), _orientation(frame))
            yield pixels


@contextmanager
def _open(data: bytes) -> Iterator[Opened]:
    """Opens the first video stream that is not an attached picture, such as a cover."""
    options = {"format_whitelist": _FORMATS, "codec_whitelist": ",".join(_CODECS), "protocol_whitelist": "none"}
    with av.open(io.BytesIO(data), "r", container_options=options, metadata_errors="replace") as container:
        moving = (s for s in container.streams.video if not s.disposition & Disposition.attached_pic)
        stream = next(moving, None)
        if stream is None or stream.codec_context is None or stream.codec_context.name not in _CODECS:
            raise broken_video("it has no moving pictures in a format that is decoded here")
        stream.codec_context.thread_count = 1
        stream.codec_context.options = {"max_pixels": str(_MAX_FRAME_PIXELS)}
        yield Opened(container, stream)


def _is_shown(packet: av.Packet[VideoStream]) -> bool:
    return packet.stream.codec_context.name != "vp8" or bool(memoryview(packet)[0] & _VP8_SHOWN)


def _orientation(frame: VideoFrame) -> int:
    """EXIF's number for the rotation that makes the frame upright; ignores angles that are no multiple of 90."""
    return _ORIENTATIONS.get(frame.rotation, 1)


if __name__ == "__main__":
    main()
