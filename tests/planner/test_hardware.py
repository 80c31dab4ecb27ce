"""Devices that are not here: the table of their figures, and step times from it against floors that were worked out by
hand and against what such a device has measured."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_engine.config import EngineConfig
from hydra_engine.core.cost import CostSurface, Curve
from hydra_engine.core.plans import LanguageLoad, VisionLoad
from hydra_engine.errors import ConfigError
from hydra_engine.models.specs.base import DeltaShape, ModelSpec
from hydra_engine.models.specs.quantization import at_load
from hydra_engine.models.specs.registry import load_spec
from hydra_planner.hardware import roofline
from hydra_planner.hardware.corun import Row, measured
from hydra_planner.hardware.devices import Device, Link, devices, find_device, links_between
from hydra_planner.hardware.roofline import Roofline, Use, corun_bound, corun_factor, device_kind, roofline_costs

LLAVA, QWEN2, QWEN25 = "llava-1.5-7b", "qwen2-vl-7b", "qwen2.5-vl-7b"
MODELS = (LLAVA, QWEN2, QWEN25, "demo")
SHARES = st.floats(0, 1)
USES = st.builds(Use, SHARES, SHARES)


@cache
def spec_of(model: str) -> ModelSpec:
    config = EngineConfig(model=model)
    return load_spec(config.model_path, config.spec_options)


@cache
def surface_of(model: str, device: str) -> CostSurface:
    return roofline_costs(spec_of(model), find_device(device), "bfloat16").surface


def decode_ms(model: str, device: str, count: int, context: int = 1024) -> float:
    return 1e3 * surface_of(model, device).language_s(LanguageLoad(count, count * context))


def prefill_ms(model: str, device: str, tokens: int) -> float:
    pairs = tokens * (tokens + 1) / 2
    load = LanguageLoad(prefill_tokens=tokens, prefill_pairs=pairs, num_chunks=1)
    return 1e3 * surface_of(model, device).language_s(load)


def encode_ms(model: str, device: str, patches: int, count: int = 1) -> float:
    return 1e3 * surface_of(model, device).vision_s(VisionLoad(count * patches, float(count * patches**2)))


# ---- what a device measured


ROOT = Path(__file__).parents[2]


def rows_of(file: str) -> list[dict[str, Any]]:
    """Rows that an H200 has measured: `make gpu-check`."""
    found: list[dict[str, Any]] = json.loads((ROOT / file).read_text(encoding="utf-8"))["rows"]
    return found


def measured_ms(document: str) -> dict[str, float]:
    """Milliseconds by what was measured."""
    return {row["what"]: 1e3 * row["seconds"]["median"] for row in rows_of(f"bench/results/{document}")}


def test_steps_are_close_to_those_that_an_h200_measured() -> None:
    """Qwen's were measured before the launch parameters of its attention were."""
    found = measured_ms("h200/decode-llava-1.5-7b.json")
    decodes = [decode_ms(LLAVA, "H200", n) / found[f"{LLAVA} decode graph B={n} KV=1024"] for n in (1, 8, 64, 128)]
    found = measured_ms("h200-first/decode-qwen2.5-vl-7b.json")
    decodes += [decode_ms(QWEN25, "H200", n) / found[f"{QWEN25} decode graph B={n} KV=1024"] for n in (1, 64, 128)]
    assert all(0.88 < ratio < 1.05 for ratio in decodes)
    prompts = []
    for model, document in ((LLAVA, "h200/prefill-llava-1.5-7b"), (QWEN25, "h200-first/prefill-qwen2.5-vl-7b")):
        found = measured_ms(f"{document}.json")
        prompts += [prefill_ms(model, "H200", n) / found[f"{model} prefill b=1 S={n}"] for n in (1024, 2048)]
    assert all(0.94 < ratio < 1.04 for ratio in prompts)
    encodes = []
    for model, document, patches, counts in (
        (LLAVA, "h200/encode-llava-1.5-7b", 576, (1, 4)),
        (QWEN2, "h200-first/encode-qwen2-vl-7b", 4096, (1,)),
    ):
        found = measured_ms(f"{document}.json")
        encodes += [encode_ms(model, "H200", patches, n) / found[f"{model} encode graph b={n}"] for n in counts]
    assert all(0.9 < ratio < 1.05 for ratio in encodes)


# ---- the table


