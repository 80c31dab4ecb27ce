"""The closed forms of HeteroServe against the paper's own numbers, and the description of a workload."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_engine.config import EngineConfig
from hydra_engine.core.cost import CostSurface, Curve
from hydra_engine.errors import ConfigError
from hydra_engine.models.specs.base import ModelSpec, ProcessorSpec
from hydra_engine.models.specs.registry import load_spec
from hydra_planner import explain as forms
from hydra_planner.explain import Explanation, explain, lines, works
from hydra_planner.hardware.devices import Link, find_device, links_between
from hydra_planner.hardware.roofline import device_kind
from hydra_planner.simulator.costs import Costs, DeviceKind
from hydra_planner.workload.file import Picture, Video, WorkloadRequest

LLAVA, QWEN25 = "llava-1.5-7b", "qwen2.5-vl-7b"
SIDES = {LLAVA: 336, QWEN25: 896}
PCIE = Link("PCIe 4 x16", 25e9)  # as the paper has it
POSITIVE = st.floats(0.01, 100)


@cache
def spec_of(model: str) -> ModelSpec:
    config = EngineConfig(model=model)
    return load_spec(config.model_path, config.spec_options)


def asked(*pictures: tuple[int, int, int], prompt: int = 128, output: int = 128, **others: int) -> WorkloadRequest:
    found = tuple(Picture(*picture) for picture in pictures)
    return WorkloadRequest(at_s=0.0, prompt_tokens=prompt, output_tokens=output, pictures=found, **others)


def one_picture(model: str, count: int = 1) -> list[WorkloadRequest]:
    return [asked((SIDES[model], SIDES[model], number)) for number in range(count)]


def told(model: str, vision: str, language: str) -> Explanation:
    spec, one, other = spec_of(model), find_device(vision), find_device(language)
    kinds = (device_kind(spec, device, "bfloat16") for device in (one, other))
    return explain(spec, one_picture(model, 3), *kinds, links_between(one, other))


def flat_kind(
    name: str, patch_s: float, row_s: float, price: float | None = None, hour_price: float | None = None
) -> DeviceKind:
    """Steps cost so much for each patch and each row, and nothing else."""
    surface = CostSurface(Curve((0.0, 1.0), (0.0, row_s)), 0.0, 0.0, 0.0, Curve((0.0, 1.0), (0.0, patch_s)), 0.0)
    return DeviceKind(name, Costs(surface, threads=0), price=price, hour_price=hour_price)


# ---- the paper's numbers


def transfer_ratio(spec: ModelSpec, num_features: int, num_text: int, dtype_bytes: int = 2) -> float:
    """Equation 2: keys and values over features."""
    kv_bytes = forms.kv_bytes(spec, num_features + num_text, dtype_bytes)
    return kv_bytes / forms.feature_bytes(spec, num_features, dtype_bytes)


def test_the_law_of_transfers_is_78_times_for_llava() -> None:
    spec = spec_of(LLAVA)
    assert forms.kv_bytes(spec, 576 + 128, 2) == 2 * 32 * 32 * 128 * 704 * 2  # equation 1
    assert forms.feature_bytes(spec, 576, 2) == 576 * 4096 * 2  # 4.5 MiB, table 2
    assert transfer_ratio(spec, 576, 128) == pytest.approx(2 * 32 * (1 + 128 / 576))  # equation 3
    assert transfer_ratio(spec, 576, 128) == pytest.approx(78.2, abs=0.1)


def test_the_law_of_transfers_is_9_times_for_qwen_where_the_paper_prints_12() -> None:
    spec = spec_of(QWEN25)
    assert transfer_ratio(spec, 1024, 128) == pytest.approx(9.0)
    assert transfer_ratio(spec, 1024, 128) == pytest.approx(2 * 28 * (1 + 128 / 1024) * 4 / 28)
    assert forms.kv_bytes(spec, 1024 + 128, 2) == 63 * 2**20  # the paper: 83 M
    assert forms.feature_bytes(spec, 1024, 2) == 7 * 2**20


@given(st.integers(1, 4096), st.integers(0, 4096))
def test_the_ratio_falls_towards_twice_the_layers_as_pictures_grow(features: int, text: int) -> None:
    spec = spec_of(LLAVA)
    ratio = transfer_ratio(spec, features, text)
    assert ratio >= 2 * spec.language.num_layers
    assert transfer_ratio(spec, features + 1, text) <= ratio
    assert transfer_ratio(spec, features, text, dtype_bytes=4) == pytest.approx(ratio)


def test_features_of_llava_cross_pcie_in_a_fifth_of_a_millisecond() -> None:
    kind = device_kind(spec_of(LLAVA), find_device("4090"), "bfloat16")
    (test,) = explain(spec_of(LLAVA), one_picture(LLAVA), kind, kind, (PCIE,)).links
    assert test.features_s == pytest.approx(0.18e-3, rel=0.06)
    assert test.features_share < 0.1 < 1 < test.kv_share
    assert test.verdict == "features only"


def test_equation_8_predicts_31_percent() -> None:
    gamma = 3000 / 16000
    assert 1 - forms.cost_share(0.63, gamma) == pytest.approx(0.314, abs=5e-4)
    assert 1 - forms.cost_share(0.63, gamma) == pytest.approx(0.63 * (1 - gamma) / (0.63 + 1))


@pytest.mark.parametrize(
    ("tokens", "dollars", "expected"), [(3886, 64e3, 60.7), (5986, 64e3, 93.5), (3156, 38e3, 83.1)]
)
def test_tokens_for_money_of_table_4(tokens: float, dollars: float, expected: float) -> None:
    assert forms.tokens_per_kilodollar(tokens, dollars) == pytest.approx(expected, abs=0.06)


# ---- balance


@given(POSITIVE, POSITIVE, POSITIVE)
def test_at_balance_neither_kind_of_device_waits(vision_s: float, language_s: float, num_language: float) -> None:
    num_vision = forms.vision_devices(vision_s / language_s, num_language)
    rate = forms.throughput(num_vision, num_language, vision_s, language_s)
    assert rate == pytest.approx(num_vision / vision_s) == pytest.approx(num_language / language_s)
    assert forms.throughput(num_vision / 2, num_language, vision_s, language_s) == pytest.approx(rate / 2)
    assert forms.throughput(num_vision * 2, num_language, vision_s, language_s) == pytest.approx(rate)


@given(POSITIVE, POSITIVE, st.floats(0.01, 1))
def test_the_cost_share_is_of_equal_throughput(vision_s: float, language_s: float, gamma: float) -> None:
    """Devices counted one by one give what equation 7 says."""
    rho = vision_s / language_s
    two_tiers = (rho * gamma + 1) * language_s  # dollars for each request per second, a device for tokens being 1
    one_tier = vision_s + language_s
    assert forms.cost_share(rho, gamma) == pytest.approx(two_tiers / one_tier)
    assert forms.cost_share(rho, gamma, 2 * rho) <= forms.cost_share(rho, gamma) <= 1 + 1e-9


def test_price_ratios_are_of_the_same_kind_of_price() -> None:
    buy, rent, both = (flat_kind("x", 1, 1, *prices) for prices in ((3e3, None), (None, 2.0), (16e3, 8.0)))
    assert forms.prices_of(buy, both) == forms.Prices(3e3, 16e3, "$") and forms.Prices(3e3, 16e3, "$").ratio == 0.1875
    assert forms.prices_of(rent, both) == forms.Prices(2.0, 8.0, "$/h")
    assert forms.prices_of(buy, rent) is None


# ---- a workload


def test_a_workload_is_told_in_the_papers_terms() -> None:
    """Devices take 0.63 times as long for the picture as for a request's tokens, at 0.1 ms each."""
    decode_s, prefill_s = 127 * 1e-4, 704 * 1e-4
    language_s = prefill_s + decode_s
    cheap = flat_kind("cheap", 0.63 * language_s / 576, 1e-4, price=3000)
    dear = flat_kind("dear", 0.63 * language_s / 576, 1e-4, price=16000)
    found = explain(spec_of(LLAVA), one_picture(LLAVA, 4), cheap, dear, (PCIE,))
    assert (found.num_requests, found.with_pictures) == (4, 4)
    assert (found.prompt_tokens, found.features, found.output_tokens) == (704, 576, 128)
    assert found.ratio == pytest.approx(78.2, abs=0.1)
    assert found.seconds.prefill == pytest.approx(prefill_s) and found.seconds.decode == pytest.approx(decode_s)
    assert found.rho == found.one_tier_rho == pytest.approx(0.63) and found.num_vision == found.rho
    assert found.prices is not None and found.prices.ratio == 0.1875
    assert found.cost_share == pytest.approx(1 - 0.314, abs=5e-4)
    assert found.requests_per_s == pytest.approx(1 / language_s)
    tokens_per_s = 128 / language_s
    assert found.kilodollar_tokens == pytest.approx(tokens_per_s / (16 + 0.63 * 3))
    assert found.one_tier_kilodollar_tokens == pytest.approx(tokens_per_s / (16 * 1.63))
    said = "\n".join(lines(found))
    for words in (
        "4 requests, 4 with pictures. On average a prompt has 704 tokens, 576 of them features, and an answer 128.",
        "352 MiB of keys and values after its prefill, or 4.5 MiB of features after its encode: 78.2 times less.",
        "rho = 0.63.",
        "For each dear, 0.63 cheap keep up",
        "two tiers cost 68.6% of dear alone with the same throughput: 31.4% less.",
        "features only",
    ):
        assert words in said


