"""Caches that fill a GPU: what steps take is measured, the rest is divided, and a refusal says which flag changes it.

The device is the processor's with peaks that a test gives; everything that is measured really runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hydra_engine import Engine
from hydra_engine.backend.base import Backend
from hydra_engine.backend.cpu.device import CpuDevice
from hydra_engine.backend.select import create_backend
from hydra_engine.cli.summary import start_lines
from hydra_engine.config import CacheConfig, EngineConfig, SchedulerConfig
from hydra_engine.core.instances import EPD, Role
from hydra_engine.core.messages import Failed, ToFrontend
from hydra_engine.core.reports import BlockFormat
from hydra_engine.core.units import GIB
from hydra_engine.errors import ConfigError, ResourceError
from hydra_engine.instance import compute_stack
from hydra_engine.instance.build import run_instance
from hydra_engine.instance.ports import Inbox, Outbox
from hydra_engine.models.build import load_model
from hydra_engine.models.specs.base import ItemPlan, MediaPlan, View
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.worker.language.graphs import mixed_sizes
from hydra_engine.worker.memory.measure import measure
from hydra_engine.worker.memory.plan import MARGIN_BYTES, CachePlan, Filling, WorkingMemory, own_part, plan_memory
from hydra_engine.worker.memory.working import (
    ENCODE_GRAPH_BYTES,
    GRAPH_BYTES,
    MIXED_GRAPH_BYTES,
    FewerGraphs,
    counts_of_largest,
    estimate,
    largest_encode,
    special_row_bytes,
)
from tests.worker.fakes import FAKE_VISION, FakeVision, fake_spec
from tests.worker.late import LatePartitions
from tools.miniatures import make_tiny

MIB = 1 << 20
KV_BLOCK = 16 * 8  # one layer, K and V, one head of one float32
IMAGE_BLOCK = 64 * 4
WEIGHTS = {"E": 4000, "PD": fake_spec().language.num_parameters() * 4}
WEIGHTS["EPD"] = WEIGHTS["E"] + WEIGHTS["PD"]
WORKING = WorkingMemory(encode_bytes=3 * MIB, language_bytes=2 * MIB, graph_bytes=MIB)


class MeasuringDevice(CpuDevice):
    """Tells the given peaks in turn, the last one for ever; a job of nothing takes nothing."""

    asynchronous = False

    def __init__(self, peaks: Sequence[int], total_bytes: int = 8 * GIB) -> None:
        super().__init__(threads=1)
        self.peaks = list(peaks)
        self.total_bytes = total_bytes
        self.num_measured = 0

    def memory(self) -> tuple[int, int]:
        return self.total_bytes, self.total_bytes

    def peak_bytes(self, job: Callable[[], None]) -> int | None:
        job()
        if job is compute_stack._nothing:
            return 0
        self.num_measured += 1
        return self.peaks[min(self.num_measured, len(self.peaks)) - 1]


def config(**settings: Any) -> EngineConfig:
    split: dict[type, dict[str, Any]] = {CacheConfig: {}, SchedulerConfig: {}, EngineConfig: {}}
    for name, value in settings.items():
        next(given for cls, given in split.items() if name in cls.__dataclass_fields__)[name] = value
    return EngineConfig(
        cache=CacheConfig(**split[CacheConfig]),
        scheduler=SchedulerConfig(**split[SchedulerConfig]),
        **split[EngineConfig],
    )


def plan(own_bytes: int, role: Role = EPD, *, vision: Any = FAKE_VISION, **settings: Any) -> CachePlan:
    filling = Filling(own_bytes, settings.pop("working", WORKING), settings.pop("weights_bytes", None))
    return plan_memory(fake_spec(256, vision), role, config(**settings), 4, 0, filling=filling)


# ---- blocks


@pytest.mark.parametrize("letters", ["EPD", "PD", "E"])
def test_caches_get_what_weights_steps_and_the_margin_leave(letters: str) -> None:
    role = Role.parse(letters)
    own = WEIGHTS[letters] + WORKING.total_bytes + MARGIN_BYTES + MIB
    made = plan(own, role)
    assert made.num_image_blocks == 16
    assert made.num_kv_blocks == ((MIB - 16 * IMAGE_BLOCK) // KV_BLOCK if role.needs_language else 0)
    assert made.working == WORKING and made.max_model_len == 256


def test_an_image_cache_never_takes_more_than_its_part_beside_kv() -> None:
    own = WEIGHTS["EPD"] + WORKING.total_bytes + MARGIN_BYTES + 10 * IMAGE_BLOCK
    made = plan(own)
    assert made.num_image_blocks == 4 and made.num_kv_blocks == 6 * IMAGE_BLOCK // KV_BLOCK
    alone = plan(WEIGHTS["E"] + WORKING.total_bytes + MARGIN_BYTES + 10 * IMAGE_BLOCK, Role.E)
    assert alone.num_image_blocks == 10


def test_what_was_really_loaded_counts() -> None:
    own = WEIGHTS["EPD"] + WORKING.total_bytes + MARGIN_BYTES + MIB
    more = plan(own, weights_bytes=WEIGHTS["EPD"] - 1024)
    assert more.num_kv_blocks == plan(own).num_kv_blocks + 1024 // KV_BLOCK


def test_sizes_that_are_given_are_taken_and_must_fit() -> None:
    own = WEIGHTS["EPD"] + WORKING.total_bytes + MARGIN_BYTES + MIB
    made = plan(own, num_kv_blocks=100, num_image_blocks=7)
    assert (made.num_kv_blocks, made.num_image_blocks) == (100, 7)
    with pytest.raises(ResourceError, match=r"lower --num-kv-blocks or --num-image-blocks, or raise --gpu-memory-util"):
        plan(own, num_kv_blocks=MIB // KV_BLOCK, num_image_blocks=1)
    assert plan(own, image_cache_gib=0.5 / 1024).num_kv_blocks == MIB // 2 // KV_BLOCK


# ---- refusals


@pytest.mark.parametrize(
    ("letters", "flags"),
    [
        ("E", "lower --image-budget or --max-pixels, take"),
        ("PD", "lower --token-budget or --max-num-seqs, take"),
        ("EPD", "lower --token-budget or --max-num-seqs or --image-budget or --max-pixels, take"),
    ],
)
def test_no_room_names_the_flags_of_the_role(letters: str, flags: str) -> None:
    own = WEIGHTS[letters] + WORKING.total_bytes + MARGIN_BYTES
    with pytest.raises(ResourceError, match=f"^weights .* for instance role {letters}; .* {flags}") as raised:
        plan(own, Role.parse(letters))
    assert (
        "raise --gpu-memory-utilization" in raised.value.message
        and "working memory 6 MiB + margin 512 MiB > 518 MiB" in raised.value.message
    )


def test_a_filled_cache_that_is_too_small_asks_for_no_size() -> None:
    own = WEIGHTS["EPD"] + WORKING.total_bytes + MARGIN_BYTES + IMAGE_BLOCK * 16
    with pytest.raises(
        ResourceError,
        match=r"256 tokens, --max.*raise --gpu-memory-utilization.*lower --max-model-len to",
    ):
        plan(own, max_model_len=256, num_image_blocks=14)
    with pytest.raises(ResourceError, match=r"\(148 tokens.*; raise --gpu-memory-utilization") as raised:
        plan(own, vision=FakeVision(max_tokens_per_image=140), num_image_blocks=15)
    assert "--kv-cache-gib" not in raised.value.message
    made = plan(own, num_image_blocks=14)
    assert made.max_model_len == 64 and any("a KV cache of" in reason for reason in made.reasons)


@pytest.mark.parametrize("share", [0, -0.5, 1.01])
def test_a_share_of_a_device_is_a_share(share: float) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization must be above 0 and at most 1"):
        config(gpu_memory_utilization=share)


# ---- parts of a device


def part(role: Role, *neighbours: Role, total: int = 100 * GIB, free: int | None = None, **settings: Any) -> int:
    own, _ = own_part(
        fake_spec(),
        role,
        config(**settings),
        4,
        total_bytes=total,
        free_bytes=total if free is None else free,
        neighbours=neighbours,
    )
    return own


def test_alone_an_instance_has_its_share_or_what_is_free() -> None:
    assert part(EPD) == part(EPD, EPD) == 90 * GIB
    assert part(EPD, gpu_memory_utilization=0.5) == 50 * GIB
    assert part(EPD, free=70 * GIB) == 70 * GIB
    assert part(EPD, Role.E, EPD, free=70 * GIB) == part(EPD, Role.E, EPD)


def test_those_with_kv_divide_what_the_others_do_not_need() -> None:
    decoder = Role.P | Role.D
    encoder, filling = part(Role.E, Role.E, decoder), part(decoder, Role.E, decoder)
    assert encoder < 2 * GIB and 90 * GIB - 2 <= encoder + filling <= 90 * GIB
    encoder, filling = part(Role.E, Role.E, decoder, decoder), part(decoder, Role.E, decoder, decoder)
    assert 90 * GIB - 2 <= encoder + 2 * filling <= 90 * GIB
    assert part(EPD, EPD, EPD, EPD) == 30 * GIB
    # A given size is a need as well; then nobody fills, and what is left helps all alike.
    encoder, given = (part(role, Role.E, decoder, kv_cache_gib=10) for role in (Role.E, decoder))
    assert given - encoder > 10 * GIB and 90 * GIB - 2 <= encoder + given <= 90 * GIB
    # Too little for all: nobody's part is as large as its need.
    assert part(Role.E, Role.E, decoder, total=GIB) < encoder


# ---- the largest steps


class TileVision(FakeVision):
    """Wide pictures become more patches than square ones."""

    def plan_image(self, width: int, height: int) -> MediaPlan:
        patches = 10 if width > 2 * height else 6
        return MediaPlan((View.whole(8, 8),), (ItemPlan(8, 8, 1, patches, patches, (1, 1, patches)),))


def test_an_encode_is_as_large_as_a_scheduler_may_plan_it() -> None:
    one = largest_encode(TileVision(), 8)
    assert one.picture == (12000, 3000) and (one.num_spans, one.num_patches) == (1, 10)
    assert largest_encode(TileVision(), 25).num_spans == 3


def test_rows_of_a_step_share_its_tokens() -> None:
    assert counts_of_largest(10, 4, 100) == [1, 1, 1, 7]
    assert counts_of_largest(10, 4, 4) == [1, 1, 4, 4]
    assert counts_of_largest(3, 8, 100) == [1, 1, 1]
    assert counts_of_largest(100, 2, 4) == [4, 4]


HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}


@pytest.fixture(scope="module", params=["llava", "qwen2_5_vl", "qwen3_vl", "qwen3_5_text"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("filling") / request.param
    text = {"num_hidden_layers": 4, **HEADS} if request.param == "qwen3_5_text" else None
    make_tiny(request.param, directory, seed=1, text=text)
    return directory


@pytest.mark.quick("llava", "qwen3_5_text")
def test_peaks_of_a_role_are_those_of_its_stages(tiny: Path) -> None:
    spec = load_spec(tiny)
    assert spec.language.has_states == (tiny.name == "qwen3_5_text")
    settings = config(token_budget=24, max_num_seqs=4, dtype="float32")
    whole = WorkingMemory(300, 50, 0) if spec.vision is not None else WorkingMemory(0, 300, 0)
    expected = {EPD: whole, Role.P | Role.D: WorkingMemory(0, 300, 0), Role.D: WorkingMemory(0, 300, 0)}
    if spec.vision is not None:
        expected[Role.E] = WorkingMemory(300, 0, 0)
    for role, found in expected.items():
        device = MeasuringDevice([300, 40, 50])
        backend = Backend(device, create_backend("cpu", torch.float32, threads=1).ops, torch.float32, 1)
        made = plan_memory(spec, role, settings, 4, 0, filling=Filling(device.total_bytes))
        model = load_model(tiny, spec, backend, role, random_weights=True)
        with torch.inference_mode():
            assert measure(model, backend, spec, role, settings, made) == found
        assert (
            device.num_measured
            == role.needs_vision * (spec.vision is not None) + (Role.P in role) + role.needs_language
        )


def test_graphs_take_memory_on_every_partition(tiny: Path) -> None:
    spec = load_spec(tiny)
    settings = config(token_budget=24, max_num_seqs=4, dtype="float32")

    class Divided(MeasuringDevice):
        asynchronous = True
        partitions = LatePartitions(3)

    device = Divided([40])
    backend = Backend(device, create_backend("cpu", torch.float32, threads=1).ops, torch.float32, 1)
    made = plan_memory(spec, Role.D, settings, 4, 0, filling=Filling(device.total_bytes))
    model = load_model(tiny, spec, backend, Role.D, random_weights=True)
    num_mixed = len(mixed_sizes(24, 4))
    with torch.inference_mode():
        found = measure(model, backend, spec, Role.D, settings, made)
    graphs = GRAPH_BYTES + num_mixed * MIXED_GRAPH_BYTES
    assert found.graph_bytes == 3 * (40 + graphs + special_row_bytes(spec, settings))
    assert found.captured_tokens == 32


@pytest.mark.parametrize("tiny", ["llava"], indirect=True)
def test_a_model_that_cannot_be_captured_keeps_no_memory_for_graphs(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, settings = load_spec(tiny), config(token_budget=24, max_num_seqs=4, dtype="float32")

    class Asynchronous(MeasuringDevice):
        asynchronous = True

    backend = Backend(Asynchronous([40]), create_backend("cpu", torch.float32, threads=1).ops, torch.float32, 1)
    made = plan_memory(spec, EPD, settings, 4, 0, filling=Filling(8 * GIB))
    model = load_model(tiny, spec, backend, EPD, random_weights=True)
    monkeypatch.setattr(type(model), "can_be_captured", False)
    with torch.inference_mode():
        found = measure(model, backend, spec, EPD, settings, made)
    assert found == WorkingMemory(40, 40, special_row_bytes(spec, settings))


def test_estimates_count_what_the_role_runs() -> None:
    spec, settings = fake_spec(), config(token_budget=1000, max_num_seqs=10)
    decode = 4 * 10 * spec.language.vocab_size * 4
    whole = estimate(spec, EPD, settings, 4)
    assert whole.encode_bytes == 2 * 5 * 4 * 4  # two pictures of five patches, four values a patch
    assert whole.language_bytes == max(1000 * 3 * 2 * 4, (4 * 10 + 256) * spec.language.vocab_size * 4)
    encodes = whole.encode_bytes + ENCODE_GRAPH_BYTES  # the largest is captured too
    special = special_row_bytes(spec, settings)
    assert special == (10 + 1) * 4 * (spec.language.vocab_size + 4)
    captured, mixed = 1024 * 3 * 2 * 4, mixed_sizes(1000, 10)
    assert whole.captured_tokens == 1024 and whole.language_bytes > captured > decode
    assert whole.graph_bytes == captured + GRAPH_BYTES + len(mixed) * MIXED_GRAPH_BYTES + encodes + special
    assert estimate(spec, Role.E, settings, 4) == WorkingMemory(whole.encode_bytes, 0, encodes)
    few, eager = replace(settings, encoder_cuda_graph_sizes=(5,)), replace(settings, enforce_eager=True)
    assert estimate(spec, Role.E, few, 4).graph_bytes == whole.encode_bytes // 2 + ENCODE_GRAPH_BYTES
    assert estimate(spec, Role.E, eager, 4).graph_bytes == 0
    paused = replace(settings, scheduler=replace(settings.scheduler, tpot_slo=0.05))
    assert estimate(spec, EPD, paused, 4) == whole, "encodes that pause are captured too"
    assert estimate(spec, EPD, eager, 4).graph_bytes == special
    prompts, decodes = estimate(spec, Role.P, settings, 4), estimate(spec, Role.D, settings, 4)
    assert (prompts.graph_bytes, prompts.language_bytes) == (whole.graph_bytes - encodes, whole.language_bytes)
    assert decodes.language_bytes == decode and decodes.captured_tokens == 256


def test_a_device_with_room_for_all_but_graphs_is_told_to_do_without() -> None:
    working = replace(WORKING, graph_bytes=300 * MIB)
    own = WEIGHTS["PD"] + working.activation_bytes + MARGIN_BYTES + 100 * MIB
    with pytest.raises(ResourceError, match=r"it fits with --enforce-eager \(no graphs, 300 MiB; steps take longer\)"):
        plan(own, Role.P | Role.D, vision=None, working=working)
    assert plan(own, Role.P | Role.D, vision=None, working=replace(working, graph_bytes=0)).num_kv_blocks
    with pytest.raises(ResourceError) as refused:
        plan(own, Role.P | Role.D, vision=None, working=working, enforce_eager=True)
    assert "--enforce-eager" not in refused.value.message


def test_where_graphs_do_not_fit_the_plan_has_fewer() -> None:
    """The largest steps with prompts are left out first, and all of them before a start is refused."""
    working = WorkingMemory(3, 2, 9 * MIB, 2048, (FewerGraphs(1024, 5 * MIB), FewerGraphs(0, MIB)))
    least = WEIGHTS["EPD"] + MARGIN_BYTES + 5
    said = "are launched op by op, theirs have no room beside weights and caches"
    reasons = {2048: [], 1024: [f"graphs: steps with prompts of more than 1024 tokens {said}"]}
    reasons[0] = [f"graphs: steps with prompts {said}"]
    for graphs, tokens in ((9 * MIB, 2048), (5 * MIB, 1024), (MIB, 0)):
        for room in (MIB, 3 * MIB):
            made = plan(least + graphs + room, working=working)
            assert (made.working.captured_tokens, made.working.graph_bytes) == (tokens, graphs)
            assert made.num_kv_blocks > 0
            assert [reason for reason in made.reasons if "op by op" in reason] == reasons[tokens]
    with pytest.raises(ResourceError, match="working memory 1 MiB"):
        plan(least + MIB, working=working)
    with pytest.raises(ResourceError):  # caches of given sizes come first as well
        plan(least + 2 * MIB, working=working, num_kv_blocks=2 * MIB // KV_BLOCK)
    assert plan(least + 6 * MIB, working=working, kv_cache_gib=4 / 1024).working.captured_tokens == 0


def test_fewer_graphs_take_what_their_largest_step_computes_in() -> None:
    spec, settings = fake_spec(), config(token_budget=2048, max_num_seqs=10)
    working: WorkingMemory | None = estimate(spec, EPD, settings, 4)
    seen = []
    while working is not None:
        seen.append(working)
        working = working.with_fewer_graphs()
    assert [each.captured_tokens for each in seen] == [2048, 1024, 512, 256, 0]
    sizes = mixed_sizes(2048, 10)
    decode = 4 * 10 * spec.language.vocab_size * 4  # which all of them compute in
    for more, less in pairwise(seen):
        number = sum(less.captured_tokens < size.tokens <= more.captured_tokens for size in sizes)
        computed_in = [max(decode, each.captured_tokens * 3 * 2 * 4) for each in (more, less)]
        saved = number * MIXED_GRAPH_BYTES + computed_in[0] - computed_in[1]
        assert more.graph_bytes - less.graph_bytes == saved


def test_every_partition_of_a_divided_device_keeps_memory_of_its_own() -> None:
    """Streams do not share what an allocator keeps for them."""
    spec, whole = fake_spec(), config(token_budget=1000, max_num_seqs=10)
    divided, language = config(token_budget=1000, max_num_seqs=10, sm_split="16,32"), Role.P | Role.D
    once = estimate(spec, EPD, whole, 4)
    assert estimate(spec, EPD, divided, 4) == once.times(3) and once.times(3).total_bytes == 3 * once.total_bytes
    for role in (language, Role.E):  # an instance of one model is whole
        assert estimate(spec, role, divided, 4) == estimate(spec, role, whole, 4)


class DividedDevice(MeasuringDevice):
    partitions = LatePartitions(2)


def test_peaks_are_measured_once_and_count_for_every_partition(tmp_path: Path) -> None:
    make_tiny("llava", tmp_path, seed=1)
    spec, settings = load_spec(tmp_path), config(token_budget=24, max_num_seqs=4, dtype="float32")
    device = DividedDevice([300, 40, 50])
    backend = Backend(device, create_backend("cpu", torch.float32, threads=1).ops, torch.float32, 1)
    made = plan_memory(spec, EPD, settings, 4, 0, filling=Filling(device.total_bytes))
    model = load_model(tmp_path, spec, backend, EPD, random_weights=True)
    with torch.inference_mode():
        assert measure(model, backend, spec, EPD, settings, made) == WorkingMemory(600, 100, 0)
    assert device.num_measured == 3


# ---- an engine on such a device


def on_device(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(*given: Any, **settings: Any) -> Backend:
        made = create_backend(*given, **settings)
        return Backend(device, made.ops, made.dtype, 1)

    monkeypatch.setattr(compute_stack, "create_backend", create)


def test_an_engine_measures_fills_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny("llava", tmp_path, seed=1)
    device = MeasuringDevice([30 * MIB, 10 * MIB, 20 * MIB], total_bytes=GIB)
    on_device(device, monkeypatch)
    with Engine(tmp_path, dtype="float32", token_budget=16, max_num_seqs=4) as engine:
        assert device.num_measured == 3
        (summary,) = engine.summaries
        answer = engine.generate("two words", max_tokens=6, temperature=0, ignore_eos=True)
    assert len(answer.token_ids) == 6
    assert (summary.activation_bytes, summary.graph_bytes, summary.free_bytes) == (50 * MIB, 0, GIB)
    filled = summary.weights_bytes + summary.kv_cache_bytes + summary.image_cache_bytes
    left = int(0.9 * GIB) - 50 * MIB - MARGIN_BYTES - filled
    assert 0 <= left < summary.kv_cache_bytes // summary.num_kv_blocks
    lines = start_lines([summary])
    assert "  steps        activations 50 MiB, 1 GiB of 1 GiB free" in lines
    with pytest.raises(ResourceError, match="raise gpu_memory_utilization"):
        Engine(tmp_path, dtype="float32", gpu_memory_utilization=0.5)


def test_a_device_too_small_for_a_step_refuses_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class SmallDevice(MeasuringDevice):
        def peak_bytes(self, job: Callable[[], None]) -> int | None:
            if job is not compute_stack._nothing:
                raise torch.OutOfMemoryError("tried to allocate more than there is")
            return super().peak_bytes(job)

    make_tiny("llava", tmp_path, seed=1)
    on_device(SmallDevice([1]), monkeypatch)
    with pytest.raises(ResourceError, match=r"^the device has no memory for its largest steps; .*image_budget"):
        Engine(tmp_path, dtype="float32")


@pytest.mark.parametrize(("quantization", "change"), [("auto", "give --quantization int8 or int4, or"), ("int4", "or")])
def test_a_device_without_memory_for_the_weights_asks_for_fewer_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str, change: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate more than there is")

    make_tiny("llava", tmp_path, seed=1)
    monkeypatch.setattr(compute_stack, "load_model", refuse)
    config = EngineConfig(model=str(tmp_path), dtype="float32", quantization=quantization)
    sent: list[ToFrontend] = []
    outbox = cast("Outbox", SimpleNamespace(send=sent.extend))
    code = run_instance(config, "epd0", cast("Inbox", None), outbox, threading.Event())
    announced, failed = sent
    assert announced == BlockFormat("float32", 16, 64), "known before the weights are read"
    start = "the device has no memory for the weights; free memory there, "
    assert isinstance(failed, Failed) and failed.exit_code == code == ResourceError.exit_code
    assert failed.error.message == f"{start}{change} put fewer instances on it"


def test_a_system_that_gives_no_memory_for_the_caches_refuses_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    make_tiny("llava", tmp_path, seed=1)
    monkeypatch.setattr(compute_stack, "allocate_kv_cache", refuse)
    with pytest.raises(ResourceError, match=r"^the device has no memory for the caches; "):
        Engine(tmp_path, dtype="float32")