def test_the_table_is_complete_and_says_where_its_figures_come_from() -> None:
    names = {device.name for device in devices()}
    assert names == {"A100-80GB", "H100", "H200", "H800", "L40S", "RTX 4090", "Ascend 910B"}
    for device in devices():
        assert 1e14 < device.flops_per_s < 1e15, device.name
        assert 5e11 < device.memory_bytes_per_s < 5e12, device.name
        assert 20e9 < device.memory_bytes < 160e9, device.name
        assert device.host_bytes_per_s <= 63e9, device.name
        assert all(len(source) > 10 for source in device.sources) and device.sources, device.name
        for figure, word in ((device.price, "$"), (device.hour_price, "an hour")):
            assert figure is None or any(word in source for source in device.sources), device.name
    assert "no datasheet" in find_device("Ascend 910B").sources[0]


def test_what_heteroserve_pays_for_devices() -> None:
    assert (find_device("a100").price, find_device("4090").price) == (16000, 3000)


@pytest.mark.parametrize("name", ["H200", "h200", "NVIDIA H200", "h-200", " H200 sxm"])
def test_names_are_found_as_people_and_drivers_write_them(name: str) -> None:
    assert find_device(name).name == "H200"


def test_every_alias_leads_to_its_own_device() -> None:
    for device in devices():
        assert {find_device(name) for name in (device.name, *device.aliases)} == {device}


def test_an_unknown_device_is_told_what_there_is_and_the_nearest() -> None:
    with pytest.raises(ConfigError) as error:
        find_device("H300")
    assert str(error.value).startswith("the planner knows no device 'H300'; there are A100-80GB, H100, ")
    assert "did you mean H" in str(error.value)
    with pytest.raises(ConfigError, match=r"Ascend 910B$"):
        find_device("toaster")


def test_links_are_the_common_one_and_the_hosts() -> None:
    a100, h100, h200, h800, rtx = map(find_device, ("A100", "H100", "H200", "H800", "RTX 4090"))
    assert links_between(a100, rtx) == links_between(rtx, a100) == (Link("PCIe 4 x16", 25.2e9),)
    assert links_between(rtx, rtx) == (Link("PCIe 4 x16", 25.2e9),)
    assert [link.name for link in links_between(h100, h200)] == ["NVLink 4", "PCIe 5 x16"]
    assert [link.name for link in links_between(h100, a100)] == ["PCIe 4 x16"]
    assert links_between(h800, h800)[0].bytes_per_s == 160e9  # as measured


# ---- step times


def test_attention_of_pictures_is_counted_once() -> None:
    """Patches and pairs cost the tower's FLOP at the rate of products, and no more."""
    spec, surface = spec_of(QWEN2), surface_of(QWEN2, "H200")
    assert spec.vision is not None
    pairs = roofline.patch_pair_flops(spec.vision)
    assert pairs == 4 * 1280 * 32  # 32 layers of full attention, multiply-adds of scores and of values
    linear = surface.vision_s(VisionLoad(8192, 0.0)) - roofline.TOWER_LAUNCHES_S
    products = find_device("H200").flops_per_s * roofline.PRODUCTS_SHARE
    counted = linear * products / (1 + roofline.IDLE_ROWS / 8192) + pairs * 8192**2
    assert counted == pytest.approx(spec.vision.flops(8192), rel=1e-6)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("device", devices(), ids=lambda device: device.name)
def test_surfaces_grow_with_the_work(model: str, device: Device) -> None:
    surface = surface_of(model, device.name)
    for curve in (surface.rows, surface.patches):
        assert list(curve.knots) == sorted(set(curve.knots))
        assert list(curve.seconds) == sorted(curve.seconds) and curve.seconds[0] > 0
    assert min(surface.per_key_s, surface.per_pair_s, surface.per_chunk_s, surface.per_decode_s) > 0
    assert min(surface.decode_slowdown, surface.prefill_slowdown, surface.vision_slowdown) >= 1


@pytest.mark.parametrize("model", MODELS)
def test_curves_are_as_their_function_between_knots(model: str) -> None:
    """The knots are dense enough: 3 % at the most between them."""
    spec = spec_of(model)
    device = Roofline(spec, find_device("H200"), 2)
    rows = device.surface().rows
    for count in (3, 12, 24, 48, 100, 150, 190, 300, 700, 3000):
        assert rows.interpolate(count) == pytest.approx(device._rows_s(count), rel=0.03), count


