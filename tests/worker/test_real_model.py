"""The worker over the real backend and a random miniature: batches, chunks and warm-up change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hydra_engine.backend.base import Backend, PagedCache
from hydra_engine.backend.device import Device
from hydra_engine.backend.select import create_backend
from hydra_engine.config import CacheConfig, EngineConfig, SchedulerConfig
from hydra_engine.core.ids import ImageDigest
from hydra_engine.core.instances import EPD
from hydra_engine.core.messages import PixelPayload
from hydra_engine.core.request import ImageItem, Request
from hydra_engine.models.build import load_model
from hydra_engine.models.layers.vision import VisionLayer
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.models.specs.rope import place_spans
from hydra_engine.worker.memory.cache_store import allocate_image_cache, allocate_kv_cache, allocate_states
from hydra_engine.worker.memory.plan import plan_memory
from hydra_engine.worker.ports import Gate
from tests.faults.points import FaultPoints
from tests.worker.fakes import BLOCK, IMAGE_BLOCK, Rig, make_request, poisoned
from tools.miniatures import make_tiny
from tools.miniatures.base import IMAGE_ID


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-llava")
    make_tiny("llava", directory, seed=3)
    return directory


@pytest.fixture(scope="module")
def hybrid_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder most of whose layers keep a recurrent state per request."""
    directory = tmp_path_factory.mktemp("tiny-hybrid")
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    make_tiny("qwen3_5_text", directory, seed=7, text={"num_hidden_layers": 4, **heads, **sizes})
    return directory


def make_rig(
    model_dir: Path,
    backend_name: str,
    num_seq_slots: int = 64,
    *,
    asynchronous: bool = False,
    device: Device | None = None,
    backend: Backend | None = None,
    gate: Gate | None = None,
    tpot_slo: float | None = None,
    token_budget: int = 512,
    **options: Any,
) -> Rig:
    """Caches full of NaN, so that a read of what was never written cannot stay hidden. `options` of the engine;
    `backend` instead of one of a processor by its name."""
    spec = load_spec(model_dir)
    backend = backend or create_backend("cpu", torch.float32, backend=backend_name, threads=1)
    if device is not None:
        backend = replace(backend, device=device)
    config = EngineConfig(
        cache=CacheConfig(num_kv_blocks=256, num_image_blocks=256),
        scheduler=SchedulerConfig(max_num_seqs=num_seq_slots, token_budget=token_budget, tpot_slo=tpot_slo),
        max_model_len=512,
        **options,
    )
    plan, on = plan_memory(spec, EPD, config, 4, 1 << 30), backend.device.torch_device
    caches = (
        allocate_kv_cache(spec, plan, BLOCK, torch.float32, device=on),
        allocate_image_cache(spec, plan, IMAGE_BLOCK, torch.float32, device=on),
    )
    states = allocate_states(spec, plan, torch.float32, device=on)
    poisoned(*(cache.data for cache in caches if cache is not None))
    poisoned(*(() if states is None else (states.conv, states.recurrent)))
    return Rig(
        load_model(model_dir, spec, backend, EPD),
        backend=backend,
        spec=spec,
        caches=caches,
        states=states,
        faults=FaultPoints(),
        gate=gate,
        asynchronous=asynchronous,
        config=config,
    )


