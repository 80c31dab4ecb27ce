"""The same 64 requests over every topology give what one instance gives: token for token, from real processes.

Each topology serves the mixture twice, first with empty caches, then with what they hold; long prompts are cut into
small chunks in some of them and not cut in others, and blocks that move are checked in one of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.mixed import Mixed, Outcome, agrees, alone, mixture, together
from hydra_engine import Engine
from hydra_engine.core.request import Slo
from tests.engine.conftest import EngineFactory, assert_at_rest

REQUESTS = mixture()


@pytest.fixture(scope="module")
def golden(tiny_model: Path) -> list[Outcome]:
    with Engine(tiny_model, threads=1, block_size=4, num_kv_blocks=2048, token_budget=512) as engine:
        return alone(engine, REQUESTS)


def differences(requests: list[Mixed], found: list[Outcome], expected: list[Outcome]) -> list[str]:
    rows = zip(requests, found, expected, strict=True)
    return [
        f"request {index}: {got.token_ids} instead of {right.token_ids} ({got.reason}, {right.reason})"
        for index, (request, got, right) in enumerate(rows)
        if not agrees(request, got, right)
    ]


def every_late_token_is_explained(engine: Engine) -> None:
    """Checks the causes of late tokens under a limit that no token meets."""
    prompts = [[10 + number] * 9 for number in range(3)]
    options = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "slo": Slo(tpot_s=1e-6)}
    for result in engine.generate(prompts, **options):
        slo, gaps = result.metrics.slo, [span for span in result.timeline if span.blame]
        assert slo.late_gaps == slo.num_gaps == len(gaps) == sum(slo.late_by.values()) == 7


@pytest.mark.drawn
@pytest.mark.quick("E+P+D")
@pytest.mark.parametrize(
    ("topology", "options"),
    [
        ("EPD", {"token_budget": 24}),
        pytest.param("EP+D", {"token_budget": 24}, marks=pytest.mark.slow),
        pytest.param("EP+D", {"token_budget": 512, "prefix_caching": False}, marks=pytest.mark.slow),
        ("ED+P", {"token_budget": 24}),
        pytest.param("ED+P", {"token_budget": 512}, marks=pytest.mark.slow),
        pytest.param("E+PD", {"token_budget": 24}, marks=pytest.mark.slow),
        pytest.param("E+PD", {"token_budget": 512}, marks=pytest.mark.slow),
        ("E+P+D", {"token_budget": 24, "check_transfers": True}),
        pytest.param("E+P+D", {"token_budget": 24}, marks=pytest.mark.slow),
        pytest.param("E+P+D", {"token_budget": 512, "prefix_caching": False}, marks=pytest.mark.slow),
        pytest.param(
            "E+P+D",
            {"token_budget": 24, "early_kv": False, "prefetch_features": False, "steal_decodes": False},
            marks=pytest.mark.slow,
        ),
        pytest.param("EP+D", {"transport": "host"}, marks=pytest.mark.slow),
        pytest.param("ED+P", {"transport": "host"}, marks=pytest.mark.slow),
        pytest.param("E+P+D", {"transport": "host", "check_transfers": True}, marks=pytest.mark.slow),
        pytest.param("2E+P+2D", {"transport": "host"}, marks=pytest.mark.slow),
        pytest.param("2E+P+2D", {"token_budget": 24}, marks=pytest.mark.slow),
        pytest.param("2E+P+2D", {"token_budget": 512}, marks=pytest.mark.slow),
        ("2EPD", {"token_budget": 24}),
    ],
    ids=str,
)
def test_every_topology_gives_the_tokens_of_one_instance(
    make_engine: EngineFactory, golden: list[Outcome], topology: str, options: dict[str, Any]
) -> None:
    engine = make_engine(topology=topology, **options)
    for _ in range(2):
        assert differences(REQUESTS, together(engine, REQUESTS), golden) == []
    every_late_token_is_explained(engine)
    assert_at_rest(engine)
    reports = [status.transfer for status in engine.statuses().values()]
    moved, through_host = (sum(getattr(r, name) for r in reports) for name in ("pulled_bytes", "host_bytes"))
    assert (moved > 0) == (topology not in ("EPD", "2EPD")), "whether anything went from one instance to another"
    assert through_host == (moved if options.get("transport") == "host" else 0)
    kv, features = (sum(getattr(r, name) for r in reports) for name in ("kv_tokens", "feature_tokens"))
    one_of_them = {"E+PD": (False, True), "EP+D": (True, False)}
    assert (kv > 0, features > 0) == one_of_them.get(topology, (moved > 0, moved > 0)), "what is cut, and nothing else"


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "host"])
@pytest.mark.parametrize(
    "topology", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("EP+D", "ED+P")), "E+P+D"]
)
def test_caches_with_room_for_one_request_of_each_kind(
    make_engine: EngineFactory, golden: list[Outcome], topology: str, transport: str
) -> None:
    """Everything waits for everything, and all of it ends; staging pools have room for one piece of each kind too."""
    longest = 472  # tokens of the longest request, prompt and answer
    options = {"num_kv_blocks": longest // 4, "num_image_blocks": 1, "max_model_len": longest}
    engine = make_engine(topology=topology, transport=transport, **options)
    assert differences(REQUESTS, together(engine, REQUESTS), golden) == []
    assert_at_rest(engine)
