"""Whole engines whose instances are connected by TCP alone, without Ray: tokens, times and deaths."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hydra_engine import Engine, draw
from tests.cluster.conftest import wait_until
from tests.engine.conftest import assert_at_rest, picture, tiny_model  # noqa: F401
from tests.nodes.certificates import make_authority, make_node
from tests.nodes.tcp_launcher import AHEAD_VARIABLE, TcpLauncher

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {"threads": 1, "block_size": 4, "num_kv_blocks": 512, "token_budget": 64, "decode_workers": 1}
PROMPTS = [[10 + number] * (9 + 7 * number) for number in range(6)]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TcpLauncher]]:
    made: list[TcpLauncher] = []

    def make(**options: object) -> TcpLauncher:
        made.append(TcpLauncher(**options))
        return made[-1]

    monkeypatch.setattr("hydra_engine.cluster.supervisor.LocalLauncher", make)
    yield made


def tokens(engine: Engine) -> list[tuple[int, ...]]:
    return [result.token_ids for result in engine.generate(PROMPTS, **GREEDY)]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[tuple[int, ...]]:  # noqa: F811
    with Engine(tiny_model, **OPTIONS) as engine:
        return tokens(engine)


@pytest.mark.parametrize("encrypted", [False, True])
def test_tokens_are_those_of_one_machine(
    launchers: list[TcpLauncher],
    tiny_model: Path,  # noqa: F811
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    encrypted: bool,
) -> None:
    if encrypted:
        make_authority(tmp_path / "authority")
        monkeypatch.setattr(TcpLauncher, "tls", str(make_node(tmp_path / "node", tmp_path / "authority")))
    with Engine(tiny_model, topology="E+P+D", check_transfers=True, **OPTIONS) as engine:
        assert tokens(engine) == expected
        (seen,) = engine.generate(["what is it?"], images=[picture(3)], **GREEDY)
        assert {"encode", "pull_features", "prefill", "pull_kv", "decode"} <= {span.stage for span in seen.timeline}
        assert_at_rest(engine)


@pytest.mark.parametrize("ahead_s", [-1e7, 40000.0])
def test_times_of_a_node_whose_clock_differs_by_hours_and_drifts_are_right_within_the_error(
    launchers: list[TcpLauncher],
    tiny_model: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    ahead_s: float,
) -> None:
    monkeypatch.setenv(AHEAD_VARIABLE, str(ahead_s))
    with Engine(tiny_model, topology="E+PD", **OPTIONS) as engine:
        time.sleep(2)  # pings
        begun_s = time.monotonic()
        (result,) = engine.generate(["what is it?"], images=[picture(3)], **GREEDY)
        took_s = time.monotonic() - begun_s
        error_s, metrics = result.metrics.clock_error_s, result.metrics
        assert 0 < error_s < 1
        assert metrics.ttft_s is not None and 0 < metrics.ttft_s < metrics.e2e_s + error_s <= took_s + error_s
        spans = [span for span in result.timeline if span.instance != "front"]
        assert {span.instance for span in spans} == {"e0", "pd0"}
        assert all(-error_s <= span.start_s <= span.end_s <= took_s + error_s for span in spans), spans
        ends = {stage: max(span.end_s for span in spans if span.stage == stage) for stage in ("encode", "prefill")}
        first = {stage: min(s.start_s for s in spans if s.stage == stage) for stage in ("pull_features", "decode")}
        assert ends["encode"] <= first["pull_features"] + 2 * error_s
        assert ends["prefill"] <= first["decode"] + error_s
        assert all(0 <= gap_s < took_s for gap_s in result.gaps_s)
        shown = draw(result.timeline, clock_error_s=error_s)
        assert any(line == f"times of other nodes are right within {error_s * 1e3:.2f} ms" for line in shown)
        for state in engine.frontend._supervisor.states():
            assert state.status is not None and state.status.clock_error_s
            assert abs(time.monotonic() - state.status.time_s) < 30
        assert_at_rest(engine)


def test_an_altered_byte_ends_the_instance_which_starts_again_and_answers(
    launchers: list[TcpLauncher],
    tiny_model: Path,  # noqa: F811
    expected: list[tuple[int, ...]],
) -> None:
    with Engine(tiny_model, topology="EP+D", **OPTIONS) as engine:
        assert tokens(engine) == expected
        (proxy,) = launchers[0].proxies["d0"]
        proxy.alter = lambda upwards, data: data[:-1] + bytes([data[-1] ^ 1])
        restarted = lambda: next(s for s in engine.frontend._supervisor.states() if s.name == "d0").restarts == 1  # noqa: E731
        wait_until(restarted, "d0 starts again")
        assert tokens(engine) == expected
        assert_at_rest(engine)
