"""The demo model's requests against transformers' own processor: the same ids, the same pixels."""

import numpy as np
import torch
from PIL import Image
from transformers import AutoProcessor

from hydra_engine.config import EngineConfig, MediaConfig
from hydra_engine.core.ids import RequestId
from hydra_engine.models.layers.vision import normalise_pixels
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.preprocess.text.tokenizer import load_tokenizer
from tests.calls import asked
from tests.preprocess.in_process import preprocessor_of


async def test_ids_and_pixels_equal_those_of_the_processor() -> None:
    folder = EngineConfig().model_path
    spec, tokenizer, oracle = load_spec(folder), load_tokenizer(folder), AutoProcessor.from_pretrained(folder)
    assert spec.vision is not None
    preprocess = spec.vision.preprocess
    preprocessor = preprocessor_of(spec, tokenizer, MediaConfig(), max_model_len=512)
    generator = np.random.default_rng(0)
    for sizes in ([(100, 60)], [(84, 84), (300, 200)], [(7, 9), (50, 333), (640, 480)]):
        images = [Image.fromarray(generator.integers(0, 256, (h, w, 3), np.uint8)) for w, h in sizes]
        parts = [
            *({"type": "image", "image": image} for image in images),
            {"type": "text", "text": "What is this? ünï"},
        ]
        messages = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": parts}]
        prepared = await preprocessor.prepare(RequestId(1), asked(messages=messages))
        expected = oracle.apply_chat_template(
            messages, tokenize=True, return_dict=True, add_generation_prompt=True, return_tensors="np"
        )
        assert list(prepared.request.prompt_token_ids) == expected["input_ids"][0].tolist()
        pixels = [np.frombuffer(p.data, np.uint8).reshape(p.height, p.width, 3) for p in prepared.pixels]
        normalised = normalise_pixels(torch.from_numpy(np.stack(pixels)), preprocess).numpy().transpose(0, 3, 1, 2)
        assert np.abs(normalised - expected["pixel_values"]).max() < 1e-5
    await preprocessor.close()
