"""Flags, file and keywords become one configuration: durations, their errors, and which source wins."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_engine.cli.options import add_all_options
from hydra_engine.cli.sources import read_settings
from hydra_engine.config import EngineConfig, SchedulerConfig, ServerConfig, config_from_options, parse_seconds
from hydra_engine.config.options import as_keywords
from hydra_engine.errors import ConfigError


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_all_options(parser)
    return parser.parse_args(arguments)


def configured(*arguments: str) -> EngineConfig:
    return read_settings(parsed(*arguments)).engine()


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("40ms", 0.04),
        ("40 ms", 0.04),
        ("0.5ms", 0.0005),
        ("1.5s", 1.5),
        (".5s", 0.5),
        ("2m", 120.0),
        ("0.04", 0.04),
        ("3", 3.0),
        (0.04, 0.04),
        (3, 3.0),
    ],
)
def test_a_limit_means_the_same_everywhere(given: Any, seconds: float, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"tpot-slo: {given!r}\n")
    limits = [
        configured("--tpot-slo", str(given)).scheduler.tpot_slo,
        configured("--config", str(file)).scheduler.tpot_slo,
        config_from_options("demo", {"tpot_slo": given}).scheduler.tpot_slo,
        EngineConfig(scheduler=SchedulerConfig(tpot_slo=given)).scheduler.tpot_slo,
    ]
    assert limits == [pytest.approx(seconds)] * 4 and all(type(limit) is float for limit in limits)


@given(st.integers(min_value=1, max_value=3_599_999))
def test_units_agree(milliseconds: int) -> None:
    seconds = parse_seconds(f"{milliseconds}ms", "x")
    assert seconds == pytest.approx(parse_seconds(f"{milliseconds / 1e3:.3f}s", "x"))
    assert seconds == pytest.approx(parse_seconds(f"{milliseconds / 6e4:.9f}m", "x"), abs=1e-6)
    assert parse_seconds(seconds, "x") == seconds


@pytest.mark.parametrize(
    ("given", "words"),
    [
        *(
            (wrong, "must be a time such as 40ms")
            for wrong in ("soon", "", "ms", "4 0ms", "1h", "1e-3", "40msx", "٤ms")
        ),
        *((wrong, "must be more than 0 seconds") for wrong in ("0", "0ms", "60m", "3600", "9" * 400)),
    ],
)
def test_a_wrong_limit_is_one_sentence_that_names_it(given: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"ttft-slo: {given!r}\n", encoding="utf-8")
    for make in (
        lambda: configured(f"--ttft-slo={given}"),
        lambda: configured("--config", str(file)),
        lambda: config_from_options("demo", {"ttft_slo": given}),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        assert "ttft-slo" in caught.value.message.replace("_", "-") and words in caught.value.message
        assert caught.value.param == "ttft_slo" and "\n" not in caught.value.message and len(caught.value.message) < 120


@pytest.mark.parametrize("given", [True, [1], {"s": 1}, -1, 0, float("nan"), float("inf"), 10**400])
def test_a_limit_of_another_type_or_size_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="tpot_slo"):
        config_from_options("demo", {"tpot_slo": given})


def test_flags_win_over_the_file_and_none_is_no_limit(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("tpot_slo: 40ms\nttft-slo: 1\nserver-timing: true\nsteal-decodes: off\n")
    arguments = parsed("--config", str(file), "--tpot-slo", "20ms", "--steal-decodes")
    settings = read_settings(arguments)
    config = settings.engine()
    assert (config.scheduler.tpot_slo, config.scheduler.ttft_slo, config.cluster.steal_decodes) == (0.02, 1.0, True)
    assert settings.server().server_timing and not ServerConfig().server_timing
    assert (configured().scheduler.tpot_slo, configured().scheduler.ttft_slo) == (None, None)


def test_an_unknown_router_is_refused_from_wherever_it_comes(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("router: nearest\n")
    for make in (lambda: configured("--config", str(file)), lambda: config_from_options("demo", {"router": 1})):
        with pytest.raises(ConfigError, match=r"^router .*must be least-loaded, affinity"):
            make()


@pytest.mark.parametrize(
    ("flags", "keywords"),
    [
        ("with --quantization int4 (weights 6.2 GiB) or", 'with quantization="int4" (weights 6.2 GiB) or'),
        ("lower --max-model-len to 19120, --token-budget or", "lower max_model_len to 19120, token_budget or"),
        ("give at least --kv-cache-gib 0.219.", "give at least kv_cache_gib=0.219."),
        ("give --no-deterministic to run", "give deterministic=False to run"),
        ("ORG/NAME --download from the hub", "ORG/NAME download=True from the hub"),
        ("`hydra-engine serve ORG/NAME --download`", "`hydra-engine serve ORG/NAME --download`"),
        ("into --memory 8: --port 80", "into --memory 8: --port 80"),  # no keywords of `Engine`
    ],
)
def test_an_engine_in_python_names_keywords(flags: str, keywords: str) -> None:
    assert as_keywords(flags) == keywords
