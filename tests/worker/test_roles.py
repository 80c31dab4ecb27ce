"""Workers of separate roles: a request that goes through three of them gets the tokens that one worker gives it."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hydra_engine.core.ids import ImageDigest
from hydra_engine.core.messages import PixelPayload
from hydra_engine.core.pools import PoolKind
from hydra_engine.core.request import ImageItem, Request
from tests.worker.fakes import BLOCK, Rig, make_request
from tests.worker.pulling import connect, make_rig, num_descriptors, pull
from tools.miniatures import make_tiny
from tools.miniatures.base import IMAGE_ID


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-llava")
    make_tiny("llava", directory, seed=3)
    return directory


def with_pictures(spec: Any, request_id: int, count: int) -> tuple[Request, list[PixelPayload]]:
    rng = np.random.default_rng(request_id)
    prompt, images, pixels = [1, 20, 30], [], []
    for index in range(count):
        (shape,) = spec.vision.plan_image(100, 50).items
        digest = ImageDigest(bytes([request_id, index]) * 16)
        images.append(ImageItem(digest, 100, 50, shape.num_patches, shape.num_tokens, len(prompt), shape.grid))
        pixels.append(PixelPayload(digest, shape.width, shape.height, rng.bytes(shape.width * shape.height * 3)))
        prompt += [IMAGE_ID] * shape.num_tokens + [40 + index]
    return make_request(request_id, prompt, images=tuple(images), temperature=0.7, seed=request_id), pixels


def offered(source: Rig, target: Rig, pool: PoolKind, source_blocks: np.ndarray, target_blocks: np.ndarray) -> None:
    """Pulled in two groups under one word, as KV is behind a running prefill."""
    word = 100 + len(source_blocks)
    source.exchange.set_word(9, word)
    pairs = list(zip(source_blocks.tolist(), target_blocks.tolist(), strict=True))
    for group in (pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]):
        checksums = source.exchange.checksums(pool, [block for block, _ in group])
        result = pull(target, pool, group, slot=9, word=word, checksums=checksums)
        assert result.valid and result.problem is None
    source.exchange.set_word(9, 0)


def through_three(
    encoder: Rig, prefiller: Rig, decoder: Rig, request: Request, pixels: list[PixelPayload]
) -> list[int]:
    encoder.worker.add_request(request, pixels)
    errors = encoder.vision(*(encoder.item(request, index) for index in range(len(request.images))))
    assert not any(errors)
    prefiller.add(request)
    for index in range(len(request.images)):
        prefiller.item(request, index)
        here, there = prefiller.features[request.id, index], encoder.features[request.id, index]
        offered(encoder, prefiller, PoolKind.FEATURES, there, here)
    (outcome,) = prefiller.language(prefiller.row(request, 0, request.prompt_token_ids, 0))
    decoder.add(request)
    used = -(-request.num_prompt // BLOCK)
    offered(prefiller, decoder, PoolKind.KV, prefiller.tables[request.id][:used], decoder.tables[request.id][:used])
    tokens = [outcome.token_id]
    while len(tokens) < 8:
        start = request.num_prompt + len(tokens) - 1
        # The first token is a prefill with one token left; the others are decodes.
        row = decoder.row(request, start, [tokens[-1]], len(tokens), decode=len(tokens) > 1)
        (outcome,) = decoder.language(row if len(tokens) > 1 else replace(row, images=()))
        tokens.append(outcome.token_id)
    return tokens


@pytest.mark.parametrize("backend_name", ["reference", "auto"])
def test_a_request_gets_the_same_tokens_through_three_instances(model_dir: Path, backend_name: str) -> None:
    alone = make_rig(model_dir, "EPD", backend_name=backend_name, shared=False)
    roles = [make_rig(model_dir, letters, backend_name=backend_name) for letters in "EPD"]
    encoder, prefiller, decoder = roles
    for rig, count in zip(roles, (1, 2, 2), strict=True):
        steps: list[tuple[int, int]] = []
        rig.worker.warm_up(lambda done, total, steps=steps: steps.append((done, total)))  # type: ignore[misc]
        assert steps[-1] == (count, count)
    connect(prefiller, "source", encoder)
    connect(decoder, "source", prefiller)
    decoder.blocks(5)  # no block goes to one of the same number
    prefiller.image_blocks(3)
    for request_id, count in ((1, 0), (2, 1), (3, 2)):
        request, pixels = with_pictures(alone.spec, request_id, count)
        alone.add(request, pixels)
        if count:
            alone.vision(*(alone.item(request, index) for index in range(count)))
        assert through_three(encoder, prefiller, decoder, request, pixels) == alone.generate(request)[0]
    for rig in (alone, *roles):
        rig.worker.close()


def test_a_role_exports_what_it_sends_and_has_the_lanes_it_needs(model_dir: Path) -> None:
    expected = {"E": [PoolKind.FEATURES], "P": [PoolKind.KV], "D": [], "EP": [PoolKind.FEATURES, PoolKind.KV]}
    for letters, kinds in expected.items():
        before = set(threading.enumerate())
        rig = make_rig(model_dir, letters)
        exports, descriptors = rig.exchange.exports()
        assert [pool.layout.kind for pool in exports.pools] == kinds and exports.num_words == 4096
        places = [exports.words, *(pool.descriptor for pool in exports.pools)]
        assert sorted(places) == list(range(len(descriptors)))
        for pool in exports.pools:
            assert pool.transport == "memfd" and pool.num_bytes == pool.layout.num_blocks * pool.layout.block_bytes
            assert os.fstat(descriptors[pool.descriptor]).st_size == pool.num_bytes
        steps = {"E": {"vision"}, "EP": {"vision", "language"}}.get(letters, {"language"})
        assert {thread.name for thread in set(threading.enumerate()) - before} == {
            f"lane-{name}" for name in (*steps, "transfer")
        }
        rig.worker.close()


def test_a_worker_without_peers_has_neither_lane_nor_memory_for_them(model_dir: Path) -> None:
    before = num_descriptors(), threading.active_count()
    rig = make_rig(model_dir, "EPD", shared=False)
    assert num_descriptors() == before[0] and threading.active_count() == before[1] + 2
    rig.worker.close()
