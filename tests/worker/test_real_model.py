"""The worker over the real backend and a random miniature: batches, chunks and warm-up change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hydra_engine.backend.base import PagedCache
from hydra_engine.backend.select import create_backend
from hydra_engine.config import CacheConfig, EngineConfig
from hydra_engine.core.ids import ImageDigest
from hydra_engine.core.media import ImageItem, PixelPayload
from hydra_engine.core.request import Request
from hydra_engine.core.roles import EPD
from hydra_engine.models.registry import load_model
from hydra_engine.models.tiny import make_tiny
from hydra_engine.models.tiny.base import IMAGE_ID
from hydra_engine.specs.registry import load_spec
from hydra_engine.worker.cache_store import allocate_image_cache, allocate_kv_cache
from hydra_engine.worker.memory import plan_memory
from tests.worker.fakes import BLOCK, IMAGE_BLOCK, Rig, make_request


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-llava")
    make_tiny("llava", directory, seed=3)
    return directory


@pytest.fixture(params=["reference", "auto"])
def rig(model_dir: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Caches full of NaN, so that a read of what was never written cannot stay hidden."""
    spec = load_spec(model_dir)
    backend = create_backend("cpu", torch.float32, backend=request.param, threads=1)
    config = EngineConfig(cache=CacheConfig(num_kv_blocks=256, num_image_blocks=64))
    plan = plan_memory(spec, EPD, config, torch.float32, 1 << 30)
    caches: Any = (
        allocate_kv_cache(spec, plan, BLOCK, torch.float32, poison=True),
        allocate_image_cache(spec, plan, IMAGE_BLOCK, torch.float32, poison=True),
    )
    rig = Rig(load_model(model_dir, spec, backend, EPD), backend=backend, spec=spec, caches=caches)
    yield rig
    rig.worker.close()


def with_pictures(rig: Rig, request_id: int, seed: int, count: int, **sampling: Any) -> Request:
    """Encoded and ready for its prefill."""
    spec = rig.spec
    assert spec.vision is not None
    rng = np.random.default_rng(seed)
    prompt, images, pixels = [1, 20, 30], [], []
    for index in range(count):
        (shape,) = spec.vision.plan_image(100, 50).items
        digest = ImageDigest(bytes([seed, index]) * 16)
        images.append(ImageItem(digest, 100, 50, shape.num_patches, shape.num_tokens, len(prompt), shape.grid))
        pixels.append(PixelPayload(digest, shape.width, shape.height, rng.bytes(shape.width * shape.height * 3)))
        prompt += [IMAGE_ID] * shape.num_tokens + [40 + index]
    request = make_request(request_id, prompt, images=tuple(images), seed=seed, **sampling)
    rig.add(request, pixels)
    outcomes = rig.vision(*(rig.item(request, index) for index in range(count)))
    assert all(outcome.error is None for outcome in outcomes)
    return request


def requests(rig: Rig, base: int) -> list[Request]:
    made = [
        make_request(base, range(10, 40)),
        make_request(base + 1, range(50, 57), temperature=1.0, seed=4, top_p=0.95),
        with_pictures(rig, base + 2, seed=8, count=2),
        with_pictures(rig, base + 3, seed=9, count=1, temperature=0.9),
    ]
    for request in made[:2]:
        rig.add(request)
    return made


def test_tokens_depend_on_nothing_but_the_request(rig: Rig) -> None:
    together = rig.generate(*requests(rig, 10))
    assert all(len(tokens) == 8 for tokens in together)
    assert rig.generate(*requests(rig, 20), chunk=7) == together
    assert [rig.generate(request)[0] for request in requests(rig, 30)] == together


def test_warm_up_leaves_nothing_behind(rig: Rig) -> None:
    before = bits(rig.kv_cache), bits(rig.image_cache)
    rig.worker.warm_up(lambda done, total: None)
    assert torch.equal(bits(rig.kv_cache), before[0]) and torch.equal(bits(rig.image_cache), before[1])


def bits(cache: PagedCache) -> torch.Tensor:
    return cache.data.view(torch.int32).clone()
