import io
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from hydra_engine.config import MediaConfig
from hydra_engine.errors import InvalidImage, InvalidRequest
from hydra_engine.models.specs.base import VideoInfo, View
from hydra_engine.preprocess.media import images
from hydra_engine.preprocess.media.images import inspected as inspected_image
from hydra_engine.preprocess.media.opening import (
    Decoders,
    check_video,
    content_of_frames,
    info_of_frames,
    inspected_video,
)
from hydra_engine.preprocess.sandbox import video_child
from hydra_engine.preprocess.sandbox.image_child import FramesJob, VideoJob

LIMITS = MediaConfig()
FORMATS = {
    "mp4": ("mp4", "libx264", "yuv420p"),
    "mov": ("mov", "libx264", "yuv420p"),
    "hevc": ("mp4", "libx265", "yuv420p"),
    "av1": ("mp4", "libsvtav1", "yuv420p"),
    "webm": ("webm", "libvpx-vp9", "yuv420p"),
    "vp8": ("webm", "libvpx", "yuv420p"),
    "mkv": ("matroska", "libx264", "yuv420p"),
    "avi": ("avi", "mpeg4", "yuv420p"),
    "gif": ("gif", "gif", "rgb8"),
}
WHOLE = View.whole(24, 16)


def frame(index: int, width: int, height: int) -> np.ndarray:
    """A red quarter at the top left; how far a grey bar has come says which frame it is."""
    values = np.full((height, width, 3), 40, np.uint8)
    values[: height // 2, : width // 2] = (250, 20, 20)
    values[-height // 4 :, : (index + 1) * 4] = 230
    return values


def video(name: str = "mp4", *, num_frames: int = 12, size: tuple[int, int] = (64, 48), rate: Any = 10, turn: int = 0,
          **options: str) -> bytes:  # fmt: skip
    format, codec, pixel_format = FORMATS[name]
    file = io.BytesIO()
    scheduling = os.sched_getscheduler(0), os.sched_getparam(0)
    with av.open(file, "w", format=format) as container:
        stream = container.add_stream(codec, rate=rate, options=options)
        stream.width, stream.height, stream.pix_fmt = *size, pixel_format
        if turn:
            stream.set_display_rotation(turn)
        for index in range(num_frames):
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame(index, *size), format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    os.sched_setscheduler(
        0, *scheduling
    )  # SVT-AV1 makes a process of root a real-time one, before which all others wait
    return file.getvalue()


def bar(shown: np.ndarray) -> int:
    """The number of this frame of `video`."""
    row = shown[-4, :, 0].astype(int)
    return round(int((row > 135).sum()) / 4) - 1


def all_frames(data: bytes) -> list[np.ndarray]:
    with av.open(io.BytesIO(data)) as container:
        return [shown.to_ndarray(format="rgb24") for shown in container.decode(video=0)]


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    decoders = Decoders()
    yield decoders
    decoders.close()


# ---- files


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_says_what_it_is_and_gives_its_frames(decoders: Decoders, name: str) -> None:
    data = inspected_video(video(name), LIMITS)
    assert decoders.probe_video(data) == VideoInfo(64, 48, 12, 10.0)
    wanted = (0, 3, 3, 7, 11)
    views = tuple(View.whole(64, 48, source) for source in range(len(wanted)))
    shown = np.frombuffer(decoders.render(VideoJob(data, wanted, views, "bicubic")), np.uint8).reshape(-1, 48, 64, 3)
    everything = all_frames(data)
    assert np.array_equal(shown, [everything[index] for index in wanted])
    assert [bar(picture) for picture in shown] == list(wanted)


def test_views_of_frames_are_those_of_pictures(decoders: Decoders) -> None:
    data = video()
    views = (WHOLE._replace(source=1), View((30, 20), (16, 16), (-5, -1), (8, 8), 0), WHOLE)
    everything = all_frames(data)
    expected = images.render([everything[2], everything[9]], views, "lanczos")
    assert decoders.render(VideoJob(data, (2, 9), views, "lanczos")) == expected


@pytest.mark.parametrize(("turn", "corner"), [(0, (0, 0)), (90, (0, 1)), (180, (1, 1)), (-90, (1, 0))])
def test_videos_of_turned_cameras_are_upright(decoders: Decoders, turn: int, corner: tuple[int, int]) -> None:
    """`turn` counts counter-clockwise; `corner` (right, down) is where that takes the red quarter."""
    data = video(turn=turn, size=(64, 32))
    info = decoders.probe_video(data)
    assert (info.width, info.height) == ((64, 32) if turn in (0, 180) else (32, 64))
    view = View.whole(info.width, info.height)
    shown = np.frombuffer(decoders.render(VideoJob(data, (0,), (view,), "bicubic")), np.uint8)
    shown = shown.reshape(info.height, info.width, 3).astype(int)
    right, down = corner
    red = shown[down * (info.height // 2) :, right * (info.width // 2) :][8, 8]
    assert red[0] > 200 and red[1] < 80


def test_frame_rates_are_those_of_the_file(decoders: Decoders) -> None:
    for rate in (1, 25, Fraction(30000, 1001)):
        assert math.isclose(decoders.probe_video(video(rate=rate)).fps, float(rate), rel_tol=1e-3)


def test_hidden_frames_are_not_counted(decoders: Decoders) -> None:
    """VP8 stores references that are never shown as frames of their own; here an ordinary one is declared hidden."""
    data = video("vp8")
    with av.open(io.BytesIO(data)) as container:
        packets = [bytes(packet) for packet in container.demux(video=0) if packet.size]
    at = data.index(packets[5])
    data = data[:at] + bytes([data[at] & ~0x10]) + data[at + 1 :]
    assert len(all_frames(data)) == 11 == decoders.probe_video(data).num_frames


def test_reordered_frames_come_in_the_order_of_showing(decoders: Decoders) -> None:
    data = video(bf="3", g="12")
    views = tuple(View.whole(64, 48, source) for source in range(12))
    shown = np.frombuffer(decoders.render(VideoJob(data, tuple(range(12)), views, "bicubic")), np.uint8)
    assert [bar(picture) for picture in shown.reshape(-1, 48, 64, 3)] == list(range(12))


def test_covers_of_music_and_audio_are_no_videos(decoders: Decoders) -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=44100)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        silence.sample_rate = 44100
        for packet in (*stream.encode(silence), *stream.encode()):
            container.mux(packet)
    with pytest.raises(InvalidImage, match="video cannot be decoded"):
        decoders.probe_video(inspected_video(file.getvalue(), LIMITS))


# ---- hostile files


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:5,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"RIFF\x24\0\0\0WAVEfmt " + b"\0" * 40,
        b"\x47" + b"\0" * 187,
        b"FLV\1",
        b"\x89PNG\r\n\x1a\n",
    ],
)
def test_other_formats_are_refused_by_their_first_bytes(data: bytes) -> None:
    with pytest.raises(InvalidImage) as caught:
        inspected_video(data, LIMITS)
    assert caught.value.code == "unsupported_video_format"


def test_a_playlist_behind_a_videos_first_bytes_opens_nothing(decoders: Decoders) -> None:
    for text in (b"#EXTM3U\n#EXTINF:5,\nfile:///etc/passwd\n", b"ffconcat version 1.0\nfile /etc/passwd\n"):
        with pytest.raises(InvalidImage):
            decoders.probe_video(b"\0\0\0\x08free" + text)
        with pytest.raises(InvalidImage):
            decoders.probe_video(text)


@pytest.mark.parametrize("name", ["mp4", "webm", "avi", "gif"])
def test_damaged_files_end_in_an_answer_and_keep_the_child(decoders: Decoders, name: str) -> None:
    whole, rng, num_refused = video(name), random.Random(name), 0
    decoders.probe_video(whole)
    children = decoders.videos.pids()
    for step in range(60):
        damaged = bytearray(whole)
        for _ in range(rng.choice([1, 5, 100])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        if step % 3 == 0:
            del damaged[rng.randrange(len(damaged)) :]
        try:
            info = decoders.probe_video(bytes(damaged))
            check_video(info, LIMITS)
            decoders.render(VideoJob(bytes(damaged), (0, info.num_frames - 1), (WHOLE,), "bicubic"))
        except InvalidImage as error:
            num_refused += 1
            assert error.code in ("video_decode_failed", "image_too_large", "image_aspect_ratio", "video_too_large")
    assert 0 < num_refused < 60
    assert decoders.probe_video(whole).num_frames == 12 and decoders.videos.pids() == children


def test_a_file_that_ends_too_early_is_refused(decoders: Decoders, tmp_path: Path) -> None:
    """The index may be in front, so that the file could be played up to where it ends."""
    at_the_end = video(num_frames=30)
    path = str(tmp_path / "video.mp4")
    with av.open(path, "w", options={"movflags": "faststart"}) as out, av.open(io.BytesIO(at_the_end)) as source:
        stream = out.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                out.mux(packet)
    in_front = Path(path).read_bytes()
    assert in_front.index(b"moov") < in_front.index(b"mdat") and at_the_end.index(b"moov") > at_the_end.index(b"mdat")
    for data in (in_front, at_the_end):
        assert decoders.probe_video(data).num_frames == 30
        with pytest.raises(InvalidImage, match="damaged or incomplete") as caught:
            decoders.probe_video(data[: len(data) * 3 // 4])
        assert caught.value.code == "video_decode_failed"


def test_frames_that_are_not_there(decoders: Decoders) -> None:
    """A frame or two may be missing at the end; the last one stands for them."""
    data = video(num_frames=5)
    last = decoders.render(VideoJob(data, (4,), (WHOLE,), "bicubic"))
    assert decoders.render(VideoJob(data, (6,), (WHOLE,), "bicubic")) == last
    with pytest.raises(InvalidImage):
        decoders.render(VideoJob(data, (7,), (WHOLE,), "bicubic"))


def test_frames_of_another_size_in_the_middle_are_resized(decoders: Decoders) -> None:
    """Calls over a network record such files."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("mjpeg", rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        for width, height in ((64, 48), (32, 24)):
            encoder = av.CodecContext.create("mjpeg", "w")
            encoder.width, encoder.height, encoder.pix_fmt = width, height, "yuvj420p"
            encoder.time_base = Fraction(1, 5)
            shown = av.VideoFrame.from_ndarray(frame(0, width, height), format="rgb24").reformat(format="yuvj420p")
            shown.pts, shown.time_base = len(file.getvalue()) and 1, Fraction(1, 5)
            for packet in (*encoder.encode(shown), *encoder.encode()):
                packet.stream = stream
                container.mux(packet)
    views = (View.whole(64, 48), View.whole(64, 48, 1))
    shown = np.frombuffer(decoders.render(VideoJob(file.getvalue(), (0, 1), views, "bicubic")), np.uint8)
    first, second = shown.reshape(2, 48, 64, 3).astype(int)
    assert np.abs(first - second).mean() < 20


FAULTY = """
import os, sys, time
from hydra_engine.preprocess.sandbox import video_child
def answer(job, memory):
    {fault}
video_child.answer = answer
video_child.CPU_SECONDS = 0
video_child.main()
"""


@pytest.mark.quick("abort")
@pytest.mark.parametrize(
    "fault", ["while True: pass", "os.abort()", "time.sleep(60)", "bytearray(4 << 30)", "return b'?'"]
)
def test_a_decoder_that_fails_costs_one_video(fault: str) -> None:
    command = [sys.executable, "-c", FAULTY.format(fault=fault)]
    decoders = Decoders(video_command=command, video_answer_seconds=2 if "sleep" in fault else 60)
    begin = time.monotonic()
    try:
        with pytest.raises(InvalidImage, match="the video cannot be decoded: its decoder failed"):
            decoders.probe_video(video())
        assert decoders.videos.pids() == [] and time.monotonic() - begin < 30
    finally:
        decoders.close()


def test_videos_and_pictures_have_children_of_their_own(decoders: Decoders, encoded: Callable[..., bytes]) -> None:
    data = encoded(Image.new("RGB", (8, 8)))
    job = FramesJob((inspected_image(data, LIMITS),), (WHOLE,), "bicubic")
    decoders.render(job)
    decoders.probe_video(video())
    limits = []
    for pid in (*decoders.pictures.pids(), *decoders.videos.pids()):
        with open(f"/proc/{pid}/limits", encoding="ascii") as file:
            limits.append(next(int(line.split()[3]) for line in file if line.startswith("Max address space")))
    assert limits == [1 << 30, video_child.MEMORY_BYTES]


# ---- limits


def test_what_a_child_says_is_checked() -> None:
    good = VideoInfo(64, 48, 12, 10.0)
    assert check_video(good, LIMITS) is good
    wrong = {
        "video_decode_failed": [
            good._replace(num_frames=0),
            good._replace(fps=0.0),
            good._replace(fps=math.nan),
            good._replace(fps=math.inf),
            good._replace(fps=-1.0),
            good._replace(fps=1e9),
        ],
        "image_decode_failed": [good._replace(width=0)],
        "image_too_large": [good._replace(width=2**32 - 1, height=2**32 - 1)],
        "image_aspect_ratio": [good._replace(width=20_000, height=1)],
        "video_too_large": [good._replace(num_frames=2**63), good._replace(width=8000, height=5000, num_frames=101)],
    }
    for code, infos in wrong.items():
        for info in infos:
            with pytest.raises(InvalidImage) as caught:
                check_video(info, LIMITS)
            assert caught.value.code == code, info


def test_bytes_frames_and_pixels_have_limits() -> None:
    data = video()
    assert inspected_video(data, MediaConfig(max_video_bytes=len(data))) is data
    with pytest.raises(InvalidImage, match="the video is larger than") as caught:
        inspected_video(data, MediaConfig(max_video_bytes=len(data) - 1))
    assert caught.value.code == "video_too_large"
    info = VideoInfo(64, 48, 12, 10.0)
    check_video(info, MediaConfig(max_video_frames=12, max_video_pixels=64 * 48 * 12))
    with pytest.raises(InvalidImage, match="12 frames; at most 11 are allowed"):
        check_video(info, MediaConfig(max_video_frames=11))
    with pytest.raises(InvalidImage, match="12 frames of 64 x 48 pixels; at most 36863 pixels in total are allowed"):
        check_video(info, MediaConfig(max_video_pixels=64 * 48 * 12 - 1))


def test_without_pyav_the_user_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hydra_engine.preprocess.media.opening.find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match=r"install PyAV \(pip install av\)"):
        inspected_video(video(), LIMITS)


# ---- videos that come as pictures


def test_pictures_are_frames(decoders: Decoders, encoded: Callable[..., bytes], picture: Callable[..., Any]) -> None:
    pictures = [picture(40, 30, seed=seed) for seed in range(4)]
    files = [encoded(image, format) for image, format in zip(pictures, ("PNG", "WEBP", "BMP", "PNG"), strict=True)]
    info = info_of_frames([(40, 30)] * 4, 2.0, LIMITS)
    assert info == VideoInfo(40, 30, 4, 2.0)
    chosen = (0, 2, 3)
    views = tuple(WHOLE._replace(source=source) for source in range(3))
    containers = tuple(inspected_image(files[index], LIMITS) for index in chosen)
    expected = images.render([images.decode(container) for container in containers], views, "bicubic")
    assert decoders.render(FramesJob(containers, views, "bicubic")) == expected
    broken = containers[1]._replace(data=containers[1].data[:100])
    with pytest.raises(InvalidImage, match="the image cannot be decoded"):
        decoders.render(FramesJob((containers[0], broken), views[:2], "bicubic"))


def test_frames_of_a_list_have_one_size_and_the_limits_of_a_video() -> None:
    for sizes, code in (([], "video_decode_failed"), ([(4, 4), (4, 5)], "video_decode_failed")):
        with pytest.raises(InvalidImage) as caught:
            info_of_frames(sizes, 2.0, LIMITS)
        assert caught.value.code == code
    with pytest.raises(InvalidImage, match="3 frames; at most 2"):
        info_of_frames([(4, 4)] * 3, 2.0, MediaConfig(max_video_frames=2))


def test_the_name_of_a_video_holds_which_frames_were_chosen() -> None:
    names = [content_of_frames([b"a" * 32], (0, 1)), content_of_frames([b"a" * 32], (0, 2))]
    names += [content_of_frames([b"b" * 32], (0, 1)), content_of_frames([b"a" * 32, b"b" * 32], (0, 1))]
    names += [content_of_frames([b"a" * 32], (0,)), content_of_frames([b"b" * 32, b"a" * 32], (0, 1))]
    assert len(set(names)) == 6 and all(len(name) == 32 for name in names)
