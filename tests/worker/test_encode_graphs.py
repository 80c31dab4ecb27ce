"""Encodes that are replayed, over real miniatures of every family: the features of encodes that are not, bit for bit,
whatever padding is made of; and what becomes of encodes that no graph fits, or that fail."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hydra_engine.backend.base import Backend, PagedCache
from hydra_engine.backend.select import create_backend
from hydra_engine.config import EngineConfig
from hydra_engine.core.ids import ImageDigest, StepId
from hydra_engine.core.instances import EPD, Role
from hydra_engine.core.messages import PixelPayload
from hydra_engine.core.plans import VisionPlan
from hydra_engine.core.request import ImageItem, Request
from hydra_engine.errors import BackendError, ConfigError
from hydra_engine.models.build import load_model
from hydra_engine.models.layers.vision import PixelRows, VisionInput, cumulative_lengths, pad_with_grids, spans_in
from hydra_engine.models.qwen_vl.model import PatchRotary
from hydra_engine.models.specs.base import ItemPlan, VisionSpec
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.models.specs.rope import place_spans
from hydra_engine.models.vlm import VisionLanguageModel
from hydra_engine.worker.memory.working import image_budget, largest_encode
from hydra_engine.worker.vision.graphs import CAPTURED_PATCHES, EncodeGraphs, captured_sizes
from tests.worker.fakes import IMAGE_BLOCK, Rig, make_request
from tests.worker.late import LateDevice
from tests.worker.test_real_model import make_rig
from tools.miniatures import make_tiny

# Whole pictures, tiles and windows; the others are like one of them.
FAMILIES = [
    *("llava", "internvl", "qwen2_5_vl"),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("llava_next", "minicpmv", "minicpmv4_6", "openpangu_vl", "qwen2_vl", "qwen3_vl", "qwen3_5")
    ),
]
PICTURES = ((50, 24), (20, 45), (32, 32))
NUM_BLOCKS = 256


@dataclass
class Bench:
    """A model, graphs over one image cache, and another cache for encodes without."""

    model: VisionLanguageModel
    vision: VisionSpec
    device: LateDevice
    graphs: EncodeGraphs
    replayed: PagedCache
    plain: PagedCache

    def items(self, *pictures: tuple[int, int]) -> list[tuple[tuple[int, int], ItemPlan]]:
        return [(size, item) for size in pictures for item in self.vision.plan_image(*size).items]

    def num_patches(self, *pictures: tuple[int, int]) -> int:
        return sum(item.num_patches for _, item in self.items(*pictures))

    def batch(self, *pictures: tuple[int, int], seed: int = 0) -> VisionInput:
        """A batch whose slots are scattered over the cache."""
        items = self.items(*pictures)
        generator = torch.Generator().manual_seed(seed)
        shapes = [(item.num_pictures, item.height, item.width, 3) for _, item in items]
        slots = torch.randperm(NUM_BLOCKS * IMAGE_BLOCK, generator=generator)
        return VisionInput(
            tuple(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator) for shape in shapes),
            tuple(size for size, _ in items),
            tuple(item.grid for _, item in items),
            slots[: sum(item.num_tokens for _, item in items)],
        )

    def replay(self, *pictures: tuple[int, int], seed: int = 0) -> bool:
        batch = self.batch(*pictures, seed=seed)
        with torch.inference_mode():
            return self.graphs.replay(batch, batch.slots.numpy(), self.num_patches(*pictures))

    def expected(self, *pictures: tuple[int, int], seed: int = 0) -> PagedCache:
        """Encodes pictures into the plain cache, which it returns; both caches hold NaN besides."""
        for cache in (self.plain, self.replayed):
            cache.data.fill_(float("nan"))
        with torch.inference_mode():
            self.model.encode(self.batch(*pictures, seed=seed), self.plain)
        assert bool(torch.isfinite(self.plain.data).any())
        return self.plain

    def poison(self) -> None:
        """Fills the inputs with values that an earlier replay may leave."""
        with torch.inference_mode():
            self.graphs._patches.random_(0, 256)
            self.graphs._integers.fill_(-(10**9))

    def assert_equal(self) -> None:
        """Compares every slot, written or not."""
        assert torch.equal(bits(self.replayed), bits(self.plain))


def bits(cache: PagedCache) -> Tensor:
    return cache.data.view(torch.int32)


def made(directory: Path, sizes: Callable[[Bench], Sequence[int]], device: LateDevice | None = None) -> Bench:
    """Makes a lane with captured graphs of `sizes`."""
    spec, device = load_spec(directory), device or LateDevice()
    backend = Backend(
        device, create_backend("cpu", torch.float32, backend="reference", threads=1).ops, torch.float32, 1
    )
    model = load_model(directory, spec, backend, Role.parse("E"))
    assert isinstance(model, VisionLanguageModel) and model.tower is not None and spec.vision is not None
    shape = (NUM_BLOCKS, spec.vision.num_planes, 1, IMAGE_BLOCK, 1, spec.vision.feature_size)
    caches = [PagedCache(torch.full(shape, float("nan"))) for _ in range(2)]
    bench = Bench(model, spec.vision, device, EncodeGraphs(model.tower, backend, caches[0], ()), *caches)
    bench.graphs.sizes = tuple(sizes(bench))
    bench.graphs.prepare()
    for partition, size in bench.graphs.capture_order:
        bench.graphs.capture(partition, size)
    device.replays.clear()
    return bench


def two_sizes(bench: Bench) -> tuple[int, int]:
    """Two graph sizes: the first picture's, and all pictures' with some padding."""
    assert bench.model.tower is not None
    padding = 3 * bench.model.tower.granule
    return bench.num_patches(PICTURES[0]), bench.num_patches(*PICTURES) + padding


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("encode-graphs")

    def of(family: str) -> Path:
        if not (root / family).exists():
            make_tiny(family, root / family, seed=5)
        return root / family

    return of


@pytest.fixture(scope="module")
def benches(checkpoints: Callable[[str], Path]) -> Callable[[str], Bench]:
    known: dict[str, Bench] = {}

    def of(family: str) -> Bench:
        if family not in known:
            known[family] = made(checkpoints(family), two_sizes)
        return known[family]

    return of


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_encodes_write_the_same_bits(family: str, benches: Callable[[str], Bench]) -> None:
    """Replays without padding, with some and with much, in any order; other slots are not written."""
    bench = benches(family)
    batches = ([PICTURES[0]], PICTURES, PICTURES[1:], [PICTURES[0]])
    for seed, pictures in enumerate(batches):
        bench.expected(*pictures, seed=seed)
        bench.poison()
        count = len(bench.device.replays)
        assert bench.replay(*pictures, seed=seed) and len(bench.device.replays) == count + 1
        bench.assert_equal()


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_that_is_not_a_number_stays_where_it_is(
    family: str, benches: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes are numbers, so it takes a broken tower: real rows see nothing of padding in any layer."""
    bench, pictures = benches(family), PICTURES[:2]
    bench.expected(*pictures)
    num_real, rows = bench.num_patches(*pictures), PixelRows.__call__

    def broken(self: PixelRows, patches: Tensor) -> Tensor:
        found = rows(self, patches)
        found[num_real:] = float("nan")
        return found

    monkeypatch.setattr(PixelRows, "__call__", broken)
    assert bench.replay(*pictures)
    bench.assert_equal()


