"""LLaVA against transformers in float32: features, logits of every position, greedy tokens, however the work is cut."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from hydra_engine.backend.base import Backend
from hydra_engine.backend.select import create_backend
from hydra_engine.core.roles import Role
from hydra_engine.models.inputs import VisionInput
from hydra_engine.models.tiny import BOS_ID, IMAGE_ID
from hydra_engine.models.vision_clip import PixelNormaliser
from tests.models.conftest import BACKENDS, CheckpointFactory
from tests.models.driver import Driver, Request
from tests.models.reference_hf import TransformersModel

TOLERANCE = 1e-4
NUM_GREEDY = 64

VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "tied-mha-full-last": {
        "text": {"num_key_value_heads": 4, "tie_word_embeddings": True},
        "tie_word_embeddings": True,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "odd-heads": {
        "text": {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 22},
        "vision": {"hidden_size": 44, "num_attention_heads": 4, "image_size": 30, "patch_size": 7},
    },
    "mqa-layer-list": {
        "text": {
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
        },
        "vision": {"hidden_act": "gelu"},
        "vision_feature_layer": [-2, 0, -1],
        "multimodal_projector_bias": False,
    },
    "llama3-rope": {
        "text": {
            "max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        "vision_feature_layer": 1,
    },
}


class Pair:
    """The same checkpoint in both implementations, with prompts for it."""

    def __init__(self, checkpoint: CheckpointFactory, variant: str, backend: Backend) -> None:
        self.directory = checkpoint(variant, **VARIANTS[variant])
        self.hf = TransformersModel(self.directory)
        self.driver = Driver(self.directory, backend)
        assert self.driver.spec.vision is not None
        side, generator = self.driver.spec.vision.geometry(9, 9).width, torch.Generator().manual_seed(5)
        self.pixels = torch.randint(0, 256, (3, side, side, 3), dtype=torch.uint8, generator=generator)
        self.num_image_tokens = self.driver.spec.vision.max_tokens_per_image

    def prompt(self, num_images: int, seed: int = 0) -> list[int]:
        """Text, images one after another and apart, text."""
        rng, span = random.Random(seed), [IMAGE_ID] * self.num_image_tokens
        words = [rng.randrange(6, 200) for _ in range(12)]
        ids = [BOS_ID, *words[:5]]
        for index in range(num_images):
            ids += span if index % 2 else [words[6], *span]
        return ids + words[7:]

    def images(self, num_images: int) -> Tensor | None:
        return self.pixels[:num_images] if num_images else None

    def request(self, num_images: int, seed: int = 0) -> Request:
        slots = self.driver.encode(self.pixels[:num_images]) if num_images else []
        return self.driver.request(self.prompt(num_images, seed), slots)


@pytest.fixture(params=VARIANTS)
def pair(request: pytest.FixtureRequest, checkpoint: CheckpointFactory, backend: Backend) -> Pair:
    return Pair(checkpoint, request.param, backend)


@pytest.fixture
def plain_pair(checkpoint: CheckpointFactory, backend: Backend) -> Pair:
    return Pair(checkpoint, "gqa", backend)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    difference = (actual - expected).abs().max().item()
    assert difference <= TOLERANCE, f"largest difference {difference:.3g}"


def test_pixels_are_normalised_bit_for_bit_like_the_processor(plain_pair: Pair) -> None:
    assert plain_pair.driver.spec.vision is not None
    normalise = PixelNormaliser(plain_pair.driver.spec.vision.preprocess, torch.device("cpu"))
    pixels = torch.arange(256, dtype=torch.uint8).repeat(28 * 28 * 3 // 256 + 1)[: 28 * 28 * 3].view(1, 28, 28, 3)
    expected = plain_pair.hf.pixel_values(pixels).permute(0, 2, 3, 1)
    assert torch.equal(normalise(pixels), expected)


def test_projected_features_match(pair: Pair) -> None:
    slots = pair.driver.encode(pair.pixels)
    features = torch.stack([pair.driver.features(image) for image in slots])
    assert_close(features, pair.hf.features(pair.pixels))


def test_an_image_has_the_same_features_in_any_company(plain_pair: Pair) -> None:
    driver = plain_pair.driver
    together = [driver.features(slots) for slots in driver.encode(plain_pair.pixels)]
    for index, features in enumerate(together):
        (alone,) = driver.encode(plain_pair.pixels[index : index + 1])
        assert torch.equal(driver.features(alone), features)


def test_pictures_may_come_as_a_list(plain_pair: Pair) -> None:
    driver, pixels = plain_pair.driver, plain_pair.pixels[:2]
    first, second = driver.encode(pixels)
    expected = driver.features(first + second)
    driver.image_cache.data.fill_(float("nan"))
    batch = VisionInput(list(pixels), ((1, 4, 4),) * 2, torch.tensor(first + second))
    with torch.inference_mode():
        driver.model.encode(batch, driver.image_cache)
    assert torch.equal(driver.features(first + second), expected)


@pytest.mark.parametrize("num_images", [0, 1, 3])
def test_logits_and_greedy_tokens_match(pair: Pair, num_images: int) -> None:
    ids, pixels = pair.prompt(num_images), pair.images(num_images)
    assert_close(pair.driver.run(pair.request(num_images), []), pair.hf.logits(ids, pixels))
    generated = pair.driver.generate(pair.request(num_images), NUM_GREEDY, [11])
    assert generated == pair.hf.generate(ids, NUM_GREEDY, pixels)


def cuts(num_prompt: int, image_start: int, num_image_tokens: int) -> dict[str, list[int]]:
    """Chunk sizes by what is awkward about them; blocks hold 4 tokens of text and 3 features."""
    end = image_start + num_image_tokens
    return {
        "one token at a time": [1] * num_prompt,
        "at block ends": [4] * num_prompt,
        "one past block ends": [5, *[4] * num_prompt],
        "one before block ends": [3, *[4] * num_prompt],
        "at the image": [image_start, num_image_tokens],
        "inside the image": [image_start + 1, num_image_tokens - 2],
        "around the image": [image_start - 1, num_image_tokens + 2],
        "after the image": [end],
        "all but the last token": [num_prompt - 1],
    }


@pytest.mark.parametrize("num_images", [0, 1, 3])
def test_logits_do_not_depend_on_how_the_prompt_is_cut(plain_pair: Pair, num_images: int) -> None:
    ids = plain_pair.prompt(num_images)
    expected = plain_pair.hf.logits(ids, plain_pair.images(num_images))
    whole = plain_pair.driver.run(plain_pair.request(num_images), [])
    assert_close(whole, expected)
    for name, chunks in cuts(len(ids), 7, plain_pair.num_image_tokens).items():
        logits = plain_pair.driver.run(plain_pair.request(num_images), chunks)
        assert torch.equal(logits, whole), f"cut {name}"


def test_images_can_be_shared_and_swapped(plain_pair: Pair) -> None:
    """Two prompts over the same cached features, and one with its pictures in another order."""
    driver, hf = plain_pair.driver, plain_pair.hf
    first, second, _ = driver.encode(plain_pair.pixels)
    ids = plain_pair.prompt(2)
    for order, images in ((plain_pair.pixels[[0, 1]], [first, second]), (plain_pair.pixels[[1, 0]], [second, first])):
        assert_close(driver.run(driver.request(ids, images), [10]), hf.logits(ids, order))


@pytest.mark.parametrize("seed", range(3))
def test_mixed_batches_match_each_request_alone(plain_pair: Pair, seed: int) -> None:
    """Random steps over six requests: decodes beside prefill chunks, some chunks ending inside images."""
    rng, driver = random.Random(seed), plain_pair.driver
    kinds = [0, 1, 3, 0, 1, 2]
    requests = [plain_pair.request(num_images, index) for index, num_images in enumerate(kinds)]
    prompts = [len(request.token_ids) for request in requests]
    wanted = [rng.randrange(4, 16) for _ in kinds]

    def num_generated(index: int) -> int:
        return len(requests[index].token_ids) - prompts[index]

    while unfinished := [i for i in range(len(kinds)) if num_generated(i) < wanted[i]]:
        chosen = rng.sample(unfinished, rng.randrange(1, len(unfinished) + 1))
        work = [(requests[i], rng.randrange(1, requests[i].num_left + 1)) for i in chosen]
        for (request, _), logits in zip(work, driver.step(work), strict=True):
            if request.num_left == 0:
                request.token_ids.append(int(logits.argmax()))
    for index, num_images in enumerate(kinds):
        alone = driver.generate(plain_pair.request(num_images, index), wanted[index])
        mixed = requests[index].token_ids[prompts[index] :]
        assert mixed == alone
        prompt, pixels = plain_pair.prompt(num_images, index), plain_pair.images(num_images)
        assert mixed == plain_pair.hf.generate(prompt, wanted[index], pixels)


def test_a_row_has_the_same_bits_in_any_batch(plain_pair: Pair) -> None:
    driver = plain_pair.driver
    alone = driver.run(plain_pair.request(1), [9])
    crowd = [plain_pair.request(kind, seed) for seed, kind in enumerate((0, 3, 2), start=1)]
    target = plain_pair.request(1)
    logits = [driver.step([(crowd[0], 3), (target, 9), (crowd[1], 20)], all_logits=True)[1]]
    logits += driver.step([(crowd[2], 30), (crowd[1], 1), (target, target.num_left)], all_logits=True)[2:]
    assert torch.equal(torch.cat(logits), alone)


def test_a_step_may_ask_for_no_logits(plain_pair: Pair) -> None:
    request = plain_pair.request(1)
    expected = plain_pair.hf.logits(plain_pair.prompt(1), plain_pair.images(1))
    plain_pair.driver.step([(request, 12)], want_logits=False)
    assert_close(plain_pair.driver.step([(request, request.num_left)])[0], expected[-1:])


@pytest.mark.parametrize("name", BACKENDS)
def test_halves_of_a_model_work_together(checkpoint: CheckpointFactory, name: str) -> None:
    """E encodes, P computes the prompt, D goes on from copied caches: the tokens of one whole model."""
    backend = create_backend("cpu", torch.float32, backend=name, threads=1)
    whole = Pair(checkpoint, "gqa", backend)
    expected = whole.driver.generate(whole.request(1), 8)
    encoder, prefiller, decoder = (Driver(whole.directory, backend, role=Role.parse(letter)) for letter in "EPD")
    images = encoder.encode(whole.pixels[:1])
    prefiller.image_cache.data.copy_(encoder.image_cache.data)
    request = prefiller.request(whole.prompt(1), images)
    first = int(prefiller.run(request, [5])[-1].argmax())
    decoder.adopt(request, prefiller)
    request.token_ids.append(first)
    tokens = [first]
    for _ in range(7):
        (logits,) = decoder.step([(request, 1)])
        tokens.append(int(logits.argmax()))
        request.token_ids.append(tokens[-1])
    assert tokens == expected
    assert encoder.model.weights_bytes + decoder.model.weights_bytes == whole.driver.model.weights_bytes
    with pytest.raises(ValueError, match="without"):
        decoder.encode(whole.pixels[:1])
    with pytest.raises(ValueError, match="without"):
        encoder.run(encoder.request([1, 7]), [])


def test_bfloat16_is_as_good_as_transformers_in_bfloat16(checkpoint: CheckpointFactory) -> None:
    directory = checkpoint("gqa", **VARIANTS["gqa"])
    for name in BACKENDS:
        pair = Pair(checkpoint, "gqa", create_backend("cpu", torch.bfloat16, backend=name, threads=1))
        ids, pixels = pair.prompt(2), pair.images(2)
        truth = pair.hf.logits(ids, pixels)
        plain = TransformersModel(directory, dtype=torch.bfloat16).logits(ids, pixels)
        ours = pair.driver.run(pair.request(2), [13])
        assert (ours - truth).square().mean() <= 2 * (plain - truth).square().mean()
