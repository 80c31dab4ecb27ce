"""Whole engines whose instances read each other's blocks over TCP or NIXL: the tokens of one instance, also through
kills."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from bench.mixed import Outcome, agrees, alone, mixture, submit, together
from hydra_engine import Engine
from hydra_engine.errors import HydraError
from tests.campaigns.restless import RestlessEngine
from tests.engine.conftest import assert_at_rest
from tests.nodes.tcp_launcher import TcpLauncher
from tools.miniatures import make_tiny

pytestmark = pytest.mark.slow

REQUESTS = mixture()
OPTIONS: dict[str, Any] = {"threads": 1, "block_size": 4, "num_kv_blocks": 512, "decode_workers": 1, "token_budget": 24}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-llava")
    make_tiny("llava", directory, seed=7)
    return directory


@pytest.fixture(scope="module")
def golden(tiny_model: Path) -> list[Outcome]:
    with Engine(tiny_model, threads=1, block_size=4, num_kv_blocks=2048, token_budget=512) as engine:
        return alone(engine, REQUESTS)


@pytest.fixture(autouse=True)
def on_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hydra_engine.cluster.supervisor.LocalLauncher", TcpLauncher)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("topology", "options"),
    [
        ("E+PD", {}),
        ("EP+D", {}),  # groups of KV leave while the prefill runs
        ("E+P+D", {"check_transfers": True}),
        ("E+P+D", {"early_kv": False, "token_budget": 512}),
        ("2E+P+2D", {"transport": "host"}),
        ("EP+D", {"transfer_backend": "nixl"}),
        ("2E+P+2D", {"transfer_backend": "nixl", "transport": "host", "check_transfers": True}),
    ],
    ids=str,
)
def test_instances_that_share_no_memory_give_the_tokens_of_one(
    tiny_model: Path, golden: list[Outcome], topology: str, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    over_nixl = "transfer_backend" in options
    if over_nixl:
        request.getfixturevalue("nixl")
    with Engine(tiny_model, topology=topology, **(OPTIONS | options)) as engine:
        for _ in range(2):
            rows = zip(REQUESTS, together(engine, REQUESTS), golden, strict=True)
            assert [got for request, got, right in rows if not agrees(request, got, right)] == []
        assert_at_rest(engine)
        reports = [status.transfer for status in engine.statuses().values()]
        pulled, through_host = (sum(getattr(r, name) for r in reports) for name in ("pulled_bytes", "host_bytes"))
        assert pulled > 0
        assert through_host == (pulled if options.get("transport") == "host" else 0)
        maps = [Path(f"/proc/{instance.pid}/maps").read_text() for instance in engine.instances()]
        assert {"libplugin_UCX" in text for text in maps} == {over_nixl}


@pytest.mark.parametrize("early_kv", [True, False])
def test_kv_moves_in_groups_while_the_prefill_goes_on(tiny_model: Path, early_kv: bool) -> None:
    with Engine(tiny_model, topology="EP+D", early_kv=early_kv, **OPTIONS) as engine:
        for token in (7, 8):  # the first connects them
            (result,) = engine.generate([[token] * 400], temperature=0, max_tokens=4, ignore_eos=True)
    computed_s = max(span.end_s for span in result.timeline if (span.stage, span.instance) == ("prefill", "ep0"))
    pulls = [span for span in result.timeline if span.stage == "pull_kv"]
    assert sum(span.tokens for span in pulls) == 400
    early = [span for span in pulls if span.end_s + result.metrics.clock_error_s < computed_s]
    assert bool(early) == early_kv, result.timeline


def test_killed_instances_take_nothing_with_them(tiny_model: Path, golden: list[Outcome], each_network: str) -> None:
    """Kills each while blocks move. Requests end with the right tokens, or with a sentence; then all is free."""
    options = OPTIONS | {"transfer_backend": each_network}
    with RestlessEngine(tiny_model, topology="E+P+D", recovery_s=30.0, **options) as engine:
        for turn, name in enumerate(("e0", "p0", "d0") * 2):
            handles = [submit(engine, request) for request in REQUESTS[:12]]
            time.sleep(0.05 * turn)
            (victim,) = [instance for instance in engine.instances() if instance.name == name]
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)
            for handle in handles:
                try:
                    handle.result(60)
                except HydraError as error:
                    assert error.message
            assert_at_rest(engine)
        rows = zip(REQUESTS, together(engine, REQUESTS), golden, strict=True)
        assert [got for request, got, right in rows if not agrees(request, got, right)] == []
        assert_at_rest(engine)
