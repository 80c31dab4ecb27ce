"""Real topologies from the command line, what is said of their timelines, and one request seen moving."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from bench.topology.__main__ import parser, site_of
from bench.topology.figures import exposed_s
from bench.topology.loads import calls, rows
from bench.topology.timeline import early
from hydra_engine.config import EngineConfig
from hydra_engine.core.outputs import StageSpan
from hydra_engine.models.specs.registry import load_spec
from hydra_planner.simulator.costs import read_costs
from hydra_planner.simulator.requests import RequestMaker
from hydra_terminal.load.workload import Workload
from tests.planner.sites import SURFACE

ROOT = Path(__file__).parents[2]


def test_the_real_engine_gets_the_requests_that_are_simulated() -> None:
    config = EngineConfig()
    spec = load_spec(config.model_path, config.spec_options)
    load = rows(Workload(("textcaps", "pope"), text_share=0.25, scale=0.25), [0.1 * index for index in range(12)])
    for number, (row, call) in enumerate(zip(load, calls(load, RequestMaker(spec)), strict=True), start=1):
        request, _ = RequestMaker(spec).request(row, number, 0.0)
        assert call.sampling.max_tokens == row.output_tokens == request.max_new_tokens
        assert len(call.images or ()) == len(row.pictures) == call.prompt.count(spec.placeholder_id or -1)
        count = row.prompt_tokens - 4  # without the beginning, which is before the pictures
        words = request.prompt_token_ids[-count:]
        assert tuple(call.prompt[-count:]) == words and spec.placeholder_id not in words
    assert {bool(row.pictures) for row in load} == {True, False}
    assert calls(load, RequestMaker(spec, 1))[0].prompt != calls(load, RequestMaker(spec))[0].prompt


def test_moving_is_exposed_while_nothing_else_of_the_request_runs() -> None:
    spans = (
        StageSpan("encode", 0.0, 1.0), StageSpan("offered", 1.0, 1.5), StageSpan("pull_features", 1.25, 1.5),
        StageSpan("prefill", 1.5, 3.0), StageSpan("pull_kv", 2.0, 3.25), StageSpan("decode", 4.0, 5.0),
    )  # fmt: skip
    assert exposed_s(spans) == 0.75  # between encode and prefill, and what the copy needs behind the prefill


def test_early_copies_are_those_that_began_before_what_they_copy_was_complete() -> None:
    spans = (
        StageSpan("encode", 0.0, 1.0), StageSpan("pull_features", 1.1, 1.2), StageSpan("encode", 1.0, 2.0),
        StageSpan("pull_features", 2.1, 2.2), StageSpan("prefill", 2.0, 3.0), StageSpan("pull_kv", 3.1, 3.2),
    )  # fmt: skip
    found = early(spans)
    assert found["pull_features"] == {"early": 1, "all": 2, "ms": 200.0}
    assert (found["pull_kv"]["early"], found["pull_kv"]["all"]) == (0, 1)


# ---- from the command line


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of a made-up machine, in the form that `hydra-engine profile --output` writes."""
    identity = {"model": "m", "device": "cpu", "processor": "made up", "cores": 2, "threads": 2, "dtype": "bfloat16"}
    identity |= {"lane_priority": "balanced", "backend": "b", "deterministic": True, "sliced": True, "block_size": 16}
    body = {
        "identity": {**identity, "engine": "0"},
        "reach": {"rows": 512, "decodes": 64, "patches": 512},
        "surface": asdict(SURFACE),
        "samples": {"language": [], "vision": [], "corun": []},
        **{"submit_s": 1e-5, "collect_s": 1e-5, "num_points": 1, "num_left": 0, "seconds": 1.0},
        "measured_at": "2026-01-01T00:00:00Z",
    }
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    path.write_bytes(msgspec.json.encode({"digest": "", "profile": body}))
    assert read_costs(path).surface == SURFACE
    return path


def test_the_engine_runs_in_the_dtype_that_was_profiled(profile: Path) -> None:
    for mode, dtype in (("validate", "bfloat16"), ("real", "bfloat16"), ("timeline", "auto")):
        options = parser().parse_args([mode, "--profile", str(profile)])
        assert site_of(options).config.dtype == dtype


def command(mode: str, tmp_path: Path, *flags: str) -> dict[str, Any]:
    """Runs bench.topology; returns the JSON document that is all of its standard output."""
    words = [sys.executable, "-m", "bench.topology", mode, "--quick", "--pictures", str(tmp_path), *flags]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    assert (document["bench"], document["mode"]) == ("topology", mode)
    for path in tmp_path.glob("*.png"):
        with Image.open(path) as picture:
            assert picture.width > 500
    return document


@pytest.mark.slow
def test_real_measures_and_predicts_the_same_requests(tmp_path: Path, profile: Path) -> None:
    pytest.importorskip("matplotlib")
    flags = ("--topologies", "EPD,E+P+D", "--requests", "4", "--rate", "10", "--threads", "1")
    document = command("real", tmp_path, "--profile", str(profile), *flags)
    assert (tmp_path / "topology-phases.png").exists()
    alone, apart = document["result"]["topologies"]
    assert alone["moved_bytes"] == 0 < apart["moved_bytes"]
    for row in (alone, apart):
        assert row["errors"] == 0
        assert all(row[side][name] > 0 for side in ("measured", "simulated") for name in ("ttft_ms", "tpot_ms"))
        assert row["error"]["ttft_ms"] == pytest.approx(
            row["simulated"]["ttft_ms"] / row["measured"]["ttft_ms"] - 1, abs=1e-3
        )
    assert alone["measured"]["breakdown"]["exposed_share"] == 0


@pytest.mark.slow
def test_the_validation_that_is_kept_can_be_drawn_again(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from bench.topology import drawing

    kept = ROOT / "bench" / "results" / "topology-validate.json"
    (path,) = drawing.draw(json.loads(kept.read_text(encoding="utf-8")), tmp_path)
    with Image.open(path) as picture:
        assert picture.width > 500


@pytest.mark.slow
def test_timeline_shows_two_pictures_on_their_way(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    document = command("timeline", tmp_path, "--threads", "1", "--tokens", "4")
    assert (tmp_path / "topology-timeline.png").exists()
    stages = {span["stage"] for span in document["result"]["spans"]}
    assert {"encode", "pull_features", "prefill", "pull_kv", "decode"} <= stages
    assert document["result"]["early"]["pull_features"]["all"] == 2
