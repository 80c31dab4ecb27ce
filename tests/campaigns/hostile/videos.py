"""Videos of few bytes that take long to decode. Needs PyAV."""

from __future__ import annotations

import io
import struct

import av
import numpy as np


def still(width: int, height: int, num_frames: int) -> bytes:
    """Frames of one grey picture, two a second: the second of them again and again, so that it is soon made."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=2)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        frame, packets = av.VideoFrame.from_ndarray(np.full((height * 3 // 2, width), 128, np.uint8), "yuv420p"), []
        for frame.pts in range(2):
            packets += stream.encode(frame)
        first, second = packets
        for number in range(num_frames):
            packet = av.Packet(bytes(second if number else first))
            packet.stream, packet.time_base, packet.is_keyframe = stream, first.time_base, not number
            packet.pts = packet.dts = number
            file.mux(packet)
    return buffer.getvalue()


def another(video: bytes, number: int) -> bytes:
    """The same video in other bytes."""
    return video + struct.pack(">I4sQ", 16, b"free", number)
