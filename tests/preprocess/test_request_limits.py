"""A request's own limits: passed on as they are, refused by name where they make no sense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hydra_engine.config import MediaConfig
from hydra_engine.core.prompting import MediaLimits
from hydra_engine.core.request import Slo
from hydra_engine.core.sampling import GenerationDefaults
from hydra_engine.errors import InvalidRequest
from hydra_engine.preprocess.media.media import media_limits
from tests.preprocess.conftest import make_spec


@pytest.mark.parametrize("priority", [-(1 << 31), -1, 0, (1 << 31) - 1])
async def test_priority_and_limits_are_passed_on(kitchen: Any, priority: int) -> None:
    slo = Slo(ttft_s=0.5, tpot_s=1)
    request = (await kitchen.prepare("the cat", slo=slo, priority=priority)).request
    assert (request.priority, request.slo) == (priority, slo)


async def test_neither_is_needed(kitchen: Any) -> None:
    request = (await kitchen.prepare("the cat")).request
    assert (request.priority, request.slo) == (0, Slo())


@pytest.mark.parametrize("priority", [1 << 31, -(1 << 31) - 1, 0.0, True, "1", None])
async def test_wrong_priorities_are_refused(kitchen: Any, priority: Any) -> None:
    with pytest.raises(InvalidRequest, match="the smaller one goes first") as caught:
        await kitchen.prepare("the cat", priority=priority)
    assert caught.value.param == "priority"


@pytest.mark.parametrize("limit", [0, -1.0, 3601, float("nan"), float("inf"), "1s", True])
@pytest.mark.parametrize("name", ["ttft_s", "tpot_s"])
async def test_wrong_limits_are_refused(kitchen: Any, name: str, limit: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"slo.{name} must be") as caught:
        await kitchen.prepare("the cat", slo=Slo(**{name: limit}))
    assert caught.value.param == "slo"


@pytest.mark.parametrize(
    ("sampling", "most"),
    [({}, 8), ({"max_tokens": 20}, 20), ({"max_tokens": 3}, 3), ({"min_tokens": 12}, 12), ({"min_tokens": 2}, 8)],
)
async def test_the_models_max_tokens_are_a_default_and_no_limit(
    make_preprocessor: Any, sampling: dict[str, int], most: int
) -> None:
    prepared = await make_preprocessor(defaults=GenerationDefaults(8)).prepare("the cat", sampling=sampling)
    assert prepared.request.max_new_tokens == most


async def test_they_yield_to_the_context(make_preprocessor: Any) -> None:
    request = (await make_preprocessor(defaults=GenerationDefaults(1000), max_model_len=64).prepare("the cat")).request
    assert request.max_new_tokens == 64 - request.num_prompt


def test_media_limits_are_those_that_the_model_and_this_server_share(tokenizer: Any) -> None:
    config = MediaConfig(max_images=3, max_image_bytes=10, max_videos=2, max_video_bytes=30)
    spec = make_spec(tokenizer)
    assert media_limits(spec, config) == MediaLimits(3, 10, 0, 30)
    assert media_limits(replace(spec, video_token_id=5), config) == MediaLimits(3, 10, 2, 30)
    assert media_limits(make_spec(tokenizer, vision=False), config) == MediaLimits()
