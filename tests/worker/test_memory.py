"""Cache sizes from memory and configuration, and the tensors behind them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hydra_engine.backend.cpu.shared_memory import SharedPool
from hydra_engine.config import CacheConfig, EngineConfig, MediaConfig, SchedulerConfig
from hydra_engine.core.instances import EPD, Role
from hydra_engine.core.units import GIB
from hydra_engine.errors import ConfigError, ResourceError
from hydra_engine.models.specs.base import DeltaShape
from hydra_engine.models.specs.quantization import Quantization
from hydra_engine.models.specs.registry import load_spec
from hydra_engine.worker.memory.cache_store import allocate_image_cache, allocate_kv_cache, allocate_states
from hydra_engine.worker.memory.plan import CachePlan, plan_memory
from hydra_engine.worker.memory.working import largest_encode
from tests.worker.fakes import FAKE_VISION, FakeVision, fake_spec
from tools.miniatures import make_tiny

TOKEN_BYTES = 8  # one layer, K and V, one head of one float32
PLENTY = 1 << 40


def plan(
    free_bytes: int = PLENTY,
    *,
    role: Role = EPD,
    max_position: int = 256,
    vision: Any = FAKE_VISION,
    shares: int = 1,
    **settings: Any,
) -> CachePlan:
    cache = {k: v for k, v in settings.items() if k in CacheConfig.__dataclass_fields__}
    config = EngineConfig(
        max_model_len=settings.get("max_model_len"),
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(max_num_seqs=settings.get("max_num_seqs", 64)),
        media=MediaConfig(max_images=settings.get("max_images")),
    )
    return plan_memory(fake_spec(max_position, vision), role, config, 4, free_bytes, shares=shares)


def test_defaults_hold_every_sequence_and_sixteen_pictures() -> None:
    made = plan()
    assert made.num_kv_blocks == 64 * 256 // 16
    assert made.num_image_blocks == 16  # a picture of five tokens takes one block
    assert made.max_model_len == 256
    assert made.kv_bytes == 64 * 256 * TOKEN_BYTES and made.image_bytes == 16 * 64 * 4
    assert any("64 requests of 256 tokens" in reason for reason in made.reasons)


def test_long_contexts_count_as_typical_ones_but_one_always_fits() -> None:
    assert plan(max_position=32_768).num_kv_blocks == 64 * 2048 // 16
    assert plan(max_position=32_768, max_num_seqs=1).num_kv_blocks == 32_768 // 16


def test_given_caches_may_take_all_memory_there_is_and_no_more() -> None:
    """Pages that nobody has written yet are not missed before they are, so what is free now does not count."""
    spec = fake_spec(256, FAKE_VISION)
    for flag, cache in (("--num-kv-blocks", {"num_kv_blocks": 1000}), ("--kv-cache-gib", {"kv_cache_gib": 1})):
        config = EngineConfig(cache=CacheConfig(**cache, num_image_blocks=16))
        needed_bytes = plan_memory(spec, EPD, config, 4, 0).total_bytes
        assert plan_memory(spec, EPD, config, 4, 0, total_bytes=needed_bytes).total_bytes == needed_bytes
        with pytest.raises(ResourceError, match=f"for instance role EPD; lower {flag} or --num-image-blocks$"):
            plan_memory(spec, EPD, config, 4, 0, total_bytes=needed_bytes - 1)


def test_little_memory_bounds_the_cache() -> None:
    weights = fake_spec().language.num_parameters() * 4 + 4000
    made = plan(weights + 100_000)
    assert made.num_kv_blocks == 40_000 // (16 * TOKEN_BYTES)
    assert made.max_model_len == 256
    assert any("40%" in reason for reason in made.reasons)


def test_memory_for_less_than_one_request_lowers_the_context_and_says_so() -> None:
    weights = fake_spec().language.num_parameters() * 4 + 4000
    made = plan(weights + 4000)
    assert made.num_kv_blocks == 1600 // (16 * TOKEN_BYTES) == 12
    assert made.max_model_len == 192
    assert any("lowered from 256 to 192" in reason for reason in made.reasons)


def test_a_context_asked_for_by_name_is_refused_instead() -> None:
    with pytest.raises(ResourceError, match="lower --max-model-len to 48") as raised:
        plan(num_kv_blocks=3, max_model_len=100)
    assert raised.value.param == "kv_cache_gib"
    assert plan(num_kv_blocks=7, max_model_len=100).max_model_len == 100


def test_a_cache_for_no_picture_at_all_is_refused() -> None:
    with pytest.raises(ResourceError, match="--num-image-blocks 2"):
        plan(vision=FakeVision(max_tokens_per_item=65), num_image_blocks=1)
    with pytest.raises(ResourceError, match="--num-kv-blocks 1"):
        plan(num_kv_blocks=0)
    with pytest.raises(
        ResourceError,
        match=r"^KV cache 1 KiB < 1\.2 KiB \(148 tokens, .* EPD; give at least --num-kv-blocks 10$",
    ):
        plan(vision=FakeVision(max_tokens_per_image=140), num_kv_blocks=8)
    with pytest.raises(ResourceError):
        plan(0)


def test_numbers_and_sizes_of_the_configuration_are_taken() -> None:
    made = plan(num_kv_blocks=33, num_image_blocks=5)
    assert (made.num_kv_blocks, made.num_image_blocks) == (33, 5)
    made = plan(kv_cache_gib=0.5, image_cache_gib=0.25)
    assert made.num_kv_blocks == GIB // 2 // (16 * TOKEN_BYTES)
    assert made.num_image_blocks == GIB // 4 // 256
    assert any("--kv-cache-gib 0.5" in reason for reason in made.reasons)


def test_pictures_of_one_request_fit_if_their_number_is_given() -> None:
    assert plan(max_images=40).num_image_blocks == 40


@pytest.mark.parametrize(("letters", "kv", "image"), [("E", False, True), ("P", True, True), ("D", True, False)])
def test_a_role_gets_the_caches_it_uses(letters: str, kv: bool, image: bool) -> None:
    made = plan(role=Role.parse(letters))
    assert (made.num_kv_blocks > 0, made.num_image_blocks > 0) == (kv, image)


def test_a_role_reckons_with_the_weights_of_its_own_part() -> None:
    language = fake_spec().language.num_parameters() * 4
    for letters, expected in {"E": (4000, 0), "P": (0, language), "D": (0, language), "ED": (4000, language)}.items():
        made = plan(role=Role.parse(letters))
        assert (made.vision_weights_bytes, made.language_weights_bytes) == expected
    narrow = plan_memory(fake_spec(), Role.P, EngineConfig(model=""), 4, 10**9, weight_bytes=2)
    assert narrow.language_weights_bytes == language // 2
    # 8-bit floats become the compute dtype, where other weights keep their 16 bits.
    floats = replace(fake_spec(), quantization=Quantization("fp8", (8,), floats=True))
    wide = plan_memory(floats, Role.P, EngineConfig(model=""), 4, 10**9, weight_bytes=2)
    matrices = fake_spec().language.num_matrix_parameters()
    assert matrices > 0 and wide.language_weights_bytes == language // 2 + 2 * matrices
    # What the tower does not take is there for the cache.
    least = language + 100_000
    assert plan(least, role=Role.P).num_kv_blocks == 40_000 // (16 * TOKEN_BYTES)


def test_instances_on_one_device_divide_what_is_free_and_take_what_they_are_given() -> None:
    weights = fake_spec().language.num_parameters() * 4 + 4000
    alone = plan(weights + 100_000)
    shared = plan(3 * (weights + 100_000) + 2, shares=3)
    assert (shared.num_kv_blocks, shared.num_image_blocks) == (alone.num_kv_blocks, alone.num_image_blocks)
    assert any("3 instances share the device" in reason for reason in shared.reasons)
    assert not any("share the device" in reason for reason in alone.reasons)
    assert plan(shares=3, kv_cache_gib=0.5).num_kv_blocks == GIB // 2 // (16 * TOKEN_BYTES)


@pytest.mark.parametrize("letters", ["P", "D", "PD"])
def test_a_refusal_names_the_role(letters: str) -> None:
    with pytest.raises(ResourceError, match=f"^KV cache .*100 tokens, --max-model-len.* for instance role {letters};"):
        plan(role=Role.parse(letters), num_kv_blocks=3, max_model_len=100)
    with pytest.raises(ResourceError, match=f"^weights .* > 0 B for instance role {letters}; free memory"):
        plan(0, role=Role.parse(letters))


def test_an_encoders_cache_holds_what_others_have_not_fetched() -> None:
    made = plan(role=Role.E)
    assert made.num_image_blocks == 16 and made.max_model_len == 256
    assert any("until other instances have fetched them" in reason for reason in made.reasons)
    with pytest.raises(ResourceError, match=r"^image cache 256 B < 512 B .* E; give at least --num-image-blocks 2"):
        plan(role=Role.E, vision=FakeVision(max_tokens_per_item=65), num_image_blocks=1)


def test_text_only_models_have_no_image_cache() -> None:
    made = plan(vision=None)
    assert made.num_image_blocks == 0 and made.image_bytes == 0
    assert allocate_image_cache(fake_spec(vision=None), made, 64, torch.float32) is None


def test_a_length_beyond_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^max_model_len 257 exceeds the model's 256; lower it or leave it out$"):
        plan(max_model_len=257)
    assert plan(max_model_len=256).max_model_len == 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_caches_have_the_layout_are_aligned_and_zero(dtype: torch.dtype) -> None:
    made = plan(num_kv_blocks=20, num_image_blocks=3)
    kv = allocate_kv_cache(fake_spec(), made, 16, dtype)
    image = allocate_image_cache(fake_spec(), made, 64, dtype)
    assert image is not None
    assert kv.data.shape == (20, 1, 2, 16, 1, 1) and image.data.shape == (3, 1, 1, 64, 1, 1)
    for cache in (kv, image):
        assert cache.data.dtype == dtype and cache.data.is_contiguous()
        assert cache.data.data_ptr() % 64 == 0
        assert not cache.data.any()
    assert kv.nbytes == made.kv_bytes * dtype.itemsize // 4


@pytest.mark.parametrize("share", [None, SharedPool], ids=["own", "shared"])
def test_a_large_cache_costs_no_memory_until_it_is_written(share: Any) -> None:
    made = CachePlan(1 << 26, 0, 256, 0, 0, ())
    before = resident_bytes()
    cache = allocate_kv_cache(fake_spec(), made, 16, torch.float32, share=share)  # 8 GiB
    cache.data[-1] = 1.0
    assert float(cache.data[-1].sum()) == 32.0
    assert resident_bytes() < before + (64 << 20)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_caches_that_peers_map_lie_in_such_memory() -> None:
    made = plan(num_kv_blocks=20, num_image_blocks=3)
    kv = allocate_kv_cache(fake_spec(), made, 16, torch.bfloat16, share=SharedPool)
    image = allocate_image_cache(fake_spec(), made, 64, torch.bfloat16, share=SharedPool)
    assert kv.memory is not None and image is not None and image.memory is not None
    assert not kv.data.any() and not image.data.any()
    assert kv.memory.tensor().data_ptr() == kv.data.data_ptr() and kv.memory.num_bytes == kv.nbytes
    assert kv.data.shape == (20, 1, 2, 16, 1, 1) and kv.data.data_ptr() % 64 == 0
    nothing = allocate_kv_cache(fake_spec(), plan(role=Role.E), 16, torch.bfloat16, share=SharedPool)
    assert nothing.num_blocks == 0 and nothing.memory is None


def test_recurrent_states_are_counted_before_the_caches() -> None:
    """Two places for every request that may run; keys and values of attention layers only."""
    spec = fake_spec(256, FAKE_VISION)
    language = replace(
        spec.language, num_layers=3, delta=DeltaShape(1, 2, 4, 8, 4), layer_kinds=("delta", "delta", "attention")
    )
    hybrid = replace(spec, language=language)
    config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=5))
    made = plan_memory(hybrid, EPD, config, 2, PLENTY)
    plain = replace(config, cache=replace(config.cache, prefix_caching=False))
    per_request = 2 * (2 * 4 * 8 * 4 + 3 * 24 * 2)
    assert (made.num_state_slots, made.num_snapshots) == (5, 10) and made.state_bytes == 5 * 4 * per_request
    assert any(note.endswith("for 10 snapshots of recurrent states") for note in made.reasons)
    without = plan_memory(hybrid, EPD, plain, 2, PLENTY)
    assert (without.num_state_slots, without.num_snapshots, without.state_bytes) == (5, 0, 5 * 2 * per_request)
    assert made.kv_bytes == made.num_kv_blocks * 16 * TOKEN_BYTES // 2
    states = allocate_states(hybrid, made, torch.bfloat16)
    assert states is not None and states.nbytes == made.state_bytes
    assert states.conv.shape == (20, 2, 3, 24) and states.recurrent.shape == (20, 2, 2, 4, 8)
    with pytest.raises(ResourceError, match="lower --max-num-seqs"):
        plan_memory(hybrid, EPD, config, 2, language.num_parameters() * 2 + without.state_bytes - 1)
    assert allocate_states(spec, plan(), torch.bfloat16) is None


@pytest.mark.parametrize("family", ["llava_llama", "qwen2_vl"])
def test_the_largest_encode_is_of_a_picture_that_the_family_takes(family: str, tmp_path: Path) -> None:
    """Leaves out lengths that a family refuses, as one that pads to a square does."""
    make_tiny(family, tmp_path, seed=0)
    vision = load_spec(tmp_path).vision
    assert vision is not None
    largest = largest_encode(vision, 1)
    assert largest.num_spans == 1 and 0 < largest.num_patches <= vision.max_patches_per_image
