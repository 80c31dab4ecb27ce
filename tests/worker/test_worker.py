"""The worker's registry, its warm-up and its end."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from hydra_engine.config import EngineConfig
from hydra_engine.core.instances import Role
from hydra_engine.core.plans import VisionPlan
from hydra_engine.errors import BackendError
from hydra_engine.models.layers.decoder import LanguageInput
from hydra_engine.worker.worker import Worker
from tests.virtual_clock import VirtualClock
from tests.worker.fakes import FakeModel, Rig, fake_spec, make_picture, make_request


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_pixels_are_held_from_add_to_remove_and_counted_once_per_picture(rig: Rig) -> None:
    first, pixels = make_picture("a", 1, 0)
    second, more = make_picture("b", 2, 5)
    rig.add(make_request(1, [96] * 10, images=(first, first)), [pixels, pixels])
    assert rig.worker.pixel_bytes == 192
    rig.add(make_request(2, [96] * 10, images=(first, second)), [pixels, more])
    assert rig.worker.pixel_bytes == 3 * 192
    rig.worker.remove_request(1)
    rig.worker.remove_request(2)
    assert rig.worker.pixel_bytes == 0
    rig.worker.close()


def test_misuse_of_the_registry_is_a_bug_of_the_caller(rig: Rig) -> None:
    rig.add(make_request(1, [4]))
    with pytest.raises(AssertionError, match="twice"):
        rig.worker.add_request(make_request(1, [4]), ())
    with pytest.raises(AssertionError, match="unknown"):
        rig.worker.remove_request(7)
    rig.worker.close()


def test_a_request_removed_while_its_plan_runs_does_not_disturb_the_lane() -> None:
    gate = threading.Event()
    rig = Rig(FakeModel(encode_gate=gate))
    image, pixels = make_picture("a", 1, 0)
    request = make_request(1, [96] * 5, images=(image,))
    rig.add(request, [pixels])
    step = rig.next_step()
    rig.worker.submit_vision(VisionPlan(step, (rig.item(request, 0),)))
    rig.worker.remove_request(1)
    gate.set()
    assert rig.wait(step).errors[0] is None
    rig.worker.close()


def test_warm_up_runs_in_both_lanes_and_leaves_nothing_behind(rig: Rig) -> None:
    before = [cache.data.clone() for cache in (rig.kv_cache, rig.image_cache)]
    seen: list[tuple[int, int]] = []
    rig.worker.warm_up(lambda done, total: seen.append((done, total)))
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert rig.model.encode_threads == {"vision"} and rig.model.forward_threads == {"language"}
    for cache, old in zip((rig.kv_cache, rig.image_cache), before, strict=True):
        assert torch.equal(cache.data.view(torch.int32), old.view(torch.int32))
    assert rig.worker.poll() == [] and not rig.woken.is_set() and rig.worker.pixel_bytes == 0
    rig.worker.close()


def test_a_model_that_cannot_run_is_found_by_the_warm_up() -> None:
    class Broken(FakeModel):
        def forward(self, *arguments: object) -> torch.Tensor:
            raise RuntimeError("no such instruction")

    rig = Rig(Broken())
    with pytest.raises(BackendError, match="warm-up"):
        rig.worker.warm_up(lambda done, total: None)
    rig.worker.close()


def test_close_finishes_what_was_submitted(rig: Rig) -> None:
    request = make_request(1, range(3, 12))
    rig.add(request)
    row = rig.row(request, 0, request.prompt_token_ids, 0)
    for _ in range(4):
        rig.submit(row)
    rig.worker.close()
    assert len(rig.worker.poll()) == 4


@pytest.mark.parametrize(
    ("letters", "lanes"), [("EPD", {"vision", "language"}), ("E", {"vision"}), ("D", {"language"})]
)
def test_the_role_says_which_lanes_exist(letters: str, lanes: set[str]) -> None:
    rig = Rig()
    names: list[str] = []
    lane = rig.backend.device.lane
    rig.backend.device.lane = lambda name: (names.append(name), lane(name))[1]  # type: ignore[method-assign]
    worker = Worker(
        model=rig.model,
        backend=rig.backend,
        spec=fake_spec(),
        kv_cache=rig.kv_cache,
        image_cache=rig.image_cache,
        config=EngineConfig(),
        clock=VirtualClock(),
        wake=threading.Event().set,
        role=Role.parse(letters),
    )
    assert set(names) == lanes
    worker.warm_up(lambda done, total: None)
    worker.close()
    rig.worker.close()


@pytest.mark.parametrize("max_model_len", [2, 5, 256])
def test_warm_up_stays_within_the_context(max_model_len: int) -> None:
    class Bounded(FakeModel):
        def forward(self, inputs: LanguageInput, *caches: Any) -> torch.Tensor:
            assert int(inputs.positions.max()) < max_model_len
            return super().forward(inputs, *caches)

    rig = Rig(Bounded(), spec=fake_spec(max_model_len))
    rig.worker.warm_up(lambda done, total: None)
    rig.worker.close()