def test_a_picture_with_fewer_patches_than_queries_is_not_replayed(tmp_path: Path) -> None:
    """A resampler attends to it in several copies, for which a padded batch has no room."""
    make_tiny("minicpmv", tmp_path, seed=5, query_num=20, scale_resolution=14)
    bench = made(tmp_path, lambda _: (40,))
    assert 0 < bench.num_patches((14, 14)) < 20 and not bench.replay((14, 14))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_does_not_fit_is_left_alone(family: str, benches: Callable[[str], Bench]) -> None:
    bench = benches(family)
    bench.replayed.data.fill_(3.0)
    assert not bench.replay(*PICTURES * 3)
    assert bool((bench.replayed.data == 3.0).all())


def test_more_pictures_or_windows_than_segments(benches: Callable[[str], Bench]) -> None:
    """The number of patches alone does not decide whether an encode fits."""
    assert pad_with_grids([(1, 2, 2)] * 64, 1024, 2) is not None and pad_with_grids([(1, 2, 2)] * 65, 1024, 2) is None
    assert cumulative_lengths([4, 8], 3) is not None and cumulative_lengths([4, 8], 1) is None
    tower = benches("qwen2_5_vl").model.tower
    assert tower is not None
    slots = torch.zeros(0, dtype=torch.int64)
    square = tower.pack(VisionInput((), (), ((1, 64, 64),), slots), 8192)
    many = tower.pack(VisionInput((), (), ((1, 2, 20),) * 10, slots), 8192)
    assert square is not None and many is not None
    assert [len(one) for one in square.bounds] == [len(one) for one in many.bounds]
    assert len(square.bounds[0]) == spans_in(8192, 4) + 1
    # All of it edges: a window of a row of tokens has a part of what a whole one has.
    assert tower.pack(VisionInput((), (), ((1, 2, 4096),), slots), 8192) is None