def test_less_bandwidth_is_slower_at_decodes_and_fewer_flops_at_prompts_and_pictures() -> None:
    decodes = [decode_ms(LLAVA, name, 32) for name in ("H200", "H100", "A100", "4090", "L40S")]
    assert decodes == sorted(decodes) and len(set(decodes)) == 5
    by_flops = ("H100", "L40S", "A100", "4090")
    prompts = [prefill_ms(LLAVA, name, 1024) for name in by_flops]
    assert prompts == sorted(prompts) and len(set(prompts)) == 4
    pictures = [encode_ms(QWEN25, name, 4096) for name in by_flops]
    assert pictures == sorted(pictures) and len(set(pictures)) == 4


def test_encodes_do_not_care_for_bandwidth() -> None:
    """Only the towers' weights are read, and behind the arithmetic."""
    slow = msgspec.structs.replace(find_device("H200"), memory_bytes_per_s=1e12)
    surface = roofline_costs(spec_of(QWEN25), slow, "bfloat16").surface
    load = VisionLoad(4096, 4096.0**2)
    assert surface.vision_s(load) == pytest.approx(surface_of(QWEN25, "H200").vision_s(load), rel=0.01)
    assert surface.rows.interpolate(1) > 4 * surface_of(QWEN25, "H200").rows.interpolate(1)


def test_quantized_weights_are_read_in_their_bytes() -> None:
    full, device = spec_of(LLAVA), find_device("H200")
    small = roofline_costs(replace(full, at_load=at_load("int4")), device, "bfloat16").surface
    share = small.rows.interpolate(1) / surface_of(LLAVA, "H200").rows.interpolate(1)
    assert 0.3 < share < 0.4
    assert small.rows.interpolate(4096) == surface_of(LLAVA, "H200").rows.interpolate(4096)


def test_a_decode_reads_the_experts_that_its_rows_choose() -> None:
    """A token passes 3.9 of 31 billion weights; 256 tokens read almost all."""
    spec, device = spec_of("qwen3-vl-30b-a3b"), find_device("H200")
    rows = surface_of("qwen3-vl-30b-a3b", "H200").rows
    launches_s = spec.language.num_layers * (roofline.SHORT_WAVE_S + roofline.LAUNCHES_S)
    read = [
        (rows.interpolate(count) - launches_s) * roofline.WEIGHTS_SHARE * device.memory_bytes_per_s / 2e9
        for count in (1, 256)
    ]
    assert read[0] == pytest.approx(3.0, abs=0.1) and read[1] == pytest.approx(30.2, abs=0.1)


def test_a_tied_head_is_read_although_it_is_the_table() -> None:
    spec = spec_of(LLAVA)
    tied = replace(spec, language=replace(spec.language, tie_embeddings=True))
    assert roofline.weight_bytes(tied, 2) == roofline.weight_bytes(spec, 2)
    assert roofline.weight_bytes(spec, 2) == pytest.approx(13.21e9, rel=1e-3)


def test_states_of_recurrent_layers_are_read_and_written_by_every_decode() -> None:
    spec, device = spec_of(LLAVA), find_device("H200")
    delta = DeltaShape(num_key_heads=16, num_value_heads=16, key_dim=128, value_dim=128, num_taps=4)
    kinds = ("delta",) * 31 + ("attention",)
    recurrent = replace(spec, language=replace(spec.language, delta=delta, layer_kinds=kinds))
    surface = roofline_costs(recurrent, device, "bfloat16").surface
    more_s = surface.per_decode_s - surface_of(LLAVA, "H200").per_decode_s
    assert more_s == pytest.approx(
        2 * recurrent.language.state_bytes(2) / (roofline.COPY_SHARE * device.memory_bytes_per_s)
    )
    assert surface.per_key_s == pytest.approx(surface_of(LLAVA, "H200").per_key_s / 32)


def test_a_model_without_a_tower_has_only_a_language_lane() -> None:
    surface = roofline_costs(replace(spec_of(LLAVA), vision=None), find_device("H200"), "float16").surface
    assert surface.patches == Curve((0.0,), (0.0,)) and surface.per_patch_pair_s == 0
    assert (surface.decode_slowdown, surface.prefill_slowdown, surface.vision_slowdown) == (1, 1, 1)
    assert surface.rows == surface_of(LLAVA, "H200").rows


def test_a_dtype_without_a_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match="the roofline of L40S knows bfloat16 and float16, not float32"):
        roofline_costs(spec_of("demo"), find_device("L40S"), "float32")


