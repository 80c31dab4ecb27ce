"""The fit finds the surface that samples were drawn from, through noise and bursts, and says how far off it may be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_engine.core.cost import CostSurface, Curve
from hydra_engine.core.plans import LanguageLoad, VisionLoad
from hydra_engine.profiler.fit import CorunTimes, LanguageTimes, Samples, VisionTimes, fit, without_bursts
from hydra_engine.profiler.grid import LanguagePoint, VisionPoint, make_grid
from hydra_engine.profiler.store import SCHEMA, Identity, Profile, Reach, problem_of
from tests.examples import examples
from tests.profiler.fakes import SIZES, SURFACE, SquareVision, decodes, prompt

POINTS = make_grid(SIZES, SquareVision())
LANGUAGE = [p.load for p in (*POINTS.coarse, *POINTS.rest) if isinstance(p, LanguagePoint)]
VISION = [p.load for p in (*POINTS.coarse, *POINTS.rest) if isinstance(p, VisionPoint)]


def drawn(surface: CostSurface, *, noise: float = 0.0, bursts: float = 0.0, repeats: int = 7, seed: int = 0) -> Samples:
    """Normal noise; a share of the steps takes up to four times as long."""
    rng = np.random.default_rng(seed)

    def times(seconds: float) -> tuple[float, ...]:
        slow = np.where(rng.random(repeats) < bursts, rng.uniform(1.5, 4, repeats), 1.0)
        return tuple((seconds * slow * (1 + noise * rng.normal(size=repeats)).clip(0.5)).tolist())

    beside = VISION[0]
    corun = [load for load in LANGUAGE if not load.num_decodes or not load.prefill_tokens][::5]
    return Samples(
        tuple(LanguageTimes(load, times(surface.language_s(load))) for load in LANGUAGE),
        tuple(VisionTimes(load, times(surface.vision_s(load))) for load in VISION),
        tuple(
            CorunTimes(
                load,
                beside,
                times(surface.corun_s(load, float("inf"))),
                times(surface.vision_s(beside) * surface.vision_slowdown),
            )
            for load in corun
        ),
    )


@pytest.mark.parametrize(
    ("noise", "bursts", "within"), [(0.0, 0.0, 0.005), (0.03, 0.0, 0.06), (0.03, 0.1, 0.08)], ids=str
)
def test_a_known_surface_is_found(noise: float, bursts: float, within: float) -> None:
    found = fit(drawn(SURFACE, noise=noise, bursts=bursts))
    held_out = [decodes(3, 700), decodes(12, 100), prompt(200), prompt(48, 500), LanguageLoad(9, 9000, 100, 5050, 1)]
    for load in held_out:
        assert found.language_s(load) == pytest.approx(SURFACE.language_s(load), rel=within)
    for patches in (70, 300, 900):
        load = VisionLoad(patches, float(patches**2))
        assert found.vision_s(load) == pytest.approx(SURFACE.vision_s(load), rel=within + 0.05)
    for name in ("decode_slowdown", "prefill_slowdown", "vision_slowdown"):
        assert getattr(found, name) == pytest.approx(getattr(SURFACE, name), rel=2 * within)


def test_error_bars_cover_steps_that_were_not_measured() -> None:
    found = fit(drawn(SURFACE, noise=0.05))
    fresh = drawn(SURFACE, noise=0.05, repeats=20, seed=99)
    language = [abs(s / found.language_s(p.load) - 1) for p in fresh.language for s in p.seconds]
    vision = [abs(s / found.vision_s(p.load) - 1) for p in fresh.vision for s in p.seconds]
    assert np.mean(np.array(language) <= found.language_error) > 0.82
    assert np.mean(np.array(vision) <= found.vision_error) > 0.75
    assert found.language_error < 0.15, "a bar that covers everything says nothing"


def test_bursts_do_not_widen_the_error_bars() -> None:
    calm, busy = fit(drawn(SURFACE, noise=0.03)), fit(drawn(SURFACE, noise=0.03, bursts=0.1))
    assert busy.language_error < 2.5 * calm.language_error


def test_one_point_that_all_others_contradict_is_outvoted() -> None:
    samples = drawn(SURFACE)
    index = LANGUAGE.index(decodes(4, 32))
    spoilt = replace(samples.language[index], seconds=tuple(3 * s for s in samples.language[index].seconds))
    language = (*samples.language[:index], spoilt, *samples.language[index + 1 :])
    found = fit(replace(samples, language=language))
    assert found.language_s(decodes(4, 32)) == pytest.approx(SURFACE.language_s(decodes(4, 32)), rel=0.1)


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_whatever_was_measured_the_surface_makes_sense(data: st.DataObject) -> None:
    """Monotone, never negative, slowdowns of at least 1: all that a stored profile is checked for."""
    seconds = st.lists(st.floats(1e-2, 10), min_size=1, max_size=3).map(tuple)
    language = data.draw(st.lists(st.sampled_from(LANGUAGE), min_size=1, max_size=12, unique=True))
    vision = data.draw(st.lists(st.sampled_from(VISION), max_size=5, unique=True))
    samples = Samples(
        tuple(LanguageTimes(load, data.draw(seconds)) for load in language),
        tuple(VisionTimes(load, data.draw(seconds)) for load in vision),
        tuple(CorunTimes(load, vision[0], data.draw(seconds), data.draw(seconds)) for load in language[:2] if vision),
    )
    surface = fit(samples)
    identity = Identity("m", "cpu", "", 2, 2, "throughput", "float32", "native", True, False, 16, "0", SCHEMA)
    profile = Profile(identity, Reach(1, 1, 1), surface, samples, 0.0, 0.0, 1, 0, 1.0, "")
    assert problem_of(profile) is None


def test_without_vision_steps_vision_costs_nothing_and_disturbs_nobody() -> None:
    found = fit(Samples(language=drawn(SURFACE).language))
    assert found.vision_s(VisionLoad(500, 250_000.0)) == 0.0
    assert (found.decode_slowdown, found.prefill_slowdown, found.vision_slowdown) == (1.0, 1.0, 1.0)


def test_without_chunks_beside_vision_their_slowdown_is_that_of_decodes() -> None:
    samples = drawn(SURFACE)
    only = tuple(point for point in samples.corun if not point.language.prefill_tokens)
    found = fit(replace(samples, corun=only))
    assert found.prefill_slowdown == found.decode_slowdown == pytest.approx(SURFACE.decode_slowdown, rel=0.02)


def test_one_step_is_enough_and_none_is_refused() -> None:
    found = fit(Samples(language=(LanguageTimes(decodes(2, 64), (0.02, 0.02)),)))
    assert found.language_s(decodes(2, 64)) == pytest.approx(0.02)
    with pytest.raises(ValueError, match="no language step"):
        fit(Samples())


def test_repeats_that_something_else_delayed_are_left_out() -> None:
    assert without_bursts([1.00, 1.02, 0.98, 1.01, 2.5]) == [1.00, 1.02, 0.98, 1.01]
    assert without_bursts([1.0]) == [1.0]
    assert without_bursts([1.0, 1.0, 1.0, 1.04]) == [1.0, 1.0, 1.0, 1.04]


def test_curves_end_where_measurements_end() -> None:
    found = fit(drawn(SURFACE))
    assert found.rows.knots[0] == 1.0 and found.rows.knots[-1] == SIZES.token_budget
    assert isinstance(found.patches, Curve) and found.patches.knots[-1] == max(load.num_patches for load in VISION)
