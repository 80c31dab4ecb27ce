"""Results of the modes from records, the pictures, and one run from the command line to the document."""

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

from bench.serve import ablation, breakdown, budget, tail, trace
from bench.serve.harness import summary
from hydra_engine.core.outputs import StageSpan
from hydra_planner.records import Record
from hydra_planner.slo import Goodput, Limits
from hydra_terminal.load.loops import Run

ROOT = Path(__file__).parents[2]
LIMITS = Limits(0.5, 0.1)


def flow(kind: str, planned_s: float, first_s: float, gap_s: float, tokens: int, **rest: Any) -> Record:
    stamps = tuple(first_s + gap_s * index for index in range(tokens))
    return Record(0, kind, planned_s, planned_s, stamps[-1], tokens, stamps, (1,) * tokens, prompt_tokens=10, **rest)


def served(e2e_s: float, *spans: StageSpan) -> dict[str, Any]:
    """The server's metrics as they come out of JSON."""
    return {"e2e_s": e2e_s, "ttft_s": 0.6, "timeline": json.loads(msgspec.json.encode(spans))}


TIMELINE = (
    StageSpan("preprocess", 0.0, 0.1),
    StageSpan("encode", 0.1, 0.4, "EPD0", "vision", batch=1),
    StageSpan("prefill", 0.4, 0.6, "EPD0", "language", batch=1),
    StageSpan("decode", 0.6, 1.0, "EPD0", "language", batch=1),
)


def test_a_point_sums_its_requests_up() -> None:
    records = [flow("text", 0.0, 0.2, 0.05, 5), flow("text", 1.0, 1.8, 0.05, 5, cached_tokens=4)]
    figures = summary(records, LIMITS)
    assert (figures["attainment"], figures["ttft_met"], figures["tpot_met"]) == (0.5, 0.5, 1.0)
    assert figures["ttft_ms"]["p50"] == pytest.approx(500) and figures["gap_ms"]["p99"] == pytest.approx(50)
    assert figures["tokens_per_s"] == pytest.approx(5, rel=0.01) and figures["cached_share"] == 0.2


def test_a_short_load_is_not_taken_for_a_slow_server() -> None:
    """Requests come and go at 48 a second, each served in three."""
    records = [flow("textcaps", number / 48, number / 48 + 0.04, 3 / 128, 128) for number in range(48 * 7)]
    figures = summary(records, LIMITS)
    assert figures["requests_per_s"] < 34 and figures["steady_requests_per_s"] == pytest.approx(48, rel=0.02)
    assert summary(records[: 48 * 3], LIMITS)["steady_requests_per_s"] is None, "none ended while others arrived"


def test_the_breakdown_adds_up_to_the_servers_latency() -> None:
    record = flow("pope", 0.0, 0.65, 0.1, 5, metrics=served(1.0, *TIMELINE))
    result = breakdown._result([record])
    phases = {name: figures["mean_ms"] for name, figures in result["phases"].items()}
    assert sum(phases.values()) == pytest.approx(result["latency_ms"]["mean"]) == pytest.approx(1000)
    assert (phases["encode"], phases["prefill"], phases["decode"]) == (300, 200, 400)
    assert result["unexplained"]["max"] == 0 and result["outside_ms"]["mean"] == pytest.approx(50)


def test_what_no_span_explains_is_said() -> None:
    result = breakdown._result([flow("pope", 0.0, 0.65, 0.1, 5, metrics=served(2.0, *TIMELINE))])
    assert result["unexplained"]["mean"] == pytest.approx(0.5)


def test_the_tail_counts_gaps_only_while_pictures_are_served() -> None:
    alone = [flow("stream", 0.0, 0.125, 0.125, 21), flow("stream", 0.0, 0.5625, 0.125, 21)]
    assert len(tail._stream_gaps(alone)) == 17 + 20  # of the first stream only from when both had begun
    beside = [*alone, flow("burst", 1.0, 1.25, 0.125, 3)]
    assert len(tail._stream_gaps(beside)) == 4 + 5  # from 1.0 to 1.5 and those that reach into it
    result = tail._result({"alone": [0.01] * 100, "with_pictures": [0.01] * 90 + [0.03] * 10}, [0.5])
    assert result["ratio_p99"] == pytest.approx(3) and result["picture_ttft_ms"]["p50"] == 500


class _Fixed:
    limits = LIMITS