def test_qwen_gains_from_a_second_tier_and_llava_next_to_nothing_at_the_roofline() -> None:
    qwen, llava = told(QWEN25, "4090", "A100"), told(LLAVA, "4090", "A100")
    assert qwen.ratio == pytest.approx(9.0) and llava.ratio == pytest.approx(78.2, abs=0.1)
    assert qwen.rho > 5 * llava.rho
    assert qwen.rho > qwen.one_tier_rho  # a 4090 has half of the A100's FLOP/s
    assert qwen.cost_share is not None and llava.cost_share is not None
    assert qwen.cost_share < 0.9 < llava.cost_share < 1


def test_a_dearer_second_tier_is_said_to_cost_more() -> None:
    cheap, dear = flat_kind("a", 1e-4, 1e-4, price=5000), flat_kind("b", 1e-4, 1e-4, price=1000)
    assert "more." in "\n".join(lines(explain(spec_of(LLAVA), one_picture(LLAVA), cheap, dear, ())))


def test_what_is_not_known_is_not_told() -> None:
    kind = flat_kind("a", 1e-4, 1e-4)
    found = explain(spec_of(LLAVA), one_picture(LLAVA), kind, flat_kind("b", 1e-4, 1e-4, price=100.0), ())
    assert found.prices is found.cost_share is found.kilodollar_tokens is None
    assert found.one_tier_kilodollar_tokens is not None and found.links == ()
    assert "give those of a and b with --price" in lines(found)[-1]
    same = explain(spec_of(LLAVA), one_picture(LLAVA), kind, kind, ())
    assert lines(same)[-1] == "Both tiers are the same device, so there is no cost to compare."


