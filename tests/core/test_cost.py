"""The cost surface: what it says of a step never falls when the step grows."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hydra_engine.core.cost import CostSurface, Curve
from hydra_engine.core.plans import LanguageLoad, VisionLoad

PRICES = st.floats(0, 1e-3)
SLOWDOWNS = st.floats(1, 8)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    knots = sorted(draw(st.sets(st.integers(1, 2000), min_size=1, max_size=6)))
    seconds = sorted(draw(st.lists(st.floats(1e-6, 1), min_size=len(knots), max_size=len(knots))))
    return Curve(tuple(map(float, knots)), tuple(seconds))


@st.composite
def surfaces(draw: st.DrawFn) -> CostSurface:
    return CostSurface(
        rows=draw(curves()),
        per_key_s=draw(PRICES),
        per_pair_s=draw(PRICES),
        per_chunk_s=draw(PRICES),
        per_decode_s=draw(PRICES),
        patches=draw(curves()),
        per_patch_pair_s=draw(PRICES),
        decode_slowdown=draw(SLOWDOWNS),
        prefill_slowdown=draw(SLOWDOWNS),
        vision_slowdown=draw(SLOWDOWNS),
    )


LOADS = st.builds(
    LanguageLoad,
    num_decodes=st.integers(1, 256),
    decode_context=st.integers(0, 100_000),
    prefill_tokens=st.integers(0, 2048),
    prefill_pairs=st.floats(0, 1e6),
    num_chunks=st.integers(0, 4),
)


def step(decodes: int, context: int, tokens: int, start: int) -> LanguageLoad:
    """Decodes of `context` keys each and a chunk behind `start` tokens."""
    pairs = tokens * start + tokens * (tokens + 1) / 2
    return LanguageLoad(decodes, decodes * context, tokens, pairs, int(tokens > 0))


@given(curves(), st.floats(0, 5000), st.floats(0, 5000))
def test_a_curve_rises_and_goes_through_its_knots(curve: Curve, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert 0 < curve.interpolate(low) <= curve.interpolate(high) * (1 + 1e-12)
    for knot, seconds in zip(curve.knots, curve.seconds, strict=True):
        assert math.isclose(curve.interpolate(knot), seconds, rel_tol=1e-9)


def test_a_curve_is_flat_before_its_first_knot_and_goes_on_behind_its_last() -> None:
    curve = Curve((10.0, 20.0), (1.0, 3.0))
    assert [curve.interpolate(x) for x in (0, 10, 15, 20, 30)] == [1.0, 1.0, 2.0, 3.0, 5.0]
    assert Curve((10.0,), (1.0,)).interpolate(50) == 1.0


@given(surfaces(), LOADS, st.sampled_from(list(LanguageLoad.__dataclass_fields__)), st.integers(1, 500))
def test_a_language_step_never_costs_less_for_being_larger(
    surface: CostSurface, load: LanguageLoad, argument: str, more: int
) -> None:
    larger = replace(load, **{argument: getattr(load, argument) + more})
    assert 0 < surface.language_s(load) <= surface.language_s(larger) * (1 + 1e-12)


@given(surfaces(), st.integers(0, 5000), st.floats(0, 1e6), st.integers(0, 500), st.floats(0, 1e6))
def test_a_vision_step_never_costs_less_for_being_larger(
    surface: CostSurface, patches: int, pairs: float, more: int, more_pairs: float
) -> None:
    larger = VisionLoad(patches + more, pairs + more_pairs)
    assert 0 < surface.vision_s(VisionLoad(patches, pairs)) <= surface.vision_s(larger) * (1 + 1e-12)


@given(
    surfaces(),
    *(st.integers(0, 256), st.integers(1, 4000), st.integers(0, 2048), st.integers(0, 500), st.integers(0, 4000)),
    *(st.floats(0, 10), st.floats(0, 10)),
)
def test_beside_vision_a_step_takes_longer_with_more_tokens_and_with_more_vision(
    surface: CostSurface, decodes: int, context: int, tokens: int, more: int, start: int, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    load, larger = step(decodes, context, tokens, start), step(decodes, context, tokens + more, start)
    assert surface.corun_s(load, low) <= surface.corun_s(larger, low) * (1 + 1e-9)
    assert surface.corun_s(load, low) <= surface.corun_s(load, high) * (1 + 1e-12)
    assert surface.language_s(load) == surface.corun_s(load, 0.0)
