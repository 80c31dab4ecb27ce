"""Prompts of MiniCPM-V 4.6: every picture becomes text and spans, and is numbered among its kind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hydra_engine.config import MediaConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.preprocess.text.tokenizer import load_tokenizer
from tests.calls import asked
from tests.preprocess.in_process import preprocessor_of
from tools.miniatures import make_tiny


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("minicpmv")
    make_tiny("minicpmv4_6", directory, seed=1)
    return directory


async def test_pictures_and_videos_are_marked_and_numbered(model_dir: Path) -> None:
    """The same ids as those of the whole text, which is how transformers' processor makes them."""
    tokenizer = load_tokenizer(model_dir)
    preprocessor = preprocessor_of(load_spec(model_dir), tokenizer, MediaConfig(), max_model_len=512)
    noise = np.random.default_rng(0)
    small, large = (Image.fromarray(noise.integers(0, 256, (*size, 3), np.uint8)) for size in ((48, 48), (60, 80)))
    content = [
        {"type": "image", "image": large},
        {"type": "text", "text": "\nünï"},
        {"type": "video", "video": [small] * 4, "fps": 2.0},
        {"type": "image", "image": small},
        {"type": "text", "text": "What?"},
    ]
    try:
        messages = [{"role": "user", "content": content}]
        prepared = await preprocessor.prepare(RequestId(1), asked(messages=messages))
    finally:
        await preprocessor.close()

    def marked(token: str, count: int, mark: str = "image") -> str:
        return f"<{mark}>{token * count}</{mark}>"

    picture, video = "<|image_pad|>", "<|video_pad|>"
    tile = marked(picture, 9, "slice")
    expected = (
        f"<s><|user|><image_id>0</image_id>{marked(picture, 9)}{tile}{tile}\n{tile}{tile}\nünï"
        f"<image_id>0</image_id>{marked(video, 9)}{marked(video, 9)}"
        f"<image_id>1</image_id>{marked(picture, 9)}What?<|end|><|assistant|>"
    )
    ids = tokenizer.encode(expected, add_special_tokens=False)
    assert list(prepared.request.prompt_token_ids) == ids
    images = prepared.request.images
    assert [image.num_tokens for image in images] == [9] * 8
    placeholders = [
        index for index, token in enumerate(ids) if token in map(tokenizer._backend.token_to_id, (picture, video))
    ]
    assert placeholders == [place for image in images for place in range(image.start, image.end)]
    assert [payload.digest for payload in prepared.pixels] == [image.digest for image in images]