def test_text_alone_needs_no_device_for_encodes() -> None:
    kind, other = flat_kind("a", 1e-4, 1e-4, price=1.0), flat_kind("b", 1e-4, 1e-4, price=2.0)
    found = explain(spec_of(LLAVA), [asked()], kind, other, (PCIE,))
    assert found.ratio is found.kv_bytes is found.feature_bytes is None and found.links == ()
    assert (found.rho, found.num_vision, found.cost_share) == (0, 0, 1)
    assert found.requests_per_s == pytest.approx(1 / found.seconds.language)
    assert "nothing to hand over" in lines(found)[1]


def test_equal_pictures_are_encoded_once_and_handed_over_each_time() -> None:
    spec = spec_of(QWEN25)
    rows = [asked((896, 896, 7)), asked((896, 896, 7), (448, 448, 8))]
    first, second = works(spec, rows)
    assert (first.features, first.encoded) == (1024, (4096,))
    assert (second.features, second.encoded) == (1024 + 256, (1024,))
    kind = flat_kind("a", 1e-6, 1e-6)
    found = explain(spec, rows, kind, kind, (PCIE,))
    assert found.seconds.vision == pytest.approx(1e-6 * (4096 + 1024) / 2)
    assert found.feature_bytes == (1024 + 1280) / 2 * 3584 * 2


def test_videos_are_encoded_too() -> None:
    row = WorkloadRequest(at_s=0.0, prompt_tokens=8, output_tokens=8, videos=(Video(448, 448, 16, 2.0, 0),))
    (work,) = works(spec_of(QWEN25), [row])
    assert work.features == sum(work.encoded) / 4 > 256


def test_what_a_session_shares_is_not_computed_again() -> None:
    surface = flat_kind("a", 0.0, 1e-4).costs.surface
    alone, shared = works(spec_of(LLAVA), [asked(prompt=100), asked(prompt=100, session=1, shared_tokens=60)])
    assert forms.prefill_seconds(surface, alone) == pytest.approx(100e-4)
    assert forms.prefill_seconds(surface, shared) == pytest.approx(40e-4)
    whole = replace(shared, cached=100)
    assert forms.prefill_seconds(surface, whole) == pytest.approx(1e-4)  # the last token always


def test_one_token_of_output_needs_no_decode() -> None:
    (work,) = works(spec_of(LLAVA), [asked(output=1)])
    assert forms.decode_seconds(flat_kind("a", 0.0, 1.0).costs.surface, work) == 0


def test_what_cannot_be_explained_is_refused() -> None:
    kind, spec = flat_kind("a", 1e-4, 1e-4), spec_of(LLAVA)
    with pytest.raises(ConfigError, match="no requests"):
        explain(spec, [], kind, kind, ())
    with pytest.raises(ConfigError, match="no vision tower"):
        explain(replace(spec, vision=None), one_picture(LLAVA), kind, kind, ())
    assert spec.vision is not None
    processor = ProcessorSpec("", "", "", 0, 0, False, (), 14, False, "")
    foreign = replace(spec, vision=replace(spec.vision, processor=processor))
    with pytest.raises(ConfigError, match="own processor"):
        explain(foreign, one_picture(LLAVA), kind, kind, ())
