"""Sampling defaults of the model: on every route for requests that leave fields out, and shown where clients look."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hydra_engine.core.sampling import SamplingParams
from tests.server.conftest import Served

DEFAULTS = SamplingParams(temperature=0.25, top_p=0.5, top_k=3, min_p=0.125, repetition_penalty=1.5, max_tokens=7)
SHOWN = {
    "temperature": 0.25,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "max_tokens": 7,
}
MESSAGES = [{"role": "user", "content": "one two three"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "one two three"},
    "/v1/responses": {"input": "one two three"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 20},
}
GIVEN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.fixture
def authored(served: Served) -> Served:
    served.engine.default_sampling_params = DEFAULTS
    return served


async def ask(served: Served, route: str, **fields: Any) -> tuple[SamplingParams, dict[str, Any]]:
    async with served.post(route, ROUTES[route] | fields) as response:
        answer = await response.json()
        assert response.status == 200, answer
    return served.engine.submissions[-1].sampling, answer


@pytest.mark.parametrize("route", ROUTES)
async def test_what_is_left_out_is_the_models(authored: Served, route: str) -> None:
    for nothing in ({}, dict.fromkeys(GIVEN)):
        sampling, _ = await ask(authored, route, **nothing)
        # The preprocessor knows how many tokens there is room for; only /v1/messages asks every request to say.
        assert sampling == DEFAULTS.with_fields(max_tokens=ROUTES[route].get("max_tokens"))
    sampling, _ = await ask(authored, route, temperature=0)
    assert (sampling.temperature, sampling.top_k) == (0, 3)


@pytest.mark.parametrize("route", ROUTES)
async def test_what_is_given_wins(authored: Served, route: str) -> None:
    most = "max_output_tokens" if route == "/v1/responses" else "max_tokens"
    sampling, _ = await ask(authored, route, **GIVEN, **{most: 50})
    assert sampling == SamplingParams(max_tokens=50)


async def test_completions_have_openais_sixteen_tokens_where_the_model_says_nothing(served: Served) -> None:
    assert (await ask(served, "/v1/completions"))[0].max_tokens == 16


async def test_a_response_tells_what_it_was_sampled_with(authored: Served) -> None:
    _, answer = await ask(authored, "/v1/responses")
    assert (answer["temperature"], answer["top_p"]) == (0.25, 0.5)


async def test_where_they_are_shown(authored: Served) -> None:
    async with authored.get("/server_info") as response:
        assert (await response.json())["default_sampling_params"] == SHOWN
    async with authored.get("/ui/events") as response:
        event = (await response.content.readuntil(b"\n\n")).decode()
    assert json.loads(event.removeprefix("data: "))["default_sampling_params"] == SHOWN


async def test_nothing_is_shown_where_nothing_is_set(served: Served) -> None:
    async with served.get("/server_info") as response:
        assert (await response.json())["default_sampling_params"] == {}
