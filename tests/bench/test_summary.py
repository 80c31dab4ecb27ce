"""Documents of micro-benchmarks in, tables and ratios out; which goal a row has and whether it is met."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from bench.micro.goals import BENCHES, GOALS, Goal, goal_of
from bench.summary.table import document_of, read, table, write

ROOT = Path(__file__).parents[2]
MICRO = ROOT / "bench" / "micro"


def row(what: str, seconds: float, floor_s: float | None = None, **more: Any) -> dict[str, Any]:
    found = {"what": what, "seconds": {"median": seconds, "p5": seconds, "p95": seconds}, "floor_s": floor_s}
    return found | {"of_floor": None if floor_s is None else floor_s / seconds, "over_peers": {}} | more


def document(bench: str, *rows: dict[str, Any], device: str = "cuda:0", **more: Any) -> dict[str, Any]:
    card = {"cpu": "a processor", "cores": 2, "torch": "2.11.0", "python": "3.12", "commit": "abc", "device": device}
    found = {"bench": bench, "suite": "micro", "mode": "quick", "rows": list(rows), "skipped": [], "card": card}
    return found | {"ceilings": {"read_bytes_per_s": 4.5e12, "gemm_flops_per_s": 7.9e14}} | more


def put(folder: Path, name: str, made: dict[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps(made))


DECODE = document(
    "decode",
    row(
        "llava-1.5-7b decode graph B=1 KV=1024",
        3.3e-3,
        3.1e-3,
        sustained_floor_s=3.2e-3,
        over_peers={"transformers": 3.7},
    ),
    row("llava-1.5-7b decode graph B=64 KV=1024", 12.4e-3, 11e-3),
    row("llava-1.5-7b decode graph B=128 KV=1024", 30e-3, 18e-3),
    row("llava-1.5-7b decode eager B=1 KV=1024", 9e-3, 3.1e-3),
)
SCHED = document("sched", row("256 running, 64 waiting", 90e-6, us=90.0), device="cpu", ceilings=None)


def test_rows_are_held_against_their_goals() -> None:
    rows = document_of("decode", DECODE).rows
    assert [r.verdict for r in rows] == ["moonshot", "par", "below par", ""]
    assert rows[0].goal is not None and (rows[0].goal.par, rows[0].goal.moonshot) == (0.85, 0.93)
    assert rows[3].goal is None, "nothing is asked of steps without graphs"
    (sched,) = document_of("sched", SCHED).rows
    assert (sched.verdict, sched.value) == ("moonshot", 90.0)


def test_less_may_be_better() -> None:
    goal = Goal("sched", "", "us", 300.0, 100.0)
    assert goal.less_is_better and goal.met(299.0, goal.par) and not goal.met(301.0, goal.par)
    assert goal.share(100.0) == 1.0 and goal.share(50.0) == 2.0 and goal.share(goal.par) == pytest.approx(1 / 3)
    goal = Goal("decode", "", "of_floor", 0.85, 0.93)
    assert not goal.less_is_better and goal.met(0.93, goal.moonshot) and goal.share(0.93) == 1.0


def test_goals_of_a_gpu_are_not_asked_of_a_processor() -> None:
    step = DECODE["rows"][0]
    assert goal_of("decode", step, "cpu") is None and goal_of("decode", step, "cuda:0") is not None
    assert goal_of("nothing", step, "cuda:0") is None
    assert goal_of("sched", row("256 running, 64 waiting", 1.0), "cpu") is None, "a row without the figure"


@pytest.mark.parametrize(
    ("bench", "what", "goal"),
    [
        ("encode", "llava-1.5-7b encode b=1", 1 / 1.35),
        ("encode", "llava-1.5-7b encode b=8", 1 / 1.13),
        ("encode", "qwen2-vl-7b encode b=1", 1 / 1.2),
        ("encode", "qwen2.5-vl-7b encode b=16", 1 / 1.12),
        ("prefill", "qwen2.5-vl-7b prefill b=1 S=1024", 0.97),
        ("prefill", "qwen2.5-vl-7b prefill b=1 S=1024 graph, 0.5 s of rest", 0.88),
        ("decode", "qwen2-vl-7b decode graph B=512 KV=1024", 1.15),
        ("decode", "llava-1.5-7b decode graph B=128 KV=1024", 0.90),
        ("migrate", "copy llava-1.5-7b KV, 43 blocks", 0.9),
        ("cpu_decode", "0.5b B=1 KV=1024", 0.9),
    ],
)
def test_the_goals_of_the_stages(bench: str, what: str, goal: float) -> None:
    found = goal_of(bench, row(what, 1.0, 0.5, of_sustained_floor=0.6), "cuda:0")
    assert found is not None and found.moonshot == pytest.approx(goal)


def test_every_goal_is_of_a_benchmark_and_every_benchmark_is_there() -> None:
    assert {goal.bench for goal in GOALS} <= set(BENCHES) and all(goal.par != goal.moonshot for goal in GOALS)
    assert len(set(BENCHES)) == len(BENCHES)
    assert all((MICRO / f"{name}.py").exists() for name in BENCHES)


def test_the_table_has_every_row_with_its_ratio() -> None:
    text = table([document_of("decode", DECODE), document_of("sched", SCHED)], ["build: failed"])
    assert "5 rows, 4 of them with a goal: 2 moonshot, 1 par, 1 below par." in text
    assert "- build: failed" in text
    assert (
        "| llava-1.5-7b decode graph B=1 KV=1024 | 3.3 ms | 3.1 ms | 0.94 | 3.2 ms | 0.97 | ≥ 0.85, 0.93 | 0.939 "
        "| moonshot | transformers 3.70 |" in text
    )
    assert "| 256 running, 64 waiting | 90 us |  |  |  |  | ≤ 300, 100 us | 90 us | moonshot |  |" in text
    assert "matrix products 790 TFLOP/s, read 4.5e+03 GB/s." in text
    assert text.count("| what | time |") == 2


def test_what_runs_beside_decodes_is_headed_by_its_steady_state_gain() -> None:
    what = "m encode b=2 || decode B=8, beside, 64 SMs for decodes"
    both = {"gain": 1.307, "decode_slowdown": 1.406, "first_slowdown": 1.681}
    rows = [row(what, 7e-3, 4e-3, gain_best=1.83, share_of_best=0.52, **both), row(what[:-22], 6e-3, **both)]
    found = document_of("colocate", document("colocate", *rows, row("m, pair, 64 SMs for decodes", 1.0, gain=2.0)))
    text = table([found])
    assert "| m encode b=2 // decode B=8, beside, 64 SMs for decodes | 1.31 | 1.83 | 1.41 | 1.68 |" in text
    assert text.index("steady-state gain") < text.index("| what |") and "| 2.00 |" not in text
    assert [r.verdict for r in found.rows] == ["par", "", ""], "older documents do not say what is possible"
    older = table([document_of("colocate", document("colocate", row(what, 7e-3, **both)))])
    assert "| 1.31 |  | 1.41 | 1.68 |" in older


def test_rates_and_how_far_repetitions_are_apart_are_shown() -> None:
    reads = document("ring", row("read on 48 of 132 SMs", 7e-4, gb_per_s=2880.0, gb_per_s_sm=60.0), ceilings=None)
    again = row("m decode graph B=1 KV=1024", 4.4e-3, 3.1e-3, spread=0.11, repeats_s=[4.2e-3, 4.4e-3, 4.69e-3])
    text = table([document_of("ring", reads), document_of("decode", document("decode", again))])
    assert "| 2880 GB/s, 60.0 of each |" in text
    assert "| m decode graph B=1 KV=1024, 3 times, 11.0% apart | 4.4 ms |" in text


def test_what_was_skipped_is_said() -> None:
    made = document("decode", skipped=[{"what": "B=512", "reason": "137 GB of KV do not fit"}])
    assert "Skipped: B=512: 137 GB of KV do not fit" in table([document_of("decode", made)])


def test_a_folder_is_read_in_the_order_of_the_suite_and_other_files_are_named(tmp_path: Path) -> None:
    put(tmp_path, "quick-sched", SCHED)
    put(tmp_path, "quick-decode", DECODE)
    put(tmp_path, "check", {"parts": []})
    (tmp_path / "cut.json").write_text('{"suite": "micro", "rows"')
    put(tmp_path, "half", {"suite": "micro", "bench": "decode"})
    documents, problems = read(tmp_path)
    assert [d.name for d in documents] == ["quick-decode", "quick-sched"]
    assert [problem.split(" ")[0] for problem in problems] == ["cut.json", "half.json"]


@pytest.mark.slow
def test_the_command_writes_table_and_picture(tmp_path: Path) -> None:
    put(tmp_path, "decode", DECODE)
    done = subprocess.run(
        [sys.executable, "-m", "bench.summary", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "B=128" in (tmp_path / "summary.md").read_text()
    pytest.importorskip("matplotlib")
    assert done.stdout.split() == [str(tmp_path / "summary.md"), str(tmp_path / "summary.png")]
    with Image.open(tmp_path / "summary.png") as picture:
        assert picture.width > 500 and len(picture.convert("RGB").getcolors(1 << 24) or ()) > 20


@pytest.mark.slow
def test_a_picture_takes_the_worst_of_too_many_rows(tmp_path: Path) -> None:
    drawing = pytest.importorskip("bench.summary.drawing", reason="needs matplotlib", exc_type=ImportError)
    rows = [row(f"m decode graph B={n} KV=1", 1.0, 0.5 + n / 1000) for n in range(2, 202)]
    found = document_of("decode", document("decode", *rows)).rows
    kept = drawing._worst(found)
    assert len(kept) < len(found) and kept == list(found[: len(kept)])


def test_nothing_at_all_is_a_summary_too(tmp_path: Path) -> None:
    assert write(tmp_path, ["tests-gpu: failed"]) == [tmp_path / "summary.md"]
    assert "- tests-gpu: failed" in (tmp_path / "summary.md").read_text()


@pytest.mark.slow
def test_a_small_suite_from_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.micro", "--dir", str(tmp_path), "--only", "sched"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("1 of 1 benchmarks, ")
    made = json.loads((tmp_path / "sched.json").read_text())
    assert made["bench"] == "sched" and made["mode"] == "quick" and len(made["rows"]) >= 4
    assert all(r["us"] == pytest.approx(r["seconds"]["median"] * 1e6) for r in made["rows"])
    assert any(r["output"] for r in (each["inputs"] for each in made["rows"])), "also where requests end"
    assert "256 running, 64 waiting" in (tmp_path / "summary.md").read_text()


def test_kernels_of_a_profile_are_a_table_of_their_own() -> None:
    kernels = [{"name": f"kernel<{n}|{n}>", "count": 64.0, "us": 100.0 - n, "share": 0.5} for n in range(20)]
    more = {"kernels": kernels, "launches": 330.0, "kernels_s": 0.0034, "gap_us": {"median": 1.25, "p95": 2.0}}
    text = table([document_of("profile", document("profile", row("decode B=1", 0.0037, **more)))])
    assert "decode B=1: 330 launches, 3.4 ms of 3.7 ms, gaps 1.25 us in the middle" in text
    assert "| 64 | 100.0 | 50.0% | `kernel<0/0>` |" in text and "kernel<15" not in text
