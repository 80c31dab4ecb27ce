"""The table says what was measured; what a limit leaves is what the surface allows."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_engine.core.plans import LanguageLoad
from hydra_engine.profiler.calibrate import Site, calibrate
from hydra_engine.profiler.fit import Samples, allowance, fit
from hydra_engine.profiler.store import Identity, Profile, Reach
from hydra_planner.commands.profile import mean_start, profile_lines
from tests.profiler.fakes import SIZES, SURFACE, FakeLanes, SquareVision, decodes, prompt

IDENTITY = Identity("abc", "cpu", "a processor", 2, 2, "throughput", "bfloat16", "native", True, False, 16, "0.1.0")


@pytest.fixture(scope="module")
def profile() -> Profile:
    lanes = FakeLanes(noise=0.05)
    done = calibrate(Site(lanes, lanes.wake, lanes.clock, SIZES, 500, SquareVision()), lambda *_: None, 60.0)
    reach = Reach(SIZES.token_budget, SIZES.max_num_seqs, SIZES.image_budget)
    return Profile(IDENTITY, reach, fit(done.samples), done.samples, 1e-4, 2e-4, 60, 2, 9.5, "2026-01-02T03:04:05Z")


@pytest.fixture(scope="module")
def bare(profile: Profile) -> Profile:
    """The profile without its vision samples, as of a model without a tower."""
    samples = Samples(language=profile.samples.language)
    return msgspec.structs.replace(profile, samples=samples, surface=fit(samples))


def load(num_decodes: int, context: int, tokens: int) -> LanguageLoad:
    pairs = tokens * (tokens + 1) / 2
    return LanguageLoad(num_decodes, num_decodes * context, tokens, pairs, int(tokens > 0))


@given(st.integers(0, 64), st.integers(1, 4000), st.floats(1e-3, 1.0), st.integers(0, 512))
def test_an_allowance_is_the_most_that_stays_within_the_limit(
    num_decodes: int, context: int, tpot_limit_s: float, most: int
) -> None:
    left = allowance(SURFACE, num_decodes, context, tpot_limit_s, most)
    for tokens, vision_s in ((left.tokens_alone, 0.0), (left.tokens_beside, math.inf)):
        assert tokens == 0 or SURFACE.corun_s(load(num_decodes, context, tokens), vision_s) <= tpot_limit_s
        assert tokens == most or SURFACE.corun_s(load(num_decodes, context, tokens + 1), vision_s) > tpot_limit_s
    bare_step = load(num_decodes, context, 0)
    if left.vision_s == math.inf:
        assert SURFACE.corun_s(bare_step, math.inf) <= tpot_limit_s
    elif left.vision_s:
        assert SURFACE.corun_s(bare_step, left.vision_s) == pytest.approx(tpot_limit_s)
    else:
        assert left.step_s >= tpot_limit_s


def test_every_measured_step_has_its_line(profile: Profile) -> None:
    lines = profile_lines(profile)
    samples = profile.samples
    numbers = [line for line in lines if line.startswith("  ") and line.split()[0].isdigit()]
    assert len(numbers) == len(samples.language) + len(samples.vision) + len(samples.corun)
    assert any("58 kinds of steps in 9.5 s" in line and "2 left out" in line for line in lines)
    assert not any("a limit of" in line for line in lines)
    assert all(len(line) <= 140 for line in lines)


def test_lines_compare_measured_with_predicted(profile: Profile) -> None:
    point = next(p for p in profile.samples.language if p.load == prompt(256))
    line = next(line for line in profile_lines(profile) if line.split()[:5] == ["0", "0", "256", "0", "1"])
    predicted = profile.surface.language_s(point.load) * 1e3
    assert float(line.split()[6]) == pytest.approx(predicted, abs=0.51) and line.endswith("%")


def test_every_column_of_times_and_tokens_has_its_unit_below_its_title(profile: Profile) -> None:
    lines = profile_lines(profile, 0.040)
    tables = [(line, lines[at + 1]) for at, line in enumerate(lines) if line.startswith(("  decodes", "  patches"))]
    assert len(tables) == 4
    for titles, units in tables:
        for title, unit in (("measured", "ms"), ("predicted", "ms"), ("alone", "ms"), ("context", "tokens")):
            if title in titles:
                assert units[: titles.index(title) + len(title)].endswith(unit), titles
        assert "ms" in units


def test_what_a_limit_leaves_is_said_for_each_number_of_decodes(profile: Profile) -> None:
    lines = profile_lines(profile, 0.040)
    table = lines[lines.index(next(line for line in lines if "a limit of 40.00 ms" in line)) :]
    assert [line.split()[0] for line in table[3:]] == ["1", "4", "16"]
    assert not any("cannot keep" in line for line in table)


def test_nothing_is_recommended_from_what_was_measured_beside_other_programs(profile: Profile) -> None:
    busy = "no limits from this: busy, measure again: other programs took 46% of the cores meanwhile"
    assert profile_lines(msgspec.structs.replace(profile, other_load=0.46), 0.040)[-1] == busy
    quiet = profile_lines(msgspec.structs.replace(profile, other_load=0.05), 0.040)
    assert quiet == profile_lines(profile, 0.040)


def test_a_limit_that_cannot_be_kept_is_said_with_the_best_there_is(profile: Profile) -> None:
    lines = profile_lines(profile, 0.001)
    best = profile.surface.language_s(decodes(1, 512)) * 1e3
    assert lines[-1] == f"  this machine cannot keep the limit: one request alone takes {best:.2f} ms a token"
    assert all("over the limit" in line for line in lines[-4:-1])


def test_without_a_tower_the_report_says_so(bare: Profile) -> None:
    lines = profile_lines(bare, 0.04)
    assert "  none measured" in lines and not any(line.startswith("both lanes at once") for line in lines)


def test_the_start_of_a_chunk_follows_from_its_pairs() -> None:
    assert mean_start(prompt(64, 700)) == 700 and mean_start(prompt(64)) == 0 and mean_start(decodes(4, 9)) == 0
    two = LanguageLoad(0, 0, 64, 2 * prompt(32, 5).prefill_pairs, 2)
    assert mean_start(two) == 5