@pytest.mark.parametrize("merge", [2, 4])
def test_rooms_are_filled_to_the_last_patch(merge: int) -> None:
    for left in range(0, 200 * merge**2, merge**2):
        grids: list[tuple[int, int, int]] = [(1, merge, 3 * merge)]
        found = pad_with_grids(grids, 3 * merge**2 + left, merge)
        assert found is not None and found[:1] == grids and len(found) <= 3
        assert sum(rows * columns for _, rows, columns in found) == 3 * merge**2 + left
        assert all(rows % merge == columns % merge == 0 < columns for _, rows, columns in found)


def test_a_table_that_was_reserved_stays_where_it_is() -> None:
    rotary, places = PatchRotary(16, 1e4, torch.device("cpu")), torch.tensor([100])
    rotary.reserve(200)
    reserved = rotary.with_rows(200)
    before = rotary(places, places, 101)
    rotary(places, places, 1000)
    assert rotary.with_rows(200) is not reserved and any(kept is reserved for kept in rotary._reserved)
    assert all(torch.equal(one, other) for one, other in zip(before, rotary(places, places, 2000), strict=True))


# ---- what is captured


def test_the_largest_is_captured_first_and_all_of_them_for_every_partition(checkpoints: Callable[[str], Path]) -> None:
    bench = made(checkpoints("llava"), two_sizes, LateDevice(num_partitions=2))
    small, large = bench.graphs.sizes
    assert bench.graphs.capture_order == [(0, large), (0, small), (1, large), (1, small)]
    assert bench.graphs.num_bytes == 4000 and bench.graphs.largest == large
    bench.device.partitions.here = 1
    bench.expected(PICTURES[2])
    assert bench.replay(PICTURES[2]) and bench.device.replays == [1]
    bench.assert_equal()