@pytest.fixture(params=["reference", "auto"])
def rig(model_dir: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = make_rig(model_dir, request.param)
    yield rig
    rig.worker.close()


@pytest.fixture(params=[("reference", False), ("reference", True), ("auto", False), ("auto", True)], ids=str)
def hybrid(hybrid_dir: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A rig whose decodes are replayed only with the reference backend and asynchronous launches."""
    backend_name, asynchronous = request.param
    rig = make_rig(hybrid_dir, backend_name, num_seq_slots=6, asynchronous=asynchronous)
    captured = list[int]()
    rig.worker.capture_graphs(lambda done, total: captured.append(done))
    assert rig.spec.language.has_states and bool(captured) == (asynchronous and backend_name == "reference")
    yield rig
    rig.worker.close()


def with_pictures(rig: Rig, request_id: int, seed: int, count: int, **sampling: Any) -> Request:
    """Encoded and ready for its prefill."""
    spec = rig.spec
    assert spec.vision is not None
    rng = np.random.default_rng(seed)
    prompt, images, pixels = [1, 20, 30], [], []
    (shape,) = spec.vision.plan_image(100, 50).items
    ropes, rope_delta = place_spans([(3 + index * (shape.num_tokens + 1), shape) for index in range(count)])
    for index in range(count):
        digest = ImageDigest(bytes([seed, index]) * 16)
        sizes = shape.num_patches, shape.num_tokens, len(prompt), shape.grid
        images.append(ImageItem(digest, 100, 50, *sizes, ropes[index]))
        pixels.append(PixelPayload(digest, shape.width, shape.height, rng.bytes(shape.width * shape.height * 3)))
        prompt += [IMAGE_ID] * shape.num_tokens + [40 + index]
    request = make_request(request_id, prompt, images=tuple(images), seed=seed, **sampling)
    request = replace(request, rope_delta=rope_delta)
    rig.add(request, pixels)
    assert not any(rig.vision(*(rig.item(request, index) for index in range(count))))
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


@pytest.mark.quick("auto")
def test_tokens_depend_on_nothing_but_the_request(rig: Rig) -> None:
    together = rig.generate(*requests(rig, 10))
    assert all(len(tokens) == 8 for tokens in together)
    assert rig.generate(*requests(rig, 20), chunk=7) == together
    assert [rig.generate(request)[0] for request in requests(rig, 30)] == together
    assert rig.generate_ahead(*requests(rig, 40)) == together


def texts(base: int) -> list[Request]:
    return [
        make_request(base, range(10, 40)),
        make_request(base + 1, range(50, 57), temperature=1.0, seed=4, repetition_penalty=1.3),
        make_request(base + 2, [9]),
        make_request(base + 3, range(20, 33), min_tokens=3),
    ]


def ask(rig: Rig, made: list[Request], generate: Callable[..., list[list[int]]], **options: int) -> list[list[int]]:
    for request in made:
        rig.add(request)
    tokens = generate(*made, **options)
    for request in made:
        rig.leave(request)
    return tokens


@pytest.mark.quick("auto")
def test_recurrent_states_follow_their_requests_through_slots_and_steps_planned_ahead(hybrid: Rig) -> None:
    together = ask(hybrid, texts(10), hybrid.generate)
    assert len({tuple(tokens) for tokens in together}) == 4
    assert [ask(hybrid, [request], hybrid.generate)[0] for request in texts(20)] == together
    assert ask(hybrid, texts(30), hybrid.generate_ahead) == together
    assert ask(hybrid, texts(40), hybrid.generate_ahead, chunk=3) == together


@pytest.mark.quick("auto")
@pytest.mark.parametrize("action", ["raise", "nan"])
def test_recurrent_states_survive_a_neighbour_that_fails(hybrid: Rig, action: str) -> None:
    together = ask(hybrid, texts(10), hybrid.generate)
    poison = make_request(5, [60, 61, 62])
    hybrid.worker.faults.arm("eng.mid_step", action, "token=61")
    assert ask(hybrid, [*texts(20), poison], hybrid.generate_ahead, chunk=4) == [*together, []]
    hybrid.worker.faults.arm("eng.mid_step", "off")
    assert ask(hybrid, texts(30), hybrid.generate_ahead) == together


@pytest.mark.quick("auto")
def test_recurrent_states_survive_steps_that_are_run_again(hybrid: Rig) -> None:
    together = ask(hybrid, texts(10), hybrid.generate)
    hybrid.worker.faults.arm("eng.mid_step", "raise", "times=1")
    assert ask(hybrid, texts(20), hybrid.generate_ahead, chunk=5) == together
    made = texts(30)
    for request in made:
        hybrid.add(request)
    rows = [hybrid.row(r, 0, r.prompt_token_ids, 0) for r in made]
    assert [o.token_id for o in hybrid.language(*rows)] == [tokens[0] for tokens in together]
    for count in range(1, 8):
        hybrid.worker.faults.arm("eng.mid_step", "raise", "times=1")
        outcomes = hybrid.language(*(hybrid.row(r, r.num_prompt + count - 1, [-1], count) for r in made))
        assert [o.token_id for o in outcomes] == [tokens[count] for tokens in together]


def test_warm_up_leaves_nothing_behind(rig: Rig) -> None:
    before = bits(rig.kv_cache), bits(rig.image_cache)
    rig.worker.warm_up(lambda done, total: None)
    assert torch.equal(bits(rig.kv_cache), before[0]) and torch.equal(bits(rig.image_cache), before[1])


@pytest.mark.parametrize(("asynchronous", "num_layers"), [(False, 1), (True, 2)])
def test_warm_up_of_a_processor_runs_one_layer_of_the_tower(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool, num_layers: int
) -> None:
    """Warm-up runs one layer of the tower on a processor, and elsewhere all that the features need."""
    rig = make_rig(model_dir, "reference", 4, asynchronous=asynchronous)
    made: list[int] = []
    run = VisionLayer.__call__
    monkeypatch.setattr(VisionLayer, "__call__", lambda *of, **more: (made.append(1), run(*of, **more))[1])
    rig.worker.warm_up(lambda done, total: None)
    assert len(made) == num_layers
    rig.worker.close()


def bits(cache: PagedCache) -> torch.Tensor:
    return cache.data.view(torch.int32).clone()