def test_a_kind_of_device_has_what_is_reached_of_its_links_and_memory() -> None:
    device = find_device("H200")
    kind = device_kind(spec_of(LLAVA), device, "bfloat16")
    assert (kind.name, kind.memory_bytes, kind.on_processor) == ("H200", device.memory_bytes, False)
    assert kind.link_bytes_per_s == pytest.approx(360e9)  # 380 of 450 were measured
    assert kind.copy_bytes_per_s == pytest.approx(4.18e12 / 2, rel=0.01)
    assert kind.costs.source == "roofline of H200, bfloat16" and kind.costs.alike == 2.0


# ---- both lanes at once


@given(USES, USES, SHARES)
def test_a_factor_lies_between_perfect_sharing_and_taking_turns(one: Use, other: Use, share: float) -> None:
    factor, bound = corun_factor(one, other, share), corun_bound(one, other)
    assert bound - 1e-9 <= factor <= 2 + 1e-9
    assert factor == corun_factor(other, one, share)
    assert corun_factor(one, other, 0.0) == 2 and corun_factor(one, other, 1.0) == pytest.approx(bound)


@given(USES, USES, SHARES, SHARES)
def test_who_uses_more_slows_more(one: Use, other: Use, compute: float, memory: float) -> None:
    more = Use(max(other.compute, compute), max(other.memory, memory))
    assert corun_factor(one, more, 0.5) >= corun_factor(one, other, 0.5)


def loads_of(row: Row) -> tuple[LanguageLoad, LanguageLoad | int]:
    """The decodes of a measured pair, and the prompt or the patches of the encode beside them."""
    decodes = LanguageLoad(row.decodes, row.decodes * row.context)
    prompt = LanguageLoad(0, 0, row.prompt, row.prompt * (row.prompt + 1) / 2, 1)
    return decodes, prompt if row.prompt else 576 * row.pictures


def test_the_factors_of_steps_side_by_side_are_what_an_h200_measured_and_the_bounds_those_of_its_roofline() -> None:
    spec = spec_of(measured().model)
    machine = Roofline(spec, find_device(measured().device), 2)
    surface = machine.surface()
    assert spec.vision is not None
    for row in measured().rows:
        (found,) = (one for one in rows_of(row.file) if one["what"] == row.row)
        assert found["decode_slowdown"] == pytest.approx(row.decode_slowdown, abs=1e-4)
        assert found["first_slowdown"] == pytest.approx(row.first_slowdown, abs=1e-4)
        assert found["gain"] == pytest.approx(row.gain, rel=0.02)
        assert (found["inputs"]["rows"], found["inputs"]["context"]) == (row.decodes, row.context)
        assert (found["inputs"].get("pictures", 0), found["inputs"].get("prompt", 0)) == (row.pictures, row.prompt)
        decodes, first = loads_of(row)
        beside = (
            machine.vision_use(surface, spec.vision, first)
            if isinstance(first, int)
            else machine.language_use(surface, first)
        )
        assert corun_bound(beside, machine.language_use(surface, decodes)) == pytest.approx(row.bound, abs=0.01)


def test_pairs_of_an_h200_gain_what_it_has_measured() -> None:
    """Two streams, each without end: 1.03 to 1.10 of taking turns."""
    corun = roofline_costs(spec_of(LLAVA), find_device("H200"), "bfloat16").corun
    assert corun is not None
    for row in measured().rows:
        factor = corun.steps(1.0, 0.0, 2.0) if row.prompt else corun.encode(row.first_s, row.decode_s, 0.0)
        assert 2 / factor == pytest.approx(row.gain, rel=0.015), row.row


@pytest.mark.parametrize("device", ["H200", "A100", "RTX 4090", "Ascend 910B"])
@pytest.mark.parametrize("model", [LLAVA, QWEN2, QWEN25])
def test_short_encodes_go_better_beside_decodes_than_long_ones_and_these_than_beside_prompts(
    model: str, device: str
) -> None:
    corun = roofline_costs(spec_of(model), find_device(device), "bfloat16").corun
    assert corun is not None
    short, middle, long = (corun.encode(ratio, 1.0, 0.0) for ratio in (0.01, 0.4, 5.0))
    assert 1.75 < short < middle < long < corun.encode(5.0, 1.0, 1.0) <= 2
    assert long < corun.encode(5.0, 1.0, 0.5) < corun.encode(5.0, 1.0, 1.0)
    assert corun.steps(0.0, 0.0, 2.0) == corun.steps(1.0, 1.0, 2.0) == 2 > corun.steps(0.0, 1.0, 2.0)
    surface = surface_of(model, device)
    assert short <= surface.decode_slowdown <= long < surface.vision_slowdown < surface.prefill_slowdown