def test_a_size_whose_padding_is_not_finite_is_not_replayed(
    checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = PixelRows.__call__
    monkeypatch.setattr(PixelRows, "__call__", lambda self, x: rows(self, x) * float("nan"))
    bench = made(checkpoints("llava"), two_sizes)
    monkeypatch.undo()
    assert "not finite" in caplog.text and bench.graphs.largest == 0
    assert not bench.replay(PICTURES[0])


def test_capturing_leaves_nothing_behind(checkpoints: Callable[[str], Path]) -> None:
    bench = made(checkpoints("qwen3_vl"), two_sizes)
    assert bool(bench.replayed.data.isnan().all())


def test_sizes() -> None:
    config = EngineConfig()
    assert captured_sizes(config, 4, 16384) == (64, 128, *range(256, 4097, 256))
    assert captured_sizes(config, 4, 300) == (64, 128, 256, 300)
    assert captured_sizes(config, 16, 32) == (32,)
    assert captured_sizes(config, 576, 576 * 20) == tuple(576 * count for count in range(1, 8))
    assert captured_sizes(config, 5000, 10000) == (5000,) and CAPTURED_PATCHES < 5000
    given = replace(config, encoder_cuda_graph_sizes=("100,9000", 20000))  # type: ignore[arg-type]
    assert given.encoder_cuda_graph_sizes == (100, 9000, 20000)
    assert captured_sizes(given, 16, 16384) == (112, 9008) and captured_sizes(given, 64, 64) == (64,)
    for wrong in (("x",), (0,), (65537,), ("",)):
        with pytest.raises(ConfigError, match="encoder_cuda_graph_sizes must be"):
            EngineConfig(encoder_cuda_graph_sizes=wrong)  # type: ignore[arg-type]


# ---- in the worker


def graph_rig(directory: Path, device: LateDevice, **options: Any) -> Rig:
    rig = make_rig(directory, "reference", asynchronous=True, device=device, cuda_graph_sizes=(1,), **options)
    rig.worker.capture_graphs(lambda done, total: None)
    device.replays.clear()
    return rig


@pytest.fixture
def device() -> LateDevice:
    return LateDevice()


@pytest.fixture
def rig(checkpoints: Callable[[str], Path], device: LateDevice) -> Iterator[Rig]:
    rig = graph_rig(checkpoints("qwen2_vl"), device)
    yield rig
    rig.worker.close()


def with_pictures(rig: Rig, request_id: int, *sizes: tuple[int, int], white: int = -1) -> Request:
    """A request whose pictures are not encoded yet. `white`: the number of one without any detail."""
    assert rig.spec.vision is not None
    rng, prompt, images, pixels = np.random.default_rng(request_id), [1, 20], [], []
    shapes = [rig.spec.vision.plan_image(*size).items[0] for size in sizes]
    starts = np.cumsum([2, *(shape.num_tokens for shape in shapes)])
    ropes, rope_delta = place_spans(list(zip(starts.tolist(), shapes, strict=False)))
    for index, (size, shape) in enumerate(zip(sizes, shapes, strict=True)):
        digest = ImageDigest(bytes([request_id, index]) * 16)
        counts = shape.num_patches, shape.num_tokens, len(prompt), shape.grid
        images.append(ImageItem(digest, *size, *counts, ropes[index]))
        count = shape.width * shape.height * 3
        data = b"\xff" * count if index == white else rng.bytes(count)
        pixels.append(PixelPayload(digest, shape.width, shape.height, data))
        prompt += [7] * shape.num_tokens
    request = replace(make_request(request_id, prompt, images=tuple(images)), rope_delta=rope_delta)
    rig.add(request, pixels)
    return request


def features(rig: Rig, request: Request, index: int) -> Tensor:
    blocks = torch.from_numpy(rig.features[request.id, index].astype("int64"))
    return rig.image_cache.data[blocks, 0].flatten(0, 3)[: request.images[index].num_tokens]


def test_the_lane_replays_what_fits(rig: Rig, device: LateDevice, checkpoints: Callable[[str], Path]) -> None:
    plain = make_rig(checkpoints("qwen2_vl"), "reference")
    for number, sizes in enumerate(([(60, 40)], [(100, 50), (30, 30)], [(64, 64)])):
        found = []
        for one in (rig, plain):
            request = with_pictures(one, 10 + number, *sizes)
            errors = one.vision(*(one.item(request, index) for index in range(len(sizes))))
            assert not any(errors)
            found.append([features(one, request, index) for index in range(len(sizes))])
        assert all(torch.equal(*both) for both in zip(*found, strict=True))
        assert len(device.replays) == number + 1
    plain.worker.close()


@pytest.mark.quick("nan")
@pytest.mark.parametrize("action", ["raise", "nan", "oom"])
def test_a_picture_that_fails_fails_alone(rig: Rig, device: LateDevice, action: str) -> None:
    good, bad = with_pictures(rig, 1, (60, 40), (40, 40)), with_pictures(rig, 2, (50, 50))
    rig.worker.faults.arm("vis.before_step", action, "request=2")
    errors = rig.vision(rig.item(good, 0), rig.item(bad, 0), rig.item(good, 1))
    assert [error is None for error in errors] == [True, False, True]
    assert all(bool(torch.isfinite(features(rig, good, index)).all()) for index in (0, 1))
    assert device.replays


def test_features_that_are_not_finite_fail_one_picture_of_a_replay(
    rig: Rig, device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = PixelRows.__call__

    def broken(self: PixelRows, patches: Tensor) -> Tensor:
        white = (patches == 255).all(dim=1, keepdim=True)
        return rows(self, patches).masked_fill(white, float("nan"))

    monkeypatch.setattr(PixelRows, "__call__", broken)
    request = with_pictures(rig, 1, (60, 40), (40, 40), (50, 50), white=1)
    errors = rig.vision(*(rig.item(request, index) for index in range(3)))
    assert [error and error.code for error in errors] == [None, "numerical_error", None]
    assert len(device.replays) == 1
    other = with_pictures(rig, 2, (40, 40))
    assert rig.vision(rig.item(other, 0))[0] is None, "nothing is left of it"
    assert bool(torch.isfinite(features(rig, other, 0)).all())


def encodes_in_flight(rig: Rig, device: LateDevice) -> list[StepId]:
    """Launched, and not computed."""
    device.working.clear()
    steps = []
    for request_id in (1, 2):
        request, step = with_pictures(rig, request_id, (40, 40)), rig.next_step()
        rig.worker.submit_vision(VisionPlan(step, (rig.item(request, 0),)))
        steps.append(step)
    assert device.waiting.wait(20)
    launched = threading.Event()
    assert rig.worker._vision is not None and rig.worker.vision_plans == 2
    rig.worker._vision.thread.submit(launched.set)
    assert launched.wait(20), "the second one waits for the first"
    assert len(device.replays) == 2 and rig.worker.poll() == []
    return steps


def test_results_of_encodes_in_flight_come_before_the_end(rig: Rig, device: LateDevice) -> None:
    steps = encodes_in_flight(rig, device)
    device.working.set()
    rig.worker.close()
    results = rig.worker.poll()
    assert [result.step_id for result in results] == steps
    first, second = results
    assert first.ended_s <= second.started_s


def test_a_device_that_fails_under_encodes_in_flight_ends_the_worker(rig: Rig, device: LateDevice) -> None:
    encodes_in_flight(rig, device)
    device.broken = True
    device.working.set()
    with pytest.raises(BackendError, match="the device has failed"):
        for _ in range(1000):
            rig.woken.wait(0.02)
            rig.worker.poll()


def test_an_encode_larger_than_every_graph_is_launched_op_by_op(
    checkpoints: Callable[[str], Path], device: LateDevice
) -> None:
    rig = graph_rig(checkpoints("qwen2_vl"), device, encoder_cuda_graph_sizes=(8,))
    request = with_pictures(rig, 1, (100, 50))
    assert request.images[0].num_patches > 8
    (error,) = rig.vision(rig.item(request, 0))
    assert error is None and not device.replays and rig.worker.captured_patches == 8
    rig.worker.close()


def test_encodes_that_are_not_captured(checkpoints: Callable[[str], Path]) -> None:
    device = LateDevice()
    rig = make_rig(checkpoints("qwen2_vl"), "reference", asynchronous=True, device=device, enforce_eager=True)
    rig.worker.capture_graphs(lambda done, total: None)
    assert rig.worker.captured_patches == 0 and rig.worker.notes == ()
    rig.worker.close()


def test_ops_that_plan_from_contents_are_not_captured(
    checkpoints: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(checkpoints("llava"), "native", asynchronous=True, device=LateDevice(), num_seq_slots=4)
    with caplog.at_level(logging.INFO):
        rig.worker.capture_graphs(lambda done, total: pytest.fail("something was captured"))
    assert "encodes are not captured" in caplog.text and rig.worker.captured_patches == 0
    (error,) = rig.vision(rig.item(with_pictures(rig, 1, (60, 40)), 0))
    assert error is None
    rig.worker.close()


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_a_capture_that_fails_says_so(checkpoints: Callable[[str], Path], error: type[Exception]) -> None:
    """Memory is missing: the encode is launched op by op."""

    class Failing(LateDevice):
        def capture(self, launch: Any) -> Any:
            if threading.current_thread().name == "lane-vision":
                raise error("no room for a pool")
            return super().capture(launch)

    rig = make_rig(checkpoints("llava"), "reference", asynchronous=True, device=Failing(), cuda_graph_sizes=(1,))
    if error is RuntimeError:
        with pytest.raises(BackendError, match=r"encodes cannot be captured .* enforce_eager does without"):
            rig.worker.capture_graphs(lambda done, total: None)
    else:
        rig.worker.capture_graphs(lambda done, total: None)
        assert any("graphs of encodes are left out" in note for note in rig.worker.notes)
        (failure,) = rig.vision(rig.item(with_pictures(rig, 1, (60, 40)), 0))
        assert failure is None and rig.worker.captured_patches == 0
    rig.worker.close()


def test_graphs_reach_to_the_largest_encode(checkpoints: Callable[[str], Path], device: LateDevice) -> None:
    rig = graph_rig(checkpoints("llava_next"), device)
    assert rig.spec.vision is not None
    config = EngineConfig(max_model_len=512)
    largest = largest_encode(rig.spec.vision, image_budget(config, rig.spec.vision)).num_patches
    assert rig.worker.captured_patches == largest and EPD.needs_vision
    rig.worker.close()
