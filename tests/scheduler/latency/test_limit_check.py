"""The warning at start about limits that a single request breaks."""

from hydra_engine.config import SchedulerConfig
from hydra_engine.core.plans import LanguageLoad, VisionLoad
from hydra_engine.scheduler.latency.limit_check import best_tpot_s, best_ttft_s, check_limits
from tests.scheduler.surface import make_surface

PICTURE = VisionLoad(4096, 4096**2)


def config(**changes) -> SchedulerConfig:
    return SchedulerConfig(**({"token_budget": 512} | changes))


def test_limits_that_can_be_kept_are_not_mentioned() -> None:
    assert check_limits(make_surface(), config(), picture=PICTURE, picture_tokens=1024) == []
    assert (
        check_limits(make_surface(), config(tpot_slo=0.006, ttft_slo=0.5), picture=PICTURE, picture_tokens=1024) == []
    )


def test_a_tpot_limit_below_one_decode_is_told_with_the_best() -> None:
    assert best_tpot_s(make_surface()) == make_surface().language_s(LanguageLoad(1, 64))
    (said,) = check_limits(make_surface(), config(tpot_slo=0.003))
    assert said == "tpot_slo 3 ms cannot be kept here: one request alone takes 5 ms per token"
    assert check_limits(make_surface(), config(tpot_slo=0.006), pause_s=0.002)


def test_a_ttft_limit_below_a_short_prompt_is_told_with_the_best() -> None:
    (said,) = check_limits(make_surface(), config(ttft_slo=0.005), picture=PICTURE, picture_tokens=1024)
    assert said.startswith("ttft_slo 5 ms cannot be kept here: a prompt of 64 tokens alone takes 7.05 ms")


def test_a_ttft_limit_below_the_largest_picture_is_told_as_that() -> None:
    (said,) = check_limits(make_surface(), config(ttft_slo=0.05), picture=PICTURE, picture_tokens=1024)
    assert "largest picture: with 4096 patches" in said


def test_a_prompt_that_needs_several_steps_costs_all_of_them() -> None:
    surface = make_surface()
    whole = best_ttft_s(surface, 2048, picture=PICTURE, picture_tokens=1024)
    cut = best_ttft_s(surface, 512, picture=PICTURE, picture_tokens=1024)
    steps = [
        LanguageLoad(0, 0, 512, 512 * 513 / 2, 1),
        LanguageLoad(0, 0, 512, 512 * 512 + 512 * 513 / 2, 1),
        LanguageLoad(0, 0, 64, 64 * 1024 + 64 * 65 / 2, 1),
    ]
    assert abs(cut - surface.vision_s(PICTURE) - sum(map(surface.language_s, steps))) < 1e-12
    assert whole < cut
