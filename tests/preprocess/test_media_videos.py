"""Videos through the preprocessor of a real family: files, lists of frames, limits, refusals."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from hydra_engine.config import MediaConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.errors import ContextLengthExceeded, InvalidRequest
from hydra_engine.models.specs.base import VideoInfo
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.preprocess.media.images import num_bytes
from hydra_engine.preprocess.media.opening import Decoders
from hydra_engine.preprocess.text.tokenizer import load_tokenizer
from tests.calls import asked
from tests.preprocess.in_process import preprocessor_of
from tools.miniatures import make_tiny


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-qwen2-vl")
    make_tiny("qwen2_vl", directory, seed=5)
    return directory


class Kitchen:
    def __init__(self, model_dir: Path, *, max_model_len: int = 512, **media: Any) -> None:
        limits = MediaConfig(local_files=True, **media)
        spec, tokenizer = load_spec(model_dir), load_tokenizer(model_dir)
        self.spec = spec
        self.preprocessor = preprocessor_of(spec, tokenizer, limits, max_model_len=max_model_len)

    async def prepare(self, *parts: dict[str, Any], videos: Any = None) -> Any:
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}]
        call = asked(messages=messages, max_tokens=4) if parts else asked("?", videos=videos, max_tokens=4)
        try:
            return await self.preprocessor.prepare(RequestId(1), call)
        finally:
            await self.preprocessor.close()


@pytest.fixture
def frames() -> list[Image.Image]:
    rng = np.random.default_rng(3)
    return [Image.fromarray(rng.integers(0, 256, (40, 60, 3), np.uint8)) for _ in range(4)]


@pytest.fixture
def movie(frames: list[Image.Image]) -> Iterator[bytes]:
    """The same frames, two a second, by a codec that loses nothing."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as file:
        stream = file.add_stream("ffv1", rate=2)
        stream.width, stream.height, stream.pix_fmt = 60, 40, "bgr0"
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_image(frame)))
        file.mux(stream.encode())
    yield buffer.getvalue()


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.slow
async def test_a_file_and_its_frames_are_the_same_video(
    model_dir: Path, frames: list[Image.Image], movie: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "movie.mkv"
    path.write_bytes(movie)
    forms: list[dict[str, Any]] = [
        {"type": "video", "video": movie},
        {"type": "video", "video": str(path)},
        {"type": "video", "video": frames, "fps": 2},
        {"type": "video", "video": [png(frame) for frame in frames]},
        {"type": "video", "video": [np.asarray(frame) for frame in frames]},
        {"type": "video", "video": np.stack(frames)},
    ]
    prepared = [await Kitchen(model_dir).prepare(form) for form in forms]
    files = [png(frame) for frame in frames]
    for videos in (path, [movie], frames, tuple(frames), np.stack(frames), [np.stack(frames)], [frames], [files]):
        prepared.append(await Kitchen(model_dir).prepare(videos=videos))
    (first, *others) = prepared
    assert len(first.pixels) == 2 and all(payload.count == 2 for payload in first.pixels)
    for other in others:
        assert [payload.data for payload in other.pixels] == [payload.data for payload in first.pixels]
        assert other.request.prompt_token_ids == first.request.prompt_token_ids
        assert [image.rope for image in other.request.images] == [image.rope for image in first.request.images]
    assert first.request.num_media == 1 and len(first.request.images) == 2
    assert len({payload.digest for payload in first.pixels}) == 2


async def test_pictures_and_videos_keep_their_order(model_dir: Path, frames: list[Image.Image], movie: bytes) -> None:
    picture: dict[str, Any] = {"type": "image", "image": frames[0]}
    video: dict[str, Any] = {"type": "video", "video": movie}
    kitchen = Kitchen(model_dir)
    image_token, video_token = kitchen.spec.image_token_id, kitchen.spec.video_token_id
    prepared = await kitchen.prepare(picture, video, picture)
    facts = prepared.facts
    assert facts is not None
    assert facts.videos == (None, VideoInfo(60, 40, 4, 2.0), None) and facts.number == 1
    others = prepared.request.num_prompt - prepared.request.num_image_tokens
    assert 0 < facts.num_text <= others
    found = [token for token in prepared.request.prompt_token_ids if token in (image_token, video_token)]
    num_image, num_video = found.count(image_token) // 2, found.count(video_token)
    assert found == [image_token] * num_image + [video_token] * num_video + [image_token] * num_image
    assert [image.source for image in prepared.request.images] == [0, 1, 1, 2]


async def test_a_video_that_does_not_fit_the_context_is_only_probed(
    model_dir: Path, frames: list[Image.Image], movie: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[bytes] = []
    decoded: list[Any] = []
    info = VideoInfo(60, 40, 4, 2.0)
    monkeypatch.setattr(Decoders, "probe_video", lambda self, data: probed.append(data) or info)
    monkeypatch.setattr(Decoders, "render", lambda self, job: decoded.append(job) or bytes(num_bytes(job.views)))
    video = {"type": "video", "video": movie}
    files = {"type": "video", "video": [png(frame) for frame in frames]}
    for parts in ([video], [files], [{"type": "image", "image": png(frames[0])}, video]):
        fits = await Kitchen(model_dir).prepare(*parts)
        assert len(decoded) == len(parts) and (video not in parts or len(probed) == 1)
        exact, decoded[:], probed[:] = fits.request.num_prompt + 4, [], []
        with pytest.raises(ContextLengthExceeded, match=f"you requested {exact} tokens"):
            await Kitchen(model_dir, max_model_len=exact - 1).prepare(*parts)
        assert decoded == [] and (video not in parts or len(probed) == 1)
        again = await Kitchen(model_dir, max_model_len=exact).prepare(*parts)
        assert len(decoded) == len(parts) and again.request.prompt_token_ids == fits.request.prompt_token_ids
        decoded.clear()
        probed.clear()


async def test_what_is_wrong_with_a_video_is_said(model_dir: Path, frames: list[Image.Image], movie: bytes) -> None:
    cases: list[tuple[dict[str, Any], list[Any], str]] = [
        ({}, [movie, movie], "2 videos; at most 1"),
        ({"max_videos": 0}, [movie], "1 videos; at most 0"),
        ({"max_video_bytes": 100}, [movie], "larger than 100 B"),
        ({"max_video_frames": 3}, [movie], "at most 3"),
        ({"max_video_frames": 3}, [frames], "at most 3"),
        ({}, [[]], "no frames"),
        ({}, [[frames[0], png(frames[1])]], "all be files or all be pictures"),
        ({}, [["https://example.com/a.png"]], "not as URLs"),
        ({}, [[frames[0], frames[1].resize((20, 20))]], "same size"),
        ({}, [b"nonsense"], "unsupported format"),
        ({}, [b"\0\0\0\x18ftypmp42" + bytes(500)], "cannot be decoded"),
        ({}, [7], "a video must be"),
    ]
    for limits, videos, words in cases:
        with pytest.raises(InvalidRequest) as caught:
            await Kitchen(model_dir, **limits).prepare(*({"type": "video", "video": video} for video in videos))
        assert words in caught.value.message, words
        assert caught.value.param is not None and ".video" in caught.value.param


async def test_a_family_without_videos_refuses_them(tmp_path: Path, movie: bytes) -> None:
    make_tiny("llava", tmp_path / "llava", seed=1)
    with pytest.raises(InvalidRequest, match="takes no videos"):
        await Kitchen(tmp_path / "llava").prepare({"type": "video", "video": movie})