def test_the_budget_counts_steps_of_the_server_and_gaps_of_the_client() -> None:
    def page(steps: int, late: int, used: float) -> str:
        return f"hydra:decode_steps_total {steps}\nhydra:late_steps_total {late}\nhydra:limit_used_ratio {used}\n"

    pages = ((0.0, page(100, 5, 0.0)), (1.0, page(200, 6, 0.9)), (2.0, page(300, 7, 1.0)))
    records = (flow("textvqa", 0.0, 0.1, 0.05, 10), flow("textvqa", 0.0, 0.1, 0.15, 2))
    result = budget._result(_Fixed(), [Run(records, 2.0, 0.1, True, pages)])  # type: ignore[arg-type]
    assert (result["decode_steps"], result["late_steps"], result["late_share"]) == (200, 2, 0.01)
    assert result["limit_used"] == pytest.approx(0.95)
    assert result["gaps"] == 10 and result["late_gap_share"] == 0.1 and result["requests_per_s"] == 1.0
    assert result["late_gap_share_says_server"] is None
    told = [flow("textvqa", 0.0, 0.1, 0.05, 10, metrics={"slo": {"met": True, "late_gaps": 1, "num_gaps": 9}})]
    ours = budget._result(_Fixed(), [Run(tuple(told), 2.0, 0.1, True)])  # type: ignore[arg-type]
    assert ours["late_gap_share_says_server"] == pytest.approx(1 / 9, abs=1e-5)
    assert summary(told, LIMITS)["met_says_server"] == 1.0 and summary(records, LIMITS)["met_says_server"] is None
    peer = budget._result(_Fixed(), [Run(records, 2.0, 0.1, True)])  # type: ignore[arg-type]
    assert peer["decode_steps"] is None and peer["late_share"] is None and peer["limit_used"] is None


@pytest.mark.slow
def test_a_trace_places_requests_by_their_first_token(tmp_path: Path) -> None:
    records = [
        flow("pope", planned_s, planned_s + 0.62, 0.1, 5, metrics=served(1.0, *TIMELINE)) for planned_s in (0, 2)
    ]
    picture = trace.write(records, tmp_path / "trace.json", "two requests")
    assert picture is not None
    with Image.open(picture) as opened:
        assert opened.width > 500
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    encodes = {event["ts"] for event in events if event.get("name") == "encode"}
    assert sorted(round(ts) for ts in encodes) == [100_000, 2_100_000]
    assert trace.write([flow("pope", 0, 1, 0.1, 2)], tmp_path / "none.json", "") is None


def document() -> dict[str, Any]:
    """A document with every mode, as a run writes it."""
    record = flow("pope", 0.0, 0.65, 0.1, 5, metrics=served(1.0, *TIMELINE))
    point = {"rate": 1.0, **summary([record], Limits(1, 1))}
    curve = {"points": [point, {**point, "rate": 2.0, "attainment": 0.5}], "goodput": asdict(Goodput(1.2, "exact"))}
    switch = {"flags": "", "goodput": 2.0, "rounds": [asdict(Goodput(2.0, "exact"))], "ratio": 1.0, "points": []}
    streams = tail._result({"alone": [0.01, 0.02], "with_pictures": [0.01, 0.03]}, [0.5])
    steps = budget._result(_Fixed(), [Run((record,), 2.0, 0.1, True)])  # type: ignore[arg-type]
    return {
        "model": "demo",
        "limits": {"ttft_ms": 500.0, "tpot_ms": 100.0},
        "load": {"workload": "mixed", "text_share": 0.25, "scale": 1.0, "arrivals": "poisson", "seed": 0}
        | {"requests": 1, "rounds": 1},
        "tail": {"streams": 1, "stream_tokens": 3, "burst": 1, "burst_every_s": 1.0},
        "budget": {"concurrency": 2, "seconds": 2.0},
        "results": {
            "curve": {"servers": {"ours": curve, "theirs": curve}},
            "breakdown": {"rate": 1.0, "servers": {"ours": breakdown._result([record])}},
            "tail": {"servers": {"ours": streams}},
            "budget": {"servers": {"ours": steps}},
            "ablation": {"switches": dict.fromkeys((ablation.EVERYTHING, "lanes", ablation.AGAIN), switch)},
        },
        "card": {"cpu": "a processor", "cores": 2, "isa": "amx", "torch": "2", "commit": "abc"},
    }


@pytest.mark.slow
def test_every_mode_has_a_picture(tmp_path: Path) -> None:
    drawing = pytest.importorskip("bench.serve.drawing", reason="needs matplotlib", exc_type=ImportError)
    written = drawing.draw(json.loads(json.dumps(document())), tmp_path / "new")
    assert [path.name for path in written] == [f"serve-{mode}.png" for mode in document()["results"]]
    for path in written:
        with Image.open(path) as picture:
            assert picture.width > 500 and len(picture.convert("RGB").getcolors(1 << 24) or ()) > 20


@pytest.mark.slow
def test_a_run_from_the_command_line_ends_in_one_document(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.serve", "--quick", "--rates", "20", "--load-seconds", "0.25"]
    command += ["--alone", "2", "--bisect", "0"]
    command += ["--ttft-slo", "20s", "--tpot-slo", "10s", "--server-args", "--threads 1", "--no-server-limits"]
    command += ["--output", str(tmp_path / "out.json"), "--pictures", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last == json.loads((tmp_path / "out.json").read_text())
    server = last["results"]["curve"]["servers"]["hydra-engine"]
    (point,) = server["points"]
    assert (server["alone"]["requests"], server["alone"]["errors"], last["runs"][0]["concurrency"]) == (2, 0, 1)
    assert (point["requests"], point["attainment"], point["errors"]) == (5, 1.0, 0)
    records = last["runs"][0]["records"]
    assert all(sum(record["counts"]) == record["wanted_tokens"] for record in records)
    assert (tmp_path / "serve-curve.png").exists()
