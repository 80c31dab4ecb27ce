"""The command line of bench.serve, and the folder as a benchmark of the command line's `bench`."""

from __future__ import annotations

import pytest

from bench.serve.options import MODES, Settings, seconds, settings_from
from hydra_planner.slo import Limits
from hydra_terminal.bench import _benchmarks


def settings(*arguments: str) -> Settings:
    return settings_from(arguments, None)


def test_without_arguments_it_serves_the_demo_model() -> None:
    found = settings()
    assert found.modes == ("curve",) and found.model == "demo" and found.limits is None
    assert [server.name for server in found.servers] == ["hydra-engine"]
    assert found.servers[0].command[-4:] == ("serve", "demo", "--port", "0")
    assert settings("all").modes == tuple(MODES)


def test_quick_only_changes_what_was_not_given() -> None:
    quick, both = settings("--quick"), settings("--quick", "--requests", "7")
    assert quick.requests < settings().requests and both.requests == 7 and both.seconds == quick.seconds


def test_servers_of_all_kinds_get_the_same_load() -> None:
    found = settings(
        *("--config", "slow=--max-num-seqs 1", "--baseline", "unsliced"),
        *("--peer", "other=http://h:1", "--command", "own=python -m x --model d"),
    ).servers
    assert [server.name for server in found] == ["hydra-engine", "slow", "unsliced", "own", "other"]
    assert found[1].command[-2:] == ("--max-num-seqs", "1") and found[1].takes_limits
    assert found[2].command[1:5] == ("-m", "bench.baselines", "unsliced", "demo") and found[2].takes_limits
    assert found[3].command[1:] == ("-m", "x", "--model", "d") and not found[3].takes_limits
    assert found[4].base_url == "http://h:1"
    assert settings("--base-url", "http://h:2").servers[0].command == ()


def test_limits_are_given_taken_from_the_paper_or_measured() -> None:
    assert settings("--ttft-slo", "1s", "--tpot-slo", "40ms").limits == Limits(1.0, 0.04)
    paper = settings("--limits", "llava-1.5-7b", "--workload", "textcaps").limits
    assert paper is not None and (paper.ttft_s, paper.tpot_limit_s) == (0.25, 0.04)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--workload", "nothing"),
        ("--ttft-slo", "1s"),
        ("--tpot-slo", "-1", "--ttft-slo", "1"),
        ("--limits", "llava-1.5-7b"),
        ("--limits", "llava-1.5-7b", "--workload", "epd-4"),
        ("--arrivals", "sometimes"),
        ("--config", "nameless"),
        ("--config", "hydra-engine=--no-look-ahead"),
        ("--text-share", "2"),
        ("nonsense",),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        settings(*arguments)
    assert ended.value.code == 2 and "error" in capsys.readouterr().err


def test_times_have_units() -> None:
    assert (seconds("40ms"), seconds("1.5s"), seconds("2")) == (0.04, 1.5, 2.0)


def test_a_folder_counts_as_one_benchmark() -> None:
    found = _benchmarks()
    assert found["goodput"].parts[-2:] == ("serve", "__main__.py") and "serve" not in found
    assert found["throughput"].name == "throughput.py"
    assert "ops.linear" in found and not any(name.startswith("serve.") for name in found)
